"""How large a tile of a product each program computes: a rule from the shape and what the target has."""

from collections.abc import Collection
from dataclasses import dataclass

from specc.compiler.ir.graph import BYTES
from specc.compiler.kernels.epilogue import Epilogue
from specc.compiler.targets import Target

ROWS = 128
WIDTHS = (256, 128, 64, 32)  # columns of all accumulators together
WIDEST_IN_REGISTERS = 128  # without wgmma, which reads shared memory, x and the weights take registers too
NARROWEST = 32
DEPTHS = (64, 32)
SHALLOWEST = 16
FEWEST_STAGES, MOST_STAGES = 3, 4
ACCUMULATORS = 2  # with more, each has too few columns to be worth reading x for
BARRIERS = 1024  # bytes
LARGEST_SIDE = 256  # of a block that TMA loads
MOST_WARPS = 32  # a program, and programs a multiprocessor
DEEPEST = 16  # stages


def counted(count: int, word: str) -> str:
    """`1 warp`, `2 warps`."""
    return f"{count} {word}{'s' if count != 1 else ''}"


def between(name: str, value: int, least: int, most: int) -> None:
    """Raises ValueError, which names `name`, where a number of a tile is out of its bounds."""
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}, and not from {least} to {most}")


def power(name: str, value: int, least: int, most: int) -> None:
    """As `between`, for what must be a power of two besides."""
    if not least <= value <= most or value & (value - 1):
        raise ValueError(f"{name} is {value}, and not a power of two from {least} to {most}")


@dataclass(frozen=True, slots=True)
class Tile:
    """`m` x `n` elements an accumulator, `k` of the sum at a time, by `warps`, `stages` loads in flight; a persistent
    kernel runs `resident` programs a multiprocessor."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    resident: int = 1

    def __post_init__(self) -> None:
        for name, value in (("m", self.m), ("n", self.n), ("k", self.k)):
            power(name, value, SHALLOWEST, LARGEST_SIDE)
        power("warps", self.warps, 1, MOST_WARPS)
        between("stages", self.stages, 1, DEEPEST)
        between("resident", self.resident, 1, MOST_WARPS)

    def __str__(self) -> str:
        shape = f"{self.m}x{self.n}x{self.k}, {counted(self.warps, 'warp')}, {counted(self.stages, 'stage')}"
        return f"{shape}, {self.resident} a multiprocessor" if self.resident > 1 else shape


def tile_of(target: Target, epilogue: Epilogue, n: int, k: int) -> Tile:
    """The widest tile that pads N by at most an eighth and leaves room for three stages.

    A stage holds a block of x and one of each weight. With TMA the loads of the next tile run during the
    epilogue, so what that stages in shared memory stands beside them: half a tile of its widest output and,
    where it reads tiles, half of the widest of these. Where even the narrowest tile has no room, two stages
    must do.
    """
    count = len(epilogue.accumulators)
    size = BYTES[epilogue.x.type.dtype]
    beside = _staged if "tma" in target.features else _nothing
    depths = [depth for depth in DEPTHS if depth <= k] or [SHALLOWEST]
    most = max(WIDTHS) if "wgmma" in target.features else WIDEST_IN_REGISTERS
    widths = [width // count for width in WIDTHS if NARROWEST * count <= width <= most]
    for wide in [width for width in widths if _padded(n, width) * 8 <= n * 9] or [NARROWEST]:
        for deep in depths:
            stage = (ROWS + wide * count) * deep * size
            stages = (target.shared_memory - BARRIERS - beside(epilogue, wide)) // stage
            if stages >= FEWEST_STAGES:
                return Tile(ROWS, wide, deep, _warps(wide * count), min(stages, MOST_STAGES))
    return Tile(ROWS, NARROWEST, depths[-1], _warps(NARROWEST * count), FEWEST_STAGES - 1)


# Rows, columns of all accumulators together, depth, warps, stages, programs a multiprocessor; the likeliest first.
WITH_TMA = (
    (128, 256, 64, 8, 4, 1), (128, 128, 64, 4, 3, 2), (256, 128, 64, 8, 4, 1), (128, 256, 64, 8, 3, 1),
    (128, 128, 64, 4, 2, 2), (128, 128, 64, 8, 4, 1), (256, 128, 64, 8, 3, 1), (64, 256, 64, 4, 3, 2),
    (128, 128, 64, 8, 3, 2), (128, 128, 128, 8, 2, 1), (64, 128, 64, 4, 4, 2), (128, 64, 64, 4, 4, 2),
)  # fmt: skip
BY_POINTER = (
    (128, 128, 64, 8, 3, 1), (128, 128, 32, 4, 4, 1), (128, 128, 32, 8, 4, 1), (128, 256, 32, 8, 3, 1),
    (128, 256, 64, 8, 3, 1), (256, 128, 32, 8, 3, 1), (128, 64, 64, 4, 3, 1), (64, 128, 64, 4, 3, 1),
    (128, 64, 32, 4, 4, 1), (64, 64, 64, 4, 4, 1),
)  # fmt: skip


def candidates(target: Target, epilogue: Epilogue, k: int) -> tuple[Tile, ...]:
    """The tiles that are worth measuring and that fit the target's shared memory."""
    tma = "tma" in target.features
    beside = _staged if tma else _nothing
    tiles = []
    for m, columns, deep, warps, stages, resident in WITH_TMA if tma else BY_POINTER:
        tile = Tile(m, columns // len(epilogue.accumulators), deep, warps, stages, resident)
        needed = loaded_bytes(epilogue, tile) + beside(epilogue, tile.n) * m // ROWS + BARRIERS
        if tile.n >= NARROWEST and deep <= k and needed * resident <= target.shared_memory:
            tiles.append(tile)
    return tuple(tiles)


def loaded_bytes(epilogue: Epilogue, tile: Tile) -> int:
    """Bytes of shared memory that the loads in flight of one program take."""
    return (tile.m + tile.n * len(epilogue.accumulators)) * tile.k * BYTES[epilogue.x.type.dtype] * tile.stages


def whole_tiles(extent: int, side: int) -> float:
    """The extent that tiles of `side` cover, as a multiple of `extent`."""
    return _padded(extent, side) / extent


def _nothing(epilogue: Epilogue, width: int) -> int:
    return 0


def _padded(n: int, width: int) -> int:
    return -(-n // width) * width


def _staged(epilogue: Epilogue, width: int) -> int:
    half = ROWS * width // 2
    written = _widest({value.type.dtype for value in epilogue.outputs})
    return half * (written + _widest({value.type.dtype for value in epilogue.operands if not value.column}))


def _widest(dtypes: Collection[str]) -> int:
    return max((BYTES[dtype] for dtype in dtypes), default=0)


def _warps(columns: int) -> int:
    return 8 if columns >= 128 else 4
