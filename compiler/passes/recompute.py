"""Moves the block parts that `train.recompute` lists into functions, which the backward pass recomputes."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from specc.compiler.ir.graph import Graph, Node, node_of, output_refs, rename
from specc.compiler.ops.fp8 import STORAGE
from specc.compiler.ops.region import Call, Fused, returned
from specc.compiler.plan.plan import place_pattern
from specc.compiler.programs.programs import LoweringError, Programs, owner
from specc.compiler.spec.train import BLOCK, TrainSpec
from specc.compiler.strict import Path, Problem

PREFIX = "recomputed_"  # the name prefix of the functions


def recompute(programs: Programs, train: TrainSpec) -> Programs:
    """Moves each block part that `train.recompute` lists into a separate function. Returns the new programs.

    The nodes keep their names, so values, weights and random numbers of dropout do not change. `Programs.recomputed`
    lists the functions that the backward pass recomputes. If `train.recompute` contains `block`, these are the
    functions of whole blocks, and no part is moved.

    Args:
        programs: The programs, with fused groups.
        train: The training spec.

    Raises:
        LoweringError: If no trained block has the part, or if the part cannot be a function.
    """
    if not train.recompute:
        return programs
    trained = _trained(programs)
    if BLOCK in train.recompute:
        if unable := tuple(_whole(programs, trained)):
            raise LoweringError(unable)
        return replace(programs, recomputed=trained)
    functions = {graph.name: graph for graph in programs.functions}
    parts: dict[str, Graph] = {}
    problems: list[Problem] = []
    for i, part in enumerate(train.recompute):
        having = [name for name in trained if any(_is_in(part, node) for node in functions[name].nodes)]
        if not having:
            parts_or_none = ", ".join(recomputable_parts(programs)) or "none"
            hint = f"the parts of blocks are {parts_or_none}; `{BLOCK}` stands for whole blocks"
            problems.append(Problem(_path(i), "S295", f"no block has a part with the name `{part}`", hint))
        for name in having:
            try:
                functions[name] = _outlined(programs, functions[name], part, parts)
            except ValueError as error:
                problems.append(Problem(_path(i), "S295", f"{part} cannot be recomputed: {error}", "remove it"))
                break
    if problems:
        raise LoweringError(tuple(problems))
    return replace(programs, functions=(*functions.values(), *parts.values()), recomputed=tuple(parts))


def recomputable_parts(programs: Programs) -> tuple[str, ...]:
    """Returns the parts of trained blocks that contain matrix products or attention."""
    nodes = (node for name in _trained(programs) for node in programs.function(name).nodes if "." in node.name)
    return tuple(dict.fromkeys(n.name.partition(".")[0] for n in nodes if n.op.matrix or isinstance(n.op, Fused)))


def _trained(programs: Programs) -> tuple[str, ...]:
    names = {"train", *(phase.train for phase in programs.phases)}
    calls = (node for graph in programs.programs if graph.name in names for node in graph.nodes)
    return tuple(dict.fromkeys(node.op.callee for node in calls if isinstance(node.op, Call)))


def recomputed_places(programs: Programs) -> Iterator[tuple[str, str]]:
    """Yields two names for each function that the backward pass recomputes: the name of the function, and the path
    pattern of the model part that the function computes."""
    for name in programs.recomputed:
        is_part = name.partition(".")[2].startswith(PREFIX)
        part = programs.function(name).nodes[0].name.partition(".")[0] if is_part else ""
        yield name, place_pattern(programs, (name,), part).rstrip(".")


def _path(i: int) -> Path:
    return "train", "recompute", i


def _is_in(part: str, node: Node) -> bool:
    return node.name.startswith(f"{part}.")


def _whole(programs: Programs, trained: Sequence[str]) -> Iterator[Problem]:
    if not trained:
        yield Problem(_path(0), "S295", "the model has no blocks to recompute", "remove `recompute`")
    for name in trained:
        if reason := _refusal(programs.function(name), programs.function(name).nodes):
            yield Problem(_path(0), "S295", f"blocks cannot be recomputed: {reason}", "remove it")
            return


def _refusal(graph: Graph, nodes: Sequence[Node]) -> str:
    states = {ref for ref, type in graph.types.items() if type.storage == STORAGE}
    recorded = next((node.name for node in nodes if states.intersection(node.inputs)), "")
    return f"{recorded} would record the largest magnitudes of its inputs twice per step" if recorded else ""


def _outlined(programs: Programs, graph: Graph, part: str, parts: dict[str, Graph]) -> Graph:
    """Replaces the nodes of a part by a call. Returns the new function of the block. Adds the function of the part to
    `parts`, unless `parts` contains an equal function.

    Raises ValueError with the reason if the part cannot be a function.
    """
    inside = [node for node in graph.nodes if _is_in(part, node)]
    computed = {ref for node in inside for ref in node.outputs}
    others = [node for node in graph.nodes if node not in inside]
    if reason := _refusal(graph, inside):
        raise ValueError(reason)
    late: set[str] = set()  # values of nodes outside of the part that depend on the part
    for node in graph.nodes:
        if node in inside:
            if cyclic := late.intersection(node.inputs):
                raise ValueError(
                    f"{node.name} reads {min(cyclic)}, which depends on the part but is computed outside of it"
                )
        elif (late | computed).intersection(node.inputs):
            late.update(node.outputs)
    read_outside = {ref for node in others for ref in node.inputs} | {ref for _, ref in graph.outputs}
    results = [ref for node in inside for ref in node.outputs if ref in read_outside]
    if not results:
        raise ValueError("no node outside of the part reads values of the part")
    read = dict.fromkeys(ref for node in inside for ref in node.inputs if ref not in computed)
    for callee in (programs.function(node.op.callee) for node in inside if isinstance(node.op, Call)):
        read |= dict.fromkeys((*(f"@{name}" for name, _ in callee.params), *(f"${name}" for name in callee.scalars)))
    names = _input_names([ref for ref in read if ref[0] not in "@$"])
    inner = rename(replace(graph, nodes=tuple(inside), outputs=tuple((ref, ref) for ref in results)), names)
    function = Graph(
        "",
        tuple((name, graph.types[ref]) for ref, name in names.items()),
        tuple(param for param in graph.params if f"@{param[0]}" in read),
        inner.nodes,
        tuple((f"y{i}" if i else "y", ref) for i, (_, ref) in enumerate(inner.outputs)),
        tuple(scalar for scalar in graph.scalars if f"${scalar}" in read),
    )
    name = add_method(graph, f"{PREFIX}{part}", function, parts)
    types = [graph.types[ref] for ref in results]
    labels = tuple(ref.replace(".", "_").replace(":", "_") for ref in results) if len(results) > 1 else ()
    call = Node(node_of(results[0]), Call(name, "", returned(types), labels=labels), tuple(names), tuple(types))
    last = max(i for i, node in enumerate(graph.nodes) if node in inside)
    before = [node for node in graph.nodes[:last] if node not in inside and not late.intersection(node.outputs)]
    after = [node for node in graph.nodes if node not in inside and node not in before]
    places = dict(zip(results, output_refs(call.name, len(results)), strict=True))
    return rename(replace(graph, nodes=(*before, call, *after)), places)


def add_method(graph: Graph, method: str, function: Graph, functions: dict[str, Graph]) -> str:
    """Adds a function as a method of the block class to which `graph` belongs, unless an equal function exists. Returns
    the name of the function.

    Args:
        graph: The graph that calls the function.
        method: The name of the method. A number is appended if another function has this name.
        function: The function.
        functions: The functions that were added before, by name. The new function is added to this dict.
    """
    alike = [name for name in functions if re.fullmatch(rf"{method}\d*", name.partition(".")[2])]
    for name in alike:
        if replace(functions[name], name="") == function:
            return name
    name = f"{owner(graph.name)}.{method}{len(alike) + 1 if alike else ''}"
    functions[name] = replace(function, name=name)
    return name


def _input_names(refs: Sequence[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for ref in refs:
        words = ref.replace(":", "_").split(".")
        options = ("_".join(words[-count:]) for count in range(1, len(words) + 1))
        names[ref] = next(option for option in options if option not in names.values())
    return names
