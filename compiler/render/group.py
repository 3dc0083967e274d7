"""Renders each fused group that has a backward as an autograd.Function."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from specc.compiler.ir.graph import Graph
from specc.compiler.passes.merge import merge
from specc.compiler.passes.select_kernels import group_pattern
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import Group, class_name, group_functions
from specc.compiler.render.body import Body
from specc.compiler.render.function import LOCALS, Function, Speller, docstring


@dataclass(frozen=True, slots=True)
class GroupContext:
    """A fused group as an autograd.Function.

    `saved` are the values that its forward saves. `restored` are their names in the backward; it is empty if the
    backward passes all of them on directly.
    """

    name: str
    doc: tuple[str, ...]
    forward: Function
    backward: Function
    saved: str
    restored: str


def group_contexts(plan: Plan) -> tuple[GroupContext, ...]:
    """Returns the groups that have a backward. Groups that compute the same share one context."""
    names = group_functions(plan.programs)
    learned = [group for group in plan.programs.groups if group.backward.outputs]
    firsts = {names[group.name]: group for group in reversed(learned)}
    called = dict.fromkeys(names[group.name] for group in learned)
    return tuple(
        _context(plan, firsts[name], name, [group for group in learned if names[group.name] == name]) for name in called
    )


def _context(plan: Plan, group: Group, name: str, groups: list[Group]) -> GroupContext:
    """Returns the context of a group with a backward.

    A group with products accepts rows with any leading shape, flattened to one dim.
    """
    forward = _body(plan, group.forward, frozenset(group.saved))
    (_, result), *_ = group.forward.outputs
    results = dict(group.forward.outputs)
    saved = [forward.text(results.get(label, label)) for label in group.saved]
    backward = _body(plan, group.backward, reserved=LOCALS | {"ctx"})
    kernels = any(c.graph == group.backward.name and c.kernel.language != "torch" for c in plan.choices)
    contiguous: tuple[str, ...] = ("d = d.contiguous()  # kernels read rows",) if kernels else ()
    gradients = dict(group.backward.outputs)
    inputs = [label for label, _ in group.forward.inputs]
    learned = [gradients.get(f"d_{label}") for label in inputs]
    many = "tuple[" + ", ".join("Tensor" if ref else "None" for ref in learned) + "]"
    values = ", ".join(label for label in group.saved if label not in inputs)
    places = "; ".join(dict.fromkeys(_group_doc(plan, alike) for alike in groups))
    doc = f"Fused group {places}. " + (f"Keeps {values} for the backward." if values else "Keeps only its inputs.")
    arguments = tuple(f"{label}: Tensor" for label in inputs)
    restored = ", ".join(group.saved)
    lines, returns = backward.lines, ", ".join(backward.text(ref) if ref else "None" for ref in learned)
    if lines and lines[-1].partition(" = ")[0] == returns:
        lines, returns = lines[:-1], lines[-1].partition(" = ")[2]
    text = "\n".join((*lines, returns))
    once = [label for label in group.saved if _times(text, label) == 1]
    if restored and text.count(restored) == 1 and len(once) == len(group.saved):
        lines, returns = _replaced(lines, returns, re.escape(restored), "*ctx.saved_tensors")
        restored = ""
    if kernels and _times(text, "d") == 1:
        lines, returns = _replaced(lines, returns, r"\bd\b", "d.contiguous()")
        contiguous = ()
    return GroupContext(
        class_name(name),
        tuple(docstring(doc)),
        Function("forward", "", ("ctx", *arguments), forward.lines, forward.text(result), "Tensor"),
        Function(
            "backward", "", ("ctx", "d: Tensor"), (*contiguous, *lines), returns, many if len(inputs) > 1 else "Tensor"
        ),
        ", ".join(saved),
        restored,
    )


def _body(plan: Plan, graph: Graph, alive: frozenset[str] = frozenset(), reserved: frozenset[str] = LOCALS) -> Body:
    return Body(merge([graph]), Speller(plan), reserved=reserved, alive=alive)


def _group_doc(plan: Plan, group: Group) -> str:
    members = ", ".join(member.removeprefix(f"{group.scope}.") for member in group.members)
    return f"{group_pattern(plan.programs, group, group.scope)}: {members}"


def _replaced(lines: Sequence[str], returns: str, pattern: str, text: str) -> tuple[tuple[str, ...], str]:
    """Returns the lines and the returned expression with a pattern replaced."""
    return tuple(re.sub(pattern, text, line) for line in lines), re.sub(pattern, text, returns)


def _times(text: str, name: str) -> int:
    """Returns how often Python text reads a variable."""
    return len(re.findall(rf"(?<![\w.]){name}\b", text))
