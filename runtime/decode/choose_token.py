"""A Triton kernel that samples the next token of each row. The kernel does not sort the logits, and the host does not
wait for the kernel.

If the temperature is 0, several Triton programs search a row for its largest logit. The last program to finish writes
the token. Each logit and its index are packed into one integer. The maximum of these integers gives the first of the
largest logits.

If the temperature is above 0, one program per row samples the token. This program maps the bits of each logit to a
32-bit integer, the key. Keys have the order of the logits. Bisection over keys finds the smallest logit that `top_k`
and `top_p` keep. The weight of a token is exp(logit / temperature), up to a common factor, in f64. For equal random
numbers, the kernel and `Sampling.pick` choose equal tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK, WARPS = 8192, 16
PARTS = 16  # the maximum number of programs per row
# Programs per multiprocessor. A program has 512 threads of at most 64 registers if the temperature is 0.
RESIDENT = 2
NAN = tl.constexpr(0x7FFFFFFF)  # the key of NaN, above the key of infinity
INFINITE = tl.constexpr(0x7F800000)  # the key of infinity; the key of the smallest finite number is -INFINITE
LOWEST = tl.constexpr(-(2**63))
# The number of finished programs per row, i32, for each GPU. The numbers are 0 between launches. All launches of a
# stream share one tensor, because they do not overlap.
COUNTS: dict[torch.device, Tensor] = {}


@triton.jit
def _logits(logits_ptr, at, V):
    return tl.load(logits_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32) + 0.0


@triton.jit
def _key(logit):
    """Maps f32 logits to i32 keys. A larger logit has a larger key."""
    bits = logit.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _logit(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _ranked(logits, at):
    """Packs each logit and its index `at` into an i64. The largest i64 belongs to the first NaN. Without a NaN, it
    belongs to the first of the largest logits.
    """
    key = tl.where(logits == logits, _key(logits), NAN)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)


@triton.jit
def _weight(logit, largest, TEMPERATURE: tl.constexpr):
    # The temperature is a tensor, because a literal would be rounded to f32.
    return tl.exp((logit.to(tl.float64) - largest) / tl.full((), TEMPERATURE, tl.float64))


@triton.jit
def _above(logits_ptr, weights_ptr, key, V, BLOCK: tl.constexpr):
    """Returns the number and the total weight of the tokens whose key is larger than `key`."""
    count = tl.zeros((), tl.int32)
    mass = tl.zeros((), tl.float64)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        above = (at < V) & (_key(_logits(logits_ptr, at, V)).to(tl.int64) > key)
        count += tl.sum(above.to(tl.int32), 0)
        mass += tl.sum(tl.load(weights_ptr + at, mask=above, other=0.0), 0)
    return count, mass


@triton.jit
def choose_token_kernel(
    logits_ptr, uniform_ptr, counters_ptr, weights_ptr, next_ptr, tokens_ptr, best_ptr, counts_ptr,
    V, ROWS, STRIDE, COLUMNS, TEMPERATURE: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    logits_ptr += row * STRIDE
    weights_ptr += row * V
    # Finds the first of the largest logits. Each lane keeps its own maximum, so that threads synchronize only once.
    best = tl.full((BLOCK,), LOWEST, tl.int64)
    lowest = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    for first in range(part * BLOCK, V, PARTS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        logits = _logits(logits_ptr, at, V)
        best = tl.maximum(best, _ranked(logits, at))
        if TEMPERATURE > 0:
            lowest = tl.minimum(lowest, tl.where(at < V, _key(logits), 0x7FFFFFFF))
    best = tl.max(best, 0)
    writes = part == 0
    if PARTS > 1:
        place = row * PARTS + part
        tl.store(best_ptr + place, best)
        tl.debug_barrier()  # all threads must have stored before the program counts as finished
        writes = tl.atomic_add(counts_ptr + row, 1, sem="acq_rel") == PARTS - 1
        tl.store(counts_ptr + row, 0, mask=writes)
        places = row * PARTS + tl.arange(0, PARTS)
        best = tl.max(tl.load(best_ptr + places, mask=writes, other=LOWEST, cache_modifier=".cg"), 0)
    highest, token = best >> 32, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32)
    largest = _logit(highest)
    finite = (highest >= -INFINITE) & (highest < INFINITE)
    if TEMPERATURE > 0:
        most = largest.to(tl.float64)
        total = tl.zeros((), tl.float64)
        for first in range(0, V, BLOCK):
            at = first + tl.arange(0, BLOCK)
            weights = _weight(_logits(logits_ptr, at, V), most, TEMPERATURE)
            weights = tl.where(finite & (at < V), weights, 0.0)
            tl.store(weights_ptr + at, weights, mask=at < V)
            total += tl.sum(weights, 0)
        tl.debug_barrier()  # other threads read these weights below
        # The kernel keeps all tokens whose key is above `bound`, and the first `equal` tokens whose key is `bound`.
        bound = tl.min(lowest, 0).to(tl.int64) - 1
        equal = tl.zeros((), tl.int32)
        if TOP_K > 0:
            # Finds a bound with exactly TOP_K tokens above it, or else the smallest bound with fewer than TOP_K tokens
            # above it.
            low = bound
            bound = highest
            while low + 1 < bound:
                middle = (low + bound) >> 1
                count, _ = _above(logits_ptr, weights_ptr, middle, V, BLOCK)
                low = tl.where(count >= TOP_K, middle, low)
                bound = tl.where(count > TOP_K, bound, tl.where(count == TOP_K, middle + 1, middle))
            count, mass = _above(logits_ptr, weights_ptr, bound, V, BLOCK)
            equal = TOP_K - count
            total = mass + equal * _weight(_logit(bound), most, TEMPERATURE)
        if TOP_P < 1:
            # Finds the smallest bound above which the tokens have less than the fraction TOP_P of the total weight.
            wanted = tl.full((), TOP_P, tl.float64) * total
            low = bound - 1
            high = highest
            while low + 1 < high:
                middle = (low + high) >> 1
                _, mass = _above(logits_ptr, weights_ptr, middle, V, BLOCK)
                low = tl.where(mass >= wanted, middle, low)
                high = tl.where(mass >= wanted, high, middle)
            _, mass = _above(logits_ptr, weights_ptr, high, V, BLOCK)
            weight = _weight(_logit(high), most, TEMPERATURE)
            needed = tl.ceil((wanted - mass) / weight).to(tl.int32)
            # If top-p arrives at the bound of top-k, it must not keep more tokens than top-k.
            equal = tl.where((high == bound) & (equal > 0), tl.minimum(needed, equal), needed)
            bound = high
            total = mass + equal * weight
        # Chooses the first token whose cumulative weight exceeds the total weight times the random number.
        share = tl.load(uniform_ptr + tl.load(counters_ptr + 1) * ROWS + row) * total
        before = tl.zeros((), tl.float64)
        ties = tl.zeros((), tl.int32)
        chosen = tl.full((), -1, tl.int32)
        last = tl.zeros((), tl.int32)
        for first in range(0, V, BLOCK):
            at = first + tl.arange(0, BLOCK)
            keys = _key(_logits(logits_ptr, at, V)).to(tl.int64)
            weights = tl.load(weights_ptr + at, mask=(at < V) & (keys >= bound), other=0.0)
            if (TOP_K > 0) | (TOP_P < 1):
                tie = ((keys == bound) & (at < V)).to(tl.int32)
                rank = ties + tl.cumsum(tie, 0)
                weights = tl.where((tie == 1) & (rank > equal), 0.0, weights)
                ties += tl.sum(tie, 0)
            sums = before + tl.cumsum(weights, 0)
            place = tl.min(tl.where((sums > share) & (weights > 0), at, 0x7FFFFFFF), 0)
            chosen = tl.where((chosen < 0) & (place < V), place, chosen)
            last = tl.maximum(last, tl.max(tl.where(weights > 0, at, 0), 0))
            before += tl.sum(weights, 0)
        token = tl.where(chosen < 0, last, chosen)  # by rounding, the last sum may be less than the total
    token = tl.where(finite, token, -1).to(tl.int64)
    tl.store(next_ptr + row, tl.maximum(token, 0), mask=writes)
    tl.store(tokens_ptr + row * COLUMNS + tl.load(counters_ptr) + 1, token, mask=writes)


def _counts(logits: Tensor, room: int) -> Tensor:
    if logits.device not in COUNTS:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("choose_token must run once before it is captured in a CUDA graph")
        COUNTS[logits.device] = logits.new_zeros(room // 2, dtype=torch.int32)
    return COUNTS[logits.device]


def choose_token(
    logits: Tensor,
    uniform: Tensor,
    counters: Tensor,
    following: Tensor,
    tokens: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float,
) -> None:
    """Samples one token per row by the rules of `Sampling.choose`, on the current CUDA stream.

    Args:
        logits: the logits of each row, [B, vocabulary], of any float dtype. The stride of the rows may exceed the
            vocabulary.
        uniform: random numbers in [0, 1), f64 [P, B].
        counters: two integers, i64 [2]: the column of the last token in `tokens`, and the row of `uniform` to use.
        following: receives the sampled tokens, i64 [B]. A row whose largest logit is not finite receives 0.
        tokens: receives the sampled tokens, i64 [B, N], in the column after the last token. A row whose largest logit
            is not finite receives -1.
        temperature: as in `Sampling`.
        top_k: as in `Sampling`.
        top_p: as in `Sampling`.
    """
    rows, vocabulary = logits.shape
    weights = logits.new_empty((rows, vocabulary if temperature else 0), dtype=torch.float64)
    block, parts = min(BLOCK, triton.next_power_of_2(vocabulary)), 1
    room = RESIDENT * torch.cuda.get_device_properties(logits.device).multi_processor_count
    while temperature == 0 and parts < PARTS and 2 * parts * rows <= room and parts * block < vocabulary:
        parts *= 2
    best = logits.new_empty((rows, parts), dtype=torch.int64)
    pdl = logits.is_cuda and torch.cuda.get_device_capability(logits.device) >= (9, 0)
    choose_token_kernel[(rows, parts)](
        logits, uniform, counters, weights, following, tokens, best, _counts(logits, room) if parts > 1 else best,
        vocabulary, rows, logits.stride(0), tokens.shape[1],
        TEMPERATURE=temperature, TOP_K=0 if (top_k or vocabulary) >= vocabulary else top_k, TOP_P=top_p, BLOCK=block,
        PARTS=parts, PDL=pdl, num_warps=min(WARPS, max(1, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
