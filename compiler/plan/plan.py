"""The plan: programs with a kernel chosen for every product of every fused group, on one target."""

from collections.abc import Sequence
from dataclasses import dataclass

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.ops.region import Call, Scan
from specc.compiler.plan.lock import Entry, Kept, Machine, plan_key
from specc.compiler.programs.programs import Group, Programs
from specc.compiler.targets import Target


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of one node of a group. `rejected` are the others, each with its reason, and `considered`
    those of them that the target could run; `graph` is where the node is, `measured` what the lock has of it."""

    graph: str
    site: Site
    kernel: Kernel
    rendered: Rendered
    rejected: tuple[tuple[str, str], ...]
    considered: tuple[tuple[str, str], ...] = ()
    measured: Entry | None = None

    @property
    def key(self) -> str:
        """The plan key that the files of the kernel have in their headers."""
        return plan_key(self.kernel, self.site, self.rendered.tile)


@dataclass(frozen=True, slots=True)
class Way:
    """A group that keeps something for its backward, and the kernels of its nodes."""

    group: Group
    choices: tuple[Choice, ...]

    @property
    def own(self) -> tuple[Choice, ...]:
        """The choices with a kernel of their own."""
        return tuple(choice for choice in self.choices if choice.rendered.function)


@dataclass(frozen=True, slots=True)
class Alternatives:
    """All ways of one group, what is usual first, and the one that the plan takes: by rule, or as the lock `measured`,
    where the group has `name`."""

    label: str
    name: str
    ways: tuple[Way, ...]
    chosen: Way
    measured: Kept | None


def sites_of(ways: Sequence[Way]) -> tuple[tuple[Site, ...], ...]:
    """The nodes of a group that have kernels of their own, way by way: what a lock's entry of the group is for."""
    return tuple(tuple(choice.site for choice in way.own) for way in ways)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that rendering needs. `source` is the spec's path as generated files name it; `alternatives` are the
    groups for which there was more than one way; `machine` is where the lock was measured."""

    name: str
    title: str
    source: str
    target: Target
    programs: Programs
    choices: tuple[Choice, ...]
    alternatives: tuple[Alternatives, ...] = ()
    machine: Machine | None = None

    def choice(self, graph: Graph, node: Node) -> Choice | None:
        """The kernel of a node; None for one that Torch runs as it is written."""
        found = (c for c in self.choices if c.graph == graph.name and c.site.node.name == node.name)
        return next(found, None)

    @property
    def every_choice(self) -> tuple[Choice, ...]:
        """The choices, and those of every way to keep something for a backward; one may be there twice."""
        others = (choice for found in self.alternatives for way in found.ways for choice in way.choices)
        return (*self.choices, *others)

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
    words = [word if all(place[i] == word for place in places) else "*" for i, word in enumerate(places[0])]
    return ".".join((*words, node))
