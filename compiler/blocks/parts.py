"""The base classes of the parts of a model, and the properties and methods that each part implements."""

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

# Indices of layers, from 0.
LayerList = Annotated[tuple[Annotated[int, Field(ge=0, lt=1000)], ...], Field(min_length=1, max_length=1000)]


def layer_problems(layers: tuple[int, ...] | None, at: Path, count: int) -> Iterator[Problem]:
    """Yields a problem for each index that a model of `count` layers does not have, and for each index listed twice."""
    for i, layer in enumerate(layers or ()):
        if layer >= count:
            hint = f"the last one is {count - 1}: layers are counted from 0"
            yield Problem((*at, i), "S240", f"there is no layer {layer} in {count} blocks", hint)
        elif layers is not None and layer in layers[:i]:
            yield Problem((*at, i), "S240", f"layer {layer} is listed twice", "remove one of the two")


LayerFormula = Annotated[float | str, formula("layer", "layers")]


class Norm(StrictModel):
    """Normalizes [..., D].

    Attributes:
        scale: a factor of the result, which may depend on the layer, counted from 0.
    """

    scale: LayerFormula | None = None

    def lower(self, b: Builder, x: str, name: str, shape: Shape) -> str:
        """Adds the norm of `x` as the node `name`, with its scale, and returns the result.

        Args:
            b: the builder of the function.
            x: the input, [..., D].
            name: the name of the node. The scaled result is `name`.scaled.
            shape: the shape dims of the model.
        """
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
        """This norm for use outside the blocks: without `scale` if the scale depends on the layer."""
        return self.model_copy(update={"scale": None}) if _by_layer(self.scale) else self

    def normalize(self, b: Builder, x: str, name: str) -> str:
        raise TypeError(f"{type(self).__name__} does not say how it normalizes")

    def scalars(self, layer: int, layers: int) -> Mapping[str, float]:
        """Returns the scalars that this norm needs in layer `layer` of `layers`, by name."""
        return bound("norm_scale", self.scale, layer, layers)

    @property
    def formulas(self) -> Mapping[str, str]:
        """The formulas of the scalars, by name."""
        return {"norm_scale": self.scale} if isinstance(self.scale, str) else {}


def _by_layer(value: float | str | None) -> bool:
    """Returns whether a factor depends on the layer. Such a factor is a scalar of the function; any other is
    inlined."""
    return isinstance(value, str) and "layer" in variables(parse(value))


def bound(scalar: str, value: float | str | None, layer: int, layers: int) -> Mapping[str, float]:
    """Returns the value of a scalar in one layer, by the scalar's name. Returns an empty mapping unless the factor
    depends on the layer.

    Args:
        scalar: the name of the scalar.
        value: the factor: a number, a formula over `layer` and `layers`, or None.
        layer: the index of the layer, from 0.
        layers: the number of layers.
    """
    if isinstance(value, str) and _by_layer(value):
        return {scalar: value_of(value, layer=float(layer), layers=float(layers))}
    return {}


def formula_problems(value: float | str | None, at: Path, layers: int) -> Iterator[Problem]:
    """Yields a problem for the first of `layers` layers in which a factor is not a finite number."""
    for layer in range(layers if isinstance(value, str) else 0):
        try:
            value_of(value, layer=float(layer), layers=float(layers))  # type: ignore[arg-type]
        except ExprError as error:
            hint = "layers are counted from 0: change the formula"
            yield Problem(at, "S216", f"in layer {layer}, {error.message}", hint)
            return


class Embed(StrictModel):
    """One step of the computation from token ids to the first block's input."""

    @property
    def title(self) -> str:
        """The name of the step in node names: its kind."""
        return str(getattr(self, "kind", ""))

    @property
    def mark(self) -> int | None:
        """The id that starts a document, if the step reads nothing across document boundaries; None otherwise."""
        return getattr(self, "bos", None)

    def state(self, features: Dim, shape: Shape) -> Mapping[str, TensorType]:
        """Returns the types of the state that the step stores between tokens, by key, for an input of `features`
        features."""
        return {}

    def lower(self, b: Builder, x: str | None, tokens: Tokens, shape: Shape) -> Lowered:
        """Adds the step and returns its value and new state.

        Args:
            b: the builder of the program.
            x: the output of the previous step, [B, T, features]; None for the first step.
            tokens: the token inputs. `tokens.cache` is the step's own state.
            shape: the shape dims of the model.
        """
        raise TypeError(f"{type(self).__name__} does not say how it lowers")


class Part(StrictModel):
    """One computation on a value [B, T, D].

    Attributes:
        name: the name of the part in paths of nodes and parameters; its kind if unset.
    """

    # The part reads only tokens or the encoder, and no earlier value.
    starts: ClassVar[bool] = False
    # The part stores h and c between tokens, and can start from those of another part.
    recurrent: ClassVar[bool] = False
    # The part reads the last h of a recurrent encoder.
    reads_final: ClassVar[bool] = False

    name: PartName | None = None

    @property
    def title(self) -> str:
        return self.name or str(getattr(self, "kind", ""))

    @property
    def mark(self) -> int | None:
        """The id that starts a document, if the part reads nothing across document boundaries; None otherwise."""
        return getattr(self, "bos", None)

    @property
    def reads_source(self) -> bool:
        """True if the part reads the output of an encoder."""
        return False

    @property
    def in_place(self) -> bool:
        """True if the part writes its state in place, at the positions of its tokens."""
        return False

    @property
    def reads_seen(self) -> bool:
        """True if the part, in an encoder, needs the mask of positions that hold tokens."""
        return False

    @property
    def reads_positions(self) -> bool:
        """True if the part itself reads the positions of its tokens, apart from its shared values and cache writes."""
        return False

    @property
    def reads_future(self) -> bool:
        """True if a token's value depends on later tokens. Such a part is not allowed in a decoder."""
        return False

    @property
    def reads(self) -> str | None:
        """The title of an earlier part whose value it reads in addition to its input; None if there is none."""
        return None

    @property
    def query_stage(self) -> str | None:
        """The title of a later recurrent part whose last h it attends with; None if there is none. All parts from this
        part to that part then form a loop over time."""
        return None

    def problems_in(self, dim: int, layers: int = 1) -> Iterator[Problem]:
        """Yields the problems of this part in a model of `dim` features, in one of `layers` blocks. Paths are relative
        to the part."""
        yield from ()

    def shared(self, shape: Shape) -> tuple[Shared, ...]:
        """Returns the computations that it shares with other parts."""
        return ()

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        """Returns the types of the state that the part stores between tokens, by key, with one row per row of the
        input."""
        return {}

    def begin(self, b: Builder, shape: Shape, context: LoweringContext) -> Mapping[str, str]:
        """Adds the state before the first token, for a model with an encoder, and returns it by key. Keys that are not
        returned start at 0."""
        return {}

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        """Adds the part and returns its value and new state.

        Args:
            b: the builder of the function or program.
            x: the input, [B, T, D].
            shape: the shape dims of the model, with D features.
            context: the other values that the part can read.

        Raises:
            TypeRuleError: if an op does not accept the shapes or dtypes of its inputs.
        """
        raise TypeError(f"{type(self).__name__} does not say how it lowers")

    def dropped(self, b: Builder, y: str, context: LoweringContext) -> str:
        """Returns `y`, the part's value. In training, drops each element with probability `dropout`, if the part has
        that field."""
        share = getattr(self, "dropout", 0.0)
        return b.add("dropped", Dropout(share), (y,)) if context.training and share else y


class Stage(Part):
    """A part whose value replaces its input and may have another number of features. It may read the values of earlier
    parts."""


class Layer(Part):
    """One residual branch of a block: x + residual * f(norm(x)).

    Attributes:
        residual: a factor, a formula, or `learned`: one learned factor per feature, from 1. If unset, it is 1.
        dropout: the probability that an element of the branch is dropped in training.
    """

    residual: Literal["learned"] | LayerFormula | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def weighed(self, b: Builder, y: str, shape: Shape) -> str:
        """Adds the branch's value `y` times its residual factor, for a caller that adds it to the stream itself."""
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
        """Adds the branch's value, times its residual factor, to the residual stream and returns the result.

        Args:
            b: the builder of the function.
            x: the residual stream, [B, T, D].
            y: the branch's value, [B, T, D].
            shape: the shape dims of the model.
        """
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
        """Returns the scalars that this layer needs in layer `layer` of `layers`, by name."""
        factor = None if self.residual == "learned" else self.residual
        return bound(f"{self.title}_residual", factor, layer, layers)

    @property
    def formulas(self) -> Mapping[str, str]:
        """The formulas of the scalars, by name."""
        return {f"{self.title}_residual": self.residual} if isinstance(self.residual, str) else {}

    def _factor(self, b: Builder, shape: Shape) -> float:
        """Returns the residual factor, which must be the same in every layer."""
        assert self.residual is not None and self.residual != "learned"
        layers = float(shape.layers)
        value = value_of(self.residual, layers=layers)
        return b.constant(f"{self.title}_residual", value, stated(self.residual, layers=layers))


class Skips(StrictModel):
    """Skip connections: maps a block to the earlier block whose output it reads in addition to that of the previous
    block."""

    def sources(self, layers: int) -> Mapping[int, int]:
        """Returns the index of the earlier block that each block reads, by the index of the reader, for `layers`
        blocks."""
        raise TypeError(f"{type(self).__name__} does not say what it connects")

    def lower(self, b: Builder, x: str, skip: str, shape: Shape) -> str:
        """Adds an earlier block's output to the stream, at the start of a block, and returns the result.

        Args:
            b: the builder of the function.
            x: the stream, [B, T, D].
            skip: the earlier block's output, [B, T, D].
            shape: the shape dims of the model.
        """
        raise TypeError(f"{type(self).__name__} does not say how it lowers")


class Bridge(StrictModel):
    """Computes the initial h and c of the decoder from the last h and c of the encoder, [B, D]."""

    def lower(self, b: Builder, h: str, c: str, width: int, shape: Shape) -> Mapping[str, str]:
        """Adds the initial state of the decoder and returns it as `h` and `c`, each [B, width].

        Args:
            b: the builder of the program.
            h: the last h of the encoder, [B, D].
            c: the last c of the encoder, [B, D].
            width: the number of features of the decoder's state.
            shape: the shape dims of the decoder.

        Raises:
            TypeRuleError: if the bridge cannot return `width` features.
        """
        raise TypeError(f"{type(self).__name__} does not say how it lowers")


class Mix(StrictModel):
    """Combines the stream with the first block's input. It runs in each block after the skip connection, before the
    layers."""

    def lower(self, b: Builder, x: str, embedded: str, shape: Shape) -> str:
        """Adds the mix of the stream with the first block's input and returns the result.

        Args:
            b: the builder of the function.
            x: the stream, [B, T, D].
            embedded: the first block's input, [B, T, D].
            shape: the shape dims of the model.
        """
        raise TypeError(f"{type(self).__name__} does not say how it lowers")


class Head(StrictModel):
    """Computes logits from the last block's output."""

    def lower(self, b: Builder, x: str, shape: Shape, embedding: str) -> str:
        """Adds the head and returns the logits, f32[..., V].

        Args:
            b: the builder of the program.
            x: the last block's output, [..., D].
            shape: the shape dims of the model.
            embedding: the reference of the token table's parameter, [V, D].
        """
        raise TypeError(f"{type(self).__name__} does not say how it lowers")
