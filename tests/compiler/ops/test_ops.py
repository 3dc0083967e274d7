"""Every op: its Torch spelling against its reference in float64, its types against real tensors, its costs."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from specc.compiler import ops
from specc.compiler.catalog import classes
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.op import Op
from specc.compiler.ir.text import parse_op, parse_type
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.caches.key_value_cache import CODES
from specc.compiler.ops.caches.paged_attention import TABLE
from specc.compiler.ops.dropout import DRAW
from specc.compiler.ops.pooled.attention import PoolWrite
from specc.compiler.ops.shape import Moves
from specc.compiler.programs import fx_witness as witness
from specc.compiler.render.jinja import exists, render
from specc.compiler.render.model import OpContext
from specc.runtime.dtypes import DTYPES
from specc.runtime.verify.judge import many

MODULES = itertools.count()
B, T, S = 3, 5, 9
SIZES = {"B": B, "T": T, "S": S}
OPS = classes(ops, Op)


class Sample:
    """An op on inputs of some types, as text: `rms_norm{eps=0.5} f32[B,T,8]`. `ids` bounds what i64 inputs hold."""

    def __init__(self, text: str, ids: int = 7, sizes: Mapping[str, int] = SIZES) -> None:
        match = re.fullmatch(r"(\w+)(\{.*\})? (.*)", text)
        assert match is not None
        self.text, self.ids, self.sizes = text, ids, sizes
        self.op = parse_op(match[1], match[2], OPS)
        self.types = [parse_type(type) for type in match[3].split()]

    def __str__(self) -> str:
        return self.text


# settings of attention, and the types of its further inputs
SCORED = (
    ("mask='j <= i and i - j < 2'", ""),
    ("mask='j <= i and i - j < 50'", ""),
    ("mask='j <= i and (i - j) % 2 == 0'", ""),
    ("mask='j < i'", ""),
    ("mask='j <= i and document(i) == document(j)'", " i64[B,T]"),
    ("mask='j <= i and i - j < 2 and document(i) == document(j)'", " i64[B,T]"),
    ("mask='j <= i and h // 2 * (i - j) < 3'", ""),
    ("score='s - slope(h) * (i - j)'", ""),
    ("score='50 * tanh(0.02 * s)', scale=0.5", ""),
    ("score='s', sinks=True", " f32[4]"),
    ("score='s * a[i // 4] + b[h, bucket(i - j, 4, 6)]', tables=('a', 'b')", " f32[3] f32[4,4]"),
    (
        "score='s + a[min(i - j, 2)]', mask='j <= i and document(i) == document(j)', tables=('a',), sinks=True",
        " i64[B,T] f32[4] f32[3]",
    ),
)
# settings of a pooling, and the type of its latent tokens
POOLS = (("by='mean'", ""), ("by='max'", ""), ("by='reservoir', seed=3", ""), ("by='latent', tokens=2", " f32[2,12]"))
PACKED = {"B": 1, "T": 6, "S": 12, "R": 2, "K": 3, "N": 3, "P": 7}  # two texts of three tokens, three pages each
SAMPLES = [
    Sample("linear f32[B,T,8] f32[6,8]"),
    Sample("linear f32[B,8] f32[6,8]"),
    Sample("dgrad f32[B,T,8] f32[8,6]"),
    Sample("wgrad f32[T,8] f32[T,6]"),
    Sample("column f32[8]"),
    Sample("concat_rows{count=2} f32[6,8] f32[4,8]"),
    Sample("split_features{sizes=(2, 6), labels=('a', 'b')} f32[B,T,8]"),
    Sample("join_features{count=2} f32[B,T,2] f32[B,T,6]"),
    Sample("part_heads{heads=2} f32[B,T,8]"),
    Sample("write_features{at=2} f32[B,T,8] f32[B,T,2,2]"),
    Sample("write_features{at=5} f32[B,T,8] f32[B,T,3]"),
    Sample("rms_norm f32[B,T,8]"),
    Sample("rms_norm{eps=0.5} f32[B,T,4,6]"),
    Sample("rms_norm{eps=0.001, affine=True} f32[B,T,8] f32[8]"),
    Sample("layer_norm f32[B,T,8] f32[8] f32[8]"),
    Sample("layer_norm{weight=False, bias=False} f32[B,T,8]"),
    Sample("layer_norm{bias=False} f32[B,T,8] f32[8]"),
    Sample("layer_norm{weight=False} f32[B,T,8] f32[8]"),
    Sample("layer_norm{eps=0.25} f32[B,T,8] f32[8] f32[8]"),
    Sample("sdpa f32[B,T,4,6] f32[B,T,4,6] f32[B,T,4,6]"),
    Sample("sdpa f32[B,T,4,6] f32[B,T,2,6] f32[B,T,2,6]"),
    Sample("sdpa f32[B,T,4,6] f32[B,T,4,6] f32[B,T,4,3]"),
    Sample("head_linear f32[B,T,4,3] f32[12,5]"),
    Sample("head_linear{transposed=True} f32[B,T,4,5] f32[12,5]"),
    *(
        Sample(f"sdpa{{{settings}}} f32[B,T,4,6] f32[B,T,2,6] f32[B,T,2,6]{further}", ids=1)
        for settings, further in SCORED
    ),
    Sample("document_starts{mark=2} i64[B,T]", ids=3),
    Sample("document_starts_cached{mark=2} i64[B,T] i64[B,1] i64[]", ids=3),
    *(
        Sample(f"sdpa_cached{{{settings}}} f32[B,T,4,6] f32[B,S,2,6] f32[B,S,2,6] i64[T]{further}", ids=1)
        for settings, further in SCORED
    ),
    Sample("sdpa_cached f32[B,T,4,6] f32[B,S,2,6] f32[B,S,2,6] i64[T]"),
    *(
        Sample(f"sdpa_cached{{mask='{mask}', ring={ring}}} f32[B,T,4,6] f32[B,4,4,6] f32[B,4,4,6] i64[T]"
            " f32[B,T,4,6] f32[B,T,4,6]")
        for mask, ring in (("j <= i and i - j < 4", (0, 4)), ("j <= i and (i - j < 3 or j < 1)", (1, 3)))
    ),
    Sample("sdpa_cached{values=4} f32[B,T,4,6] f32[B,S,1,6] i64[T]"),
    Sample("sdpa_cached{coded=True} f32[B,T,4,6] u8[B,S,2,6] u8[B,S,2,6] i64[T] f32[B,S,2,1] f32[B,S,2,1]"),
    Sample("sdpa_cached{mask='j <= i and i - j < 4', values=6, coded=True, ring=(0, 4)}"
        " f32[B,T,4,6] u8[B,4,1,6] i64[T] f32[B,4,1,1] u8[B,T,1,6] f32[B,T,1,1]"),
    Sample("to_codes f32[B,T,2,6]"),
    Sample("cache_write f32[B,S,4,6] f32[B,T,4,6] i64[T]"),
    Sample("cache_write{ring=(0, 3)} f32[B,3,4,6] f32[B,T,4,6] i64[T]"),
    Sample("cache_write{ring=(2, 2)} f32[B,4,4,6] f32[B,T,4,6] i64[T]"),
    Sample("ring_keys f32[B,4,4,6] f32[B,T,4,6]"),
    Sample("positions i64[B,T]"),
    Sample("positions i64[B,T] i64[]"),
    Sample("rope_angles{dims=6, base=100.0} i64[T]"),
    Sample("rope_angles{dims=2, base=10000.0} i64[T]"),
    Sample("rope_rows{dims=6, base=100.0, context=40} i64[T]"),
    Sample("rotary_pairs{count=5} i64[T]"),
    Sample("rotary_frequencies{base=50.0} i64[6]", ids=6),
    Sample("rotary_angles i64[T] f32[3]", ids=50),
    Sample("rotary_angles{magnitude=1.25} i64[T] f32[3]", ids=50),
    Sample("rope{neighbors=True} f32[B,T,4,6] f32[T,3] f32[T,3]"),
    Sample("rope{neighbors=True} f32[B,T,4,6] f32[T,2] f32[T,2]"),
    Sample("rope f32[B,T,4,6] f32[T,3] f32[T,3]"),
    Sample("rope f32[B,T,4,6] f32[T,1] f32[T,1]"),
    Sample("embedding i64[B,T] f32[7,8]"),
    Sample("split_heads{heads=4} f32[B,T,8]"),
    Sample("expand_heads{heads=4} f32[B,T,1,8]"),
    Sample("merge_heads f32[B,T,4,6]"),
    Sample("last f32[B,T,8]"),
    Sample("first_features{features=3} f32[B,T,8]"),
    Sample("first_features{features=8} f32[B,T,8]"),
    Sample("split f32[B,T,8]"),
    Sample("exclusive f32[B,T,4,6] f32[B,T,4,6]"),
    Sample("exclusive f32[B,T,4,6] f32[B,T,2,6]"),
    Sample("exclusive f32[B,T,4,6] f32[B,T,1,6]"),
    Sample("previous f32[B,T,8]"),
    Sample("previous{fill=-1} i64[B,T]"),
    Sample("previous f32[B,T,4,6]"),
    Sample("previous_cached f32[B,T,8] f32[B,1,8] i64[]", ids=2),
    Sample("previous_cached{fill=-1} i64[B,T] i64[B,1] i64[]", ids=2),
    Sample("keep_last f32[B,1,8] f32[B,T,8]"),
    Sample("keep_last i64[B,1] i64[B,T]"),
    Sample("reset{token=2} f32[B,T,8] i64[B,T]", ids=3),
    Sample("reset{token=0, fill=-1} i64[B,T] i64[B,T]", ids=3),
    Sample("reset{token=1} f32[B,T,4,6] i64[B,T]", ids=3),
    Sample("bigram_hash{buckets=3072} i64[B,T] i64[B,T]", ids=2**31),
    Sample("bigram_hash{buckets=2} i64[B,T] i64[B,T]"),
    Sample("pad_rows{rows=11} f32[7,8]"),
    Sample("pad_rows{rows=7} f32[7,8]"),
    Sample("crop_rows{rows=5} f32[7,8]"),
    Sample("cross_entropy{reduction='mean'} f32[B,T,7] i64[B,T]"),
    Sample("cross_entropy{reduction='none'} f32[B,T,7] i64[B,T]"),
    Sample("cross_entropy{reduction='mean', per_token='nats + w * nats_2', weights=('w',), further=('2',)} "
           "f32[B,T,7] i64[B,T] i64[B,T] f32[]"),
    Sample("ignore_first{count=3, value=-1} i64[B,T]"),
    Sample("later_targets{distance=1} i64[B,T]"),
    Sample("later_targets{distance=2, bos=1} i64[B,T]"),
    Sample("later_targets{distance=1, bos=0, ignore=2} i64[B,T]"),
    Sample("later_targets{distance=9} i64[B,T]"),
    Sample("cross_entropy{reduction='mean', per_token='nats + w * lse ** 2', weights=('w',)} "
        "f32[B,T,7] i64[B,T] f32[]"),
    Sample("cross_entropy{reduction='mean', ignore=0, per_token='v * nats + w * lse ** 2', weights=('v', 'w')} "
        "f32[B,T,7] i64[B,T] f32[] f32[]"),
    Sample("mean_square f32[B,T,8]"),
    Sample("attach_loss f32[B,T,8] f32[] f32[]"),
    Sample("pointwise{outputs=('leaky_relu(x, 0.5) ** 2',), variables=('x',)} f32[B,T,8]"),
    Sample("pointwise{outputs=('silu(gate) * x',), variables=('x', 'gate')} f32[B,T,8] f32[B,T,8]"),
    Sample("pointwise{outputs=('x + scale * branch',), variables=('x', 'branch', 'scale')} "
        "f32[B,T,8] f32[B,T,8] f32[8]"),
    Sample("pointwise{outputs=('q * gain',), variables=('q', 'gain')} f32[B,T,4,6] f32[4,1]"),
    Sample("pointwise{outputs=('x * scale',), variables=('x', 'scale')} f32[B,T,8] f32[]"),
    Sample("pointwise{outputs=('where(x > y, x - 1, abs(y))',), variables=('x', 'y')} f32[B,T,8] f32[B,T,8]"),
    Sample("pointwise{outputs=('z',), variables=('z',), dtype='f32'} bf16[B,T,8]"),
    Sample("pointwise{outputs=('3 * tanh(z / 3)',), variables=('z',), dtype='f32'} bf16[B,T,8]"),
    Sample("pointwise{outputs=('x + 1', 'max(x, y)'), variables=('x', 'y'), labels=('y', 'most')} "
        "f32[B,T,8] f32[B,T,8]"),
    Sample("sdpa_seen f32[B,T,4,6] f32[B,S,2,6] f32[B,S,2,6] bool[B,S]"),
    Sample("additive{form='relu'} f32[B,T,1] f32[B,S,1] f32[B,S,8] bool[B,S]"),
    Sample("additive{form='tanh'} f32[B,T,6] f32[B,S,6] f32[B,S,8] bool[B,S] f32[6]"),
    Sample("lstm f32[B,T,8] f32[B,3] f32[B,3] f32[12,8] f32[12,3] f32[12]"),
    Sample("lstm{biases=2} f32[B,T,8] f32[B,3] f32[B,3] f32[12,8] f32[12,3] f32[12] f32[12]"),
    Sample("lstm{directions=2} f32[B,T,8] f32[B,6] f32[B,6] f32[12,8] f32[12,3] f32[12] f32[12,8] f32[12,3] f32[12]"),
    Sample("lstm{directions=2, biases=2} f32[B,T,8] f32[B,6] "
        "f32[B,6] f32[12,8] f32[12,3] f32[12] f32[12] f32[12,8] f32[12,3] f32[12] f32[12]"),
    Sample("lstm_cell f32[B,1,8] f32[B,3] f32[B,3] f32[12,8] f32[12,3] f32[12]"),
    Sample("lstm_cell{biases=2} f32[B,1,8] f32[B,3] f32[B,3] f32[12,8] f32[12,3] f32[12] f32[12]"),
    Sample("seen{pad=0} i64[B,S]"),
    Sample("shift{start=1} i64[B,T]"),
    Sample("zeros{shape=(3, 2)} f32[B,T,8]"),
    Sample("state_write f32[B,8] f32[B,8]"),
    Sample("copy f32[B,T,8]"),
    Sample("concat f32[B,T,8] f32[B,T,3]"),
    Sample("reversed f32[B,T,8]"),
    Sample("as_step f32[B,8]"),
    Sample("repeat f32[B,8] i64[B,T]"),
    Sample("dropout{p=0.5} f32[B,T,8]"),
    Sample("dropout{p=0.5, counted=True} f32[B,T,8] draw:i64[4]"),
    Sample("fp8_linear f32[B,T,8] f32[16,8]"),
    Sample("wide_linear bf16[B,T,8] f32[6,8]"),
    Sample("transposed f32[6,8]"),
    Sample("fp8_linear{by_rows=True} f32[B,T,8] f32[12,8]"),
    Sample("sinusoid{dim=6} i64[T]"),
    Sample("cross_entropy{reduction='mean', ignore=0} f32[B,T,7] i64[B,T]"),
    Sample("cross_entropy{reduction='none', ignore=0} f32[B,T,7] i64[B,T]"),
    Sample("quantize_rows{columns=8} f32[B,T,8] f32[8]"),
    Sample("quantize_rows{columns=16} f32[B,T,8] f32[8]"),
    Sample("quantize_rows{columns=8, second=True} f32[B,T,8] f32[8]"),
    Sample("quantize_rows{columns=16, second=True} f32[B,T,8] f32[8]"),
    Sample("crop_columns{features=5} f32[B,T,8]"),
    Sample("row_by_row f32[B,T,8]"),
    Sample("time_major f32[B,T,8]"),
    Sample("time_major{backward=True} f32[B,T,8]"),
    Sample("time_major{back=True} f32[B,T,8]"),
    Sample("part{index=1, parts=2} f32[B,T,8]"),
    Sample("round_rows f32[B,T,8] f32[8]"),
    Sample("round_rows{bits=16} f32[B,T,8] f32[8]"),
    Sample("lstm_gates f32[B,12] f32[B,3]"),
    Sample("softmax f32[B,T,8]"),
    Sample("logsumexp f32[B,T,8]"),
    Sample("top_experts{count=3} f32[B,T,8]"),
    Sample("top_experts{count=1, biased=True} f32[B,T,8] f32[8]"),
    Sample("best_groups{groups=4, top=2, best=2} f32[B,T,8]"),
    Sample("best_groups{groups=2, top=1, best=1} f32[B,T,6]"),
    Sample("scores_of f32[B,T,7] i64[B,T,3]"),
    Sample("share_of_sum f32[B,T,8]"),
    Sample("sort_by_expert{experts=7} i64[B,T,2]"),
    Sample("sort_by_expert{experts=9} i64[B,T,1]"),
    Sample("dispatch f32[B,T,8] i64[B,T,2] i64[B,T,2]", ids=B * T * 2),
    Sample("of_experts f32[200,8] i64[B,T,2] i64[B,T,2]", ids=B * T * 2),
    Sample("combine f32[B,T,2,8] f32[B,T,2] i64[B,T,2] i64[B,T,2]", ids=B * T * 2),
    Sample("grouped_linear f32[B,T,2,8] f32[4,6,8] i32[4]"),
    Sample("grouped_linear f32[B,T,1,8] f32[1,6,8] i32[1]"),
    Sample("expert_load{experts=7} i64[B,T,2]"),
    Sample("balance_loss f32[B,T,7] f32[B,7]"),
    Sample("balance_loss{by_sequence=True} f32[B,T,7] f32[B,7]"),
    Sample("attach_load f32[B,T,2] f32[7] f32[B,7]"),
    *(
        Sample(f"sdpa_pooled{{mask='j <= i and i - j < 3', block=2, pooled='j + 2 <= i', {pool}}}"
            f" f32[B,T,4,6] f32[B,T,2,6] f32[B,T,2,6]{latents}")
        for pool, latents in POOLS
    ),
    *(
        Sample(f"sdpa_pooled_cached{{mask='j <= i and i - j < 3', block=2, pooled='j + 2 <= i', {pool}}}"
            " f32[B,T,4,6] f32[B,S,2,6] f32[B,S,2,6] i64[T] f32[B,8,2,6] f32[B,8,2,6]")
        for pool, _ in POOLS
    ),
    *(
        Sample(f"pool_write{{block=2, {pool}}} f32[B,16,2,6] f32[B,S,2,6] i64[T]"
            f"{latents and ' f32[B,S,2,6]'}{latents}", sizes={**SIZES, "T": 4})
        for pool, latents in POOLS
    ),
    Sample("pack_texts i64[R,K]", sizes=PACKED),
    Sample("packed_positions i64[R,K] i64[R]", sizes=PACKED),
    Sample("last_of_texts f32[B,T,8] i64[R,N]", sizes=PACKED),
    Sample("paged_write f32[P,4,2,6] f32[B,T,2,6] i64[T] i64[R,N]", sizes=PACKED),
    Sample("sdpa_paged f32[B,T,4,6] f32[P,4,2,6] f32[P,4,2,6] i64[T] i64[R,N]", sizes=PACKED),
    Sample("sdpa_paged{values=5, coded=True} f32[B,T,4,6] u8[P,4,1,6] i64[T] i64[R,N] f32[P,4,1,1]", sizes=PACKED),
    Sample("sdpa_paged{mask='j <= i and i - j < 4', score='s - slope(h) * (i - j)'}"
        " f32[B,T,4,6] f32[P,4,2,6] f32[P,4,2,6] i64[T] i64[R,N]", sizes=PACKED),
    Sample("sum_to{shape=(8,)} f32[B,T,8]"),
    Sample("sum_to{shape=(4, 1)} f32[B,T,4,6]"),
]  # fmt: skip
REGIONS = {"call", "fused", "scan"}  # they run other graphs and have no arithmetic of their own
# only kernels compute them, in files of their own
UNWRITTEN = {"new_features"}  # its values are those of the memory: test_join_groups.py
KERNELS = {
    "softmax_loss", "norm_rope", "norm_rope_grad", "norm_rope_grad_into", "causal_attention", "causal_attention_grad",
    "int8_linear", "row_linear", "rope_write", "rope_attention", "lookups",
    "seen_attention", "seen_attention_grad", "scored_attention", "scored_attention_grad", "int8_lstm_step",
    "fp8", "fp8_codes", "fp8_product",  # test_epilogue_codes.py, test_fp8_training.py
}  # fmt: skip


def shape(type: TensorType, sizes: Mapping[str, int] = SIZES) -> tuple[int, ...]:
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in type.shape)


def values(sample: Sample, seed: int) -> list[Tensor]:
    """Random inputs; positions are in order and inside the cache."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for type in sample.types:
        size = shape(type, sample.sizes)
        if type.dtype == "bool":
            inputs.append(torch.rand(size, generator=generator) < 0.6)
            inputs[-1][:, 0] = True  # of a row without any there is no mean
        elif sample.op.name == "grouped_linear" and type.dtype == "i32":
            rows = inputs[0][..., 0].numel()
            cuts = torch.randint(rows + 1, (len(inputs[1]) - 1,), generator=generator).sort().values
            inputs.append(torch.cat((cuts, torch.tensor([rows]))).int())
        elif sample.op.name in ("dispatch", "combine") and type.dtype == "i64":
            order = torch.randperm(sample.ids, generator=generator).view(size)
            inputs.append(order if inputs[-1].is_floating_point() else inverse(inputs[-1]))
        elif type.dtype == "i32":
            inputs.append(torch.randint(-99, 99, size, generator=generator, dtype=torch.int32))
        elif type.dtype == "u8":
            inputs.append(torch.randint(CODES, size, generator=generator, dtype=torch.uint8))
        elif type.dtype != "i64":
            inputs.append(torch.randn(size, generator=generator, dtype=DTYPES[type.dtype]))
        elif type.shape == ("T",):
            length = sample.sizes["T"]
            start = seed % (sample.sizes["S"] - length)
            start -= start % getattr(sample.op, "block", 1)  # tokens of whole blocks
            inputs.append(torch.arange(length) + start)
        elif type == DRAW:
            inputs.append(torch.tensor([2**61 + seed, 2, 3, sample.sizes["T"]]))
        elif type == TABLE:
            inputs.append(torch.randperm(sample.ids, generator=generator)[: math.prod(size)].view(size))
        else:
            inputs.append(torch.randint(sample.ids, size, generator=generator))
    return inputs


def inverse(order: Tensor) -> Tensor:
    return order.flatten().argsort().view_as(order)


def module_of(sample: Sample) -> ModuleType:
    """A module with the support functions that the op calls and a function `f` of its spelling."""
    types = sample.types
    names = [f"v{i}" for i in range(len(types))]
    lines = ["import torch", "from torch import Tensor, nn", "from torch.nn import functional as F", ""]
    lines.append(f"NAMESPACE = 'spelled_{next(MODULES)}'")  # for ops that it registers
    call = sample.op.call(types)
    for each in call.supports if call is not None else ():
        if each.generated is not None:
            template, context = each.generated
            lines.append(render(template, replace(context, package=f"spelled_{next(MODULES)}"), "", ""))
            continue
        file = f"torch/ops/{each.function}.py.jinja"
        lines.append(
            render(file, OpContext(f"spelled_{next(MODULES)}"), "", "")
            if exists(file)
            else render(f"torch/{each.function}.py.jinja", None, "", "", ("torch", "Tensor", "nn", "F"))
        )
    text = sample.op.torch(names, types)
    lines += ["class M(nn.Module):", f"    def forward(self, {', '.join(names)}):", f"        return {text}"]
    module = ModuleType("spelled")
    exec("\n".join(lines), vars(module))
    return module


def in_float64(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]


def test_every_op_has_a_sample() -> None:
    assert {sample.op.name for sample in SAMPLES} | REGIONS | KERNELS | UNWRITTEN == set(OPS)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
@pytest.mark.parametrize("seed", [0, 3])
def test_spelling_equals_the_reference(sample: Sample, seed: int) -> None:
    casts = sample.op.name == "pointwise" and sample.op.dtype  # the text then names f32 itself
    given = values(sample, seed) if casts else in_float64(values(sample, seed))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(seed)  # for what draws
        results = many(module_of(sample).M()(*[tensor.clone() for tensor in given]))
    finally:
        torch.set_default_dtype(before)
    torch.manual_seed(seed)
    wanted = many(sample.op.reference(*in_float64(given)))
    assert len(results) == len(wanted)
    for have, want in zip(results, wanted, strict=True):
        if isinstance(sample.op, PoolWrite):  # rows of unfinished blocks have no meaning
            whole = (int(given[2][-1]) + 1) // sample.op.block * sample.op.tokens
            have, want = have[:, :whole], want[:, :whole]
        exact = (torch.float64, torch.int32, torch.int64, torch.bool, torch.int8, torch.uint8)
        assert want.dtype in exact
        tolerance = 1e-6 if casts else 1e-12
        torch.testing.assert_close(have.to(want.dtype), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_types_are_those_of_real_tensors(sample: Sample) -> None:
    results = many(module_of(sample).M()(*values(sample, 1)))
    wanted = sample.op.infer(sample.types)
    assert [tuple(tensor.shape) for tensor in results] == [shape(type, sample.sizes) for type in wanted]
    assert [tensor.dtype for tensor in results] == [DTYPES[type.dtype] for type in wanted]


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.op.name not in ("dgrad", "wgrad", "sum_to")], ids=str)
def test_torch_fx_finds_what_the_op_says(sample: Sample) -> None:
    sample = copy(sample)
    if sample.op.name == "pointwise":
        sample.op = replace(sample.op, outputs=sample.op.outputs[:1], labels=())
    module = module_of(sample)
    graph = graph_of(sample)
    if len(sample.op.infer(sample.types)) > 1:
        text = f"class N(M):\n    def forward(self, {', '.join(n for n, _ in graph.inputs)}):\n"
        exec(f"{text}        return M.forward(self, {', '.join(n for n, _ in graph.inputs)})[0]", vars(module))
    traced = witness.trace(vars(module).get("N", module.M)(), module, "forward")
    assert witness.compare(graph, {}, traced).keys() == {"n"}
    changed = different(sample.op)
    if changed is not None:
        sample.op = changed
        with pytest.raises(witness.Mismatch, match=r"^n "):
            witness.compare(graph_of(sample), {}, traced)


def graph_of(sample: Sample):  # type: ignore[no-untyped-def]
    b = Builder("g")
    names = [b.input(f"v{i}", type) for i, type in enumerate(sample.types)]
    return b.build({"y": b.add("n", sample.op, names)})


CHANGES = {
    "rms_norm": {"eps": 0.125}, "layer_norm": {"eps": 0.125}, "rope_angles": {"base": 77.0},
    "rope_rows": {"base": 77.0},
    "rotary_frequencies": {"base": 77.0}, "rotary_angles": {"magnitude": 3.0}, "seen": {"pad": 3},
    "shift": {"start": 2}, "dropout": {"p": 0.25}, "zeros": {"shape": (2, 3)}, "previous": {"fill": 5},
    "previous_cached": {"fill": 5}, "reset": {"token": 4}, "bigram_hash": {"buckets": 77},
    "ignore_first": {"count": 2},
    "later_targets": {"distance": 3},
}  # fmt: skip


def different(op: Op) -> Op | None:
    """The same op with one setting changed, where it has one that leaves its types alone."""
    if op.name in ("sdpa", "sdpa_cached"):
        return replace(op, mask=f"{op.mask} and i - j < 77")
    if op.name == "rope":
        return replace(op, neighbors=not op.neighbors)
    if op.name == "pointwise":
        return replace(op, outputs=(f"({op.outputs[0]}) + 1",))
    return replace(op, **CHANGES[op.name]) if op.name in CHANGES else None


PRODUCTS = [sample for sample in SAMPLES if sample.op.name in ("linear", "dgrad", "wgrad")]


@pytest.mark.parametrize("sample", PRODUCTS, ids=str)
def test_flops_of_products_are_torchs_count(sample: Sample) -> None:
    types = sample.types
    given = values(sample, 0)
    with FlopCounterMode(display=False) as counter:
        module_of(sample).M()(*given)
    assert sample.op.flops(types, sample.op.infer(types), SIZES) == counter.get_total_flops() > 0


@pytest.mark.parametrize("window", [None, 1, 2, 5, 9])
def test_flops_of_attention_count_the_pairs_that_see_each_other(window: int | None) -> None:
    type = TensorType(("B", "T", 4, 6), "f32")
    pairs = sum(0 <= row - column < (window or T) for row in range(T) for column in range(T))
    mask = "j <= i" if window is None else f"j <= i and i - j < {window}"
    assert OPS["sdpa"](mask=mask).flops([type] * 3, [type], SIZES) == 4 * B * 4 * 6 * pairs


# ops without arithmetic
MOVES = {
    "embedding", "split_heads", "merge_heads", "last", "first_features", "pad_rows", "crop_rows", "cache_write",
    "positions", "document_starts", "document_starts_cached", "split", "previous", "previous_cached", "keep_last",
    "reset", "bigram_hash", "concat_rows", "join_features", "rotary_pairs", "ring_keys", "top_experts", "paged_write",
    "pool_write", "rope_rows",
}  # fmt: skip


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_flops_grow_in_proportion_to_the_rows(sample: Sample) -> None:
    types = sample.types
    single, three = (sample.op.flops(types, sample.op.infer(types), {**sample.sizes, "B": rows}) for rows in (1, 3))
    rowless = not any("B" in type.shape for type in types) or sample.op.name == "positions"
    assert three == (single if rowless else 3 * single)
    assert (single == 0) == (isinstance(sample.op, Moves) or sample.op.name in MOVES)
