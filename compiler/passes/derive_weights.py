"""Moves the computation of matrices that depend only on parameters into methods of the blocks. Training then computes
these matrices once per step, not once per micro-batch."""

from dataclasses import replace

from specc.compiler.ir.graph import Graph, Node, needed
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.region import Call, Fused, returned
from specc.compiler.passes.recompute import add_method
from specc.compiler.passes.requests import whole_sequences
from specc.compiler.programs.programs import Programs


def derive_weights(programs: Programs) -> Programs:
    """Moves the computation of derived weights into functions. Returns the new programs. The field `derived` of the new
    programs lists the functions.

    A derived weight is a matrix that depends only on parameters, such as the product of a matrix and a learned scale.
    Matrix products read the derived weight.
    """
    whole = {graph.name for graph, at in whole_sequences(programs) if at}
    derived: dict[str, Graph] = {}
    functions = tuple(_derived(graph, derived) if graph.name in whole else graph for graph in programs.functions)
    return replace(programs, functions=(*functions, *derived.values()), derived=tuple(derived))


def _derived(graph: Graph, derived: dict[str, Graph]) -> Graph:
    constant: set[str] = set()  # the values that are functions of parameters and scalars
    for node in graph.nodes:
        if node.inputs and all(ref[0] in "@$" or ref in constant for ref in node.inputs):
            constant.update(node.outputs)
    read = {
        ref
        for node in graph.nodes
        if isinstance(node.op, Linear | Fused) and constant.isdisjoint(node.outputs)
        for ref in node.inputs
    }
    calls: dict[str, Node] = {}
    for node in graph.nodes:
        if node.name in constant & read and len(node.type.shape) == 2:
            function = _function(graph, node)
            name = add_method(graph, function.outputs[0][1].replace(".", "_"), function, derived)
            calls[node.name] = Node(node.name, Call(name, "", returned(node.types)), (), node.types)
    nodes = [calls.get(node.name, node) for node in graph.nodes]
    needless = {node.name for node in graph.nodes if node.name in constant and node.name not in calls}
    while idle := needless - {ref for node in nodes for ref in node.inputs}:
        needless -= idle
        nodes = [node for node in nodes if node.name not in idle]
    return replace(graph, nodes=tuple(nodes))


def _function(graph: Graph, node: Node) -> Graph:
    nodes = needed(graph.nodes, [node.name])
    read = {ref for inner in nodes for ref in inner.inputs}
    return Graph(
        "",
        (),
        tuple(param for param in graph.params if f"@{param[0]}" in read),
        nodes,
        (("weight", node.name),),
        tuple(scalar for scalar in graph.scalars if f"${scalar}" in read),
    )
