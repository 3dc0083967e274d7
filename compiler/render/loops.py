"""Renders two kinds of loops: rolled loops over blocks, and scans, which are loops over time."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ops.region import STEP, TRAIN_STEP, Scan
from specc.compiler.passes.merge import NONE, Operand, Slot, Where, free
from specc.compiler.passes.roll import Begin, Layers, Loop
from specc.compiler.render.blocks import BlockClass, Tables, set_text
from specc.compiler.render.body import Body
from specc.compiler.render.function import Function, tensors

CACHE = "cache"  # the type of a list with one tuple per block
STATE = "state"  # the type of a dict with one tuple per path in the spec


def define_tables(loops: Sequence[Loop], tables: Tables) -> None:
    """Adds the tables of loops over blocks.

    The tables hold the order of the blocks, the blocks that receive an optional input, and the earlier blocks whose
    outputs later blocks or join modules read. Earlier blocks are listed by their positions in the order.
    """
    given: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for loop in loops:
        for name, values in _values(loop).items():
            for key, layers in values:
                if layers is not None and key == name and name not in given.setdefault((loop.at, tuple(layers)), []):
                    given[loop.at, tuple(layers)].append(name)
    for (at, layers), names in given.items():
        comment = f"blocks given {', '.join(names)}"
        table = tables.add(at, names[0].upper(), set_text(layers), comment, layers)
        tables.arguments |= {(at, name): table for name in names}
    for loop in loops:
        for name, values in _values(loop).items():
            for key, layers in values:
                if layers is not None and key != name:
                    word = key.partition(" ")[2].partition(":")[0].replace(".", "_")
                    tables.arguments[loop.at, key] = tables.of(loop.at, frozenset(layers), word)
        for name, label, pairs in loop.earlier:
            comment = f"block -> the earlier block whose {'values' if label else 'output'} it also reads"
            tables.add(loop.at, f"{name.upper()}S", repr(dict(pairs)), comment, [run for run, _ in pairs])
        if loop.repeats:
            tables.add(loop.at, "ORDER", repr(loop.runs), "the blocks as they run, some more than once")
        if loop.joins:
            once = not loop.repeats and any(other.repeats for other in loops)
            comment = "run -> the skip before it, and the earlier run whose output it joins"
            tables.add(loop.at, f"{loop.joined.upper()}{'_ONCE' * once}", repr(dict(loop.joins)), comment)
        for method, having in _flagged(loop).items():
            tables.add(loop.joined, method.upper(), set_text(having), f"blocks that read {method}, which a skip joins")


def _values(loop: Loop) -> Mapping[str, Sequence[tuple[str, Layers | None]]]:
    some = dict(loop.some)
    names: dict[str, list[str]] = {}
    for key in sorted(loop.names, key=lambda key: len(some.get(key, loop.runs))):
        names.setdefault(key.partition(" ")[0], []).append(key)
    values = {}
    for name in dict.fromkeys(key.partition(" ")[0] for key in loop.names):
        *first, last = names[name]
        whole = {layer for key in names[name] for layer in some.get(key, loop.runs)} >= set(loop.runs)
        values[name] = [*((key, some[key]) for key in first), (last, None if whole else some[last])]
    return values


def _flagged(loop: Loop) -> Mapping[str, Sequence[int]]:
    methods = dict.fromkeys(method for _, method in loop.join_methods)
    return {name: [layer for layer, method in loop.join_methods if method == name] for name in methods}


@dataclass
class LoopText:
    """The text of a loop over blocks in a function body.

    Attributes:
        body: the body of the function.
        slot: the loop.
        block: the class of the loop's blocks.
        tables: the tables of the module.
        keeper: the name of the state argument in the function.
        first: the index of the first block's state in a cache.
        flags: the variants in which each flag of the blocks is true.
    """

    body: Body
    slot: Slot
    block: BlockClass
    tables: Tables
    keeper: str
    first: int
    flags: Mapping[str, Where]

    def add(self) -> None:
        body, slot = self.body, self.slot
        self.loops = {variant: node.op for variant, node in slot.nodes.items() if isinstance(node.op, Loop)}
        loop = self.loop = self.loops[slot.first]
        start, *shared = slot.inputs
        # In other variants, another loop may read the same initial value
        _assign_pending(body, [*shared, start] if body.reads(start) > 1 else shared)
        text = body.text(start)
        body.pending.pop(start[0][0], None)
        name = body.name_for(slot, 0)
        if text != name:
            body.release(name)
            body.line(f"{name} = {text}")
        over, index = f"self.{loop.at}", "i"
        if any(loop.repeats for loop in self.loops.values()):
            ranges = {v: f"range({len(loop.runs)})" for v, loop in self.loops.items()}
            orders = {v: loop.runs for v, loop in self.loops.items() if loop.repeats}
            over, index = self._table("order", ranges, orders), "layer"
        joins = self._joins(name, index)
        inner, arguments = self._arguments(index)
        lists = self._lists(joins)
        item, module = ("layer", f"self.{loop.at}[layer]") if index == "layer" else ("block", "block")
        if re.search(r"\bi\b", " ".join((*joins, *inner, *arguments))):
            over, item = f"enumerate({over})", f"i, {item}"
        for known in lists.values():
            body.line(f"{known}: list[Tensor] = []")
        body.line(f"for {item} in {over}:")
        results = {"": name, **{label: label if label in lists else "_" for label in loop.returns}}
        for line in (*joins, *inner, f"{', '.join(results.values())} = {module}({', '.join((name, *arguments))})"):
            body.line(f"    {line}")
        for label, known in lists.items():
            body.line(f"    {known}.append({results[label]})")
        body.hold(name, slot.name)

    def _lists(self, joins: Sequence[str]) -> Mapping[str, str]:
        """Returns the names of the Python lists that collect outputs of the blocks, by the label of the output. An
        output has a list only if a later block reads it."""
        read = {label for _, label, _ in self.loop.earlier} | ({""} if joins else set())
        return {label: f"all_{label}" if label else "outputs" for label in sorted(read)}

    def _table(self, name: str, plain: Mapping[int, str], values: Mapping[int, object]) -> str:
        """Returns the expression of a table that may differ between variants. `plain` and `values` are the texts and
        values of the variants. If the values differ, adds a line that assigns the table to `name`, and returns
        `name`."""
        named = {variant: self.tables.named(repr(value)) for variant, value in values.items()}
        texts = {**plain, **named}
        text, *others = dict.fromkeys(texts[variant] for variant in sorted(self.slot.nodes))
        for other in others:
            where = frozenset(variant for variant, known in texts.items() if known == other)
            text = f"{other} if {self.body.condition(where)} else {text}"
        if not others:
            return text
        self.body.line(f"{name} = {text}")
        return name

    def _joins(self, name: str, index: str) -> Sequence[str]:
        joins = {variant: dict(loop.joins) for variant, loop in self.loops.items() if loop.joins}
        if not joins:
            return ()
        skips = self._table("skips", dict.fromkeys(self.loops, "{}"), joins)
        flags = "".join(
            f", {method}={index} in {self.tables.named(set_text(layers))}"
            for method, layers in _flagged(self.loop).items()
        )
        return (
            f"if i in {skips}:",
            f"    skip, earlier = {skips}[i]",
            f"    {name} = self.{self.loop.joined}[skip]({name}, outputs[earlier]{flags})",
        )

    def _arguments(self, index: str) -> tuple[Sequence[str], Sequence[str]]:
        """Returns the lines before the call of a block, and the arguments of the call after the residual stream."""
        body, loop, block = self.body, self.loop, self.block
        texts = {key: body.text(operand) for key, operand in zip(loop.names, self.slot.inputs[1:], strict=True)}
        values: dict[str, str] = {}
        some: set[str] = set()
        for name, parts in _values(loop).items():
            text = NONE
            for key, layers in reversed(parts):
                if layers is None:
                    text = texts[key]
                else:
                    text = f"{texts[key]} if {index} in {self.tables.arguments[loop.at, key]} else {text}"
                    some.add(name)
            if text != NONE:
                values[name] = text
        for name, label, pairs in loop.earlier:
            table, known = self.tables.named(repr(dict(pairs))), f"all_{label}" if label else "outputs"
            values[name] = f"{known}[{table}[i]] if i in {table} else None"
        inner: list[str] = []
        taken = set(body.held)
        conditional = {*some, *(name for name, _, _ in loop.earlier)}
        for name in [name for name in values if name in conditional]:
            local = free((name, name.rpartition("_")[2], f"own_{name}", f"some_{name}"), taken.__contains__)
            taken.add(local)
            inner.append(f"{local} = {values[name]}")
            values[name] = local
        ordered = [name for name in block.order if name in values]
        arguments = [f"{name}={values[name]}" if name in block.optional else values[name] for name in ordered]
        keeping = frozenset(variant for variant, loop in self.loops.items() if loop.stateful)
        if block.keeps and keeping:
            at = f"i + {self.first}" if self.first else "i"
            state = f"{CACHE}[{at}]" if self.keeper == CACHE else f'{STATE}[f"{loop.at}.{{i}}"]'
            state = state if any(loop.keeps for loop in self.loops.values()) else "()"
            if keeping != self.slot.where:
                body.condition(keeping)  # records that the function uses the state
                state = f"{self.keeper} and {state}"
            arguments.append(f"cache={state}")
        return inner, [*arguments, *_flag_arguments(body, self.slot, block.flags, self.flags)]


def _assign_pending(body: Body, operands: Sequence[Operand]) -> None:
    for operand in operands:
        if operand[0][0] in body.pending:
            body.write(operand[0][0])


def _flag_arguments(body: Body, slot: Slot, names: Sequence[str], flags: Mapping[str, Where]) -> Iterator[str]:
    for flag in names:
        where = flags.get(flag, frozenset()) & slot.where
        if where == slot.where:
            yield f"{flag}=True"
        elif where:
            yield f"{flag}={body.condition(where)}"  # or another flag that is true in the same programs


def begin_lines(body: Body, slot: Slot, block: BlockClass, flags: Mapping[str, Where]) -> None:
    """Adds the line that creates a dict with the initial state of every block.

    Args:
        body: The body, to which the line is added.
        slot: The node, whose inputs every block receives.
        block: The class of the blocks.
        flags: The variants in which each flag of the body is true.
    """
    begin = slot.node.op
    assert isinstance(begin, Begin)
    _assign_pending(body, slot.inputs)
    arguments = ", ".join((*map(body.text, slot.inputs), *_flag_arguments(body, slot, block.begin_flags, flags)))
    name = begin.at.rpartition(".")[2]
    while name in body.reserved or name in body.held:  # the list may have the name of a value or a function
        name = f"{name}_begun"
    key = f'f"{begin.at}.{{i}}"'
    body.line(f"{name} = {{{key}: block.begin({arguments}) for i, block in enumerate(self.{begin.at})}}")
    body.hold(name, slot.name)


def scans(graphs: Sequence[Graph]) -> Iterator[tuple[Node, Scan]]:
    return ((node, node.op) for graph in graphs for node in graph.nodes if isinstance(node.op, Scan))


def time_loop(step: Graph, scan: Node, drops: bool) -> Function:
    """Returns the method that runs `step` at each position of a sequence, in order.

    If `drops` is true, the method has a flag `training`, which selects the training step with dropout.
    """
    assert isinstance(scan.op, Scan)
    names = [name for name, _ in step.inputs]
    last = scan.op.carried + scan.op.stepped
    carried, stepped = names[: scan.op.carried], names[scan.op.carried : last]
    each = [f"{name}_t" for name in stepped]
    over = [f"{name}.split(1, dim=1)" for name in stepped]
    items = f"zip({', '.join(over)}, strict=True)" if len(over) > 1 else over[0]
    run = STEP if drops else f"self.{STEP}"
    values = [label for label, _ in step.outputs[scan.op.carried :]]
    lists = {label: "outputs" if label == "y" else f"{label}s" for label in values}
    lines = (
        *([f"{STEP} = self.{TRAIN_STEP} if training else self.{STEP}"] if drops else []),
        *(f"{name}: list[Tensor] = []" for name in lists.values()),
        f"for {', '.join(each)} in {items}:",
        f"    {', '.join((*carried, *values))} = {run}({', '.join((*carried, *each, *names[last:]))})",
        *(f"    {name}.append({label})" for label, name in lists.items()),
    )
    which = f"`{STEP}`, or `{TRAIN_STEP}` in `training`," if drops else f"`{STEP}`"
    types = zip(values, scan.types[scan.op.carried :], strict=True)
    doc = f"{which} at each position of {' and '.join(stepped)}, one after another: the last {', '.join(carried)}, and "
    doc += ", ".join(f"all {label} {type}" for label, type in types) + "."
    arguments = ("self", *(f"{name}: Tensor" for name in names), *(["training: bool = False"] if drops else []))
    returns = ", ".join((*carried, *(f"torch.cat({name}, dim=1)" for name in lists.values())))
    compiled = "@torch.compiler.disable(recursive=False)  # a loop: only its step is compiled, once"
    return Function("forward", doc, arguments, lines, returns, tensors(len(scan.types)), compiled)
