"""Renders fused groups as autograd.Functions. Groups that are inlined into a program are excluded."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from specc.compiler.expr.python_lines import operand
from specc.compiler.ir.graph import Graph, Node, rename
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ops.fp8 import STORAGE as STATE
from specc.compiler.passes.backward import SCALED, spelled
from specc.compiler.passes.merge import merge
from specc.compiler.passes.select_kernels import group_pattern
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import Group, class_name, group_functions
from specc.compiler.render.body import Body
from specc.compiler.render.function import LOCALS, Function, Speller, docstring, tensors

NO_NAMES: Mapping[str, str] = {}
ADD_SHARE = TorchCall(
    "add_share", tuple(map(Input, range(4)))
)  # the names of the total, the result of a chunk, the rows of the chunk, and all rows


class GroupContext(NamedTuple):
    """A fused group as an autograd.Function. The class has no backward method if no gradient flows through the group.

    Attributes:
        saved: The values that the forward method saves.
        restored: The names to which the backward method assigns the saved values. Empty if the backward method unpacks
            `ctx.saved_tensors` directly into the arguments of a call.
        calls: The support functions that model.py must define for the forward method.
    """

    name: str
    doc: tuple[str, ...]
    forward: Function
    backward: Function | None
    saved: str
    restored: str
    calls: tuple[TorchCall, ...] = ()


def group_contexts(plan: Plan) -> tuple[GroupContext, ...]:
    """Returns the contexts of the groups with a backward pass. Groups with the same computation share one context."""
    names = group_functions(plan.programs)
    learned = [group for group in plan.programs.groups if not group.inlined]
    firsts = {names[group.name]: group for group in reversed(learned)}
    called = dict.fromkeys(names[group.name] for group in learned)
    return tuple(
        (_context if firsts[name].chunks == 1 else chunked_context)(
            plan, firsts[name], name, [group for group in learned if names[group.name] == name]
        )
        for name in called
    )


def chunked_context(plan: Plan, group: Group, name: str, groups: list[Group]) -> GroupContext:
    """Returns the context of a group that computes its rows in chunks.

    The forward method also computes the gradients of each chunk, and saves only these gradients. Values without rows
    are computed once, before the first chunk.

    Args:
        plan: The plan.
        group: The group.
        name: The name of the class.
        groups: All groups that share the class. The docstring of the class names these groups.

    Returns:
        The context.
    """
    rows = [label for label, type in group.forward.inputs if type.shape and isinstance(type.shape[0], str)]
    first, rest = _split(group.forward, rows)
    reserved = LOCALS | {"ctx", "rows", "share", "count", "results"}
    before, forward = _body(plan, first), _body(plan, rest, frozenset(group.saved), reserved)
    refs = [spelled(group.forward, ref) for _, ref in first.outputs]
    lines = [*before.lines, *_bound(zip(refs, (before.text(ref) for _, ref in first.outputs), strict=True))]
    outputs = dict(rest.outputs)
    inside = [*forward.lines]
    (label, _), *_ = group.forward.outputs
    types = dict(group.forward.inputs)
    summed = [name for name, _ in group.backward.outputs if name.removeprefix("d_") not in rows]
    derived = _unscaled(group.backward, summed)
    gradients = dict(derived.outputs)
    saved, ending = [], ""
    if gradients:
        results = ((label, forward.text(outputs.get(label, label))) for label in group.saved)
        backward = _body(plan, derived, reserved=reserved, names={"d": "share"})
        lines += [f"count, results = {rows[0]}.shape[0], 0.0"]
        total = f"results = results + share * {operand(forward.text(outputs[label]))}"
        inside = [f"share = {rows[0]}.shape[0] / count", *inside, total, *_bound(results), *backward.lines]
        for gradient, value in gradients.items():
            of = gradient.removeprefix("d_")
            if gradient not in summed:
                lines.append(f"{gradient}_parts = []")
                inside.append(f"{gradient}_parts.append({backward.text(value)})")
                saved.append(f"torch.cat({gradient}_parts)")
                continue
            wide = types[of].dtype in ("f32", "f64")
            lines.append(f"{gradient} = torch.zeros_like({of}{'' if wide else ', dtype=torch.float32'})")
            inside.append(ADD_SHARE.text((gradient, backward.text(value), f"{rows[0]}.shape[0]", "count")))
            saved.append(gradient if wide else f"{gradient}.type_as({of})")
        ending = "results"
    else:
        lines.append("results = []")
        inside.append(f"results.append({forward.text(outputs[label])})")
        ending = "torch.cat(results)"
    lines.append(f"rows = zip({', '.join(f'{label}.chunk({group.chunks})' for label in rows)}, strict=True)")
    lines += [f"for {', '.join(rows)} in rows:", *(f"    {line}" for line in inside)]
    places = "; ".join(dict.fromkeys(_group_doc(plan, alike) for alike in groups))
    gradient = "Keeps its gradients for the backward." if gradients else "Has no gradient."
    doc = f"{places}, in {group.chunks} chunks of rows. {gradient}"
    inputs = list(types)
    learned = [f"d * d_{label}" if f"d_{label}" in gradients else "None" for label in inputs]
    many = "tuple[" + ", ".join("None" if text == "None" else "Tensor" for text in learned) + "]"
    arguments = tuple(f"{label}: Tensor" for label in inputs)
    return GroupContext(
        class_name(name),
        tuple(docstring(doc)),
        Function("forward", "", ("ctx", *arguments), tuple(lines), ending, "Tensor"),
        Function("backward", "", ("ctx", "d: Tensor"), (), ", ".join(learned), many) if gradients else None,
        ", ".join(saved),
        ", ".join(gradients),
        (ADD_SHARE,) if summed else (),
    )


def _unscaled(graph: Graph, names: Sequence[str]) -> Graph:
    """Returns a copy of the backward graph of a loss that does not multiply the gradients `names` by the incoming
    gradient `d`."""
    last = {name: graph.by_name[ref] for name, ref in graph.outputs if name in names}
    assert all(node.op == SCALED for node in last.values())
    outputs = tuple((name, last[name].inputs[0] if name in last else ref) for name, ref in graph.outputs)
    return replace(graph, nodes=tuple(node for node in graph.nodes if node not in last.values()), outputs=outputs)


def _split(graph: Graph, rows: Sequence[str]) -> tuple[Graph, Graph]:
    """Splits a graph in two: the nodes that do not depend on the inputs `rows`, and all other nodes. The second graph
    reads values of the first graph as inputs."""
    first: list[Node] = []
    known = {name for name, _ in graph.inputs if name not in rows}
    for node in graph.nodes:
        if known.issuperset(node.inputs):
            first.append(node)
            known.update(node.outputs)
    rest = [node for node in graph.nodes if node not in first]
    read = {ref for node in rest for ref in node.inputs} | set(dict(graph.outputs).values())
    passed = [ref for node in first for ref in node.outputs if ref in read]
    renamed = {ref: spelled(graph, ref) for ref in passed}
    inputs = (*graph.inputs, *((renamed[ref], graph.types[ref]) for ref in passed))
    before = replace(graph, nodes=tuple(first), outputs=tuple((renamed[ref], ref) for ref in passed))
    return before, rename(replace(graph, inputs=inputs, nodes=tuple(rest)), renamed)


def _bound(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{name} = {text}" for name, text in pairs if name != text]


def _context(plan: Plan, group: Group, name: str, groups: list[Group]) -> GroupContext:
    """Returns the context of a group with a backward pass.

    If the group has products, a call of its function flattens the leading dims of the inputs to rows.
    """
    forward = _body(plan, group.forward, frozenset(group.saved))
    returned = [forward.text(ref) for _, ref in group.forward.outputs[: group.results]]
    results = dict(group.forward.outputs)
    types = dict(group.forward.inputs)
    # State that training changes in place is stored as an attribute of ctx, because a saved tensor must not change.
    states = [label for label in group.saved if label in types and types[label].storage == STATE]
    stored = [label for label in group.saved if label not in states]
    saved = [forward.text(results.get(label, label)) for label in stored]
    wanted = {ref: label for label, end in group.backward.outputs for ref in _written_before(group.backward, end)}
    backward = _body(plan, group.backward, reserved=LOCALS | {"ctx"}, wanted=wanted)
    given = [name for name, _ in group.backward.inputs[: group.results]]
    read = _read_by_kernels(plan, group, given)
    contiguous = tuple(f"{name} = {name}.contiguous()  # kernels read rows" for name in read)
    gradients = dict(group.backward.outputs)
    inputs = [label for label, _ in group.forward.inputs]
    learned = [gradients.get(f"d_{label}") for label in inputs]
    many = "tuple[" + ", ".join("Tensor" if ref else "None" for ref in learned) + "]"
    values = ", ".join(label for label in group.saved if label not in inputs)
    places = "; ".join(dict.fromkeys(_group_doc(plan, alike) for alike in groups))
    doc = f"{places}. " + (f"Keeps {values} for the backward." if values else "Keeps only its inputs.")
    arguments = tuple(f"{label}: Tensor" for label in inputs)
    restored = ", ".join(stored)
    lines, returns = backward.lines, ", ".join(backward.text(ref) if ref else "None" for ref in learned)
    if lines and lines[-1].partition(" = ")[0] == returns:
        lines, returns = lines[:-1], lines[-1].partition(" = ")[2]
    text = "\n".join((*lines, returns))
    once = [label for label in stored if _times(text, label) == 1]
    if restored and text.count(restored) == 1 and len(once) == len(stored):
        lines, returns = _replaced(lines, returns, re.escape(restored), "*ctx.saved_tensors")
        restored = ""
    attributes = [f"{label} = ctx.{label}" for label in states]
    if len(read) == 1 and _times(text, read[0]) == 1:
        lines, returns = _replaced(lines, returns, rf"\b{read[0]}\b", f"{read[0]}.contiguous()")
        contiguous = ()
    return GroupContext(
        class_name(name),
        tuple(docstring(doc)),
        Function(
            "forward",
            "",
            ("ctx", *arguments),
            (*forward.lines, *(f"ctx.{label} = {label}" for label in states)),
            ", ".join(returned),
            tensors(len(returned)),
        ),
        Function(
            "backward",
            "",
            ("ctx", *(f"{name}: Tensor" for name in given)),
            (*attributes, *contiguous, *lines),
            returns,
            many if len(inputs) > 1 else "Tensor",
        ),
        ", ".join(saved),
        restored,
    )


def _read_by_kernels(plan: Plan, group: Group, given: Sequence[str]) -> Sequence[str]:
    names = [c.site.node.name for c in plan.choices if c.graph == group.backward.name and c.kernel.language != "torch"]
    if len(given) == 1:
        return given if names else []
    read = {ref for node in group.backward.nodes if node.name in names for ref in node.inputs}
    return [name for name in given if name in read]


def _body(
    plan: Plan,
    graph: Graph,
    alive: frozenset[str] = frozenset(),
    reserved: frozenset[str] = LOCALS,
    names: Mapping[str, str] = NO_NAMES,
    wanted: Mapping[str, str] = NO_NAMES,
) -> Body:
    return Body(merge([graph]), Speller(plan), names, reserved=reserved, alive=alive, wanted=wanted)


def _written_before(graph: Graph, ref: str) -> Iterator[str]:
    while (node := graph.by_name.get(ref)) is not None and node.op.written is not None:
        ref = node.inputs[node.op.written]
        yield ref


def _group_doc(plan: Plan, group: Group) -> str:
    members = ", ".join(member.removeprefix(f"{group.scope}.") for member in group.members)
    return f"{group_pattern(plan.programs, group, group.scope)}: {members}"


def _replaced(lines: Sequence[str], returns: str, pattern: str, text: str) -> tuple[tuple[str, ...], str]:
    return tuple(re.sub(pattern, text, line) for line in lines), re.sub(pattern, text, returns)


def _times(text: str, name: str) -> int:
    return len(re.findall(rf"(?<![\w.]){name}\b", text))
