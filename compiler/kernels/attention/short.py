"""Attention over short sequences and its gradient: Triton kernels that hold all scores of a head in registers."""

from dataclasses import dataclass, replace
from typing import ClassVar

from specc.compiler.ir.graph import Op
from specc.compiler.kernels.attention.attention import FAKES, annotation, formulas, header, heads_of, number_of, promise
from specc.compiler.kernels.custom_op import DTYPES
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, symbol
from specc.compiler.kernels.lines import flowed, listed, unbroken
from specc.compiler.kernels.tile import MOST_WARPS, between, counted, power
from specc.compiler.ops.attention import CausalAttention, CausalAttentionGrad
from specc.compiler.ops.attention_seen import SeenAttention, SeenAttentionGrad, SeenOp

ELEMENTS = {"bf16": "tl.bfloat16", "f16": "tl.float16"}
LONGEST = 128  # tokens; registers must hold the scores at least twice
WIDEST = 128  # channels of a head
SHORT = 64  # tokens; up to this length it ranks first, since tiles of the libraries would be half empty
NARROWEST = 16  # rows and columns of a product on tensor cores
FIRST, LAST = 0, 7  # ranks: before all libraries, and after all kernels that need no optional package
MOST_PAIRS = 1024


@dataclass(frozen=True, slots=True)
class PairTile:
    """The work of one program. A pair is one sequence and one head of keys.

    `pairs` pairs are processed in sequence by `warps` warps, with `stages` loads in flight. Raises ValueError if a
    field is out of its bounds.
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


# Tiles worth measuring in addition to that of the rule: pairs, multiple of the rule's warps, stages.
TILES = ((1, 1, 1), (1, 2, 1), (2, 1, 1), (4, 1, 1), (4, 1, 2), (2, 2, 1), (1, 4, 1), (8, 1, 2))


@dataclass(frozen=True, slots=True)
class ShortContext:
    """The context of templates/triton/short_attention.py.jinja.

    Attributes:
        how: A description of the kernel's algorithm.
        queries: The mask of valid elements of a block of queries.
        keys: The mask of valid elements of a block of keys.
        causal: Whether attention is causal. If false, the kernel reads the mask `seen`.
        element: The dtype that results are rounded to.
        body: The template of the loop over the query heads that share a key head.
        wanted: Rows of the table of input checks.
        allocated: Lines that allocate the outputs.
    """

    TEMPLATE: ClassVar[str] = "triton/short_attention.py.jinja"
    header: str
    summary: str
    formulas: tuple[str, ...]
    how: str
    namespace: str
    node: str
    function: str
    symbol: str
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
    launch_signature: str
    arguments: str
    signature: str
    promise: str
    wanted: tuple[str, ...]
    allocated: tuple[str, ...]
    tensors: str
    returns: str
    fake_signature: str
    fake: str


@dataclass(frozen=True, slots=True)
class ShortAttention(Kernel):
    """Accepts at most 128 queries and keys of at most 128 channels, with or without grouped heads. `tile` is a measured
    tile; if it is None, the rule of `pair_tile` applies."""

    TILE: ClassVar[type | None] = PairTile
    tile: PairTile | None = None

    def rejects(self, site: Site) -> str | None:
        backward, inputs, _ = heads_of(site)
        q = inputs["q"]
        if q.dtype not in ELEMENTS:
            return f"computes in bf16 or f16, not in {q.dtype}"
        if number_of(q.width) > WIDEST:
            return f"takes heads of at most {WIDEST} channels; these have {q.width}"
        if site.context is None:
            return f"takes at most {LONGEST} tokens; how many there are is not known"
        if site.context > LONGEST:
            return f"takes at most {LONGEST} tokens; there may be {site.context:,}"
        rows, width = _rows(site), _block(number_of(q.width))
        grouped = q.shape[-2] != inputs["k"].shape[-2]  # keys are then retained for the next query head
        held = 2 * ((4 + grouped) * rows * width + rows * rows)  # bytes for the gradient, which needs more
        if backward and held > site.target.shared_memory:
            memory = f"{held:,} bytes of shared memory; {site.target.name} has {site.target.shared_memory:,}"
            return f"needs for {rows} tokens of {width} channels {memory}"
        return None

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
        files = {f"{context.symbol}.py": (context.TEMPLATE, context)}
        return Rendered(context.function, context.symbol, files, f"{tile}, blocks of {_rows(site)} tokens")


@dataclass(frozen=True, slots=True)
class ShortCausal(ShortAttention):
    computes: ClassVar[type[Op]] = CausalAttention


@dataclass(frozen=True, slots=True)
class ShortCausalGrad(ShortAttention):
    computes: ClassVar[type[Op]] = CausalAttentionGrad


@dataclass(frozen=True, slots=True)
class ShortSeen(ShortAttention):
    computes: ClassVar[type[Op]] = SeenAttention


@dataclass(frozen=True, slots=True)
class ShortSeenGrad(ShortAttention):
    computes: ClassVar[type[Op]] = SeenAttentionGrad


_NEEDS = frozenset({"gpu", "mma"})
SHORT_CAUSAL = ShortCausal("short_attention", "triton", _NEEDS)
SHORT_CAUSAL_GRAD = ShortCausalGrad("short_attention_grad", "triton", _NEEDS)
SHORT_SEEN = ShortSeen("short_seen_attention", "triton", _NEEDS)
SHORT_SEEN_GRAD = ShortSeenGrad("short_seen_attention_grad", "triton", _NEEDS)


def pair_tile(site: Site) -> PairTile:
    """Returns the tile by rule: one pair per program, and as few warps as can hold its scores and heads in
    registers."""
    rows, width = _rows(site), _block(number_of(heads_of(site)[1]["q"].width))
    if rows <= 32:
        return PairTile(1, max(1, width // 32), 1)
    return PairTile(1, 4 if rows <= 64 and width <= 64 else 8, 1)


def _rows(site: Site) -> int:
    assert site.context is not None
    return _block(site.context)


def _block(number: int) -> int:
    """Returns the next power of two that is large enough for tensor cores."""
    return max(NARROWEST, 1 << (number - 1).bit_length())


def _context(site: Site, tile: PairTile) -> ShortContext:
    function, module = symbol(site)
    backward, inputs, outputs = heads_of(site)
    q, k = inputs["q"], inputs["k"]
    channels, rows = number_of(q.width), _rows(site)
    width = _block(channels)
    held = {"ROWS": rows, "KEYS": rows, "WIDTH": width, "PAIRS": tile.pairs}
    settings = {**held, "WARPS": tile.warps, "STAGES": tile.stages}
    constants = ["H", "G", "C", "SCALE", *held]
    tensors, read = [*inputs, *outputs], [name for name in inputs if name != "y"]  # the weights replace y, unrounded
    strides = ["Q_STRIDE", "K_STRIDE", "V_STRIDE"]
    parameters = [*(f"{name}_ptr" for name in [*read, *outputs]), "B", "T", "S", *strides]
    whole = [f"{name}.contiguous()" if name in ("dy", "lse", "seen") else name for name in read]
    given = [*whole, *outputs, "b", "t", "s", *(f"{name}.stride(0)" for name in "qkv"), *constants]
    inside = "" if width == channels else " & (c < C)"
    arguments = [f"{name}: Tensor" for name in inputs]
    return ShortContext(
        header=header(site),
        summary=flowed(f'"""{site.label}: {site.node.op.words}, a head at a time.'),
        formulas=formulas(site),
        how=_how(site, tile, rows),
        namespace=f"specc_{site.module}",
        node=site.label,
        function=function,
        symbol=module,
        heads=number_of(q.shape[-2]),
        kv_heads=number_of(k.shape[-2]),
        channels=channels,
        settings=f"{', '.join(settings)} = {', '.join(map(str, settings.values()))}\nSCALE = C**-0.5",
        kernel=listed(f"def {function}_kernel(", [*parameters, *(f"{name}: tl.constexpr" for name in constants)], "):"),
        queries=f"(t[:, None] < T){inside}" if inside else "t[:, None] < T",
        keys=f"(s[:, None] < S){inside}" if inside else "s[:, None] < S",
        causal=not isinstance(site.node.op, SeenOp),
        element=ELEMENTS[q.dtype],
        body=f"triton/short_attention_{'backward' if backward else 'forward'}.py.jinja",
        launch_signature=listed("def launch(", [f"{name}: Tensor" for name in tensors], ") -> None:"),
        arguments=flowed(f"{', '.join(map(unbroken, given))},", " " * 8),
        signature=listed(f"def {function}(", arguments, f") -> {annotation(site)}:"),
        promise=promise(site),
        wanted=tuple(_wanted(name, inputs[name].dtype, isinstance(site.node.op, SeenOp)) for name in inputs),
        allocated=tuple(f"{name} = {expression}" for name, expression in zip(outputs, _split(backward), strict=True)),
        tensors=", ".join(tensors),
        returns=", ".join(outputs),
        fake_signature=listed("def _(", arguments, f") -> {annotation(site)}:"),
        fake=FAKES[backward],
    )


def _split(backward: bool) -> tuple[str, ...]:
    """Returns the expression that allocates each output."""
    if backward:
        return tuple(f"{name}.new_empty({name}.shape)" for name in "qkv")
    return "q.new_empty(q.shape)", "q.new_empty(b, H, t, dtype=torch.float32)"


def _wanted(name: str, dtype: str, sees: bool) -> str:
    """Returns a row of the table of input checks: an input with the shape and dtype that it must have."""
    keys = "s" if sees else "t"
    shapes = {"lse": "(b, H, t)", "seen": "(b, s)", "k": f"(b, {keys}, G, C)", "v": f"(b, {keys}, G, C)"}
    kind = "torch.bool" if dtype == "bool" else DTYPES[dtype]
    return f'("{name}", {name}, {shapes.get(name, "(b, t, H, C)")}, {kind}),'


def _how(site: Site, tile: PairTile, rows: int) -> str:
    """Returns a description of the kernel's algorithm."""
    pairs = "one head of keys of a sequence" if tile.pairs == 1 else f"{tile.pairs} heads of keys of sequences"
    words = f"Triton kernel for {site.target.name}: a program takes {pairs}, and the queries that read them. "
    words += (
        f"All {rows} x {rows} scores of a head are in registers at once; sums are fp32, weights are rounded before "
    )
    words += "they are multiplied with. Called again, it gives the same bits."
    return flowed(words)
