"""Renders rolled loops over blocks, and scans as loops over time."""

import re
from collections.abc import Iterator, Mapping, Sequence

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ops.region import STEP, TRAIN_STEP, Scan
from specc.compiler.passes.merge import NONE, Slot
from specc.compiler.passes.roll import Begin, Loop
from specc.compiler.render.blocks import BlockClass, Tables
from specc.compiler.render.body import Body
from specc.compiler.render.function import Function

CACHE = "cache"  # a list with one tuple per block
STATE = "state"  # a dict with one tuple per path in the spec


def define_tables(loops: Sequence[Loop], tables: Tables) -> None:
    """Adds the tables that loops over blocks read.

    They are the order of the blocks, the blocks that receive an optional input, and the earlier outputs that are
    joined.
    """
    for loop in loops:
        for name, layers in loop.some:
            table = tables.add(loop.at, name.upper(), _set(layers), f"blocks that are given {name}", layers)
            tables.arguments[loop.at, name] = table
        for name, pairs in loop.earlier:
            comment = "block -> the earlier block whose output it also reads"
            table = tables.add(loop.at, f"{name.upper()}S", repr(dict(pairs)), comment, [run for run, _ in pairs])
            tables.arguments[loop.at, name] = table
        if loop.repeats:
            tables.add(loop.at, "ORDER", repr(loop.runs), "the blocks as they run, some more than once")
        if loop.joins:
            once = not loop.repeats and any(other.repeats for other in loops)
            comment = "run -> the skip before it, and the earlier run whose output it joins"
            tables.add(loop.at, f"{loop.joined.upper()}{'_ONCE' * once}", repr(dict(loop.joins)), comment)
        for method, having in _flagged(loop).items():
            tables.add(loop.joined, method.upper(), _set(having), f"blocks that read {method}, which a skip joins")


def _set(layers: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, sorted(layers))) + "}"


def _flagged(loop: Loop) -> Mapping[str, Sequence[int]]:
    """Returns the blocks before which a join calls a method other than `forward`, by method."""
    found: dict[str, list[int]] = {}
    for layer, method in loop.join_methods:
        found.setdefault(method, []).append(layer)
    return found


def _table(tables: Tables, text: str) -> str:
    """Returns the name of the table with this text."""
    return next(name for name, value in tables.values.items() if value == text)


def loop_lines(
    body: Body,
    slot: Slot,
    block: BlockClass,
    tables: Tables,
    keeper: str,
    first: int,
    flags: Mapping[str, frozenset[int]],
) -> None:
    """Adds a loop over blocks to a function body.

    Args:
        body: the body of the function.
        slot: the loop.
        block: the class of its blocks.
        tables: the tables of the module.
        keeper: the name of the state argument in the function.
        first: the index of the first block's state in a cache.
        flags: for each flag of the blocks, the variants in which it is true.
    """
    loop = slot.node.op
    assert isinstance(loop, Loop)
    start, *given = slot.inputs
    for operand in given:
        if operand[0][0] in body.pending:  # every block reads it, so it is computed once, before the loop
            body.write(operand[0][0])
    text = body.text(start)
    body.pending.pop(start[0][0], None)
    name = body.name_for(slot, 0)
    if text != name:
        body.release(name)
        body.line(f"{name} = {text}")
    ahead, over, index = _order(body, slot, tables)
    joins = _joins(body, slot, tables, name, index, ahead)
    arguments, inner = _arguments(body, slot, block, tables, keeper, first, flags, index)
    for line in ahead:
        body.line(line)
    reads = bool(loop.earlier or joins)
    item = "layer" if index == "layer" else "block"
    module = f"self.{loop.at}[layer]" if index == "layer" else "block"
    if re.search(r"\bi\b", " ".join((*joins, *inner, *arguments))):
        over, item = f"enumerate({over})", f"i, {item}"
    if reads:
        body.line("outputs: list[Tensor] = []")
    body.line(f"for {item} in {over}:")
    for line in (*joins, *inner, f"{name} = {module}({', '.join((name, *arguments))})"):
        body.line(f"    {line}")
    if reads:
        body.line(f"    outputs.append({name})")
    body.hold(name, slot.name)


def _by_variant(body: Body, slot: Slot, texts: Mapping[int, str]) -> str:
    """Returns one expression for texts that differ between variants."""
    first, *others = dict.fromkeys(texts[variant] for variant in sorted(slot.nodes))
    for other in others:
        where = frozenset(variant for variant, text in texts.items() if text == other)
        first = f"{other} if {body.condition(where)} else {first}"
    return first


def _order(body: Body, slot: Slot, tables: Tables) -> tuple[list[str], str, str]:
    """Returns the lines before the loop, the expression that it iterates over, and the name of its index."""
    loops = {variant: node.op for variant, node in slot.nodes.items() if isinstance(node.op, Loop)}
    if not any(loop.repeats for loop in loops.values()):
        return [], f"self.{loops[slot.first].at}", "i"
    texts = {
        variant: _table(tables, repr(loop.runs)) if loop.repeats else f"range({len(loop.runs)})"
        for variant, loop in loops.items()
    }
    order = _by_variant(body, slot, texts)
    return ([f"order = {order}"], "order", "layer") if " if " in order else ([], order, "layer")


def _keeps(slot: Slot) -> bool:
    return any(isinstance(node.op, Loop) and node.op.keeps for node in slot.nodes.values())


def _arguments(
    body: Body,
    slot: Slot,
    block: BlockClass,
    tables: Tables,
    keeper: str,
    first: int,
    flags: Mapping[str, frozenset[int]],
    index: str,
) -> tuple[list[str], list[str]]:
    """Returns the arguments of a block's call after the residual stream, and the lines before the call."""
    loop = slot.node.op
    assert isinstance(loop, Loop)
    some = dict(loop.some)
    values: dict[str, str] = {}
    inner: list[str] = []
    for name, operand in zip(loop.names, slot.inputs[1:], strict=True):
        value = body.text(operand)
        if name in some:
            table = tables.arguments[loop.at, name]
            value = f"{value} if {index} in {table} else None"
        if value != NONE:
            values[name] = value
    for name, _ in loop.earlier:
        table = tables.arguments[loop.at, name]
        values[name] = f"outputs[{table}[i]] if i in {table} else None"
    conditional = {*some, *dict(loop.earlier)}
    arguments = []
    taken = set(body.held)
    for name, value in values.items():
        if name in conditional:
            local = next(n for n in (name, name.rpartition("_")[2], f"own_{name}", f"some_{name}") if n not in taken)
            taken.add(local)
            inner.append(f"{local} = {value}")
            value = local
        arguments.append((name, f"{name}={value}" if name in block.optional else value))
    ordered = [text for _, text in sorted(arguments, key=lambda entry: block.order.index(entry[0]))]
    if block.keeps and (keeping := frozenset(v for v, node in slot.nodes.items() if _node_keeps(node))):
        at = f"i + {first}" if first else "i"
        kept = f"{CACHE}[{at}]" if keeper == CACHE else f'{STATE}[f"{loop.at}.{{i}}"]'
        kept = kept if _keeps(slot) else "()"
        if keeping != slot.where:
            body.condition(keeping)  # records the use of the state
            kept = f"{keeper} and {kept}"
        ordered.append(f"cache={kept}")
    ordered += _flag_arguments(body, slot, block.flags, flags)
    return ordered, inner


def _node_keeps(node: Node) -> bool:
    return isinstance(node.op, Loop) and (node.op.keeps or node.op.extends)


def _joins(body: Body, slot: Slot, tables: Tables, name: str, index: str, ahead: list[str]) -> list[str]:
    """Returns the lines that join an earlier output to the residual stream before a block.

    Lines that belong before the loop are appended to `ahead`.
    """
    loops = {variant: node.op for variant, node in slot.nodes.items() if isinstance(node.op, Loop)}
    loop = loops[slot.first]
    if not any(one.joins for one in loops.values()):
        return []
    skips = _by_variant(
        body, slot, {v: _table(tables, repr(dict(one.joins))) if one.joins else "{}" for v, one in loops.items()}
    )
    if " if " in skips:
        ahead.append(f"skips = {skips}")
        skips = "skips"
    flags = "".join(
        f", {method}={index} in {_table(tables, _set(layers))}" for method, layers in _flagged(loop).items()
    )
    return [
        f"if i in {skips}:",
        f"    skip, earlier = {skips}[i]",
        f"    {name} = self.{loop.joined}[skip]({name}, outputs[earlier]{flags})",
    ]


def _flag_arguments(body: Body, slot: Slot, names: Sequence[str], flags: Mapping[str, frozenset[int]]) -> Iterator[str]:
    """The flags that blocks are given."""
    for flag in names:
        where = flags.get(flag, frozenset()) & slot.where
        if where == slot.where:
            yield f"{flag}=True"
        elif where:
            body.condition(where)  # which asks for the flag
            yield f"{flag}={flag}"


def begin_lines(body: Body, slot: Slot, block: BlockClass, flags: Mapping[str, frozenset[int]]) -> None:
    """Adds a dict with what every block begins with. All blocks are given the same."""
    begin = slot.node.op
    assert isinstance(begin, Begin)
    for operand in slot.inputs:
        if operand[0][0] in body.pending:  # every block reads it, so it is computed once, before the loop
            body.write(operand[0][0])
    texts = [body.text(operand) for operand in slot.inputs]
    given = ", ".join((*texts, *_flag_arguments(body, slot, block.begin_flags, flags)))
    name = begin.at.rpartition(".")[2]
    while name in body.reserved or name in body.held:  # the list of blocks may have the name of a value or a function
        name = f"{name}_begun"
    key = f'f"{begin.at}.{{i}}"'
    body.line(f"{name} = {{{key}: block.begin({given}) for i, block in enumerate(self.{begin.at})}}")
    body.hold(name, slot.name)


def scans(graphs: Sequence[Graph]) -> Iterator[tuple[Node, Scan]]:
    """Yields the loops over time of some programs."""
    return ((node, node.op) for graph in graphs for node in graph.nodes if isinstance(node.op, Scan))


def time_loop(step: Graph, scan: Node, drops: bool) -> Function:
    """Returns the method that runs `step` at all positions.

    If `drops` is true, the method has a flag `training`, which selects the training step with dropout.
    """
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
