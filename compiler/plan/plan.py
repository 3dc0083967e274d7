"""The plan for one target: programs, and a kernel for every node that needs a kernel."""

from typing import NamedTuple

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.plan.lock import Entry, GroupEntry, TargetLock, plan_key
from specc.compiler.programs.programs import Group, Programs
from specc.compiler.records import record
from specc.compiler.targets import Target


@record
class Choice:
    """The kernel of one node of a graph.

    Attributes:
        graph: the name of the graph that contains the node.
        site: the node and its target.
        kernel: the chosen kernel.
        rendered: the kernel's files.
        rejected: the names of the other kernels, and the reason why each was not chosen.
        passed_over: the other kernels that could compute the node.
        measured: the lock's entry of the node, or None.
    """

    graph: str
    site: Site
    kernel: Kernel
    rendered: Rendered
    rejected: tuple[tuple[str, str], ...]
    passed_over: tuple[Kernel, ...] = ()
    measured: Entry | None = None

    @property
    def listed(self) -> bool:
        """Whether plans, explanations and benchmarks list the node. They list the node if its op is `planned`, or if
        its kernel is a generated function."""
        return self.site.node.op.planned or bool(self.rendered.function)

    @property
    def key(self) -> str:
        return plan_key(self.kernel, self.site, self.rendered.tile)


class SaveChoice(NamedTuple):
    """One choice of the values that the forward pass of a group saves for the backward pass. `group` is the group with
    this choice, and `choices` are the kernels of the group's nodes."""

    group: Group
    choices: tuple[Choice, ...]

    @property
    def kernels(self) -> tuple[Choice, ...]:
        return tuple(choice for choice in self.choices if choice.rendered.function)

    @property
    def saved(self) -> tuple[str, ...]:
        """The names of the saved values that the group computes. Saved inputs of the group are not included."""
        inputs = {name for name, _ in self.group.forward.inputs}
        return tuple(name for name in self.group.saved if name not in inputs)


@record
class SaveChoices:
    """All save choices of one group.

    Attributes:
        label: The path of the group.
        name: The name of the group's entry in a lock.
        options: The save choices, beginning with the default of the group.
        chosen: The selected save choice. If the lock has measurements of the group, the fastest choice is selected.
            Otherwise, the choice that moves the fewest bytes is selected.
        measured: The lock's entry of the group, or None.
    """

    label: str
    name: str
    options: tuple[SaveChoice, ...]
    chosen: SaveChoice
    measured: GroupEntry | None

    @property
    def sites(self) -> tuple[tuple[Site, ...], ...]:
        """The nodes with kernels, for each save choice. These nodes identify the group's entry in a lock."""
        return tuple(tuple(choice.site for choice in option.kernels) for option in self.options)


@record
class Plan:
    """The input of rendering.

    Attributes:
        source: The path of the spec for the headers of generated files.
        save_choices: The groups with more than one save choice.
        locked: All measurements of the target.
    """

    name: str
    title: str
    source: str
    target: Target
    programs: Programs
    choices: tuple[Choice, ...]
    save_choices: tuple[SaveChoices, ...] = ()
    locked: TargetLock | None = None

    def choice(self, graph: Graph, node: Node) -> Choice | None:
        matching = (c for c in self.choices if c.graph == graph.name and c.site.node.name == node.name)
        return next(matching, None)

    @property
    def listed(self) -> tuple[Choice, ...]:
        return tuple(choice for choice in self.choices if choice.listed)

    @property
    def every_choice(self) -> tuple[Choice, ...]:
        """The kernel choices of the plan and of all save choices of its groups. The same kernel choice may occur more
        than once."""
        options = (option for choices in self.save_choices for option in choices.options)
        return (*self.choices, *(choice for option in options for choice in option.choices))

    @property
    def generated(self) -> tuple[Choice, ...]:
        """The choices that have generated kernel files, one choice per file."""
        choices: dict[str, Choice] = {}
        for choice in self.choices:
            if choice.rendered.function:
                choices.setdefault(choice.rendered.module, choice)
        return tuple(choices.values())

    def called(self, choice: Choice) -> str:
        """Returns the name by which model.py calls the kernel function of `choice`. If several kernels have functions
        of the same name, the result is the name of the kernel's file. Otherwise, the result is the name of the
        function."""
        function = choice.rendered.function
        modules = {c.rendered.module for c in self.choices if c.rendered.function == function}
        return function if len(modules) == 1 else choice.rendered.module


def place_pattern(programs: Programs, graphs: tuple[str, ...], node: str) -> str:
    """Returns the path of a node with wildcards, such as `blocks.*.mlp.up` for a node in several blocks. `graphs` are
    the graphs that contain the node."""
    places = [path.split(".") for graph in graphs for path in programs.call_paths.get(graph, ())]
    if not places:
        return node
    if len(set(map(len, places))) > 1:  # a block of a stage and a loop over time have paths of different depths
        return f"*.{node}"
    words = [word if all(place[i] == word for place in places) else "*" for i, word in enumerate(places[0])]
    return ".".join((*words, node))
