"""Equal blocks, one behind the other: each is a call of a function that blocks of one text share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Field

from specc.compiler import blocks
from specc.compiler.blocks.norm import Rms
from specc.compiler.blocks.roles import Layer, Lowered, Norm, Shape, Site, Skips, Stage, Surroundings, formula_problems
from specc.compiler.catalog import models
from specc.compiler.ir import Builder, Dim, Graph, Op, TensorType, TypeRuleError, output_ref
from specc.compiler.ops.dropout import Dropout
from specc.compiler.ops.region import Call, returned
from specc.compiler.programs import LoweringError
from specc.compiler.strict import Path, Problem, StrictModel


def one_of(role: type[StrictModel]) -> Any:
    """The union of all blocks that play a part, told apart by `kind`."""
    members = models(blocks, role, "kind")
    if len(members) == 1:
        return members[0]
    return Annotated[Union[members], Field(discriminator="kind")]  # noqa: UP007  (a tuple of classes, not two)


if TYPE_CHECKING:
    AnyLayer = Layer
    AnyNorm = Norm
    AnySkips = Skips
else:
    AnyLayer, AnyNorm, AnySkips = map(one_of, (Layer, Norm, Skips))


class Blocks(StrictModel):
    """`count` equal blocks; each is its `layers` in order, every one behind its own `norm`."""

    count: Annotated[int, Field(gt=0, le=1000)]
    norm: AnyNorm = Rms(kind="rms")
    skips: AnySkips | None = None
    layers: Annotated[tuple[AnyLayer, ...], Field(min_length=1, max_length=64)]

    def problems_in(self, dim: int) -> Iterator[Problem]:
        """What is wrong with the blocks in a model of `dim` features; paths are relative to them."""
        yield from formula_problems(self.norm.scale, ("norm", "scale"), self.count)
        if self.skips is not None and not self.skips.sources(self.count):
            message = f"skips connect nothing in {self.count} block{'s' if self.count > 1 else ''}"
            yield Problem(("skips",), "S220", message, "take them out, or use more blocks")
        titles: dict[str, int] = {}
        for i, layer in enumerate(self.layers):
            here: Path = ("layers", i)
            if layer.residual != "learned":
                yield from formula_problems(layer.residual, (*here, "residual"), self.count)
            yield from (problem.under(*here) for problem in layer.problems_in(dim))
            if (first := titles.setdefault(layer.title, i)) != i:
                message = f"two layers of a block are named {layer.title}"
                related = (("the first one", ("layers", first)),)
                yield Problem(here, "S207", message, "give one of them a `name:`", related)

    def shared(self, dim: int) -> Mapping[str, Op]:
        """What all blocks read, computed once from the positions."""
        found: dict[str, Op] = {}
        for layer in self.layers:
            found |= layer.shared(dim)
        return found

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        """What the blocks keep between tokens, by block, layer and key."""
        return {f"{i}.{key}": kept for i in range(self.count) for key, kept in self.state_of_one(shape).items()}

    def state_of_one(self, shape: Shape) -> Mapping[str, TensorType]:
        """What each block keeps, by layer and key."""
        return {f"{layer.title}.{key}": kept for layer in self.layers for key, kept in layer.state(shape).items()}

    @property
    def reads_seen(self) -> bool:
        """Whether a block in an encoder has to know which positions are tokens."""
        return any(layer.reads_seen for layer in self.layers)

    def scalars(self, i: int) -> dict[str, float]:
        """The numbers that block `i` binds."""
        found = dict(self.norm.scalars(i, self.count))
        for layer in self.layers:
            found |= layer.scalars(i, self.count)
        return found


@dataclass(frozen=True)
class Stack:
    """One run of blocks in a program: they stand under the site's place, at 0, 1, ..."""

    blocks: Blocks
    shape: Shape
    site: Site

    def run(self, b: Builder, x: str, around: Surroundings) -> tuple[str, dict[str, str]]:
        """Adds the calls; returns the last block's value, and the state by block, layer and key. A program that
        extends a sequence has the state before in `around.cache`."""
        blocks, outer = self.blocks, b.scope
        b.scope = self.site.at
        sources = self._sources
        state: dict[str, str] = {}
        outputs: list[str] = []
        for i in range(blocks.count):
            given = self._given(around)
            caches = blocks.state_of_one(self.shape) if around.extends else {}
            kept = [around.cache[f"{i}.{key}"] for key in caches]
            skip = outputs[sources[i]] if i in sources else None
            body, changed = self._body(b, i, around, given, caches, x)
            args = (x, *given.values(), *kept, *([skip] if skip is not None else []))
            returns = returned([b.types[x], *(caches[key] for key in changed)])
            call = Call(body.name, f"{self.site.at}.{i}", returns, tuple(blocks.scalars(i).items()))
            x = b.add(str(i), call, args)
            state |= {f"{i}.{key}": f"{x}:{j}" for j, key in enumerate(changed, 1)}
            outputs.append(x)
        b.scope = outer
        return x, state

    @property
    def _sources(self) -> Mapping[int, int]:
        return self.blocks.skips.sources(self.blocks.count) if self.blocks.skips else {}

    def _owner(self, i: int) -> str:
        """What the class of block `i` is called after."""
        return f"skip_{self.site.owner}" if i in self._sources else self.site.owner

    def begin(self, b: Builder, around: Surroundings) -> dict[str, str]:
        """Adds the calls that make every block's state before the first token; returns it as `run` does."""
        kept = self.blocks.state_of_one(self.shape)
        state: dict[str, str] = {}
        outer, b.scope = b.scope, self.site.at
        for i in range(self.blocks.count if kept else 0):
            inner = Builder("")
            memory = inner.input("memory", b.types[around.memory])
            made: dict[str, str] = {}
            for layer in self.blocks.layers:
                inner.scope = layer.title
                begun = layer.begin(inner, self.shape, replace(around, memory=memory))
                made |= {f"{layer.title}.{key}": ref for key, ref in begun.items()}
            outputs = {key.replace(".", "_"): made[key] for key in kept}
            at = f"{self.site.at}.{i}"
            body = self.site.functions.keep(inner, self._names("begin", self._owner(i), i), at, outputs)
            call = Call(body.name, at, returned([inner.types[made[key]] for key in kept]))
            node = b.add(str(i), call, (around.memory,))
            state |= {f"{i}.{key}": output_ref(node, j) for j, key in enumerate(kept)}
        b.scope = outer
        return state

    def _given(self, around: Surroundings) -> dict[str, str]:
        """What every block is given besides x and its own state, by the names that a function gives it."""
        found = {**self._angles(around), **self._source(around)}
        return found | ({"positions": around.positions} if around.extends and around.positions else {})

    def _angles(self, around: Surroundings) -> dict[str, str]:
        """What all blocks read of the positions."""
        ops = self.blocks.shared(self.shape.dim)
        found: dict[str, str] = {}
        for key, op in ops.items():
            for j, label in enumerate(op.output_labels):
                found[label if len(ops) == 1 else f"{key}_{label}"] = output_ref(around.shared[key], j)
        return found

    def _source(self, around: Surroundings) -> dict[str, str]:
        """What the blocks read of an encoder: its value, unless they have kept what they need of it, and the mask."""
        reads = any(layer.reads_source for layer in self.blocks.layers)
        found = {"memory": around.memory} if reads and not around.extends else {}
        return found | ({"seen": around.seen} if reads or (self.blocks.reads_seen and not around.causal) else {})

    def _body(
        self,
        outer: Builder,
        i: int,
        around: Surroundings,
        given: Mapping[str, str],
        caches: Mapping[str, TensorType],
        x: str,
    ) -> tuple[Graph, list[str]]:
        """The function that block `i` calls, and which of the state it gives back; blocks of one text share it."""
        b = Builder("")
        stream = outer.types[x]
        value = b.input("x", stream.with_shape("B", "T", stream.width))
        b.origins["x"] = outer.origin(x)
        for name, ref in given.items():
            type = outer.types[ref]
            b.input(name, type.with_shape(*_tokens(type.shape, stream.shape[1])))
        kept = {key: b.input(key.replace(".", "_"), type) for key, type in caches.items()}
        shared = self._shared(given)
        if i in self._sources:
            assert self.blocks.skips is not None
            skip = b.input("skip", b.types["x"])
            b.scope = "skip"
            value = self.blocks.skips.lower(b, value, skip, self.shape)
        state: dict[str, str] = {}
        inside = replace(
            around,
            shared=shared,
            positions="positions" if "positions" in given else "",
            memory="memory" if "memory" in given else "",
            seen="seen" if "seen" in given else "",
        )
        for j, layer in enumerate(self.blocks.layers):
            b.scope = layer.title
            prefix = f"{layer.title}."
            cache = {key.removeprefix(prefix): ref for key, ref in kept.items() if key.startswith(prefix)}
            try:
                normed = self.blocks.norm.lower(b, value, "h", self.shape)
                lowered = layer.lower(b, normed, self.shape, replace(inside, cache=cache))
                branch = lowered.value
                if around.training and layer.dropout:
                    branch = b.add("dropped", Dropout(layer.dropout), (branch,))
                value = layer.join(b, value, branch, self.shape)
            except TypeRuleError as error:
                raise LoweringError((self._mismatch(error, i, j, b),)) from None
            state |= {f"{prefix}{key}": ref for key, ref in lowered.state.items()}
        outputs = {"x": value, **{key.replace(".", "_"): ref for key, ref in state.items()}}
        scores = not around.extends and not around.training
        names = self._names("extend" if around.extends else "forward", self._owner(i), i, scores)
        return self.site.functions.keep(b, names, f"{self.site.at}.{i}", outputs), list(state)

    def _shared(self, given: Mapping[str, str]) -> dict[str, str]:
        """Where a function has the shared values: by op, its outputs under their own names."""
        found: dict[str, str] = {}
        ops = self.blocks.shared(self.shape.dim)
        names = iter(given)
        for key, op in ops.items():
            for j, _ in enumerate(op.output_labels):
                found[output_ref(key, j)] = next(names)
        return found

    @staticmethod
    def _names(method: str, owner: str, i: int, scores: bool = False) -> tuple[str, ...]:
        """What a function may be called: one that only scores has a name of its own where training drops."""
        return f"{owner}.{method}", *([f"{owner}.score"] if scores else []), f"{owner}{i}.{method}"

    def _mismatch(self, error: TypeRuleError, i: int, layer: int, b: Builder) -> Problem:
        """A type error inside a block, told with both nodes and both places of the spec."""
        origin = b.origins["x"]
        node = error.message.partition(" ")[0]
        message = error.message.replace(node, f"{self.site.at}.{i}.{node}", 1)
        related = ((f"{origin} is made here", self.site.places[origin]),) if origin in self.site.places else ()
        hint = f"make the widths equal; the model's dim is {self.shape.dim}"
        return Problem((*self.site.place, "layers", layer), "S301", message, hint, related)


def _tokens(shape: Sequence[Dim], length: Dim) -> Iterator[Dim]:
    """A shape as a function has it, which calls the tokens T, be they of a source, of a target, or a single one."""
    for i, dim in enumerate(shape):
        yield "T" if dim == length and (i == 0 or isinstance(dim, str)) else dim


class BlocksStage(Blocks, Stage):
    """Blocks as a stage of an encoder or a decoder, with a norm like theirs behind the last one."""

    kind: Literal["blocks"]

    @property
    def reads_source(self) -> bool:
        return any(layer.reads_source for layer in self.layers)

    @property
    def in_place(self) -> bool:
        return any(layer.in_place for layer in self.layers)

    def begin(self, b: Builder, shape: Shape, around: Surroundings) -> Mapping[str, str]:
        assert around.site is not None
        return Stack(self, shape, around.site).begin(b, around)

    def lower(self, b: Builder, x: str, shape: Shape, around: Surroundings) -> Lowered:
        assert around.site is not None
        value, state = Stack(self, shape, around.site).run(b, x, around)
        side, _, title = b.scope.rpartition(".")
        b.scope = f"{side}.norm" if title == self.kind else f"{b.scope}_norm"
        return Lowered(self.norm.lower(b, value, "y", replace(shape, layers=self.count)), state)
