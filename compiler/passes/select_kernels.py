"""Chooses a kernel for every product of every fused group: of those that do not reject, the lowest rank."""

from collections.abc import Iterator

from specc.compiler import kernels
from specc.compiler.catalog import catalog
from specc.compiler.expr import ExprError
from specc.compiler.ir import Graph, Node
from specc.compiler.kernels.kernel import Kernel, Site, missing, symbol
from specc.compiler.ops.linear import Product
from specc.compiler.ops.region import Fused
from specc.compiler.plan import Choice, Plan, place_pattern
from specc.compiler.programs import Group, LoweringError, Programs
from specc.compiler.strict import Problem
from specc.compiler.targets import Target


def select_kernels(programs: Programs, target: Target, title: str, source: str) -> Plan:
    """The plan of `programs` on `target`. Raises LoweringError with every node that no kernel takes, and all
    reasons."""
    choices: list[Choice] = []
    problems: list[Problem] = []
    for group, graph, node in _products(programs):
        site = _site(programs, group, graph, node, target)
        try:
            choice = _choose(graph, site)
        except ExprError as error:
            hint = "give the activation a name: `act: {expr: ..., name: ...}`"
            problems.append(Problem(_place(programs, group), "S402", error.message, hint))
            continue
        if isinstance(choice, Choice):
            choices.append(choice)
        else:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in choice)
            message = f"no kernel of {target.name} takes {site.label}"
            hint = f"{reasons}. Change the sizes, or take the node out of fuse"
            problems.append(Problem(_place(programs, group), "S401", message, hint))
    problems += _clashes(programs, choices)
    if problems:
        raise LoweringError(tuple(problems))
    return Plan(programs.name, title, source, target, programs, tuple(choices))


def _products(programs: Programs) -> Iterator[tuple[Group, Graph, Node]]:
    for group in programs.groups:
        for graph in (group.forward, group.backward):
            for node in graph.nodes:
                if isinstance(node.op, Product):
                    yield group, graph, node


def _callers(programs: Programs, group: Group) -> tuple[str, ...]:
    """The graphs that run a group."""
    runs = (
        graph.name
        for graph in programs.graphs
        if any(isinstance(node.op, Fused) and node.op.group == group.name for node in graph.nodes)
    )
    return tuple(runs)


def group_pattern(programs: Programs, group: Group, node: str) -> str:
    """The path of a group's node over all the places that run it."""
    return place_pattern(programs, _callers(programs, group), node)


def _place(programs: Programs, group: Group) -> tuple[str | int, ...]:
    return programs.place(group_pattern(programs, group, group.scope).replace("*", "0"))


def _site(programs: Programs, group: Group, graph: Graph, node: Node, target: Target) -> Site:
    prefix = group_pattern(programs, group, node.name)
    tails = [
        member.rpartition(".")[2] if member.count(".") == 1 else member.partition(".")[2] for member in node.members
    ]
    label = " + ".join((prefix, *tails[1:]))
    return Site(node, tuple(graph.types[ref] for ref in node.inputs), target, label, programs.name)


def _choose(graph: Graph, site: Site) -> Choice | tuple[tuple[str, str], ...]:
    rejected: list[tuple[str, str]] = []
    taking: list[Kernel] = []
    known = tuple(catalog(kernels, Kernel).values())
    for kernel in known:
        reason = missing(kernel, site.target) or kernel.rejects(site)
        if reason is None:
            taking.append(kernel)
        else:
            rejected.append((kernel.name, reason))
    if not taking:
        return tuple(rejected)
    best = min(taking, key=lambda kernel: (kernel.rank(site), kernel.name))
    rejected += [
        (kernel.name, f"rank {kernel.rank(site)} against {best.rank(site)}") for kernel in taking if kernel is not best
    ]
    runnable = {kernel.name for kernel in known if missing(kernel, site.target) is None}
    considered = tuple((name, reason) for name, reason in rejected if name in runnable)
    return Choice(graph.name, site, best, best.render(site), tuple(rejected), considered)


def _clashes(programs: Programs, choices: list[Choice]) -> Iterator[Problem]:
    """Different epilogues that would be spelled with one name, and different kernels that would share a file."""
    functions: dict[str, Site] = {}
    files: dict[str, Site] = {}
    for choice in choices:
        site, epilogue = choice.site, choice.site.epilogue
        if epilogue is None:
            continue
        function, file = symbol(site)
        first, alike = functions.setdefault(function, site), files.setdefault(file, site)
        assert first.epilogue is not None
        message = ""
        if (first.node.op, first.epilogue) != (site.node.op, epilogue):
            message = f"two epilogues are named {function}: {first.epilogue.outputs[0]} and {epilogue.outputs[0]}"
        elif (alike.inputs, alike.node.types) != (site.inputs, site.node.types):
            types = [", ".join(map(str, (*one.inputs, *one.node.types))) for one in (alike, site)]
            message = f"two kernels are named {file}, of {types[0]} and of {types[1]}"
        if message:
            hint = "give one of the activations a name: `act: {expr: ..., name: ...}`"
            yield Problem(programs.place(site.label.split(" ")[0].replace("*", "0")), "S403", message, hint)
