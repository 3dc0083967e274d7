"""The plan: programs with a kernel chosen for every product of every fused group, on one target."""

from dataclasses import dataclass

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.ops.region import Call, Scan
from specc.compiler.plan.lock import Entry, GroupEntry, TargetLock, plan_key
from specc.compiler.programs.programs import Group, Programs
from specc.compiler.targets import Target


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of one node of a group. `rejected` are the others, each with its reason, and `passed_over` those of
    them that take the node; `graph` is where the node is, `measured` what the lock has of it."""

    graph: str
    site: Site
    kernel: Kernel
    rendered: Rendered
    rejected: tuple[tuple[str, str], ...]
    passed_over: tuple[Kernel, ...] = ()
    measured: Entry | None = None

    @property
    def key(self) -> str:
        """The plan key that the files of the kernel have in their headers."""
        return plan_key(self.kernel, self.site, self.rendered.tile)


@dataclass(frozen=True, slots=True)
class SaveChoice:
    """One choice of what a group saves for its backward: the group as it is then, and the kernels of its nodes."""

    group: Group
    choices: tuple[Choice, ...]

    @property
    def kernels(self) -> tuple[Choice, ...]:
        """The choices with a kernel of their own."""
        return tuple(choice for choice in self.choices if choice.rendered.function)

    @property
    def saved(self) -> tuple[str, ...]:
        """The values that the group saves of what it computes itself."""
        inputs = {name for name, _ in self.group.forward.inputs}
        return tuple(name for name in self.group.saved if name not in inputs)


@dataclass(frozen=True, slots=True)
class SaveChoices:
    """All save choices of the group at `label`, the usual one first, and the one that the plan takes: by rule, or as
    the lock `measured`, where the group has `name`."""

    label: str
    name: str
    options: tuple[SaveChoice, ...]
    chosen: SaveChoice
    measured: GroupEntry | None

    @property
    def sites(self) -> tuple[tuple[Site, ...], ...]:
        """The nodes with kernels of their own, option by option: what a lock's entry of the group is for."""
        return tuple(tuple(choice.site for choice in option.kernels) for option in self.options)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that rendering needs. `source` is the spec's path as generated files name it; `save_choices` are those
    of the groups that have more than one; `locked` is all that was measured on the target."""

    name: str
    title: str
    source: str
    target: Target
    programs: Programs
    choices: tuple[Choice, ...]
    save_choices: tuple[SaveChoices, ...] = ()
    locked: TargetLock | None = None

    def choice(self, graph: Graph, node: Node) -> Choice | None:
        """The kernel of a node; None for one that Torch runs as it is written."""
        matching = (c for c in self.choices if c.graph == graph.name and c.site.node.name == node.name)
        return next(matching, None)

    @property
    def every_choice(self) -> tuple[Choice, ...]:
        """The choices, and those of every save choice; one may be there twice."""
        options = (option for choices in self.save_choices for option in choices.options)
        return (*self.choices, *(choice for option in options for choice in option.choices))

    def called(self, choice: Choice) -> str:
        """What model.py calls the function of a kernel: its file's name where kernels of several shapes share one."""
        function = choice.rendered.function
        modules = {c.rendered.module for c in self.choices if c.rendered.function == function}
        return function if len(modules) == 1 else choice.rendered.module


def place_pattern(programs: Programs, graphs: tuple[str, ...], node: str) -> str:
    """A node's path as people write it: `blocks.*.mlp.up` for one of functions that several blocks call."""
    calls = [call.op for program in programs.programs for call in program.nodes if isinstance(call.op, Call | Scan)]
    places = [call.at.split(".") for call in calls if call.callee in graphs]
    if not places:
        return node
    if len(set(map(len, places))) > 1:  # a block of a stage and a loop over time are places of different depth
        return f"*.{node}"
    words = [word if all(place[i] == word for place in places) else "*" for i, word in enumerate(places[0])]
    return ".".join((*words, node))
