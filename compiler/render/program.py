"""Renders programs as methods of the model, and their common parts as shared methods."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specc.compiler.ir.graph import Graph, Named
from specc.compiler.ir.types import DTYPES, TensorType, spelled
from specc.compiler.passes.merge import Merged, Slot, Where, merge
from specc.compiler.passes.roll import Begin, Loop, field_of, index_of
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import Programs
from specc.compiler.records import record
from specc.compiler.render.blocks import BlockClass, Tables
from specc.compiler.render.body import Body, constants_of
from specc.compiler.render.conditions import Fact, Indistinguishable, facts_of
from specc.compiler.render.flags import flag_variants
from specc.compiler.render.function import Function, Speller, method, optional_arguments, tuple_text, types_doc
from specc.compiler.render.loops import CACHE, STATE, LoopText, begin_lines

METHODS = {"train": "forward"}  # the training program becomes the method `forward`; other programs keep their names
TYPES = {CACHE: "list[tuple[Tensor, ...]]", STATE: "dict[str, tuple[Tensor, ...]]"}
FITTING = 72  # the most characters of a block's state that fit on one line with a comprehension


def keeper_of(programs: Programs) -> str:
    """Returns the name of the state argument: `state`, a dict by spec path, for encoder-decoders, and `cache` for all
    other models."""
    names = (name for graph in programs.programs for name, _ in (*graph.inputs, *graph.outputs))
    return STATE if any(name.startswith(f"{STATE}.") for name in names) else CACHE


@record
class Methods:
    """The context in which the methods of the model are rendered."""

    plan: Plan
    speller: Speller
    blocks: Mapping[str, BlockClass]
    tables: Tables
    reserved: frozenset[str]
    sides: frozenset[str]
    outer_state: Sequence[str]  # the state outside of blocks, in order

    def distinguishes(self, name: str, merged: Merged) -> bool:
        """Returns whether one method `name` can serve all variants in `merged`. This requires that the arguments of
        each call determine the variant to run."""
        try:
            self.shared(name, merged)
        except Indistinguishable:
            return False
        return True

    def shared(self, name: str, merged: Merged) -> tuple[Function, tuple[str, ...]]:
        """Returns a method that several programs call, and the flag arguments of this method."""
        keeper = self.speller.keeper
        flags = self._flags(merged)
        keeping = self._keeping(merged)
        inputs = [entry for entry in merged.inputs() if not self._is_state(entry[0])]
        optional = {keeper: keeping, **{name: where for name, _, where in inputs}}
        body = self._body(merged, facts_of(merged, optional, flags))
        used = tuple(flag for flag in flags if flag in body.conditions)
        state = [f"{keeper}{'=None' * (keeping != merged.every)}"] if keeping else []
        results = [merged.type(*operand[0]) for _, operand in merged.outputs]
        doc = types_doc(((name, type) for name, type, _ in inputs), results)
        doc += f" A {keeper} is updated in place." if keeping else ""
        return method(body, name, doc, optional_arguments(merged, inputs, used, state)), used

    def program(self, graph: Graph) -> Function:
        keeper = self.speller.keeper
        inputs = [(name, type) for name, type in graph.inputs if not self._is_state(name)]
        outputs = [(label, ref) for label, ref in graph.outputs if not self._is_state(label)]
        body = self._body(merge([graph], [label for label, _ in outputs or graph.outputs]))
        arguments = [f"{name}: Tensor" for name, _ in inputs]
        name = METHODS.get(graph.name, graph.name)
        doc = types_doc(inputs, [graph.types[ref] for _, ref in outputs])
        doc = doc if name == graph.name else f"{graph.name}: {doc}"
        if not outputs:
            doc = f"{doc.rpartition(' -> ')[0]} -> the state before the first token, by place in the spec."
            return replace(method(body, name, doc, arguments, TYPES[STATE]), returns=_new_state(body))
        if graph.name not in self.plan.programs.whole:
            arguments.append(f"{keeper}: {TYPES[keeper]}")
            count = "starts" if "starts" in dict(inputs) else "start"
            doc = doc[:-1] + (
                f" of the last token; extends `{keeper}` at `{count}`."
                if keeper == CACHE
                else f"; the token is added to `{keeper}`, in place."
            )
        return method(body, name, doc, arguments)

    def _is_state(self, name: str) -> bool:
        return name.startswith(f"{self.speller.keeper}.")

    def _flags(self, merged: Merged) -> dict[str, Where]:
        return flag_variants([self.speller.flags[graph.name] for graph in merged.variants])

    def _keeping(self, merged: Merged) -> Where:
        return frozenset(
            v
            for v, graph in enumerate(merged.variants)
            if any(isinstance(node.op, Loop) and node.op.stateful for node in graph.nodes)
            or any(self._is_state(name) for name, _ in graph.inputs)
        )

    def _body(self, merged: Merged, facts: Sequence[Fact] = ()) -> Body:
        flags = self._flags(merged)
        state = {name: where for name, _, where in merged.inputs() if self._is_state(name)}
        names, unpacks = self._unpacked(merged, state)

        def region(body: Body, slot: Slot) -> bool:
            if isinstance(slot.node.op, Loop):
                first = 1 if self.outer_state and self.speller.keeper == CACHE else 0
                block = self.blocks[slot.node.op.at]
                LoopText(body, slot, block, self.tables, self.speller.keeper, first, flags).add()
            elif isinstance(slot.node.op, Begin):
                begin_lines(body, slot, self.blocks[slot.node.op.at], flags)
            return isinstance(slot.node.op, Loop | Begin)

        return Body(
            merged,
            self.speller,
            names,
            facts,
            self.reserved,
            constants=constants_of(self.plan),
            scopes=self.sides,
            wanted=_wanted(merged),
            unpacks=unpacks,
            regions=region,
        )

    def _unpacked(
        self, merged: Merged, state: Mapping[str, Where]
    ) -> tuple[Mapping[str, str], Sequence[tuple[frozenset[str], str, Where]]]:
        taken = {name for name, _, _ in merged.inputs()}
        words = {name: name.split(".")[1:] for name in state}
        last = [path[-1] for path in words.values()]
        if self.speller.keeper == CACHE:
            names = {name: "_".join(path[1:]) for name, path in words.items()}
            places = {f"{CACHE}[0]": self.outer_state}
        else:
            names = {
                name: path[-1] if last.count(path[-1]) == 1 and path[-1] not in taken else "_".join(path[-2:])
                for name, path in words.items()
            }
            inputs = [name for graph in self.plan.programs.programs for name, _ in graph.inputs if self._is_state(name)]
            places = {f'{STATE}["{place}"]': group for place, group in _places(inputs).items()}
        unpacks = []
        for place, group in places.items():
            if read := [name for name in group if name in state]:
                targets = [names.get(name, "_") for name in group]
                text = f"{', '.join(targets) if len(targets) > 1 else tuple_text(targets)} = {place}"
                unpacks.append((frozenset(read), text, state[read[0]]))
        return names, unpacks


def _places(names: Sequence[str]) -> Mapping[str, Sequence[str]]:
    places: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        words = name.split(".")[1:]
        number = next((i for i, word in enumerate(words) if word.isdigit()), len(words) - 2)
        places.setdefault(".".join(words[: number + 1]), []).append(name)
    return places


def _new_state(body: Body) -> str:
    operands = dict(body.merged.outputs)
    begins = {slot.name for slot in body.merged.slots if isinstance(slot.node.op, Begin)}
    entries = {label: f"**{body.text(op)}" for label, op in operands.items() if op[0][0] in begins}
    for place, labels in _places([label for label in operands if label not in entries]).items():
        entries[labels[0]] = f'"{place}": {tuple_text([body.text(operands[label]) for label in labels])}'
    return f"{{{', '.join(entries[label] for label in operands if label in entries)}}}"


def _wanted(merged: Merged) -> dict[str, str]:
    """Returns the preferred names of values that a loop over blocks reads or returns, by reference.

    The result of the loop is named `x`. If the blocks also receive the loop's initial value as an argument, the initial
    value has the name of this argument.
    """
    names: dict[str, str] = {}
    for slot in merged.slots:
        if isinstance(slot.node.op, Loop):
            start, *passed = slot.inputs
            names |= {slot.name: "x"}
            for name, operand in zip(slot.node.op.names, passed, strict=True):
                if operand == start:
                    names[start[0][0]] = name
    return names


def new_cache(graph: Graph, outer_state: Sequence[str], param: Named, tables: Tables) -> Function:
    """Returns the method that creates an empty cache.

    The cache has the state of the embedding, if there is any, and one tuple of tensors per call of a block.

    Args:
        graph: a program that reads the cache.
        outer_state: the state outside of blocks.
        param: a parameter. The method creates the cache on the device of this parameter. Float tensors without a stated
            dtype have the parameter's dtype.
        tables: the tables of the module.
    """
    layers = [index_of(node) for node in graph.nodes if field_of(node) == "blocks"]
    state = {name: type for name, type in graph.inputs if name.startswith(f"{CACHE}.")}
    dtype = param[1].dtype
    paged = any(type.shape[0] == "P" for type in state.values())
    first = [_empty(state.pop(name), dtype) for name in outer_state]
    runs: list[list[TensorType]] = [[] for _ in layers]
    for name, type in state.items():
        runs[int(name.split(".")[1])].append(type)
    forms: dict[str, set[int]] = {}
    sets: dict[str, tuple[str, str]] = {}
    for layer, types in zip(layers, runs, strict=True):
        form = tuple_text([_empty(type, dtype) for type in types]) if types else "()"
        forms.setdefault(form, set()).add(layer)
        sets[form] = _set_of(types)
    lines = [f"new = self.{param[0]}.new_zeros"] if first or any(runs) else []
    over = "self.blocks" if len(set(layers)) == len(layers) else "ORDER"
    sizes = ("pages",) if paged else ("rows", "positions")
    doc = "Empty pages." if paged else "Empty state of `rows` texts of `positions` tokens."
    doc = f"{doc[:-1]}: the embedding's, then each block's." if first else doc
    (each, _), *others = forms.items()
    if others or len(each) > FITTING:
        over = f"range({len(layers)})" if over != "ORDER" else over
        item = "layer" if others else "_"
        lines += [f"{CACHE}: {TYPES[CACHE]} = [{tuple_text(first) if first else ''}]", f"for {item} in {over}:"]
        for i, (form, having) in enumerate(others):
            table = tables.of("blocks", frozenset(having), *sets[form])
            lines += [f"    {'elif' if i else 'if'} layer in {table}:", f"        {CACHE}.append({form})"]
        lines += ["    else:", f"        {CACHE}.append({each})"] if others else [f"    {CACHE}.append({each})"]
        returns = CACHE
    elif first:
        lines.append(f"first = {tuple_text(first)}")
        returns = f"[first, *({each} for _ in {over})]"
    else:
        returns = f"[{each} for _ in {over}]"
    return Function(
        "new_cache", doc, ("self", *(f"{name}: int" for name in sizes)), tuple(lines), returns, TYPES[CACHE]
    )


def _set_of(types: Sequence[TensorType]) -> tuple[str, str]:
    """Returns the name of the set of blocks whose cache has these types, and the comment of the set."""
    if not types:
        return "no_cache", "blocks without a cache"
    shapes = " and ".join(dict.fromkeys(f"({_dims(type)})" for type in types))
    return "cache", f"blocks whose cache has the shape {shapes}"


def _empty(type: TensorType, dtype: str) -> str:
    return f"new({_dims(type)})" if type.dtype == dtype else f"new({_dims(type)}, dtype={DTYPES[type.dtype]})"


def _dims(type: TensorType) -> str:
    return ", ".join({"B": "rows", "S": "positions", "P": "pages"}.get(str(dim), spelled(dim)) for dim in type.shape)
