"""The parts that a block can play in a model, and the questions that each answers."""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from specc.compiler.blocks.context import Lowered, LoweringContext, Shape, Shared, Tokens
from specc.compiler.blocks.init import constant, formula, stated, value_of
from specc.compiler.expr import ExprError, parse, variables
from specc.compiler.ir.graph import Builder, Dim, TensorType
from specc.compiler.ops.dropout import Dropout
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.strict import PartName, Path, Problem, StrictModel

LayerList = Annotated[tuple[Annotated[int, Field(ge=0, lt=1000)], ...], Field(min_length=1, max_length=1000)]


def layer_problems(layers: tuple[int, ...] | None, at: Path, count: int) -> Iterator[Problem]:
    """Layers that a model of `count` has not, or that are listed twice."""
    for i, layer in enumerate(layers or ()):
        if layer >= count:
            hint = f"the last one is {count - 1}: layers are counted from 0"
            yield Problem((*at, i), "S240", f"there is no layer {layer} in {count} blocks", hint)
        elif layers is not None and layer in layers[:i]:
            yield Problem((*at, i), "S240", f"layer {layer} is listed twice", "remove one of the two")


LayerFormula = Annotated[float | str, formula("layer", "layers")]


class Norm(StrictModel):
    """Normalizes [..., D]. `scale` multiplies the result and may depend on the layer, counted from 0."""

    scale: LayerFormula | None = None

    def lower(self, b: Builder, x: str, name: str, shape: Shape) -> str:
        """Adds the norm of `x` under `name`."""
        normed = self.normalize(b, x, name)
        if self.scale is None:
            return normed
        if _by_layer(self.scale):
            factor = b.scalar("norm_scale")
            return b.add(f"{name}.scaled", Pointwise(("x * scale",), ("x", "scale")), (normed, factor))
        layers = float(shape.layers)
        value = b.constant("norm_scale", value_of(self.scale, layers=layers), stated(self.scale, layers=layers))
        return b.add(f"{name}.scaled", Pointwise((f"x * {value!r}",), ("x",)), (normed,))

    @property
    def of_no_layer(self) -> Self:
        """This norm outside all layers: without a `scale` that depends on them."""
        return self.model_copy(update={"scale": None}) if _by_layer(self.scale) else self

    def normalize(self, b: Builder, x: str, name: str) -> str:
        raise TypeError(f"{type(self).__name__} does not say how it normalizes")

    def scalars(self, layer: int, layers: int) -> Mapping[str, float]:
        """The numbers that this norm wants bound in layer `layer`."""
        return bound("norm_scale", self.scale, layer, layers)

    @property
    def formulas(self) -> Mapping[str, str]:
        """The formulas of these numbers."""
        return {"norm_scale": self.scale} if isinstance(self.scale, str) else {}


def _by_layer(value: float | str | None) -> bool:
    """Whether a factor differs from layer to layer: then it is a scalar of the function, else part of its text."""
    return isinstance(value, str) and "layer" in variables(parse(value))


def bound(scalar: str, value: float | str | None, layer: int, layers: int) -> Mapping[str, float]:
    """The number behind `scalar` in layer `layer`, where the factor differs from layer to layer."""
    if isinstance(value, str) and _by_layer(value):
        return {scalar: value_of(value, layer=float(layer), layers=float(layers))}
    return {}


def formula_problems(value: float | str | None, at: Path, layers: int) -> Iterator[Problem]:
    """The first of `layers` layers in which a factor is no finite number."""
    for layer in range(layers if isinstance(value, str) else 0):
        try:
            value_of(value, layer=float(layer), layers=float(layers))  # type: ignore[arg-type]
        except ExprError as error:
            hint = "layers are counted from 0: change the formula"
            yield Problem(at, "S216", f"in layer {layer}, {error.message}", hint)
            return


class Embed(StrictModel):
    """One step from token ids to the first block's input."""

    @property
    def title(self) -> str:
        """What the nodes call it: its kind."""
        return str(getattr(self, "kind", ""))

    @property
    def mark(self) -> int | None:
        """The id that starts a document, where it reads nothing across one."""
        return getattr(self, "bos", None)

    def state(self, features: Dim, shape: Shape) -> Mapping[str, TensorType]:
        """What the step keeps between tokens where it is given `features`."""
        return {}

    def lower(self, b: Builder, x: str | None, tokens: Tokens, shape: Shape) -> Lowered:
        """Adds the step; `x` is what the steps before made, None for the first. `tokens.cache` is its own state."""
        raise TypeError(f"{type(self).__name__} does not say how it lowers")


class Part(StrictModel):
    """One step on the way of a value [B, T, D]."""

    # It reads tokens, or the encoder alone: no value has to be made before it.
    starts: ClassVar[bool] = False
    # It keeps h and c between tokens, and can begin from those of another.
    recurrent: ClassVar[bool] = False
    # It reads the last h of a recurrent encoder.
    reads_final: ClassVar[bool] = False

    name: PartName | None = None

    @property
    def title(self) -> str:
        return self.name or str(getattr(self, "kind", ""))

    @property
    def mark(self) -> int | None:
        """The id that starts a document, where it reads nothing across one."""
        return getattr(self, "bos", None)

    @property
    def reads_source(self) -> bool:
        """Whether it needs an encoder's values."""
        return False

    @property
    def in_place(self) -> bool:
        """Whether it writes what it keeps at the positions of its tokens, in place."""
        return False

    @property
    def reads_seen(self) -> bool:
        """Whether it needs to know in an encoder which positions are tokens."""
        return False

    @property
    def reads_positions(self) -> bool:
        """Whether it needs the positions of its tokens, besides what it shares and where it keeps."""
        return False

    @property
    def reads_future(self) -> bool:
        """Whether a token's value depends on later tokens, so that it can be in no decoder."""
        return False

    @property
    def reads(self) -> str | None:
        """The title of an earlier part whose value it reads besides its input."""
        return None

    @property
    def query_stage(self) -> str | None:
        """The title of a later recurrent part whose last h it reads: then all from here to there is a loop over
        time."""
        return None

    def problems_in(self, dim: int, layers: int = 1) -> Iterator[Problem]:
        """What is wrong with this part in a model of `dim` features, in one of `layers` blocks; paths are relative to
        the part."""
        yield from ()

    def shared(self, shape: Shape) -> tuple[Shared, ...]:
        """What it reads that is computed once for all parts."""
        return ()

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        """What the part keeps between tokens, a row of each for a row of the input."""
        return {}

    def begin(self, b: Builder, shape: Shape, context: LoweringContext) -> Mapping[str, str]:
        """The state before the first token, by its keys, where a model has an encoder; zeros where nothing else is
        said."""
        return {}

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        """Adds the part itself, from x [B, T, D] to its value."""
        raise TypeError(f"{type(self).__name__} does not say how it lowers")

    def dropped(self, b: Builder, y: str, context: LoweringContext) -> str:
        """Its value `y`, in training with each element dropped with the probability that it calls `dropout`."""
        share = getattr(self, "dropout", 0.0)
        return b.add("dropped", Dropout(share), (y,)) if context.training and share else y


class Stage(Part):
    """A part that gives another value, of a width of its own; it may read earlier ones."""


class Layer(Part):
    """One residual branch of a block: x + residual * f(norm(x)). `residual` is a factor or formula, or `learned`: one
    number a feature, from 1. In training each element of the branch is dropped with probability `dropout`."""

    residual: Literal["learned"] | LayerFormula | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def weighed(self, b: Builder, y: str, shape: Shape) -> str:
        """Adds the branch's value with its factor, where that is for others to add to a stream."""
        operands = ("scale * branch",), ("branch", "scale")
        if self.residual == "learned":
            scale = b.param("residual", TensorType((shape.dim,), shape.dtype), constant(1.0))
            return b.add("branch", Pointwise(*operands), (y, scale))
        if self.residual is None:
            return y
        if _by_layer(self.residual):
            return b.add("branch", Pointwise(*operands), (y, b.scalar(f"{self.title}_residual")))
        factor = self._factor(b, shape)
        return b.add("branch", Pointwise((f"{factor!r} * branch",), ("branch",)), (y,))

    def join(self, b: Builder, x: str, y: str, shape: Shape) -> str:
        """Adds the branch's value to the residual stream."""
        if self.residual == "learned":
            scale = b.param("residual", TensorType((shape.dim,), shape.dtype), constant(1.0))
            return b.add("x", Pointwise(("x + scale * branch",), ("x", "branch", "scale")), (x, y, scale))
        if self.residual is None:
            return b.add("x", Pointwise(("x + branch",), ("x", "branch")), (x, y))
        if _by_layer(self.residual):
            scale = b.scalar(f"{self.title}_residual")
            return b.add("x", Pointwise(("x + scale * branch",), ("x", "branch", "scale")), (x, y, scale))
        factor = self._factor(b, shape)
        return b.add("x", Pointwise((f"x + {factor!r} * branch",), ("x", "branch")), (x, y))

    def scalars(self, layer: int, layers: int) -> Mapping[str, float]:
        """The numbers that this layer wants bound in layer `layer`."""
        factor = None if self.residual == "learned" else self.residual
        return bound(f"{self.title}_residual", factor, layer, layers)

    @property
    def formulas(self) -> Mapping[str, str]:
        """The formulas of these numbers."""
        return {f"{self.title}_residual": self.residual} if isinstance(self.residual, str) else {}

    def _factor(self, b: Builder, shape: Shape) -> float:
        """The factor of the branch, where it is the same in every layer."""
        assert self.residual is not None and self.residual != "learned"
        layers = float(shape.layers)
        value = value_of(self.residual, layers=layers)
        return b.constant(f"{self.title}_residual", value, stated(self.residual, layers=layers))


class Skips(StrictModel):
    """Which block reads the output of which earlier block besides the one before it."""

    def sources(self, layers: int) -> Mapping[int, int]:
        """Block -> the earlier block whose output it reads."""
        raise TypeError(f"{type(self).__name__} does not say what it connects")

    def lower(self, b: Builder, x: str, skip: str, shape: Shape) -> str:
        """Joins the earlier output to the stream, at the start of the block."""
        raise TypeError(f"{type(self).__name__} does not say how it lowers")


class Bridge(StrictModel):
    """From the last h and c of the encoder, [B, D], to those that the decoder starts from."""

    def lower(self, b: Builder, h: str, c: str, width: int, shape: Shape) -> Mapping[str, str]:
        """Adds h and c of `width` features."""
        raise TypeError(f"{type(self).__name__} does not say how it lowers")


class Mix(StrictModel):
    """What a block makes of the stream, once a skip has joined it and before its layers, by what was embedded."""

    def lower(self, b: Builder, x: str, embedded: str, shape: Shape) -> str:
        """Adds it; `embedded` is the first block's input."""
        raise TypeError(f"{type(self).__name__} does not say how it lowers")


class Head(StrictModel):
    """From the last block's output to logits."""

    def lower(self, b: Builder, x: str, shape: Shape, embedding: str) -> str:
        """Adds the head; `embedding` is the token table's parameter. Returns logits f32[..., V]."""
        raise TypeError(f"{type(self).__name__} does not say how it lowers")
