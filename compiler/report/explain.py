"""Explains which kernel computes a node, and why the other kernels were not chosen."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.region import Call, Fused
from specc.compiler.passes.select_kernels import group_pattern
from specc.compiler.pattern import matches
from specc.compiler.plan.plan import Plan, place_pattern
from specc.compiler.programs.programs import Parameter, Programs
from specc.compiler.records import record


@record
class Explained:
    """The kernel of one node on one target.

    Attributes:
        target: The name of the folder of generated files. Each target and each deployed plan has such a folder.
        rejected: The other kernels, and the reason why each was not chosen.
        passes: A pair for each pass that rewrote the node or refused to rewrite the node. A pair has the name of the
            pass, and the effect or the reason.
    """

    target: str
    node: str
    label: str
    op: str
    kernel: str
    files: tuple[str, ...]
    tile: str
    recomputed: bool
    rejected: tuple[tuple[str, str], ...]
    passes: tuple[tuple[str, str], ...] = ()

    def data(self) -> dict[str, Any]:
        rejected = [{"kernel": kernel, "reason": reason} for kernel, reason in self.rejected]
        passes = [{"pass": name, "effect": effect} for name, effect in self.passes]
        return {**asdict(self), "rejected": rejected, "passes": passes}


def explain(plan: Plan, node: str | None, folder: str = "") -> Iterator[Explained]:
    """Yields the explanation of each node that matches `node`.

    Args:
        plan: the plan.
        node: a node's path, a path in one block, or a pattern. None selects all nodes with a matrix product, attention
            or a kernel.
        folder: the folder of the plan's files. By default, the target's name.
    """
    folder = folder or plan.target.name
    known: set[Explained] = set()
    again, callers = _computed_again(plan.programs), _callers(plan.programs)
    for choice in plan.choices if node is not None else plan.listed:
        path = choice.site.label.split(" ")[0]
        members = [
            path,
            path.removesuffix(".padded"),
            *(path.rpartition(".")[0] + "." + word for word in choice.site.label.split(" + ")[1:]),
        ]
        graphs = callers.get(choice.graph, (choice.graph,))
        if node in (None, choice.site.label) or any(_names(plan.programs, graphs, node, member) for member in members):
            files = tuple(choice.rendered.files)
            op = str(choice.site.node)
            kernel = f"{choice.kernel.name} ({choice.kernel.language})"
            tile, recomputed = choice.rendered.tile, choice.graph in again
            passes = tuple(_passes_of(plan.programs, path))
            label, rejected = choice.site.label, choice.rejected
            row = Explained(folder, path, label, op, kernel, files, tile, recomputed, rejected, passes)
            if row not in known:  # two groups may contain the same product
                known.add(row)
                yield row
    if node is None:
        return
    seen: set[str] = set()
    for path, unplanned, reason, graph in _without_choice(plan):
        if path not in seen and _names(plan.programs, callers.get(graph, (graph,)), node, path):
            seen.add(path)
            rejected = (("every other", f"{reason}; Torch's compiler computes it"),)
            passes, recomputed = tuple(_passes_of(plan.programs, path)), graph in again
            torch = "torch (torch)"
            yield Explained(folder, path, path, str(unplanned), torch, (), "", recomputed, rejected, passes)


def _passes_of(programs: Programs, path: str) -> Iterator[tuple[str, str]]:
    for rewriting in programs.rewritings:
        if any(_covers(path, other) for other in rewriting.nodes):
            effect = rewriting.text or f"not applied: {rewriting.refusal}"
            yield rewriting.step, f"{', '.join(rewriting.nodes)}: {effect}"


def _computed_again(programs: Programs) -> frozenset[str]:
    again = set(programs.recomputed)
    groups = (group for group in programs.groups if again.intersection(programs.callers[group.name]))
    return frozenset({*again, *(group.forward.name for group in groups)})


def _without_choice(plan: Plan) -> Iterator[tuple[str, Node, str, str]]:
    programs = plan.programs
    for graph in programs.graphs:
        for node in graph.nodes:
            if not isinstance(node.op, Call | Fused) and plan.choice(graph, node) is None:
                for name in (node.name, *node.members):
                    path = place_pattern(programs, (graph.name,), name)
                    yield path, node, f"in {graph.name} the node is in no fused group", graph.name
    for group in programs.groups:
        for graph in (group.forward, group.backward):
            for node in graph.nodes:
                if plan.choice(graph, node) is None:
                    reason = f"no kernel is chosen for a {node.op.name}"
                    reason += f": {node.op.joined_when}" if node.op.joined_when else ""
                    yield group_pattern(programs, group, node.name), node, reason, graph.name


def _callers(programs: Programs) -> dict[str, tuple[str, ...]]:
    """Maps the name of each graph of a group to the names of the graphs that run the group."""
    graphs = ((group.name, graph.name) for group in programs.groups for graph in (group.forward, group.backward))
    return {graph: programs.callers[group] for group, graph in graphs}


def _names(programs: Programs, graphs: Iterable[str], node: str, path: str) -> bool:
    """Returns whether `node`, a path or a pattern, names a node in at least one of its places.

    `path` is the path of the node with wildcards, and `graphs` are the names of the graphs that contain it. A path of
    one block does not name the nodes of other blocks.
    """
    places = [place for graph in graphs for place in programs.call_paths.get(graph, ())]
    if node == path or not places:
        return _covers(node, path)
    depths = {place.count(".") + 1 for place in places}
    # `place_pattern` writes one `*` for places of different depths
    inner = ".".join(path.split(".")[depths.pop() if len(depths) == 1 else 1 :])
    return any(matches(node, f"{place}.{inner}") for place in places)


def _covers(node: str, path: str) -> bool:
    return node == path or matches(node, path) or matches(path, node)


def text_of(row: Explained) -> str:
    lines = [f"{row.label} on {row.target}: {row.kernel}{f', {row.tile}' if row.tile else ''}"]
    lines += [f"  {row.op}", *(f"  file: {row.target}/{name}" for name in row.files)]
    lines += ["  the backward pass computes it again: train.recompute"] if row.recomputed else []
    lines += [f"  not {kernel}: {reason}" for kernel, reason in row.rejected]
    lines += [f"  {name}: {effect}" for name, effect in row.passes]
    return "\n".join(lines)


def _parameter_line(param: Parameter) -> str:
    owner = f", optimizer {param.optimizer}" if param.optimizer is not None else ""
    return f"# {param.name} : {TensorType(param.shape, param.dtype, param.storage)}{owner}"


def graphs_text(programs: Programs, program: str | None) -> str:
    """Returns the graphs of a plan in the text form of the IR, which can be parsed again.

    If `program` is None, the text has the parameter table, every graph, and the forward and backward graphs of every
    fused group. Otherwise, the text is the graph of that name.
    """
    graphs = [graph for graph in programs.graphs if program in (None, graph.name)]
    parts = [str(graph) for graph in graphs]
    if program is None:
        parts.insert(0, "\n".join(map(_parameter_line, programs.params)))
        for group in programs.groups:
            where = group_pattern(programs, group, group.scope)
            parts.append(f"# fused group {where}\n{group.forward}")
            parts += [str(group.backward)] if group.backward.outputs else []
    return "\n\n".join(parts)
