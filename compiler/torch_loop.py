"""Spells a run of calls, one a block, as a loop over the module list."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specc.compiler.ir import Node
from specc.compiler.ops.region import Call
from specc.compiler.plan import Plan
from specc.compiler.torch_code import LINE, Body


@dataclass(frozen=True, slots=True)
class Some:
    """An argument of some calls only: its text, which calls pass it, and the text of the table that tells these."""

    variable: str
    value: str
    where: str
    text: str


def inputs_of(plan: Plan, call: Node) -> Mapping[str, str]:
    """What a call passes, by the name that its callee has for it, in order."""
    assert isinstance(call.op, Call)
    names = (name for name, _ in plan.programs.function(call.op.callee).inputs)
    return dict(zip(names, call.inputs, strict=True))


def field_of(call: Node) -> str:
    """The module list that a call's callee is in."""
    assert isinstance(call.op, Call)
    return call.op.at.partition(".")[0]


def index_of(call: Node) -> int:
    """Where in its module list a call's callee is."""
    assert isinstance(call.op, Call)
    return int(call.op.at.split(".")[1])


def loop_lines(plan: Plan, body: Body, calls: Sequence[Node], tables: list[str], cache: str) -> None:
    """Adds the loop to `body`, and to `tables` which blocks take what only some of them do; `cache` is the text of the
    blocks' state.

    Each block's first input is the output before it. The others are the same in every call, or a block's own state
    (inputs of the program); or, only in some calls and behind these, the same in each of them, or the output of an
    earlier block. Where blocks run more than once, calls of another list between them join an earlier output to the
    first input.
    """
    kept = body.graph.name not in plan.programs.whole
    first = body.text(calls[0].inputs[0])
    body.pending.pop(calls[0].inputs[0], None)
    if first != "x":
        body.lines.append(f"x = {first}")
    field = field_of(calls[0])
    blocks = [call for call in calls if field_of(call) == field]
    runs = [index_of(call) for call in blocks]
    looped = len(set(runs)) < len(runs)
    some, args = _arguments(plan, body, blocks, "layer" if looped else "i")
    joins, lines = _joins(calls, blocks)
    tables += [text for text in (_order(runs), joins) if looped and text and text not in tables]
    tables += [one.text for one in some if one.text not in tables]
    assert isinstance(calls[0].op, Call)
    method = calls[0].op.callee.partition(".")[2]
    run = f"self.{field}[layer]" if looped else "block"
    run = run if method == "forward" else f"{run}.{method}"
    steps = _steps(run, args, some)
    reads = bool(joins) or any(one.variable == "read" for one in some)
    over, item = ("ORDER", "layer") if looped else (f"self.{field}", "block")
    if kept:
        over, item = f"zip({over}, {cache}, strict=True)", f"{item}, kept"
    if reads or (some and not looped):
        over, item = f"enumerate({over})", f"i, ({item})" if kept else f"i, {item}"
    body.lines += [
        *(["outputs: list[Tensor] = []"] if reads else []),
        f"for {item} in {over}:",
        *(f"    {line}" for line in (*lines, *steps, *(["outputs.append(x)"] if reads else []))),
    ]
    body.texts[calls[-1].name] = "x"
    body.held["x"] = calls[-1].name


def _order(runs: Sequence[int]) -> str:
    return f"# the blocks in the order in which they run, some more than once\nORDER = {tuple(runs)!r}"


def _joins(calls: Sequence[Node], blocks: Sequence[Node]) -> tuple[str, list[str]]:
    """The table of the calls between blocks, by the number of the run that they precede, and the lines that make
    them."""
    numbers = {call.name: i for i, call in enumerate(blocks)}
    found: dict[int, tuple[int, int]] = {}
    for call, following in pairwise(calls):
        if call.name not in numbers:
            found[numbers[following.name]] = (index_of(call), numbers[call.inputs[1]])
            field = field_of(call)
    if not found:
        return "", []
    text = f"# run -> the skip before it, and the earlier run whose output it joins\n{field.upper()} = {found!r}"
    lines = [
        f"if i in {field.upper()}:",
        f"    skip, earlier = {field.upper()}[i]",
        f"    x = self.{field}[skip](x, outputs[earlier])",
    ]
    return text, lines


def _arguments(plan: Plan, body: Body, calls: Sequence[Node], index: str) -> tuple[list[Some], list[str]]:
    """What only some calls pass, told by the block's `index`; and what all do, behind `x`."""
    given = [inputs_of(plan, call) for call in calls]
    state = {name for name, _ in body.graph.inputs} - body.names.keys()
    positions = {call.name: i for i, call in enumerate(calls)}
    args: list[str] = []
    some: list[Some] = []
    for name in _merged([list(one) for one in given])[1:]:
        found = {i: one[name] for i, one in enumerate(given) if name in one}
        refs = set(found.values())
        if refs <= state:
            args += ["*kept"] if "*kept" not in args else []
        elif refs <= positions.keys():
            table = f"{name.upper()}S"
            earlier = {i: positions[ref] for i, ref in found.items()}
            text = f"# block -> the earlier block whose output it also reads\n{table} = {earlier!r}"
            some.append(Some("read", f"outputs[{table}[i]]", f"i in {table}", text))
        else:
            assert len(refs) == 1, "calls may differ only in their state and their skip"
            value = body.text(refs.pop())
            if len(found) == len(calls):
                args.append(value)
            else:
                table = name.upper()
                layers = ", ".join(map(str, sorted({index_of(calls[i]) for i in found})))
                text = f"# blocks that also read {name}\n{table} = {{{layers}}}"
                some.append(Some(f"more{len(some) + 1 if some else ''}", value, f"{index} in {table}", text))
    if "*kept" not in args and body.graph.name not in plan.programs.whole:
        args.append("*kept")
    return some, args


def _merged(orders: Sequence[Sequence[str]]) -> list[str]:
    """One order of all names that each of `orders` is a part of."""
    merged: list[str] = []
    for order in orders:
        at = 0
        for name in order:
            if name not in merged:
                merged.insert(at, name)
            at = merged.index(name) + 1
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
