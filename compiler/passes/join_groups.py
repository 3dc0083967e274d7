"""Joins the fused groups that read parts of one merged product into one group with several results.

Separate groups would each return the gradient of one part. These gradients would have to be concatenated into the
gradient of the product. The kernels of the joined group write into one tensor instead. A part may also have readers
outside of the groups. Gradients that Torch's compiler computes are written into this tensor directly. All other
gradients are copied into this tensor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from specc.compiler.ir.graph import Graph, Node, node_of, output_refs, rename
from specc.compiler.ops.region import Fused, returned
from specc.compiler.ops.shape import (
    JoinFeatures,
    MergeHeads,
    NewFeatures,
    PartHeads,
    SplitFeatures,
    SplitHeads,
    WriteFeatures,
)
from specc.compiler.passes.fuse import shared
from specc.compiler.passes.group import compose
from specc.compiler.programs.programs import Group, Programs


def join_groups(programs: Programs) -> Programs:
    """Returns the programs with joined groups. Groups that read parts of one product are joined on one condition: the
    kernel of at least one of these groups can write the gradient of its part into a wider tensor."""
    for name in [graph.name for graph in programs.functions]:
        for parts in [node.name for node in programs.function(name).nodes if isinstance(node.op, SplitFeatures)]:
            programs = _joined(programs, programs.function(name), parts)
    called = {node.op.group for graph in programs.graphs for node in graph.nodes if isinstance(node.op, Fused)}
    return replace(programs, groups=tuple(group for group in programs.groups if group.name in called))


def writer(programs: Programs, graph: Graph, ref: str) -> Node | None:
    """Returns the fused node that reads `ref`, a part of a product, as attention heads. Returns None if other nodes
    read the part, or if the kernel of the fused node cannot write the gradient of the part into a wider tensor."""
    heads = _only_reader(graph, ref)
    if heads is None or not isinstance(heads.op, SplitHeads):
        return None
    fused = _only_reader(graph, heads.name)
    if fused is None or not isinstance(fused.op, Fused) or len(fused.types) > 1:
        return None
    group = programs.group(fused.op.group)
    (first, *more), given = group.forward.nodes, _given(group, fused)
    known = {name for name, _ in graph.inputs}
    others = all(ref[0] == "@" or ref in known for ref in fused.inputs if ref != heads.name)
    alone = not more and not group.others and group.chunks == 1 and not group.inlined
    return fused if others and alone and first.op.writes_parts and given[first.inputs[0]] == heads.name else None


def _given(group: Group, fused: Node) -> Mapping[str, str]:
    return dict(zip((name for name, _ in group.forward.inputs), fused.inputs, strict=True))


def _only_reader(graph: Graph, ref: str) -> Node | None:
    readers = graph.consumers[ref]
    return readers[0] if len(readers) == graph.uses(ref) == 1 else None


def _joined(programs: Programs, graph: Graph, name: str) -> Programs:
    parts = graph.by_name[name]
    writers = [writer(programs, graph, ref) for ref in parts.outputs]
    if not any(writers):
        return programs
    nodes, replaced, members = [parts], {name}, list[str]()
    results: dict[str, tuple[str, str]] = {}  # for each label, the result in the group and the value that it replaces
    for label, ref, fused in zip(parts.op.output_labels, parts.outputs, writers, strict=True):
        heads = _only_reader(graph, ref)
        result = ref
        if heads is not None and isinstance(heads.op, SplitHeads):
            nodes.append(replace(heads, op=PartHeads(heads.op.heads)))
            replaced.add(heads.name)
            result = heads.name
        value = result
        if fused is not None:
            assert isinstance(fused.op, Fused)
            group = programs.group(fused.op.group)
            (node,), given = group.forward.nodes, _given(group, fused)
            nodes.append(replace(node, inputs=tuple(given[ref] for ref in node.inputs)))
            replaced.add(fused.name)
            members += group.members
            result, value = node.name, fused.name
        results[label] = result, value
    scope = name.rpartition(".")[0]
    composed = compose(
        graph, scope, f"fused_{'_'.join(results)}", nodes, tuple(members), {k: v for k, (v, _) in results.items()}
    )
    composed = replace(composed, backward=_into_one(composed.backward))
    group, known = shared(programs, composed)
    types = tuple(composed.forward.types[ref] for _, ref in composed.forward.outputs[: len(results)])
    inside = {ref for node in nodes for ref in node.outputs}
    external = tuple(dict.fromkeys(ref for node in nodes for ref in node.inputs if ref not in inside))
    fused_parts = Node(name, Fused(group.name, returned(types), tuple(results)), external, types)
    remaining = tuple(
        fused_parts if node.name == name else node for node in graph.nodes if node.name not in replaced - {name}
    )
    refs = {value: ref for (_, value), ref in zip(results.values(), output_refs(name, len(results)), strict=True)}
    changed = rename(replace(graph, nodes=remaining), refs)
    functions = tuple(changed if other.name == graph.name else other for other in programs.functions)
    return replace(programs, functions=functions, groups=programs.groups if known else (*programs.groups, group))


def _into_one(graph: Graph) -> Graph:
    """Returns a backward graph that computes the same gradients as `graph`. The nodes of the returned graph write the
    parts of the joined gradient into one tensor."""
    join = next((node for node in graph.nodes if isinstance(node.op, JoinFeatures)), None)
    if join is None:
        return graph
    writes = list(_writes(graph, join))
    inside = {node.name: (node, at) for node, at, _ in writes if node is not None}
    whole = f"{join.name}.new"
    assert isinstance(join.type.width, int)
    nodes: list[Node] = []
    merged = {ref for ref in join.inputs if (node := graph.by_name.get(ref)) and isinstance(node.op, MergeHeads)}
    for node in graph.nodes:
        if node.name in inside:
            into = node.op.into(inside[node.name][1])
            assert into is not None
            if node.name == min(inside, key=list(graph.by_name).index):  # the first node that writes into the tensor
                nodes.append(Node(whole, NewFeatures(join.type.width), node.inputs[:1], (join.type,)))
            nodes.append(replace(node, op=into, inputs=(*node.inputs, whole), types=(join.type, *node.types[1:])))
            whole = node.name
        elif node is join:
            for i, (writing, at, ref) in enumerate(writes):
                if writing is None:
                    write = Node(f"{join.name}.part{i}", WriteFeatures(at), (whole, ref), (join.type,))
                    nodes.append(write)
                    whole = write.name
        elif node.name not in merged:
            nodes.append(node)
    return rename(replace(graph, nodes=tuple(nodes)), {join.name: whole})


def _writes(graph: Graph, join: Node) -> Iterator[tuple[Node | None, int, str]]:
    """Yields three values for each part of a joined gradient: the node that can write the part into the wider tensor
    (or None), the index of the part's first feature, and the reference of the part."""
    at = 0
    for ref in join.inputs:
        width = graph.types[ref].width
        merged = graph.by_name.get(node_of(ref))
        value = merged.inputs[0] if merged is not None and isinstance(merged.op, MergeHeads) else ref
        node = graph.by_name.get(value)
        yield node if node is not None and graph.uses(value) == 1 and node.op.into(at) is not None else None, at, value
        assert isinstance(width, int)
        at += width
