"""Turns fused groups into text: an autograd.Function where a group is learned through, else a plain function."""

from dataclasses import dataclass

from specc.compiler.ir.graph import TensorType
from specc.compiler.passes.select_kernels import group_pattern
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import Group
from specc.compiler.render.body import Body
from specc.compiler.render.function import LOCALS, Function, Speller, class_name, docstring


@dataclass(frozen=True, slots=True)
class GroupContext:
    """A fused group as an autograd.Function and the function that flattens rows around it."""

    name: str
    doc: tuple[str, ...]
    forward: Function
    backward: Function
    call: Function
    saved: str
    restored: str


def group_context(plan: Plan, group: Group) -> GroupContext:
    """A group that is learned through: one with products takes rows of any leading shape as one dim."""
    names = {name: name for name, _ in group.forward.inputs}
    forward = Body(group.forward, names, Speller(plan, group.forward), LOCALS, alive=frozenset(group.saved))
    forward.run(group.forward.nodes)
    (_, result), *_ = group.forward.outputs
    results = dict(group.forward.outputs)
    saved = [forward.text(results.get(name, name)) for name in group.saved]
    backward_names = {name: name for name, _ in group.backward.inputs}
    backward = Body(group.backward, backward_names, Speller(plan, group.backward), LOCALS | {"ctx"})
    if any(c.graph == group.backward.name and c.kernel.language != "torch" for c in plan.choices):
        backward.lines.append("d = d.contiguous()  # kernels read rows")
    backward.run(group.backward.nodes)
    gradients = dict(group.backward.outputs)
    backward.returned(tuple(gradients.values()))  # which writes out what would make the line long
    inputs = [name for name, _ in group.forward.inputs]
    learned = [gradients.get(f"d_{name}") for name in inputs]
    many = "tuple[" + ", ".join("Tensor" if ref else "None" for ref in learned) + "]"
    products = any(
        node.op.matrix and not node.op.mixes_tokens for node in (*group.forward.nodes, *group.backward.nodes)
    )
    rows = {name: flat for name, type in group.forward.inputs if products and (flat := _flat(name, type))}
    applied = ", ".join(rows.get(name, name) for name in inputs)
    kept = ", ".join(name for name in group.saved if name not in inputs)
    doc = f"{_group_doc(plan, group)} " + (f"Keeps {kept} for the backward." if kept else "Keeps only its inputs.")
    arguments = tuple(f"{name}: Tensor" for name in inputs)
    about = "The group over rows of any leading shape." if rows else "The group as a function."
    call = f"{class_name(group.name)}.apply({applied})"
    if rows and group.forward.types[result].shape:
        first = next(name for name in inputs if name in rows)
        call += f".unflatten(0, {first}.shape[:-1])"
    return GroupContext(
        class_name(group.name),
        tuple(docstring(doc)),
        Function("forward", "", ("ctx", *arguments), tuple(forward.lines), forward.text(result), "Tensor"),
        Function(
            "backward",
            "",
            ("ctx", "d: Tensor"),
            tuple(backward.lines),
            ", ".join(backward.text(ref) if ref else "None" for ref in learned),
            many if len(inputs) > 1 else "Tensor",
        ),
        Function(group.name, about, arguments, (), call, "Tensor"),
        ", ".join(saved),
        ", ".join(group.saved),
    )


def scoring_function(plan: Plan, group: Group) -> Function:
    """A group that nothing is learned through: a plain function."""
    body = Body(group.forward, {name: name for name, _ in group.forward.inputs}, Speller(plan, group.forward), LOCALS)
    body.run(group.forward.nodes)
    returns = body.returned([ref for _, ref in group.forward.outputs])
    arguments = tuple(f"{name}: Tensor" for name, _ in group.forward.inputs)
    doc = f"{_group_doc(plan, group)} Without a backward."
    return Function(group.name, doc, arguments, tuple(body.lines), returns, "Tensor")


def _group_doc(plan: Plan, group: Group) -> str:
    members = ", ".join(member.removeprefix(f"{group.scope}.") for member in group.members)
    return f"Fused group {group_pattern(plan.programs, group, group.scope)}: {members}."


def _flat(name: str, type: TensorType) -> str:
    """An input with its rows as one dim; empty for one that has no rows, such as a weight."""
    leading = sum(isinstance(dim, str) for dim in type.shape)
    if leading < 2 or not isinstance(type.shape[0], str):
        return ""
    features = len(type.shape) - leading
    return f"{name}.flatten(0, {-1 - features})" if features else f"{name}.flatten()"
