"""The token table and the embedding steps that may follow it."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from specc.compiler.blocks.context import Lowered, Shape, Tokens
from specc.compiler.blocks.init import Init, formula, stated, value_of
from specc.compiler.blocks.parts import Embed
from specc.compiler.expr import ExprError
from specc.compiler.ir.graph import Builder, TensorType
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.norm import RmsNorm
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.shape import Embedding
from specc.compiler.strict import Positive, PositiveFloat, Problem


class Token(Embed):
    """Looks up a learned row of features for each id in a table [V, dim].

    Attributes:
        dim: the features of the table; the model's if unset.
        init: the initialization of the table; the model's if unset.
    """

    kind: Literal["token"]
    dim: Positive | None = None
    init: Init | None = None

    def lower(self, b: Builder, x: str | None, tokens: Tokens, shape: Shape) -> Lowered:
        dim = shape.dim if self.dim is None else shape.size("EMBED", self.dim, "features of the token table")
        table = TensorType((shape.vocab, dim), shape.dtype)
        rows = (tokens.ids, b.param("token", table, self.init or shape.matrix_init))
        return Lowered(b.add("token", Embedding(), rows))


class Project(Embed):
    """Maps the features so far to the model's features by a matrix. With a smaller `dim` of the table, this is
    factorized embedding (Lan et al., 2020)."""

    kind: Literal["project"]

    def lower(self, b: Builder, x: str | None, tokens: Tokens, shape: Shape) -> Lowered:
        assert x is not None
        weight = TensorType((shape.dim, b.types[x].width), shape.dtype)
        return Lowered(b.add("project", Linear(), (x, b.param("project", weight, shape.matrix_init))))


class EmbedScale(Embed):
    """Multiplies the features so far by a number.

    Attributes:
        by: the number, or a formula of `dim`, the features of the model, such as `sqrt(dim)`.
    """

    kind: Literal["scale"]
    by: Annotated[float | str, formula("dim")]

    def problems_in(self, dim: int) -> Iterator[Problem]:
        try:
            value_of(self.by, dim=float(dim))
        except ExprError as error:
            yield Problem(("by",), "S216", error.message, "change the formula, e.g. to `sqrt(dim)`")

    def lower(self, b: Builder, x: str | None, tokens: Tokens, shape: Shape) -> Lowered:
        assert x is not None
        value = b.constant(
            "embed_scale", value_of(self.by, dim=float(shape.dim)), stated(self.by, dim=float(shape.dim))
        )
        return Lowered(b.add("scale", Pointwise((f"x * {value!r}",), ("x",)), (x,)))


class EmbedPositions(Embed):
    """Adds a learned row of features for each position, from a table [context, features] (Vaswani et al., 2017).

    Attributes:
        init: the initialization of the table; the model's if unset.
    """

    bounded: ClassVar[bool] = True

    kind: Literal["positions"]
    init: Init | None = None

    @property
    def reads_positions(self) -> bool:
        return True

    def lower(self, b: Builder, x: str | None, tokens: Tokens, shape: Shape) -> Lowered:
        assert x is not None
        table = TensorType((shape.context, b.types[x].width), shape.dtype)
        rows = b.param("positions", table, self.init or shape.matrix_init)
        place = b.add("place", Embedding(), (tokens.positions, rows))
        return Lowered(b.add("positions", Pointwise(("x + place",), ("x", "place")), (x, place)))


class EmbedNorm(Embed):
    """RMSNorm, without a weight, of the features so far.

    Attributes:
        eps: the epsilon added to the mean square.
    """

    kind: Literal["norm"]
    eps: PositiveFloat = 1e-6

    def lower(self, b: Builder, x: str | None, tokens: Tokens, shape: Shape) -> Lowered:
        assert x is not None
        return Lowered(b.add("norm", RmsNorm(self.eps), (x,)))


def order_problems(steps: tuple[Embed, ...]) -> Iterator[Problem]:
    """Yields a problem if the token table is not the first step, or if a kind of step occurs twice."""
    kinds: dict[type[Embed], int] = {}
    for i, step in enumerate(steps):
        if (first := kinds.setdefault(type(step), i)) != i and not isinstance(step, Token):
            message = f"embed has two steps of kind {getattr(step, 'kind', '')}"
            yield Problem((i,), "S207", message, "remove one of the two", (("first use", (first,)),))
        if isinstance(step, Token) != (i == 0):
            message = f"embed starts with {getattr(step, 'kind', '')}" if i == 0 else "embed has a second token table"
            yield Problem((i,), "S206", message, "start the list with its only `{kind: token}`")
