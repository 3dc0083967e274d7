"""The base class of all terms in `train.losses`, and the sum of the terms."""

from collections.abc import Mapping, Sequence
from typing import Literal

from specc.compiler.changing_values import Weight
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.loss import CrossEntropy
from specc.compiler.strict import StrictModel


class LossTerm(StrictModel):
    """A term of the training loss. Evaluation always uses the plain cross-entropy of the next token.

    A subclass has a `kind` Literal as its tag. A term has either an expression `per_token`, which is computed for each
    token, or `states`, the name of an auxiliary loss of layers.

    Attributes:
        weight: the factor of the term: a number, a formula in `t`, or a schedule.
    """

    kind: str
    weight: Weight

    @property
    def per_token(self) -> str:
        """The loss of a token, as an expression. The expression is empty for an auxiliary loss.

        The variables of the expression are `nats`, the cross-entropy of the next token; `lse`, which is
        log(sum(exp(logits))); and `nats_NAME`, the cross-entropy of the additional target NAME that the method
        `targets` returns.
        """
        return ""

    @property
    def states(self) -> str:
        """The name of the auxiliary loss, as LAYER.LOSS. The name is empty for a loss that is computed for each
        token."""
        return ""

    @property
    def count(self) -> int:
        """The number of modules that exist only for this term."""
        return getattr(self, "modules", 0)

    @property
    def mark(self) -> int | None:
        """The id that begins a document, if the targets of the term depend on documents."""
        return getattr(self, "bos", None)

    @property
    def furthest(self) -> tuple[str, int]:
        """The field that determines the furthest target, and the position of this target: 1 is the next token."""
        return "kind", 1

    @property
    def title(self) -> str:
        """The name of the term, unique in a spec."""
        return self.states or self.kind

    @property
    def input(self) -> str:
        """The name of the program input with the weight, f32 []. The name is empty if the weight is always 1."""
        return f"{self.title.replace('.', '_')}_weight"

    def targets(self, b: Builder, targets: str, ignore: int | None) -> Mapping[str, str]:
        """Adds nodes that compute additional targets, such as the token after the next token. The loss compares the
        logits of the next token with each additional target. Returns the references of the additional targets, i64 [B,
        T], by name. A token without an additional target has the target -1. In the expression `per_token`, the variable
        `nats_NAME` is the cross-entropy of the additional target NAME.

        Args:
            b: The builder of the program.
            targets: The next token of each token, i64 [B, T].
            ignore: The target id that the loss ignores.
        """
        return {}


def declare_weights(b: Builder, terms: Sequence[LossTerm]) -> dict[str, str]:
    weights = {term.states: b.input(term.input, TensorType((), "f32")) for term in terms if term.input}
    return {name: ref for name, ref in weights.items() if name}


def add_loss(
    b: Builder, terms: Sequence[LossTerm], logits: str, targets: str, mean: bool, ignore: int | None = None
) -> str:
    """Adds the node `loss`, and returns its value.

    With `mean`, the value is the weighted sum of all terms that are computed for each token. Otherwise, the value is
    the cross-entropy of the next token.

    Args:
        b: The builder of the program. In training, the program has the inputs of `declare_weights`.
        terms: The terms of the training loss.
        logits: The logits, f32 [B, T, V].
        targets: The next token of each token, i64 [B, T].
        mean: If true, the value is the training loss, f32 []. Otherwise, the value is the cross-entropy of each token,
            f32 [B, T].
        ignore: The target id that the loss ignores.
    """
    reduction: Literal["mean", "none"] = "mean" if mean else "none"
    counted = [term for term in terms if term.per_token] if mean else []
    weights = tuple(term.input for term in counted if term.input)
    further: dict[str, str] = {}
    for term in counted:
        further |= term.targets(b, targets, ignore)
    text = " + ".join(f"{term.input} * {term.per_token}" if term.input else term.per_token for term in counted)
    op = CrossEntropy(reduction, ignore, text or "nats", weights, tuple(further))
    return b.add("loss", op, (logits, targets, *further.values(), *weights))
