"""Attention of a few queries over a cache, in Triton. Parallel program instances read ranges of the keys.

A decoding step computes little. Reading the cache takes most of the time. A program instance reads one range of
visible keys for one text and one key head. The program instance computes all query heads that share the key head, and
writes partial sums. The program instance that finishes last adds the partial sums of all ranges (Dao et al., 2023,
"Flash-Decoding for long-context inference"). If the partial sums are too large for one program instance, a second
kernel adds them.
"""

from dataclasses import replace
from typing import ClassVar

from specc.compiler.ir.types import BYTES
from specc.compiler.kernels.attention.cached_context import CachedTile, inputs_of, op_of, page_of, sizes_of
from specc.compiler.kernels.attention.cached_writer import Writer
from specc.compiler.kernels.attention.score_tile import NARROWEST, block
from specc.compiler.kernels.attention.step_context import StepWriter
from specc.compiler.kernels.generated import number_of, python_file
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.ops.caches.cached_attention import CachedBase
from specc.compiler.ops.decoding.rope_attention import RopeAttention
from specc.compiler.records import record
from specc.compiler.targets import Target

WIDEST = 512  # largest number of channels of keys or of values
SHORTEST = 128  # in positions; Torch reads a shorter cache, of one or two tiles, just as fast
# Bytes that each multiprocessor must have in flight to reach the memory bandwidth: about 8 TB/s times a latency of 1
# us, divided by 132 multiprocessors
IN_FLIGHT = 65_536
RESIDENT = 4  # program instances per multiprocessor
WIDE_ROW = 512  # if a position has at least this many bytes, a tile has half as many keys
MANY_KEYS, MANY_WARPS, MANY_STAGES = 32, 2, 2  # the tile of a step with many texts
MOST_PROGRAMS = 32  # the most program instances per multiprocessor
# (keys, warps) of the tiles to measure
TILES = ((64, 4), (32, 4), (128, 4), (64, 8), (128, 8), (32, 2), (64, 2), (16, 2))


@record
class CachedAttention(Kernel):
    """Accepts 16-bit queries over contiguous caches, ring buffers and pages. The cache may hold e4m3 codes. For
    `RopeAttention`, the kernel also rotates the new queries and keys, and writes the new rows to the cache. `tile` is
    the measured tile. If `tile` is None, the kernel uses the result of `cached_tile`."""

    TILE: ClassVar[type | None] = CachedTile
    tile: CachedTile | None = None

    def rejects(self, site: Site) -> str | None:
        op, q = op_of(site), inputs_of(site)["q"]
        channels, values = sizes_of(site)
        first = values if op.values is not None else channels
        if q.dtype not in ("bf16", "f16"):
            return f"computes in bf16 or f16, not in {q.dtype}"
        if max(first, values, channels - first) > WIDEST:
            return f"takes heads of at most {WIDEST} channels; these have {channels} for keys and {values} for values"
        if op.coded and "fp8_mma" not in site.target.features:
            return f"needs a GPU that converts e4m3, which is sm89 or later, not {site.target.name}"
        if site.context is not None and site.context <= SHORTEST:
            return f"reads caches of more than {SHORTEST} positions; this one has at most {site.context}"
        tile = self.tile or cached_tile(site)
        if (needed := tile.loaded_bytes(row_bytes(site))) > site.target.shared_memory:
            known = f"{site.target.name} has {site.target.shared_memory:,}"
            return f"needs {needed:,} bytes of shared memory for the loads of {tile}; {known}"
        return None

    def variants(self, site: Site) -> tuple[Kernel, ...]:
        tiles = [cached_tile(site)]
        for keys, warps in TILES:
            for stages in (2, 3, 4):
                programs = resident(site.target, stages * keys * row_bytes(site))
                tiles += [CachedTile(keys, warps, stages, programs)] if programs and stages * keys <= 256 else []
        return tuple(replace(self, tile=tile) for tile in dict.fromkeys(tiles))

    def render(self, site: Site) -> Rendered:
        tile = self.tile or cached_tile(site)
        if isinstance(site.node.op, RopeAttention):
            context = StepWriter(site, tile, None if self.tile else many_tile(site)).context()
        else:
            context = Writer(site, tile).context()
        return python_file(context.op, "triton/cached_attention.py.jinja", context, str(tile))


def cached_tile(site: Site) -> CachedTile:
    """Returns the default tile: 64 keys, or 32 if rows are wide. The tile has the fewest stages that keep `IN_FLIGHT`
    bytes of loads in flight.

    A tile of 64 keys and 64 values, each with 64 channels in bf16, has 2 * 64 * 64 * 2 bytes = 16 KiB. With two stages,
    one tile is loaded while another is multiplied. Four program instances on a multiprocessor then have 64 KiB in
    flight, and occupy 128 KiB of shared memory. Latents of 512 + 64 channels are both keys and values, so a tile of 32
    latents has 36 KiB. A paged cache needs one more stage, because the page number is loaded before the keys.
    """
    row, page = row_bytes(site), page_of(site)
    keys = 64 if row <= WIDE_ROW else 32
    if page and page >= 16 and keys % page == 0:
        keys = page  # each tile lies within one page
    stages, room = 2, site.target.shared_memory
    programs = max(resident(site.target, stages * keys * row), 1)
    while stages < 4 and (stages - 1) * keys * row * programs < IN_FLIGHT and (stages + 1) * keys * row <= room:
        stages += 1
        programs = resident(site.target, stages * keys * row)
    return CachedTile(keys, 4, stages + (page > 0 and (stages + 1) * keys * row <= room), programs)


def many_tile(site: Site) -> CachedTile | None:
    """Returns the tile for a step with many texts, in which one program instance reads all keys of a text and key head.
    Returns None if this tile would not increase the number of resident program instances.

    All program instances should be resident at once. Program instances that have to wait would run at the end, when
    most multiprocessors are idle. With 12 key heads of 64 channels, 64 texts need 768 program instances. On 132
    multiprocessors, 528 program instances are resident with the default tile, and 1,848 with this tile. A paged cache
    needs one more stage, as in `cached_tile`.
    """
    heads, kv_heads = (number_of(inputs_of(site)[name].shape[-2]) for name in ("q", "k"))
    room, row = site.target.shared_memory, row_bytes(site)
    stages, tile = MANY_STAGES + (page_of(site) > 0), cached_tile(site)
    programs = room // (stages * MANY_KEYS * row)
    # The smaller tile requires that a block of queries has the fewest rows, and that pages consist of whole tiles of
    # both sizes.
    if heads > NARROWEST * kv_heads or tile.keys % MANY_KEYS or programs <= tile.programs:
        return None
    return CachedTile(MANY_KEYS, MANY_WARPS, stages, min(programs, MOST_PROGRAMS))


def row_bytes(site: Site) -> int:
    """Returns the bytes that a program instance loads per position: the padded key, and the value, unless the value is
    a part of the key."""
    op, inputs = op_of(site), inputs_of(site)
    channels, values = sizes_of(site)
    if op.values is None:
        numbers = block(channels) + block(values)
    else:
        rest = block(channels - values) if channels > values else 0
        numbers = block(values) * (1 + op.coded) + rest
    return numbers * BYTES[inputs["k"].dtype]


def resident(target: Target, room: int) -> int:
    """Returns how many program instances fit on a multiprocessor at once. Each program instance needs `room` bytes of
    shared memory."""
    return min(RESIDENT, target.shared_memory // room)


CACHED_ATTENTION = CachedAttention("cached_attention", "triton", frozenset({"gpu", "mma"}), CachedBase)
