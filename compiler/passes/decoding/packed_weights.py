"""Replaces the weights of decoding steps by the packed codes and scales that an artifact of the spec stores."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from specc.compiler.ir.graph import Graph, Named, Node
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.decoding.packed_codes import STORAGE, lanes_of
from specc.compiler.ops.decoding.row_linear import RowLinear
from specc.compiler.ops.region import Call, Scan
from specc.compiler.passes.assign_quant import allocation
from specc.compiler.programs.programs import Programs, Rewriting
from specc.compiler.spec.spec import QuantSpec

STEP = "packed_weights"
CODES, SCALE = "_codes", "_scale"  # suffixes of the names of buffers


def packed_weights(programs: Programs, quant: QuantSpec | None) -> Programs:
    """Returns the programs with packed codes and scales for every `RowLinear` whose weights are all stored as codes.

    Blocks that share a function may store weights with different numbers of bits. The function is then copied for each
    combination of types. Codes and scales are buffers. For each product that reads codes, `rewritings` of the result
    records the number of bits. For every other product, `rewritings` records why the product does not read codes.

    Args:
        programs: The programs that append tokens to texts, after `row_linears`.
        quant: The quantization of the spec.
    """
    shapes = {param.name: param.shape for param in programs.stored}
    codes = {name: scheme.row_codes(shapes[name]) for name, scheme in allocation(quant, programs.stored).items()}
    packing = _Packing(programs, codes)
    steps = tuple(packing.graph(graph, "") for graph in programs.programs)
    buffers = (*programs.buffers, *packing.buffers.items())
    rewritings = (*programs.rewritings, *packing.rewritings())
    functions = tuple(packing.functions.values())
    return replace(programs, programs=steps, functions=functions, buffers=buffers, rewritings=rewritings)


@dataclass
class _Packing:
    """The programs under construction. Names of nodes and parameters are full: they begin with the path of the block.

    Attributes:
        programs: The programs before the pass.
        codes: For each parameter, the number of bits of its codes, or the reason why no kernel decodes the codes.
        functions: The functions of the new programs, by name.
        buffers: The type of each buffer, by name.
        bits: For each node that reads codes, the number of bits of each weight.
        reasons: For each product whose weights stay floats, the reason.
    """

    programs: Programs
    codes: Mapping[str, int | str]
    functions: dict[str, Graph] = field(default_factory=dict)
    buffers: dict[str, TensorType] = field(default_factory=dict)
    bits: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def graph(self, graph: Graph, at: str) -> Graph:
        params: dict[str, TensorType] = {}
        nodes = tuple(self._node(graph, node, at, params) for node in graph.nodes)
        read = {ref for node in nodes for ref in node.inputs}
        floats = {name: type for name, type in graph.params if f"@{name}" in read}
        return replace(graph, params=tuple((floats | params).items()), nodes=nodes)

    def _node(self, graph: Graph, node: Node, at: str, params: dict[str, TensorType]) -> Node:
        """Returns the node with packed weights if a kernel can decode the codes, otherwise the unchanged node. Adds the
        codes and scales to `params`."""
        if isinstance(node.op, Call | Scan):
            callee = self._function(node.op.callee, f"{at}{node.op.at}." if node.op.at else at)
            params |= dict(callee.params) if not node.op.at else {}
            return replace(node, op=replace(node.op, callee=callee.name))
        coded = any(isinstance(self.codes.get(f"{at}{ref[1:]}"), int) for ref in node.inputs if ref[0] == "@")
        if not isinstance(node.op, RowLinear) and not (node.op.matrix and coded):
            return node
        reason = self._reason(node, at)
        if reason:
            self.reasons[f"{at}{node.name}"] = reason
            return node
        assert isinstance(node.op, RowLinear)
        weights = node.inputs[node.op.first : node.op.arity]
        packed: list[str] = []
        for ref in weights:
            for name, type in self._stored(graph, ref[1:], at):
                params[name] = self.buffers[f"{at}{name}"] = type
                packed.append(f"@{name}")
        self.bits[f"{at}{node.name}"] = tuple(int(self.codes[f"{at}{ref[1:]}"]) for ref in weights)
        inputs = (*node.inputs[: node.op.first], *packed, *node.inputs[node.op.arity :])
        return replace(node, op=replace(node.op, packed=True), inputs=inputs)

    def _reason(self, node: Node, at: str) -> str:
        if not isinstance(node.op, RowLinear):
            return f"{node.op.name} has no kernel that decodes codes"
        for ref in node.inputs[node.op.first : node.op.arity]:
            computed = "not a stored parameter"
            codes = self.codes.get(f"{at}{ref[1:]}", computed) if ref[0] == "@" else computed
            if isinstance(codes, str):
                return f"{_pattern(f'{at}{ref[1:]}')}: {codes}"
        return ""

    def _stored(self, graph: Graph, weight: str, at: str) -> Iterator[Named]:
        n, k = graph.types[f"@{weight}"].shape
        yield f"{weight}{CODES}", TensorType((n, int(self.codes[f"{at}{weight}"]) * lanes_of(int(k))), "u8", STORAGE)
        yield f"{weight}{SCALE}", TensorType((n,), "f16", STORAGE)

    def _function(self, name: str, at: str) -> Graph:
        """Returns the function with packed weights. The function gets a new name if the old name already belongs to a
        packed function with other types."""
        body = self.graph(self.programs.function(name), at)
        owner, _, method = name.partition(".")
        others = {graph.name for graph in self.programs.functions} - {name}
        options = (name, *(f"{owner}_{i}.{method}" for i in range(2, len(self.functions) + len(others) + 3)))
        graphs = (replace(body, name=option) for option in options if option not in others)
        return next(graph for graph in graphs if self.functions.setdefault(graph.name, graph) == graph)

    def rewritings(self) -> Iterator[Rewriting]:
        """Yields the effect of the pass on each product. Blocks with the same effect share an entry."""
        texts: dict[str, set[int]] = {}
        for name, bits in self.bits.items():
            texts.setdefault(_pattern(name), set()).update(bits)
        for pattern, widths in texts.items():
            yield Rewriting(STEP, (pattern,), f"reads codes of {' and '.join(map(str, sorted(widths)))} bits")
        places: dict[tuple[str, str], list[str]] = {}
        for name, reason in self.reasons.items():
            places.setdefault((_pattern(name), reason), []).append(name)
        for (pattern, reason), names in places.items():
            yield Rewriting(STEP, tuple(names) if pattern in texts else (pattern,), "", reason)


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
