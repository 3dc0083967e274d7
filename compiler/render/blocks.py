"""Renders the class of the blocks in a module list.

All blocks of a list share one class. An input that only some blocks have is an optional argument.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from specc.compiler.expr.python_lines import WIDTH, fitted
from specc.compiler.ir.graph import Graph, Named, Node, walk
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.region import Call
from specc.compiler.passes.merge import Merged, Where, free, merge
from specc.compiler.passes.recompute import PREFIX
from specc.compiler.passes.roll import field_of, index_of, merged_order, of_block, returns_of
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import class_name, owner, without_scoring_groups
from specc.compiler.render.body import Body, constants_of
from specc.compiler.render.conditions import Fact, facts_of
from specc.compiler.render.flags import Flags, block_variants, flag_variants, flags_of
from specc.compiler.render.formula import python_formula
from specc.compiler.render.function import (
    LOCALS,
    Function,
    Speller,
    docstring,
    method,
    optional_arguments,
    tuple_text,
    types_doc,
)
from specc.compiler.render.parameters import BUFFERS, ClassContext, buffer_tables, parameter_lines, shape_text

DECORATOR = "@recomputed"
DERIVED = "@derived"


@dataclass
class Tables:
    """Module constants of generated code, called tables. Tables state the differences between the blocks of a
    `ModuleList`.

    Attributes:
        taken: The names of other constants.
        texts: The definition of each table, by name.
        values: The value of each table as text, by name.
        layers: The names of tables that hold sets of blocks, by module list and set.
        arguments: For each module list and optional argument, the name of a table. The table holds the blocks that
            receive the argument.
    """

    taken: frozenset[str] = frozenset()
    texts: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    layers: dict[tuple[str, frozenset[int]], str] = field(default_factory=dict)
    arguments: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, place: str, name: str, text: str, comment: str, layers: Sequence[int] = ()) -> str:
        """Adds a table and returns its name. A table with the same text and preferred name is not added again.

        Args:
            place: The path of the module list.
            name: The preferred name.
            text: The value.
            comment: The comment of the definition.
            layers: The blocks in the table, if the table is a set of blocks.
        """
        options = (name, f"{place.upper().replace('.', '_')}_{name}")
        chosen = free(options, lambda option: option in self.taken or self.values.get(option, text) != text)
        self.texts[chosen] = f"{chosen} = {text}  # {comment}"
        if len(self.texts[chosen]) > WIDTH:
            self.texts[chosen] = "\n".join((f"# {comment}", *fitted(f"{chosen} = {text}", WIDTH)))
        self.values[chosen] = text
        if layers:
            self.layers.setdefault((place, frozenset(layers)), chosen)
        return chosen

    def of(self, place: str, layers: frozenset[int], name: str, comment: str = "") -> str:
        """Returns the name of the table that holds a set of blocks. If there is no such table, adds a table.

        Args:
            place: The path of the module list.
            layers: The blocks.
            name: The preferred name of an added table, in lower case.
            comment: The comment of an added table. By default, the blocks are those with a value called `name`.
        """
        comment = comment or f"blocks with `{name}`"
        known = self.layers.get((place, layers))
        return known or self.add(place, name.upper(), set_text(sorted(layers)), comment, tuple(layers))

    def named(self, text: str) -> str:
        return next(name for name, value in self.values.items() if value == text)


def set_text(layers: Sequence[int]) -> str:
    return f"{{{', '.join(map(str, layers))}}}"


class BlockClass(NamedTuple):
    """The class of the blocks in a module list.

    Attributes:
        context: The text of the class.
        order: The arguments of a call after the residual stream.
        optional: The arguments that a call may omit.
        flags: The boolean arguments.
        begin_flags: The boolean arguments of `begin`, the method that creates the state of a block.
        keeps: Whether `forward` has an argument for the cache.
        make: The expression that creates one module, inside a comprehension over `layer`.
    """

    context: ClassContext
    order: tuple[str, ...]
    optional: frozenset[str]
    flags: tuple[str, ...]
    begin_flags: tuple[str, ...]
    keeps: bool
    make: str


class _Uses(NamedTuple):
    """The functions that the blocks of a module list run.

    `layers` maps the name of each function to the blocks that run the function. `callers` maps the name of each
    function to the flags of the programs that call the function. `state` holds the names of the inputs that contain the
    state of earlier tokens. `scalars` maps each scalar to its value in each block. `formulas` maps scalars to their
    formulas.
    """

    place: str
    functions: Sequence[Graph]
    layers: Mapping[str, frozenset[int]]
    callers: Mapping[str, Collection[Flags]]
    state: frozenset[str]
    scalars: Mapping[str, Mapping[int, float]]
    formulas: Mapping[str, str]

    @property
    def every(self) -> frozenset[int]:
        return frozenset().union(*self.layers.values())

    def having(self, graphs: Iterable[Graph]) -> frozenset[int]:
        return frozenset().union(*(self.layers[graph.name] for graph in graphs))


def lists(plan: Plan) -> Iterator[_Uses]:
    flags = flags_of(plan.programs)
    calls = [(node, flags[graph.name]) for graph in plan.programs.programs for node in graph.nodes if field_of(node)]
    for place in dict.fromkeys(field_of(call) for call, _ in calls):
        yield _uses(plan, place, [entry for entry in calls if field_of(entry[0]) == place])


def _uses(plan: Plan, place: str, calls: Sequence[tuple[Node, Flags]]) -> _Uses:
    layers: dict[str, set[int]] = {}
    callers: dict[str, dict[Flags, None]] = {}
    state: set[str] = set()
    scalars: dict[str, dict[int, float]] = {}
    formulas: dict[str, str] = {}
    for call, flags in calls:
        assert isinstance(call.op, Call)
        callee = plan.programs.function(call.op.callee)
        inputs = callee.inputs
        state |= {name for (name, _), ref in zip(inputs, call.inputs, strict=True) if of_block(ref)}
        for part in walk({graph.name: graph for graph in plan.programs.functions}, callee):
            layers.setdefault(part.name, set()).add(index_of(call))
            callers.setdefault(part.name, {})[flags] = None
        for name, value in call.op.scalars:
            scalars.setdefault(name, {})[index_of(call)] = value
        formulas |= dict(call.op.formulas)
    functions = [without_scoring_groups(plan.programs, g) for g in plan.programs.functions if g.name in layers]
    frozen = {name: frozenset(numbers) for name, numbers in layers.items()}
    return _Uses(place, functions, frozen, callers, frozenset(state), scalars, formulas)


def block_class(plan: Plan, uses: _Uses, tables: Tables, reserved: frozenset[str], taken: set[str]) -> BlockClass:
    """Returns the class of the blocks in one module list. Adds the class name to `taken`.

    Args:
        plan: the plan.
        uses: the functions of the list.
        tables: the tables of the module.
        reserved: the names that local variables must not have.
        taken: the names of earlier classes.
    """
    begins = [graph for graph in uses.functions if _method(graph).startswith("begin")]
    decorators = dict.fromkeys(plan.programs.derived, DERIVED)
    decorators |= {graph.name: DECORATOR for graph in uses.functions if _method(graph).startswith(PREFIX)}
    parts = [graph for graph in uses.functions if graph.name in decorators]
    runs = [graph for graph in uses.functions if graph not in (*begins, *parts)]
    kind = owner(uses.functions[0].name)
    name = class_name(kind if class_name(kind) not in taken else uses.place.replace(".", "_"))
    taken.add(name)
    labels = dict.fromkeys(label for graph in runs for label in (graph.outputs[0][0], *returns_of(graph)))
    variants = block_variants(runs, uses.callers)
    merged = merge([graph for graph, _ in variants], list(labels), Speller(plan).kernel)
    inputs = _inputs(merged, uses)
    flags = flag_variants([some for _, some in variants])
    having = {"cache": flags.pop("cache", frozenset()), **{name: where for name, _, where in inputs}}
    facts = facts_of(merged, having, flags)
    layer_facts = _layer_facts(merged, uses, facts)
    body = _body(plan, merged, uses, (*facts, *layer_facts), reserved)
    used = tuple(flag for flag in flags if flag in body.conditions)
    caches = [(name, type) for name, type, _ in merged.inputs() if name in uses.state]
    keeps = bool(caches) or "cache" in body.conditions
    returned = [merged.type(*operand[0]) for _, operand in merged.outputs]
    doc = types_doc(((name, type) for name, type, _ in inputs), returned)
    if caches:
        doc += f" The cache is of {types_doc(caches, [])[: -len(' -> .')]}, updated in place."
    arguments = optional_arguments(merged, inputs, used, ["cache=None"] * keeps)
    again = plan.programs.recomputed
    decorator = DECORATOR if any(graph.name in again for graph in runs) else ""
    methods = [replace(method(body, "forward", doc, arguments), decorator=decorator)]
    methods += (_part(plan, graph, reserved, decorators[graph.name]) for graph in parts)
    begin_flags: tuple[str, ...] = ()
    attributes = {fact.name: uses.having(merged.variants[i] for i in sorted(fact.where)) for fact in layer_facts}
    conditions = set(body.conditions)
    if begins:
        begin, begin_flags = _begin(plan, uses, begins, reserved, attributes, conditions)
        methods.append(begin)
    attributes = {name: layers for name, layers in attributes.items() if name in conditions}
    table = f"{name.upper()}_{BUFFERS}"
    buffers, definitions = _buffers(uses, table, tables)
    init = _init(uses, attributes, tables, buffers)
    words = merged_order(
        [list(dict.fromkeys(n.name.split(".")[0] for n in g.nodes if "." in n.name)) for g in uses.functions]
    )
    doc = f"One block: {', '.join(words)}." if words else f"One {kind}."
    numbered = any("layer" in text for text in init)
    context = ClassContext(
        name, tuple(docstring(doc)), ("layer: int",) if numbered else (), init, tuple(methods), tables=definitions
    )
    over = f"range({max(uses.every) + 1})"
    make = f"{name}(layer) for layer in {over}" if numbered else f"{name}() for _ in {over}"
    optional = frozenset(name for name, _, where in inputs if where != merged.every)
    return BlockClass(context, tuple(name for name, _, _ in inputs), optional, used, begin_flags, keeps, make)


def _part(plan: Plan, graph: Graph, reserved: frozenset[str], decorator: str) -> Function:
    merged = merge([graph], [label for label, _ in graph.outputs], Speller(plan).kernel)
    body = Body(merged, Speller(plan), reserved=reserved, constants=constants_of(plan))
    doc = types_doc(graph.inputs, [graph.types[ref] for _, ref in graph.outputs]).removeprefix(" -> ")
    arguments = (name for name, _ in graph.inputs)
    return replace(method(body, _method(graph), doc, arguments), decorator=decorator)


def _method(graph: Graph) -> str:
    return graph.name.partition(".")[2]


def _layer_facts(merged: Merged, uses: _Uses, facts: Sequence[Fact], taken: Collection[str] = ()) -> list[Fact]:
    """Returns conditions on attributes of a block. These conditions distinguish variants with equal arguments.

    Args:
        merged: The variants.
        uses: The functions of the module list.
        facts: The conditions on arguments.
        taken: The names of other attributes.
    """
    known = {fact.where for fact in facts}
    attribute_facts: dict[str, Fact] = {}
    common = frozenset.intersection(
        *(frozenset(node.name.partition(".")[0] for node in graph.nodes) for graph in merged.variants)
    )
    holders = {path.partition(".")[0] for graph in uses.functions for path, _ in graph.params}
    groups: dict[frozenset[int], list[str]] = {}
    exclusive: set[tuple[frozenset[int], str]] = set()
    for name in dict.fromkeys(node.name for graph in merged.variants for node in graph.nodes):
        graphs = [graph for graph in merged.variants if name in graph.by_name]
        # Blocks may have different nodes, and may differ in the operation, the epilogue or the sizes of a node.
        nodes = {graph.name: graph.by_name[name] for graph in graphs}
        forms = {graph: (node.op, node.epilogue, node.types) for graph, node in nodes.items()}
        for form in (None, *dict.fromkeys(forms.values())):
            having = uses.having(graph for graph in graphs if form in (None, forms[graph.name]))
            if having != uses.every and name not in groups.get(having, ()):
                groups.setdefault(having, []).append(name)
                exclusive |= {(having, name)} if form is None else set()
    # blocks with equal nodes may differ in the values that a node reads, or that the block returns
    for graph in merged.variants:
        if uses.layers[graph.name] != uses.every:
            groups.setdefault(uses.layers[graph.name], [graph.nodes[-1].name])

    weighted = {node.name for graph in merged.variants for node in graph.nodes if any(r[0] == "@" for r in node.inputs)}

    def rank(having: frozenset[int], name: str) -> tuple[bool, bool, bool]:
        return name.partition(".")[0] in common, (having, name) not in exclusive, name not in weighted

    for having, names in sorted(groups.items(), key=lambda entry: min(rank(entry[0], name) for name in entry[1])):
        where = frozenset(i for i, graph in enumerate(merged.variants) if uses.layers[graph.name] <= having)
        if where and where != merged.every and not known & {where, merged.every - where}:
            path = min(names, key=lambda name: rank(having, name)).split(".")
            options = [path[0]] if path[0] not in common else []
            options += [path[-1], "_".join(path[-2:]), "_".join(path), f"{'_'.join(path)}_layer"]
            used = {*attribute_facts, *LOCALS, *common, *holders, *(name.removeprefix("self.") for name in taken)}
            word = free(options, used.__contains__)
            known.add(where)
            attribute_facts[word] = Fact(f"self.{word}", where)
    return list(attribute_facts.values())


def _body(plan: Plan, merged: Merged, uses: _Uses, facts: Sequence[Fact], reserved: frozenset[str]) -> Body:
    forms: dict[tuple[str, ...], set[int]] = {}
    for variant, graph in enumerate(merged.variants):
        if names := tuple(name for name, _ in graph.inputs if name in uses.state):
            forms.setdefault(names, set()).add(variant)
    unpacks = [
        (frozenset(names), f"{', '.join(names) if len(names) > 1 else tuple_text(names)} = cache", frozenset(where))
        for names, where in forms.items()
    ]
    return Body(merged, Speller(plan), facts=facts, reserved=reserved, unpacks=unpacks, constants=constants_of(plan))


def _inputs(merged: Merged, uses: _Uses) -> Sequence[tuple[str, TensorType, Where]]:
    def rank(entry: tuple[str, TensorType, Where]) -> tuple[bool, bool]:
        having = uses.having(merged.variants[variant] for variant in entry[2])
        return entry[2] != merged.every, having == uses.every

    return sorted((entry for entry in merged.inputs() if entry[0] not in uses.state), key=rank)


def _begin(
    plan: Plan,
    uses: _Uses,
    begins: Sequence[Graph],
    reserved: frozenset[str],
    attributes: dict[str, frozenset[int]],
    conditions: set[str],
) -> tuple[Function, tuple[str, ...]]:
    """Returns the method that creates the state of a block, and the flag arguments of this method.

    The method reads flags that are attributes of the block. Adds each such flag to `attributes`, with the blocks in
    which the flag is true. Adds the names of the conditions in the method to `conditions`.
    """
    variants = block_variants(begins, uses.callers)
    merged = merge([graph for graph, _ in variants], kind=Speller(plan).kernel)
    flags = flag_variants([some for _, some in variants])
    facts = facts_of(merged, {}, flags)
    for name, layers in attributes.items():
        facts.append(
            Fact(name, frozenset(i for i, (graph, _) in enumerate(variants) if uses.layers[graph.name] <= layers))
        )
    layer_facts = _layer_facts(merged, uses, facts, attributes)
    attributes |= {fact.name: uses.having(merged.variants[i] for i in sorted(fact.where)) for fact in layer_facts}
    body = _body(plan, merged, uses, (*facts, *layer_facts), reserved)
    conditions |= body.conditions
    used = tuple(flag for flag in flags if flag in body.conditions)
    graph = begins[0]
    doc = types_doc(graph.inputs, [graph.types[ref] for _, ref in graph.outputs])
    arguments = (*(f"{name}: Tensor" for name, _ in graph.inputs), *(f"{flag}: bool = False" for flag in used))
    begin = method(body, "begin", doc, arguments, "tuple[Tensor]" if len(merged.outputs) == 1 else "")
    state = body.own_outputs()
    alike = len(state) == len(merged.outputs) > 1
    return replace(begin, returns=", ".join(state) if alike else tuple_text(state)), used


def _other_shapes(uses: _Uses, path: str, type: TensorType) -> Iterator[tuple[str, frozenset[int]]]:
    """Yields each shape of the parameter `path` that differs from the shape of `type`, and the blocks in which the
    parameter has this shape."""
    for other in dict.fromkeys(dict(graph.params).get(path, type) for graph in uses.functions):
        if other != type:
            yield shape_text(other), uses.having(g for g in uses.functions if dict(g.params).get(path) == other)


def _buffers(uses: _Uses, table: str, tables: Tables) -> tuple[str, tuple[str, ...]]:
    groups: dict[frozenset[int], list[Named]] = {}
    for entry in dict.fromkeys(entry for graph in uses.functions for entry in graph.params if entry[1].storage):
        groups.setdefault(uses.having(graph for graph in uses.functions if entry in graph.params), []).append(entry)
    texts: list[str] = []
    definitions: list[str] = []
    for having, params in groups.items():
        name = text = table
        if having != uses.every:
            chosen = tables.of(uses.place, having, params[0][0].rpartition(".")[2])
            name = f"{table}_{chosen}"
            text = f"({name} if layer in {chosen} else {{}})"
        texts.append(text)
        definitions += buffer_tables(params, name)
    return " | ".join(texts), tuple(definitions)


def _init(uses: _Uses, attributes: Mapping[str, frozenset[int]], tables: Tables, table: str) -> tuple[str, ...]:
    """Returns the lines of a block's constructor. The lines set the parameters, the scalars, and the attributes that
    are true in only some blocks."""
    params = {path: type for graph in reversed(uses.functions) for path, type in graph.params}
    order = merged_order([[path for path, _ in graph.params] for graph in uses.functions])
    where: dict[str, str] = {}
    shapes: dict[str, str] = {}
    # if a condition in `forward` tests a set of layers, the set is named after the condition
    tests: dict[str, str] = {}
    for name, at in attributes.items():
        word = name.removeprefix("self.")
        inside, outside = (
            {node.name for graph in uses.functions if (uses.layers[graph.name] <= at) == within for node in graph.nodes}
            for within in (True, False)
        )
        has_value = any(f"_{word}_" in f"_{path}_".replace(".", "_") for path in inside - outside)
        tests[name] = tables.of(uses.place, at, word, "" if has_value else f"blocks whose `{word}` differs")
    for path in dict.fromkeys(path for graph in uses.functions for path, type in graph.params if not type.storage):
        having = uses.having(graph for graph in uses.functions if path in dict(graph.params))
        if having != uses.every:
            where[path] = f"layer in {tables.of(uses.place, having, path.rpartition('.')[2])}"
        for shape, other in _other_shapes(uses, path, params[path]):
            short = path.rpartition(".")[2]
            comment = f"blocks whose `{short}` has the shape {shape}"
            table_name = tables.of(uses.place, other, f"{short}_{len(shapes)}", comment)
            rest = shapes.get(path, shape_text(params[path]))
            shapes[path] = f"{shape} if layer in {table_name} else {rest}"
    lines = [*parameter_lines([(path, params[path]) for path in order], where, table=table, shapes=shapes)]
    for scalar, values in uses.scalars.items():
        text = python_formula(uses.formulas.get(scalar, ""))
        if not text:  # Python's math module lacks a function of the formula
            numbers = tuple_text([repr(values[layer]) for layer in sorted(values)])
            text = f"{tables.add(uses.place, f'{scalar.upper()}S', numbers, 'of each block')}[layer]"
        lines.append(f"self.{scalar} = {text}")
    return (*lines, *(f"{name} = layer in {layers}" for name, layers in tests.items()))
