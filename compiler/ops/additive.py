"""Additive attention: a small network scores each source position (Bahdanau, Cho and Bengio, 2015)."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from specc.compiler.ir.op import Op
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.records import record


@record
class Additive(Op):
    """Computes softmax(scores) v over the source positions at which `seen` is True.

    Inputs are queries [B, T, A], keys [B, S, A], values v [B, S, D] and `seen` bool[B, S]. The output is [B, T, D]. If
    `seen` is False at every position, the output is 0.

    With `form` "relu", A is 1, and the score is relu(query + key). With "tanh", the score is w . tanh(query + key),
    and a fifth input is the weight w [A].
    """

    name: ClassVar[str] = "additive"
    matrix: ClassVar[bool] = True
    work: ClassVar[str] = "attention"
    form: Literal["relu", "tanh"]

    @property
    def arity(self) -> int:
        return 4 if self.form == "relu" else 5

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        query, keys, values, seen, *weight = inputs
        if query.width != keys.width or keys.shape[:-1] != values.shape[:-1] or keys.shape[:-1] != seen.shape:
            message = f"has queries {query}, keys {keys}, values {values}, seen {seen}, which do not match"
            raise TypeRuleError(message, (0, 1, 2))
        if self.form == "relu" and query.width != 1:
            raise TypeRuleError(f"needs queries of 1 feature, not {query.width}", (0,))
        if any(w.shape != (query.width,) for w in weight):
            raise TypeRuleError(f"needs a weight of {query.width} features, not {weight[0]}", (0, 4))
        return (query.with_shape(*query.shape[:-1], values.width),)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        query, keys, values = inputs[:3]
        pairs = query.with_shape(*query.shape[:-1], keys.shape[1]).count(sizes)
        features = [width for width in (keys.width, values.width) if isinstance(width, int)]
        return pairs * (4 * features[0] + 2 * features[1])

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(f"attend_additive_{self.form}", tuple(map(Input, range(self.arity))))

    def reference(self, *inputs: Tensor) -> Tensors:
        query, keys, values, seen, *weight = inputs
        sums = query.unsqueeze(2) + keys.unsqueeze(1)
        scores = (sums.tanh() * weight[0]).sum(-1) if weight else sums.clamp_min(0).squeeze(-1)
        hidden = ~seen.unsqueeze(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0.0)
        attended: Tensor = weights @ values
        return attended
