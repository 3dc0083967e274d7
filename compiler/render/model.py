"""Turns a plan into what templates/torch/model.py.jinja may know: classes, methods, groups, tables, all as text."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from specc.compiler.ir.graph import Graph, Named, Node
from specc.compiler.ops.region import Call
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import Programs, owner
from specc.compiler.render.body import Body
from specc.compiler.render.function import LOCALS, Function, Speller, class_name, docstring, types_doc
from specc.compiler.render.group import GroupContext, group_context, scoring_function
from specc.compiler.render.loops import field_of, scans, stacks, time_loop
from specc.compiler.render.program import CACHE, keeper, new_cache, program_method

# What deployed models keep apart from their parameters: the numbers of products in int8.
STORED = {"i8": "torch.int8", "i32": "torch.int32", "f32": "torch.float32"}


@dataclass(frozen=True, slots=True)
class ClassContext:
    """An nn.Module: its parameters, the numbers it is built with, its methods."""

    name: str
    doc: tuple[str, ...]
    scalars: tuple[str, ...]
    init: tuple[str, ...]
    methods: tuple[Function, ...]
    aliases: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The whole of model.py. `namespace` is that of the ops which `supports` define, empty where they define none."""

    TEMPLATE: ClassVar[str] = "torch/model.py.jinja"
    doc: tuple[str, ...]
    imports: tuple[tuple[str, str], ...]
    supports: tuple[str, ...]
    namespace: str
    groups: tuple[GroupContext, ...]
    functions: tuple[Function, ...]
    blocks: tuple[ClassContext, ...]
    tables: tuple[str, ...]
    model: ClassContext
    uses_functional: bool


def model_context(plan: Plan) -> ModelContext:
    """The context of model.py for `plan`; `supports` still holds template names, which build.py replaces by their text
    (and names `namespace` where one of them defines an op)."""
    programs = plan.programs
    groups = tuple(group_context(plan, group) for group in programs.groups if group.backward.outputs)
    functions = tuple(scoring_function(plan, group) for group in programs.groups if not group.backward.outputs)
    names = {group.name for group in programs.groups}
    called = {c.rendered.module: plan.called(c) for c in plan.choices if c.rendered.module}
    own = {c.rendered.module: c.rendered.function for c in plan.choices}
    imports = [
        (module, own[module] if own[module] == name else f"{own[module]} as {name}") for module, name in called.items()
    ]
    supports = tuple(dict.fromkeys(name for graph in _rendered_graphs(plan) for name in _supports(graph)))
    reserved = LOCALS | names | set(called.values()) | frozenset(supports)
    blocks = tuple(_block_class(plan, name, reserved) for name in _owners(plan))
    tables: list[str] = []
    model = _model_class(plan, reserved, tables)
    code = [*_code(model), *(line for block in blocks for line in _code(block))]
    inner = [*functions, *(f for group in groups for f in (group.forward, group.backward))]
    code += [line for function in inner for line in (*function.lines, function.returns)]
    functional = any("F." in line for line in code)
    title = textwrap.fill(f"{plan.name} for {plan.target.name}: {plan.title}.", 116)
    doc = (title, *_legend(plan))
    ordered = tuple(sorted(imports, key=_by_number))
    return ModelContext(doc, ordered, supports, "", groups, functions, blocks, tuple(tables), model, functional)


def _by_number(entry: tuple[str, str]) -> str:
    """Sorts n9 before n10, as import sorters do."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(12), entry[0])


def _code(context: ClassContext) -> Iterator[str]:
    for method in context.methods:
        yield from (*method.lines, method.returns)


def _legend(plan: Plan) -> tuple[str, ...]:
    pairs = any("S" in type.shape for _, type in plan.programs.programs[0].inputs)
    lengths = "S tokens of the source, T of the target" if pairs else "T tokens, S kept positions"
    return (f"Shapes: B rows, {lengths}; parameters and activations are {plan.programs.params[0].dtype}.",)


def _rendered_graphs(plan: Plan) -> Iterator[Graph]:
    yield from plan.programs.functions
    yield from plan.programs.programs


def _supports(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        support = node.op.support([graph.types[ref] for ref in node.inputs])
        if support:
            yield support


def _owners(plan: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(owner(graph.name) for graph in plan.programs.functions))


def _params(params: Sequence[Named], modules: Sequence[str] = ()) -> tuple[str, ...]:
    """The lines that create parameters under their dotted names, and what holds `modules`, which others create."""
    holders: dict[str, list[str]] = {}
    lines: list[str] = []
    constants = [entry for entry in params if entry[1].storage]
    for path, type in params:
        if type.storage:
            continue
        holder, _, name = path.rpartition(".")
        shape = ", ".join(map(str, type.shape)) + ("," if len(type.shape) == 1 else "")
        if holder:
            holders.setdefault(holder, []).append(f"{name}=({shape})")
        else:
            lines.append(f"self.{name} = nn.Parameter(torch.empty({shape.rstrip(',')}))")
    owners = dict.fromkeys(path.rpartition(".")[0] for path, _ in constants)
    bare = [holder for holder in owners if holder and holder not in holders]
    parents = [parent for held in (*holders, *bare) if (parent := held.rpartition(".")[0])]
    empty = dict.fromkeys((*parents, *bare, *(parent for at in modules if (parent := at.rpartition(".")[0]))))
    lines += [f"self.{parent} = nn.Module()" for parent in empty if parent not in holders]
    for holder, entries in holders.items():
        line = f"self.{holder} = weights({', '.join(entries)})"
        if len(line) <= 100:
            lines.append(line)
        else:
            lines += [f"self.{holder} = weights(", *(f"    {entry}," for entry in entries), ")"]
    for path, type in constants:
        holder, _, name = path.rpartition(".")
        sizes = ", ".join(map(str, type.shape))
        owner = f"self.{holder}" if holder else "self"
        lines.append(f'{owner}.register_buffer("{name}", torch.empty({sizes}, dtype={STORED[type.dtype]}))')
    return tuple(lines)


def _block_class(plan: Plan, name: str, reserved: frozenset[str]) -> ClassContext:
    functions = [graph for graph in plan.programs.functions if owner(graph.name) == name]
    first = functions[0]
    params = tuple(dict.fromkeys(entry for graph in functions for entry in graph.params))
    init = (*_params(params), *(f"self.{scalar} = {scalar}" for scalar in first.scalars))
    methods = tuple(_method(plan, graph, reserved) for graph in functions)
    layers = ", ".join(dict.fromkeys(node.name.split(".")[0] for node in first.nodes if "." in node.name))
    what = "One block"
    loops = [(scan, op) for scan, op in scans(plan.programs.programs) if owner(op.callee) == name]
    for scan, op in loops[:1]:
        drops = any(other.drops for _, other in loops)
        methods = (time_loop(plan.programs.function(op.callee), scan, drops), *methods)
        what = "A loop over time"
    doc = f"{what}: {layers}." if layers else f"One {name}."
    return ClassContext(class_name(name), tuple(docstring(doc)), first.scalars, init, methods)


def _method(plan: Plan, graph: Graph, reserved: frozenset[str]) -> Function:
    body = Body(graph, {name: name for name, _ in graph.inputs}, Speller(plan, graph), reserved)
    body.run(graph.nodes)
    state = {name for name, _ in graph.inputs}
    outputs = [(label, ref) for label, ref in graph.outputs if label not in state or label == "x"]
    doc = types_doc(graph.inputs, [graph.types[ref] for _, ref in outputs])
    if len(outputs) < len(graph.outputs):
        doc += " Caches are updated in place."
    arguments = ("self", *(f"{name}: Tensor" for name, _ in graph.inputs))
    annotation = "Tensor" if len(outputs) == 1 else f"tuple[{', '.join('Tensor' for _ in outputs)}]"
    name = graph.name.partition(".")[2]
    returns = body.returned([ref for _, ref in outputs])
    return Function(name, doc, arguments, tuple(body.lines), returns, annotation)


def _model_class(plan: Plan, reserved: frozenset[str], tables: list[str]) -> ClassContext:
    programs = plan.programs
    params = tuple(dict.fromkeys(entry for graph in programs.programs for entry in graph.params))
    lists = list(stacks(programs.programs[0].nodes))
    loops = {op.at: class_name(owner(op.callee)) for _, op in scans(programs.programs)}
    init = list(_params(params, (*(field_of(calls[0]) for calls in lists), *loops)))
    for calls in lists:
        init += _modules(calls, tables)
    init += [f"self.{at} = {name}()" for at, name in loops.items()]
    methods: dict[tuple[tuple[str, ...], ...], Function] = {}
    aliases: list[str] = []
    for graph in programs.programs:
        method = program_method(plan, graph, reserved, tables)
        known = methods.setdefault((method.lines, method.arguments, (method.returns,)), method)
        if known is not method:
            aliases.append(f"{method.name} = {known.name}")
    found = list(methods.values())
    cached = next((graph for graph in programs.programs if keeper(plan, graph) == CACHE), None)
    if cached is not None and (calls := next(stacks(cached.nodes), [])):
        found.append(new_cache(cached, params, calls))
    return ClassContext(
        "Model",
        tuple(docstring("The whole model; each program is a method.")),
        (),
        tuple(init),
        tuple(found),
        tuple(aliases),
        tuple(_constants(programs)),
    )


def _constants(programs: Programs) -> Iterator[str]:
    """What the model says of itself to those who compile it."""
    nodes = (node for graph in programs.graphs for node in graph.nodes)
    if names := sorted({node.op.name for node in nodes if node.op.apart}):
        yield f"fullgraph = False  # Torch's compiler takes it in parts: each {' and '.join(names)} runs as it is"


def _modules(calls: Sequence[Node], tables: list[str]) -> list[str]:
    """The module list of what `calls` call, from a table where these differ."""
    ops = list({call.op.at: call.op for call in calls if isinstance(call.op, Call)}.values())
    names = [class_name(owner(op.callee)) for op in ops]
    field = ops[0].at.rpartition(".")[0]
    if len({(name, op.scalars) for name, op in zip(names, ops, strict=True)}) == 1:
        numbers = ", ".join(repr(value) for _, value in ops[0].scalars)
        return [f"self.{field} = nn.ModuleList({names[0]}({numbers}) for _ in range({len(ops)}))"]
    words = ", ".join(name for name, _ in ops[0].scalars)
    table = field.upper().replace(".", "_")
    comment = f"# class{' and ' + words if words else ''} of each"
    rows = [
        f"    ({', '.join((name, *(repr(v) for _, v in op.scalars)))}{',' if not op.scalars else ''}),"
        for name, op in zip(names, ops, strict=True)
    ]
    tables.append("\n".join((comment, f"{table} = (", *rows, ")")))
    return [f"self.{field} = nn.ModuleList(make(*numbers) for make, *numbers in {table})"]
