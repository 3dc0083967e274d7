"""What must hold of programs after every pass. A failure is a bug in specc, never in a spec."""

from collections.abc import Iterator, Mapping

from specc.compiler.ir import Graph, TensorType
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.region import Call, Fused
from specc.compiler.programs import Programs


class VerifyError(AssertionError):
    """A pass broke an invariant; the message names pass, graph and node."""


def verify(programs: Programs, after: str) -> None:
    """Raises VerifyError unless every graph is well formed and typed, and every call fits what it calls."""
    table = {param.name: param for param in programs.params}
    graphs = (*programs.graphs, *(graph for group in programs.groups for graph in (group.forward, group.backward)))
    for graph in graphs:
        for complaint in _complaints(programs, graph, {name: param.shape for name, param in table.items()}):
            raise VerifyError(f"after {after}: {graph.name}: {complaint}")


def _complaints(programs: Programs, graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    known = {name for name, _ in graph.inputs} | {f"@{name}" for name, _ in graph.params}
    known |= {f"${name}" for name in graph.scalars}
    if graph in programs.programs:
        yield from (f"{name} is not in the parameter table" for name, _ in graph.params if name not in shapes)
    for node in graph.nodes:
        if unknown := [ref for ref in node.inputs if ref not in known]:
            yield f"{node.name} reads {unknown[0]}, which nothing before it makes"
            return
        inputs = [graph.types[ref] for ref in node.inputs]
        if isinstance(node.op, Call):
            callee = programs.function(node.op.callee)
            yield from _fits(node.name, inputs, [type for _, type in callee.inputs])
            missing = [name for name, _ in callee.params if f"{node.op.at}.{name}" not in shapes]
            yield from (f"{node.name} calls for {name}, which is no parameter" for name in missing)
            if set(callee.scalars) != {name for name, _ in node.op.scalars}:
                yield f"{node.name} binds other numbers than {callee.name} asks for"
        elif isinstance(node.op, Fused):
            forward = programs.group(node.op.group).forward
            yield from _fits(node.name, inputs, [type for _, type in forward.inputs])
        elif node.epilogue is None and node.op.infer(inputs)[0] != node.type and not _saves(node.op):
            yield f"{node.name} is typed {node.type}, but its op gives {node.op.infer(inputs)[0]}"
        if repeated := known.intersection(node.outputs):
            yield f"{sorted(repeated)[0]} is made twice"
        known.update(node.outputs)
    yield from (f"it returns {ref}, which nothing makes" for _, ref in graph.outputs if ref not in known)


def _saves(op: object) -> bool:
    """A pointwise op that also saves: its further outputs may have another dtype than its first."""
    return isinstance(op, Pointwise) and len(op.outputs) > 1


def _fits(name: str, given: list[TensorType], wanted: list[TensorType]) -> Iterator[str]:
    if len(given) != len(wanted):
        yield f"{name} gives {len(given)} values where {len(wanted)} are wanted"
        return
    for have, want in zip(given, wanted, strict=True):
        pairs = zip(have.shape, want.shape, strict=False)
        alike = all(a == b or isinstance(b, str) for a, b in pairs) and len(have.shape) == len(want.shape)
        if not alike or have.dtype != want.dtype:
            yield f"{name} gives {have} where {want} is wanted"
