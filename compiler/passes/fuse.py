"""Replaces the nodes of each fusion point in a spec by a fused group. This pass changes only programs that compute
whole sequences."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from specc.compiler.expr import ExprError
from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.region import Fused, returned
from specc.compiler.passes.group import Selection, Unfusable, build_group
from specc.compiler.passes.requests import whole_sequences
from specc.compiler.pattern import matches, of_all_blocks
from specc.compiler.programs.programs import Group, LoweringError, Programs
from specc.compiler.strict import Problem

FusePoints = Sequence[Mapping[str, Sequence[str] | int]]


def fuse(programs: Programs, points: FusePoints) -> Programs:
    """Replaces the nodes of each fusion point by one `fused` node. Returns the new programs.

    Only the programs in `programs.whole`, which compute whole sequences, have fused nodes. Programs that decode one
    token at a time are unchanged.

    Raises:
        LoweringError: If a fusion point cannot be applied. The error lists the problems of all fusion points.
    """
    problems: list[Problem] = []
    built: dict[Selection, Group] = {}  # not shared between specs, because specs may name equal sizes differently
    for i, point in enumerate(points):
        (pattern, members), *_ = ((key, value) for key, value in point.items() if not isinstance(value, int))
        chunks = next((value for value in point.values() if isinstance(value, int)), 1)
        try:
            programs = _fuse_point(programs, pattern, tuple(members), chunks, built)
        except Unfusable as error:
            problems.append(Problem(("fuse", i, pattern), "S304", f"{pattern}: {error}", error.hint))
        except ExprError as error:
            hint = "; or ".join(filter(None, (error.hint, "remove the node from the fusion point")))
            problems.append(Problem(("fuse", i, pattern), "S402", f"{pattern}: {error.message}", hint))
        except LoweringError as error:
            problems += (problem.under("fuse", i, pattern) for problem in error.problems)
    if problems:
        raise LoweringError(tuple(problems))
    return programs


def _unmatched(code: str, message: str, hint: str) -> LoweringError:
    return LoweringError((Problem((), code, message, hint),))


def _fuse_point(
    programs: Programs, pattern: str, members: tuple[str, ...], chunks: int, built: dict[Selection, Group]
) -> Programs:
    places: dict[tuple[str, str], dict[str, bool]] = {}
    for graph, at in whole_sequences(programs):
        for scope in graph.scopes:
            covered = places.setdefault((graph.name, scope), {})
            covered[at] = matches(pattern, f"{at}.{scope}" if at else scope)
    chosen = [key for key, covered in places.items() if any(covered.values())]
    if not chosen:
        known = sorted({f"{at}.{scope}" if at else scope for (_, scope), ats in places.items() for at in ats})
        message = f"the fusion point `{pattern}` matches no part of the model"
        raise _unmatched("S302", message, f"the parts are {_short(known)}")
    for key in chosen:
        covered = places[key]
        if not all(covered.values()):
            left = [at for at, hit in covered.items() if not hit]
            message = f"the fusion point `{pattern}` leaves out blocks with the same code: {_short(left)}"
            raise _unmatched("S303", message, f"match all blocks that run this code, e.g. `{of_all_blocks(pattern)}`")
    fusable = [key for key in chosen if _complete(programs, key, members)]
    taken = [member for member in members if any(_taken(programs, key, member) for key in fusable or chosen)]
    if not fusable:
        name, scope = chosen[0]
        known = [
            node.name.removeprefix(f"{scope}.")
            for node in _graph(programs, name).nodes
            if node.name.startswith(f"{scope}.")
        ]
        unknown = [member for member in members if member not in known and member not in taken]
        if unknown:
            raise _unmatched("S302", f"`{pattern}` has no node `{unknown[0]}`", f"the nodes are {_short(known)}")
    if taken:
        hint = "remove it from one of the two fusion points, or join the two points"
        raise _unmatched("S302", f"{taken[0]} of {pattern} is already in another fusion point", hint)
    for name, scope in fusable:
        programs = _fuse_graph(programs, name, scope, members, chunks, built)
    return programs


def _taken(programs: Programs, key: tuple[str, str], member: str) -> bool:
    fused = {node.op.group for node in _graph(programs, key[0]).nodes if isinstance(node.op, Fused)}
    return any(f"{key[1]}.{member}" in group.members for group in programs.groups if group.name in fused)


def _complete(programs: Programs, key: tuple[str, str], members: tuple[str, ...]) -> bool:
    graph, scope = _graph(programs, key[0]), key[1]
    return all(f"{scope}.{member}" in graph.by_name for member in members)


def _graph(programs: Programs, name: str) -> Graph:
    return next(graph for graph in programs.graphs if graph.name == name)


def _short(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown}, ..." if len(names) > 8 else shown


def _fuse_graph(
    programs: Programs, name: str, scope: str, members: tuple[str, ...], chunks: int, built: dict[Selection, Group]
) -> Programs:
    """Replaces the members of one scope in one graph by a fused node, which has the name of the last member. Returns
    the new programs."""
    graph = _graph(programs, name)
    nodes = _closure(graph, [f"{scope}.{member}" for member in members])
    group, known = shared(programs, build_group(graph, scope, nodes, chunks, built))
    last, inside = nodes[-1], {node.name for node in nodes}
    external = tuple(dict.fromkeys(ref for node in nodes for ref in node.inputs if node_of(ref) not in inside))
    fused = Node(last.name, Fused(group.name, returned(last.types)), external, last.types)
    remaining = tuple(
        fused if node is last else node for node in graph.nodes if node is last or node.name not in inside
    )
    changed = replace(graph, nodes=remaining)
    programs = programs.rewritten(lambda other: changed if other.name == name else other)
    return programs if known else replace(programs, groups=(*programs.groups, group))


def _closure(graph: Graph, names: Sequence[str]) -> list[Node]:
    """Returns the nodes `names` and the nodes that have to be fused with these nodes, in graph order.

    A linear layer is fused, with its bias, if only a node in `names` reads it. A node whose name begins with a name in
    `names`, such as the cast `logits.f32` of `logits`, is fused if only fused nodes read it.
    """
    chosen = set(names)
    for part in reversed(graph.nodes):
        readers = [reader.name for reader in graph.consumers[part.name]]
        if readers and chosen.issuperset(readers) and any(part.name.startswith(f"{name}.") for name in names):
            chosen.add(part.name)
    for name in names:
        for ref in graph.by_name[name].inputs:
            chosen.update(_linear(graph, ref))
    if repeated := [name for i, name in enumerate(names) if name in names[:i]]:
        raise Unfusable(repeated[0], "is named twice")
    return [node for node in graph.nodes if node.name in chosen]


def _linear(graph: Graph, ref: str) -> tuple[str, ...]:
    """Returns the names of the linear layer that computes `ref`, and of the pointwise nodes that combine its result
    with parameters, such as a bias. Returns nothing without such a layer, or if other nodes read these results."""
    node = graph.by_name.get(node_of(ref))
    if node is None or graph.uses(ref) != 1:
        return ()
    if isinstance(node.op, Linear):
        return (node.name,)
    values = [value for value in node.inputs if value[0] != "@"]
    if not isinstance(node.op, Pointwise) or len(values) != 1 or len(node.inputs) == 1:
        return ()
    layer = _linear(graph, values[0])
    return (*layer, node.name) if layer else ()


def shared(programs: Programs, group: Group) -> tuple[Group, bool]:
    """Returns a group, and whether the programs already contain this group. If the programs contain a group that equals
    `group`, the function returns the existing group. Otherwise, the function returns `group` under a unique name."""
    for known in programs.groups:
        if known.members == group.members and known == _named(group, known.name):
            return known, True
    taken = {known.name for known in programs.groups}
    return _named(group, next(name for name in _names(group) if name not in taken)), False


def _names(group: Group) -> Iterator[str]:
    name = group.name
    yield name
    for word in reversed(group.scope.split(".")[:-1]):
        name = name.replace("fused_", f"fused_{word}_", 1)
        yield name
    while True:
        name = f"{name}_{group.members[-1].rpartition('.')[2]}"
        yield name


def _named(group: Group, name: str) -> Group:
    forward, backward = replace(group.forward, name=f"{name}.forward"), replace(group.backward, name=f"{name}.backward")
    others = tuple(_named(other, name) for other in group.others)
    return replace(group, name=name, forward=forward, backward=backward, others=others)
