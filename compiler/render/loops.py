"""Spells runs of calls, one a block, as loops over a module list, and a scan as a loop over time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ops.region import STEP, TRAIN_STEP, Call, Scan
from specc.compiler.plan.plan import Plan
from specc.compiler.render.body import LINE, Body
from specc.compiler.render.function import Function


@dataclass(frozen=True, slots=True)
class Some:
    """An argument of some calls only: its text, which calls pass it, and the text of the table that tells these."""

    variable: str
    value: str
    where: str
    text: str


@dataclass(frozen=True, slots=True)
class Piece:
    """One node, or the calls of all blocks of a module list, `field`, and those of skips between them. They are
    `chained` where each reads the one before it."""

    nodes: tuple[Node, ...]
    field: str = ""

    @property
    def calls(self) -> bool:
        return bool(self.field)

    @property
    def chained(self) -> bool:
        return not method_of(self.nodes[0]).startswith("begin")


def callee_of(node: Node) -> str:
    assert isinstance(node.op, Call | Scan)
    return node.op.callee


def method_of(node: Node) -> str:
    """The method of a block that a call runs."""
    return callee_of(node).partition(".")[2]


def pieces(nodes: Sequence[Node]) -> Iterator[Piece]:
    """The nodes in order, the calls of equal fields, or that read one another's value, together."""
    run: list[Node] = []
    for node in (*nodes, None):
        field = field_of(node) if node is not None else ""
        follows = node is not None and run and (field == field_of(run[0]) or node.inputs[:1] == (run[-1].name,))
        if run and not (field and follows):
            yield Piece(tuple(run), field_of(run[0]))
            run = []
        if node is not None and field:
            run.append(node)
        elif node is not None:
            yield Piece((node,))


def field_of(node: Node) -> str:
    """The module list that a call's block is in; empty for what is no such call."""
    if not isinstance(node.op, Call):
        return ""
    field, _, number = node.op.at.rpartition(".")
    return field if number.isdigit() else ""


def index_of(call: Node) -> int:
    """Where in its module list a call's block is."""
    assert isinstance(call.op, Call)
    return int(call.op.at.rpartition(".")[2])


def inputs_of(plan: Plan, call: Node) -> Mapping[str, str]:
    """What a call passes, by the name that its callee has for it, in order."""
    names = (name for name, _ in plan.programs.function(callee_of(call)).inputs)
    return dict(zip(names, call.inputs, strict=True))


def stacks(nodes: Sequence[Node]) -> Iterator[Sequence[Node]]:
    """The calls of each module list."""
    for piece in pieces(nodes):
        for field in dict.fromkeys(field_of(node) for node in piece.nodes) if piece.calls else ():
            yield tuple(node for node in piece.nodes if field_of(node) == field)


def read_beside(graph: Graph) -> frozenset[str]:
    """The values from before a loop over blocks that the loop, but as its start, or something after it reads."""
    found: set[str] = set()
    done = 0
    for piece in pieces(graph.nodes):
        before = {ref for node in graph.nodes[:done] for ref in node.outputs}
        done += len(piece.nodes)
        if piece.calls:
            start = piece.nodes[0].inputs[:1] if piece.chained else ()
            read = [ref for node in graph.nodes[done - len(piece.nodes) :] for ref in node.inputs]
            for ref in start:
                read.remove(ref)
            read += [ref for _, ref in graph.outputs]
            found |= before.intersection(read)
    return frozenset(found)


def scans(graphs: Sequence[Graph]) -> Iterator[tuple[Node, Scan]]:
    """The loops over time of some programs."""
    return ((node, node.op) for graph in graphs for node in graph.nodes if isinstance(node.op, Scan))


def time_loop(step: Graph, scan: Node, drops: bool) -> Function:
    """The method that runs `step` over all positions; where training `drops`, one that is told which of the two steps
    to run."""
    assert isinstance(scan.op, Scan)
    names = [name for name, _ in step.inputs]
    last = scan.op.carried + scan.op.stepped
    carried, stepped = names[: scan.op.carried], names[scan.op.carried : last]
    each = [f"{name}_t" for name in stepped]
    over = [f"{name}.split(1, dim=1)" for name in stepped]
    items = f"for {', '.join(each)} in "
    items += f"zip({', '.join(over)}, strict=True):" if len(over) > 1 else f"{over[0]}:"
    run = STEP if drops else f"self.{STEP}"
    values = [label for label, _ in step.outputs[scan.op.carried :]]
    lists = {label: "outputs" if label == "y" else f"{label}s" for label in values}
    lines = (
        *([f"{STEP} = self.{TRAIN_STEP} if training else self.{STEP}"] if drops else []),
        *(f"{name}: list[Tensor] = []" for name in lists.values()),
        items,
        f"    {', '.join((*carried, *values))} = {run}({', '.join((*carried, *each, *names[last:]))})",
        *(f"    {name}.append({label})" for label, name in lists.items()),
    )
    which = f"`{STEP}`, or `{TRAIN_STEP}` in `training`," if drops else f"`{STEP}`"
    doc = f"{which} at each position of {' and '.join(stepped)}, one after another: the last {', '.join(carried)}, and "
    doc += "".join(f"all {label} {type}, " for label, type in zip(values, scan.types[scan.op.carried :], strict=True))
    doc = f"{doc[:-2]}."
    arguments = ("self", *(f"{name}: Tensor" for name in names), *(["training: bool = False"] if drops else []))
    returns = ", ".join((*carried, *(f"torch.cat({name}, dim=1)" for name in lists.values())))
    annotation = f"tuple[{', '.join('Tensor' for _ in scan.types)}]"
    compiled = "@torch.compiler.disable(recursive=False)  # a loop: only its step is compiled, once"
    return Function("forward", doc, arguments, lines, returns, annotation, compiled)


def begin_lines(body: Body, calls: Sequence[Node]) -> str:
    """Adds to `body` a dict with what every block begins with; returns its name. All blocks are given the same."""
    op = calls[0].op
    assert isinstance(op, Call) and len({call.inputs for call in calls}) == 1
    field = op.at.rpartition(".")[0]
    name = field.rpartition(".")[2]
    while name in body.reserved or name in body.held:  # blocks may be called as a value or a function is
        name = f"{name}_begun"
    body.reserved |= {name}
    given = ", ".join(body.text(ref) for ref in calls[0].inputs)
    for ref in calls[0].inputs:
        if ref in body.pending:  # every block reads it, so it is computed once, before
            body.write(ref)
            given = ", ".join(body.text(ref) for ref in calls[0].inputs)
    begun = f"block.{method_of(calls[0])}({given})"
    begun = begun if len(calls[0].types) > 1 else f"({begun},)"
    body.lines.append(f'{name} = {{f"{field}.{{i}}": {begun} for i, block in enumerate(self.{field})}}')
    return name


def loop_lines(plan: Plan, body: Body, calls: Sequence[Node], tables: list[str], keeper: str) -> None:
    """Adds the loop to `body`, and to `tables` which blocks take what only some of them do; `keeper` is the text of the
    blocks' state: a list of it by run, or a dict by place.

    Each block's first input is the output before it. The others are the same in every call, or a block's own state
    (inputs of the program); or, only in some calls and behind these, the same in each of them, or the output of an
    earlier block. Where blocks run more than once, calls of another list between them join an earlier output to the
    first input.
    """
    field = field_of(calls[0])
    blocks = [call for call in calls if field_of(call) == field]
    runs = [index_of(call) for call in blocks]
    looped = len(set(runs)) < len(runs)
    listed = keeper.startswith("cache")
    some, args = _arguments(plan, body, blocks, "*kept" if listed else f'*{keeper}[f"{field}.{{i}}"]')
    placed = not listed and any(f"{keeper}[" in arg for arg in args)
    if listed and "*kept" not in args:
        args.append("*kept")
    first = body.text(calls[0].inputs[0])
    body.pending.pop(calls[0].inputs[0], None)
    if first != "x":
        body.release("x")
        body.lines.append(f"x = {first}")
    joins, lines = _joins(body.graph, calls, blocks, tables)
    tables += [text for text in ([_order(runs)] if looped else []) + joins if text not in tables]
    tables += [one.text for one in some if one.text not in tables]
    method = method_of(calls[0])
    run = f"self.{field}[layer]" if looped else "block"
    run = run if method == "forward" else f"{run}.{method}"
    steps = _steps(run, args, some)
    reads = bool(joins) or any(one.variable == "read" for one in some)
    over, item = ("ORDER", "layer") if looped else (f"self.{field}", "block")
    if listed:
        over, item = f"zip({over}, {keeper}, strict=True)", f"{item}, kept"
    if reads or placed or (some and not looped):
        over, item = f"enumerate({over})", f"i, ({item})" if listed else f"i, {item}"
    new = "outputs: list[Tensor] = []"
    body.lines += [
        *(["outputs = []" if new in body.lines else new] if reads else []),
        f"for {item} in {over}:",
        *(f"    {line}" for line in (*lines, *steps, *(["outputs.append(x)"] if reads else []))),
    ]
    body.texts[calls[-1].name] = "x"
    body.held["x"] = calls[-1].name


def _order(runs: Sequence[int]) -> str:
    return f"# the blocks in the order in which they run, some more than once\nORDER = {tuple(runs)!r}"


def _joins(
    graph: Graph, calls: Sequence[Node], blocks: Sequence[Node], tables: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Tables of the calls between blocks, by the number of the run that they precede, and the lines that make them.
    Where `tables` has that of a program that runs blocks more often, it is named after running each once."""
    numbers = {call.name: i for i, call in enumerate(blocks)}
    joined = [(call, following) for call, following in pairwise(calls) if call.name not in numbers]
    if not joined:
        return [], []
    field = field_of(joined[0][0])
    found = {numbers[after.name]: (index_of(call), numbers[call.inputs[1]]) for call, after in joined}
    about, name = "# run -> the skip before it, and the earlier run whose output it joins", field.upper()
    text = f"{about}\n{name} = {found!r}"
    if any(other.startswith(f"{about}\n{name} = ") and other != text for other in tables):
        name = f"{name}_ONCE"
    made = [f"{about}\n{name} = {found!r}"]
    steps = [f"x = self.{field}[skip](x, outputs[earlier])"]
    if others := [call for call, _ in joined if not callee_of(call).endswith(".forward")]:
        method = method_of(others[0])
        width = graph.types[others[0].inputs[0]].width
        wide = {index_of(block) for block in blocks if graph.types[block.inputs[0]].width == width}
        index = "layer" if len({*map(index_of, blocks)}) < len(blocks) else "i"
        made.append(f"# blocks that read {method}, of which a skip joins the first\n{method.upper()} = {wide!r}")
        join = f"self.{field}[skip].{method} if {index} in {method.upper()} else self.{field}[skip]"
        steps = [f"join = {join}", "x = join(x, outputs[earlier])"]
    return made, [f"if i in {name}:", f"    skip, earlier = {name}[i]", *(f"    {step}" for step in steps)]


def _arguments(plan: Plan, body: Body, calls: Sequence[Node], kept: str) -> tuple[list[Some], list[str]]:
    """What only some calls pass; and what all do, behind `x`, with `kept` for a block's state."""
    runs = [index_of(call) for call in calls]
    index = "layer" if len(set(runs)) < len(runs) else "i"
    field = field_of(calls[0])
    prefix = "" if field == "blocks" else f"{field.upper().replace('.', '_')}_"
    given = [inputs_of(plan, call) for call in calls]
    state = {name for name, _ in body.graph.inputs} - body.names.keys()
    positions = {call.name: i for i, call in enumerate(calls)}
    args: list[str] = []
    some: list[Some] = []
    for name in _merged([list(one) for one in given])[1:]:
        found = {i: one[name] for i, one in enumerate(given) if name in one}
        refs = set(found.values())
        if refs <= state:
            args += [kept] if kept not in args else []
        elif refs <= positions.keys():
            table = f"{prefix}{name.upper()}S"
            earlier = {i: positions[ref] for i, ref in found.items()}
            text = f"# block -> the earlier block whose output it also reads\n{table} = {earlier!r}"
            some.append(Some("read", f"outputs[{table}[i]]", f"i in {table}", text))
        else:
            assert len(refs) == 1, "calls may differ only in their state and their skip"
            ref = refs.pop()
            if ref in body.pending:  # every block reads it, so it is computed once, before
                body.write(ref)
            value = body.text(ref)
            if len(found) == len(calls):
                args.append(value)
            else:
                table = f"{prefix}{name.upper()}"
                layers = ", ".join(map(str, sorted({index_of(calls[i]) for i in found})))
                text = f"# blocks that also read {name}\n{table} = {{{layers}}}"
                some.append(Some(f"more{len(some) + 1 if some else ''}", value, f"{index} in {table}", text))
    return some, args


def _merged(orders: Sequence[Sequence[str]]) -> list[str]:
    """One order of all names that each of `orders` is a part of."""
    merged: list[str] = []
    while rest := [left for order in orders if (left := [name for name in order if name not in merged])]:
        merged.append(next(left[0] for left in rest if all(left[0] not in other[1:] for other in rest)))
    return merged


def _steps(run: str, args: Sequence[str], some: Sequence[Some]) -> list[str]:
    """The lines that run a block."""
    plain = f"{run}({', '.join(('x', *args))})"
    if not some:
        return [f"x = {plain}"]
    step = f"x = {run}({', '.join(('x', *args, some[0].value))}) if {some[0].where} else {plain}"
    if len(some) == 1 and len(step) + 4 <= LINE:
        return [step]
    given = ("x", *args, *(f"*{one.variable}" for one in some))
    steps = [f"{one.variable} = ({one.value},) if {one.where} else ()" for one in some]
    return [*steps, f"x = {run}({', '.join(given)})"]
