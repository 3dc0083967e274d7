"""A stack of blocks that differ only in their index: each run of a block is a call, and equal blocks share a
function."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field

from specc.compiler import blocks
from specc.compiler.architectures.lanes import Lanes
from specc.compiler.blocks.context import CallSite, LoweringContext, Shape, Shared
from specc.compiler.blocks.init import stated
from specc.compiler.blocks.norm import Rms
from specc.compiler.blocks.parts import Layer, LayerList, Mix, Norm, Skips, formula_problems, layer_problems
from specc.compiler.catalog import models
from specc.compiler.ir.graph import Builder, Dim, Graph, TensorType, TypeRuleError, output_ref
from specc.compiler.ops.region import Call, returned
from specc.compiler.programs.programs import LoweringError
from specc.compiler.strict import Path, Problem, StrictModel, later


def one_of(role: type[StrictModel]) -> Any:
    """Returns the union of all block kinds that subclass `role`, discriminated by `kind`."""
    members = models(blocks, role, "kind")
    if len(members) == 1:
        return members[0]
    return Annotated[Union[members], Field(discriminator="kind")]  # noqa: UP007  (a tuple of classes, not two)


if TYPE_CHECKING:
    AnyLayer = Layer
    AnyMix = Mix
    AnyNorm = Norm
    AnySkips = Skips
else:
    AnyLayer, AnyMix, AnyNorm, AnySkips = map(one_of, (Layer, Mix, Norm, Skips))


class Blocks(StrictModel):
    """Blocks with the same fields. Each block is its layers in order, each after a norm.

    Attributes:
        count: the number of blocks.
        norm: the norm before each layer.
        skips: skip connections between blocks.
        mix: how each block mixes the first block's input into the stream.
        parallel: the blocks, counted from 0, in which all layers read one norm of the block's input, and their values
            are added to it together.
        lanes: two residual lanes.
        layers: the layers of a block.
    """

    count: Annotated[int, Field(gt=0, le=1000)]
    norm: AnyNorm = Rms(kind="rms")
    skips: AnySkips | None = None
    mix: AnyMix | None = later(None)
    parallel: LayerList | None = later(None)
    lanes: Lanes | None = later(None)
    layers: Annotated[tuple[AnyLayer, ...], Field(min_length=1, max_length=64)]

    @property
    def order(self) -> tuple[int, ...]:
        """The indices of the blocks in the order in which they run."""
        return tuple(range(self.count))

    @property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """Every order in which a program runs the blocks."""
        return (self.order,)

    def _skips_of(self, order: Sequence[int]) -> Mapping[int, int]:
        return self.skips.sources(len(order)) if self.skips is not None else {}

    @property
    def loops(self) -> bool:
        """True if a block may run more than once. Skip connections are then separate functions, outside the blocks."""
        return False

    def problems_in(self, dim: int, layers: int = 1) -> Iterator[Problem]:
        """Yields the problems of the blocks in a model of `dim` features. Paths are relative to the blocks.

        `layers` is ignored, because the blocks count their own layers.
        """
        yield from formula_problems(self.norm.scale, ("norm", "scale"), self.count)
        if self.skips is not None and not self.skips.sources(len(self.order)):
            message = f"skips connect nothing in {self.count} block{'s' if self.count > 1 else ''}"
            yield Problem(("skips",), "S220", message, "take them out, or use more blocks")
        yield from layer_problems(self.parallel, ("parallel",), self.count)
        if self.lanes is not None:
            found = dict.fromkeys(
                problem
                for order in self.orders
                for problem in self.lanes.problems_in(self.layers, order, self.parallel or (), self._skips_of(order))
            )
            yield from (problem.under("lanes") for problem in found)
        titles: dict[str, int] = {}
        for i, layer in enumerate(self.layers):
            here: Path = ("layers", i)
            if layer.residual != "learned":
                yield from formula_problems(layer.residual, (*here, "residual"), self.count)
            yield from (problem.under(*here) for problem in layer.problems_in(dim, self.count))
            if (first := titles.setdefault(layer.title, i)) != i:
                message = f"two layers of a block are named {layer.title}"
                related = (("the first one", ("layers", first)),)
                yield Problem(here, "S207", message, "give one of them a `name:`", related)

    def shared(self, shape: Shape) -> tuple[Shared, ...]:
        """Returns the computations that the blocks share, each once."""
        return tuple({one.name: one for layer in self.layers for one in layer.shared(shape)}.values())

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        """Returns the types of the state that the blocks store between tokens, by run, layer and key."""
        one = self.state_of_one(shape)
        return {f"{run}.{key}": kept for run in range(len(self.order)) for key, kept in one.items()}

    def state_of_one(self, shape: Shape) -> Mapping[str, TensorType]:
        """Returns the types of the state that each block stores between tokens, by layer and key."""
        return {f"{layer.title}.{key}": kept for layer in self.layers for key, kept in layer.state(shape).items()}

    @property
    def reads_seen(self) -> bool:
        """True if a block, in an encoder, needs the mask of positions that hold tokens."""
        return any(layer.reads_seen for layer in self.layers)

    def scalars(self, i: int, layers: int) -> dict[str, float]:
        """Returns the scalars that block `i` binds in a model of `layers` blocks, by name."""
        found = dict(self.norm.scalars(i, layers))
        for layer in self.layers:
            found |= layer.scalars(i, layers)
        return found

    @property
    def formulas(self) -> Mapping[str, str]:
        """The formulas of the scalars, by name."""
        found = dict(self.norm.formulas)
        for layer in self.layers:
            found |= layer.formulas
        return found


@dataclass(frozen=True)
class Stack:
    """The lowering of blocks in one program, at the paths 0, 1, ... under the site's. `order` overrides the blocks'
    order."""

    blocks: Blocks
    shape: Shape
    site: CallSite
    order: tuple[int, ...] | None = None

    def run(self, b: Builder, x: str, context: LoweringContext) -> tuple[str, dict[str, str]]:
        """Adds one call per run of a block.

        The arguments of a call are, in order: the stream; the first block's input, if blocks mix it in; the values that
        all blocks share or read; the state; the values that only some blocks share; and an earlier block's output.

        Args:
            b: the builder of the program.
            x: the input of the first block, [B, T, D].
            context: the values that the blocks can read. If it `extends` a sequence, `context.cache` is the previous
                state.

        Returns:
            The last block's value, and the new state by run, layer and key.

        Raises:
            LoweringError: if the shapes or dtypes in a block do not match.
        """
        blocks, outer, first = self.blocks, b.scope, x
        b.scope = self.site.at
        sources = self._sources
        order = self.runs
        caches = blocks.state_of_one(self.shape) if context.extends else {}
        state: dict[str, str] = {}
        outputs: list[str] = []
        for run, i in enumerate(order):
            skip = {"skip": outputs[sources[run]]} if run in sources else {}
            if skip and blocks.loops:
                x, skip = self._joined(b, list(sources).index(run), x, skip["skip"]), {}
            some = self._shared(context, i, False)
            given = {**({"x0": first} if blocks.mix else {}), **self._shared(context, i, True), **self._read(context)}
            kept = [context.cache[f"{run}.{key}"] for key in caches]
            body, changed = self._body(b, i, context, given, caches, {**some, **skip}, x)
            args = (x, *given.values(), *kept, *some.values(), *skip.values())
            wide = b.types[x].with_shape(*b.types[x].shape[:-1], body.types[body.outputs[0][1]].width)
            returns = returned([wide, *(caches[key] for key in changed)])
            layers = self.shape.layers
            scalars = blocks.scalars(i, layers)
            texts = {name: str(stated(text, layers=float(layers))) for name, text in blocks.formulas.items()}
            formulas = tuple((name, text) for name, text in texts.items() if name in scalars)
            call = Call(body.name, f"{self.site.at}.{i}", returns, tuple(scalars.items()), formulas=formulas)
            again = order[:run].count(i)
            x = b.add(f"{i}.again{again}" if again else str(i), call, args)
            state |= {f"{run}.{key}": f"{x}:{j}" for j, key in enumerate(changed, 1)}
            outputs.append(x)
        b.scope = outer
        return x, state

    @property
    def runs(self) -> tuple[int, ...]:
        """The index of the block of each run."""
        return self.blocks.order if self.order is None else self.order

    @property
    def _sources(self) -> Mapping[int, int]:
        return self.blocks.skips.sources(len(self.runs)) if self.blocks.skips else {}

    def _joined(self, outer: Builder, which: int, x: str, earlier: str) -> str:
        """Adds a skip connection as a separate call, and returns the stream with the earlier output added.

        Used if blocks may loop, because the same block then runs with and without a skip.
        """
        assert self.blocks.skips is not None
        b = Builder("")
        types = [outer.types[ref].with_shape("B", "T", outer.types[ref].width) for ref in (x, earlier)]
        stream, skip = b.input("stream", types[0]), b.input("skip", types[1])
        at, method, others = f"skips.{which}", "skip.forward", []
        lanes = self.blocks.lanes if types[0] != types[1] else None
        if lanes is not None:
            method = "skip.lanes"
            stream, *others = lanes.split(b, stream, self.blocks.layers)
        value = self.blocks.skips.lower(b, stream, skip, self.shape)
        value = lanes.join(b, (value, *others)) if lanes is not None else value
        body = self.site.functions.intern(b, (method,), at, {"x": value})
        outer.scope = ""
        joined = outer.add(at, Call(body.name, at, returned([outer.types[x]])), (x, earlier))
        outer.scope = self.site.at
        return joined

    def begin(self, b: Builder, context: LoweringContext) -> dict[str, str]:
        """Adds the calls that compute every block's state before the first token. Returns the state by block, layer and
        key."""
        kept = self.blocks.state_of_one(self.shape)
        state: dict[str, str] = {}
        outer, b.scope = b.scope, self.site.at
        for i in range(self.blocks.count if kept else 0):
            inner = Builder("")
            memory = inner.input("memory", b.types[context.memory])
            made: dict[str, str] = {}
            for layer in self.blocks.layers:
                inner.scope = layer.title
                begun = layer.begin(inner, self.shape, replace(context, memory=memory))
                made |= {f"{layer.title}.{key}": ref for key, ref in begun.items()}
            outputs = {key.replace(".", "_"): made[key] for key in kept}
            at = f"{self.site.at}.{i}"
            body = self.site.functions.intern(inner, self._names(i, ("begin",), i in self._sources), at, outputs)
            call = Call(body.name, at, returned([inner.types[made[key]] for key in kept]))
            node = b.add(str(i), call, (context.memory,))
            state |= {f"{i}.{key}": output_ref(node, j) for j, key in enumerate(kept)}
        b.scope = outer
        return state

    def _read(self, context: LoweringContext) -> dict[str, str]:
        """Returns the values that every block reads in addition to the stream, its state and the shared values, by
        input name."""
        return self._source(context) | (
            {"positions": context.positions} if context.extends and context.positions else {}
        )

    def _shared(self, context: LoweringContext, i: int, by_all: bool) -> dict[str, str]:
        """Returns the shared values that block `i` reads, by input name: those of all blocks if `by_all`, else those of
        some."""
        labels = self._labels
        shared = [one for one in self.blocks.shared(self.shape) if one.read_in(i) and (one.layers is None) == by_all]
        return {labels[ref]: context.shared[ref] for one in shared for ref in one.refs}

    @property
    def _labels(self) -> Mapping[str, str]:
        """The input name of each shared value in a function. A label that occurs twice is prefixed with the
        computation's name."""
        shared = self.blocks.shared(self.shape)
        labels = [label for one in shared for label in one.labels]
        return {
            ref: label if labels.count(label) == 1 else f"{one.name}_{label}"
            for one in shared
            for ref, label in zip(one.refs, one.labels, strict=True)
        }

    def _source(self, context: LoweringContext) -> dict[str, str]:
        """Returns the values that the blocks read of an encoder: its output, unless their state already holds what they
        need of it, and the mask."""
        reads = any(layer.reads_source for layer in self.blocks.layers)
        found = {"memory": context.memory} if reads and not context.extends else {}
        return found | ({"seen": context.seen} if reads or (self.blocks.reads_seen and not context.causal) else {})

    def _body(
        self,
        outer: Builder,
        i: int,
        context: LoweringContext,
        given: Mapping[str, str],
        caches: Mapping[str, TensorType],
        some: Mapping[str, str],
        x: str,
    ) -> tuple[Graph, list[str]]:
        """Builds the function that block `i` calls. Equal blocks share a function.

        Args:
            outer: the builder of the program.
            i: the index of the block.
            context: the values that the block can read.
            given: the arguments that precede the state, by input name.
            caches: the types of the state, by layer and key.
            some: the arguments that follow the state, by input name.
            x: the stream in the program.

        Returns:
            The function, and the keys of the state that it returns.
        """
        b = Builder("")
        stream = outer.types[x]

        def take(values: Mapping[str, str]) -> None:
            for name, ref in values.items():
                type = outer.types[ref]
                b.input(name, type.with_shape(*_tokens(type.shape, stream.shape[1])))

        take({"x": x, **given})
        b.origins["x"] = outer.origin(x)
        kept = {key: b.input(key.replace(".", "_"), type) for key, type in caches.items()}
        take(some)
        value, lanes, others = "x", self.blocks.lanes, []
        if lanes is not None and i >= lanes.first:
            value, *others = lanes.split(b, value, self.blocks.layers)
        stream_lanes = (value, *others)
        if "skip" in some:
            assert self.blocks.skips is not None
            b.scope = "skip"
            value = self.blocks.skips.lower(b, value, "skip", self.shape)
            stream_lanes = (value, *others)
        if self.blocks.mix is not None:
            b.scope = "mix"
            try:
                value = self.blocks.mix.lower(b, value, "x0", self.shape)
            except TypeRuleError as error:
                raise LoweringError((self._mismatch(error, i, ("mix",), b),)) from None
        inside = replace(
            context,
            shared={ref: label for ref, label in self._labels.items() if label in given or label in some},
            positions="positions" if "positions" in given else "",
            memory="memory" if "memory" in given else "",
            seen="seen" if "seen" in given else "",
            layer=i,
        )
        if lanes is not None and others:
            value, state = self._beside(b, (value, *others), stream_lanes, inside, kept)
        else:
            value, state = self._layered(b, value, inside, kept)
        b.scope = ""
        if lanes is not None and i == lanes.first - 1:
            value = lanes.join(b, (value, value))
        outputs = {"x": value, **{key.replace(".", "_"): ref for key, ref in state.items()}}
        method = "extend" if context.extends else "forward"
        # a function that only scores gets another name if the training function has dropout
        methods = (method,) if context.extends or context.training else (method, "score")
        names = self._names(i, methods, "skip" in some)
        return self.site.functions.intern(b, names, f"{self.site.at}.{i}", outputs), list(state)

    def _layered(
        self, b: Builder, x: str, context: LoweringContext, kept: Mapping[str, str]
    ) -> tuple[str, Mapping[str, str]]:
        """Adds all layers to the stream `x`. Returns the result and the layers' new state."""
        state: dict[str, str] = {}
        together = context.layer in (self.blocks.parallel or ())
        normed = ""
        for j, layer in enumerate(self.blocks.layers):
            try:
                if not (together and normed):
                    b.scope = "parallel" if together else layer.title
                    normed = self.blocks.norm.lower(b, x, "h", self.shape)
                x = layer.join(b, x, self._branch(b, layer, normed, context, kept, state), self.shape)
            except TypeRuleError as error:
                raise LoweringError((self._mismatch(error, context.layer, ("layers", j), b),)) from None
        return x, state

    def _branch(
        self,
        b: Builder,
        layer: Layer,
        normed: str,
        context: LoweringContext,
        kept: Mapping[str, str],
        state: dict[str, str],
    ) -> str:
        """Adds a layer to its normed input `normed` and returns the layer's value. Adds the layer's new state to
        `state`."""
        prefix = f"{layer.title}."
        cache = {key.removeprefix(prefix): ref for key, ref in kept.items() if key.startswith(prefix)}
        b.scope = layer.title
        lowered = layer.lower(b, normed, self.shape, replace(context, cache=cache))
        state |= {f"{prefix}{key}": ref for key, ref in lowered.state.items()}
        return layer.dropped(b, lowered.value, context)

    def _beside(
        self, b: Builder, read: Sequence[str], lanes: Sequence[str], context: LoweringContext, kept: Mapping[str, str]
    ) -> tuple[str, Mapping[str, str]]:
        """Adds the layers of a block with lanes. Layer j reads `read[j]`, and both layers write to all `lanes`.

        Returns the concatenated lanes, or in the last block their mean, and the layers' new state.
        """
        spec = self.blocks.lanes
        assert spec is not None
        state: dict[str, str] = {}
        branches = []
        for j, layer in enumerate(self.blocks.layers):
            try:
                b.scope = layer.title
                normed = self.blocks.norm.lower(b, read[j], "h", self.shape)
                branch = self._branch(b, layer, normed, context, kept, state)
                branches.append(layer.weighed(b, branch, self.shape))
            except TypeRuleError as error:
                raise LoweringError((self._mismatch(error, context.layer, ("layers", j), b),)) from None
        made = spec.written(b, lanes, branches, self.blocks.layers, self.shape)
        b.scope = ""
        last = context.layer == self.blocks.count - 1
        return spec.mean(b, made) if last else spec.join(b, made), state

    def _names(self, i: int, methods: Sequence[str], skips: bool) -> tuple[str, ...]:
        """Returns the candidate names of a function of block `i`.

        All functions of a block belong to one class. The first function that is built selects it: a class of the blocks
        before, or a new class.
        """
        owners, at = self.site.functions.owners, self.site.at
        kind = f"skip_{self.site.owner}" if skips else self.site.owner
        before = [owner for place, owner in owners.items() if place.rpartition(".")[0] == at]
        found = owners.get(f"{at}.{i}")
        classes = [found] if found else dict.fromkeys((*before, kind, f"{kind}{i}"))
        return tuple(f"{owner}.{method}" for owner in classes for method in methods)

    def _mismatch(self, error: TypeRuleError, i: int, part: Path, b: Builder) -> Problem:
        """Returns the problem for a type error in a part of a block, with both nodes and both spec paths."""
        origin = b.origins["x"]
        node = error.message.partition(" ")[0]
        message = error.message.replace(node, f"{self.site.at}.{i}.{node}", 1)
        related = ((f"{origin} is made here", self.site.places[origin]),) if origin in self.site.places else ()
        hint = f"make the widths equal; the model's dim is {self.shape.dim}"
        return Problem((*self.site.place, *part), "S301", message, hint, related)


def _tokens(shape: Sequence[Dim], length: Dim) -> Iterator[Dim]:
    """Yields the dims of a shape as a function declares it: `length`, the number of tokens of any sequence,
    becomes T."""
    first = 1 if shape[0] == "B" else 0
    for i, dim in enumerate(shape):
        yield "T" if dim == length and (i == first or isinstance(dim, str)) else dim
