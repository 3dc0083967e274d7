"""One time step of an int8 LSTM as one Triton kernel. A program instance computes all four gates, for a tile of rows
and hidden units."""

from dataclasses import replace
from typing import ClassVar, NamedTuple

from specc.compiler.kernels.int8.lstm import StepFunction, extent, step_function, step_refusal
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, lacks_memory
from specc.compiler.kernels.tile import Tile, whole_tiles
from specc.compiler.ops.int8_lstm import Int8LstmStep
from specc.compiler.records import record

NARROWEST_K = 32  # the number of codes that one tensor-core instruction multiplies
WHOLE_K = 256  # up to this K, a program instance loads all of K at once
BLOCK_K = 128
LARGEST_WEIGHT = 2**31  # elements; pointer offsets into it have 32 bits
# Tiles worth measuring: rows, hidden units, warps. The first is the default. A step is short, so many small program
# instances finish a step soonest: 768 rows of 128 units give 192 program instances.
TILES = ((32, 16, 4), (16, 16, 2), (16, 32, 4), (32, 32, 4), (64, 16, 4), (64, 32, 8))


class StepContext(NamedTuple):
    """The context of templates/triton/int8_lstm_step.py.jinja."""

    op: StepFunction
    target: str
    tile: Tile


@record
class Int8LstmTriton(Kernel):
    """Accepts any number of rows and any hidden size H. `tile` is the measured tile. If `tile` is None, the kernel uses
    the result of `step_tile`."""

    TILE: ClassVar[type | None] = Tile
    tile: Tile | None = None

    def rejects(self, site: Site) -> str | None:
        size, k = extent(site)
        if 4 * size * k >= LARGEST_WEIGHT:
            return f"addresses weights with 32-bit offsets; {4 * size} x {k} elements need more"
        tile = self.tile or step_tile(k)
        if tile.k < NARROWEST_K:
            return f"multiplies at least {NARROWEST_K} codes at a time; a tile of {tile} has {tile.k}"
        return lacks_memory(site, _loaded_bytes(tile), f"the loads of {tile}") or step_refusal(site)

    def variants(self, site: Site) -> tuple[Kernel, ...]:
        _, k = extent(site)
        tiles = (Tile(m, n, _depth(k), warps, _stages(k)) for m, n, warps in TILES)
        return tuple(replace(self, tile=tile) for tile in tiles if _loaded_bytes(tile) <= site.target.shared_memory)

    def padding(self, site: Site, rows: int) -> float:
        size, k = extent(site)
        tile = self.tile or step_tile(k)
        return whole_tiles(rows, tile.m) * whole_tiles(size, tile.n) * whole_tiles(k, tile.k)

    def render(self, site: Site) -> Rendered:
        op = step_function(site)
        tile = self.tile or step_tile(op.k)
        template = ("triton/int8_lstm_step.py.jinja", StepContext(op, site.target.name, tile))
        return Rendered(op.function, op.symbol, {f"{op.symbol}.py": template}, str(tile))


INT8_LSTM_TRITON = Int8LstmTriton("int8_lstm_triton", "triton", frozenset({"int8_mma"}), Int8LstmStep)


def step_tile(k: int) -> Tile:
    """Returns the default tile for a reduction dim of `k` elements."""
    rows, units, warps = TILES[0]
    return Tile(rows, units, _depth(k), warps, _stages(k))


def _depth(k: int) -> int:
    return max(1 << (k - 1).bit_length(), NARROWEST_K) if k <= WHOLE_K else BLOCK_K


def _stages(k: int) -> int:
    return 1 if k <= WHOLE_K else 3


def _loaded_bytes(tile: Tile) -> int:
    return (4 * tile.m + 4 * tile.n) * tile.k * tile.stages
