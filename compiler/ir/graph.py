"""The typed graph that every pass reads and writes.

References to values are text. `mlp.up` is the first output of node `mlp.up`, or an input of the graph. `mlp.up:1` is
the second output of the node. `@mlp.up` is a parameter. `$norm_scale` is a number that a function's caller passes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType
from specc.compiler.records import record


@record
class Node:
    """One operation of a graph.

    Attributes:
        name: the path of the node, unique in its graph.
        op: the operation.
        inputs: references to the inputs of `op`, followed by references to the other values that `epilogue` reads.
        types: the types of the outputs.
        epilogue: a pointwise op of the accumulators of `op`, fused into this node.
        members: the spec paths of the nodes that this node replaced. Empty unless this node replaced several nodes.
        region: in a flattened graph, the call that contains this node, if the backward pass recomputes the call. Empty
            for all other nodes.
    """

    name: str
    op: Op
    inputs: tuple[str, ...]
    types: tuple[TensorType, ...]
    epilogue: Op | None = None
    members: tuple[str, ...] = ()
    region: str = ""

    @property
    def type(self) -> TensorType:
        return self.types[0]

    @property
    def outputs(self) -> tuple[str, ...]:
        return output_refs(self.name, len(self.types))

    def __str__(self) -> str:
        epilogue = f" |> {self.epilogue.name}{self.epilogue.settings()}" if self.epilogue else ""
        members = f" of ({', '.join(self.members)})" if self.members else ""
        types = ", ".join(map(str, self.types))
        call = f"{self.op.name}({', '.join(self.inputs)}){self.op.settings()}"
        return f"{self.name} = {call}{epilogue}{members} : {types}"


Named = tuple[str, TensorType]


@record
class Graph:
    """A program or a function, immutable.

    Attributes:
        name: the name of the graph.
        inputs: the name and type of each input.
        params: the name and type of each parameter.
        nodes: the nodes in topological order.
        outputs: a (label, value) pair for each output.
        scalars: the names of the numbers that the caller passes.
    """

    name: str
    inputs: tuple[Named, ...]
    params: tuple[Named, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str], ...]
    scalars: tuple[str, ...] = ()

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        types = dict(self.inputs)
        types |= {f"@{name}": type for name, type in self.params}
        types |= {f"${name}": TensorType((), "f32") for name in self.scalars}
        for node in self.nodes:
            types |= zip(node.outputs, node.types, strict=True)
        return types

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def scopes(self) -> tuple[str, ...]:
        names = (node.name.split(".") for node in self.nodes)
        return tuple(dict.fromkeys(".".join(words[:end]) for words in names for end in range(1, len(words))))

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        """Maps each value to the nodes that read it, in the order of `nodes`. A node that reads a value twice is listed
        twice."""
        readers: dict[str, list[Node]] = {ref: [] for ref in self.types}
        for node in self.nodes:
            for ref in node.inputs:
                readers[ref].append(node)
        return {ref: tuple(nodes) for ref, nodes in readers.items()}

    def uses(self, ref: str) -> int:
        return len(self.consumers[ref]) + sum(ref == output for _, output in self.outputs)

    def __str__(self) -> str:
        inputs = ", ".join(f"{name}: {type}" for name, type in self.inputs)
        scalars = "".join(f", ${name}" for name in self.scalars)
        lines = [f"graph {self.name}({inputs}{scalars}) {{"]
        lines += [f"  param {name} : {type}" for name, type in self.params]
        lines += [f"  {node}" for node in self.nodes]
        lines += [f"  return {', '.join(f'{label}={ref}' for label, ref in self.outputs)}", "}"]
        return "\n".join(lines)


def output_ref(node: str, index: int) -> str:
    return node if index == 0 else f"{node}:{index}"


@lru_cache(maxsize=65536)  # cached, because every pass requests the same few names and counts
def output_refs(node: str, count: int) -> tuple[str, ...]:
    return tuple(output_ref(node, i) for i in range(count))


def node_of(ref: str) -> str:
    """Returns the name of the node that computes the value `ref`. If the value is an input of the graph, returns the
    name of the input."""
    return ref.partition(":")[0]


def rename(graph: Graph, names: Mapping[str, str]) -> Graph:
    """Returns the graph with new references in node inputs and graph outputs. `names` maps old references to new
    references."""

    def other(ref: str) -> str:
        return names.get(ref, ref)

    nodes = tuple(replace(node, inputs=tuple(map(other, node.inputs))) for node in graph.nodes)
    return replace(graph, nodes=nodes, outputs=tuple((label, other(ref)) for label, ref in graph.outputs))


def retyped(graph: Graph, change: Callable[[TensorType], TensorType]) -> Graph:
    nodes = (replace(node, op=node.op.retyped(change), types=tuple(map(change, node.types))) for node in graph.nodes)
    inputs, params = (tuple((name, change(type)) for name, type in named) for named in (graph.inputs, graph.params))
    return replace(graph, inputs=inputs, params=params, nodes=tuple(nodes))


def needed(nodes: Sequence[Node], refs: Iterable[str]) -> tuple[Node, ...]:
    """Returns the nodes in `nodes` on which the values `refs` depend, in the order of `nodes`."""
    names, chosen = set(map(node_of, refs)), list[Node]()
    for node in reversed(nodes):
        if node.name in names:
            names |= set(map(node_of, node.inputs))
            chosen.append(node)
    return tuple(reversed(chosen))


def walk(graphs: Mapping[str, Graph], start: Graph) -> Iterator[Graph]:
    """Yields `start`, and every function of `graphs` that `start` calls, directly or through other functions. Each
    graph is yielded once, in breadth-first order."""
    seen: list[str] = []
    queue = [start]
    while queue:
        graph = queue.pop(0)
        yield graph
        for node in graph.nodes:
            callee: Any = getattr(node.op, "callee", None)
            if callee is not None and callee not in seen:
                seen.append(callee)
                queue.append(graphs[callee])
