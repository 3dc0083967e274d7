"""Rotary embeddings: what a spec says of them, and the angles that all layers share."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from specc.compiler.blocks.context import Shared, Tokens
from specc.compiler.ir.graph import Builder, output_refs
from specc.compiler.ops.rope import RopeAngles
from specc.compiler.strict import Positive, StrictModel, later


class RopeSpec(StrictModel):
    """Rotary positions over the first `dims` of each head, all of them where unset.

    With `trained`, a number of tokens, a longer context turns more slowly: its base is
    base * (context / trained) ** (dims / (dims - 2)), so that the slowest pair turns as far over the whole context as
    over `trained` tokens at `base` (NTK-aware scaling). The context is the model's own, whatever length a program
    sees: keys in a cache keep their angles as a text grows.
    """

    dims: Annotated[int, Field(gt=0, le=4096)] | None = None
    base: Annotated[float, Field(gt=0, le=1e15)] = 10000.0
    trained: Positive | None = later(None)

    def angles(self, size: int, context: int) -> RopeAngles:
        """The angles for heads of `size` channels in a model of `context` tokens."""
        dims = self.dims or size
        if self.trained is None or context <= self.trained:
            return RopeAngles(dims, self.base)
        return RopeAngles(dims, self.base * (context / self.trained) ** (dims / (dims - 2)))

    def formula(self, size: int, context: int) -> str | None:
        """How the base of these angles comes about; None where it is the spec's own."""
        dims = self.dims or size
        if self.trained is None or context <= self.trained:
            return None
        return f"{self.base:g} * ({context} / {self.trained}) ** ({dims} / {dims - 2})"


@dataclass(frozen=True, slots=True)
class RopeTable(Shared):
    """Cosine and sine of the rotary angles at each position."""

    angles: RopeAngles | None = None
    formula: str | None = None

    def lower(self, b: Builder, tokens: Tokens) -> tuple[str, ...]:
        assert self.angles is not None
        if self.formula is not None:
            b.constant("rope_base", self.angles.base, self.formula)
        return output_refs(b.add(self.name, self.angles, (tokens.positions,)), 2)
