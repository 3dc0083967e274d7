"""Programs over whole sequences, and the nodes that a key of the spec selects in their graphs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from specc.compiler.ir.graph import Graph
from specc.compiler.ops.region import Call
from specc.compiler.pattern import matches, of_all_blocks
from specc.compiler.programs.programs import LoweringError, Programs, Rewriting
from specc.compiler.strict import Problem

Patterns = Sequence[str] | Literal["auto"]


def whole_sequences(programs: Programs) -> Iterator[tuple[Graph, str]]:
    """Yields pairs (graph, path) for every graph that a whole-sequence program runs, one pair for each path at which
    the graph runs. Programs that fake-quantize inputs are skipped."""
    rounded = {phase.train for phase in programs.phases if phase.rounds}
    for name in (name for name in programs.whole if name not in rounded):
        program = programs.program(name)
        yield program, ""
        for node in program.nodes:
            if isinstance(node.op, Call):
                yield programs.function(node.op.callee), node.op.at


@dataclass
class Requests:
    """The nodes that a pass rewrites. A key of the spec names these nodes. With `auto`, the pass rewrites all nodes for
    which it expects a gain.

    A pattern names a node if it matches the path of the node, or the path of a part that contains the node. A pattern
    without effect is an error, which states the reason.

    Attributes:
        programs: The programs before the pass.
        step: The name of the pass.
        key: The key of the spec that names nodes, such as `merge`.
        patterns: The patterns of the key. `auto` leaves the choice to the pass.
    """

    programs: Programs
    step: str
    key: str
    patterns: Patterns
    _places: dict[str, dict[str, None]] = field(default_factory=dict)  # for each graph, the paths at which it runs
    _used: set[int] = field(default_factory=set)
    _problems: list[Problem] = field(default_factory=list)
    _rewritings: dict[Rewriting, None] = field(default_factory=dict)

    def run(self, rewrite: Callable[[Graph], Graph]) -> Programs:
        """Returns the programs with `rewrite` applied to every function that only whole-sequence programs call. Layers
        outside of functions are not rewritten, because they run only once.

        Raises:
            LoweringError: If a pattern matches no node that the pass rewrites, or if it matches a node that the pass
                cannot rewrite. Also if a pattern matches only some of the nodes that share generated code. The error
                lists all problems.
        """
        whole: set[str] = set()
        for graph, at in whole_sequences(self.programs):
            if at:
                self._places.setdefault(graph.name, {})[at] = None
            else:
                whole.add(graph.name)
        others = (program for program in self.programs.programs if program.name not in whole)
        shared = {node.op.callee for program in others for node in program.nodes if isinstance(node.op, Call)}
        functions = tuple(
            rewrite(graph) if graph.name in self._places and graph.name not in shared else graph
            for graph in self.programs.functions
        )
        for i, pattern in enumerate(() if self.patterns == "auto" else self.patterns):
            if i not in self._used:
                message = f"`{pattern}` matches nothing that `{self.key}` can change"
                hint = f"remove the pattern; with `{self.key}: auto`, PLAN.md lists all that `{self.key}` changes"
                self._problems.append(Problem((self.key, i), "S302", message, hint))
        if self._problems:
            raise LoweringError(tuple(self._problems))
        rewritings = (*self.programs.rewritings, *self._rewritings)
        return replace(self.programs, functions=functions, rewritings=rewritings)

    def names(self, graph: Graph, node: str) -> bool:
        """Returns whether the pass should rewrite a node. With `auto`, the result is always True. Otherwise, a pattern
        must match all paths of the node. A pattern that matches only some of the paths is recorded as a problem."""
        if self.patterns == "auto":
            return True
        paths = self._paths(graph, node)
        for i, pattern in enumerate(self.patterns):
            covered = [path for path in paths if _covers(pattern, path)]
            if not covered:
                continue
            self._used.add(i)
            if len(covered) == len(paths):
                return True
            left = next(path for path in paths if path not in covered)
            message = f"`{pattern}` matches {covered[0]}, but not {left}; both run the same generated code"
            hint = f"match all blocks that run this code, e.g. `{of_all_blocks(pattern)}`"
            self._report(Problem((self.key, i), "S303", message, hint))
            return False
        return False

    def done(self, graph: Graph, nodes: Sequence[str], text: str) -> None:
        """Records that the pass has rewritten `nodes`. `text` describes the effect."""
        self._rewritings[Rewriting(self.step, self._shown(graph, nodes), text)] = None

    def refuse(self, graph: Graph, nodes: Sequence[str], reason: str) -> None:
        """Records the reason why the pass cannot rewrite `nodes`. If a pattern of the spec names the nodes, records the
        reason as an error."""
        if self.patterns == "auto":
            self._rewritings[Rewriting(self.step, self._shown(graph, nodes), "", reason)] = None
            return
        path = self._paths(graph, nodes[0])[0]
        at = next(i for i, pattern in enumerate(self.patterns) if _covers(pattern, path))
        hint = "narrow the pattern, or remove it"
        self._report(Problem((self.key, at), "S304", f"{', '.join(self._shown(graph, nodes))}: {reason}", hint))

    def _report(self, problem: Problem) -> None:
        if all((other.path, other.code) != (problem.path, problem.code) for other in self._problems):
            self._problems.append(problem)

    def _paths(self, graph: Graph, node: str) -> list[str]:
        return [f"{at}.{node}" for at in self._places[graph.name]]

    def _shown(self, graph: Graph, nodes: Sequence[str]) -> tuple[str, ...]:
        paths = (self._paths(graph, node)[0].split(".") for node in nodes)
        return tuple(".".join("*" if word.isdigit() else word for word in path) for path in paths)


def _covers(pattern: str, path: str) -> bool:
    words = path.split(".")
    return any(matches(pattern, ".".join(words[:length])) for length in range(1, len(words) + 1))
