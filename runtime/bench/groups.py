"""Measures every fused group as a whole, forward in its training form, and forward and backward, beside the plain
function."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from specc.compiler import pipeline
from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.ops.region import Fused
from specc.compiler.plan.plan import Plan, place_pattern
from specc.compiler.programs import reference
from specc.compiler.programs.cost import boundary_bytes, graph_costs
from specc.compiler.programs.programs import Group, Programs
from specc.compiler.spec.spec import Spec
from specc.runtime.bench.kernels import Row, wrong
from specc.runtime.bench.plain import plain_nodes
from specc.runtime.bench.timing import alternate
from specc.runtime.bench.variants import EAGER, GENERATED, as_trained, baselines, failures
from specc.runtime.errors import RunFailure
from specc.runtime.model.load import group_function, replace_fuse
from specc.runtime.verify.judge import Composed, composed, poisoned, upcast
from specc.runtime.verify.random_inputs import Operands, Value, sizes_of

FORWARD, BOTH = "forward", "forward + backward"
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Members:
    """The nodes that a group replaced, in their original graph, and the values that they read from outside, in
    order."""

    graph: Graph
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]

    @property
    def output(self) -> str:
        """The output of the group: the last node's value is the only one that is read from outside."""
        return self.nodes[-1].name


def members_of(spec: Spec, programs: Programs, target: str, group: Group) -> Members:
    """Returns a group's members, from the same spec without fusion points.

    Args:
        spec: the spec with fusion points.
        programs: its programs on the target.
        target: the target.
        group: a group of `programs`.
    """
    plain = pipeline.run(replace_fuse(spec), target)
    host = hosts(programs, group)[0]
    graph = next(graph for graph in plain.graphs if graph.name == host)
    nodes = tuple(node for node in graph.nodes if node.name in group.members)
    inside = {node.name for node in nodes}
    external = dict.fromkeys(ref for node in nodes for ref in node.inputs if node_of(ref) not in inside)
    return Members(graph, nodes, tuple(external))


def hosts(programs: Programs, group: Group) -> tuple[str, ...]:
    """Returns the names of the graphs that run a group."""

    def runs(node: Node) -> bool:
        return isinstance(node.op, Fused) and node.op.group == group.name

    return tuple(graph.name for graph in programs.graphs if any(map(runs, graph.nodes)))


def labelled(programs: Programs) -> Iterator[tuple[Group, str]]:
    """Yields each group with its place in display form. If several groups have the same place, it includes the graphs
    that run the group."""
    places = [place_pattern(programs, hosts(programs, group), group.scope) for group in programs.groups]
    for group, place in zip(programs.groups, places, strict=True):
        yield group, place if places.count(place) == 1 else f"{place} in {', '.join(hosts(programs, group))}"


def require_place(plan: Plan, parts: Sequence[str], at: str) -> None:
    """Raises RunFailure, before anything is measured, if `parts` are only kernels or groups and none of these has a
    path that contains `at`."""
    places = {
        "kernels": {choice.site.label for choice in plan.choices},
        "groups": {place for _, place in labelled(plan.programs)},
    }
    if not at or not parts or not places.keys() >= set(parts):
        return
    known = sorted(set().union(*(places[part] for part in parts)))
    if not any(at in place for place in known):
        raise RunFailure(f"no kernel and no group is at {at}", f"there are: {', '.join(known) or 'none'}")


def group_rows(
    spec: Spec,
    plan: Plan,
    module: ModuleType,
    plain: ModuleType,
    device: torch.device,
    at: str,
    say: Callable[[str], None],
) -> Iterator[Row]:
    """Yields the rows of each group whose path contains `at`: forward, and forward and backward if it has gradients.

    Args:
        spec: the spec.
        plan: its plan.
        module: the generated model.py with fusion points.
        plain: the generated model.py without fusion points.
        device: the device to measure on.
        at: the text that paths must contain.
        say: reports progress.

    Raises:
        RunFailure: if values or gradients of a group are wrong.
    """
    for group, where in labelled(plan.programs):
        if at not in where or not group.backward.outputs:  # without a gradient it is its kernels, timed as such
            continue
        say(f"group {where}")
        members = members_of(spec, plan.programs, plan.target.name, group)
        yield from _rows(spec, group, members, where, group_function(module, plan.programs, group), plain, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _rows(
    spec: Spec, group: Group, members: Members, where: str, own: Function, plain: ModuleType, device: torch.device
) -> Iterator[Row]:
    sizes = sizes_of(spec)
    function = plain_nodes(members.nodes, members.graph.types, members.inputs, members.output, plain)
    calls = {**baselines(function, device), GENERATED: as_trained(own, device)}
    operands = Operands(spec, device)
    inputs = operands.of(members.inputs, [type for _, type in group.forward.inputs])
    learned = {name.removeprefix("d_") for name, _ in group.backward.outputs}
    leaves = [i for i, (name, _) in enumerate(group.forward.inputs) if name in learned]
    for i in leaves:
        inputs[i] = _leaf(inputs[i])
    gradient = operands.tensor(members.nodes[-1].type)
    passes = {name: Pass(call, inputs, leaves, gradient) for name, call in calls.items()}
    failed = failures({name: passes[name].results for name in passes})
    passes = {name: one for name, one in passes.items() if name not in failed}
    accuracy = _accuracy(where, members, passes, Pass(own, inputs, leaves, gradient))
    forward, backward = (
        (sum(cost.flops for cost in graph_costs(graph, sizes)), boundary_bytes(graph, sizes), _written(graph, sizes))
        for graph in (group.forward, group.backward)
    )
    order = (GENERATED, *(name for name in passes if name != GENERATED))
    times = alternate({name: passes[name].forward for name in order}, device, forward[1])
    yield Row(f"{where}, {FORWARD}", group.name, *forward, times, accuracy=accuracy, failed=failed)
    if leaves:
        flops, moved, written = (a + b for a, b in zip(forward, backward, strict=True))
        times = alternate({name: passes[name].both for name in order}, device, moved)
        yield Row(f"{where}, {BOTH}", group.name, flops, moved, written, times, accuracy=accuracy, failed=failed)


def _written(graph: Graph, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of the outputs of a graph, counting each tensor once."""
    read = {name for name, _ in graph.inputs} | {f"@{name}" for name, _ in graph.params}
    return sum(graph.types[ref].bytes(sizes) for ref in {ref for _, ref in graph.outputs} - read)


def _leaf(value: Value) -> Tensor:
    assert isinstance(value, Tensor)
    return value.detach().requires_grad_()


@dataclass(frozen=True, slots=True)
class Pass:
    """One implementation of a group on its inputs. `leaves` are the indices of the inputs that require a gradient."""

    call: Function
    inputs: Sequence[Value]
    leaves: Sequence[int]
    gradient: Tensor

    def forward(self) -> Tensor:
        """Returns the value. If there is a backward, everything that it needs is saved."""
        result: Tensor = self.call(*self.inputs)
        return result

    def both(self) -> tuple[Tensor, ...]:
        """Returns the gradients of all leaves."""
        wanted = [value for i in self.leaves if isinstance(value := self.inputs[i], Tensor)]
        return torch.autograd.grad(self.forward(), wanted, self.gradient)

    def results(self) -> tuple[Tensor, ...]:
        """Returns the value, followed by the gradients if there are leaves."""
        return self.forward().detach(), *(self.both() if self.leaves else ())


def _accuracy(where: str, members: Members, passes: Mapping[str, Pass], written: Pass) -> Composed:
    """Compares value and gradients of the generated group with those of the members' references, by autograd: first as
    `written`, on poisoned memory, then as it is timed. The references are in float64, or in float32 if the device's
    memory is too small. Raises RunFailure if a result is wrong. Returns the worst error."""

    def exact(dtype: torch.dtype) -> tuple[Tensor, ...]:
        first = passes[EAGER]
        inputs = [upcast(value.detach() if isinstance(value, Tensor) else value, dtype) for value in first.inputs]
        for i in first.leaves:
            inputs[i] = _leaf(inputs[i])
        wide = Pass(lambda *given: _reference(members, given), inputs, first.leaves, first.gradient.to(dtype))
        return wide.results()

    with poisoned():
        found = written.results()
    plain, wanted = passes[EAGER].results(), _widest(exact)
    _judged(f"group {where}", found, plain, wanted)
    return _judged(f"group {where}, as it is timed", passes[GENERATED].results(), plain, wanted)


def _widest(exact: Callable[[torch.dtype], Sequence[Tensor]]) -> Sequence[Tensor]:
    try:
        return exact(torch.float64)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return exact(torch.float32)


def _judged(name: str, found: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor]) -> Composed:
    worst = []
    for i, (seen, good) in enumerate(composed(found, plain, exact)):
        if not good:
            words = f"is off by {seen.generated:.1e} of its norm against {seen.exact}, plain Torch by {seen.eager:.1e}"
            raise wrong(name, f"output {i} {words}")
        worst.append(seen)
    return max(worst, key=lambda seen: seen.generated)


def _reference(members: Members, given: Sequence[Any]) -> Tensor:
    values = dict(zip(members.inputs, given, strict=True))
    for node in members.nodes:
        values |= zip(node.outputs, reference.node_value(node, [values[ref] for ref in node.inputs]), strict=True)
    result: Tensor = values[members.output]
    return result
