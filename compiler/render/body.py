"""Renders merged graphs as the body of one Python function.

Names are short, each line has a limited complexity, and no value is computed twice.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from specc.compiler.expr.python_lines import BODY
from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.region import Call, Fused, Scan
from specc.compiler.passes.merge import NONE, Merged, Move, Operand, Slot, Where, free
from specc.compiler.passes.outline import Section
from specc.compiler.plan.plan import Plan
from specc.compiler.render.conditions import TEST, Conditions, Fact

THOUGHT = 4  # the highest `_cost` of a line; a line has at most one product, fused group or kernel
SHAPES = frozenset({"split_heads", "merge_heads", "last", "as_step", "pad_rows"})
Spell = Callable[[Graph, Node, Sequence[str]], str | None]
Guarded = tuple[Where, str]  # a line with the variants that run it
Group = tuple[Where, Sequence[str]]  # lines that are run by the same variants


@dataclass
class Body:
    """The lines of one function, which the constructor renders.

    Attributes:
        merged: The graphs to render, as variants of one function.
        spell: A function that returns the text of calls of kernels, groups and blocks, or None for other nodes.
        names: The Python names of inputs, by the name in the graph. Contains only inputs whose two names differ.
        facts: The conditions that distinguish the variants, most preferred first.
        reserved: The names that local variables must not have.
        alive: The inputs that generated code reads after the body. The names of these inputs must not be reassigned.
        scopes: First words of paths, such as `encoder`. Names of values omit these words.
        wanted: The preferred names of some values, by reference.
        unpacks: The lines that unpack state. An entry has the names that the line assigns, the text of the line, and
            the variants that run the line. The line is inserted before the first read of one of these names.
        constants: The names of constants, by the text of their values.
        regions: A function that adds the lines of a loop or another node that is not an expression. For expressions,
            the function returns False.
        guarded: The lines, each with its variants.
        texts: The text of each value that has been assigned.
        held: All values that were assigned to each name.
        pending: Values without a name yet. The text of such a value can be inlined into the line of a reader.
        conditions: The names of the facts that conditions use.
        position: The index of the current node.
        ahead: Whether the current line is inserted before the line of the current node.
        guard: The variants of the current line.
        lines: The lines of the body. Lines of only some variants are inside `if` statements.
    """

    merged: Merged
    spell: Spell
    names: Mapping[str, str] = field(default_factory=dict)
    facts: Sequence[Fact] = ()
    reserved: frozenset[str] = frozenset()
    alive: frozenset[str] = frozenset()
    scopes: frozenset[str] = frozenset()
    wanted: Mapping[str, str] = field(default_factory=dict)
    unpacks: Sequence[tuple[frozenset[str], str, Where]] = ()
    constants: Mapping[str, str] = field(default_factory=dict)
    regions: "Callable[[Body, Slot], bool]" = lambda body, slot: False
    guarded: list[Guarded] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=lambda: {NONE: NONE})
    held: dict[str, list[str]] = field(default_factory=dict)
    pending: dict[str, tuple[str, int, bool]] = field(default_factory=dict)  # text, cost, whether a node is heavy
    conditions: set[str] = field(default_factory=set)
    ahead: bool = False

    def __post_init__(self) -> None:
        self._branch_texts: dict[tuple[Guarded, ...], tuple[Sequence[str], set[str]]] = {}
        self._conditions = Conditions(self.merged, self.facts)
        self.names = {**{name: name for name, _, _ in self.merged.inputs()}, **self.names}
        self.alive |= {fact.name for fact in self.facts}
        for ref, name in self.names.items():
            self.hold(name, ref)
        self._slots = {ref: slot for slot in self.merged.slots for ref in slot.outputs}
        self._at = {slot.name: i for i, slot in enumerate(self.merged.slots)}
        self._reads: dict[str, list[tuple[int, Where]]] = {}
        for i, operand in self.merged.operands():
            for ref, where in operand:
                self._reads.setdefault(ref, []).append((i, where))
        for i, slot in enumerate(self.merged.slots):
            self.position, self.guard = i, slot.where
            self._unpack(slot.inputs)
            if not self.regions(self, slot):
                self._add(slot)
        self.position, self.guard = len(self.merged.slots), self.merged.every
        self._unpack([operand for _, operand in self.merged.outputs])
        self.lines = tuple(self._block(self.guarded, self.merged.every))

    # Lines

    def _unpack(self, operands: Sequence[Operand]) -> None:
        read = {ref for operand in operands for ref, _ in operand}
        for unpack in [unpack for unpack in self.unpacks if read & unpack[0]]:
            self.line(*unpack[1:])
            self.unpacks = [other for other in self.unpacks if other is not unpack]

    def line(self, text: str, where: Where | None = None) -> None:
        """Adds a line for the variants `where`, by default the variants of the current node."""
        guard = self.guard if where is None else where
        at = len(self.guarded)
        if guard == self.merged.every:  # a line of all variants moves before guarded lines that are independent of it
            assigned = text.partition(" = ")[0].split(", ") if " = " in text else []
            while at and self.guarded[at - 1][0] != guard and _independent(self.guarded[at - 1][1], text, assigned):
                at -= 1
            at = at if at == 0 or self.guarded[at - 1][0] == guard else len(self.guarded)
        self.guarded.insert(at, (guard, text))

    def _block(self, lines: Sequence[Guarded], every: Where) -> Iterator[str]:
        for common, group in groupby(lines, lambda line: line[0] == every):
            run = list(group)
            yield from (text for _, text in run) if common else self._branches(run, every)

    def _branches(self, lines: Sequence[Guarded], every: Where) -> Sequence[str]:
        key = (*lines, (every, ""))  # cached, because nested statements process the same lines many times
        if key not in self._branch_texts:
            before, self.conditions = self.conditions, set()
            text = self._fewest_tests(_grouped(lines), every)
            self._branch_texts[key], self.conditions = (text, self.conditions), before
        text, conditions = self._branch_texts[key]
        self.conditions |= conditions
        return text

    def _fewest_tests(self, groups: Sequence[Group], every: Where) -> Sequence[str]:
        """Returns the lines of `groups` inside `if` statements, with the fewest conditions. `every` contains the
        variants that reach these statements.

        A group consists of lines that run in the same variants. Each `if` statement contains one or more successive
        groups: a single group, two groups with opposite conditions, or several groups in two branches that one fact (a
        condition on an argument or attribute) selects. Dynamic programming finds the statements for the first n groups
        from the statements for fewer groups.
        """
        best: list[tuple[int, tuple[str, ...], set[str]]] = [(0, (), set())]
        for end in range(1, len(groups) + 1):
            options = []
            for start in range(end):
                cost, before, conditions = best[start]
                for statement in self._statements(groups[start:end], every):
                    self.conditions = set()
                    text = tuple(statement)
                    tests = sum(len(TEST.findall(line)) for line in text)
                    options.append((cost + tests, (*before, *text), conditions | self.conditions))
            best.append(min(options, key=lambda option: option[0]))
        _, text, self.conditions = best[-1]
        return text

    def _statements(self, groups: Sequence[Group], every: Where) -> Iterator[Iterator[str]]:
        (where, lines), *others = groups
        if not others:
            yield self._opposite(where, every, lines, ())
        elif len(others) == 1 and others[0][0] == every - where:
            yield self._opposite(where, every, lines, others[0][1])
        for fact in self.facts if others else ():
            side = fact.where & every
            if side and side != every and all(guard <= side or not guard & side for guard, _ in groups):
                first = every - side if fact.optional and not where <= side else side  # the order of the groups
                yield self._nested(groups, every, first)

    def _opposite(self, where: Where, every: Where, lines: Sequence[str], others: Sequence[str]) -> Iterator[str]:
        """Yields the lines of an `if` statement without nested statements. The statement runs `lines` in the variants
        `where`, and `others` in the other variants of `every`."""
        condition = self.condition(where, every)
        if others and condition.startswith("not ") and " " not in condition.removeprefix("not "):
            condition, where, lines, others = condition.removeprefix("not "), every - where, others, lines
        joined = self._joined(every - where, every, condition, lines, others)
        yield from _branched(condition, lines, others) if joined is None else joined

    def _nested(self, groups: Sequence[Group], every: Where, side: Where) -> Iterator[str]:
        """Yields the lines of an `if` statement with the groups in two branches: one branch for the variants `side`,
        and one branch for the other variants of `every`."""
        lines = [(where, text) for where, texts in groups for text in texts]
        branches = [
            (branch, list(self._block([line for line in lines if line[0] <= branch], branch)))
            for branch in (side, every - side)
        ]
        (branch, first), *rest = [entry for entry in branches if entry[1]]
        yield from _branched(self.condition(branch, every), first, rest[0][1] if rest else ())

    def _joined(
        self, others: Where, every: Where, condition: str, group: Sequence[str], other: Sequence[str]
    ) -> Sequence[str] | None:
        """Returns a shorter form of two lines that assign the same variable under opposite conditions. The shorter form
        is a conditional expression, or an assignment and a conditional addition. Returns None if neither is possible.

        Args:
            others: The variants of the second line.
            every: The variants that reach the lines.
            condition: The condition of the first line.
            group: The lines under the condition.
            other: The lines under the opposite condition.
        """
        if len(group) != 1 or len(other) != 1:
            return None
        (name, equals, value), (same, _, otherwise) = group[0].partition(" = "), other[0].partition(" = ")
        if not equals or name != same or not name.isidentifier():
            return None
        if len(text := f"{name} = {value} if {condition} else {otherwise}") <= BODY:
            return (text,)
        if not otherwise.endswith(f" + {value}") or mentions(otherwise, name):
            return None
        added = f"    {name} = {otherwise.removesuffix(value)}{name}"
        return group[0], f"if {self.condition(others, every)}:", added

    def condition(self, where: Where, every: Where | None = None) -> str:
        """Returns a Python condition that is true in the variants `where`, and false in the other variants of `every`.
        By default, `every` contains all variants. Raises Indistinguishable if no facts distinguish these variants."""
        condition = self._conditions.of(where, self.merged.every if every is None else every)
        self.conditions |= condition.names
        return condition.text

    # Values

    def _add(self, slot: Slot) -> None:
        text, size, heavy = self._text_of(slot)
        if slot.node.op.in_place and not any(ref in self._reads for ref in slot.outputs):
            self._release_state(slot)
            self.line(text)  # an in-place op returns its first input
            self.texts[slot.name] = self.text(slot.inputs[0])
        elif len(slot.node.types) == 1 and self._may_wait(slot):
            self.pending[slot.name] = (text, size, heavy)
        else:
            if slot.node.op.in_place:
                self._release_state(slot)
            self.assign(slot, text)

    def _release_state(self, slot: Slot) -> None:
        self.release(self.text(slot.inputs[0]))

    def _text_of(self, slot: Slot) -> tuple[str, int, bool]:
        """Returns three values: the expression of the node, the complexity of the expression, and whether the
        expression contains a heavy node (see `_heavy`).

        An input may be pending, which means that its value has no name yet. A pending input is first assigned to a name
        if the expression would contain it twice or become too complex.
        """
        for i, operand in enumerate(slot.inputs):
            if self._waits(operand) and (self._repeats(slot, i) or self.reads(operand) > 1):
                self.write(operand[0][0])
        while True:
            waiting = [operand[0][0] for operand in slot.inputs if self._waits(operand)]
            size = _cost(slot.node) + sum(self.pending[ref][1] for ref in waiting)
            heavy = [ref for ref in waiting if self.pending[ref][2]]
            if len(heavy) > (0 if _heavy(slot.node) else 1):
                self.write(heavy[0])
            elif size > THOUGHT and waiting:
                self.write(max(waiting, key=lambda ref: self.pending[ref][1]))
            else:
                break
        args = [self.text(operand) for operand in slot.inputs]
        for ref in waiting:
            self.pending.pop(ref)
        return self.spelled(slot, args), size, bool(heavy) or _heavy(slot.node)

    def spelled(self, slot: Slot, args: Sequence[str]) -> str:
        graph, node = self.merged.variants[slot.first], slot.node
        text = self.spell(graph, node, args)
        if text is None:
            types = [] if isinstance(node.op, Move) else [graph.types[ref] for ref in node.inputs]
            text = node.op.torch(args, types)
        for digits, name in self.constants.items():
            text = re.sub(rf"(?<![\w.]){re.escape(digits)}(?![\w.])", name, text)
        return text

    def reads(self, operand: Operand) -> int:
        return len(self._reads[operand[0][0]])

    def _waits(self, operand: Operand) -> bool:
        return operand[0][0] in self.pending

    def _repeats(self, slot: Slot, index: int) -> bool:
        names = [f"argument_{i}" for i in range(len(slot.inputs))]
        return len(re.findall(rf"\b{names[index]}\b", self.spelled(slot, names))) > 1

    def _may_wait(self, slot: Slot) -> bool:
        reads = self._reads.get(slot.name, [])
        if not slot.node.op.inline or slot.node.op.assigned or slot.name in self.merged.variables:
            return False
        if isinstance(slot.node.op, Section):  # every program assigns the result of a shared method to a name
            return False
        if len(reads) != 1:  # if each variant has exactly one reader, the first reader assigns the value
            return len(reads) > 1 and sorted(v for _, where in reads for v in where) == sorted(slot.where)
        if reads[0][0] > len(self.merged.slots):
            return True
        reader = self.merged.slots[reads[0][0]]
        return reader.where == slot.where and (reader.node.op.inline or reader.inputs[0][0][0] == slot.name)

    def text(self, operand: Operand | str) -> str:
        ref = operand if isinstance(operand, str) else operand[0][0]
        if ref in self.pending:
            return self.pending[ref][0]
        if ref[0] in "@$":
            return self.texts.get(ref, f"self.{ref[1:]}")
        if not isinstance(operand, str) and len(operand) > 1:
            ref = next(ref for ref, _ in operand if ref != NONE)
        return self.texts[ref]

    def write(self, ref: str) -> None:
        """Assigns `ref`, a pending value (a value without a name yet), on a separate line before the current node.
        Earlier pending values with several readers are assigned first."""
        before, guard = self.ahead, self.guard
        slot = self._slots[ref]
        at = self._at[slot.name]
        while earlier := next(
            (key for key in self.pending if len(self._reads[key]) > 1 and self._at[self._slots[key].name] < at), None
        ):
            self.write(earlier)
        # Assigned above: an earlier value got a name that this value reads
        if ref not in self.pending:
            return
        self.ahead, self.guard = True, slot.where
        self.assign(slot, self.pending.pop(ref)[0])
        self.ahead, self.guard = before, guard

    def release(self, *names: str) -> None:
        """Writes an assignment for each pending value that reads one of `names`. A pending value has no variable yet.
        The method must be called before these names are reassigned."""
        while waiting := next(
            (ref for ref, (text, _, _) in self.pending.items() if any(mentions(text, name) for name in names)), None
        ):
            self.write(waiting)

    def assign(self, slot: Slot, text: str) -> None:
        names = [self.name_for(slot, i) for i in range(len(slot.node.types))]
        self.release(*names)
        if names != [text]:
            self.line(f"{', '.join(names)} = {text}")
        for ref, name in zip(slot.outputs, names, strict=True):
            self.hold(name, ref)

    def hold(self, name: str, ref: str) -> None:
        """Records that the variable `name` contains the value `ref`. All values that share the variable then have this
        name."""
        self.texts[ref] = name
        self.held.setdefault(name, []).append(ref)
        if (root := self.merged.variables.get(ref)) is not None:
            self.texts[f"={root}"] = name

    # Names

    def name_for(self, slot: Slot, index: int) -> str:
        """Returns a name that no live value has: a short name if one is free, otherwise a longer name. An output of a
        node with several outputs is named `_` if nothing reads it."""
        ref = slot.outputs[index]
        if len(slot.node.types) > 1 and ref not in self._reads:
            return "_"
        root = self.merged.variables.get(ref)
        if root is not None and (known := self.texts.get(f"={root}") or self.names.get(root)):
            return known
        return free(
            self.candidates(slot, index),
            lambda name: (
                name in self.reserved
                or any(self.live(held) or self._overwritten(held, root) for held in self.held.get(name, ()))
            ),
        )

    def _overwritten(self, held: str, root: str | None) -> bool:
        """Returns whether a variant reads the value `held` after this variant assigns the variable `root`. Each variant
        assigns the variable at a different node."""
        slots = [
            self._slots[ref] for ref, other in self.merged.variables.items() if other == root and ref in self._slots
        ]
        return any(
            at > self._at[slot.name] and where & slot.where for slot in slots for at, where in self._reads.get(held, ())
        )

    def candidates(self, slot: Slot, index: int) -> tuple[str, ...]:
        """Returns the possible names of a value, most preferred first.

        The possible names are the name in `wanted`, the label of the graph's output, the label of the op's output, one
        component of the node's path, and the whole path.
        """
        ref, node = slot.outputs[index], slot.node
        if isinstance(node.op, Move):
            node = self._slots[node_of(self._stands_for(slot))].node
        returned = [self.wanted[ref]] if ref in self.wanted else []
        returned += [self.text(slot.inputs[0])] if node.op.in_place else []  # an input that is the state itself
        returned += [
            label
            for label, operand in self.merged.outputs
            if label.isidentifier() and any(output == ref for output, _ in operand)
        ]
        path = node.members[-1] if node.epilogue is not None and not node.op.gradient else node.name
        parts = path.split(".")
        parts = parts[1:] if parts[0] in self.scopes and len(parts) > 1 else parts
        labels = (node.epilogue or node.op).output_labels
        long = "_".join(parts)
        more = (long, f"{long}_value", f"{long}_part", f"{long}_here")
        if labels and (index or node.epilogue is None):
            return *returned[:1], labels[index], f"{long}_{labels[index]}"
        if "." in path and (node.op.gradient or parts[-1].startswith("grad")):
            return *returned[:1], "_".join(parts[1:]), *more
        return *returned[:1], parts[1] if len(parts) > 1 else parts[0], *more

    def _stands_for(self, slot: Slot) -> str:
        root = self.merged.variables[slot.name]
        refs = [ref for ref, other in self._slots.items() if not isinstance(other.node.op, Move)]
        return next((ref for ref in refs if self.merged.variables.get(ref) == root), refs[0])

    def live(self, ref: str) -> bool:
        """Returns whether a value, or another value of the same variable, is read after the current node.

        While a line is inserted before the current node, the current node counts as a later reader.
        """
        if ref in self.alive:
            return True
        root = self.merged.variables.get(ref)
        refs = [ref] if root is None else [member for member, other in self.merged.variables.items() if other == root]
        now = self.position + (not self.ahead)
        if any(at >= now and where & self.guard for member in refs for at, where in self._reads.get(member, ())):
            return True
        name = self.texts.get(ref, "")
        return any(
            mentions(text, name) and self._slots[waiting].where & self.guard
            for waiting, (text, _, _) in self.pending.items()
        )

    def returned(self) -> str:
        return ", ".join(map(self._result, dict(self.merged.outputs).values()))

    def _result(self, operand: Operand) -> str:
        where, text = variants_of(operand), self.text(operand)
        return text if where == self.merged.every else f"{text} if {self.condition(where)} else None"

    def own_outputs(self) -> Sequence[str]:
        """Returns the items of a tuple that contains, for each variant, only the outputs of the variant."""
        texts: list[str] = []
        for where, operands in groupby(dict(self.merged.outputs).values(), key=variants_of):
            outputs = [self.text(operand) for operand in operands]
            if where != self.merged.every:
                outputs = [f"*(({', '.join(outputs)},) if {self.condition(where)} else ())"]
            texts += outputs
        return texts


def variants_of(operand: Operand) -> Where:
    return frozenset(variant for _, variants in operand for variant in variants)


def constants_of(plan: Plan) -> Mapping[str, str]:
    """Maps the text of each constant's value to the constant's name. Formulas of the spec define the constants."""
    return {repr(value): name for name, value, _ in plan.programs.constants}


def _branched(condition: str, first: Sequence[str], second: Sequence[str]) -> Iterator[str]:
    yield from (f"if {condition}:", *(f"    {text}" for text in first))
    if second and second[0].startswith("if ") and all(text.startswith((" ", "el")) for text in second[1:]):
        yield from (f"el{second[0]}", *second[1:])
    elif second:
        yield from ("else:", *(f"    {text}" for text in second))


def _grouped(lines: Sequence[Guarded]) -> Sequence[Group]:
    """Returns the lines in groups. All lines of a group have the same guard, which is the set of variants that run the
    line.

    Lines with the same guard are joined if no variant of the guard runs the lines between them. Groups are sorted by
    their first variant.
    """
    runs: list[dict[Where, list[str]]] = [{}]
    for where, text in lines:
        if where not in runs[-1] and any(other & where for other in runs[-1]):
            runs.append({})
        runs[-1].setdefault(where, []).append(text)
    return [entry for run in runs for entry in sorted(run.items(), key=lambda entry: min(entry[0]))]


def _independent(guarded: str, text: str, assigned: Sequence[str]) -> bool:
    """Returns whether the line `text` can be moved before the line `guarded`. `text` assigns the names `assigned`."""
    names, simple, _ = guarded.partition(" = ")
    clashes = [(text, name) for name in names.split(", ")] + [(guarded, name) for name in assigned]
    return bool(simple and assigned) and not any(mentions(line, name) for line, name in clashes)


def mentions(text: str, name: str) -> bool:
    words = "".join(c if c.isalnum() or c in "_." else " " for c in text).split()
    return any(word.partition(".")[0] == name for word in words)


def _heavy(node: Node) -> bool:
    """Returns whether a node is heavy: a product, a planned node or a call. A line contains at most one heavy node."""
    return node.op.matrix or node.op.everywhere or isinstance(node.op, Fused | Call | Scan)


def _cost(node: Node) -> int:
    """Returns the complexity that a node adds to a line.

    The node adds 1, plus 1 for each parameter that it reads, 1 for a function call in its text, and 1 if it mixes
    tokens. Casts, and ops that only change a shape, add nothing.
    """
    if isinstance(node.op, Section):
        return 2
    if isinstance(node.op, Pointwise) and node.op.outputs[0] in node.op.variables:
        return 0  # a cast
    curved = isinstance(node.op, Pointwise) and any("(" in text for text in node.op.outputs)
    return curved + (node.op.name not in SHAPES) + node.op.mixes_tokens + sum(ref[0] in "@$" for ref in node.inputs)
