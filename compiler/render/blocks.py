"""Renders the class of the blocks of a module list.

All blocks of a list share one class, with optional arguments for inputs that only some of them have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from specc.compiler.expr.python_lines import fitted
from specc.compiler.int8.fake_quantize import SUFFIX
from specc.compiler.ir.graph import Graph, Named, Node, TensorType
from specc.compiler.ops.region import Call
from specc.compiler.passes.merge import Merged, Where, merge
from specc.compiler.passes.roll import field_of, index_of, merged_order, of_block
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import class_name, owner, without_scoring_groups
from specc.compiler.render.body import Body, Fact, constants_of
from specc.compiler.render.formula import python_formula
from specc.compiler.render.function import LOCALS, Function, Speller, docstring, types_doc
from specc.compiler.render.parameters import BUFFERS, ClassContext, buffer_tables, parameter_lines

LINE = 120


@dataclass
class Tables:
    """Module constants that distinguish the blocks of a list.

    Attributes:
        texts: the definition of each constant, by name.
        values: the value of each constant as text, by name.
        layers: the name of the constant with a set of blocks, by list and set.
        arguments: the name of the constant with the blocks that receive an optional argument, by list and argument.
    """

    texts: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    layers: dict[tuple[str, frozenset[int]], str] = field(default_factory=dict)
    arguments: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, place: str, name: str, text: str, comment: str, layers: Sequence[int] = ()) -> str:
        """Returns the name of a new table, or of an existing table with the same text and name.

        Args:
            place: the path of the module list.
            name: the preferred name.
            text: the value.
            comment: the comment of the definition.
            layers: the blocks in the table, if it is a set of blocks.
        """
        options = (name, f"{_prefix(place)}{name}", *(f"{name}_{i}" for i in range(2, 99)))
        chosen = next(option for option in options if self.values.get(option, text) == text)
        self.texts[chosen] = line(chosen, text, comment)
        self.values[chosen] = text
        if layers:
            self.layers.setdefault((place, frozenset(layers)), chosen)
        return chosen

    def of(self, place: str, layers: frozenset[int], name: str) -> str:
        """Returns the table of some blocks of a list; a new table is called `name`."""
        known = self.layers.get((place, layers))
        text = "{" + ", ".join(map(str, sorted(layers))) + "}"
        return known or self.add(place, name.upper(), text, f"blocks with {name}", tuple(layers))


def line(name: str, text: str, comment: str) -> str:
    """Returns the definition of a constant. The comment is on a separate line if the line would be too long."""
    made = f"{name} = {text}  # {comment}"
    if len(made) <= LINE:
        return made
    return "\n".join((f"# {comment}", *fitted(f"{name} = {text}", LINE)))


def _prefix(place: str) -> str:
    return f"{place.upper().replace('.', '_')}_"


@dataclass(frozen=True, slots=True)
class BlockClass:
    """The class of a module list.

    Attributes:
        context: its text.
        order: the arguments of a call behind the stream.
        optional: those that a call may leave out.
        flags: arguments that are true or false.
        begin_flags: those of `begin`.
        keeps: whether it takes a cache.
        make: the text that makes its modules in a comprehension over `layer`.
        count: how many there are.
    """

    context: ClassContext
    order: tuple[str, ...]
    optional: frozenset[str]
    flags: tuple[str, ...]
    begin_flags: tuple[str, ...]
    keeps: bool
    make: str
    count: int


@dataclass(frozen=True)
class _Uses:
    """The functions of a module list.

    `layers` are the blocks that run each function. `state` are the inputs that are state. `scalars` are the values of
    each scalar by block, and `formulas` their formulas.
    """

    place: str
    layers: Mapping[str, frozenset[int]]
    state: frozenset[str]
    scalars: Mapping[str, Mapping[int, float]]
    formulas: Mapping[str, str]

    @property
    def every(self) -> frozenset[int]:
        return frozenset(layer for layers in self.layers.values() for layer in layers)


def lists(plan: Plan) -> Iterator[_Uses]:
    """Yields the module lists of a model."""
    calls = [node for graph in plan.programs.programs for node in graph.nodes if field_of(node)]
    for place in dict.fromkeys(map(field_of, calls)):
        yield _uses(plan, place, [call for call in calls if field_of(call) == place])


def _uses(plan: Plan, place: str, calls: Sequence[Node]) -> _Uses:
    layers: dict[str, set[int]] = {}
    state: set[str] = set()
    scalars: dict[str, dict[int, float]] = {}
    formulas: dict[str, str] = {}
    for call in calls:
        assert isinstance(call.op, Call)
        layers.setdefault(call.op.callee, set()).add(index_of(call))
        names = (name for name, _ in plan.programs.function(call.op.callee).inputs)
        state |= {name for name, ref in zip(names, call.inputs, strict=True) if of_block(ref)}
        for name, value in call.op.scalars:
            scalars.setdefault(name, {})[index_of(call)] = value
        formulas |= dict(call.op.formulas)
    ordered = {graph.name: frozenset(layers[graph.name]) for graph in plan.programs.functions if graph.name in layers}
    return _Uses(place, ordered, frozenset(state), scalars, formulas)


def block_class(plan: Plan, uses: _Uses, tables: Tables, reserved: frozenset[str], taken: set[str]) -> BlockClass:
    """Returns the class of one module list. Its name is added to `taken`.

    Args:
        plan: the plan.
        uses: the functions of the list.
        tables: the tables of the module.
        reserved: names that locals must not have.
        taken: the names of earlier classes.
    """
    functions = [without_scoring_groups(plan.programs, plan.programs.function(name)) for name in uses.layers]
    begins = [graph for graph in functions if _method(graph).startswith("begin")]
    runs = [graph for graph in functions if graph not in begins]
    speller = Speller(plan)
    name = class_name(owner(functions[0].name))
    name = name if name not in taken else class_name(uses.place.replace(".", "_"))
    taken.add(name)
    merged = merge(runs, [runs[0].outputs[0][0]], speller.kernel)
    flags = {
        flag: frozenset(i for i, graph in enumerate(runs) if flag in _flags(graph, runs)) for flag in _all_flags(runs)
    }
    facts = list(_facts(merged, uses, flags))
    own = _layer_facts(merged, uses, facts, tables)
    body = _spelled(plan, merged, uses, (*facts, *own), reserved)
    used = tuple(flag for flag in flags if flag != "cache" and any(fact.text == flag for fact in body.asked))
    keeps = bool(uses.state & {name for name, _, _ in merged.inputs()}) or any(
        fact.text == "cache is not None" for fact in body.asked
    )
    methods = [_forward(merged, uses, body, used, keeps)]
    begin_flags: tuple[str, ...] = ()
    if begins:
        begin, begin_flags = _begin(plan, merge(begins, kind=speller.kernel), reserved)
        methods.append(begin)
    table = f"{name.upper()}_{BUFFERS}"
    init = _init(uses, functions, [fact for fact in own if fact in body.asked], tables, table)
    doc = f"One block: {', '.join(_layers(functions))}." if _layers(functions) else f"One {owner(functions[0].name)}."
    needs = any("layer" in text for text in init)
    arguments = ("layer: int",) if needs else ()
    params = tuple(dict.fromkeys(entry for graph in functions for entry in graph.params))
    stored = buffer_tables(params, table)
    context = ClassContext(name, tuple(docstring(doc)), arguments, init, tuple(methods), tables=stored)
    inputs = _inputs(merged, uses)
    order = tuple(name for name, _, _ in inputs)
    optional = frozenset(name for name, _, where in inputs if where != merged.every)
    count = max(uses.every) + 1
    make = f"{name}(layer) for layer in range({count})" if needs else f"{name}() for _ in range({count})"
    return BlockClass(context, order, optional, used, begin_flags, keeps, make, count)


def _method(graph: Graph) -> str:
    return graph.name.partition(".")[2]


def _layers(functions: Sequence[Graph]) -> Sequence[str]:
    orders = [
        list(dict.fromkeys(node.name.split(".")[0] for node in graph.nodes if "." in node.name)) for graph in functions
    ]
    return merged_order(orders)


def _flags(graph: Graph, runs: Sequence[Graph]) -> frozenset[str]:
    """Returns the flags of a function.

    `cache`: it extends a cache. `training`: it trains, and another function scores. `rounded`: it fake-quantizes. A
    function other than `forward`, `extend` and `score` has its own name as a flag.
    """
    method = _method(graph)
    plain = method.removesuffix(SUFFIX)
    flags = {"rounded"} if plain != method else set()
    if plain == "extend":
        flags.add("cache")
    elif plain == "forward":
        flags |= {"training"} if any(_method(other) == "score" for other in runs) else set()
    elif plain != "score":
        flags.add(plain)
    return frozenset(flags)


def _all_flags(runs: Sequence[Graph]) -> Sequence[str]:
    return list(dict.fromkeys(flag for graph in runs for flag in sorted(_flags(graph, runs))))


def _facts(merged: Merged, uses: _Uses, flags: Mapping[str, Where]) -> Iterator[Fact]:
    """Yields the conditions that arguments of a call decide: the cache, optional arguments and flags."""
    if "cache" in flags:
        yield Fact("cache is not None", "cache is None", flags["cache"], "cache")
    for name, _, where in merged.inputs():
        if where != merged.every and name not in uses.state:
            yield Fact(f"{name} is not None", f"{name} is None", where, name)
    for flag, where in flags.items():
        if flag != "cache":
            yield Fact(flag, f"not {flag}", where, flag)


def _layer_facts(merged: Merged, uses: _Uses, facts: Sequence[Fact], tables: Tables) -> list[Fact]:
    """Returns the conditions that attributes of a block decide, for variants that the arguments do not distinguish."""
    layers = [uses.layers[graph.name] for graph in merged.variants]
    known = [fact.where for fact in facts]
    made: dict[str, Fact] = {}
    words = [{node.name.partition(".")[0] for node in graph.nodes} for graph in merged.variants]
    common = frozenset.intersection(*map(frozenset, words)) if words else frozenset()
    holders = {path.partition(".")[0] for graph in merged.variants for path, _ in graph.params}
    groups: dict[frozenset[int], list[str]] = {}
    for name in dict.fromkeys(node.name for graph in merged.variants for node in graph.nodes):
        having = frozenset().union(*(layers[i] for i, graph in enumerate(merged.variants) if name in graph.by_name))
        if having != uses.every:
            groups.setdefault(having, []).append(name)
    ordered = sorted(groups.items(), key=lambda entry: all(n.partition(".")[0] in common for n in entry[1]))
    for having, names in ordered:
        where = frozenset(i for i, own in enumerate(layers) if own <= having)
        opposite = merged.every - where
        if not where or not opposite or where in known or opposite in known:
            continue
        best = min(names, key=lambda n: (n.partition(".")[0] in common, names.index(n)))
        path = best.split(".")
        options = [path[0]] if path[0] not in common else []
        options += [path[-1], "_".join(path[-2:]), "_".join(path), f"{'_'.join(path)}_layer"]
        word = next(option for option in options if option not in (*made, *LOCALS, *common, *holders))
        known.append(where)
        made[word] = Fact(f"self.{word}", f"not self.{word}", where, "")
    return list(made.values())


def _spelled(plan: Plan, merged: Merged, uses: _Uses, facts: Sequence[Fact], reserved: frozenset[str]) -> Body:
    names = {name: name for name, _, _ in merged.inputs()}
    kept = [name for name, _, _ in merged.inputs() if name in uses.state]
    unpacks = []
    if kept:
        where = next(where for name, _, where in merged.inputs() if name in uses.state)
        unpacks.append((frozenset(kept), f"{', '.join(kept)}{',' if len(kept) == 1 else ''} = cache", where))
    asked = frozenset(fact.reads for fact in facts if fact.reads)
    body = Body(
        merged,
        names,
        Speller(plan),
        facts=facts,
        reserved=reserved,
        alive=asked,
        unpacks=unpacks,
        constants=constants_of(plan),
    )
    body.run()
    _ = body.lines  # rendering records the facts that distinguish the variants
    return body


def _forward(merged: Merged, uses: _Uses, body: Body, flags: Sequence[str], keeps: bool) -> Function:
    inputs = _inputs(merged, uses)
    arguments = ["self", *(argument(name, where == merged.every) for name, _, where in inputs)]
    arguments += ["cache=None"] if keeps else []
    arguments += [f"{flag}=False" for flag in flags]
    variant = merged.variants[0]
    result = variant.types[dict(variant.outputs)[merged.outputs[0][0]]]
    doc = types_doc(((name, type) for name, type, _ in inputs), [result])
    kept = [(name, type) for name, type, _ in merged.inputs() if name in uses.state]
    if kept:
        doc += f" The cache is of {types_doc(kept, [])[: -len(' -> .')]}, updated in place."
    return Function("forward", doc, tuple(arguments), body.lines, body.returned(), "Tensor")


def _inputs(merged: Merged, uses: _Uses) -> Sequence[tuple[str, TensorType, Where]]:
    """Returns the inputs other than state: those of all variants, then of some blocks, then of some programs."""
    inputs = [entry for entry in merged.inputs() if entry[0] not in uses.state]
    layers = [uses.layers[graph.name] for graph in merged.variants]

    def rank(where: Where) -> int:
        having = frozenset().union(*(layers[variant] for variant in where))
        return 0 if where == merged.every else 1 if having != uses.every else 2

    return sorted(inputs, key=lambda entry: rank(entry[2]))


def argument(name: str, required: bool) -> str:
    """Returns a tensor argument of a method whose docstring states the types."""
    return name if required else f"{name}=None"


def _begin(plan: Plan, merged: Merged, reserved: frozenset[str]) -> tuple[Function, tuple[str, ...]]:
    """The method that makes the state of a block, and the flags that it asks for."""
    names = {name: name for name, _, _ in merged.inputs()}
    rounded = frozenset(i for i, graph in enumerate(merged.variants) if graph.name.endswith(SUFFIX))
    facts = [Fact("rounded", "not rounded", rounded, "rounded")] if rounded and rounded != merged.every else []
    body = Body(
        merged,
        names,
        Speller(plan),
        facts=facts,
        reserved=reserved,
        alive=frozenset(fact.reads for fact in facts),
        constants=constants_of(plan),
    )
    body.run()
    lines = body.lines
    flags = tuple(fact.text for fact in facts if fact in body.asked)
    graph = merged.variants[0]
    doc = types_doc(graph.inputs, [graph.types[ref] for _, ref in graph.outputs])
    arguments = ("self", *(f"{name}: Tensor" for name, _ in graph.inputs), *(f"{flag}: bool = False" for flag in flags))
    annotation = f"tuple[{', '.join('Tensor' for _ in graph.outputs)}]"
    texts = body.returned()
    returns = texts if len(graph.outputs) > 1 else f"({texts},)"
    return Function("begin", doc, arguments, lines, returns, annotation), flags


def _init(
    uses: _Uses, functions: Sequence[Graph], facts: Sequence[Fact], tables: Tables, table: str
) -> tuple[str, ...]:
    """Returns the lines of a block's constructor: parameters, scalars, and attributes from tables."""
    params: dict[str, TensorType] = {}
    layers: dict[str, frozenset[int]] = {}
    for graph in functions:
        for path, type in graph.params:
            params.setdefault(path, type)
            layers[path] = layers.get(path, frozenset()) | uses.layers[graph.name]
    order = merged_order([[path for path, _ in graph.params] for graph in functions])
    entries: list[Named] = [(path, params[path]) for path in order]
    where = {}
    for path, having in layers.items():
        if having != uses.every:
            word = path.rpartition(".")[2] if path.count(".") else path
            where[path] = f"layer in {tables.of(uses.place, having, word)}"
    lines = [*parameter_lines(entries, where, table=table)]
    for scalar, values in uses.scalars.items():
        lines.append(f"self.{scalar} = {_number(uses, scalar, values, tables)}")
    for fact in facts:
        name = fact.text.removeprefix("self.")
        holds = frozenset(
            layer
            for i, graph in enumerate(graph for graph in functions if not _method(graph).startswith("begin"))
            if i in fact.where
            for layer in uses.layers[graph.name]
        )
        lines.append(f"{fact.text} = layer in {tables.of(uses.place, holds, name)}")
    return tuple(lines)


def _number(uses: _Uses, scalar: str, values: Mapping[int, float], tables: Tables) -> str:
    """Returns a scalar of each block: the spec's formula if it can be written in Python, else an entry of a table."""
    if formula := python_formula(uses.formulas.get(scalar, ""), layers=len(values)):
        return formula
    numbers = ", ".join(repr(values[layer]) for layer in sorted(values))
    table = tables.add(
        uses.place, f"{scalar.upper()}S", f"({numbers}{',' if len(values) == 1 else ''})", "of each block"
    )
    return f"{table}[layer]"
