"""Lowers a stack of blocks. Each run of a block is a call, and equal blocks share a function."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from specc.compiler.architectures.block import Block
from specc.compiler.architectures.blocks import Between, Blocks, index_values
from specc.compiler.architectures.circuit import STREAM, Streams
from specc.compiler.architectures.function import Function, begin_parts, below
from specc.compiler.architectures.scope import Scope
from specc.compiler.blocks.context import CallSite, LoweringContext, Shape
from specc.compiler.blocks.wiring import IDS
from specc.compiler.expr.index import formula_value
from specc.compiler.expr.wiring import OUTPUT, VALUE, EarlierValue
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import Dim, TypeRuleError
from specc.compiler.programs.programs import LoweringError
from specc.compiler.records import record
from specc.compiler.strict import Path, Problem

DEFAULT_WRITE = f"{STREAM} + y"
NOTHING: Mapping[Any, str] = {}


class Body(NamedTuple):
    """The lowered function of a block.

    Attributes:
        b: The builder of the function.
        outputs: The outputs of the function, by label.
        state: The new state, by layer and key.
        shown: The attention values that the function returns, by layer.
    """

    b: Builder
    outputs: Mapping[str, str]
    state: Mapping[str, str]
    shown: Mapping[str, str]


@record
class Stack:
    """Lowers blocks in one program. The blocks have the paths 0, 1, ... under the path of the call site. `bodies`
    contains the functions so far: a block whose inputs have the types of an earlier equal block is not lowered again.
    """

    blocks: Blocks
    shape: Shape
    site: CallSite
    bodies: dict[tuple[object, ...], Body] = field(default_factory=dict, compare=False)

    @cached_property
    def labels(self) -> Sequence[Mapping[str, str]]:
        """For each block, the names of the block's inputs for shared values. The keys are the references of the shared
        values. If two inputs would have the same name, each name begins with the name of the computation."""
        labels: list[Mapping[str, str]] = []
        for i in range(self.blocks.count):
            shared = dict.fromkeys(self.blocks.shared_by(i, self.shape))
            known = [label for entry in shared for label in entry.labels]
            labels.append(
                {
                    ref: label if known.count(label) == 1 else f"{entry.name}_{label}"
                    for entry in shared
                    for ref, label in zip(entry.refs, entry.labels, strict=True)
                }
            )
        return labels

    @cached_property
    def shown(self) -> Sequence[tuple[str, ...]]:
        """For each block, the titles of the attention layers whose values `v` the block returns.

        These are the layers whose values an expression reads with `value(...)`.
        """
        read = {v.layer for block in self.blocks.every for v in block.circuit.earlier if v.function == VALUE}
        return [
            tuple(layer.title for layer in block.layers if layer.title in read and layer.head_values(self.shape.dim))
            for block in self.blocks.every
        ]

    def run(self, b: Builder, x: str, context: LoweringContext) -> tuple[str, dict[str, str]]:
        """Adds one call per run of a block.

        The arguments of a call are in this order: the stream, the values that all blocks read, the state, the values
        that only some blocks read, and the outputs of earlier runs.

        Args:
            b: The builder of the program.
            x: the input of the first block, [B, T, D].
            context: the values that the blocks can read. If `context.extends` is true, `context.cache` is the previous
                state.

        Returns:
            The output of the last block, and the new state by run, layer and key.

        Raises:
            LoweringError: if the shapes or dtypes in a block do not match.
        """
        outer, runs = b.scope, self.blocks.runs
        context = replace(context, embedded=x)
        streams: Streams = (STREAM,)
        state: dict[str, str] = {}
        # For each run: its output, and the attention values of its layers by title
        outputs: list[Mapping[str, str]] = []
        for run, i in enumerate(runs):
            values = index_values(run, runs, self.blocks.count)

            def source(read: Sequence[EarlierValue], values: Mapping[str, int] = values) -> Mapping[EarlierValue, str]:
                return {value: outputs[formula_value(value.index, values)][value.layer] for value in read}

            b.scope = ""
            for module in self.blocks.modules:
                number = module.number(run, runs, self.blocks.count)
                if number is not None:
                    x = self._between(b, module, number, x, source(module.circuit.earlier), streams)
            b.scope = self.site.at
            block = self.blocks.every[i]
            x, new, head_values = BlockCall(self, b, i, streams, context).add(x, source(block.circuit.earlier), run)
            streams = block.circuit.streams_after(streams)
            state |= {f"{run}.{key}": ref for key, ref in new.items()}
            outputs.append({"": x, **head_values})
        b.scope = outer
        return x, state

    def _between(
        self, outer: Builder, module: Between, number: int, x: str, source: Mapping[EarlierValue, str], streams: Streams
    ) -> str:
        """Adds the call of a module between runs of blocks. Returns the stream after the module.

        The module is not part of a block, because a block may run with and without the module.

        Args:
            outer: The builder of the program.
            module: The module.
            number: The index of the module.
            x: The stream.
            source: The values that the module reads from earlier runs of blocks.
            streams: The names of the streams.
        """
        function, labels = Function(outer, self.shape.tables), labels_of(module.circuit.earlier)
        for name, ref in {STREAM: x, **{labels[value]: ref for value, ref in source.items()}}.items():
            function.take(name, ref, outer.types[ref].with_shape("B", "T", outer.types[ref].width))
        scope = Scope(function.b, self.shape, {STREAM: STREAM}, module.learn, labels)
        scope.split(streams)
        parts = scope.streams
        scope.streams = parts if isinstance(module.read, dict) else {STREAM: scope.value}
        result = scope.wire(module.read, "joined", f"{module.name}_factor")
        scope.streams = result if isinstance(module.read, dict) else {**parts, streams[0]: result[STREAM]}
        at, owner = f"{module.name}.{number}", module.name.removesuffix("s")
        names = (f"{owner}.forward",) if len(streams) == 1 else (f"{owner}.streams", f"{owner}.forward")
        return function.call(at, names, at, {"x": scope.joined()}, [outer.types[x]])[0]

    def begin(self, b: Builder, context: LoweringContext) -> dict[str, str]:
        """Adds the calls that compute the state of every block before the first token. Returns the state by block,
        layer and key."""
        state: dict[str, str] = {}
        outer, b.scope = b.scope, self.site.at
        for i, block in enumerate(self.blocks.every):
            names, at = self.names(i, ("begin",), bool(block.circuit.earlier)), f"{self.site.at}.{i}"
            begun = begin_parts(b, [(layer, self.shape) for layer in block.layers], context, names, at, str(i))
            state |= {f"{i}.{key}": ref for key, ref in begun.items()}
        b.scope = outer
        return state

    def names(self, i: int, methods: Sequence[str], skips: bool) -> tuple[str, ...]:
        """Returns the names CLASS.METHOD that a function of block `i` may have, most preferred first. All functions of
        a block belong to one class.

        The first function of a block determines the class: the class of an earlier block with an equal function, or a
        new class. `methods` are candidates for METHOD, and `skips` states whether the block reads values of earlier
        runs.
        """
        owners, at = self.shape.tables.owners, self.site.at
        kind = f"skip_{self.site.owner}" if skips else self.site.owner
        before = [owner for place, owner in owners.items() if place.rpartition(".")[0] == at]
        known = owners.get(f"{at}.{i}")
        classes = [known] if known else dict.fromkeys((*before, kind, f"{kind}{i}"))
        return tuple(f"{owner}.{method}" for owner in classes for method in methods)


@dataclass
class BlockCall:
    """One call of a block."""

    stack: Stack
    outer: Builder
    i: int
    streams: Streams
    context: LoweringContext

    @property
    def block(self) -> Block:
        return self.stack.blocks.every[self.i]

    def add(
        self, x: str, source: Mapping[EarlierValue, str], run: int
    ) -> tuple[str, Mapping[str, str], Mapping[str, str]]:
        """Adds the call to the program.

        Args:
            x: the stream before the block. Several streams are concatenated.
            source: the values that the block reads from earlier runs of blocks.
            run: the index of the run.

        Returns:
            Three values: the stream after the block, the new state of the block by layer and key, and the attention
            values that the call returns, by layer.
        """
        stack, outer, context = self.stack, self.outer, self.context
        caches = self.block.state(stack.shape) if context.extends else {}
        labels = labels_of(tuple(source))
        before, later = self._values(source, labels)
        function, stream = Function(outer, stack.shape.tables), outer.types[x]

        def take(values: Mapping[str, str]) -> None:
            for name, ref in values.items():
                type = outer.types[ref]
                dims = type.shape if ref.startswith("@") else _tokens(type.shape, stream.shape[1])
                function.take(name, ref, type.with_shape(*dims))

        take({STREAM: x, **before})
        state = {
            key: function.take(key.replace(".", "_"), context.cache[f"{run}.{key}"], type)
            for key, type in caches.items()
        }
        take(later)
        key = id(self.block), self.streams, tuple(function.b.inputs)  # blocks with equal changes are one object
        if key not in stack.bodies:
            function.b.origins[STREAM] = outer.origin(x)
            stack.bodies[key] = self._lowered(function.b, {**before, **later}, state, labels)
        function.b, outputs, new, shown = stack.bodies[key]
        method = "extend" if context.extends else "forward"
        # the scoring function needs another name if the training function has dropout or losses
        methods = (method,) if context.extends or context.training else (method, "score")
        if phase := stack.site.phase:
            methods = (phase,) if context.training else (phase, f"{phase}_score")
        names, types = stack.names(self.i, methods, bool(source)), function.b.types
        again = stack.blocks.runs[:run].count(self.i)
        node = f"{self.i}.again{again}" if again else str(self.i)
        results = [stream.with_shape(*stream.shape[:2], types[outputs["x"]].width), *(caches[key] for key in new)]
        results += [stream.with_shape(*stream.shape[:2], *types[ref].shape[2:]) for ref in shown.values()]
        y, *refs = function.call(node, names, f"{stack.site.at}.{self.i}", outputs, results, layer=self.i)
        return y, dict(zip(new, refs, strict=False)), dict(zip(shown, refs[len(new) :], strict=True))

    def _lowered(
        self, b: Builder, inputs: Collection[str], state: Mapping[str, str], labels: Mapping[EarlierValue, str]
    ) -> Body:
        """Adds the nodes of the block to the builder `b` of a function with the given inputs."""
        stack, context = self.stack, self.context
        known = {name: name if name in inputs else "" for name in ("positions", "table", "memory", "seen")}
        weights = {name: _weight_label(name) for name in context.weights}
        inside = replace(context, shared=stack.labels[self.i], weights=weights, **known)  # type: ignore[arg-type]
        common = {name: name.replace(".", "_") for name in stack.blocks.common}
        scope, new = self.body(b, STREAM, inside, state, labels, common)
        shown = {title: scope.head_values[title] for title in stack.shown[self.i]}
        outputs = {"x": scope.joined(), **{key.replace(".", "_"): ref for key, ref in new.items()}}
        return Body(b, outputs | {f"{title}_values": ref for title, ref in shown.items()}, new, shown)

    def body(
        self,
        b: Builder,
        x: str,
        context: LoweringContext,
        state: Mapping[str, str] = NOTHING,
        earlier: Mapping[EarlierValue, str] = NOTHING,
        common: Mapping[str, str] = NOTHING,
        at: str = "",
    ) -> tuple[Scope, Mapping[str, str]]:
        """Adds the nodes of the block to its function. Returns the scope of the function, and the new state by layer
        and key.

        Args:
            b: The builder of the function.
            x: The stream. Several streams are concatenated.
            context: The values that the layers of the block can read.
            state: The inputs that hold the previous state, by layer and key.
            earlier: The inputs that hold values of earlier runs of blocks.
            common: Additional values that expressions can read, by name.
            at: The prefix of the names of nodes.
        """
        block, shape, part = self.block, self.stack.shape, Path()
        learned, shape_of = block.circuit.learned, partial(block.shape_of, shape)
        scope = Scope(b, shape, {STREAM: x}, learned, earlier, common, at, block.norm, shape_of)
        new: dict[str, str] = {}
        normed: dict[str, str] = {}
        try:
            scope.split(self.streams)
            if block.read is not None:
                part = ("read",)
                scope.enter("read")
                scope.streams = scope.wire(block.read, "x", "read_factor", self.stack.blocks.read)
                scope.check_streams()
            for j, layer in enumerate(block.layers):
                part = ("layers", j)
                x = scope.input(layer)
                h = normed.get(x) or scope.normalized("before", x)
                if block.norm is None or block.norm.shared or block.norm.op.arity == 1:  # computed once
                    normed[x] = h
                inside = replace(context, cache=below(f"{layer.title}.", state))
                lowered = scope.add(layer, h, inside, None if block.write is not None else DEFAULT_WRITE)
                scope.check_streams()
                new |= {f"{layer.title}.{key}": ref for key, ref in lowered.items()}
            if block.write is not None:
                part = ("write",)
                scope.enter("write")
                scope.write(block.write, "write_factor", replaced=scope.values)
                scope.check_streams()
        except TypeRuleError as error:
            raise LoweringError((self._mismatch(error, part, b),)) from None
        return scope, new

    def _values(
        self, source: Mapping[EarlierValue, str], labels: Mapping[EarlierValue, str]
    ) -> Iterator[Mapping[str, str]]:
        """Yields two mappings from input names of the block's function to the references that the call passes. The
        first mapping has the inputs that all blocks of the stack have. The second mapping has the inputs that only some
        blocks have.

        In decoding, the output of the encoder is left out, because the state of the blocks contains the keys and
        values that were computed from this output.

        Args:
            source: The references of the values that the block reads from earlier runs of blocks.
            labels: The input names of these values.
        """
        context, blocks, traits = self.context, self.stack.blocks, self.stack.blocks.traits
        names = [by_ref.values() for by_ref in self.stack.labels]
        shared = {label: context.shared[ref] for ref, label in self.stack.labels[self.i].items()}
        by_all = {label: ref for label, ref in shared.items() if all(label in others for others in names)}
        mixes = [block.reads_value("x0") for block in blocks.every]
        x0 = {"x0": context.embedded} if mixes[self.i] else {}
        masked = "reads_source" in traits or ("reads_seen" in traits and not self.stack.shape.causal)
        further = {
            "memory": context.memory if "reads_source" in traits and not context.extends else "",
            "seen": context.seen if masked else "",
            **{_weight_label(name): ref for name, ref in context.weights.items()},
            "positions": context.positions if context.extends else "",
            "table": context.table,
        }
        yield {**(x0 if all(mixes) else {}), **by_all, **{name: ref for name, ref in further.items() if ref}}
        later = {label: ref for label, ref in shared.items() if label not in by_all}
        later |= {} if all(mixes) else x0
        later |= {labels[value]: ref for value, ref in source.items()}
        yield later | ({IDS: context.ids} if self.block.reads_value(IDS) else {})

    def _mismatch(self, error: TypeRuleError, part: Path, b: Builder) -> Problem:
        site, places = self.stack.site, self.stack.shape.tables.places
        origin = b.origins[STREAM]
        node = error.message.partition(" ")[0]
        message = error.message.replace(node, f"{site.at}.{self.i}.{node}", 1)
        shown = origin in places and origin in error.origins
        related = ((f"{origin} is computed here", places[origin]),) if shown else ()
        hint = error.hint or f"make the widths equal; the model's `dim` is {self.stack.shape.dim}"
        return Problem((*site.place, *self.stack.blocks.source_of(part, self.i)), "S301", message, hint, related)


def labels_of(values: Sequence[EarlierValue]) -> Mapping[EarlierValue, str]:
    """Returns the input name of each value that a block function reads from an earlier run."""
    labels: dict[EarlierValue, str] = {}
    for value in values:
        name = "skip" if value.function == OUTPUT else f"{value.layer}_skip"
        known = sum(label.rstrip("0123456789") == name for label in labels.values())
        labels[value] = f"{name}{known + 1}" if known else name
    return labels


def _weight_label(loss: str) -> str:
    return f"{loss.replace('.', '_')}_weight"


def _tokens(shape: Sequence[Dim], length: Dim) -> Iterator[Dim]:
    """Yields the dims of `shape`, with "T" in place of `length`, the number of tokens."""
    first = 1 if shape[:1] == ("B",) else 0
    for i, dim in enumerate(shape):
        yield "T" if dim == length and (i == first or isinstance(dim, str)) else dim
