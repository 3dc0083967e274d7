"""Checks invariants of programs after every pass. A failure is a bug in specc, never in a spec."""

from collections.abc import Iterator, Mapping, Sequence

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ir.types import Dim, TensorType
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.region import Call, Fused
from specc.compiler.programs.programs import Group, Programs


class VerifyError(AssertionError):
    """Raised if a pass broke an invariant. The message names the pass, the graph and the node."""


def verify(programs: Programs, after: str, before: Programs | None = None) -> None:
    """Checks programs after a pass.

    Args:
        programs: the programs.
        after: the name of the pass.
        before: programs that are already verified. A graph that is also in these programs is not checked again, unless
            parameter shapes, called functions or called groups have changed.

    Raises:
        VerifyError: if a graph is malformed, a type is wrong, or a call does not match its callee.
    """
    shapes = _shapes(programs)
    if before is not None and shapes != _shapes(before):
        before = None
    verified = {id(part) for part in _parts(before)} if before is not None else set()
    if all(id(part) in verified for part in _parts(programs)):
        return
    changed = {group.name for group in programs.groups if id(group) not in verified}
    changed |= {graph.name for graph in programs.functions if id(graph) not in verified}
    inner = [graph for group in programs.groups for graph in (group.forward, group.backward)]
    graphs = (*inner, *programs.functions, *programs.programs)  # callees before callers
    for graph in graphs:
        if id(graph) in verified and changed.isdisjoint(_called(graph)):
            continue
        for problem in _problems(programs, graph, shapes):
            raise VerifyError(f"after {after}: {graph.name}: {problem}")


def _parts(programs: Programs) -> Iterator[Graph | Group]:
    yield from programs.graphs
    for group in programs.groups:
        yield from (group, group.forward, group.backward)


def _called(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        if isinstance(node.op, Call):
            yield node.op.callee
        elif isinstance(node.op, Fused):
            yield node.op.group


def _shapes(programs: Programs) -> Mapping[str, tuple[Dim, ...]]:
    return {param.name: param.shape for param in programs.params} | {name: t.shape for name, t in programs.buffers}


def _problems(programs: Programs, graph: Graph, shapes: Mapping[str, tuple[Dim, ...]]) -> Iterator[str]:
    known = {name for name, _ in graph.inputs} | {f"@{name}" for name, _ in graph.params}
    known |= {f"${name}" for name in graph.scalars}
    for name, type in graph.params if graph in programs.programs else ():
        if name not in shapes:
            yield f"{name} is not in the parameter table"
        elif type.shape != shapes[name]:
            yield f"parameter {name} is {type}, but {list(shapes[name])} in the table"
    for node in graph.nodes:
        if unknown := [ref for ref in node.inputs if ref not in known]:
            yield f"{node.name} reads {unknown[0]}, which no earlier node computes"
            return
        inputs = [graph.types[ref] for ref in node.inputs]
        if isinstance(node.op, Call):
            callee = programs.function(node.op.callee)
            yield from _fits(f"{node.name} passes", inputs, [type for _, type in callee.inputs])
            outputs = [callee.types[ref] for _, ref in callee.outputs]
            yield from _fits(f"{node.name} returns", list(node.types), outputs)
            known_params, at = (shapes, f"{node.op.at}.") if node.op.at else (dict(graph.params), "")
            missing = [name for name, _ in callee.params if f"{at}{name}" not in known_params]
            yield from (f"{node.name} calls for {name}, which is not a parameter" for name in missing)
            bound = {name for name, _ in node.op.scalars} if node.op.at else set(graph.scalars)
            if not (set(callee.scalars) <= bound if not node.op.at else set(callee.scalars) == bound):
                yield f"{node.name} passes other numbers than {callee.name} reads"
        elif isinstance(node.op, Fused):
            forward = programs.group(node.op.group).forward
            yield from _fits(f"{node.name} passes", inputs, [type for _, type in forward.inputs])
        elif node.epilogue is not None:
            yield from _tail(node, inputs)
        else:
            yield from _types(node, node.op.infer(inputs))
        if repeated := known.intersection(node.outputs):
            yield f"{sorted(repeated)[0]} is computed twice"
        known.update(node.outputs)
    yield from (f"it returns {ref}, which no node computes" for _, ref in graph.outputs if ref not in known)


def _types(node: Node, outputs: Sequence[TensorType]) -> Iterator[str]:
    saves = isinstance(node.op, Pointwise) and len(outputs) > 1
    if len(outputs) != len(node.types):
        yield f"{node.name} has {len(node.types)} types, but its op infers {len(outputs)}"
        return
    for ref, have, want in zip(node.outputs, node.types, outputs, strict=True):
        if have.shape != want.shape or (have.dtype != want.dtype and not saves):
            yield f"{ref} is typed {have}, but its op infers {want}"


def _tail(node: Node, inputs: Sequence[TensorType]) -> Iterator[str]:
    products = node.op.infer(inputs[: node.op.arity])
    count = len(products) + len(inputs) - node.op.arity
    assert isinstance(node.epilogue, Pointwise)
    if count != node.epilogue.arity:
        yield f"{node.name} passes {count} values to an epilogue of {node.epilogue.arity}"
    wrong = [type for type in node.types if type.shape != products[0].shape]
    yield from (f"{node.name} is typed {type}, but its op infers {products[0]}" for type in wrong)


def _fits(what: str, types: Sequence[TensorType], expected: Sequence[TensorType]) -> Iterator[str]:
    if len(types) != len(expected):
        yield f"{what} {len(types)} values; {len(expected)} are expected"
        return
    for type, wanted in zip(types, expected, strict=True):
        if type == wanted:
            continue
        pairs = zip(type.shape, wanted.shape, strict=False)
        alike = all(a == b or isinstance(b, str) for a, b in pairs) and len(type.shape) == len(wanted.shape)
        if not alike or type.dtype != wanted.dtype:
            yield f"{what} {type}; {wanted} is expected"
