"""The blocks of a stack: one block, and changes of it in the layers where a condition holds."""

import json
import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, Self, Union

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails

from specc.compiler import blocks
from specc.compiler.blocks.context import Shape, Shared
from specc.compiler.blocks.model_values import ModelValue
from specc.compiler.blocks.norm import Rms
from specc.compiler.blocks.parts import Layer, Norm
from specc.compiler.blocks.wiring import (
    IDS,
    INDEX,
    NUMBERS,
    Expressions,
    Learned,
    Wiring,
    condition,
    number_problem,
    parse_wiring,
    width_problem,
)
from specc.compiler.catalog import models
from specc.compiler.expr import ExprError
from specc.compiler.expr.index import condition_holds, formula_value
from specc.compiler.ir.graph import TensorType
from specc.compiler.schedule import schedules_in
from specc.compiler.strict import LearnedName, PartName, Path, Problem, StrictModel, later


def one_of(role: type[StrictModel]) -> Any:
    """Returns the union of all block kinds that subclass `role`, discriminated by `kind`."""
    members = models(blocks, role, "kind")
    if len(members) == 1:
        return members[0]
    return Annotated[Union[members], Field(discriminator="kind")]  # noqa: UP007  (a tuple of classes, not two)


if TYPE_CHECKING:
    AnyLayer = Layer
    AnyNorm = Norm
else:
    AnyLayer, AnyNorm = map(one_of, (Layer, Norm))

TAKEN = ("blocks", "embed", "head", "norm")  # names of other parts of a model
STREAM = "x"  # the residual stream, where a block has a single one


class Block(StrictModel):
    """One block: its layers in order, each after a norm.

    Expressions read the values that the block has: the residual stream `x` or the streams that the block before names,
    `x0` (the input of the first block), `output(k)` (the value of run k), learned values, `layer` and `layers`. A
    mapping of expressions names several streams.

    Attributes:
        norm: the norm before each layer.
        learn: learned values, by name.
        read: the residual stream at the start of the block. If unset, it is unchanged.
        write: the residual stream at the end of the block, over the values of its layers, by their names. If unset,
            each layer writes to the stream in turn.
        layers: the layers of a block.
    """

    norm: AnyNorm = Rms(kind="rms")
    learn: dict[LearnedName, Learned] = Field({}, exclude_if=operator.not_)
    read: Expressions | None = later(None)
    write: Expressions | None = later(None)
    layers: Annotated[tuple[AnyLayer, ...], Field(max_length=64)]

    def __hash__(self) -> int:  # mappings have no hash
        return hash(self.model_dump_json())

    @property
    def learned(self) -> Mapping[str, Learned]:
        """The learned values of the block and of its layers, by path below the block."""
        inner = {f"{layer.title}.{name}": value for layer in self.layers for name, value in layer.learn.items()}
        return {**self.learn, **inner}

    def expressions(self) -> Iterator[tuple[Path, Wiring, str]]:
        """Yields the expressions of the block: the path, the expression, and the title of its layer, which is empty for
        expressions of the block itself."""
        owners: list[tuple[Path, Block | Layer, str]] = [((), self, "")]
        owners += [(("layers", i), layer, layer.title) for i, layer in enumerate(self.layers)]
        for path, owner, title in owners:
            for name, learned in sorted(owner.learn.items()):
                if learned.reads is not None:
                    yield (*path, "learn", name, "of"), learned.reads, title
            for name in ("read", *(owner.inner if isinstance(owner, Layer) else ()), "write"):
                value = getattr(owner, name)
                for key, text in value.items() if isinstance(value, dict) else (((), value),):
                    if text is not None:
                        yield (*path, name, *((key,) if key else ())), parse_wiring(text), title

    def outputs(self) -> tuple[str, ...]:
        """Returns the formulas of the runs whose values the block reads, each once."""
        return tuple(dict.fromkeys(index for _, wiring, _ in self.expressions() for index in wiring.outputs.values()))

    def reads_value(self, name: str) -> bool:
        """Returns whether an expression of the block reads a value such as `x0`, the input of the first block."""
        return any(name in wiring.names.values() for _, wiring, _ in self.expressions())

    def streams_after(self, streams: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the names of the streams after the block, from the names of those before it."""
        for value in (self.read, *(layer.write for layer in self.layers), self.write):
            if value is not None:
                streams = tuple(value) if isinstance(value, dict) else (STREAM,)
        return streams

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        """Returns the types of the state that the block stores between tokens, by layer and key."""
        return {f"{layer.title}.{key}": type for layer in self.layers for key, type in layer.state(shape).items()}

    def values_width(self, dim: int) -> int | None:
        """Returns the number of features of the values of the block's first attention; None without attention."""
        return next((width for layer in self.layers if (width := layer.values_width(dim)) is not None), None)

    def problems_of_block(self, dim: int, layer: int, layers: int) -> Iterator[Problem]:
        """Yields the problems of the block as number `layer` of `layers`. Paths are relative to the block."""
        yield from number_problem(self.norm.scale, ("norm", "scale"), layer, layers)
        if not self.layers:
            yield Problem(("layers",), "S254", f"block {layer} has no layers", "state or keep one layer")
        titles: dict[str, int] = {}
        for i, part in enumerate(self.layers):
            here: Path = ("layers", i)
            yield from (problem.under(*here) for problem in part.problems_in(dim, layers))
            if (first := titles.setdefault(part.title, i)) != i:
                message = f"two layers of a block are named {part.title}"
                related = (("first use", ("layers", first)),)
                yield Problem(here, "S207", message, "give one of them a `name:`", related)
            if self.write is not None and part.write is not None:
                message = f"the block has a `write`, and so has its layer {part.title}"
                yield Problem((*here, "write"), "S247", message, "remove one of the two")
        for name, learned in self.learned.items():
            yield from number_problem(learned.init, self._place(name), layer, layers)
            yield from width_problem(learned, (*self._place(name)[:-1], "shape"), self.values_width(dim))

    def _place(self, name: str) -> Path:
        """Returns the path of the initialization of a learned value."""
        if name in self.learn:
            return ("learn", name, "init")
        title, _, inner = name.partition(".")
        return ("layers", [layer.title for layer in self.layers].index(title), "learn", inner, "init")

    def wiring_problems(
        self, streams: tuple[str, ...], common: Collection[str], layer: int, layers: int
    ) -> Iterator[Problem]:
        """Yields the problems of the block's expressions: names that are not there, numbers without a value, and
        learned values that no expression reads. `streams` are the streams before the block, and `common` the names of
        learned values that all blocks share."""
        learned = self.learned
        read = {f"{part.title}.{name}" for part in self.layers for name in part.own_values}
        titles = [part.title for part in self.layers]
        sources: dict[str, set[str]] = {}
        for path, wiring, title in self.expressions():
            streams = self._streams_at(path, streams)
            known = {*streams, "x0", *common, *learned, *(name.removeprefix(f"{title}.") for name in learned if title)}
            if title:
                assert isinstance(path[1], int) and isinstance(path[2], str)
                known |= {"read": set(), "learn": {"h", "y"}, "write": {"y"}}.get(path[2], {"h", path[2]})
            elif path[0] == "write":
                known |= set(titles)
            if path[-1] == "of":
                known.add(IDS)
                names = {f"{title}.{name}" if f"{title}.{name}" in learned else name for name in wiring.names.values()}
                sources[f"{title}.{path[-2]}" if title else str(path[-2])] = names
            for name in wiring.names.values():
                full = f"{title}.{name}" if f"{title}.{name}" in learned else name
                read.add(full)
                if name not in known:
                    message = f"in layer {layer}, `{name}` is not a known value"
                    yield Problem(path, "S246", message, f"choose from {', '.join(sorted(known))}")
            yield from number_problem(wiring, path, layer, layers)
        if circle := first_circle(sources):
            path = (*self._place(circle)[:-1], "of")
            yield Problem(path, "S246", f"`{circle}` is computed from itself", "remove one of the reads")
        for name in learned:
            if name not in read:
                message = f"no expression of layer {layer} reads the learned value `{name}`"
                yield Problem(self._place(name)[:-1], "S247", message, "read it in an expression, or remove it")

    def _streams_at(self, path: Path, streams: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the streams that an expression may read, of those before the block."""
        owners: list[Block | Layer] = [self] if path[0] != "read" else []
        if path[0] == "layers":
            assert isinstance(path[1], int)
            owners += self.layers[: path[1]]
        elif path[0] == "write":
            owners += self.layers
        for owner in owners:
            value = owner.read if owner is self else owner.write
            if value is not None:
                streams = tuple(value) if isinstance(value, dict) else (STREAM,)
        return streams


class Change(StrictModel):
    """Fields of a block that differ in the layers where the condition `where` holds.

    A key may also be the name of a layer, with the fields of it that differ. Mappings are merged field by field, in the
    order of the changes. A layer or norm of another `kind` replaces the existing one. Null removes a field, a
    learned value or a layer.

    Attributes:
        where: a condition of `layer` and `layers`, such as `layer % 6 == 5`.
        norm: the fields of the norm that differ.
        learn: further learned values, or fields of them that differ.
        read: the residual stream at the start of the block.
        write: the residual stream at the end of the block.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any] | None] = Field(init=False)

    where: Annotated[str, Field(min_length=1, max_length=500), AfterValidator(condition(*NUMBERS))]
    norm: dict[str, Any] | None = None
    learn: dict[LearnedName, dict[str, Any] | None] | None = None
    read: Expressions | None = None
    write: Expressions | None = None

    def __hash__(self) -> int:  # mappings have no hash
        return hash(self.model_dump_json())

    @model_serializer(mode="wrap")
    def _stated(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits what the change does not set: null removes a field."""
        stated = self.model_fields_set | (self.model_extra or {}).keys()
        return {key: value for key, value in dump(self).items() if key in stated}

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that it sets, as data."""
        data = self.model_dump(mode="json", exclude_unset=True)
        return {key: value for key, value in data.items() if key != "where"}


class Between(StrictModel):
    """Modules before the runs of blocks in which `where` holds, a condition of `run` and `runs`, `layer` and `layers`.

    Runs are counted from 0, and `runs` is their number. Module `name`.0 is before the first such run, and so on,
    with learned values of its own.

    Attributes:
        name: the name of the modules.
        where: the condition.
        learn: the learned values of a module, by name.
        read: the residual stream after a module. If there are several streams, `x` is the first.
    """

    name: PartName
    where: Annotated[str, Field(min_length=1, max_length=500), AfterValidator(condition(*INDEX))]
    learn: dict[LearnedName, Learned] = Field({}, exclude_if=operator.not_)
    read: Expressions

    def __hash__(self) -> int:  # mappings have no hash
        return hash(self.model_dump_json())

    def number(self, run: int, order: tuple[int, ...], count: int) -> int | None:
        """Returns the index of the module before a run of an order of `count` blocks; None if there is none."""
        holds = [condition_holds(self.where, index_values(i, order, count)) for i in range(run + 1)]
        return sum(holds) - 1 if holds[-1] else None


class Blocks(Block):
    """Several blocks: one block, with changes in the layers where their conditions hold. Layers are counted from 0.

    Attributes:
        count: the number of blocks.
        common: learned values that all blocks share. They may read `ids`, `x0` and each other.
        changes: the fields that differ in some layers.
    """

    count: Annotated[int, Field(gt=0, le=1000)]
    common: dict[LearnedName, Learned] = Field({}, exclude_if=operator.not_)
    changes: Annotated[tuple[Change, ...], Field(max_length=256)] = later(())
    _blocks: tuple[Block, ...] = PrivateAttr(())

    @classmethod
    def parts_by_name(cls, data: Any) -> Iterator[tuple[Path, Any, Any]]:
        layers = [layer for layer in _listed(data.get("layers")) if isinstance(layer, dict) and "kind" in layer]
        for i, change in enumerate(_listed(data.get("changes"))):
            for layer in layers if isinstance(change, dict) else ():
                title = layer.get("name") or layer["kind"]
                if isinstance(fields := change.get(title), dict):
                    yield ("changes", i, title), AnyLayer, {"kind": layer["kind"], **fields}

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        """Merges the changes of each layer and validates the result. Errors are reported at the change that causes
        them."""
        base = self.model_dump(mode="json", exclude_unset=True, include=set(Block.model_fields))
        known: dict[tuple[int, ...], Block] = {}
        resolved = []
        for layer in range(self.count):
            chosen = self.changes_of(layer)
            if chosen not in known:
                known[chosen] = self._merged(base, chosen)
            resolved.append(known[chosen])
        self._blocks = tuple(resolved)
        return self

    def changes_of(self, layer: int) -> tuple[int, ...]:
        values = {"layer": layer, "layers": self.count}
        try:
            return tuple(i for i, change in enumerate(self.changes) if condition_holds(change.where, values))
        except ExprError:  # reported by `problems_in`
            return ()

    def _merged(self, base: Mapping[str, Any], chosen: tuple[int, ...]) -> Block:
        merged = reduce(_merge_block, (self.changes[i].fields for i in chosen), base)
        try:
            return Block.model_validate_json(json.dumps(merged))
        except ValidationError as error:
            details = [
                InitErrorDetails(
                    type=problem["type"] if problem["type"] != "value_error" else "value_error",
                    loc=self._source(problem["loc"], chosen),
                    input=problem["input"],
                    ctx=problem.get("ctx", {}),
                )
                for problem in error.errors(include_url=False)
            ]
            raise ValidationError.from_exception_data("Blocks", details) from None

    def _source(self, path: Path, chosen: tuple[int, ...]) -> Path:
        """Returns the path in the spec of a path in a merged block: in the last change that sets it, else in the
        blocks."""
        rest: Path = path
        if path[:1] == ("layers",) and len(path) > 1:
            index = path[1]
            assert isinstance(index, int)
            removed = {key for i in chosen for key, value in self.changes[i].fields.items() if value is None}
            layer = [layer for layer in self.layers if layer.title not in removed][index]
            rest = tuple(part for i, part in enumerate(path[2:]) if i or part != getattr(layer, "kind", ""))
            rest = (layer.title, *rest)
        elif path[:1] == ("norm",) and len(path) > 2:  # the kind is part of the path of a validation error
            rest = ("norm", *path[2:])
        for i in reversed(chosen):
            fields: Any = self.changes[i].fields
            # the first part is a key of the block or a layer, the last may be missing in the data
            for part in rest[: max(1, len(rest) - 1)]:
                fields = fields.get(part) if isinstance(fields, dict) else None
            if fields is not None:
                return ("changes", i, *rest)
        return path

    def source_of(self, path: Path, layer: int) -> Path:
        """Returns the path in the spec of a path in block `layer`."""
        return self._source(path, self.changes_of(layer))

    def block(self, layer: int) -> Block:
        """Returns block `layer`, with its changes."""
        return self._blocks[layer]

    @property
    def every(self) -> tuple[Block, ...]:
        """All blocks, in order."""
        return self._blocks

    @property
    def all_layers(self) -> Iterator[tuple[int, int, Layer]]:
        """Yields every layer of every block, with the index of its block and its index in the block."""
        return ((i, j, layer) for i, block in enumerate(self.every) for j, layer in enumerate(block.layers))

    @property
    def modules(self) -> tuple[Between, ...]:
        """The modules between runs of blocks."""
        return ()

    @property
    def orders(self) -> tuple[tuple[float, tuple[int, ...]], ...]:
        """Every order in which programs run the blocks, with the share of the run at which it begins."""
        return ((0.0, tuple(range(self.count))),)

    @property
    def runs(self) -> tuple[int, ...]:
        """The indices of the blocks in the order in which they run at the end."""
        return self.orders[-1][1]

    def problems_in(self, dim: int, layers: int = 1) -> Iterator[Problem]:
        """Yields the problems of the blocks in a model of `dim` features. Paths are relative to the blocks.

        `layers` is ignored, because the blocks count their own layers.
        """
        for i, change in enumerate(self.changes):
            yield from self._condition_problems(i, change)
        by_path: dict[tuple[Path, str], Problem] = {}
        streams: tuple[str, ...] = (STREAM,)
        for index, block in enumerate(self.every):
            chosen = self.changes_of(index)
            changed = [
                problem.under(*path)
                for path, schedule in schedules_in(block)
                for problem in schedule.problems()
                if self._source(path, chosen) != path  # others are reported at their own place
            ]
            problems = (
                *changed,
                *block.problems_of_block(dim, index, self.count),
                *block.wiring_problems(streams, self.common, index, self.count),
            )
            streams = block.streams_after(streams)
            for problem in problems:
                path = self._source(problem.path, chosen)
                related = tuple((note, self._source(at, chosen)) for note, at in problem.related)
                moved = Problem(path, problem.code, problem.message, problem.hint, related)
                by_path.setdefault((path, problem.code), moved)
        yield from by_path.values()
        yield from self._common_problems(dim)
        if streams != (STREAM,) and not by_path:
            message = f"the last block leaves the streams {' and '.join(streams)}"
            hint = "give the last block a `write` of one expression, for example `0.5 * (a + b)`"
            yield Problem(("layers",), "S246", message, hint)
        if not by_path:
            yield from self.order_problems()

    def _common_problems(self, dim: int) -> Iterator[Problem]:
        """Yields the problems of the learned values that all blocks share."""
        sources = {name: set(value.reads.names.values()) for name, value in self.common.items() if value.reads}
        known = sorted((IDS, "x0", *self.common))
        for name, value in self.common.items():
            path: Path = ("common", name)
            yield from number_problem(value.init, (*path, "init"), 0, self.count)
            for block in filter(lambda block: block.reads_value(name), self.every):
                yield from width_problem(value, (*path, "shape"), block.values_width(dim))
            for unknown in sources.get(name, set()).difference(known):
                message = f"`{unknown}` is not a known value"
                yield Problem((*path, "of"), "S246", message, f"choose from {', '.join(known)}")
            if value.reads is not None and value.reads.outputs:
                yield Problem((*path, "of"), "S220", "no output exists before the first block", "read `x0`")
            if not any(name in names for names in sources.values()) and not any(
                block.reads_value(name) for block in self.every
            ):
                yield Problem(path, "S247", f"nothing reads the learned value `{name}`", "remove it")
        if circle := first_circle(sources):
            message = f"`{circle}` is computed from itself"
            yield Problem(("common", circle, "of"), "S246", message, "remove one of the reads")

    def _condition_problems(self, i: int, change: Change) -> Iterator[Problem]:
        path = ("changes", i, "where")
        holds = False
        for layer in range(self.count):
            try:
                holds |= condition_holds(change.where, {"layer": layer, "layers": self.count})
            except ExprError as error:
                yield Problem(path, "S240", f"in layer {layer}, {error.message}", error.hint or "change the condition")
                return
        if not holds:
            hint = f"layers are counted from 0 to {self.count - 1}"
            yield Problem(path, "S240", f"`{change.where}` holds in none of {self.count} layers", hint)
        titles = [layer.title for layer in self.layers]
        for key in change.model_extra or {}:
            if key not in titles:
                message = f"a block has no layer named {key}"
                yield Problem(("changes", i, key), "S254", message, f"layers are {', '.join(titles)}")

    def order_problems(self) -> Iterator[Problem]:
        """Yields the first problem of an output that a run reads before it exists, and the problems of the modules
        between runs."""
        for i, module in enumerate(self.modules):
            problem = next(self._module_problems(i, module), None)
            if problem is not None:
                yield problem.under("between", i)
        for _, order in self.orders:
            for run, i in enumerate(order):
                for path, wiring, _ in self.block(i).expressions():
                    for problem in output_problems(wiring, path, run, i, order, self.count):
                        yield Problem(self._source(problem.path, self.changes_of(i)), *_facts(problem))
                        return

    def _module_problems(self, i: int, module: Between) -> Iterator[Problem]:
        if module.name in TAKEN or any(other.name == module.name for other in self.modules[:i]):
            message = f"{module.name} is the name of another part of the model"
            yield Problem(("name",), "S207", message, "choose another `name:`")
        for name, learned in module.learn.items():
            yield from width_problem(learned, ("learn", name, "shape"), None)
        texts = module.read if isinstance(module.read, dict) else {"": module.read}
        streams = {stream for block in self.every for stream in block.streams_after((STREAM,))}
        known = streams if isinstance(module.read, dict) else {STREAM}
        for key, text in texts.items():
            path: Path = ("read", *((key,) if key else ()))
            wiring = parse_wiring(text)
            for name in wiring.names.values():
                if name not in known and name not in module.learn:
                    message = f"`{name}` is not a known value"
                    hint = f"choose from {', '.join(sorted((*known, *module.learn)))}"
                    yield Problem(path, "S246", message, hint)
            for _, order in self.orders:
                for run, layer in enumerate(order):
                    if module.number(run, order, self.count) is not None:
                        yield from output_problems(wiring, path, run, layer, order, self.count)

    def shared_by(self, i: int, shape: Shape) -> Iterator[Shared]:
        """Yields the computations that block `i` shares with others."""
        block = self.block(i)
        for layer in block.layers:
            yield from layer.shared(shape)
        for name in filter(block.reads_value, sorted(self.common)):
            label = name.replace(".", "_")
            wide = replace(shape, values=block.values_width(shape.dim))
            yield ModelValue(label, (label,), path=name, values=self.common, shape=wide)

    def shared(self, shape: Shape) -> tuple[Shared, ...]:
        """Returns the computations that the blocks share, each once."""
        shared = (computation for i in range(self.count) for computation in self.shared_by(i, shape))
        return tuple({computation.name: computation for computation in shared}.values())

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        """Returns the types of the state that the blocks store between tokens, by run, layer and key."""
        runs = enumerate(self.runs)
        return {f"{run}.{key}": type for run, i in runs for key, type in self.block(i).state(shape).items()}

    @property
    def reads_seen(self) -> bool:
        """True if a block, in an encoder, needs the mask of positions that hold tokens."""
        return any(layer.reads_seen for _, _, layer in self.all_layers)


def _listed(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else ()


def first_circle(sources: Mapping[str, Collection[str]]) -> str | None:
    """Returns the first name, in order, that reaches itself through the names that each name reads."""
    for name in sorted(sources):
        reached = set(sources[name])
        queue = list(reached)
        for other in queue:  # the list grows during the loop
            new = set(sources.get(other, ())) - reached
            reached |= new
            queue += new
        if name in reached:
            return name
    return None


def index_values(run: int, order: tuple[int, ...], count: int) -> Mapping[str, int]:
    """Returns the numbers that the formula of an output may read, in run `run` of an order of `count` blocks."""
    return dict(zip(INDEX, (order[run], count, run, len(order)), strict=True))


def output_problems(
    wiring: Wiring, path: Path, run: int, layer: int, order: tuple[int, ...], count: int
) -> Iterator[Problem]:
    """Yields a problem for each output that an expression reads in run `run` before it is there."""
    for index in wiring.outputs.values():
        try:
            source = formula_value(index, index_values(run, order, count))
        except ExprError as error:
            yield Problem(path, "S220", f"in layer {layer}, {error.message}", error.hint or "change the formula")
            continue
        if not 0 <= source < run:
            message = f"run {run}, of layer {layer}, reads output({source}), which does not exist by then"
            hint = f"outputs 0 to {run - 1} exist; limit `where`, or change the formula" if run else "run 0 reads `x0`"
            yield Problem(path, "S220", message, hint)


def _facts(problem: Problem) -> tuple[str, str, str]:
    return problem.code, problem.message, problem.hint


def _merge_block(base: Mapping[str, Any], fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the data of a block with the fields of a change."""
    merged = dict(base)
    for key, value in fields.items():
        if key in Block.model_fields:
            merged[key] = _merge(merged.get(key), value)
    layers = []
    for layer in base["layers"]:
        title = layer.get("name") or layer["kind"]
        change = fields.get(title, {}) if title not in Block.model_fields else {}
        if change is not None:
            layers.append(_merge(layer, {"name": title, **change} if _replaces(layer, change) else change))
    return {**merged, "layers": layers}


def _merge(base: Any, value: Any) -> Any:
    """Returns `base` with `value` merged in. Null removes an entry of a mapping, and another kind replaces it."""
    if not isinstance(base, Mapping) or not isinstance(value, Mapping) or _replaces(base, value):
        return value
    merged = {**base, **{key: _merge(base.get(key), inner) for key, inner in value.items()}}
    return {key: inner for key, inner in merged.items() if inner is not None}


def _replaces(base: Mapping[str, Any], value: Any) -> bool:
    return isinstance(value, Mapping) and "kind" in value and value["kind"] != base.get("kind", value["kind"])
