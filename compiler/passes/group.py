"""Builds a fused group: the forward graph of some nodes, and a backward graph. The backward graph is composed of the
nodes' derivative rules."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from specc.compiler import fusions
from specc.compiler.catalog import catalog
from specc.compiler.expr import KEEPS, Keep, Var, derive, number, plan_backward, reread, substitute, variables
from specc.compiler.fusions.fusion import Fusion, Rewrite
from specc.compiler.ir.builder import Builder, underscored
from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.passes.backward import (
    Derivation,
    NoDerivative,
    accumulates,
    accumulators,
    gradient_names,
    same_gradient,
    spelled,
    titled,
)
from specc.compiler.passes.join_codes import join_codes
from specc.compiler.passes.join_epilogues import join_epilogues
from specc.compiler.passes.join_pointwise import join_pointwise
from specc.compiler.programs.programs import Group

SAVED = ("slope", "pre_")  # the first letters of names of saved values


class Unfusable(Exception):
    """Raised if a node cannot be in a group. `reason` completes a sentence that begins with the name of the node.
    `hint` states how to fix the error."""

    HINT = "change the nodes of the fusion point; `specc ir --after lower` shows what each node reads"

    def __init__(self, node: str, reason: str, hint: str = HINT) -> None:
        super().__init__(f"{node} {reason}")
        self.node, self.reason, self.hint = node, reason, hint


class Selection(NamedTuple):
    """The properties that determine a group: the nodes, and the names and types of the values that the nodes read.

    Attributes:
        name: The name of the group.
        scope: The prefix of the names of the members.
        members: The names of the nodes of the spec that the group replaces.
        rewrite: The nodes of the group.
        inputs: The values that the nodes read, each with its reference, its name in the group, and its type.
        results: The values that the group returns, each with its label and its reference.
        chunks: The number of chunks of rows that are computed one after another.
    """

    name: str
    scope: str
    members: tuple[str, ...]
    rewrite: Rewrite
    inputs: tuple[tuple[str, str, TensorType], ...]
    results: tuple[tuple[str, str], ...]
    chunks: int = 1


def build_group(
    graph: Graph, scope: str, members: Sequence[Node], chunks: int = 1, known: dict[Selection, Group] | None = None
) -> Group:
    """Applies all fusions that accept the members, and builds the group of the result.

    Args:
        graph: The graph of the members.
        scope: The prefix of node names that the fusion point matched.
        members: The nodes, in graph order. Only the last node may have readers outside of `members`.
        chunks: The number of chunks of rows that are computed one after another.
        known: The groups that were built before in the same programs. This function adds the new group to `known`.

    Returns:
        The group with the default save choice. A save choice determines the values that the forward pass saves. The
        field `others` holds one group for every other save choice.

    Raises:
        Unfusable: If a member cannot be in a group.
        ExprError: If an expression cannot be named, or becomes too long to print.
    """
    _check_uses(graph, members)
    rewrite = _rewritten(graph, members)
    products = {node.name for node in rewrite.nodes if accumulates(node.op)}
    rewrite = Rewrite(join_pointwise(tuple(map(_unreserved, rewrite.nodes)), products), rewrite.learns)
    if chunks > 1 and not rewrite.nodes[-1].op.by_chunks:
        raise Unfusable(
            members[-1].name,
            "cannot be computed in chunks; only a fusion point that ends in the loss can have `chunks`",
        )
    scope = _part(scope, members)
    words = ("fused", scope.rpartition(".")[2], *(() if rewrite.learns else graph.name.split(".")))
    replaced, last = tuple(node.name for node in members), rewrite.nodes[-1]
    results = (((*last.op.output_labels, "y")[0], last.name),)
    inputs = _inputs(graph, members, _labels(rewrite))
    selection = Selection("_".join(words), scope, replaced, rewrite, inputs, results, chunks)
    known = {} if known is None else known
    if selection not in known:
        known[selection] = _composed(selection)
    return known[selection]


def compose(
    graph: Graph, scope: str, name: str, nodes: Sequence[Node], members: tuple[str, ...], results: Mapping[str, str]
) -> Group:
    """Builds a group with several results. The ops of the nodes must have derivative rules.

    Args:
        graph: The graph that contains the nodes, with the types of all values.
        scope: The prefix of the names of the members.
        name: The name of the group.
        nodes: The nodes, in order.
        members: The names of the spec's nodes that the group replaces.
        results: The values that the group returns, by label.

    Returns:
        The group with the default save choice.
    """
    rewrite = Rewrite(tuple(map(_unreserved, nodes)))
    inputs = _inputs(graph, nodes, _labels(rewrite))
    return _composed(Selection(name, scope, members, rewrite, inputs, tuple(results.items())))


def _composed(selection: Selection) -> Group:
    """Returns the group with the default save choice. A save choice determines the values that the forward pass saves.
    The field `others` of the result holds one group for every other save choice."""
    name, scope, members, rewrite, _, results, chunks = selection
    choices: list[Group] = []
    for keep in KEEPS if rewrite.learns else KEEPS[:1]:
        forward = _forward(selection, keep)
        backward = Graph(f"{name}.backward", (), (), (), ())
        if rewrite.learns:
            try:
                backward = Derivation({node.name: node for node in rewrite.nodes}, forward, keep).run(backward.name)
            except NoDerivative as error:
                reason = f"cannot be fused in this model, because it computes {error.node.op.name}"
                raise Unfusable(error.node.name, reason) from None
        given = gradient_names(forward)
        saved = tuple(label for label, _ in backward.inputs if label not in given)
        whole, backward = _returning(forward, saved), join_codes(join_epilogues(backward))
        choice = Group(name, scope, members, whole, backward, saved, keep, (), chunks, len(results))
        if all(replace(choice, keep=other.keep) != other for other in choices):
            choices.append(choice)
    return replace(choices[0], others=tuple(choices[1:]))


def _check_uses(graph: Graph, members: Sequence[Node]) -> None:
    inside = {node.name for node in members}
    returned = dict(graph.outputs).values()
    for node in members:
        if numbers := [ref[1:] for ref in node.inputs if ref[0] == "$"]:
            raise Unfusable(node.name, f"reads the number {numbers[0]}, which differs between layers")
    for node in members[:-1]:
        readers = [reader.name for reader in graph.consumers[node.name] if reader.name not in inside]
        if readers or node.name in returned:
            reader = f"{readers[0]}, which is" if readers else "a part of the model"
            raise Unfusable(node.name, f"is also read by {reader} outside of the fusion point")
        if not graph.consumers[node.name]:
            raise Unfusable(node.name, "is not read by any other node of the fusion point")


def _rewritten(graph: Graph, members: Sequence[Node]) -> Rewrite:
    """Applies every fusion that accepts the members. Raises Unfusable if a node of the result cannot be in a group."""
    done = Rewrite(tuple(members))
    reasons: dict[str, str] = {}
    for fusion in catalog(fusions, Fusion).values():
        if not any(node.op.name in fusion.ops for node in done.nodes):
            continue
        if reason := fusion.refusal(graph, done.nodes):
            reasons |= dict.fromkeys(fusion.ops, f"the fusion {fusion.name} {reason}")
        else:
            further = fusion.rewrite(graph, done.nodes)
            done = Rewrite(further.nodes, done.learns and further.learns)
    left = [n for n in done.nodes if not isinstance(n.op, Pointwise) and type(n.op).derivative is Op.derivative]
    if left:
        # The error should name a node that a fusion has refused, if there is one
        culprit = min(left, key=lambda n: n.op.name not in reasons)
        alone = f"it computes {culprit.op.name}, which no kernel computes together with these nodes"
        raise Unfusable(culprit.name, f"cannot be fused: {reasons.get(culprit.op.name, alone)}")
    if done.nodes == tuple(members) and len(members) == 1:
        raise Unfusable(members[0].name, "is the only node, so there is nothing to fuse")
    return done


def _unreserved(node: Node) -> Node:
    """Renames variables of a pointwise node whose names the backward pass uses: the gradient, and saved values."""
    op = node.op
    if not isinstance(op, Pointwise):
        return node
    taken = {*op.variables}
    names = {v: underscored(f"{v}_in", taken) for v in op.variables if v in ("d", "y") or v.startswith(SAVED)}
    renamed = {v: Var(name) for v, name in names.items()}
    outputs = tuple(str(substitute(reread(text), renamed)) for text in op.outputs) if names else op.outputs
    return replace(node, op=replace(op, outputs=outputs, variables=tuple(names.get(v, v) for v in op.variables)))


def _part(scope: str, members: Sequence[Node]) -> str:
    """Returns the path of the smallest part of the model that contains all members, such as `q` for `q.norm` and
    `q.rope`."""
    paths = [node.name.split(".")[:-1] for node in members]
    alike = next((i for i, words in enumerate(zip(*paths, strict=False)) if len(set(words)) > 1), min(map(len, paths)))
    part = ".".join(paths[0][:alike])
    return part if part.startswith(f"{scope}.") else scope


def _labels(rewrite: Rewrite) -> Mapping[str, str]:
    return {ref: label for node in rewrite.nodes for ref, label in zip(node.inputs, node.op.input_labels, strict=False)}


def _inputs(graph: Graph, nodes: Sequence[Node], labels: Mapping[str, str]) -> tuple[tuple[str, str, TensorType], ...]:
    """Returns the values that nodes of a group read, each with its reference, a short name, and its type. An input is
    named by the label that an op gives to it. Without a label, a parameter is named by the last word of its path, and
    an activation is named `x`. If two names are equal, longer names are used."""
    inside = {node.name for node in nodes}
    names: dict[str, str] = {}
    for ref in dict.fromkeys(ref for node in nodes for ref in node.inputs if node_of(ref) not in inside):
        path = ref.lstrip("@$").replace(":", "_")
        word = labels.get(ref) or (path.rpartition(".")[2] if ref[0] in "@$" else "x")
        long = path.replace(".", "_")
        free = (name for name in (word, long, f"{long}_in", f"{long}_given") if name not in (*names.values(), "d"))
        names[ref] = next(free)
    return tuple((ref, name, graph.types[ref]) for ref, name in names.items())


def _forward(selection: Selection, keep: Keep) -> Graph:
    """Returns the nodes of `selection` as a graph whose inputs have short names. Pointwise nodes also output the values
    that the backward pass reads."""
    b, rewrite, names = Builder(f"{selection.name}.forward"), selection.rewrite, dict[str, str]()
    for ref, name, type in selection.inputs:
        names[ref] = b.input(name, type)
    linear = {node.name for node in rewrite.nodes if accumulates(node.op)}
    for node in rewrite.nodes:
        inputs = tuple(names.get(ref, ref) for ref in node.inputs)
        op, types = node.op, [*node.types]
        if isinstance(op, Pointwise):
            for ref, name in zip(node.inputs, inputs, strict=True):
                if ref in linear and b.types[name].shape != node.type.shape:
                    reason = f"it is {node.type}, but the product is {b.types[name]}"
                    raise Unfusable(node.name, f"cannot be fused with the product {ref}: {reason}")
        if isinstance(op, Pointwise) and rewrite.learns and (products := accumulators(node, linear)):
            op = _with_saves(op, products, keep)
            types += [replace(node.type, dtype=b.types[inputs[0]].dtype) for _ in op.labels[1:]]
        b.nodes.append(replace(node, op=op, inputs=inputs, types=tuple(types)))
        b.types |= zip(b.nodes[-1].outputs, types, strict=True)
    return b.build(dict(selection.results))


def _with_saves(op: Pointwise, products: tuple[str, ...], keep: Keep) -> Pointwise:
    expression = reread(op.outputs[0])
    if flat := [v for v in products if not variables(derive(expression, v)) and number(derive(expression, v)) == 0]:
        reason = f"has gradient 0 with respect to {flat[0]} everywhere, so {flat[0]} would not be trained"
        hint = f"change the activation, so that this gradient is not 0, e.g. multiply it by `silu({flat[0]})`"
        raise Unfusable("the activation", reason, hint)
    plan = plan_backward(expression, products, keep)
    operands = [v for v in op.variables if v not in products and not same_gradient(expression, v, products)]
    read = {v for operand in operands for v in variables(derive(expression, operand))} | set(plan.needs)
    saves = [*plan.saves, *((f"pre_{v}", reread(v)) for v in products if v in read)]
    outputs = (str(plan.value), *(str(saved) for _, saved in saves))
    labels = ("y", *(label for label, _ in saves)) if saves else ()
    return replace(op, outputs=outputs, labels=labels, title=titled(op, products, keep))


def _returning(forward: Graph, saved: Sequence[str]) -> Graph:
    """Returns the forward graph with pointwise nodes as epilogues of products. The result also outputs the values
    `saved`, under their names in the backward graph."""
    where = {spelled(forward, ref): ref for node in forward.nodes for ref in node.outputs}
    inputs = {name for name, _ in forward.inputs}
    extra = ((name, where[name]) for name in saved if name not in inputs)
    outputs = tuple(dict.fromkeys((*forward.outputs, *extra)))  # the backward pass may also read the result itself
    return join_codes(join_epilogues(replace(forward, outputs=outputs)))
