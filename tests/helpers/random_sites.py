"""Random nodes for every kernel of the catalogue, and the comparison of a kernel with the judge of `specc verify`."""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from attention_sites import attention_site
from cached_sites import CASES as CACHED
from cached_sites import codes_site
from decoding_sites import ROW_CASES, lookups_site, rope_site, row_site
from head_sites import PARTS, head_site
from kernel_sites import EPILOGUES, GUARD, imported, make_site
from loss_sites import FUNCTIONS, TERMS, loss_site
from rope_attention_sites import rope_attention_site
from scored_sites import CASES as SCORED
from step_sites import step_site
from torch import Tensor

from specc.compiler import kernels
from specc.compiler.catalog import catalog
from specc.compiler.ir.op import Op
from specc.compiler.kernels.attention.cached_torch import TorchCalls
from specc.compiler.kernels.kernel import Kernel, Site, missing
from specc.compiler.ops.caches.cached_attention import CachedBase
from specc.compiler.ops.caches.key_value_cache import ToCodes
from specc.compiler.ops.decoding.lookups import Lookups
from specc.compiler.ops.decoding.rope_attention import RopeAttention
from specc.compiler.ops.decoding.rope_write import RopeWrite
from specc.compiler.ops.decoding.row_linear import RowLinear
from specc.compiler.ops.int8_lstm import Int8LstmStep
from specc.compiler.ops.linear import Product
from specc.compiler.ops.loss import SoftmaxLoss
from specc.compiler.ops.norm_rope import HeadRotation
from specc.compiler.ops.quantized import Int8Linear
from specc.compiler.ops.saved_attention import (
    CausalAttention,
    CausalAttentionGrad,
    SavedAttentionGrad,
    ScoredAttention,
    ScoredAttentionGrad,
    SeenAttention,
    SeenAttentionGrad,
)
from specc.runtime.verify.judge import MANY, PEAK, RMS, SEQUENCE, Judge, inputs_of, many, rms_of, upcast, within

# Int8 products are compared exactly: test_int8_products.py. The calls that an op states have no function of their own.
KERNELS = {
    name: kernel
    for name, kernel in catalog(kernels, Kernel).items()
    if kernel.computes is not Int8Linear and not isinstance(kernel, TorchCalls)
}
Draw = Callable[[random.Random, str, str], Site]  # a random node, for a target and a dtype
TRIES = 200
SUMS, FAR, ROUGHLY, CANCELED = 8.0, 10.0, 1.1, 1e-9
AGAIN = range(1_001, 1_011)  # seeds of other inputs
FEWEST = 10  # shapes of a node
SHAPES_OF_A_NODE = {"cutlass": 100, "cuda": 50}  # more where nvcc takes a minute for a node


def shapes_of_a_node(kernel: Kernel) -> int:
    return SHAPES_OF_A_NODE.get(kernel.language, FEWEST)


def _product(rng: random.Random, target: str, dtype: str) -> Site:
    n, k = (8 * rng.choice((1, 3, 8, 16, rng.randint(1, 60))) for _ in range(2))
    return make_site(rng.choice([*EPILOGUES]), n, k, target, dtype)


def _attention(backward: bool, kinds: tuple[str, ...]) -> Draw:
    def draw(rng: random.Random, target: str, dtype: str) -> Site:
        groups = rng.choice((1, 2, 3))
        channels = rng.choice((8, 16, 32, 64, 64, 128, rng.randint(1, 64)))
        shape = (groups * rng.choice((1, 2, 4)), groups, channels)
        return attention_site(shape, backward, target, dtype, rng.choice(kinds), rng.randint(1, 128))

    return draw


def _scored(backward: bool) -> Draw:
    def draw(rng: random.Random, target: str, dtype: str) -> Site:
        attention = rng.choice([*SCORED.values()])
        groups = rng.choice((1, 2, 4))
        return attention.site((4, groups, rng.choice((16, 32, 64, 128))), backward, dtype, target)

    return draw


def _head(rng: random.Random, target: str, dtype: str) -> Site:
    channels = rng.choice((32, 64, 128, 2 * rng.randint(1, 64)))
    sizes = (rng.choice((1, 4, 12, rng.randint(1, 20))), channels, rng.randint(1, channels // 2))
    return head_site(rng.choice([*PARTS]), sizes, rng.random() < 0.5, target, dtype)


def _loss(rng: random.Random, target: str, dtype: str) -> Site:
    vocab, reduction = rng.choice((rng.randint(2, 99), rng.randint(2, 2000), 9000)), rng.choice(("mean", "none"))
    terms = rng.choice([*TERMS]) if reduction == "mean" else ""
    width = vocab + rng.choice((0, rng.randint(1, 63), -vocab % 64))
    return loss_site(vocab, width, rng.choice([*FUNCTIONS.values()]), reduction, target, dtype, terms=terms)


def _cached(rng: random.Random, target: str, dtype: str) -> Site:
    case = rng.choice([*CACHED.values()])
    groups, channels = rng.choice((1, 2, 3)), rng.choice((16, 64, 128, rng.randint(1, 130)))
    tables = case.attention.tables  # of heads that the score states
    shape = case.shape if tables else (groups * rng.choice((1, 2, 4, 7)), groups, channels)
    case = replace(case, shape=shape, values=rng.randint(1, shape[2]) if case.values else 0)
    if case.shared or case.prefix or case.coded or shape[2] < 2 or rng.random() < 0.5:
        return case.site(dtype, target)
    return rope_attention_site(case, rng.randint(1, shape[2] // 2), rng.random() < 0.5, dtype, target)


def _codes(rng: random.Random, target: str, dtype: str) -> Site:
    return codes_site(rng.choice((1, 64, 576, rng.randint(2, 300))), dtype, target)


def _row_linear(rng: random.Random, target: str, dtype: str) -> Site:
    widths, _, norm, epilogue = rng.choice([*ROW_CASES.values()])
    width = rng.randint(1, 200)
    wide = tuple(width if epilogue is not None else rng.randint(1, 200) for _ in widths)
    return row_site((wide, rng.randint(8, 300), norm, epilogue), target, dtype)  # packed: test_packed_rows.py


def _rope_write(rng: random.Random, target: str, dtype: str) -> Site:
    groups, pairs = rng.choice((1, 2, 3)), rng.choice((4, 32, rng.randint(1, 64)))
    channels = 2 * pairs + rng.choice((0, rng.randint(0, 64)))
    heads, values, neighbors = groups * rng.choice((1, 2, 4)), rng.choice((channels, rng.randint(1, 99))), rng.random()
    layout = rng.choice(({}, {"ring": (rng.randint(0, 4), rng.randint(1, 40))}, {"page": rng.choice((1, 16, 64))}))
    form = {"joined": rng.random() < 0.3, **layout}  # codes of rounded rows are compared with Torch's elsewhere
    return rope_site(heads, groups, channels, values, pairs, neighbors < 0.5, **form, target=target, dtype=dtype)


def _lookups(rng: random.Random, target: str, dtype: str) -> Site:
    widths = tuple(rng.randint(1, 300) for _ in range(rng.randint(1, 3)))
    ropes = tuple((2 * rng.randint(1, 64), 10000.0, rng.randint(1, 300)) for _ in range(rng.randint(0, 2)))
    return lookups_site(widths, ropes, target, dtype, rows=rng.randint(1, 500))


def _step(rng: random.Random, target: str, dtype: str) -> Site:
    return step_site(rng.choice((4, 64, 100, 4 * rng.randint(1, 80))), target, bits=rng.choice((8, 16)))


DRAWS: Mapping[type[Op], Draw] = {
    Product: _product,
    CausalAttention: _attention(False, ("causal",)),
    CausalAttentionGrad: _attention(True, ("causal",)),
    SeenAttention: _attention(False, ("seen", "cross")),
    SeenAttentionGrad: _attention(True, ("seen", "cross")),
    ScoredAttention: _scored(False),
    ScoredAttentionGrad: _scored(True),
    CachedBase: _cached,
    ToCodes: _codes,
    RowLinear: _row_linear,
    RopeWrite: _rope_write,
    Lookups: _lookups,
    HeadRotation: _head,
    SoftmaxLoss: _loss,
    Int8LstmStep: _step,
}


def random_site(kernel: Kernel, rng: random.Random, target: str, *dtypes: str) -> Site | None:
    """Returns a random node that a kernel accepts; None if it accepts none on the target in any of the dtypes."""
    for _ in range(TRIES):
        site = DRAWS[kernel.computes](rng, target, rng.choice(dtypes))
        if missing(kernel, site.target):
            return None
        if kernel.rejects(site) is None:
            return site
    return None


def random_sizes(site: Site, rng: random.Random, most: int) -> Mapping[str, int]:
    """Returns random sizes of the symbolic dims, at most `most` tokens: often one, a prime, or one beside a tile.

    Sequences that are attended to have at least SEQUENCE tokens, as the gradients of shorter ones are mostly rounding.
    """
    least = SEQUENCE if site.node.op.mixes_tokens else 1
    some = (1, 2, 7, 127, 128, 129, 31, 33, 257)
    tokens, keys = (
        min(max(rng.choice((*some, rng.randint(1, most), rng.randint(most // 2, most))), least), most) for _ in range(2)
    )
    texts, op = rng.randint(1, 3), site.node.op
    if isinstance(op, CachedBase):
        each = 1 if isinstance(op, RopeAttention) else rng.choice((1, 1, 2, 7, 33))
        return _cached_sizes(op, site, texts, each, keys)
    if isinstance(op, RopeWrite):
        if op.paged:
            page = int(site.inputs[5].shape[1])
            each, pages = rng.choice((1, 1, 2, 7)), -(-keys // page) + 7
            return within(site, {"B": 1, "T": texts * each, "R": texts, "N": pages, "P": texts * pages})
        tokens, keys = (1, keys) if op.ring is not None else (tokens, max(keys, tokens))
    return within(site, {"B": texts, "T": tokens, "S": keys})


def _cached_sizes(op: CachedBase, site: Site, texts: int, each: int, keys: int) -> Mapping[str, int]:
    """Returns the sizes of `texts` texts with `each` queries and at least `keys` positions in the cache."""
    keys = max(keys, each)
    if "table" not in op.names:
        return {"B": texts, "T": each, "S": keys}
    pages = -(-keys // int(site.inputs[op.names.index("k")].shape[1]))
    return {"B": 1, "T": texts * each, "R": texts, "N": pages, "P": texts * pages}


def surrounded(value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a copy of a tensor between poisoned elements, NaN or the largest number, and the memory of both."""
    poison = math.nan if value.is_floating_point() else True if value.dtype == torch.bool else 0x7F
    memory = torch.full((value.numel() + 2 * GUARD,), poison, dtype=value.dtype, device=value.device)
    inside = memory[GUARD : GUARD + value.numel()].view(value.shape)
    inside.copy_(value)
    return inside, memory


def inexact(kernel: Kernel, judge: Judge, op: Callable[..., Any]) -> Iterator[str]:
    """Yields the outputs of a kernel that are less exact than those of plain Torch, or not written.

    The bounds are chosen, not proven. The largest error is at most PEAK times that of plain Torch, and the RMS error
    about as large. Of few numbers, where chance decides, the RMS error may be PEAK times as large too. Both may be SUMS
    times as large for sums over all rows, such as gradients of tables of scores: few numbers, which plain Torch may
    hit. Sums whose exact values cancel to 0 have no relative error.

    An output may exceed these bounds by chance: the RMS error of attention over few keys depends on a few of them. The
    errors for AGAIN other inputs decide, all together: their RMS may be ROUGHLY that of plain Torch. To the errors of
    plain Torch, those are added that the rounding of y causes: gradients of attention read y, and plain Torch does not.
    """
    errors = judge.errors(judge.call(op))
    labels = judge.site.node.op.output_labels or ("",) * len(errors)
    suspects = [
        i for i, error in enumerate(errors) if not _canceled(judge, i) and not _ok(judge, i, error.rms, error.peak, RMS)
    ]
    measured = [_measured(_redrawn(judge, seed), op) for seed in AGAIN if suspects]
    for i in suspects:
        rms, peak, rms_of_torch, peak_of_torch = zip(*(each[i] for each in measured), strict=True)
        ratios = math.hypot(*rms) / math.hypot(*rms_of_torch), max(peak) / max(peak_of_torch)
        far = errors[i].peak >= (math.inf if _is_sum(judge, i) else FAR)
        if far or not _ok(judge, i, *ratios, ROUGHLY):
            yield f"output {labels[i]} {errors[i].words}; {ratios[0]:.2f}x and {ratios[1]:.2f}x for other inputs"


def _is_sum(judge: Judge, i: int) -> bool:
    return all(isinstance(dim, int) for dim in judge.site.node.types[i].shape)


def _canceled(judge: Judge, i: int) -> bool:
    return _is_sum(judge, i) and judge.exact[i].abs().max().item() < CANCELED


def _ok(judge: Judge, i: int, rms: float, peak: float, most: float) -> bool:
    """Returns whether errors of an output are small enough, in multiples of those of plain Torch; `most` bounds RMS."""
    if _is_sum(judge, i):
        return rms <= SUMS and peak <= SUMS
    return rms <= (most if judge.exact[i].numel() >= MANY else PEAK) and peak <= PEAK


def _measured(judge: Judge, op: Callable[..., Any]) -> list[tuple[float, float, float, float]]:
    """Returns the RMS error and the largest error of each output, then both errors of plain Torch with a rounded y."""
    outputs = judge.call(op)
    rounded = _of_rounded_y(judge) or [torch.zeros(())] * len(outputs)
    return [
        (error.rms * rms, error.peak * peak, math.hypot(rms, rms_of(other)), peak + other.abs().max().item())
        for error, (rms, peak), other in zip(judge.errors(outputs), judge.bars, rounded, strict=True)
    ]


def _of_rounded_y(judge: Judge) -> list[Tensor]:
    """Returns the first-order errors that the rounding of y causes in each gradient of attention; nothing for other
    ops.

    Rounding changes the gradient of the score s of a query by -p sum(dy (rounded y - y)), where p is the derivative of
    the query's log-sum-exp with respect to s.
    """
    op = judge.site.node.op
    if not isinstance(op, SavedAttentionGrad):
        return []
    dy, q, k, v, rounded, _, *further = (upcast(value, torch.float64) for value in judge.inputs)
    values = [value.requires_grad_(value.is_floating_point()) for value in (q, k, v, *further)]
    leaves = [value for value in values if value.requires_grad]
    y, lse = op.forward.reference(*values)
    change = (dy * (rounded - y.detach())).sum(-1).transpose(1, 2)
    errors = torch.autograd.grad((lse * change).sum(), leaves, materialize_grads=True)
    return [error.nan_to_num() for error in errors]  # the derivative is NaN for a query that attends to no key


def _redrawn(judge: Judge, seed: int) -> Judge:
    """Returns the judge of the same node and shapes, with other inputs."""
    sizes = {
        dim: extent
        for type, value in zip(judge.site.inputs, judge.inputs, strict=True)
        for dim, extent in zip(type.shape, value.shape, strict=True)
        if isinstance(dim, str)
    }
    return Judge.of(judge.site, inputs_of(judge.site, sizes, judge.inputs[0].device, seed))


def strays(kernel: Kernel, judge: Judge, op: Callable[..., Any]) -> Iterator[str]:
    """Yields the outputs of a kernel that poison beside its inputs changes, and the inputs beside which it writes."""
    first = judge.call(op)
    pairs = [surrounded(value) for value in judge.inputs]
    before = [memory.clone() for _, memory in pairs]
    second = many(op(*(value for value, _ in pairs)))
    for i, (one, other) in enumerate(zip(first, second, strict=True)):
        alike = torch.equal(one, other) if kernel.deterministic else torch.allclose(one, other, 1e-2, 1e-2)
        if not alike:
            yield f"output {i} depends on what stands beside the inputs"
    for i, ((_, memory), old) in enumerate(zip(pairs, before, strict=True)):
        for part in (slice(GUARD), slice(-GUARD, None)):
            if not torch.equal(memory[part].view(torch.uint8), old[part].view(torch.uint8)):
                yield f"memory beside input {i} is written"


Check = Callable[[Kernel, Judge, Callable[..., Any]], Iterator[str]]


@dataclass(frozen=True)
class Place:
    """Where kernels run, and on what.

    Attributes:
        folder: where their files are written.
        target: the target that they are generated for.
        device: the device of the inputs.
        dtypes: the dtypes of random nodes.
        most: the largest number of tokens of a sequence.
        seed: the seed of nodes and shapes.
    """

    folder: Path
    target: str
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("f32",)
    most: int = 130
    seed: int = 0

    def check(self, kernel: Kernel, check: Check, shapes: int) -> list[str]:
        """Checks a kernel for random nodes and shapes.

        Returns:
            What is wrong; nothing if the kernel accepts no node on the target. One node has several shapes, and more
            where nvcc takes a minute for it.
        """
        rng, wrong = random.Random(f"{kernel.name} {self.seed}"), []
        each = shapes_of_a_node(kernel)
        for number in range(shapes):
            if number % each == 0:
                site = random_site(kernel, rng, self.target, *self.dtypes)
                if site is None:
                    break
                folder = self.folder / f"random_{kernel.name}_{check.__name__}_{self.seed}_{number}"
                op = getattr(imported(kernel, site, folder), kernel.render(site).function)
            sizes = random_sizes(site, rng, self.most)
            judge = Judge.of(site, inputs_of(site, sizes, self.device, number))
            wrong += [f"{kernel.name}, {site.key}, {dict(sizes)}: {text}" for text in check(kernel, judge, op)]
        return wrong


def checked(place: Place, check: Check, shapes: int, name: str) -> list[str]:
    """Calls Place.check for a kernel by its name, which another process can be told."""
    return place.check(KERNELS[name], check, shapes)
