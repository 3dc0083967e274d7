"""Dead units: inner features that are zero, or nearly zero, at every token.

Units are the output features of a nonlinear pointwise node that satisfies two conditions: it reads the outputs of
matrix products, and a matrix product with weights reads its output. Examples are the activations of an MLP and of
experts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ops.experts.dispatch import GroupedLinear, OfExperts
from specc.compiler.ops.linear import Product
from specc.compiler.ops.pointwise import Pointwise
from specc.runtime.calibration.hessian import rows_of_experts

WEAK = 0.01  # a unit is weak if its largest magnitude is at most this fraction of the median; see `Units.weak`


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a layer, or of one expert.

    Attributes:
        layer: the name of the activation node. The name for one expert ends with the index of the expert, as in
            `blocks.0.moe.act[3]`.
        units: the number of units.
        tokens: the number of tokens that reached the units.
        dead: the number of units that are zero at every token.
        weak: the number of units whose largest magnitude over all tokens is at most 1 % of the median of these
            magnitudes over all units. The number includes the dead units.
        active: the mean fraction of tokens at which a unit is not zero.
    """

    layer: str
    units: int
    tokens: int
    dead: int
    weak: int
    active: float


class UnitActivity:
    """Accumulates the activity of the units of a program.

    `reference.run` runs the program node by node. After each node, it calls the method `observe`.

    Args:
        graph: the program, with all functions inlined.
    """

    def __init__(self, graph: Graph) -> None:
        # Maps a matrix product to the activation that it reads. Only the first product that reads an activation is
        # included.
        self._read_by: dict[str, str] = {}
        by_name = {node.name: node for node in graph.nodes}
        for node in graph.nodes:
            source = node.inputs[0] if is_product(node) else ""
            if source not in by_name or source in self._read_by.values():
                continue
            activation = by_name[source]
            if _of_products(activation, by_name) and _bends(activation, by_name):
                self._read_by[node.name] = source
        self._largest: dict[str, Tensor] = {}
        self._nonzero: dict[str, Tensor] = {}
        self._tokens: dict[str, Tensor] = {}

    def observe(self, node: Node, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Adds the values of the units, if the node is the matrix product that reads the values of a layer of units."""
        layer = self._read_by.get(node.name)
        if layer is None:
            return
        rows = inputs[0].detach().flatten(0, -2).abs()
        parts = rows_of_experts(rows, inputs[2]) if isinstance(node.op, GroupedLinear) else (rows,)
        empty = rows.new_zeros(rows.shape[1])
        largest = torch.stack([part.amax(0) if len(part) else empty for part in parts]).double().cpu()
        nonzero = torch.stack([part.ne(0).sum(0) for part in parts]).double().cpu()
        tokens = torch.tensor([len(part) for part in parts])
        if layer not in self._largest:
            self._largest[layer], self._nonzero[layer], self._tokens[layer] = largest, nonzero, tokens
            return
        self._largest[layer] = torch.maximum(self._largest[layer], largest)
        self._nonzero[layer] += nonzero
        self._tokens[layer] += tokens

    def layers(self) -> Iterator[Units]:
        """Yields the units of each layer in the order of the program. Each expert of a layer is a separate result."""
        for layer, all_largest in self._largest.items():
            several = len(all_largest) > 1
            rows = zip(all_largest, self._nonzero[layer], self._tokens[layer].tolist(), strict=True)
            for i, (largest, nonzero, tokens) in enumerate(rows):
                weak = largest <= WEAK * largest.median()
                yield Units(
                    layer=f"{layer}[{i}]" if several else layer,
                    units=len(largest),
                    tokens=tokens,
                    dead=int((largest == 0).sum()) if tokens else 0,
                    weak=int(weak.sum()) if tokens else 0,
                    active=float(nonzero.mean()) / tokens if tokens else 0.0,
                )


def is_product(node: Node) -> bool:
    return isinstance(node.op, Product | GroupedLinear)


def _bends(node: Node, by_name: dict[str, Node]) -> bool:
    if not isinstance(node.op, Pointwise):
        return False
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(4, len(node.inputs), 64, generator=generator, dtype=torch.float64)
    points[3] = points[0] - points[1] + points[2]
    first, second, third, fourth = (_first(node.op.reference(*point)) for point in points)
    if not torch.allclose(first - second + third, fourth, rtol=1e-9, atol=1e-9):
        return True
    return any(_bends(by_name[ref], by_name) for ref in node.inputs if ref in by_name)


def _first(value: Tensor | tuple[Tensor, ...]) -> Tensor:
    return value if isinstance(value, Tensor) else value[0]


def _of_products(node: Node, by_name: dict[str, Node]) -> bool:
    if not isinstance(node.op, Pointwise):
        return False
    read = [ref for ref in node.inputs if ref[0] not in "@$"]
    nodes = [by_name.get(ref.partition(":")[0]) for ref in read]
    # Ignore the biases of experts
    nodes = [other for other in nodes if other is None or not isinstance(other.op, OfExperts)]
    return bool(nodes) and all(
        other is not None and (is_product(other) or _of_products(other, by_name)) for other in nodes
    )
