"""The base classes of the parts of a model, and the properties and methods that each part implements."""

import operator
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field

from specc.compiler.blocks.context import Lowered, LoweringContext, Shape, Shared, Tokens
from specc.compiler.blocks.init import LayerFormula, constant
from specc.compiler.blocks.wiring import Expressions, Learned, WiringText, number
from specc.compiler.expr import Var, parse, variables
from specc.compiler.expr import number as compute
from specc.compiler.ir.graph import Builder, Dim, Op, TensorType
from specc.compiler.ops.dropout import Dropout
from specc.compiler.ops.loss import AttachLoss, MeanSquare
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.strict import LearnedName, PartName, Problem, StrictModel, later

PLACES = {"before": ("h", "norm"), "after": ("normed", "after")}  # names of nodes, prefixes of parameters
WEIGHTLESS = "none"  # the weight of a norm without one


def _starts(text: str) -> float:
    """Returns the number, 0 or 1, for which a weight is 1."""
    expr = parse(text, ("w",))
    for start in (1.0, 0.0):
        if "w" in variables(expr) and compute(expr, w=start) == 1.0:
            return start
    raise ValueError("a weight must read w, and be 1 where w is 0 or 1, e.g. `1 + w`")


def _weight(text: str) -> str:
    if text != WEIGHTLESS:
        _starts(text)
    return text


NormWeight = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_weight)]


class Norm(StrictModel):
    """Normalizes [..., D].

    Attributes:
        weight: a learned factor of each feature, as an expression of a parameter `w`, such as `w` or `1 + w`; `none`
            for no weight. `w` starts at 1 or 0, where the factor is 1.
        scale: a factor of the result, which may depend on the layer, counted from 0.
        places: where the norms of a block are: `before` each layer, `after` it, or both. A norm after a layer reads
            its value, before the value is written.
        shared: whether layers that read the same value share the weights of the norm before them.
    """

    weight: NormWeight = later(WEIGHTLESS)
    scale: LayerFormula | None = None
    places: Annotated[tuple[Literal["before", "after"], ...], Field(min_length=1, max_length=2)] = later(("before",))
    shared: bool = later(False)

    @property
    def op(self) -> Op:
        """The op of the norm. Its inputs are the value, then the weight and the bias that the norm has."""
        raise TypeError(f"{type(self).__name__} must override `op`")

    def lower(self, b: Builder, x: str, name: str, shape: Shape, learned: str = "norm") -> str:
        """Adds the norm of `x` as the node `name`, with its scale, and returns the result.

        Args:
            b: the builder of the function.
            x: the input, [..., D].
            name: the name of the node. The scaled result is `name`.scaled.
            shape: the shape dims of the model.
            learned: the prefix of the names of its parameters.
        """
        normed = normalized(b, x, name, self.op, self.weight, learned)
        if self.scale is None:
            return normed
        text, numbers = number(b, self.scale, "norm_scale", shape)
        return b.add(f"{name}.scaled", Pointwise((f"x * {text}",), ("x", *numbers)), (normed, *numbers.values()))

    def lower_at(self, place: Literal["before", "after"], b: Builder, x: str, shape: Shape) -> str:
        """Adds the norm of `x` before or after a layer, if there is one, and returns the result."""
        name, learned = PLACES[place]
        return self.lower(b, x, name, shape, learned) if place in self.places else x

    @property
    def of_no_layer(self) -> Self:
        """This norm for use outside the blocks: without `scale` if the scale depends on the layer."""
        return self.model_copy(update={"scale": None}) if _by_layer(self.scale) else self


def normalized(b: Builder, x: str, name: str, op: Op, weight: str, learned: str) -> str:
    """Adds a norm and returns its result.

    Args:
        b: the builder of the function.
        x: the input, [..., D].
        name: the name of the node.
        op: the op. Its inputs are the value, then a weight and a bias if it has them.
        weight: the weight, an expression of a learned `w` [D], or `none`.
        learned: the prefix of the names of the parameters: `learned`_weight and `learned`_bias.
    """
    features, inputs = TensorType((b.types[x].width,), b.types[x].dtype), [x]
    if weight != WEIGHTLESS:
        inputs.append(b.param(f"{learned}_weight", features, constant(_starts(weight))))
        if parse(weight) != Var("w"):
            inputs[1] = b.add(f"{name}.weight", Pointwise((weight,), ("w",)), (inputs[1],))
    if op.arity > len(inputs):
        inputs.append(b.param(f"{learned}_bias", features, constant(0.0)))
    return b.add(name, op, inputs)


def _by_layer(value: float | str | None) -> bool:
    return isinstance(value, str) and "layer" in variables(parse(value))


class Embed(StrictModel):
    """One step of the computation from token ids to the first block's input."""

    # The step has learned values for each position, as many as the context. Longer texts cannot be scored.
    bounded: ClassVar[bool] = False

    @property
    def title(self) -> str:
        """The name of the step in node names: its kind."""
        return str(getattr(self, "kind", ""))

    @property
    def mark(self) -> int | None:
        """The id that starts a document, if the step reads nothing across document boundaries; None otherwise."""
        return getattr(self, "bos", None)

    @property
    def reads_positions(self) -> bool:
        """True if the step reads the positions of its tokens."""
        return False

    def problems_in(self, dim: int) -> Iterator[Problem]:
        """Yields the problems of the step in a model of `dim` features. Paths are relative to the step."""
        yield from ()

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
        raise TypeError(f"{type(self).__name__} must override `lower`")


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
    # The part has learned values for each position, as many as the context. Longer texts cannot be scored.
    bounded: ClassVar[bool] = False

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

    def values_width(self, dim: int) -> int | None:
        """Returns the number of features of the values that the part attends to; None without attention.

        Args:
            dim: the number of features of the model.
        """
        return None

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

    def problems_of_context(self, context: int, causal: bool) -> Iterator[Problem]:
        """Yields the problems of this part in a model of `context` tokens. `causal` states whether a token reads only
        itself and earlier ones. Paths are relative to the part."""
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
        raise TypeError(f"{type(self).__name__} must override `lower`")

    def dropped(self, b: Builder, y: str, context: LoweringContext) -> str:
        """Returns `y`, the part's value. In training, drops each element with probability `dropout`, if the part has
        that field."""
        share = getattr(self, "dropout", 0.0)
        return b.add("dropped", Dropout(share), (y,)) if context.training and share else y


class Stage(Part):
    """A part whose value replaces its input and may have another number of features. It may read the values of earlier
    parts."""


class Layer(Part):
    """One residual branch of a block.

    The branch reads the norm of a value of the block, and gives a value `y`. Expressions are as in the block.

    Attributes:
        learn: learned values, by name.
        read: the value whose norm the layer reads. If unset, the first residual stream.
        write: the residual stream after the layer. If unset, `x + y`.
        dropout: the probability with which each element of `y` is dropped in training.
    """

    # The fields that are expressions over values of the layer itself, which have the name of the field.
    inner: ClassVar[tuple[str, ...]] = ()

    learn: dict[LearnedName, Learned] = Field({}, exclude_if=operator.not_)
    read: WiringText | None = later(None)
    write: Expressions | None = later(None)
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def __hash__(self) -> int:  # mappings have no hash
        return hash(self.model_dump_json())

    @property
    def own_values(self) -> tuple[str, ...]:
        """The learned values that the layer itself reads, and not its wiring."""
        return ()

    @property
    def losses(self) -> tuple[str, ...]:
        """The losses that the layer can state. `activation` is the mean square of its value."""
        return ("activation",)

    def with_losses(self, b: Builder, lowered: Lowered, context: LoweringContext) -> str:
        """Returns the layer's value, with the gradients of those stated losses that have a weight in `context`."""
        y, stated = lowered.value, dict(lowered.losses)
        if f"{self.title}.activation" in context.weights:
            stated["activation"] = b.add("activation", MeanSquare(), (y,))
        for name, loss in stated.items():
            if weight := context.weights.get(f"{self.title}.{name}"):
                y = b.add(f"{name}_loss", AttachLoss(), (y, loss, weight))
        return y


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
        raise TypeError(f"{type(self).__name__} must override `lower`")


class Head(StrictModel):
    """Computes logits from the last block's output."""

    def lower(self, b: Builder, x: str, shape: Shape, embedding: str, title: str = "") -> str:
        """Adds the head and returns the logits, f32[..., V].

        Args:
            b: the builder of the program.
            x: the last block's output, [..., D].
            shape: the shape dims of the model.
            embedding: the reference of the token table's parameter, [V, D].
            title: the name of the function that bounds logits in kernel names, if it is not that of the function.
        """
        raise TypeError(f"{type(self).__name__} must override `lower`")
