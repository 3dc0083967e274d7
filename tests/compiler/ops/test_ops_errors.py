"""What ops refuse, in words: the node and both numbers."""

import pytest
from test_ops import HEADS, IDS, SEEN, WEIGHTS, Sample, X, graph_of

from specc.compiler.ir.graph import Op, TypeRuleError
from specc.compiler.ops.additive import Additive
from specc.compiler.ops.attention import (
    CacheWrite,
    CausalAttention,
    CausalAttentionGrad,
    Exclusive,
    Sdpa,
    SdpaSeen,
    SeenAttention,
    SeenAttentionGrad,
)
from specc.compiler.ops.hash import BigramHash
from specc.compiler.ops.linear import Dgrad, Linear, Wgrad
from specc.compiler.ops.loss import CrossEntropy, SoftmaxLoss
from specc.compiler.ops.norm import LayerNorm, RmsNorm
from specc.compiler.ops.norm_rope import NormRope, NormRopeGrad
from specc.compiler.ops.pointwise import Pointwise, SumTo
from specc.compiler.ops.positions import Rope
from specc.compiler.ops.previous import KeepLast, Previous, PreviousKept, Reset
from specc.compiler.ops.recurrent import Lstm, LstmCell
from specc.compiler.ops.sequence import Concat, StateWrite
from specc.compiler.ops.shape import CropRows, FirstFeatures, PadRows, SplitHeads

ERRORS = [
    (Linear(), ("f32[B,T,8]", "f32[6,7]"), "n takes 7 features but v0 gives 8"),
    (Linear(), ("f32[B,T,8]", "f32[8]"), "n takes a matrix [N, K], not f32[8]"),
    (Linear(2), (X, "f32[6,8]", "f32[5,8]"), "n has weights of shapes (6, 8) and (5, 8)"),
    (Linear(2), (X, "f32[6,8]"), "n takes 3 inputs but is given 2"),
    (Dgrad(), ("f32[T,8]", "f32[6,8]"), "n takes 6 features but v0 gives 8"),
    (Wgrad(), ("f32[T,8]", "f32[B,8]"), "n sums over rows ('T',) and ('B',)"),
    (RmsNorm(affine=True), (X, "f32[7]"), "n scales (7,) but v0 gives 8 features"),
    (LayerNorm(), (X, "f32[8]", "f32[9]"), "n scales (9,) but v0 gives 8 features"),
    (SdpaSeen(), (HEADS, HEADS, HEADS, SEEN), "n masks keys f32[B,T,4,6] by bool[B,S]"),
    (Additive("relu"), ("f32[B,T,2]", "f32[B,S,2]", "f32[B,S,8]", SEEN), "n scores by one number, but queries have 2"),
    (Additive("tanh"), ("f32[B,T,6]", "f32[B,S,6]", "f32[B,S,8]", SEEN, "f32[5]"), "n weighs 6 features by f32[5]"),
    (Lstm(), (X, "f32[B,3]", "f32[B,3]", "f32[12,7]", "f32[12,3]", "f32[12]"), "n takes 7 features but v0 gives 8"),
    (Lstm(), (X, "f32[B,3]", "f32[B,4]", *WEIGHTS, "f32[12]"), "n starts from h f32[B,3] and c f32[B,4]"),
    (Lstm(), (X, "f32[B,4]", "f32[B,4]", *WEIGHTS, "f32[12]"), "n starts 3 features from h f32[B,4]"),
    (
        LstmCell(),
        ("f32[B,1,8]", "f32[B,3]", "f32[B,3]", *WEIGHTS, "f32[3]"),
        "n has gates of 3 features, which f32[12,8], f32[12,3], f32[3] are not made for",
    ),
    (
        LstmCell(),
        (X, "f32[B,3]", "f32[B,3]", *WEIGHTS, "f32[12]"),
        "n takes one step of 3 features, not f32[B,T,8] from h f32[B,3]",
    ),
    (StateWrite(), ("f32[B,8]", "f32[B,7]"), "n keeps f32[B,8] but is given f32[B,7]"),
    (Concat(), (X, "f32[B,S,8]"), "n concatenates the features of f32[B,T,8] and f32[B,S,8], which differ in rows"),
    (Sdpa(), (HEADS, "f32[B,T,3,6]", "f32[B,T,3,6]"), "n attends with q f32[B,T,4,6], k f32[B,T,3,6], v f32[B,T,3,6]"),
    (Sdpa(), (HEADS, HEADS, "f32[B,T,4,7]"), "n attends with q f32[B,T,4,6], k f32[B,T,4,6], v f32[B,T,4,7]"),
    (SeenAttention(), (HEADS, HEADS, HEADS, SEEN), "n masks keys f32[B,T,4,6] by bool[B,S]"),
    (SeenAttention(), (HEADS, HEADS, HEADS, "i64[B,T]"), "n masks keys f32[B,T,4,6] by i64[B,T]"),
    (
        SeenAttentionGrad(),
        (HEADS, HEADS, HEADS, HEADS, HEADS, "f32[B,T,4]", "bool[B,T]"),
        "n takes the gradient f32[B,T,4,6] of f32[B,T,4,6] with f32[B,T,4] for q f32[B,T,4,6]",
    ),
    (CausalAttention(), (HEADS, HEADS, X), "n attends with q f32[B,T,4,6], k f32[B,T,4,6], v f32[B,T,8]"),
    (
        CausalAttentionGrad(),
        (HEADS, HEADS, HEADS, HEADS, HEADS, "f32[B,T,4]"),
        "n takes the gradient f32[B,T,4,6] of f32[B,T,4,6] with f32[B,T,4] for q f32[B,T,4,6]",
    ),
    (CacheWrite(), ("f32[B,S,4,6]", "f32[B,T,2,6]", "i64[T]"), "n writes f32[B,T,2,6] to a cache f32[B,S,4,6]"),
    (Rope(), (HEADS, "f32[T,4]", "f32[T,4]"), "n rotates 8 dims of heads of 6"),
    (SplitHeads(3), (X,), "n splits v0 of 8 features into 3 equal heads"),
    (FirstFeatures(9), (X,), "n reads 9 features but v0 gives 8"),
    (Exclusive(), (HEADS, "f32[B,T,3,6]"), "n removes values f32[B,T,3,6] from outputs f32[B,T,4,6]"),
    (Exclusive(), (HEADS, "f32[B,T,2,5]"), "n removes values f32[B,T,2,5] from outputs f32[B,T,4,6]"),
    (Previous(), ("f32[B]",), "n takes [B, T, ...], not f32[B]"),
    (PreviousKept(), (X, "f32[B,1,7]", "i64[]"), "n keeps f32[B,1,7] of f32[B,T,8]"),
    (KeepLast(), ("f32[B,2,8]", X), "n keeps f32[B,2,8] of f32[B,T,8]"),
    (Reset(1), (X, "i64[B]"), "n resets f32[B,T,8] where ids i64[B] say so"),
    (BigramHash(7), (IDS, "i64[B,S]"), "n pairs ids i64[B,T] with i64[B,S]"),
    (CrossEntropy("mean"), ("f32[B,T,7]", "i64[B]"), "n scores f32[B,T,7] by targets i64[B]"),
    (SoftmaxLoss(7, "mean"), ("f32[B,T,8]", "i64[B]"), "n scores f32[B,T,8] by targets i64[B]"),
    (SoftmaxLoss(9, "none"), ("f32[B,T,8]", IDS), "n wants 9 logits; v0 gives 8"),
    (NormRope(), ("f32[4,6]", "f32[T,3]", "f32[T,3]"), "n takes heads [..., T, H, C]; v0 gives f32[4,6]"),
    (NormRope(), (HEADS, "f32[S,3]", "f32[S,3]"), "n turns f32[B,T,4,6] by angles f32[S,3] and f32[S,3]"),
    (NormRope(), (HEADS, "f32[T,3]", "f32[T,2]"), "n turns f32[B,T,4,6] by angles f32[T,3] and f32[T,2]"),
    (NormRope(1e-6), (HEADS, "f32[T,4]", "f32[T,4]"), "n rotates 8 dims of heads of 6"),
    (NormRope(gain=True), (HEADS, "f32[T,3]", "f32[T,3]", "f32[3,1]"), "n scales 4 heads by f32[3,1]"),
    (NormRopeGrad(1e-6), (HEADS, X, "f32[T,3]", "f32[T,3]"), "n takes the gradient f32[B,T,4,6] of f32[B,T,8]"),
    (PadRows(6), ("f32[7,8]",), "n pads a matrix of at most 6 rows, not f32[7,8]"),
    (CropRows(8), ("f32[7,8]",), "n crops a matrix of at least 8 rows, not f32[7,8]"),
    (Pointwise(("x + y",), ("x", "y")), (X, "f32[7]"), "n cannot broadcast ['B', 'T', 8] with [7]"),
    (Pointwise(("x + y",), ("x", "y")), (X,), "n names 2 operands but is given 1"),
    (Pointwise(("x + z",), ("x", "y")), (X, X), "n reads 'z', which is none of its operands ['x', 'y']"),
    (SumTo((7,)), (X,), "n cannot broadcast ['B', 'T', 8] with [7]"),
    (SumTo((2, "B", "T", 8)), (X,), "n sums f32[B,T,8] to [2, 'B', 'T', 8]"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "inputs", "message"), ERRORS, ids=[message for *_, message in ERRORS])
def test_a_type_error_names_the_node_and_both_numbers(op: Op, inputs: tuple[str, ...], message: str) -> None:
    with pytest.raises(TypeRuleError) as caught:
        graph_of(Sample(op, inputs))
    assert caught.value.message == message
