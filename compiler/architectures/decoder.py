"""A decoder: token ids to a distribution over the next one, through a stack of residual blocks."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Field

from specc.compiler import blocks
from specc.compiler.architectures.architecture import Architecture
from specc.compiler.blocks.head import LogitHead
from specc.compiler.blocks.init import Init
from specc.compiler.blocks.norm import Rms
from specc.compiler.blocks.roles import Embed, Layer, Norm, Shape, Skips, Surroundings, formula_problems
from specc.compiler.blocks.token import order_problems
from specc.compiler.catalog import models
from specc.compiler.expr import parse, variables
from specc.compiler.ir import Builder, Graph, Op, TensorType, TypeRuleError, output_ref
from specc.compiler.ops.loss import CrossEntropy
from specc.compiler.ops.region import Call, returned
from specc.compiler.ops.rope import Positions
from specc.compiler.ops.shape import Last
from specc.compiler.programs import LoweringError, Parameter, Programs
from specc.compiler.strict import Path, Problem, StrictModel


def _one_of(role: type[StrictModel]) -> Any:
    """The union of all blocks that play a part, told apart by `kind`."""
    members = models(blocks, role, "kind")
    if len(members) == 1:
        return members[0]
    return Annotated[Union[members], Field(discriminator="kind")]  # noqa: UP007  (a tuple of classes, not two)


if TYPE_CHECKING:
    AnyEmbed = Embed
    AnyLayer = Layer
    AnyNorm = Norm
    AnySkips = Skips
else:
    AnyEmbed, AnyLayer, AnyNorm, AnySkips = map(_one_of, (Embed, Layer, Norm, Skips))


class Blocks(StrictModel):
    """`count` equal blocks; each is its `layers` in order, every one behind its own `norm`."""

    count: Annotated[int, Field(gt=0, le=1000)]
    norm: AnyNorm = Rms(kind="rms")
    skips: AnySkips | None = None
    layers: Annotated[tuple[AnyLayer, ...], Field(min_length=1, max_length=64)]


class Decoder(Architecture):
    """Causal language model: embed, blocks, norm, head; trained and used on `context` tokens at a time."""

    kind: Literal["decoder"]
    vocab: Annotated[int, Field(ge=2, le=2**24)]
    dim: Annotated[int, Field(gt=0, le=2**17)]
    context: Annotated[int, Field(gt=0, le=2**22)]
    init: Init = Init(normal=0.02)
    output_init: Init | None = None
    embed: Annotated[tuple[AnyEmbed, ...], Field(min_length=1, max_length=16)]
    blocks: Blocks
    norm: AnyNorm = Rms(kind="rms")
    head: LogitHead = LogitHead()

    @property
    def title(self) -> str:
        return f"decoder, {self.blocks.count} blocks of {self.dim}, {self.context} tokens, vocabulary {self.vocab}"

    @property
    def vocabulary(self) -> int:
        return self.vocab

    @property
    def window(self) -> int:
        return self.context

    def problems(self) -> Iterator[Problem]:
        """What the layers say of themselves in a model of this width."""
        yield from (problem.under("embed") for problem in order_problems(self.embed))
        count = self.blocks.count
        yield from formula_problems(self.blocks.norm.scale, ("blocks", "norm", "scale"), count)
        last = self.norm.scale
        if isinstance(last, str) and "layer" in variables(parse(last)):
            hint = "use `layers`, the number of blocks"
            yield Problem(("norm", "scale"), "S216", "the last norm is in no layer, but its scale reads `layer`", hint)
        else:
            yield from formula_problems(last, ("norm", "scale"), count)
        if self.blocks.skips is not None and not self.blocks.skips.sources(count):
            message = f"skips connect nothing in {count} block{'s' if count > 1 else ''}"
            yield Problem(("blocks", "skips"), "S220", message, "take them out, or use more blocks")
        titles: dict[str, int] = {}
        for i, layer in enumerate(self.blocks.layers):
            here: Path = ("blocks", "layers", i)
            if layer.residual != "learned":
                yield from formula_problems(layer.residual, (*here, "residual"), count)
            yield from (problem.under(*here) for problem in layer.problems_in(self.dim))
            if (first := titles.setdefault(layer.title, i)) != i:
                message = f"two layers of a block are named {layer.title}"
                related = (("the first one", ("blocks", "layers", first)),)
                yield Problem(here, "S207", message, "give one of them a `name:`", related)

    def lower(self, name: str, dtype: str) -> Programs:
        return _Lowering(self, name, dtype).run()


class _Lowering:
    """The state of one lowering: functions by text, and every parameter's start."""

    def __init__(self, model: Decoder, name: str, dtype: str) -> None:
        self.model, self.name = model, name
        count = model.blocks.count
        out = model.output_init or model.init
        self.shape = Shape(model.dim, count, model.context, model.vocab, dtype, model.init, out)
        self.sources = model.blocks.skips.sources(count) if model.blocks.skips else {}
        self.functions: dict[str, Graph] = {}
        self.bad_inits: dict[Init, Problem] = {}
        self.params: dict[str, Parameter] = {}
        embed_titles = [(f"embed.{step.title}", i) for i, step in enumerate(model.embed)]
        self.places: dict[str, Path] = {title: ("model", "embed", i) for title, i in embed_titles}
        self.places |= {"head": ("model", "head"), "norm": ("model", "norm")}
        for layer in range(count):
            for i, part in enumerate(model.blocks.layers):
                self.places[f"blocks.{layer}.{part.title}"] = ("model", "blocks", "layers", i)

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
        params, functions = tuple(self.params.values()), tuple(self.functions.values())
        return Programs(self.name, params, functions, programs, places, whole=("train", "score"))

    def scored(self, name: str, reduction: Literal["mean", "none"]) -> Graph:
        """ids, targets i64[B, T] -> cross-entropy in nats, f32: the mean, or one a token."""
        b = Builder(name)
        ids = b.input("ids", TensorType(("B", "T"), "i64"))
        targets = b.input("targets", TensorType(("B", "T"), "i64"))
        x, _ = self.trunk(b, ids, None)
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

    def trunk(self, b: Builder, ids: str, start: str | None) -> tuple[str, Mapping[str, str]]:
        """Embedding and blocks; with `start`, against caches that it declares as inputs."""
        x: str | None = None
        for step in self.model.embed:
            b.scope = "embed"
            x = step.lower(b, ids, x, self.shape)
        assert x is not None
        b.scope = ""
        shared_ops: dict[str, Op] = {}
        for layer in self.model.blocks.layers:
            shared_ops |= layer.shared(self.model.dim)
        positions = ""
        if shared_ops or start is not None:
            positions = b.add("positions", Positions(), (ids,) if start is None else (ids, start))
        shared = {key: b.add(key, op, (positions,)) for key, op in shared_ops.items()}
        state: dict[str, str] = {}
        outputs: list[str] = []
        for i in range(self.model.blocks.count):
            around = [x, *(ref for key in shared for ref in b.types if ref == shared[key] or ref.startswith(f"{key}:"))]
            caches: dict[str, TensorType] = {}
            if start is not None:
                around.append(positions)
                for layer in self.model.blocks.layers:
                    caches |= {f"{layer.title}.{key}": kept for key, kept in layer.state(self.shape).items()}
                around += [b.input(f"cache.{i}.{key}", kept) for key, kept in caches.items()]
            skip = outputs[self.sources[i]] if i in self.sources else None
            body = self.body(b, i, shared_ops, caches if start is not None else None, skip is not None, x)
            args = (*around, skip) if skip is not None else tuple(around)
            returns = returned([b.types[x], *caches.values()])
            call = Call(body.name, f"blocks.{i}", returns, tuple(self.scalars(i).items()))
            x = b.add(f"blocks.{i}", call, args)
            state |= {f"cache.{i}.{key}": f"{x}:{j}" for j, key in enumerate(caches, 1)}
            outputs.append(x)
        return self.model.norm.lower(b, x, "norm", self.shape), state

    def scalars(self, i: int) -> dict[str, float]:
        """The numbers that block `i` binds."""
        count = self.model.blocks.count
        found = dict(self.model.blocks.norm.scalars(i, count))
        for layer in self.model.blocks.layers:
            found |= layer.scalars(i, count)
        return found

    def body(
        self,
        outer: Builder,
        i: int,
        shared_ops: Mapping[str, Op],
        caches: Mapping[str, TensorType] | None,
        skips: bool,
        x: str,
    ) -> Graph:
        """The function that block `i` calls; blocks of one text share it."""
        method = "forward" if caches is None else "extend"
        b = Builder("")
        stream = outer.types[x]
        stream = stream.with_shape("B", "T", stream.width)
        value = b.input("x", stream)
        b.origins["x"] = outer.origin(x)
        shared: dict[str, str] = {}
        for key, op in shared_ops.items():
            for j, type in enumerate(op.infer([TensorType(("T",), "i64")])):
                label = op.output_labels[j] if len(shared_ops) == 1 else f"{key}_{op.output_labels[j]}"
                shared[output_ref(key, j)] = b.input(label, type)
        positions = b.input("positions", TensorType(("T",), "i64")) if caches is not None else ""
        kept = {key: b.input(key.replace(".", "_"), type) for key, type in (caches or {}).items()}
        if skips:
            assert self.model.blocks.skips is not None
            skip = b.input("skip", stream)
            b.scope = "skip"
            value = self.model.blocks.skips.lower(b, value, skip, self.shape)
        state: dict[str, str] = {}
        for j, layer in enumerate(self.model.blocks.layers):
            b.scope = layer.title
            prefix = f"{layer.title}."
            cache = {key.removeprefix(prefix): ref for key, ref in kept.items() if key.startswith(prefix)}
            try:
                normed = self.model.blocks.norm.lower(b, value, "h", self.shape)
                lowered = layer.lower(b, normed, self.shape, Surroundings(positions, shared, cache))
                value = layer.join(b, value, lowered.value, self.shape)
            except TypeRuleError as error:
                raise LoweringError((self.mismatch(error, f"blocks.{i}", j, b),)) from None
            state |= {f"{prefix}{key}": ref for key, ref in lowered.state.items()}
        owner = "skip_block" if skips else "block"
        outputs = {"x": value, **{key.replace(".", "_"): ref for key, ref in state.items()}}
        return self.shared_function(b, owner, method, i, outputs)

    def shared_function(self, b: Builder, owner: str, method: str, i: int, outputs: Mapping[str, str]) -> Graph:
        """The built function under the first free name, or the equal one that exists."""
        for name in (f"{owner}.{method}", f"{owner}{i}.{method}"):
            b.name = name
            graph = b.build(outputs)
            known = self.functions.setdefault(name, graph)
            if known == graph:
                break
        for path, type in graph.params:
            self.add_param(f"blocks.{i}.{path}", type, b.inits[path])
        return graph

    def mismatch(self, error: TypeRuleError, at: str, layer: int, b: Builder) -> Problem:
        """A type error inside a block, told with both nodes and both places of the spec."""
        origin = b.origins["x"]
        node = error.message.partition(" ")[0]
        message = error.message.replace(node, f"{at}.{node}", 1)
        related = ((f"{origin} is made here", self.places[origin]),) if origin in self.places else ()
        hint = f"make the widths equal; the model's dim is {self.model.dim}"
        return Problem(("model", "blocks", "layers", layer), "S301", message, hint, related)

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
        model = self.model
        found: list[tuple[Init | None, Path]] = [(model.init, ("init",)), (model.output_init, ("output_init",))]
        found += [(getattr(step, "init", None), ("embed", i, "init")) for i, step in enumerate(model.embed)]
        found.append((model.head.init, ("head", "init")))
        return ("model", *next((path for other, path in found if other is init), ()))
