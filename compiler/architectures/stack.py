"""How a stack of blocks lowers: its programs, and the functions that blocks of one text share."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from specc.compiler.architectures.block_function import BlockFunctions
from specc.compiler.blocks.init import Init
from specc.compiler.blocks.roles import Shape, Tokens
from specc.compiler.ir import Builder, Graph, TensorType, TypeRuleError
from specc.compiler.ops.loss import CrossEntropy
from specc.compiler.ops.region import Call, returned
from specc.compiler.ops.rope import Positions
from specc.compiler.ops.shape import Last
from specc.compiler.programs import LoweringError, Parameter, Programs
from specc.compiler.strict import Path, Problem, StrictModel

if TYPE_CHECKING:
    from specc.compiler.architectures.decoder import Decoder


class Lowering:
    """The state of one lowering: functions by text, and every parameter's start."""

    def __init__(self, model: "Decoder", name: str, dtype: str) -> None:
        self.model, self.name = model, name
        count = model.blocks.count
        out = model.output_init or model.init
        self.shape = Shape(model.dim, count, model.context, model.vocab, dtype, model.init, out)
        self.order = model.blocks.order
        self.sources = model.blocks.skips.sources(len(self.order)) if model.blocks.skips else {}
        self.bad_inits: dict[Init, Problem] = {}
        self.params: dict[str, Parameter] = {}
        embed_titles = [(f"embed.{step.title}", i) for i, step in enumerate(model.embed)]
        self.places: dict[str, Path] = {title: ("model", "embed", i) for title, i in embed_titles}
        self.places |= {"head": ("model", "head"), "norm": ("model", "norm"), "skips": ("model", "blocks", "skips")}
        for layer in range(count):
            for i, part in enumerate(model.blocks.layers):
                self.places[f"blocks.{layer}.{part.title}"] = ("model", "blocks", "layers", i)
        self.functions = BlockFunctions(model, self.shape, self.places)

    def run(self) -> Programs:
        programs = (
            self.scored("train", "mean"),
            self.scored("score", "none"),
            self.cached("prefill", "T"),
            self.cached("decode", 1),
        )
        if self.bad_inits:
            raise LoweringError(tuple(self.bad_inits.values()))
        places = tuple(self.places.items())
        params, functions = tuple(self.params.values()), tuple(self.functions.built.values())
        return Programs(self.name, params, functions, programs, places, whole=("train", "score"))

    def scored(self, name: str, reduction: Literal["mean", "none"]) -> Graph:
        """ids, targets i64[B, T] -> cross-entropy in nats, f32: the mean, or one a token."""
        b = Builder(name)
        ids = b.input("ids", TensorType(("B", "T"), "i64"))
        targets = b.input("targets", TensorType(("B", "T"), "i64"))
        x, _ = self.trunk(b, ids, "")
        logits = self.head(b, x)
        loss = b.add("loss", CrossEntropy(reduction), (logits, targets))
        return self.finish(b, {"loss": loss})

    def cached(self, name: str, tokens: int | str) -> Graph:
        """ids i64[B, T] that follow `start` (i64[]) tokens in the caches -> logits f32[B, V] of the last, and the
        caches."""
        b = Builder(name)
        ids = b.input("ids", TensorType(("B", tokens), "i64"))
        start = b.input("start", TensorType((), "i64"))
        x, state = self.trunk(b, ids, start)
        logits = self.head(b, b.add("last", Last(), (x,)))
        return self.finish(b, {"logits": logits, **state})

    def trunk(self, b: Builder, ids: str, start: str) -> tuple[str, Mapping[str, str]]:
        """Embedding and blocks; with `start`, against caches that it declares as inputs."""
        x, state = self.embedded(b, ids, start)
        embedded = x if self.model.blocks.mix is not None else ""
        positions = ""
        if start or any(one.positional for one in self.functions.shared):
            positions = b.add("positions", Positions(), (ids, start) if start else (ids,))
        shared = {one: one.lower(b, Tokens(ids, start, positions)) for one in self.functions.shared}
        outputs: list[str] = []
        looped = len(self.order) > self.model.blocks.count
        for run, i in enumerate(self.order):
            skip = outputs[self.sources[run]] if run in self.sources else ""
            if skip and looped:
                x, skip = self.joined(b, list(self.sources).index(run), x, skip), ""
            caches: dict[str, TensorType] = {}
            if start:
                for layer in self.model.blocks.layers:
                    caches |= {f"{layer.title}.{key}": kept for key, kept in layer.state(self.shape).items()}
            args = [x, *([embedded] if embedded else [])]
            args += [ref for one, refs in shared.items() if one.layers is None for ref in refs]
            if start:
                args += [positions, *(b.input(f"cache.{run}.{key}", kept) for key, kept in caches.items())]
            args += [ref for one, refs in shared.items() if one.layers and i in one.layers for ref in refs]
            args += [skip] if skip else []
            body = self.functions.build(b, i, x, caches if start else None, bool(skip))
            for path, type in body.params:
                self.add_param(f"blocks.{i}.{path}", type, self.functions.inits[path])
            returns = returned([b.types[x], *caches.values()])
            call = Call(body.name, f"blocks.{i}", returns, tuple(self.scalars(i).items()))
            again = self.order[:run].count(i)
            x = b.add(f"blocks.{i}.again{again}" if again else f"blocks.{i}", call, args)
            state |= {f"cache.{run}.{key}": f"{x}:{j}" for j, key in enumerate(caches, 1)}
            outputs.append(x)
        return self.model.norm.lower(b, x, "norm", self.shape), state

    def joined(self, b: Builder, which: int, x: str, earlier: str) -> str:
        """The stream joined by an earlier output, where skips are no part of a block: it runs with and without."""
        skip = self.functions.skip(b, x)
        for path, type in skip.params:
            self.add_param(f"skips.{which}.{path}", type, self.functions.inits[path])
        call = Call(skip.name, f"skips.{which}", returned([b.types[x]]))
        return b.add(f"skips.{which}", call, (x, earlier))

    def embedded(self, b: Builder, ids: str, start: str) -> tuple[str, dict[str, str]]:
        """The first block's input, and the state of the steps that make it."""
        x: str | None = None
        state: dict[str, str] = {}
        b.scope = "embed"
        for i, step in enumerate(self.model.embed):
            kept = step.state(b.types[x].width if x is not None else self.shape.dim, self.shape) if start else {}
            cache = {key: b.input(f"cache.embed.{step.title}.{key}", type) for key, type in kept.items()}
            try:
                lowered = step.lower(b, x, Tokens(ids, start, cache=cache), self.shape)
            except TypeRuleError as error:
                hint = "make the widths equal: a step reads what the one before it gives"
                raise LoweringError((Problem(("model", "embed", i), "S301", error.message, hint),)) from None
            state |= {f"cache.embed.{step.title}.{key}": ref for key, ref in lowered.state.items()}
            x = lowered.value
        b.scope = ""
        assert x is not None
        return x, state

    def scalars(self, i: int) -> dict[str, float]:
        """The numbers that block `i` binds."""
        count = self.model.blocks.count
        found = dict(self.model.blocks.norm.scalars(i, count))
        for layer in self.model.blocks.layers:
            found |= layer.scalars(i, count)
        return found

    def head(self, b: Builder, x: str) -> str:
        b.scope = "head"
        try:
            return self.model.head.lower(b, x, self.shape, "@embed.token")
        except TypeRuleError as error:
            related = (("the token table", ("model", "embed", 0)),)
            hint = f"make the widths equal; the model's dim is {self.model.dim}"
            raise LoweringError((Problem(("model", "head"), "S301", error.message, hint, related),)) from None

    def finish(self, b: Builder, outputs: Mapping[str, str]) -> Graph:
        graph = b.build(outputs)
        for path, type in graph.params:
            self.add_param(path, type, b.inits[path])
        return graph

    def add_param(self, path: str, type: TensorType, init: object) -> None:
        assert isinstance(init, Init)
        shape = tuple(dim for dim in type.shape if isinstance(dim, int))
        self.params.setdefault(path, Parameter(path, shape, type.dtype, init))
        if (reason := init.refusal(shape, self.shape.layers)) and init not in self.bad_inits:
            self.bad_inits[init] = Problem(
                self.place_of(init), "S221", f"{path}: {reason}", "change the number or formula"
            )

    def place_of(self, init: Init) -> Path:
        """Where the spec says how a parameter starts."""
        return ("model", *next((path for found, path in _inits(self.model) if found is init), ()))


def _inits(value: object, path: Path = ()) -> Iterator[tuple[Init, Path]]:
    """Every start of a parameter that a spec states, and where."""
    if isinstance(value, Init):
        yield value, path
    elif isinstance(value, StrictModel):
        for name in type(value).model_fields:
            yield from _inits(getattr(value, name), (*path, name))
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _inits(item, (*path, i))
