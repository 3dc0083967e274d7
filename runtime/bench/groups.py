"""Measures every fused group as a whole. As a baseline, measures the nodes of the group in plain Torch.

For the group and for its baseline, two times are measured: the time of the forward pass, and the time of the forward
pass followed by the backward pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from specc.compiler import pipeline
from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.plan.plan import Plan, place_pattern
from specc.compiler.programs import reference
from specc.compiler.programs.cost import boundary_bytes, graph_costs
from specc.compiler.programs.programs import Group, Programs
from specc.compiler.spec.spec import Spec
from specc.runtime.bench.ceilings import Work
from specc.runtime.bench.environment import Setup
from specc.runtime.bench.kernels import Row, wrong
from specc.runtime.bench.plain import plain_nodes
from specc.runtime.bench.timing import alternate
from specc.runtime.bench.variants import EAGER, GENERATED, as_trained, baselines, failures
from specc.runtime.errors import RunFailure
from specc.runtime.model.load import group_function
from specc.runtime.verify.judge import Composed, composed, poisoned, upcast
from specc.runtime.verify.random_inputs import Operands, sizes_of

FORWARD, BOTH = "forward", "forward + backward"
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Members:
    """The nodes of the unfused graph that a fused group replaces. `inputs` are the names of the values that these nodes
    read from nodes outside the group.
    """

    graph: Graph
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]

    @property
    def output(self) -> str:
        """The name of the last node of the group, whose value is the output of the group. Nodes outside the group read
        only this value of the group.
        """
        return self.nodes[-1].name


def members_of(spec: Spec, programs: Programs, target: str, group: Group) -> Members:
    """Returns the nodes of the unfused graph that a fused group replaces.

    Args:
        spec: the spec, including its fusion points.
        programs: the programs of the spec on the target.
        target: the target of `programs`.
        group: a group of `programs`.
    """
    plain = pipeline.run(spec.plain, target)
    host = programs.callers[group.name][0]
    graph = next(graph for graph in plain.graphs if graph.name == host)
    nodes = tuple(node for node in graph.nodes if node.name in group.members)
    inside = {node.name for node in nodes}
    external = dict.fromkeys(ref for node in nodes for ref in node.inputs if node_of(ref) not in inside)
    return Members(graph, nodes, tuple(external))


def labelled(programs: Programs) -> Iterator[tuple[Group, str]]:
    """Yields each group of `programs` with a path to display in reports.

    If several groups have the same path, the displayed path also names the graphs that run the group.
    """
    places = [place_pattern(programs, programs.callers[group.name], group.scope) for group in programs.groups]
    for group, place in zip(programs.groups, places, strict=True):
        yield group, place if places.count(place) == 1 else f"{place} in {', '.join(programs.callers[group.name])}"


def require_place(plan: Plan, parts: Sequence[str], at: str) -> None:
    """Checks, before any measurement, that the text `at` occurs in the path of a kernel or a group to measure.

    `parts` are the names of the parts of the benchmark to run. If `parts` is empty, or has an entry other than
    `kernels` and `groups`, nothing is checked. Raises RunFailure if the text occurs in no path.
    """
    places = {
        "kernels": {choice.site.label for choice in plan.choices},
        "groups": {place for _, place in labelled(plan.programs)},
    }
    if not at or not parts or not places.keys() >= set(parts):
        return
    known = sorted(set().union(*(places[part] for part in parts)))
    if not any(at in place for place in known):
        raise RunFailure(f"no kernel or group has {at} in its name", f"the names are: {', '.join(known) or 'none'}")


def group_rows(setup: Setup, plan: Plan, module: ModuleType, plain: ModuleType, at: str) -> Iterator[Row]:
    """Yields two rows for each group whose path contains `at`: the forward pass, and forward plus backward.

    Groups without gradients are omitted, because the benchmark measures them as kernels.

    Args:
        setup: the setup of the benchmark.
        plan: the plan, whose groups are measured.
        module: the module model.py that was generated with fusion.
        plain: the module model.py that was generated without fusion.
        at: only groups whose path contains this text are measured.

    Raises:
        RunFailure: if a group computes wrong values or gradients.
    """
    for group, place in labelled(plan.programs):
        if at in place and group.backward.outputs:
            setup.say(f"group {place}")
            members = members_of(setup.spec, plan.programs, setup.target, group)
            yield from _rows(setup, group, members, place, group_function(module, plan.programs, group), plain)
            if setup.device.type == "cuda":
                torch.cuda.empty_cache()


def _rows(
    setup: Setup, group: Group, members: Members, place: str, generated: Function, plain: ModuleType
) -> Iterator[Row]:
    device, sizes = setup.device, sizes_of(setup.spec)
    function = plain_nodes(members.nodes, members.graph.types, members.inputs, members.output, plain)
    operands = Operands(setup.spec, device)
    inputs = operands.of(members.inputs, [type for _, type in group.forward.inputs])
    learned = {name.removeprefix("d_") for name, _ in group.backward.outputs}
    leaves = [i for i, (name, _) in enumerate(group.forward.inputs) if name in learned]
    run = Pass(generated, _with_leaves(inputs, leaves), leaves, operands.tensor(members.nodes[-1].type))
    calls = {GENERATED: as_trained(generated, device), **baselines(function, device)}
    passes = {name: replace(run, call=call) for name, call in calls.items()}
    failed = failures({name: passes[name].results for name in passes})
    passes = {name: variant for name, variant in passes.items() if name not in failed}
    accuracy = _accuracy(place, members, passes, run)
    forward, backward = (_work(graph, sizes) for graph in (group.forward, group.backward))
    for title, work in ((FORWARD, forward), (BOTH, forward + backward)):
        calls = {name: functions.forward if title == FORWARD else functions.both for name, functions in passes.items()}
        times = alternate(calls, device, work.bytes)
        yield Row(f"{place}, {title}", group.name, work, times, accuracy=accuracy, failed=failed)


def _work(graph: Graph, sizes: Mapping[str, int]) -> Work:
    read = {name for name, _ in graph.inputs} | {f"@{name}" for name, _ in graph.params}
    written = sum(graph.types[ref].bytes(sizes) for ref in {ref for _, ref in graph.outputs} - read)
    return Work(sum(cost.flops for cost in graph_costs(graph, sizes)), boundary_bytes(graph, sizes), written)


def _with_leaves(inputs: Sequence[Any], leaves: Sequence[int]) -> list[Any]:
    return [value.detach().requires_grad_() if i in leaves else value for i, value in enumerate(inputs)]


@dataclass(frozen=True, slots=True)
class Pass:
    """One implementation of a group, with its inputs. `leaves` has the indices of the inputs that require a
    gradient.
    """

    call: Function
    inputs: Sequence[Any]
    leaves: Sequence[int]
    gradient: Tensor

    def forward(self) -> Tensor:
        result: Tensor = self.call(*self.inputs)
        return result

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(), [self.inputs[i] for i in self.leaves], self.gradient)

    def results(self) -> tuple[Tensor, ...]:
        return self.forward().detach(), *self.both()


def _accuracy(place: str, members: Members, passes: Mapping[str, Pass], run: Pass) -> Composed:
    """Compares the results and gradients of a generated group, `run`, with references. Returns the largest error.

    `passes` has the timed implementations of the group. The function first runs the generated group in eager mode,
    while newly allocated memory is filled with NaN. It then checks the compiled form of the group, which is timed. The
    references are computed in float64, or in float32 if float64 needs too much memory. Raises RunFailure if a result is
    wrong.
    """
    eager = passes[EAGER]

    def exact(dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = _with_leaves([upcast(value, dtype) for value in eager.inputs], eager.leaves)
        return Pass(partial(_reference, members), inputs, eager.leaves, eager.gradient.to(dtype)).results()

    with poisoned():
        results = run.results()
    try:
        expected = exact(torch.float64)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        expected = exact(torch.float32)
    plain = eager.results()
    _judged(f"group {place}", results, plain, expected)
    return _judged(f"group {place}, as it is timed", passes[GENERATED].results(), plain, expected)


def _judged(name: str, results: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor]) -> Composed:
    errors = list(composed(results, plain, exact))
    for i, (error, ok) in enumerate(errors):
        if not ok:
            size = f"{error.generated:.1e} of its norm (reference: {error.exact}), and plain Torch by {error.eager:.1e}"
            raise wrong(name, f"output {i} is off by {size}")
    return max((error for error, _ in errors), key=lambda error: error.generated)


def _reference(members: Members, *inputs: Any) -> Tensor:
    values = dict(zip(members.inputs, inputs, strict=True))
    for node in members.nodes:
        values |= zip(node.outputs, reference.node_value(node, [values[ref] for ref in node.inputs]), strict=True)
    result: Tensor = values[members.output]
    return result
