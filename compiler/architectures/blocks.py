"""The blocks of a stack: the fields of one block, and changes to these fields in some blocks."""

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr, model_validator

from specc.compiler.architectures.block import AnyLayer, Block
from specc.compiler.architectures.changes import Change, changed_block, source_of
from specc.compiler.architectures.circuit import STREAM, Circuit, Streams
from specc.compiler.blocks.context import Shape, Shared
from specc.compiler.blocks.model_values import ModelValue
from specc.compiler.blocks.parts import Layer, Trait
from specc.compiler.blocks.wiring import Expressions, Learned, condition, failure
from specc.compiler.changing_values import Schedule
from specc.compiler.expr import ExprError, Var
from specc.compiler.expr.index import condition_holds, formula_value
from specc.compiler.expr.wiring import INDEX, OUTPUT, VALUE, Wiring
from specc.compiler.ir.types import TensorType
from specc.compiler.strict import ExprText, LearnedName, PartName, Path, Problem, StrictModel, later, values_in

TAKEN = ("blocks", "embed", "head", "norm")  # names that other parts of a model use
# Names that other values of a program use
VALUES = ("cos", "last", "memory", "norm", "positions", "seen", "sin", "starts", "table", "targets")


class Between(StrictModel):
    """Modules between runs of blocks. A run is one execution of a block. A module precedes each run for which the
    condition `where` holds.

    Module `name`.0 precedes the first of these runs, `name`.1 the second, and so on. Each module has separate learned
    values.

    Attributes:
        name: the name of the modules.
        where: a condition of `run` and `layer`, both counted from 0, and of the totals `runs` and `layers`.
        learn: the learned values of a module, by name.
        read: an expression for the residual stream after a module. If there are several streams, `x` is the first.
    """

    name: PartName
    where: Annotated[ExprText, condition(*INDEX)]
    learn: dict[LearnedName, Learned] = Field({}, exclude_if=operator.not_)
    read: Expressions

    @property
    def circuit(self) -> Circuit:
        return Circuit(self.learn, self.read)

    def number(self, run: int, order: tuple[int, ...], count: int) -> int | None:
        """Returns the index of the module before a run, or None if no module precedes the run. `run` is the index of
        the run, `order` lists the block of each run, and `count` is the number of blocks."""
        holds = [condition_holds(self.where, index_values(i, order, count)) for i in range(run + 1)]
        return sum(holds) - 1 if holds[-1] else None


class Blocks(Block):
    """A stack of blocks: the fields of one block, and changes to these fields in some blocks. `layer` is the index of a
    block, counted from 0.

    Attributes:
        count: the number of blocks.
        common: learned values that all blocks share. A learned value may read `ids`, `x0` and other learned values.
        changes: the changes to the fields in some blocks.
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
                if isinstance(title, str) and isinstance(fields := change.get(title), dict):
                    yield ("changes", i, title), AnyLayer, {"kind": layer["kind"], **fields}

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        known: dict[tuple[int, ...], Block] = {}
        for layer in range(self.count):
            changes = self.changes_of(layer)
            if tuple(changes) not in known:
                known[tuple(changes)] = changed_block(self, changes)
        self._blocks = tuple(known[tuple(self.changes_of(layer))] for layer in range(self.count))
        return self

    def changes_of(self, layer: int) -> Mapping[int, Change]:
        """Returns the changes to block `layer`. A key is the index of a change in `changes`."""
        values = {"layer": layer, "layers": self.count}
        try:
            return {i: change for i, change in enumerate(self.changes) if condition_holds(change.where, values)}
        except ExprError:  # reported by `problems_in`
            return {}

    def source_of(self, path: Path, layer: int) -> Path:
        return source_of(path, self, self.changes_of(layer))

    @property
    def every(self) -> tuple[Block, ...]:
        return self._blocks

    @property
    def all_layers(self) -> Iterator[tuple[int, int, Layer]]:
        """Yields each layer of each block, as (index of the block, index of the layer in the block, layer)."""
        return ((i, j, layer) for i, block in enumerate(self.every) for j, layer in enumerate(block.layers))

    @property
    def prefix(self) -> str:
        return ""

    @property
    def modules(self) -> tuple[Between, ...]:
        return ()

    @property
    def orders(self) -> tuple[tuple[float, tuple[int, ...]], ...]:
        """The orders in which the blocks are executed, as pairs (completed share of the training at which the order
        begins, block indices in execution order)."""
        return ((0.0, tuple(range(self.count))),)

    @property
    def runs(self) -> tuple[int, ...]:
        """The index of the block that each run executes. A run is one execution of a block. If the execution order
        changes during training, these are the runs of the last order."""
        return self.orders[-1][1]

    def problems_in(self, shape: Shape) -> Iterator[Problem]:
        for i, change in enumerate(self.changes):
            yield from self._condition_problems(i, change)
        by_path: dict[tuple[Path, str], Problem] = {}
        streams: Streams = (STREAM,)
        for index, block in enumerate(self.every):
            source = partial(self.source_of, layer=index)
            problems = [
                problem.under(*path)
                for path, schedule in values_in(block, Schedule)
                for problem in schedule.problems()
                if source(path) != path  # other errors are reported at the field that causes them
            ]
            problems += block.problems_of(replace(shape, layer=index), streams, ("x0", *self.common))
            streams = block.circuit.streams_after(streams)
            for problem in problems:
                moved = problem.moved(source)
                by_path.setdefault((moved.path, moved.code), moved)
        yield from by_path.values()
        yield from (problem.moved(lambda path: ("common", *path[1:])) for problem in self._common_problems(shape))
        if streams != (STREAM,) and not by_path:
            message = f"the last block must end with one stream, but ends with {' and '.join(streams)}"
            hint = "give the last block a `write` of one expression, for example `0.5 * (a + b)`"
            yield Problem(("layers",), "S246", message, hint)
        if not by_path:
            yield from self.order_problems(shape)

    def _common_problems(self, shape: Shape) -> Iterator[Problem]:
        reads = {name for block in self.every for name in block.circuit.reads}
        circuit = Circuit(self.common)
        yield from circuit.problems((), ("x0",), None, self.count, reads)
        for name, value in self.common.items():
            if name in VALUES:
                message = f"another value of the model has the name `{name}`"
                yield Problem(("learn", name), "S207", message, "choose another name")
            for block in (block for block in self.every if name in self._common_of(block)):
                yield from value.size_problem(block.shape_of(shape).sizes, "learn", name)
            if value.reads is not None and value.reads.earlier:
                message = "this value is computed before the first block, when no output exists yet"
                yield Problem(("learn", name, "of"), "S220", message, "read `x0`")

    def _common_of(self, block: Block) -> Collection[str]:
        """Returns the names of the values of `common` that a block reads, directly or through another value."""
        names = [name for name in self.common if block.reads_value(name)]
        for name in names:  # the list grows during the loop
            reads = self.common[name].reads
            names += [] if reads is None else {*reads.names.values()} & self.common.keys() - {*names}
        return names

    def _condition_problems(self, i: int, change: Change) -> Iterator[Problem]:
        path = ("changes", i, "where")
        holds = [partial(condition_holds, change.where, {"layer": k, "layers": self.count}) for k in range(self.count)]
        for layer, test in enumerate(holds):
            if problems := tuple(failure(test, path, "S240", "change the condition", f"in layer {layer}, ")):
                yield from problems
                return
        if not any(test() for test in holds):
            hint = f"layers are counted from 0 to {self.count - 1}" if self.count > 1 else "the only layer is 0"
            yield Problem(path, "S240", f"`{change.where}` is true in no layer", hint)
        titles = [layer.title for layer in self.layers]
        for key in change.model_extra or {}:
            if key not in titles:
                message = f"a block has no layer with the name `{key}`"
                yield Problem(("changes", i, key), "S254", message, f"layers are {', '.join(titles)}")

    def order_problems(self, shape: Shape) -> Iterator[Problem]:
        """Yields the problems of the modules between runs of blocks, at most one per module. Also yields a problem for
        the first expression that reads a value before this value is computed."""
        for i, module in enumerate(self.modules):
            problem = next(self._module_problems(i, module, shape), None)
            if problem is not None:
                yield problem.under("between", i)
        for _, order in self.orders:
            for run, i in enumerate(order):
                for path, wiring, title in self.every[i].circuit.expressions:
                    problems = chain(
                        earlier_problems(wiring, path, run, i, order, self.count),
                        self._head_value_problems(wiring, path, title, run, order, shape.dim),
                    )
                    for problem in problems:
                        yield problem.moved(partial(self.source_of, layer=i))
                        return

    def _head_value_problems(
        self, wiring: Wiring, path: Path, title: str, run: int, order: tuple[int, ...], dim: int
    ) -> Iterator[Problem]:
        """Checks each `value(k)` that the expression `wiring` reads in run `run`. `value(k)` stands for the attention
        values of run k, and `order` lists the block of each run. Yields a problem if run k has no attention layer
        `title`, or if the attention values of both runs differ in size."""
        layer = next((layer for layer in self.every[order[run]].layers if layer.title == title), None)
        for variable, value in wiring.earlier.items():
            if value.function != VALUE or layer is None:
                continue
            source = order[formula_value(value.index, index_values(run, order, self.count))]
            sizes = next((part.head_values(dim) for part in self.every[source].layers if part.title == title), None)
            if sizes is None:
                message = (
                    f"layer {order[run]} reads `{value}`, but layer {source} has no attention with the name `{title}`"
                )
                hint = "read the values of another layer"
                yield Problem(path, "S220", message, hint, offset=wiring.column(Var(variable)))
            elif sizes != (wanted := layer.head_values(dim)):
                (heads, size), have = wanted or (0, 0), f"{sizes[0]} heads of {sizes[1]} channels"
                message = f"layer {order[run]} has values of {heads} heads of {size} channels, but `{value}` has {have}"
                hint = "make `kv_heads` and `head_dim` of the two layers equal"
                yield Problem(path, "S220", message, hint, offset=wiring.column(Var(variable)))

    def _module_problems(self, i: int, module: Between, shape: Shape) -> Iterator[Problem]:
        for _, order in self.orders:
            for run in range(len(order)):
                test = partial(module.number, run, order, self.count)
                where = f"before run {run} of {len(order)}, "
                if problems := tuple(failure(test, ("where",), "S240", "change the condition", where)):
                    yield from problems
                    return
        if module.name in TAKEN or any(other.name == module.name for other in self.modules[:i]):
            message = f"another part of the model has the name `{module.name}`"
            yield Problem(("name",), "S207", message, "choose another `name:`")
        for name, learned in module.learn.items():
            yield from learned.size_problem(shape.sizes, "learn", name)
        several = {stream: "" for block in self.every for stream in block.circuit.streams_after((STREAM,))}
        streams = tuple(several) if isinstance(module.read, dict) else (STREAM,)
        yield from module.circuit.problems(streams, (), None, self.count)
        for path, wiring, _ in module.circuit.expressions:
            for _, order in self.orders:
                for run, layer in enumerate(order):
                    if module.number(run, order, self.count) is not None:
                        yield from earlier_problems(wiring, path, run, layer, order, self.count)

    def shared_by(self, i: int, shape: Shape) -> Iterator[Shared]:
        """Yields the shared computations that block `i` reads."""
        block = self.every[i]
        for layer in block.layers:
            yield from layer.shared(shape)
        for name in filter(block.reads_value, sorted(self.common)):
            label = name.replace(".", "_")
            wide = block.shape_of(shape)
            yield ModelValue(label, (label,), path=name, prefix=self.prefix, values=self.common, shape=wide)

    def shared(self, shape: Shape) -> tuple[Shared, ...]:
        shared = (computation for i in range(self.count) for computation in self.shared_by(i, shape))
        return tuple({computation.name: computation for computation in shared}.values())

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        """Returns the types of the blocks' decoding state, such as caches, by run, layer and key."""
        runs = enumerate(self.runs)
        return {f"{run}.{key}": type for run, i in runs for key, type in self.every[i].state(shape).items()}

    @property
    def traits(self) -> frozenset[Trait]:
        return frozenset().union(*(layer.traits for _, _, layer in self.all_layers))

    @property
    def places(self) -> Iterator[tuple[str, Path]]:
        for index in range(self.count):
            for i, layer in enumerate(self.layers):
                yield f"{index}.{layer.title}", ("layers", i)


def _listed(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else ()


def index_values(run: int, order: tuple[int, ...], count: int) -> Mapping[str, int]:
    """Returns the values of the names that the formula k in `output(k)` may read. `run` is the index of the run that
    evaluates the formula, `order` lists the block of each run, and `count` is the number of blocks."""
    return dict(zip(INDEX, (order[run], count, run, len(order)), strict=True))


def earlier_problems(
    wiring: Wiring, path: Path, run: int, layer: int, order: tuple[int, ...], count: int
) -> Iterator[Problem]:
    """Checks each `output(k)` and `value(k)` in an expression. Yields a problem if the formula k has no value, or if
    run k is not before run `run`.

    Args:
        wiring: The expression.
        path: The spec path of the expression.
        run: The index of the run.
        layer: The index of the block with the expression.
        order: The block of each run.
        count: The number of blocks.
    """
    for variable, value in wiring.earlier.items():
        try:
            source = formula_value(value.index, index_values(run, order, count))
        except ExprError as error:
            message, hint = f"in layer {layer}, {error.message}", error.hint or "change the formula"
            yield Problem(path, "S220", message, hint, offset=wiring.column(Var(variable)))
            continue
        if not 0 <= source < run:
            read = replace(value, index=str(source))
            message = f"block {layer}, in run {run} of the blocks, reads `{read}`, but can read only earlier runs"
            first = "in run 0, read `x0`" if value.function == OUTPUT else "read it in a change with `where: layer > 0`"
            earlier = f"runs 0 to {run - 1}" if run > 1 else "run 0"
            hint = f"read one of {earlier}: limit `where`, or change the formula" if run else first
            yield Problem(path, "S220", message, hint, offset=wiring.column(Var(variable)))
