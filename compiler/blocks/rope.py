"""Rotary position embeddings: the spec fields, and the table of angles that layers share."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from specc.compiler.blocks.context import Shared, Tokens
from specc.compiler.ir.graph import Builder, output_refs
from specc.compiler.ops.positions import RopeAngles
from specc.compiler.strict import Positive, StrictModel, later


class RopeSpec(StrictModel):
    """Rotary positions.

    With `trained`, a longer context uses a larger base: base * (context / trained) ** (dims / (dims - 2)). The slowest
    pair then turns as far over the whole context as it turns over `trained` tokens with `base` (NTK-aware scaling). The
    context is always that of the model, not the length of a program's input, so cached keys stay valid as a text grows.

    Attributes:
        dims: how many of the first channels of each head are rotated; all if unset.
        base: the base of the wavelengths.
        trained: the number of tokens that `base` was trained on.
    """

    dims: Annotated[int, Field(gt=0, le=4096)] | None = None
    base: Annotated[float, Field(gt=0, le=1e15)] = 10000.0
    trained: Positive | None = later(None)

    def angles(self, size: int, context: int) -> RopeAngles:
        """Returns the angles for heads of `size` channels in a model of `context` tokens."""
        dims = self.dims or size
        if self.trained is None or context <= self.trained:
            return RopeAngles(dims, self.base)
        return RopeAngles(dims, self.base * (context / self.trained) ** (dims / (dims - 2)))

    def formula(self, size: int, context: int) -> str | None:
        """Returns the formula of the base of these angles; None if the base is the spec's own."""
        dims = self.dims or size
        if self.trained is None or context <= self.trained:
            return None
        return f"{self.base:g} * ({context} / {self.trained}) ** ({dims} / {dims - 2})"


@dataclass(frozen=True, slots=True)
class RopeTable(Shared):
    """The cosine and sine of the rotary angles at each position."""

    angles: RopeAngles | None = None
    formula: str | None = None

    def lower(self, b: Builder, tokens: Tokens) -> tuple[str, ...]:
        assert self.angles is not None
        if self.formula is not None:
            b.constant("rope_base", self.angles.base, self.formula)
        return output_refs(b.add(self.name, self.angles, (tokens.positions,)), 2)
