"""The base class of all terms of `train.losses`, and the sum of the terms."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from specc.compiler.ir.graph import Builder, TensorType
from specc.compiler.ops.loss import CrossEntropy
from specc.compiler.schedule import Weight
from specc.compiler.strict import StrictModel


class LossTerm(StrictModel):
    """A term of the training loss. Evaluation always uses the plain loss of the next token.

    A subclass has a `kind` Literal as its tag. It is either a function of each token, by `per_token`, or a loss that
    layers of the model state, by `states`.

    Attributes:
        weight: the factor of the term: a number, a formula in `t`, or a schedule.
    """

    # The loss of a token: an expression over `nats`, its cross-entropy, and `lse`, the log of the sum of exp(logits).
    per_token: ClassVar[str] = ""

    kind: str
    weight: Weight

    @property
    def states(self) -> str:
        """The name of the loss that layers state, as LAYER.LOSS; empty for a function of each token."""
        return ""

    @property
    def input(self) -> str:
        """The name of the program's input that holds the weight, f32 []; empty if the weight is always 1."""
        return f"{(self.states or self.kind).replace('.', '_')}_weight"


def declare_weights(b: Builder, terms: Sequence[LossTerm]) -> dict[str, str]:
    """Adds the inputs that hold the weights. Returns those of the losses that layers state, by name."""
    weights = {term.states: b.input(term.input, TensorType((), "f32")) for term in terms if term.input}
    return {name: ref for name, ref in weights.items() if name}


def add_loss(
    b: Builder, terms: Sequence[LossTerm], logits: str, targets: str, mean: bool, ignore: int | None = None
) -> str:
    """Adds the loss of the next token as the node `loss`, or in training the weighted sum of all functions of tokens.

    Args:
        b: the builder of the program, which has the inputs of `declare_weights` in training.
        terms: the terms of the training loss.
        logits: f32 [B, T, V].
        targets: i64 [B, T].
        mean: whether to return the training loss, f32 [], instead of the loss of each next token, f32 [B, T].
        ignore: a target that does not count.
    """
    reduction: Literal["mean", "none"] = "mean" if mean else "none"
    counted = [term for term in terms if term.per_token] if mean else []
    weights = tuple(term.input for term in counted if term.input)
    text = " + ".join(f"{term.input} * {term.per_token}" if term.input else term.per_token for term in counted)
    return b.add("loss", CrossEntropy(reduction, ignore, text or "nats", weights), (logits, targets, *weights))
