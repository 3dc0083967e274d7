"""Refusals of ops: messages name the node and both numbers."""

import pytest
from test_ops import Sample, graph_of

from specc.compiler.ir.types import TypeRuleError

ERRORS = [
    ("linear f32[B,T,8] f32[6,7]", "n takes 7 features but v0 gives 8"),
    ("linear f32[B,T,8] f32[8]", "n takes a matrix [N, K], not f32[8]"),
    ("linear{weights=2} f32[B,T,8] f32[6,8] f32[5,8]", "n needs weights of equal shape, not (6, 8) and (5, 8)"),
    ("linear{weights=2} f32[B,T,8] f32[6,8]", "n takes 3 inputs but is given 2"),
    ("dgrad f32[T,8] f32[6,8]", "n takes 6 features but v0 gives 8"),
    ("wgrad f32[T,8] f32[B,8]", "n needs inputs with equal numbers of rows, not ('T',) and ('B',)"),
    ("rms_norm{affine=True} f32[B,T,8] f32[7]", "n has a weight of shape (7,), but v0 gives 8 features"),
    ("layer_norm f32[B,T,8] f32[8] f32[9]", "n has a weight of shape (9,), but v0 gives 8 features"),
    (
        "sdpa_seen f32[B,T,4,6] f32[B,T,4,6] f32[B,T,4,6] bool[B,S]",
        "n cannot mask keys f32[B,T,4,6] by bool[B,S]: the shapes or dtypes do not match",
    ),
    ("additive{form='relu'} f32[B,T,2] f32[B,S,2] f32[B,S,8] bool[B,S]", "n needs queries of 1 feature, not 2"),
    (
        "additive{form='tanh'} f32[B,T,6] f32[B,S,6] f32[B,S,8] bool[B,S] f32[5]",
        "n needs a weight of 6 features, not f32[5]",
    ),
    ("lstm f32[B,T,8] f32[B,3] f32[B,3] f32[12,7] f32[12,3] f32[12]", "n takes 7 features but v0 gives 8"),
    (
        "lstm f32[B,T,8] f32[B,3] f32[B,4] f32[12,8] f32[12,3] f32[12]",
        "n needs h and c of equal shape, not f32[B,3] and f32[B,4]",
    ),
    (
        "lstm f32[B,T,8] f32[B,4] f32[B,4] f32[12,8] f32[12,3] f32[12]",
        "n needs an initial h of 3 features, not f32[B,4]",
    ),
    (
        "lstm_cell f32[B,1,8] f32[B,3] f32[B,3] f32[12,8] f32[12,3] f32[3]",
        "n needs weights for gates of 3 features, not f32[12,8], f32[12,3], f32[3]",
    ),
    (
        "lstm_cell f32[B,T,8] f32[B,3] f32[B,3] f32[12,8] f32[12,3] f32[12]",
        "n takes one step, and h of 3 features, not x f32[B,T,8] and h f32[B,3]",
    ),
    ("state_write f32[B,8] f32[B,7]", "n cannot overwrite the state f32[B,8] with f32[B,7]: the types differ"),
    ("concat f32[B,T,8] f32[B,S,8]", "n concatenates the features of f32[B,T,8] and f32[B,S,8], which differ in rows"),
    (
        "sdpa f32[B,T,4,6] f32[B,T,3,6] f32[B,T,3,6]",
        "n cannot attend with q f32[B,T,4,6], k f32[B,T,3,6], v f32[B,T,3,6]: the shapes do not match",
    ),
    (
        "sdpa f32[B,T,4,6] f32[B,T,4,6] f32[B,T,2,6]",
        "n cannot attend with q f32[B,T,4,6], k f32[B,T,4,6], v f32[B,T,2,6]: the shapes do not match",
    ),
    (
        "seen_attention f32[B,T,4,6] f32[B,T,4,6] f32[B,T,4,6] bool[B,S]",
        "n cannot mask keys f32[B,T,4,6] by bool[B,S]: the shapes or dtypes do not match",
    ),
    (
        "seen_attention f32[B,T,4,6] f32[B,T,4,6] f32[B,T,4,6] i64[B,T]",
        "n cannot mask keys f32[B,T,4,6] by i64[B,T]: the shapes or dtypes do not match",
    ),
    (
        "seen_attention_grad f32[B,T,4,6] f32[B,T,4,6] f32[B,T,4,6] f32[B,T,4,6] f32[B,T,4,6] f32[B,T,4] bool[B,T]",
        "n cannot use the gradient f32[B,T,4,6] of f32[B,T,4,6] with f32[B,T,4] for q f32[B,T,4,6]: types do not match",
    ),
    (
        "causal_attention f32[B,T,4,6] f32[B,T,4,6] f32[B,T,8]",
        "n cannot attend with q f32[B,T,4,6], k f32[B,T,4,6], v f32[B,T,8]: the shapes do not match",
    ),
    (
        "causal_attention_grad f32[B,T,4,6] f32[B,T,4,6] f32[B,T,4,6] f32[B,T,4,6] f32[B,T,4,6] f32[B,T,4]",
        "n cannot use the gradient f32[B,T,4,6] of f32[B,T,4,6] with f32[B,T,4] for q f32[B,T,4,6]: types do not match",
    ),
    (
        "cache_write f32[B,S,4,6] f32[B,T,2,6] i64[T]",
        "n cannot write f32[B,T,2,6] to the cache f32[B,S,4,6]: the shapes do not match",
    ),
    ("rope f32[B,T,4,6] f32[T,4] f32[T,4]", "n cannot rotate 8 channels: a head has 6"),
    ("split_heads{heads=3} f32[B,T,8]", "n cannot split the 8 features of v0 into 3 equal heads"),
    ("first_features{features=9} f32[B,T,8]", "n reads 9 features but v0 gives 8"),
    (
        "exclusive f32[B,T,4,6] f32[B,T,3,6]",
        "n cannot remove values f32[B,T,3,6] from outputs f32[B,T,4,6]: the shapes do not fit",
    ),
    (
        "exclusive f32[B,T,4,6] f32[B,T,2,5]",
        "n cannot remove values f32[B,T,2,5] from outputs f32[B,T,4,6]: the shapes do not fit",
    ),
    ("previous f32[B]", "n takes [B, T, ...], not f32[B]"),
    ("previous_cached f32[B,T,8] f32[B,1,7] i64[]", "n needs a state of one row like f32[B,T,8], not f32[B,1,7]"),
    ("keep_last f32[B,2,8] f32[B,T,8]", "n needs a state of one row like f32[B,T,8], not f32[B,2,8]"),
    ("reset{token=1} f32[B,T,8] i64[B]", "n needs one id per row of f32[B,T,8], not i64[B]"),
    (
        "bigram_hash{buckets=7} i64[B,T] i64[B,S]",
        "n needs previous ids of the same type as the ids, i64[B,T], not i64[B,S]",
    ),
    ("cross_entropy{reduction='mean'} f32[B,T,7] i64[B]", "n needs one target per row of f32[B,T,7], not i64[B]"),
    (
        "softmax_loss{vocab=7, reduction='mean'} f32[B,T,8] i64[B]",
        "n needs one target per row of f32[B,T,8], not i64[B]",
    ),
    (
        "cross_entropy{reduction='mean', per_token='nats + nats_2', further=('2',)} f32[B,T,7] i64[B,T] i64[B]",
        "n needs one target per row of f32[B,T,7], not i64[B]",
    ),
    ("later_targets{distance=1} i64[B]", "n takes targets [B, T], not i64[B]"),
    ("softmax_loss{vocab=9, reduction='none'} f32[B,T,8] i64[B,T]", "n takes 9 logits but v0 gives 8"),
    ("norm_rope f32[4,6] f32[T,3] f32[T,3]", "n takes heads [..., T, H, C] but v0 gives f32[4,6]"),
    (
        "norm_rope f32[B,T,4,6] f32[S,3] f32[S,3]",
        "n needs angles [T, R] for the tokens of f32[B,T,4,6], not f32[S,3] and f32[S,3]",
    ),
    (
        "norm_rope f32[B,T,4,6] f32[T,3] f32[T,2]",
        "n needs angles [T, R] for the tokens of f32[B,T,4,6], not f32[T,3] and f32[T,2]",
    ),
    ("norm_rope{eps=1e-06} f32[B,T,4,6] f32[T,4] f32[T,4]", "n cannot rotate 8 channels: a head has 6"),
    ("norm_rope{gain=True} f32[B,T,4,6] f32[T,3] f32[T,3] f32[3,1]", "n needs a gain (4, 1), not f32[3,1]"),
    (
        "norm_rope_grad{eps=1e-06} f32[B,T,4,6] f32[B,T,8] f32[T,3] f32[T,3]",
        "n needs a gradient of type f32[B,T,8], not f32[B,T,4,6]",
    ),
    ("pad_rows{rows=6} f32[7,8]", "n pads a matrix of at most 6 rows, not f32[7,8]"),
    ("crop_rows{rows=8} f32[7,8]", "n crops a matrix of at least 8 rows, not f32[7,8]"),
    (
        "pointwise{outputs=('x + y',), variables=('x', 'y')} f32[B,T,8] f32[7]",
        "n cannot combine the shapes [B, T, 8] and [7]",
    ),
    ("pointwise{outputs=('x + y',), variables=('x', 'y')} f32[B,T,8]", "n has 2 operands but is given 1 inputs"),
    (
        "pointwise{outputs=('x + z',), variables=('x', 'y')} f32[B,T,8] f32[B,T,8]",
        "n reads 'z', which is not one of its operands ['x', 'y']",
    ),
    ("sum_to{shape=(7,)} f32[B,T,8]", "n cannot combine the shapes [B, T, 8] and [7]"),
    ("sum_to{shape=(2, 'B', 'T', 8)} f32[B,T,8]", "n cannot sum f32[B,T,8] to [2, 'B', 'T', 8]"),
]


@pytest.mark.parametrize(("text", "message"), ERRORS)
def test_a_type_error_names_the_node_and_both_numbers(text: str, message: str) -> None:
    with pytest.raises(TypeRuleError) as caught:
        graph_of(Sample(text))
    assert caught.value.message == message
