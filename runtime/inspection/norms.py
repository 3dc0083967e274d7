"""The growth of the residual stream: its size before and after each block.

Nodes of the program whose names begin with the same index, such as `blocks.3`, form a block if one of these nodes is a
matrix product with weights. The stream after a block is a value of the block. It is the last value that has the width
of the model and that a node outside the block reads.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from specc.compiler.ir.graph import Graph, Node
from specc.runtime.inspection.units import is_product

_BLOCK = re.compile(r"((?:[^.]+\.)*?\d+(?:\.again\d+)?)\.")  # a repeated block has a separate name for each repetition


@dataclass(frozen=True, slots=True)
class BlockNorm:
    """The size of the residual stream before and after a block.

    Attributes:
        block: the name of the block.
        before: the root mean square of the stream before the block. None if the block does not read a stream of the
            same shape as its output.
        after: the root mean square of the stream after the block.
        change: the norm of the difference between the streams after and before the block, relative to the norm of the
            stream before the block. None if `before` is None.
    """

    block: str
    before: float | None
    after: float
    change: float | None

    @property
    def growth(self) -> float | None:
        """The factor by which the block changes the size of the stream; None if `before` is None."""
        return self.after / self.before if self.before else None


class ResidualNorms:
    """Accumulates the size of the residual stream at each block of a program.

    `reference.run` runs the program node by node. After each node, it calls the method `observe`.

    Args:
        graph: the program, with all functions inlined.

    Attributes:
        refused: the reason for each block that cannot be measured, by block.
    """

    def __init__(self, graph: Graph) -> None:
        self._stream: dict[str, str] = {}  # the block, by the node whose output is the stream after the block
        self._before: dict[str, str] = {}  # maps each block to the name of the stream before the block
        self._values: dict[str, Tensor] = {}
        self.refused: dict[str, str] = {}
        # For each block, four numbers: the sums of squares of the stream before the block, of the stream after the
        # block, and of the change; and the number of values
        self._sums: dict[str, list[float]] = {}
        width = _width(graph)
        blocks: dict[str, list[Node]] = {}
        readers: dict[str, set[str]] = {}
        for node in graph.nodes:
            block = _block(node.name)
            blocks.setdefault(block, []).append(node)
            for ref in node.inputs:
                readers.setdefault(ref, set()).add(block)
        previous = ""
        for block, nodes in blocks.items():
            if not any(map(is_product, nodes)):
                continue
            inside = {node.name for node in nodes}
            ends = [
                node
                for node in nodes
                if block and node.type.shape[-1:] == (width,) and node.type.dtype != "i64"
                if readers.get(node.name, set()) - {block}
            ]
            if not ends:
                if block:
                    self.refused[block] = "its result is not a single residual stream with the width of the model"
                continue
            self._stream[ends[-1].name] = block
            reads = [
                ref
                for node in nodes
                for ref in node.inputs
                if ref[0] not in "@$" and ref not in inside and graph.types[ref].shape == ends[-1].type.shape
            ]
            before = previous if previous in reads else next(iter(reads), "")
            if before:
                self._before[block] = before
            previous = ends[-1].name
        self._inputs = frozenset(self._before.values())

    def observe(self, node: Node, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Adds the size of the stream, if the node computes the stream after a block."""
        value = outputs[0].detach()
        if node.name in self._inputs:
            self._values[node.name] = value
        block = self._stream.get(node.name)
        if block is None:
            return
        before = self._values.get(self._before.get(block, ""))
        sums = self._sums.setdefault(block, [0.0, 0.0, 0.0, 0.0])
        sums[1] += float(value.double().square().sum())
        sums[3] += value.numel()
        if before is not None:
            sums[0] += float(before.double().square().sum())
            sums[2] += float((value - before).double().square().sum())

    def blocks(self) -> Iterator[BlockNorm]:
        for block, (before, after, change, count) in self._sums.items():
            known = before > 0.0
            yield BlockNorm(
                block=block,
                before=(before / count) ** 0.5 if known else None,
                after=(after / count) ** 0.5,
                change=(change / before) ** 0.5 if known else None,
            )


def _block(name: str) -> str:
    match = _BLOCK.match(name)
    return match[1] if match else ""


def _width(graph: Graph) -> int | None:
    """Returns the width of the model, which is the most frequent width of the values that pass from block to block.

    Returns None if no value passes from block to block.
    """
    readers: dict[str, set[str]] = {}
    for node in graph.nodes:
        for ref in node.inputs:
            readers.setdefault(ref, set()).add(_block(node.name))
    counts: dict[int, int] = {}
    for node in graph.nodes:
        width = node.type.shape[-1] if node.type.shape else None
        if _block(node.name) and isinstance(width, int) and readers.get(node.name, set()) - {_block(node.name)}:
            counts[width] = counts.get(width, 0) + 1
    return max(counts, key=lambda width: (counts[width], width)) if counts else None
