"""The cross-entropy of a token after the next token, from the logits of the next token."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.ir.builder import Builder
from specc.compiler.losses.term import LossTerm
from specc.compiler.ops.loss import LaterTargets
from specc.compiler.strict import NonNegative


class LaterToken(LossTerm):
    """The cross-entropy of the token `ahead` positions later, from the logits of the next token. This is a form of
    multi-token prediction.

    If the target is beyond the end of the row, or in a later document than the next token, the loss of the token is 0.
    The mean is over all tokens.

    Attributes:
        ahead: the position of the target: 2 is the token after the next token.
        bos: the id that begins a document. If `bos` is set, targets in later documents do not count.
    """

    kind: Literal["later_token"]
    ahead: Annotated[int, Field(ge=2, le=16)]
    bos: NonNegative | None = None

    @property
    def furthest(self) -> tuple[str, int]:
        return "ahead", self.ahead

    @property
    def title(self) -> str:
        return f"{self.kind}_{self.ahead}"

    @property
    def per_token(self) -> str:
        return f"nats_{self.ahead}"

    def targets(self, b: Builder, targets: str, ignore: int | None) -> Mapping[str, str]:
        later = LaterTargets(self.ahead - 1, self.bos, ignore)
        return {str(self.ahead): b.add(f"targets_{self.ahead}", later, (targets,))}
