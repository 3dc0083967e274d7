"""Attention over short sequences, and its gradient. The Triton kernels hold all scores of a head in registers."""

from dataclasses import replace
from typing import ClassVar, NamedTuple

from specc.compiler.errors import counted
from specc.compiler.kernels.attention.attention import (
    attention_function,
    fake_outputs,
    heads_refusal,
    input_check,
    inputs_of,
    is_gradient,
    unequal,
)
from specc.compiler.kernels.generated import TRITON_DTYPES, GeneratedFunction, constants, number_of, python_file
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, lacks_memory
from specc.compiler.kernels.lines import flowed, listed, unbroken
from specc.compiler.kernels.tile import MOST_WARPS, between, power
from specc.compiler.ops.saved_attention import (
    CausalAttention,
    CausalAttentionGrad,
    SeenAttention,
    SeenAttentionGrad,
    SeenOp,
)
from specc.compiler.records import record

LONGEST = 128  # tokens; registers must hold two copies of the scores
WIDEST = 128  # channels of a head
# Tokens; up to this length, these kernels rank first, because the tiles of libraries would be at most half full
SHORT = 64
NARROWEST = 16  # rows and columns of a product on tensor cores
# Ranks: FIRST precedes all libraries. LAST follows all kernels that need no optional package.
FIRST, LAST = 0, 7
MOST_PAIRS = 1024


@record
class PairTile:
    """The work of one program instance, in pairs. A pair consists of a sequence and a key head.

    A program instance has `warps` warps and `stages` loads in flight. The program instance processes `pairs` pairs one
    after another. Raises ValueError if a field is out of its bounds.
    """

    pairs: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        between("pairs", self.pairs, 1, MOST_PAIRS)
        power("warps", self.warps, 1, MOST_WARPS)
        between("stages", self.stages, 1, 4)

    def __str__(self) -> str:
        numbers = ((self.pairs, "pair"), (self.warps, "warp"), (self.stages, "stage"))
        return ", ".join(counted(count, word) for count, word in numbers)


# Tiles worth measuring in addition to the default tile: pairs, multiple of the default number of warps, stages.
TILES = ((1, 1, 1), (1, 2, 1), (2, 1, 1), (4, 1, 1), (4, 1, 2), (2, 2, 1), (1, 4, 1), (8, 1, 2))


class ShortContext(NamedTuple):
    """The context of templates/triton/short_attention.py.jinja.

    Attributes:
        how: A description of the kernel's algorithm.
        queries: The mask that selects the valid elements of a block of queries, as an expression.
        keys: The mask that selects the valid elements of a block of keys, as an expression.
        causal: Whether attention is causal. Otherwise, the kernel reads a padding mask, `seen`.
        element: The dtype to which results are rounded.
        body: The template of the loop over the query heads that share a key head.
        wanted: The input checks of the generated function.
        allocated: Lines that allocate the outputs.
    """

    op: GeneratedFunction
    how: str
    heads: int
    kv_heads: int
    channels: int
    settings: str
    kernel: str
    queries: str
    keys: str
    causal: bool
    element: str
    body: str
    arguments: str
    wanted: tuple[str, ...]
    allocated: tuple[str, ...]
    returns: str
    fake: str


@record
class ShortAttention(Kernel):
    """Accepts at most 128 queries and 128 keys, with at most 128 channels per head. `tile` is the measured tile. If
    `tile` is None, the kernel uses the result of `pair_tile`."""

    TILE: ClassVar[type | None] = PairTile
    tile: PairTile | None = None

    def rejects(self, site: Site) -> str | None:
        inputs = inputs_of(site)
        q = inputs["q"]
        if reason := heads_refusal(q, WIDEST) or unequal(site):
            return reason
        if site.context is None:
            return f"accepts at most {LONGEST} tokens; the number of tokens is unknown"
        if site.context > LONGEST:
            return f"accepts at most {LONGEST} tokens; there may be {site.context:,}"
        rows, width = _rows(site), _block(number_of(q.width))
        grouped = q.shape[-2] != inputs["k"].shape[-2]  # keys then stay in shared memory for the next query head
        # Bytes that the gradient kernel holds. The forward kernel holds fewer bytes.
        held = 2 * ((4 + grouped) * rows * width + rows * rows)
        return lacks_memory(site, held, f"{rows} tokens of {width} channels") if is_gradient(site) else None

    def rank(self, site: Site) -> int:
        return FIRST if site.context is not None and site.context <= SHORT else LAST

    def variants(self, site: Site) -> tuple[Kernel, ...]:
        rule = pair_tile(site)
        tiles = [PairTile(pairs, min(8, rule.warps * warps), stages) for pairs, warps, stages in TILES]
        if rule.warps > 1:
            tiles.append(PairTile(1, rule.warps // 2, 1))
        return tuple(replace(self, tile=tile) for tile in dict.fromkeys((rule, *tiles)))

    def render(self, site: Site) -> Rendered:
        tile = self.tile or pair_tile(site)
        context = _context(site, tile)
        words = f"{tile}, blocks of {_rows(site)} tokens"
        return python_file(context.op, "triton/short_attention.py.jinja", context, words)


_NEEDS = frozenset({"gpu", "mma"})
SHORT_CAUSAL = ShortAttention("short_attention", "triton", _NEEDS, CausalAttention)
SHORT_CAUSAL_GRAD = ShortAttention("short_attention_grad", "triton", _NEEDS, CausalAttentionGrad)
SHORT_SEEN = ShortAttention("short_seen_attention", "triton", _NEEDS, SeenAttention)
SHORT_SEEN_GRAD = ShortAttention("short_seen_attention_grad", "triton", _NEEDS, SeenAttentionGrad)


def pair_tile(site: Site) -> PairTile:
    """Returns the default tile: one pair, with the fewest warps whose registers can hold all scores and loaded heads of
    the pair."""
    rows, width = _rows(site), _block(number_of(inputs_of(site)["q"].width))
    if rows <= 32:
        return PairTile(1, max(1, width // 32), 1)
    return PairTile(1, 4 if rows <= 64 and width <= 64 else 8, 1)


def _rows(site: Site) -> int:
    assert site.context is not None
    return _block(site.context)


def _block(number: int) -> int:
    return max(NARROWEST, 1 << (number - 1).bit_length())


def _context(site: Site, tile: PairTile) -> ShortContext:
    op = attention_function(site, f"{site.node.op.words}, a head at a time")
    backward, inputs, outputs = is_gradient(site), inputs_of(site), site.node.op.output_labels
    q, k = inputs["q"], inputs["k"]
    channels, rows, sees = number_of(q.width), _rows(site), isinstance(site.node.op, SeenOp)
    width = _block(channels)
    held = {"ROWS": rows, "KEYS": rows, "WIDTH": width, "PAIRS": tile.pairs}
    settings = {**held, "WARPS": tile.warps, "STAGES": tile.stages}
    sizes = ["H", "G", "C", "SCALE", *held]
    read = [name for name in inputs if name != "y"]  # the kernel uses the unrounded weights instead of y
    strides = ["Q_STRIDE", "K_STRIDE", "V_STRIDE"]
    parameters = [*(f"{name}_ptr" for name in [*read, *outputs]), "B", "T", "S", *strides]
    parameters += [f"{name}: tl.constexpr" for name in sizes]
    whole = [f"{name}.contiguous()" if name in ("dy", "lse", "seen") else name for name in read]
    arguments = [*whole, *outputs, "b", "t", "s", *(f"{name}.stride(0)" for name in "qkv"), *sizes]
    inside = "" if width == channels else " & (c < C)"
    return ShortContext(
        op=op,
        how=_how(site, tile, rows),
        heads=number_of(q.shape[-2]),
        kv_heads=number_of(k.shape[-2]),
        channels=channels,
        settings=f"{constants(settings)}\nSCALE = C**-0.5",
        kernel=listed(f"def {op.function}_kernel(", parameters, "):"),
        queries=f"(t[:, None] < T){inside}" if inside else "t[:, None] < T",
        keys=f"(s[:, None] < S){inside}" if inside else "s[:, None] < S",
        causal=not sees,
        element=TRITON_DTYPES[q.dtype],
        body=f"triton/short_attention_{'backward' if backward else 'forward'}.py.jinja",
        arguments=flowed(f"{', '.join(map(unbroken, arguments))},", " " * 8),
        wanted=tuple(input_check(name, type, inputs["q"], sees) for name, type in inputs.items()),
        allocated=tuple(f"{name} = {expression}" for name, expression in zip(outputs, _split(backward), strict=True)),
        returns=", ".join(outputs),
        fake=fake_outputs(site),
    )


def _split(backward: bool) -> tuple[str, ...]:
    if backward:
        return tuple(f"{name}.new_empty({name}.shape)" for name in "qkv")
    return "q.new_empty(q.shape)", "q.new_empty(b, H, t, dtype=torch.float32)"


def _how(site: Site, tile: PairTile, rows: int) -> str:
    pairs = "one head of keys of a sequence" if tile.pairs == 1 else f"{tile.pairs} heads of keys of sequences"
    words = f"Triton kernel for {site.target.name}: a program takes {pairs}, and the queries that read them. "
    words += f"All {rows} x {rows} scores of a head are in registers at once; sums are fp32, weights are rounded"
    words += " before they are multiplied with. Called again, it gives the same bits."
    return flowed(words)
