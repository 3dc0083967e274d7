"""The cross-entropy of later tokens, which modules after the last block predict. These modules exist only in
training."""

from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.losses.term import LossTerm
from specc.compiler.strict import NonNegative


class ModuleAhead(LossTerm):
    """The mean cross-entropy of `modules` later tokens. Module k predicts the token k positions after the next token.

    A module consists of a block like the last block of the model, a norm, and the head of the model. The parameters of
    the modules have the prefixes `ahead1`, `ahead2`, and so on. Checkpoints contain these parameters, but scoring,
    generation and artifacts do not use them. Each mean is over all tokens. Targets beyond the end of a row or a
    document contribute 0 to the mean.

    Attributes:
        form: `heads`: each module reads the residual stream after the last block (Gloeckle et al. 2024, arXiv
            2404.19737). `sequential`: two values are normalized and concatenated: the stream after module k - 1, and
            the embedding of the token k positions later. Module k reads a matrix product of the result (DeepSeek-V3,
            arXiv 2412.19437).
        modules: the number of modules.
        bos: the id that begins a document. If `bos` is set, targets in later documents do not count.
    """

    kind: Literal["module_ahead"]
    form: Literal["heads", "sequential"]
    modules: Annotated[int, Field(ge=1, le=8)] = 1
    bos: NonNegative | None = None

    @property
    def furthest(self) -> tuple[str, int]:
        return "modules", self.modules + 1
