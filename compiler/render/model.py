"""Converts a plan to the context of templates/torch/model.py.jinja. The context has classes, methods, groups and
tables as text."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, ClassVar

from specc.compiler.expr.python_lines import WIDTH
from specc.compiler.ir.graph import Graph, Named
from specc.compiler.ir.torch_call import TorchCall
from specc.compiler.ops.region import Call
from specc.compiler.passes.merge import merge
from specc.compiler.passes.outline import outline
from specc.compiler.passes.roll import Loop, aligned, field_of, roll
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import (
    Programs,
    class_name,
    flatten,
    group_functions,
    owner,
    without_scoring_groups,
)
from specc.compiler.records import record
from specc.compiler.render.blocks import BlockClass, Tables, block_class, lists
from specc.compiler.render.body import Body, constants_of
from specc.compiler.render.flags import flags_of
from specc.compiler.render.formula import python_formula
from specc.compiler.render.function import LOCALS, Function, Speller, docstring, method, types_doc
from specc.compiler.render.group import GroupContext, group_contexts
from specc.compiler.render.jinja import exists
from specc.compiler.render.loops import CACHE, define_tables, scans, time_loop
from specc.compiler.render.parameters import BUFFERS, ClassContext, buffer_tables, parameter_lines
from specc.compiler.render.program import METHODS, Methods, keeper_of, new_cache


@record
class OpContext:
    """The template context of the file of an op.

    Attributes:
        package: the package that contains the file. The file uses this name if the file is run outside of the package.
        cpu: whether the code runs on a CPU. The plan key does not depend on this attribute.
    """

    package: str
    cpu: bool = field(default=False, repr=False)


@record
class ModelContext:
    """The template context of model.py.

    `ops` are the functions in separate files, by name: the template and the context of each file. These functions are
    custom ops of Torch, or functions generated for an op.
    """

    TEMPLATE: ClassVar[str] = "torch/model.py.jinja"
    IMPORTED: ClassVar[frozenset[str]] = frozenset({"F", "Tensor", "math", "nn", "torch"})  # imports of the template
    header: tuple[str, ...]
    doc: tuple[str, ...]
    imports: tuple[str, ...]
    constants: tuple[str, ...]
    supports: tuple[str, ...]
    ops: Mapping[str, tuple[str, object]]
    groups: tuple[GroupContext, ...]
    blocks: tuple[ClassContext, ...]
    model: ClassContext
    uses_math: bool


def model_context(plan: Plan) -> ModelContext:
    """Returns the context of model.py for `plan`.

    `supports` contains the names of templates. build.py replaces these names by rendered text.
    """
    programs = plan.programs
    groups = group_contexts(plan)
    called = {c.rendered.module: plan.called(c) for c in plan.choices if c.rendered.module}
    symbols = {c.rendered.module: c.rendered.function for c in plan.choices}
    imports = [
        (module, symbols[module] if symbols[module] == name else f"{symbols[module]} as {name}")
        for module, name in called.items()
    ]
    called_ones: dict[str, tuple[str, Any] | None] = {}
    of_nodes = (call for graph in _rendered_graphs(plan) for call in _supports(plan, graph))
    for call in (*of_nodes, *(call for group in groups for call in group.calls)):
        if called_ones.setdefault(call.support, call.generated) != call.generated:
            raise ValueError(f"two functions are named {call.support}")
    called_ones |= {"recomputed": None} if programs.recomputed else {}
    called_ones |= {"derived": None} if programs.derived else {}
    package = f"specc_{plan.name}"
    context = OpContext(package, not plan.target.arch)
    ops = {name: op_file(name, generated, context) for name, generated in called_ones.items() if is_op(name, generated)}
    supports = tuple(name for name in called_ones if name not in ops)
    imports += [(name, name) for name in ops]
    names = {name for name, _, _ in programs.sizes} | {
        *group_functions(programs).values(),
        *called.values(),
        *called_ones,
    }
    tables = Tables(frozenset((*(name for name, _, _ in programs.sizes), *(name for name, _, _ in programs.constants))))
    for name, value, formula in programs.constants:
        text = python_formula(formula)
        tables.texts[name] = f"{name} = {text}" if text else f"{name} = {value!r}  # {formula}"
    reserved = LOCALS | names
    blocks, model = _classes(plan, reserved, tables)
    functions = [function for cls in (model, *blocks) for function in cls.methods]
    functions += [function for group in groups for function in (group.forward, group.backward) if function is not None]
    code = [line for cls in (model, *blocks) for line in cls.init]
    code += [line for function in functions for line in (*function.lines, function.returns)]
    doc = f"{plan.name} for {plan.target.name} in {programs.params[0].dtype}: {plan.title}."
    stored = [table for cls in (*blocks, model) for table in cls.tables]
    stated = [*tables.texts.values(), *stored]
    text = "\n".join((*code, *stated))
    sizes = [size for size in programs.sizes if re.search(rf"\b{size[0]}\b", text)]
    constants = (*_sizes(sizes), *stated)
    doc += f" {', '.join((_legend(plan), *(f'{name} {words}' for name, _, words in sizes)))}."
    header = f"# Generated by specc from {plan.source} and templates/{ModelContext.TEMPLATE}. Do not edit."
    return ModelContext(
        tuple(textwrap.wrap(header, WIDTH, subsequent_indent="# ", break_long_words=False)),
        tuple(textwrap.wrap(f'"""{doc}"""', WIDTH, break_long_words=False)),
        tuple(_imported(module, function) for module, function in sorted(imports, key=_by_number)),
        constants,
        supports,
        ops,
        groups,
        blocks,
        model,
        any("math." in line for line in (*constants, *code)),
    )


def _imported(module: str, function: str) -> str:
    line = f"from .{module} import {function}"
    return line if len(line) <= WIDTH else f"from .{module} import (\n    {function},\n)"


def _sizes(sizes: Sequence[tuple[str, int, str]]) -> Iterator[str]:
    for start in range(0, len(sizes), 8):
        row = sizes[start : start + 8]
        yield f"{', '.join(name for name, _, _ in row)} = {', '.join(str(int(value)) for _, value, _ in row)}"


def _by_number(entry: tuple[str, str]) -> str:
    return re.sub(r"\d+", lambda digits: digits[0].zfill(12), entry[0])


def _legend(plan: Plan) -> str:
    pairs = any("S" in type.shape for _, type in plan.programs.programs[0].inputs)
    lengths = "S tokens of the source, T of the target" if pairs else "T tokens, S cached positions"
    return f"B rows, {lengths}"


def _rendered_graphs(plan: Plan) -> Iterator[Graph]:
    yield from plan.programs.functions
    yield from plan.programs.programs
    for group in plan.programs.groups:
        yield from (group.forward, group.backward)


def _supports(plan: Plan, graph: Graph) -> Iterator[TorchCall]:
    for node in (node for node in graph.nodes if not node.op.planned):
        choice = plan.choice(graph, node) if node.op.everywhere else None
        if choice is not None and choice.rendered.function:
            continue
        call = node.op.call([graph.types[ref] for ref in node.inputs])
        yield from call.supports if call is not None else ()


def first_caller(plan: Plan, support: str) -> str:
    programs = plan.programs
    for graph in programs.programs:
        for node in (whole := flatten(programs, graph)).nodes:
            call = None if node.op.planned else node.op.call([whole.types[ref] for ref in node.inputs])
            if call is not None and call.support == support:
                return node.name
    return support


def is_op(name: str, generated: tuple[str, Any] | None) -> bool:
    """Returns whether generated code has a file for the function `name`, rather than a function in model.py."""
    return generated is not None or exists(f"torch/ops/{name}.py.jinja")


def op_file(name: str, generated: tuple[str, Any] | None, context: OpContext) -> tuple[str, object]:
    """Returns the template of an op's file, and the context for the template. If `generated` is None, the context is
    `context`. Otherwise, the context is the context in `generated`, with the package of `context`."""
    if generated is None:
        return f"torch/ops/{name}.py.jinja", context
    template, settings = generated
    return template, replace(settings, package=context.package)


def _classes(plan: Plan, reserved: frozenset[str], tables: Tables) -> tuple[tuple[ClassContext, ...], ClassContext]:
    programs = plan.programs
    keeper = keeper_of(programs)
    speller = Speller(plan, flags_of(programs), {}, keeper)
    rolled = aligned([roll(programs, graph) for graph in programs.programs])
    distinct, aliases = _distinct(rolled, speller)
    define_tables([n.op for g in rolled for n in g.nodes if isinstance(n.op, Loop)], tables)
    taken: set[str] = set()
    blocks = {uses.place: block_class(plan, uses, tables, reserved, taken) for uses in lists(plan)}
    steps = tuple(_step_class(plan, name, reserved) for name in _steps(programs))
    sides = _sides(programs)
    states = ([name for name, _ in graph.inputs if name.startswith(f"{CACHE}.")] for graph in rolled)
    state = next(filter(None, states), [])
    methods = Methods(plan, speller, blocks, tables, reserved, sides, state)
    outlined = outline(distinct, sides, _taken(programs), reserved, speller.kernel, methods.distinguishes)
    shared: list[Function] = []
    sections: dict[str, tuple[str, ...]] = {}
    for name, merged in outlined.methods.items():
        function, sections[name] = methods.shared(name, merged)
        shared.append(function)
    methods = replace(methods, speller=replace(speller, sections=sections))
    functions = [*map(methods.program, outlined.programs), *shared]
    params = tuple(dict.fromkeys(entry for graph in programs.programs for entry in graph.params))
    cached = (graph for graph in programs.programs if keeper == CACHE and _reads_cache(programs, graph))
    if (graph := next(cached, None)) is not None and any(field_of(node) == "blocks" for node in graph.nodes):
        functions.append(new_cache(graph, state, params[0], tables))
    model = ClassContext(
        "Model",
        tuple(docstring("The whole model; each program is a method.")),
        (),
        _init(programs, params, blocks),
        tuple(functions),
        aliases,
        tuple(_constants(programs)),
        buffer_tables(params),
    )
    return (*(block.context for block in blocks.values()), *steps), model


def _reads_cache(programs: Programs, graph: Graph) -> bool:
    return graph.name not in programs.whole or any(name.startswith(f"{CACHE}.") for name, _ in graph.inputs)


def _distinct(rolled: Sequence[Graph], speller: Speller) -> tuple[list[Graph], tuple[str, ...]]:
    known: dict[object, Graph] = {}
    aliases: list[str] = []
    for graph in rolled:
        loops = [(n.op.runs, n.op.joins, n.op.keeps, n.op.methods) for n in graph.nodes if isinstance(n.op, Loop)]
        nodes = [(n.name, n.op, n.inputs, n.epilogue, speller.kernel(graph, n)) for n in graph.nodes]
        inputs = [(name, tuple("T" if dim == 1 else dim for dim in type.shape)) for name, type in graph.inputs]
        first = known.setdefault((tuple(nodes), tuple(loops), tuple(inputs), graph.outputs), graph)
        if first is not graph:
            aliases.append(f"{METHODS.get(graph.name, graph.name)} = {METHODS.get(first.name, first.name)}")
    return list(known.values()), tuple(aliases)


def _taken(programs: Programs) -> frozenset[str]:
    """Returns the names that no other method of the model may have: the names of programs, and the names of parts with
    parameters."""
    methods = [METHODS.get(graph.name, graph.name) for graph in programs.programs]
    parts = [path.partition(".")[0] for graph in programs.programs for path, _ in graph.params]
    return frozenset((*methods, "new_cache", *parts))


def _sides(programs: Programs) -> frozenset[str]:
    paths = [path.split(".") for graph in programs.programs for path, _ in graph.params]
    return frozenset(path[0] for path in paths if len(path) > 2) - {path[0] for path in paths if len(path) == 2}


def _steps(programs: Programs) -> Sequence[str]:
    inside = {
        node.op.callee
        for graph in programs.graphs
        for node in graph.nodes
        if isinstance(node.op, Call) and (field_of(node) or not node.op.at)
    }
    return list(dict.fromkeys(owner(graph.name) for graph in programs.functions if graph.name not in inside))


def _step_class(plan: Plan, name: str, reserved: frozenset[str]) -> ClassContext:
    graphs = [graph for graph in plan.programs.functions if owner(graph.name) == name]
    functions = [without_scoring_groups(plan.programs, graph) for graph in graphs]
    params = tuple(dict.fromkeys(entry for graph in functions for entry in graph.params))
    methods = [_method(plan, graph, reserved) for graph in functions]
    layers = dict.fromkeys(node.name.split(".")[0] for node in functions[0].nodes if "." in node.name)
    loops = [(scan, op) for scan, op in scans(plan.programs.programs) if owner(op.callee) == name]
    for scan, op in loops[:1]:
        drops = any(other.drops for _, other in loops)
        methods.insert(0, time_loop(plan.programs.function(op.callee), scan, drops))
    doc = f"A loop over time: {', '.join(layers)}." if loops else f"One step: {', '.join(layers)}."
    table = f"{class_name(name).upper()}_{BUFFERS}"
    init, stored = parameter_lines(params, table=table), buffer_tables(params, table)
    return ClassContext(class_name(name), tuple(docstring(doc)), (), init, tuple(methods), tables=stored)


def _method(plan: Plan, graph: Graph, reserved: frozenset[str]) -> Function:
    state = {name for name, _ in graph.inputs}
    labels = [label for label, _ in graph.outputs if label not in state or label == "x"]
    merged = merge([graph], labels)
    body = Body(merged, Speller(plan), reserved=reserved, constants=constants_of(plan))
    outputs = dict(graph.outputs)
    doc = types_doc(graph.inputs, [graph.types[outputs[label]] for label in labels])
    if len(labels) < len(graph.outputs):
        doc += " Caches are updated in place."
    return method(body, graph.name.partition(".")[2], doc, (f"{name}: Tensor" for name, _ in graph.inputs))


def _init(programs: Programs, params: Sequence[Named], blocks: dict[str, BlockClass]) -> tuple[str, ...]:
    loops = {op.at: class_name(owner(op.callee)) for _, op in scans(programs.programs)}
    lines = list(parameter_lines(params, modules=(*blocks, *loops)))
    stored = next((i for i, line in enumerate(lines) if line.startswith("for name, (shape")), len(lines))
    modules = [f"self.{field} = nn.ModuleList({block.make})" for field, block in blocks.items()]
    modules += [f"self.{at} = {name}()" for at, name in loops.items()]
    return (*lines[:stored], *modules, *lines[stored:])


def _constants(programs: Programs) -> Iterator[str]:
    """Yields the class attributes of the model. The runtime reads these attributes to compile the model."""
    nodes = (node for graph in programs.graphs for node in graph.nodes)
    if names := sorted({node.op.name for node in nodes if node.op.apart}):
        yield f"fullgraph = False  # Torch's compiler skips {' and '.join(names)}, and compiles the parts around it"
