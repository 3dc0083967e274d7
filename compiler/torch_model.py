"""Turns a plan into what templates/torch/model.py.jinja may know: classes, methods, groups, tables, all as text."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from specc.compiler.ir import Graph, Named, Node, TensorType
from specc.compiler.ops.region import Call
from specc.compiler.plan import Plan
from specc.compiler.programs import owner
from specc.compiler.torch_code import Body
from specc.compiler.torch_function import LOCALS, Function, Speller, class_name, docstring
from specc.compiler.torch_group import GroupContext, group_context, scoring_function
from specc.compiler.torch_loop import field_of, inputs_of, loop_lines

STATE = "cache."  # what the names of state among a program's inputs begin with
METHODS = {"train": "forward"}  # a module is called to train it; other programs are methods of their own names


@dataclass(frozen=True, slots=True)
class ClassContext:
    """An nn.Module: its parameters, the numbers it is built with, its methods."""

    name: str
    doc: tuple[str, ...]
    scalars: tuple[str, ...]
    init: tuple[str, ...]
    methods: tuple[Function, ...]
    aliases: tuple[str, ...] = ()


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
    doc = (f"{plan.name} for {plan.target.name}: {plan.title}.", *_legend(plan))
    ordered = tuple(sorted(imports, key=_by_number))
    return ModelContext(doc, ordered, supports, "", groups, functions, blocks, tuple(tables), model, functional)


def _by_number(entry: tuple[str, str]) -> str:
    """Sorts n9 before n10, as import sorters do."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(12), entry[0])


def _code(context: ClassContext) -> Iterator[str]:
    for method in context.methods:
        yield from (*method.lines, method.returns)


def _legend(plan: Plan) -> tuple[str, ...]:
    return ("Shapes: B rows, T tokens, S kept positions; parameters and activations are " + plan.target.dtype + ".",)


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


def _types_doc(inputs: Sequence[Named], outputs: Sequence[TensorType]) -> str:
    given = ", ".join(f"{name} {type}" for name, type in inputs)
    return f"{given} -> {', '.join(map(str, outputs))}."


def _params(params: Sequence[Named]) -> tuple[str, ...]:
    """The lines that create parameters under their dotted names."""
    holders: dict[str, list[str]] = {}
    lines: list[str] = []
    for path, type in params:
        holder, _, name = path.rpartition(".")
        shape = ", ".join(map(str, type.shape)) + ("," if len(type.shape) == 1 else "")
        if holder:
            holders.setdefault(holder, []).append(f"{name}=({shape})")
        else:
            lines.append(f"self.{name} = nn.Parameter(torch.empty({shape.rstrip(',')}))")
    for holder, entries in holders.items():
        line = f"self.{holder} = weights({', '.join(entries)})"
        if len(line) <= 100:
            lines.append(line)
        else:
            lines += [f"self.{holder} = weights(", *(f"    {entry}," for entry in entries), ")"]
    return tuple(lines)


def _block_class(plan: Plan, name: str, reserved: frozenset[str]) -> ClassContext:
    functions = [graph for graph in plan.programs.functions if owner(graph.name) == name]
    first = functions[0]
    init = (*_params(first.params), *(f"self.{scalar} = {scalar}" for scalar in first.scalars))
    methods = tuple(_method(plan, graph, reserved) for graph in functions)
    layers = ", ".join(dict.fromkeys(node.name.split(".")[0] for node in first.nodes if "." in node.name))
    doc = f"One block: {layers}." if layers else f"One {name}."
    return ClassContext(class_name(name), tuple(docstring(doc)), first.scalars, init, methods)


def _method(plan: Plan, graph: Graph, reserved: frozenset[str]) -> Function:
    body = Body(graph, {name: name for name, _ in graph.inputs}, Speller(plan, graph), reserved)
    body.run(graph.nodes)
    state = {name for name, _ in graph.inputs}
    outputs = [(label, ref) for label, ref in graph.outputs if label not in state or label == "x"]
    doc = _types_doc(graph.inputs, [graph.types[ref] for _, ref in outputs])
    if len(outputs) < len(graph.outputs):
        doc += " Caches are updated in place."
    arguments = ("self", *(f"{name}: Tensor" for name, _ in graph.inputs))
    annotation = "Tensor" if len(outputs) == 1 else f"tuple[{', '.join('Tensor' for _ in outputs)}]"
    name = graph.name.partition(".")[2]
    return Function(name, doc, arguments, tuple(body.lines), body.returned([ref for _, ref in outputs]), annotation)


def _model_class(plan: Plan, reserved: frozenset[str], tables: list[str]) -> ClassContext:
    programs = plan.programs
    params = tuple(dict.fromkeys(entry for graph in programs.programs for entry in graph.params))
    init = list(_params(params))
    calls = [node for node in programs.programs[0].nodes if isinstance(node.op, Call)]
    for field in dict.fromkeys(field_of(call) for call in calls):
        init += _modules(field, [call for call in calls if field_of(call) == field], tables)
    methods: dict[tuple[tuple[str, ...], ...], Function] = {}
    aliases: list[str] = []
    for graph in programs.programs:
        method = _program(plan, graph, reserved, tables)
        known = methods.setdefault((method.lines, method.arguments, (method.returns,)), method)
        if known is not method:
            aliases.append(f"{method.name} = {known.name}")
    found = list(methods.values())
    if stateful := [graph for graph in programs.programs if graph.name not in programs.whole]:
        runs = [node for node in stateful[0].nodes if isinstance(node.op, Call)]
        found.append(_new_cache(stateful[0], params, runs))
    return ClassContext(
        "Model",
        tuple(docstring("The whole model; each program is a method.")),
        (),
        tuple(init),
        tuple(found),
        tuple(aliases),
    )


def _modules(field: str, calls: Sequence[Node], tables: list[str]) -> list[str]:
    """The module list of what `calls` call, from a table where these differ."""
    ops = list({call.op.at: call.op for call in calls if isinstance(call.op, Call)}.values())
    names = [class_name(owner(op.callee)) for op in ops]
    if len({(name, op.scalars) for name, op in zip(names, ops, strict=True)}) == 1:
        numbers = ", ".join(repr(value) for _, value in ops[0].scalars)
        return [f"self.{field} = nn.ModuleList({names[0]}({numbers}) for _ in range({len(ops)}))"]
    words = ", ".join(name for name, _ in ops[0].scalars)
    table = field.upper()
    comment = f"# class{' and ' + words if words else ''} of each"
    rows = [
        f"    ({', '.join((name, *(repr(v) for _, v in op.scalars)))}{',' if not op.scalars else ''}),"
        for name, op in zip(names, ops, strict=True)
    ]
    tables.append("\n".join((comment, f"{table} = (", *rows, ")")))
    return [f"self.{field} = nn.ModuleList(make(*numbers) for make, *numbers in {table})"]


def _program(plan: Plan, graph: Graph, reserved: frozenset[str], tables: list[str]) -> Function:
    inputs = [(name, type) for name, type in graph.inputs if not name.startswith(STATE)]
    stateful = graph.name not in plan.programs.whole
    calls = [node for node in graph.nodes if isinstance(node.op, Call)]
    own = {name: _state_name(name) for name, _ in _own_state(graph, calls)}
    names = {name: name for name, _ in inputs} | own
    body = Body(graph, names, Speller(plan, graph), reserved, wanted=_wanted(plan, calls))
    if own:
        body.lines.append(f"{', '.join(own.values())}{',' if len(own) == 1 else ''} = cache[0]")
    start = graph.nodes.index(calls[0]) if calls else len(graph.nodes)
    body.run(graph.nodes[:start])
    if calls:
        loop_lines(plan, body, calls, tables, "cache[1:]" if own else "cache")
    body.run(graph.nodes[start + len(calls) :])
    outputs = [(label, ref) for label, ref in graph.outputs if not label.startswith(STATE)]
    arguments = ["self", *(f"{name}: Tensor" for name, _ in inputs)]
    doc = _types_doc(inputs, [graph.types[ref] for _, ref in outputs])
    if stateful:
        arguments.append("cache: list[tuple[Tensor, ...]]")
        doc = doc[:-1] + ", with the tokens added to `cache`, which holds `start` of them."
    name = METHODS.get(graph.name, graph.name)
    doc = f"{graph.name}: {doc}"
    return Function(
        name, doc, tuple(arguments), tuple(body.lines), body.returned([ref for _, ref in outputs]), "Tensor"
    )


def _own_state(graph: Graph, calls: Sequence[Node]) -> tuple[Named, ...]:
    """The state of a program that no block keeps."""
    passed = {ref for call in calls for ref in call.inputs}
    return tuple((name, type) for name, type in graph.inputs if name.startswith(STATE) and name not in passed)


def _state_name(name: str) -> str:
    """What code calls a program's own state: `smear_previous` for `cache.embed.smear.previous`."""
    return "_".join(name.split(".")[2:])


def _wanted(plan: Plan, calls: Sequence[Node]) -> dict[str, str]:
    """The names that blocks have for what all calls, or some, pass alike."""
    made = {call.name for call in calls}
    found: dict[str, str] = {}
    for call in calls:
        passed = list(inputs_of(plan, call).items())[1:]
        found |= {ref: name for name, ref in passed if ref not in made and not ref.startswith(STATE)}
    return found


def _new_cache(graph: Graph, params: Sequence[Named], calls: Sequence[Node]) -> Function:
    """The method that makes empty state: of the embedding, where it keeps some, and a tuple of tensors a run of a
    block, all of which keep the same."""
    own = _own_state(graph, calls)
    kept = [type for name, type in graph.inputs if name.startswith(STATE) and (name, type) not in own]
    blocks = [call for call in calls if field_of(call) == field_of(calls[0])]
    each = kept[: len(kept) // len(blocks)]
    assert kept == each * len(blocks)
    over = "self.blocks" if len({call.op for call in blocks}) == len(blocks) else "ORDER"
    lines = [f"new = self.{params[0][0]}.new_zeros"] if kept or own else []
    tensors = f"{', '.join(map(_empty, each))}{',' if len(each) == 1 else ''}"
    returns = f"[({tensors}) for _ in {over}]"
    if len(each) > 2:
        lines.append(f"shapes = ({', '.join(str(type.shape[2:]) for type in each)})")
        returns = f"[tuple(new(rows, positions, *shape) for shape in shapes) for _ in {over}]"
    doc = "Empty state for `rows` sequences of at most `positions` tokens."
    if own:
        lines.append(f"own = ({', '.join(_empty(type) for _, type in own)}{',' if len(own) == 1 else ''})")
        returns = f"[own, *({returns[1:-1]})]"
        doc = f"{doc[:-1]}: the embedding's own, then each block's."
    arguments = ("self", "rows: int", "positions: int")
    return Function("new_cache", doc, arguments, tuple(lines), returns, "list[tuple[Tensor, ...]]")


def _empty(type: TensorType) -> str:
    """An empty tensor of state."""
    dims = ", ".join({"B": "rows", "S": "positions"}.get(str(dim), str(dim)) for dim in type.shape)
    return f"new({dims})" if type.floating else f"new({dims}, dtype=torch.int64)"
