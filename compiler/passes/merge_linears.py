"""Merges linear layers that read the same value into one matrix product.

The forward pass computes one product with the concatenated matrices. In the backward pass, one product of the
concatenated output gradients gives the gradient of the input, and another product gives the gradients of all matrices.
Each matrix remains a separate parameter.

Some gradients are written directly into the tensor of concatenated gradients: the gradients that Torch's compiler
computes, and the gradients of fused groups that `join_groups` can join. All other gradients are copied into this
tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specc.compiler.ir.graph import Graph, Node, output_refs, rename
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.region import Fused, Scan
from specc.compiler.ops.shape import ConcatRows, Moves, SplitFeatures
from specc.compiler.passes.join_groups import writer
from specc.compiler.passes.requests import Patterns, Requests, whole_sequences
from specc.compiler.programs.programs import Programs

ALIGNMENT = 8  # in features: 16 bytes of bf16, which kernels load at once


def merge_linears(programs: Programs, patterns: Patterns) -> Programs:
    """Returns the programs with merged layers. Only programs over whole sequences change.

    Layers in fused groups are not merged. Decoding programs are unchanged, because each step would have to concatenate
    the matrices. The matrices are most of the bytes that a step reads.

    Args:
        programs: The programs, with fused groups.
        patterns: The patterns of the layers to merge. `auto` merges all layers whose merged gradients move fewer bytes
            than separate gradients.

    Raises:
        LoweringError: If a pattern has no effect. The error lists the problems of all patterns.
    """
    requests = Requests(programs, "merge_linears", "merge", patterns)
    balance = _balance(programs) if patterns == "auto" else {}
    return requests.run(lambda graph: _merged(programs, graph, requests, balance))


@dataclass
class _Moved:
    """The memory traffic of a merged product relative to separate products, in numbers per token.

    Attributes:
        costs: The additional traffic, summed over all calls of the functions that contain the layers.
        saves: The avoided traffic, summed in the same way.
        copied: The layers whose gradients are copied.
    """

    costs: int = 0
    saves: int = 0
    copied: dict[str, None] = field(default_factory=dict)

    @property
    def refusal(self) -> str | None:
        """The reason to refuse a merge that would move more numbers than separate products, otherwise None."""
        if self.costs <= self.saves:
            return None
        return (
            f"kernels compute the gradients of {_last_words(tuple(self.copied))}: one product would copy {self.costs:,}"
            f" numbers per token in all blocks, and save only {self.saves:,} in the gradient of the input"
        )


Balance = Mapping[tuple[str, ...], _Moved]


def _balance(programs: Programs) -> Balance:
    """Returns the memory traffic of each possible merge. A key consists of the names of the layers. Blocks whose layers
    have the same names share an entry.

    Separate products each write a gradient of the input, and another kernel adds these gradients. A merged product
    writes the sum directly. The merged product reads concatenated gradients, into which the results of kernels must be
    copied.
    """
    balance: dict[tuple[str, ...], _Moved] = {}
    calls = {(graph.name, at): graph for graph, at in whole_sequences(programs)}
    for graph in calls.values():
        for layers in map(_aligned, _layers(graph)):
            moved = balance.setdefault(_names(layers), _Moved())
            copied = [layer for layer in layers if _is_copied(programs, graph, layer.name)]
            moved.costs += 2 * sum(map(_features, copied))
            moved.saves += 2 * (len(layers) - 1) * _width(graph.types[layers[0].inputs[0]]) if layers else 0
            moved.copied |= dict.fromkeys(_names(copied))
    return balance


def _merged(programs: Programs, graph: Graph, requests: Requests, balance: Balance) -> Graph:
    for members in [_names(layers) for layers in _layers(graph)]:
        chosen = [graph.by_name[name] for name in members if requests.names(graph, name)]
        aligned = _aligned(chosen)
        if len(chosen) < 2:
            continue
        if len(aligned) < 2:
            requests.refuse(graph, _names(chosen), f"parts of a product begin at multiples of {ALIGNMENT} features")
            continue
        names = _names(aligned)
        moved = balance.get(names)
        reason = _refusal(programs, graph, aligned) or (moved.refusal if moved is not None else None)
        if reason is not None:
            requests.refuse(graph, names, reason)
            continue
        text = f"over whole sequences, one product of {sum(map(_features, aligned)):,} features, as is each gradient"
        text += "; its matrix is concatenated once per step"
        written = [name for name in names if writer(programs, graph, name)]
        text += f"; kernels write the gradients of {_last_words(written)} into one tensor" if written else ""
        copied = [name for name in names if _is_copied(programs, graph, name)]
        text += (
            f"; gradients of {_last_words(copied)} are copied into {'it' if written else 'one tensor'}"
            if copied
            else ""
        )
        requests.done(graph, names, text)
        graph = _applied(graph, aligned)
    for names in _in_groups(programs, graph) if requests.patterns == "auto" else ():
        requests.refuse(
            graph, names, "one kernel of a fused group computes them, and one writes their gradients, as two tensors"
        )
    return graph


def _in_groups(programs: Programs, graph: Graph) -> Iterator[tuple[str, ...]]:
    for node in graph.nodes:
        for inner in programs.group(node.op.group).forward.nodes if isinstance(node.op, Fused) else ():
            if isinstance(inner.op, Linear) and inner.op.weights > 1:
                yield inner.members[: inner.op.weights]


def _layers(graph: Graph) -> Iterator[Sequence[Node]]:
    by_input: dict[tuple[str, str], list[Node]] = {}
    for node in graph.nodes:
        if node.op == Linear() and node.epilogue is None and node.inputs[1][0] == "@":
            by_input.setdefault((node.inputs[0], graph.types[node.inputs[1]].dtype), []).append(node)
    yield from (layers for layers in by_input.values() if len(layers) > 1)


def _aligned(layers: Sequence[Node]) -> Sequence[Node]:
    return [layer for layer in layers if _features(layer) % ALIGNMENT == 0]


def _last_words(names: Sequence[str]) -> str:
    return ", ".join(name.rpartition(".")[2] for name in names)


def _names(layers: Sequence[Node]) -> tuple[str, ...]:
    return tuple(layer.name for layer in layers)


def _features(layer: Node) -> int:
    return _width(layer.type)


def _width(type: TensorType) -> int:
    assert isinstance(type.width, int)
    return type.width


def _refusal(programs: Programs, graph: Graph, layers: Sequence[Node]) -> str | None:
    for layer in layers:
        for reader in _readers(graph, layer.name):
            if isinstance(reader.op, Fused) and programs.group(reader.op.group).takes_rows:
                return f"{reader.name} is in a fused group with a product, whose kernels read contiguous rows"
    return None


def _readers(graph: Graph, ref: str) -> Sequence[Node]:
    readers: list[Node] = []
    for reader in graph.consumers[ref]:
        views = isinstance(reader.op, Moves) and len(reader.inputs) == len(reader.types) == 1
        readers += _readers(graph, reader.outputs[0]) if views else [reader]
    return readers


def _is_copied(programs: Programs, graph: Graph, ref: str) -> bool:
    """Returns whether the gradient of `ref` must be copied into the concatenated gradients, because a kernel, attention
    or a fused group computes the gradient. Torch's compiler writes other gradients into the concatenated gradients
    directly."""
    if ref in dict(graph.outputs).values():
        return True
    if writer(programs, graph, ref) is not None:
        return False
    readers = _readers(graph, ref)
    if len(readers) != 1:
        return False  # a sum
    op = readers[0].op
    if isinstance(op, Fused):
        return not programs.group(op.group).inlined
    return isinstance(op, Scan) or op.matrix or op.planned or op.everywhere


def _applied(graph: Graph, layers: Sequence[Node]) -> Graph:
    first = layers[0]
    matrices = tuple(layer.inputs[1] for layer in layers)
    labels = _labels(layers)
    name = ".".join((*first.name.split(".")[:-1], "_".join(labels)))
    members = _names(layers)
    rows = ConcatRows(len(layers))
    weight = Node(f"{name}.weight", rows, matrices, rows.infer([graph.types[ref] for ref in matrices]))
    types = Linear().infer([graph.types[first.inputs[0]], weight.type])
    product = Node(name, Linear(), (first.inputs[0], weight.name), types, None, members)
    split = SplitFeatures(tuple(map(_features, layers)), labels)
    parts = Node(f"{name}.parts", split, (name,), split.infer([product.type]))
    refs = dict(zip(members, output_refs(parts.name, len(layers)), strict=True))
    nodes = tuple(
        new
        for node in graph.nodes
        for new in ((weight, product, parts) if node.name == first.name else () if node.name in members else (node,))
    )
    return rename(replace(graph, nodes=nodes), refs)


def _labels(layers: Sequence[Node]) -> tuple[str, ...]:
    paths = [layer.name.split(".") for layer in layers]
    for length in range(1, max(map(len, paths))):
        labels = tuple("_".join(path[-length:]) for path in paths)
        if len(set(labels)) == len(labels):
            return labels
    return tuple("_".join(path) for path in paths)
