"""Chooses a kernel for each planned node. For each fused group, chooses the values that the forward pass saves."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from specc.compiler import kernels
from specc.compiler.catalog import catalog
from specc.compiler.expr import ExprError
from specc.compiler.ir.graph import Graph, Node
from specc.compiler.kernels.kernel import NOT_REPEATABLE, Kernel, Site, refusal, symbol
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.passes.join_epilogues import title_of
from specc.compiler.passes.verify import VerifyError
from specc.compiler.pattern import matches
from specc.compiler.plan.lock import MEASURE_AGAIN, NO_LOCK, Entry, Lock, LockError, locked_kernel
from specc.compiler.plan.plan import Choice, Plan, SaveChoice, SaveChoices, place_pattern
from specc.compiler.programs.cost import graph_costs
from specc.compiler.programs.programs import Group, LoweringError, Programs
from specc.compiler.strict import Problem
from specc.compiler.targets import Target

Planned = tuple[Group | None, Graph, Node]  # a node that needs a kernel, with its group and graph
NUMBERS = 100  # the limit of numbers in names of epilogues
MANY = 4096  # the size that symbolic dims have when the save choices of a group are compared by bytes


class _Request(NamedTuple):
    """The settings of the choice of kernels: the target, the measurements, and whether kernels must be
    deterministic."""

    target: Target
    lock: Lock
    deterministic: bool


def select_kernels(
    programs: Programs, target: Target, title: str, source: str, lock: Lock = NO_LOCK, deterministic: bool = False
) -> Plan:
    """Returns the plan of `programs` on `target`.

    The lock holds measurements. A node gets its fastest measured kernel. A node without measurements gets the kernel of
    the lowest rank among the kernels that accept the node. A group gets its fastest measured save choice. A group
    without measurements gets the save choice that moves the fewest bytes.

    Args:
        programs: The programs, with fused groups.
        target: The target to compile for.
        title: The title of the plan.
        source: The path of the spec for the headers of generated files.
        lock: The measurements.
        deterministic: Whether every kernel must return the same bits in repeated calls.

    Returns:
        The plan, with the chosen groups.

    Raises:
        LoweringError: If no kernel accepts a node. The error lists all problems.
        LockError: If the kernel of a lock entry no longer accepts the node.
    """
    request = _Request(target, lock, deterministic)
    choices: list[Choice] = []
    save_choices: list[SaveChoices] = []
    problems: list[Problem] = []
    groups: list[Group] = []
    functions: dict[str, tuple[object, ...]] = {}
    for group in programs.groups:
        named = (_with_names(programs, option, target, functions) for option in (group, *group.others))
        usual, *rest = (_save_choice(programs, option, request) for option in named)
        problems += usual[1]
        options = (usual[0], *(option for option, wrong in rest if not wrong))
        chosen = options[0]
        if len(options) > 1:
            save_choices.append(_save_choices(programs, options, target, lock))
            chosen = save_choices[-1].chosen
        choices += chosen.choices
        functions = {symbol(choice.site)[0]: _computed(choice.site) for choice in chosen.choices} | functions
        groups.append(chosen.group)
    outside = ((None, graph, node) for graph in programs.graphs for node in graph.nodes if node.op.everywhere)
    others, further = _chosen(programs, outside, request)
    choices += others
    problems += further
    programs = replace(programs, groups=tuple(groups))
    if problems:
        raise LoweringError(tuple(problems))
    _check_names(choices)
    listed, locked = tuple(_with_shared_labels(choices)), lock.targets.get(target.name)
    return Plan(programs.name, title, source, target, programs, listed, tuple(save_choices), locked)


def _with_names(programs: Programs, group: Group, target: Target, functions: Mapping[str, tuple[object, ...]]) -> Group:
    """Renames each epilogue whose name is too long, or is used for a different expression. Returns the new group.
    `functions` maps the function name of each earlier group to a key for the computation of the function.

    The name of a gradient does not state the activation: the gradients of exp and of silu are both products. Its new
    name states the activation, such as `exp_grad`. Other names get a number, such as `add_2`: names do not state the
    constant factors of an expression.
    """
    taken = dict(functions)

    def named(group: Group, graph: Graph) -> Graph:
        return replace(graph, nodes=tuple(renamed(group, graph, node) for node in graph.nodes))

    def renamed(group: Group, graph: Graph, node: Node) -> Node:
        if not isinstance(node.epilogue, Pointwise):
            return node
        with suppress(ExprError):  # a name is too long, which is reported when a kernel is chosen
            for option in _named(group, node, node.epilogue):
                site = site_of(programs, group, graph, option, target)
                try:
                    function = symbol(site)[0]
                except ExprError:
                    continue
                if taken.setdefault(function, _computed(site)) == _computed(site):
                    return option
        return node

    group = replace(group, forward=named(group, group.forward))
    return replace(group, backward=named(group, group.backward))


def _named(group: Group, node: Node, epilogue: Pointwise) -> Iterator[Node]:
    """Yields a node of a group with its name, then with other names for its epilogue."""
    yield node
    forward = {member: other.epilogue for other in group.forward.nodes for member in other.members}
    gradients = (member.removesuffix(".grad") for member in node.members if member.endswith(".grad"))
    activation = next((op for name in gradients if isinstance(op := forward.get(name), Pointwise)), None)
    if activation is not None and not epilogue.title:
        epilogue = replace(epilogue, title=f"{title_of(activation)}_grad")
        yield replace(node, epilogue=epilogue)
    title = title_of(epilogue)
    for number in range(2, NUMBERS):
        yield replace(node, epilogue=replace(epilogue, title=f"{title}_{number}"))


def _save_choice(programs: Programs, group: Group, request: _Request) -> tuple[SaveChoice, list[Problem]]:
    graphs = (group.forward, group.backward)
    planned = ((group, graph, node) for graph in graphs for node in graph.nodes if node.op.planned)
    choices, problems = _chosen(programs, planned, request)
    return SaveChoice(group, choices), problems


def _chosen(
    programs: Programs, planned: Iterable[Planned], request: _Request
) -> tuple[tuple[Choice, ...], list[Problem]]:
    choices: list[Choice] = []
    problems: list[Problem] = []
    for group, graph, node in planned:
        site = replace(site_of(programs, group, graph, node, request.target), deterministic=request.deterministic)
        try:
            choice = _choose(graph, site, request.lock.entry(request.target.name, site))
        except ExprError as error:
            hint = "give the activation a name: `act: {expr: ..., name: ...}`"
            problems.append(Problem(_place(programs, group, graph, node), "S402", error.message, hint))
            continue
        if isinstance(choice, Choice):
            choices.append(choice)
        else:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in choice)
            message = f"no kernel for {request.target.name} computes {site.label}"
            hint = f"change the sizes, or remove the node from `fuse`. No kernel fits: {reasons}"
            problems.append(Problem(_place(programs, group, graph, node), "S401", message, hint))
    return tuple(choices), problems


def _save_choices(programs: Programs, options: tuple[SaveChoice, ...], target: Target, lock: Lock) -> SaveChoices:
    """Returns the save choices of a group, and chooses one of them: the choice in the lock, otherwise the choice that
    moves the fewest bytes. If several choices move the fewest bytes, and the default is one of these choices, the
    default is chosen."""
    group = options[0].group
    # The name contains the kernel of the default save choice, because other save choices may have another kernel
    name = " ".join((group.name, *(choice.rendered.module for choice in options[0].kernels[:1])))
    label = group_pattern(programs, group, group.scope)
    choices = SaveChoices(label, name, options, min(options, key=_moved), None)
    measured = lock.group(target.name, name, choices.sites)
    if measured is None:
        return choices
    return replace(choices, chosen={o.group.keep: o for o in options}[measured.keep], measured=measured)


def _moved(option: SaveChoice) -> int:
    graphs = (option.group.forward, option.group.backward)
    sizes = {
        dim: MANY for graph in graphs for type in graph.types.values() for dim in type.shape if isinstance(dim, str)
    }
    between = (type.bytes(sizes) for choice in option.choices for type in choice.kernel.between(choice.site))
    return sum(cost.bytes for graph in graphs for cost in graph_costs(graph, sizes)) + sum(between)


def group_pattern(programs: Programs, group: Group, node: str) -> str:
    """Returns one path pattern that matches a node of a group wherever the group runs."""
    return place_pattern(programs, programs.callers[group.name], node)


def _place(programs: Programs, group: Group | None, graph: Graph, node: Node) -> tuple[str | int, ...]:
    place = group_pattern(programs, group, group.scope) if group else place_pattern(programs, (graph.name,), node.name)
    return programs.place(place.replace("*", "0"))


def site_of(programs: Programs, group: Group | None, graph: Graph, node: Node, target: Target) -> Site:
    if group is None:
        prefix = place_pattern(programs, (graph.name,), node.name)
        node = replace(node, types=tuple(map(node.op.site_type, node.types)))
        inputs = tuple(node.op.site_type(graph.types[ref]) for ref in node.inputs)
    else:
        prefix = group_pattern(programs, group, node.name)
        inputs = tuple(graph.types[ref] for ref in node.inputs)
    label = " + ".join((prefix, *(_tail(member, node.name.rpartition(".")[0]) for member in node.members[1:])))
    return Site(node, inputs, target, label, programs.name, programs.context)


def _tail(member: str, part: str) -> str:
    if member.startswith(f"{part}."):
        return member.removeprefix(f"{part}.")
    return member.partition(".")[2]


def _choose(graph: Graph, site: Site, entry: Entry | None) -> Choice | tuple[tuple[str, str], ...]:
    known = [kernel for kernel in catalog(kernels, Kernel).values() if isinstance(site.node.op, kernel.computes)]
    reasons = [(kernel, refusal(kernel, site)) for kernel in known]
    rejected = [(kernel.name, reason) for kernel, reason in reasons if reason is not None]
    taking = [kernel for kernel, reason in reasons if reason is None]
    if not taking:
        return tuple(rejected)
    best = min(taking, key=lambda kernel: (kernel.rank(site), kernel.name))
    if entry is not None and dict(rejected).get(entry.kernel) == NOT_REPEATABLE:
        entry = None  # measured without train.deterministic
    if entry is not None:
        best = _measured(site, entry, taking, rejected)
    others = [kernel for kernel in taking if kernel.name != best.name]
    slower = "was measured slower, or not measured" if entry else f"{best.name} has the lower rank; not measured"
    rejected += [(kernel.name, slower) for kernel in others]
    return Choice(graph.name, site, best, best.render(site), tuple(rejected), tuple(others), entry)


def _measured(site: Site, entry: Entry, taking: Sequence[Kernel], rejected: Sequence[tuple[str, str]]) -> Kernel:
    """Returns the kernel of a lock entry. Raises LockError with the name of the lock file if the kernel no longer
    accepts the node."""
    file = f"{site.module}.lock.json"
    try:
        kernel = locked_kernel(entry)
    except LockError as error:
        raise LockError(f"{file}, {site.target.name}: {error.message}", error.hint) from None
    reason: str | None = dict(rejected).get(kernel.name, "computes something else")
    if any(other.name == kernel.name for other in taking):
        reason = kernel.rejects(site)  # the kernel also checks the measured tile
    if reason is not None:
        message = f"the lock chose {kernel.name} for {entry.node}, but this kernel {reason}"
        raise LockError(f"{file}, {site.target.name}: {message}", MEASURE_AGAIN)
    return kernel


def _with_shared_labels(choices: Sequence[Choice]) -> Iterator[Choice]:
    """Yields the choices. A file that several nodes share is rendered again with the labels of all these nodes."""
    labels: dict[str, list[str]] = {}
    for choice in choices:
        labels.setdefault(choice.rendered.module, []).append(choice.site.label)
    for choice in choices:
        alike = tuple(dict.fromkeys(labels[choice.rendered.module]))
        if choice.rendered.files and len(alike) > 1:
            choice = replace(choice, rendered=choice.kernel.render(replace(choice.site, label=together(alike))))
        yield choice


def together(labels: Sequence[str]) -> str:
    """Joins labels. Labels that differ in one word become one pattern, such as `blocks.*.attention.{q,k}.rope`. All
    other labels are joined with ` and `. A label is left out if another label covers it, such as `blocks.9.attention.y`
    next to `blocks.*.attention.y`. A change of one block then does not change the text of a kernel that all blocks
    share."""
    labels = [label for label in labels if not any(matches(other, label) for other in labels if other != label)]
    split = [re.split(r"([. ])", label) for label in labels]
    if len({len(words) for words in split}) == 1:
        differing = [i for i, words in enumerate(zip(*split, strict=True)) if len(set(words)) > 1]
        if len(differing) == 1:
            before, after = split[0][: differing[0]], split[0][differing[0] + 1 :]
            return "".join((*before, "{", ",".join(words[differing[0]] for words in split), "}", *after))
    return " and ".join(labels)


def _check_names(choices: Sequence[Choice]) -> None:
    """Raises VerifyError if two kernels have one name. `_with_names` prevents this."""
    functions: dict[str, Site] = {}
    files: dict[str, Site] = {}
    for choice in choices:
        site = choice.site
        if not choice.rendered.files:
            continue
        function, file = symbol(site)
        # The function name of a node without an epilogue contains only the op. `Plan.called` therefore calls such
        # functions by the name of the file. Two steps of an LSTM with 8 bits and with 16 bits, for example, can then
        # coexist.
        first = functions.setdefault(file if site.epilogue is None else function, site)
        alike = files.setdefault(file, site)
        if _computed(first) != _computed(site) or (alike.inputs, alike.node.types) != (site.inputs, site.node.types):
            raise VerifyError(f"two kernels are named {file}: {first.label} and {site.label}")


def _computed(site: Site) -> tuple[object, ...]:
    """Returns a key for the function of a node. Nodes with different keys need different function names. The key does
    not contain sizes, because kernels of different sizes have different file names."""
    types = tuple((type.dtype, len(type.shape)) for type in (*site.inputs, *site.node.types))
    return site.node.op.words, site.node.op.arity, site.epilogue, types
