"""Renders programs as methods of the model, and their common parts as shared methods."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specc.compiler.int8.fake_quantize import SUFFIX
from specc.compiler.ir.graph import Graph, Named, TensorType, spelled
from specc.compiler.passes.merge import Merged, Where, merge
from specc.compiler.passes.roll import Begin, Loop, field_of, index_of
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import Programs
from specc.compiler.render.blocks import BlockClass, Tables, argument
from specc.compiler.render.body import Body, Fact, Untold, constants_of
from specc.compiler.render.function import Function, Speller, types_doc
from specc.compiler.render.loops import CACHE, STATE, begin_lines, loop_lines

METHODS = {"train": "forward"}  # the training program is `forward`; other programs have their own names
TYPES = {CACHE: "list[tuple[Tensor, ...]]", STATE: "dict[str, tuple[Tensor, ...]]"}
ONCE = "_once"


def keeper_of(programs: Programs) -> str:
    """Returns the name of the state argument: a cache, or for models of pairs a state dict by path in the spec."""
    names = [name for graph in programs.programs for name, _ in graph.inputs]
    names += [label for graph in programs.programs for label, _ in graph.outputs]
    return STATE if any(name.startswith(f"{STATE}.") for name in names) else CACHE


def flags_of(programs: Programs) -> Mapping[str, frozenset[str]]:
    """Returns the flags of each program.

    `training`: it trains. `rounded`: it fake-quantizes the inputs of products. `once`: it runs each block once.
    """
    trains = {"train", *(phase.train for phase in programs.phases)}
    return {
        graph.name: frozenset(
            flag
            for flag, holds in (
                ("training", graph.name in trains or graph.name.removesuffix(SUFFIX) in trains),
                ("rounded", graph.name.endswith(SUFFIX)),
                ("once", graph.name.removesuffix(SUFFIX).endswith(ONCE)),
            )
            if holds
        )
        for graph in programs.programs
    }


@dataclass(frozen=True)
class Methods:
    """The context in which the methods of the model are rendered."""

    plan: Plan
    speller: Speller
    blocks: Mapping[str, BlockClass]
    tables: Tables
    reserved: frozenset[str]
    sides: frozenset[str]
    own: tuple[str, ...]  # the state outside of blocks, in order

    def distinguishes(self, name: str, merged: Merged) -> bool:
        """Returns whether a method that several programs call can distinguish them."""
        try:
            self.shared(name, merged)
        except Untold:
            return False
        return True

    def shared(self, name: str, merged: Merged) -> tuple[Function, tuple[str, ...]]:
        """Returns a method that several programs call, and the flags that it has as arguments."""
        keeper = self.speller.keeper
        flags = self._flags(merged)
        keeping = frozenset(v for v, graph in enumerate(merged.variants) if self._keeps(graph))
        facts = []
        if keeping and keeping != merged.every:
            facts.append(Fact(f"{keeper} is not None", f"{keeper} is None", keeping, keeper))
        inputs = [entry for entry in merged.inputs() if not entry[0].startswith(f"{keeper}.")]
        for argued, _, where in inputs:
            if where != merged.every:
                facts.append(Fact(f"{argued} is not None", f"{argued} is None", where, argued))
        facts += [
            Fact(flag, f"not {flag}", where, flag) for flag, where in flags.items() if where and where != merged.every
        ]
        body = self._body(merged, facts, keeping)
        lines = body.lines
        asked = tuple(flag for flag in flags if any(fact.text == flag for fact in body.asked))
        arguments = ["self", *(argument(argued, where == merged.every) for argued, _, where in inputs)]
        if keeping:
            arguments.append(keeper if keeping == merged.every else f"{keeper}=None")
        arguments += [f"{flag}=False" for flag in asked]
        results = [self._type(merged, operand[0][0], operand[0][1]) for _, operand in merged.outputs]
        doc = types_doc(((argued, type) for argued, type, _ in inputs), results)
        doc += f" A {keeper} is updated in place." if keeping else ""
        annotation = "Tensor" if len(results) == 1 else f"tuple[{', '.join('Tensor' for _ in results)}]"
        return Function(name, doc, tuple(arguments), lines, body.returned(), annotation), asked

    def program(self, graph: Graph, original: Graph) -> Function:
        """Returns the method of one program. `original` is the program before its common parts were outlined."""
        keeper = self.speller.keeper
        inputs = [(name, type) for name, type in graph.inputs if not name.startswith(f"{keeper}.")]
        outputs = [(label, ref) for label, ref in graph.outputs if not label.startswith(f"{keeper}.")]
        begins = not outputs
        merged = merge([graph], None if begins else [label for label, _ in outputs])
        keeping = frozenset({0}) if self._keeps(graph) else frozenset[int]()
        body = self._body(merged, (), keeping)
        arguments = ["self", *(f"{name}: Tensor" for name, _ in inputs)]
        doc = types_doc(inputs, [graph.types[ref] for _, ref in outputs])
        name = METHODS.get(graph.name, graph.name)
        doc = doc if name == graph.name else f"{graph.name}: {doc}"
        if begins:
            entries = tuple(_entries(body, graph))
            doc = f"{doc.rpartition(' -> ')[0]} -> the state before the first token, by place in the spec."
            returns = f"{{{', '.join(entries)}}}"
            return Function(name, doc, tuple(arguments), body.lines, returns, TYPES[STATE])
        if original.name not in self.plan.programs.whole:
            arguments.append(f"{keeper}: {TYPES[keeper]}")
            doc = doc[:-1] + (
                f", of the last; `{keeper}` holds `start` tokens and takes these."
                if keeper == CACHE
                else f"; the token is added to `{keeper}`, in place."
            )
        returns = body.returned()
        annotation = "Tensor" if len(outputs) == 1 else f"tuple[{', '.join('Tensor' for _ in outputs)}]"
        return Function(name, doc, tuple(arguments), body.lines, returns, annotation)

    def _type(self, merged: Merged, ref: str, where: Where) -> TensorType:
        slot = next((slot for slot in merged.slots if ref in slot.outputs), None)
        if slot is None:
            return merged.variants[min(where)].types[ref]
        return slot.node.types[slot.outputs.index(ref)]

    def _flags(self, merged: Merged) -> Mapping[str, Where]:
        of = [self.speller.flags[graph.name] for graph in merged.variants]
        names = dict.fromkeys(flag for flags in of for flag in sorted(flags))
        return {name: frozenset(i for i, flags in enumerate(of) if name in flags) for name in names}

    def _keeps(self, graph: Graph) -> bool:
        """Returns whether a graph reads state."""
        prefix = f"{self.speller.keeper}."
        loops = any(isinstance(node.op, Loop) and (node.op.keeps or node.op.extends) for node in graph.nodes)
        return loops or any(name.startswith(prefix) for name, _ in graph.inputs)

    def _body(self, merged: Merged, facts: Sequence[Fact], keeping: Where) -> Body:
        keeper = self.speller.keeper
        state = [(name, where) for name, _, where in merged.inputs() if name.startswith(f"{keeper}.")]
        names = {name: name for name, _, _ in merged.inputs() if not name.startswith(f"{keeper}.")}
        flags = self._flags(merged)
        unpacks: list[tuple[frozenset[str], str, Where]] = []
        if keeper == CACHE and state:
            local = {name: "_".join(name.split(".")[2:]) for name, _ in state}
            names |= local
            targets = [local.get(name, "_") for name in self.own]
            text = f"{', '.join(targets)}{',' if len(targets) == 1 else ''} = {CACHE}[0]"
            unpacks.append((frozenset(local), text, state[0][1]))
        elif state:
            unpacks += self._unpacked([name for name, _ in state], names, state[0][1])

        def region(body: Body, slot: object) -> bool:
            assert hasattr(slot, "node")
            if isinstance(slot.node.op, Loop):
                block = self.blocks[slot.node.op.at]
                first = 1 if self.own and keeper == CACHE else 0
                loop_lines(body, slot, block, self.tables, keeper, first, flags)  # type: ignore[arg-type]
                return True
            if isinstance(slot.node.op, Begin):
                begin_lines(body, slot, self.blocks[slot.node.op.at], flags)  # type: ignore[arg-type]
                return True
            return False

        asked = frozenset(fact.reads for fact in facts if fact.reads)
        body = Body(
            merged,
            names,
            self.speller,
            facts=facts,
            reserved=self.reserved,
            constants=constants_of(self.plan),
            alive=asked,
            scopes=self.sides,
            wanted=_wanted(merged),
            unpacks=unpacks,
            regions=region,
        )
        body.run()
        return body

    def _unpacked(
        self, state: Sequence[str], names: dict[str, str], where: Where
    ) -> list[tuple[frozenset[str], str, Where]]:
        """Returns the lines that unpack the state of stages outside of blocks, by path.

        The name of each state value is added to `names`.
        """
        keys = [name.rpartition(".")[2] for name in state]
        taken = set(names.values())
        every = _places(
            [name for graph in self.plan.programs.programs for name, _ in graph.inputs if name.startswith(f"{STATE}.")]
        )
        made = []
        for place, group in every.items():
            own = [name for name in group if name in state]
            if not own:
                continue
            for name in own:
                _, *words = name.split(".")
                names[name] = (
                    words[-1] if keys.count(words[-1]) == 1 and words[-1] not in taken else "_".join(words[-2:])
                )
            targets = ", ".join(names.get(name, "_") for name in group)
            text = f'{targets if len(group) > 1 else f"({targets},)"} = {STATE}["{place}"]'
            made.append((frozenset(own), text, where))
        return made


def _places(names: Sequence[str]) -> Mapping[str, list[str]]:
    """Returns state names grouped by path.

    `state.decoder.lstm.h` has the path `decoder.lstm`. State in a block has the path of the block.
    """
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        words = name.split(".")[1:]
        number = next((i for i, word in enumerate(words) if word.isdigit()), None)
        place = ".".join(words[:-1] if number is None else words[: number + 1])
        found.setdefault(place, []).append(name)
    return found


def _entries(body: Body, graph: Graph) -> Iterator[str]:
    """Yields the entries of the dict of a new state."""
    operands = dict(body.merged.outputs)
    begins = {node.name for node in graph.nodes if isinstance(node.op, Begin)}
    done: dict[str, str] = {}
    for label, operand in operands.items():
        if operand[0][0] in begins:
            done[label] = f"**{body.text(operand)}"
    plain = [label for label in operands if label not in done]
    for place, labels in _places(plain).items():
        texts = [body.text(operands[label]) for label in labels]
        done[labels[0]] = f'"{place}": ({", ".join(texts)}{"," if len(texts) == 1 else ""})'
    yield from (done[label] for label in operands if label in done)


def _wanted(merged: Merged) -> dict[str, str]:
    """Returns preferred names: `x` for a loop's result, and the blocks' argument name for a loop's initial value.

    The latter applies if all blocks also receive the initial value as an argument.
    """
    found: dict[str, str] = {}
    for slot in merged.slots:
        if isinstance(slot.node.op, Loop):
            start, *passed = slot.inputs
            found |= {slot.name: "x"}
            for name, operand in zip(slot.node.op.names, passed, strict=True):
                if operand == start:
                    found[start[0][0]] = name
    return found


def own_state(rolled: Sequence[Graph]) -> tuple[Named, ...]:
    """Returns the entries of the cache of the rolled programs that are outside of blocks."""
    graph = next((graph for graph in rolled if any(name.startswith(f"{CACHE}.") for name, _ in graph.inputs)), None)
    return tuple(entry for entry in graph.inputs if entry[0].startswith(f"{CACHE}.")) if graph is not None else ()


def new_cache(graph: Graph, own: Sequence[Named], param: str, tables: Tables) -> Function:
    """Returns the method that creates an empty cache.

    The cache has the state of the embedding, if there is any, then one tuple of tensors per run of a block. All blocks
    have state of the same types.

    Args:
        graph: a program that reads the cache.
        own: the state outside of blocks.
        param: the name of a parameter, whose dtype and device the cache has.
        tables: the tables of the module.
    """
    blocks = [node for node in graph.nodes if field_of(node) == "blocks"]
    kept = [type for name, type in graph.inputs if name.startswith(f"{CACHE}.") and (name, type) not in own]
    each = kept[: len(kept) // len(blocks)]
    assert kept == each * len(blocks)
    over = "self.blocks" if len({index_of(call) for call in blocks}) == len(blocks) else "ORDER"
    lines = [f"new = self.{param}.new_zeros"] if kept or own else []
    returns = f"[({', '.join(map(_empty, each))}{',' if len(each) == 1 else ''}) for _ in {over}]"
    if len(each) > 2:
        shapes = (f"({', '.join(map(spelled, type.shape[2:]))})" for type in each)
        lines.append(f"shapes = ({', '.join(shapes)})")
        returns = f"[tuple(new(rows, positions, *shape) for shape in shapes) for _ in {over}]"
    doc = "Empty state for `rows` sequences of at most `positions` tokens."
    if own:
        lines.append(f"first = ({', '.join(_empty(type) for _, type in own)}{',' if len(own) == 1 else ''})")
        returns = f"[first, *({returns[1:-1]})]"
        doc = f"{doc[:-1]}: the embedding's, then each block's."
    arguments = ("self", "rows: int", "positions: int")
    return Function("new_cache", doc, arguments, tuple(lines), returns, TYPES[CACHE])


def _empty(type: TensorType) -> str:
    """Returns the expression of an empty tensor of state."""
    dims = ", ".join({"B": "rows", "S": "positions"}.get(str(dim), spelled(dim)) for dim in type.shape)
    return f"new({dims})" if type.floating else f"new({dims}, dtype=torch.int64)"
