"""The token table, and the embedding steps that may follow the table."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

from specc.compiler.blocks.context import Lowered, LoweringContext, Shape
from specc.compiler.blocks.norm import norm_op
from specc.compiler.blocks.parts import WEIGHTLESS, Embed, NormWeight, Trait, normalized
from specc.compiler.blocks.wiring import failure
from specc.compiler.ir.builder import Builder
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import pointwise
from specc.compiler.ops.shape import Embedding
from specc.compiler.programs.init import Init, formula, stated, value_of
from specc.compiler.strict import Positive, PositiveFloat, Problem, later


class Token(Embed):
    """Looks up a learned row of features for each id in a table [V, dim].

    Attributes:
        dim: the number of features of the table. By default, the features of the model.
        init: the initialization of the table. By default, the model's `init`.
    """

    kind: Literal["token"]
    dim: Positive | None = None
    init: Init | None = None

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        dim = shape.dim if self.dim is None else shape.size("EMBED", self.dim, "features of the token table")
        table = shape.activation(shape.vocab, dim)
        rows = (context.ids, b.param("token", table, self.init or shape.matrix_init))
        return Lowered(b.add("token", Embedding(), rows))


class Project(Embed):
    """Multiplies by a matrix that maps the current features to the features of the model. After a token table with
    fewer features, this is factorized embedding (Lan et al., 2020)."""

    kind: Literal["project"]

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        weight = shape.activation(shape.dim, b.types[x].width)
        return Lowered(b.add("project", Linear(), (x, b.param("project", weight, shape.matrix_init))))


class EmbedScale(Embed):
    """Multiplies the current features by a number.

    Attributes:
        by: the number, or a formula of `dim` (the features of the model) such as `sqrt(dim)`.
    """

    kind: Literal["scale"]
    by: Annotated[float | str, formula("dim")]

    def problems_in(self, shape: Shape) -> Iterator[Problem]:
        value = partial(value_of, self.by, dim=float(shape.dim))
        yield from failure(value, ("by",), "S216", "change the formula, e.g. to `sqrt(dim)`")

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        value = b.constant(
            "embed_scale", value_of(self.by, dim=float(shape.dim)), stated(self.by, dim=float(shape.dim))
        )
        return Lowered(pointwise(b, "scale", f"x * {value!r}", x=x))


class EmbedPositions(Embed):
    """Adds a learned row of features for each position, from a table [context, features] (Vaswani et al., 2017).

    Attributes:
        init: the initialization of the table. By default, the model's `init`.
    """

    kind: Literal["positions"]
    init: Init | None = None

    @property
    def traits(self) -> frozenset[Trait]:
        return frozenset({"bounded", "reads_positions"})

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        table = shape.activation(shape.context, b.types[x].width)
        rows = b.param("positions", table, self.init or shape.matrix_init)
        place = b.add("place", Embedding(), (context.positions, rows))
        return Lowered(pointwise(b, "positions", "x + place", x=x, place=place))


class EmbedNorm(Embed):
    """Normalizes the current features.

    Attributes:
        norm: RMSNorm or LayerNorm.
        weight: a learned factor of each feature, as in the norms of blocks.
        bias: whether to add a learned number per feature, initially 0.
        eps: the epsilon added to the mean square or variance.
    """

    kind: Literal["norm"]
    norm: Literal["rms", "layer"] = later("rms")
    weight: NormWeight = later(WEIGHTLESS)
    bias: bool = later(False)
    eps: PositiveFloat = 1e-6

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        op = norm_op(self.norm, self.eps, self.weight, self.bias)
        return Lowered(normalized(b, x, "norm", op, self.weight, self.bias, "norm"))


def order_problems(steps: tuple[Embed, ...]) -> Iterator[Problem]:
    kinds: dict[type[Embed], int] = {}
    for i, step in enumerate(steps):
        if (first := kinds.setdefault(type(step), i)) != i and not isinstance(step, Token):
            message = f"`embed` has two steps of kind `{getattr(step, 'kind', '')}`"
            yield Problem((i,), "S207", message, "remove one of the two", (("first use", (first,)),))
        if isinstance(step, Token) != (i == 0):
            message = (
                f"`embed` starts with `{getattr(step, 'kind', '')}`" if i == 0 else "`embed` has a second token table"
            )
            yield Problem((i,), "S206", message, "keep one `{kind: token}`, as the first item of the list")
