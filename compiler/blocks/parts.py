"""The base classes of the parts of a model."""

import operator
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from specc.compiler.blocks.context import Lowered, LoweringContext, Shape, Shared
from specc.compiler.blocks.wiring import Expressions, Learned, WiringText, number
from specc.compiler.expr import Var, parse, variables
from specc.compiler.expr import number as compute
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.dropout import Dropout
from specc.compiler.ops.loss import AttachLoss, MeanSquare
from specc.compiler.ops.pointwise import pointwise
from specc.compiler.programs.init import LayerFormula, constant
from specc.compiler.strict import (
    ExprText,
    LearnedName,
    PartName,
    Path,
    Problem,
    Refused,
    StrictModel,
    accepted_by,
    later,
)

# The name of the node of a norm in each place, and the prefix of the names of its parameters.
PLACES = {"before": ("h", "norm"), "after": ("normed", "after"), "stream": ("x.norm", "stream")}
Place = Literal["before", "after", "stream"]
WEIGHTLESS = "none"  # the `weight` of a norm that has no weight


def _starts(text: str) -> float:
    """Returns the initial value of the parameter `w`: 1 or 0. With this value, the expression `text` is 1."""
    expr = parse(text, ("w",))
    for start in (1.0, 0.0):
        if "w" in variables(expr) and compute(expr, w=start) == 1.0:
            return start
    raise Refused("a weight must read w, and must be 1 at w = 0 or at w = 1", "use for example `1 + w` or `w`")


NormWeight = Annotated[ExprText, accepted_by(lambda text: text == WEIGHTLESS or _starts(text))]


class Norm(StrictModel):
    """Normalizes [..., D].

    Attributes:
        weight: a learned factor of each feature: an expression of a parameter `w`, such as `w` or `1 + w`; `none` for
            no weight. The initial `w` is 0 or 1, whichever makes the factor 1.
        bias: whether to add a learned number per feature, initially 0.
        scale: a factor of the result: a number, or a formula of `layer` (the index of the block, from 0) and `layers`
            (the number of blocks).
        places: where the norms of a block are: `before` each layer, `after` each layer, or on the `stream`. A norm
            after a layer normalizes the output of the layer, before `write`. A norm of the stream normalizes the result
            of each `write` (post-LN).
        shared: whether layers that read the same value share the weights of the norm before them.
    """

    weight: NormWeight = later(WEIGHTLESS)
    bias: bool = later(False)
    scale: LayerFormula | None = None
    places: Annotated[tuple[Place, ...], Field(min_length=1, max_length=3)] = later(("before",))
    shared: bool = later(False)

    @property
    def op(self) -> Op:
        """The op of the norm. The inputs of the op are the value, the weight if there is one, and the bias if there is
        one."""
        raise TypeError(f"{type(self).__name__} must override `op`")

    def lower(self, b: Builder, x: str, name: str, shape: Shape, learned: str = "norm") -> str:
        """Adds the nodes that normalize `x` and multiply the result by the scale. Returns the product.

        Args:
            b: The builder of the function.
            x: The input, [..., D].
            name: The name of the node. The scaled result is `name`.scaled.
            shape: The sizes of the model.
            learned: The prefix of the parameter names.
        """
        normed = normalized(b, x, name, self.op, self.weight, self.bias, learned)
        if self.scale is None:
            return normed
        text, numbers = number(b, self.scale, "norm_scale", shape)
        return pointwise(b, f"{name}.scaled", f"x * {text}", x=normed, **numbers)

    def lower_at(self, place: Place, b: Builder, x: str, shape: Shape) -> str:
        """Normalizes `x` if the block has a norm at `place`.

        Args:
            place: The place of the norm in a block.
            b: The builder of the function.
            x: The input, [..., D].
            shape: The sizes of the model.

        Returns:
            The normalized value, [..., D]. Without a norm at `place`, `x`.
        """
        name, learned = PLACES[place]
        return self.lower(b, x, name, shape, learned) if place in self.places else x

    @property
    def of_no_layer(self) -> Self:
        """Returns this norm for use outside of blocks, without a `scale` that depends on the layer."""
        return self.model_copy(update={"scale": None}) if _by_layer(self.scale) else self


def normalized(b: Builder, x: str, name: str, op: Op, weight: str, bias: bool, learned: str) -> str:
    """Adds the nodes of a norm, and returns the result.

    Args:
        b: The builder of the function.
        x: The input, [..., D].
        name: The name of the node.
        op: The op of the norm. The inputs are the value, the weight if there is one, and the bias if there is one.
        weight: The weight, an expression of a learned `w` [D], or `none`.
        bias: Whether to add a learned vector [D]. If the op has no input for a bias, a separate node adds the bias.
        learned: The prefix of the parameter names `learned`_weight and `learned`_bias.
    """
    features, inputs = TensorType((b.types[x].width,), b.types[x].dtype), [x]
    if weight != WEIGHTLESS:
        inputs.append(b.param(f"{learned}_weight", features, constant(_starts(weight))))
        if parse(weight) != Var("w"):
            inputs[1] = pointwise(b, f"{name}.weight", weight, w=inputs[1])
    if not bias:
        return b.add(name, op, inputs)
    vector = b.param(f"{learned}_bias", features, constant(0.0))
    if op.arity > len(inputs):
        return b.add(name, op, (*inputs, vector))
    return pointwise(b, f"{name}.biased", "x + bias", x=b.add(name, op, inputs), bias=vector)


def _by_layer(value: float | str | None) -> bool:
    return isinstance(value, str) and "layer" in variables(parse(value))


Trait = Literal[
    "starts",  # reads only tokens or the encoder, and no earlier value
    "recurrent",  # stores h and c between tokens, and can start from the h and c of another part
    "reads_final",  # reads the last h of a recurrent encoder
    "reads_source",  # reads the output of an encoder
    "reads_seen",  # in an encoder, needs the mask of the positions that hold tokens
    "reads_positions",  # `lower` reads the positions of tokens; shared computations and cache writes do not count
    "reads_future",  # the output at a token depends on later tokens, which a decoder does not allow
    "in_place",  # writes its state in place, at the positions of the input tokens
    "bounded",  # has learned values for each position of the context, so that longer texts cannot be scored
    "functions",  # consists of several functions, which is not possible in a loop over time
]


class Part(StrictModel):
    """The base class of layers and stages. A part computes an output from an input [B, T, D]."""

    # The fields that are expressions over attention values, and may read the attention values of earlier blocks.
    over_values: ClassVar[tuple[str, ...]] = ()

    @property
    def title(self) -> str:
        """The name of the part in node names: its `name`, or its kind."""
        return getattr(self, "name", None) or str(getattr(self, "kind", ""))

    @property
    def mark(self) -> int | None:
        """The id that begins a document, or None if the part does not separate documents."""
        return getattr(self, "bos", None)

    @property
    def traits(self) -> frozenset[Trait]:
        """The traits of the part. `Trait` lists all traits."""
        return frozenset()

    @property
    def blocks(self) -> int:
        """The number of blocks in the part."""
        return 0

    @property
    def further_modules(self) -> Mapping[str, str]:
        """The additional modules of the part in generated code: the description of each module, by name."""
        return {}

    @property
    def places(self) -> Iterator[tuple[str, Path]]:
        """Yields two values for each part inside this part: the prefix of node names, and the spec path."""
        yield from ()

    def sizes(self, dim: int) -> Mapping[str, int]:
        """Returns the attention sizes, such as `heads`, in a model of `dim` features. The result is empty without
        attention."""
        return {}

    def head_values(self, dim: int) -> tuple[int, int] | None:
        """Returns the number of heads and the number of channels per head of the attention values that later blocks may
        read. `dim` is the number of features of the model. Returns None if the part has no attention values."""
        return None

    @property
    def reads(self) -> str | None:
        """The title of the earlier part whose output this part also reads, or None."""
        return None

    @property
    def query_stage(self) -> str | None:
        """The title of the later recurrent part whose last h is the query of this part, or None. All parts from this
        part to the recurrent part form a loop over time."""
        return None

    def problems_in(self, shape: Shape) -> Iterator[Problem]:
        """Yields the problems of this part in a model of this shape. Paths are relative to the part."""
        yield from ()

    def sees_later(self, shape: Shape) -> bool:
        """Returns whether a token of the prefix attends to a later token."""
        return False

    def shared(self, shape: Shape) -> tuple[Shared, ...]:
        """Returns the computations that this part shares with other parts."""
        return ()

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        """Returns the types of the part's decoding state, such as caches, by key. The first dim is the batch B."""
        return {}

    def begin(self, b: Builder, shape: Shape, context: LoweringContext) -> Mapping[str, str]:
        """Adds the nodes that compute the initial state of the part, in a model with an encoder. Returns this state by
        key. State that is not in the result is initially 0."""
        return {}

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        """Adds the nodes of the part to a function or program. Returns the output and the new state.

        Args:
            b: The builder of the function or program.
            x: The input, [B, T, D]. Empty for a part with the trait `starts`.
            shape: The sizes of the model. `shape.dim` is D, except for a step of `embed`: the input of such a step may
                differ in width from the model.
            context: The other values that the part can read.

        Raises:
            TypeRuleError: If an op does not accept the shapes or dtypes of its inputs.
        """
        raise TypeError(f"{type(self).__name__} must override `lower`")

    @property
    def learned(self) -> Mapping[str, Learned]:
        """The learned values that expressions of the part read, by name."""
        return {}

    @property
    def wirings(self) -> Mapping[str, Expressions]:
        """The part's expressions, by field: `read`, then the expressions of values inside the part, then `write`."""
        return {}

    @property
    def own_values(self) -> tuple[str, ...]:
        """The learned values that the part reads outside of its expressions."""
        return ()

    @property
    def losses(self) -> tuple[str, ...]:
        """The names of the auxiliary losses that the part can compute."""
        return ()

    def with_losses(self, b: Builder, lowered: Lowered, context: LoweringContext) -> str:
        """Attaches the losses in `lowered` to the output of the part. Returns the output.

        A loss is attached if `context` has a weight for the loss. The backward pass then adds the gradient of the
        weighted loss to the gradient of the output.
        """
        y, stated = lowered.value, dict(lowered.losses)
        if f"{self.title}.activation" in context.weights:
            stated["activation"] = b.add("activation", MeanSquare(), (y,))
        for name, loss in stated.items():
            if weight := context.weights.get(f"{self.title}.{name}"):
                y = b.add(f"{name}_loss", AttachLoss(), (y, loss, weight))
        return y

    def dropped(self, b: Builder, y: str, context: LoweringContext) -> str:
        """Returns the output `y` of the part. In training, if the part has a field `dropout`, elements of `y` are
        dropped with the probability in this field."""
        share = getattr(self, "dropout", 0.0)
        return b.add("dropped", Dropout(share), (y,)) if context.training and share else y


class Embed(Part):
    """One step from token ids to the first block's input."""


class Wired(Part):
    """A part whose expressions read and write named values.

    Attributes:
        name: the name of the part in paths of nodes and parameters. By default, the kind of the part.
        learn: learned values, by name.
        read: an expression for the input of the part, before the norm. By default, the first residual stream of a
            block, or the output of the previous stage.
        write: an expression for the residual stream after a layer of a block, or for the output of a stage. The default
            is `x + y` in blocks, and `y` elsewhere.
    """

    # The fields that are expressions over a value inside the part. The value has the same name as the field.
    inner: ClassVar[tuple[str, ...]] = ()

    name: PartName | None = None
    learn: dict[LearnedName, Learned] = Field({}, exclude_if=operator.not_)
    read: WiringText | None = later(None)
    write: Expressions | None = later(None)

    @property
    def learned(self) -> Mapping[str, Learned]:
        return self.learn

    @property
    def wirings(self) -> Mapping[str, Expressions]:
        values = {name: getattr(self, name) for name in ("read", *self.inner, "write")}
        return {name: value for name, value in values.items() if value is not None}


class Stage(Wired):
    """A part whose output replaces the input. The output may have another number of features than the input."""


class Layer(Wired):
    """One residual branch of a block.

    The branch computes an output `y`. Its input is the value that `read` computes, by default the residual stream. If
    the block has a norm, the input is normalized. Expressions of a layer can read the same
    values as the expressions of the block.

    Attributes:
        dropout: the probability with which an element of `y` is dropped in training.
    """

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def losses(self) -> tuple[str, ...]:
        """The names of the auxiliary losses that the layer can compute. `activation` is the mean square of the layer's
        output."""
        return ("activation",)


class Bridge(StrictModel):
    """Computes the initial h and c of the decoder from the last h and c of the encoder, [B, D]."""

    def lower(self, b: Builder, h: str, c: str, width: int, shape: Shape) -> Mapping[str, str]:
        """Adds the nodes of the decoder's initial state. Returns `h` and `c`, each [B, width].

        Args:
            b: The builder of the program.
            h: The last h of the encoder, [B, D].
            c: The last c of the encoder, [B, D].
            width: The number of features of the decoder's state.
            shape: The sizes of the decoder.

        Raises:
            TypeRuleError: If the bridge cannot return `width` features.
        """
        raise TypeError(f"{type(self).__name__} must override `lower`")
