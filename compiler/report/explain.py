"""Says which kernel computes a node, and why no other does."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specc.compiler.ir.graph import Node, TensorType
from specc.compiler.ops.region import Call, Fused
from specc.compiler.passes.select_kernels import group_pattern
from specc.compiler.pattern import matches
from specc.compiler.plan.plan import Plan, place_pattern
from specc.compiler.programs.programs import Parameter, Programs


@dataclass(frozen=True, slots=True)
class Explained:
    """One node on one target, or of what runs from an artifact there: `target` names the folder. `rejected` are the
    kernels not chosen, each with its reason."""

    target: str
    node: str
    label: str
    op: str
    kernel: str
    files: tuple[str, ...]
    tile: str
    rejected: tuple[tuple[str, str], ...]

    def data(self) -> dict[str, Any]:
        """The row as JSON has it."""
        rejected = [{"kernel": kernel, "reason": reason} for kernel, reason in self.rejected]
        plain = {name: getattr(self, name) for name in ("target", "node", "label", "op", "kernel", "tile")}
        return {**plain, "files": list(self.files), "rejected": rejected}


def explain(plan: Plan, node: str | None, folder: str = "") -> Iterator[Explained]:
    """The nodes whose path `node` covers (it may be a pattern, or a path of one block), all products where it is
    None. `folder` is that of the plan's files, the target's where it is empty."""
    folder = folder or plan.target.name
    told: set[Explained] = set()
    for choice in plan.choices:
        path = choice.site.label.split(" ")[0]
        members = [
            path,
            path.removesuffix(".padded"),
            *(path.rpartition(".")[0] + "." + word for word in choice.site.label.split(" + ")[1:]),
        ]
        if node in (None, choice.site.label) or any(_covers(node, member) for member in members):
            files = tuple(choice.rendered.files)
            op = str(choice.site.node)
            kernel = f"{choice.kernel.name} ({choice.kernel.language})"
            row = Explained(folder, path, choice.site.label, op, kernel, files, choice.rendered.tile, choice.rejected)
            if row not in told:  # two groups may have the same product
                told.add(row)
                yield row
    if node is None:
        return
    seen: set[str] = set()
    for path, found, reason in _without_choice(plan):
        if path not in seen and _covers(node, path):
            seen.add(path)
            rejected = (("every other", f"{reason}, and Torch and its compiler take it as it is"),)
            yield Explained(folder, path, path, str(found), "torch (torch)", (), "", rejected)


def _without_choice(plan: Plan) -> Iterator[tuple[str, Node, str]]:
    """Path and node of all that no kernel was looked for, and why none was."""
    programs = plan.programs
    for graph in programs.graphs:
        for node in graph.nodes:
            if not isinstance(node.op, Call | Fused) and plan.choice(graph, node) is None:
                yield (
                    place_pattern(programs, (graph.name,), node.name),
                    node,
                    f"in {graph.name} the node is in no fused group",
                )
    for group in programs.groups:
        for graph in (group.forward, group.backward):
            for node in graph.nodes:
                if plan.choice(graph, node) is None:
                    reason = f"no kernel is chosen for a {node.op.name}"
                    yield group_pattern(programs, group, node.name), node, reason


def _covers(asked: str, path: str) -> bool:
    return asked == path or matches(asked, path) or matches(path, asked)


def text_of(row: Explained) -> str:
    """The row as people read it."""
    lines = [f"{row.label} on {row.target}: {row.kernel}{f', {row.tile}' if row.tile else ''}"]
    lines += [f"  {row.op}", *(f"  file: {row.target}/{name}" for name in row.files)]
    lines += [f"  not {kernel}: {reason}" for kernel, reason in row.rejected]
    return "\n".join(lines)


def _parameter_line(param: Parameter) -> str:
    """A row of the parameter table as a comment: what `assign_optimizers` and `assign_quant` state."""
    owner = f", optimizer {param.optimizer}" if param.optimizer is not None else ""
    return f"# {param.name} : {TensorType(param.shape, param.dtype, param.storage)}{owner}"


def graphs_text(programs: Programs, program: str | None) -> str:
    """The parameter table and every graph, or one graph alone, in the text form that parses back; groups as their
    forward and backward."""
    graphs = [graph for graph in programs.graphs if program in (None, graph.name)]
    parts = [str(graph) for graph in graphs]
    if program is None:
        parts.insert(0, "\n".join(map(_parameter_line, programs.params)))
        for group in programs.groups:
            where = group_pattern(programs, group, group.scope)
            parts.append(f"# fused group {where}\n{group.forward}")
            parts += [str(group.backward)] if group.backward.outputs else []
    return "\n\n".join(parts)
