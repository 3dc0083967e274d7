"""The tile of a matrix product, and the rule for the default tile. One thread block computes one tile of the result."""

from itertools import product

from specc.compiler.errors import counted
from specc.compiler.ir.types import BYTES
from specc.compiler.kernels.epilogue import Epilogue
from specc.compiler.records import record
from specc.compiler.targets import Target

ROWS = 128
WIDTHS = (256, 128, 64, 32)  # the widths to try, in columns summed over all accumulators
WIDEST_IN_REGISTERS = 128  # in columns; without wgmma, x and the weights also occupy registers
NARROWEST = 32
DEPTHS = (64, 32)
SHALLOWEST = 16
FEWEST_STAGES, MOST_STAGES = 3, 4
ACCUMULATORS = 2  # with more accumulators, each has too few columns to amortize the reads of x
BARRIERS = 1024  # bytes
LARGEST_SIDE = 256  # the most rows or columns of a block that TMA loads
MOST_WARPS = 32  # the most warps per program instance, and the most program instances per multiprocessor
DEEPEST = 16  # stages


def between(name: str, value: int, least: int, most: int) -> None:
    """Checks that a setting of a tile is within bounds.

    Args:
        name: The name of the setting, for the message.
        value: The value to check.
        least: The smallest valid value.
        most: The largest valid value.

    Raises:
        ValueError: If `value` is out of bounds.
    """
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}, but must be from {least} to {most}")


def power(name: str, value: int, least: int, most: int) -> None:
    """Checks that a setting of a tile is a power of two within bounds.

    Args:
        name: The name of the setting, for the message.
        value: The value to check.
        least: The smallest valid value.
        most: The largest valid value.

    Raises:
        ValueError: If `value` is out of bounds or not a power of two.
    """
    if not least <= value <= most or value & (value - 1):
        raise ValueError(f"{name} is {value}, but must be a power of two from {least} to {most}")


@record
class Tile:
    """The tile of one program instance of a matrix product.

    Attributes:
        m: The number of rows of each accumulator.
        n: The number of columns of each accumulator.
        k: The number of elements of the reduction dim per iteration.
        warps: Warps per program instance.
        stages: Loads in flight.
        resident: The number of program instances per multiprocessor, for a persistent kernel.

    Raises:
        ValueError: If a field is out of its bounds.
    """

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


def tile_of(target: Target, epilogue: Epilogue) -> Tile:
    """Returns the widest tile that satisfies two conditions: the tile pads N by at most an eighth, and three stages fit
    into shared memory.

    A stage holds a block of x and a block of each weight. With TMA, the next tile is loaded during the epilogue. Shared
    memory must then also hold half a tile of the widest output. If the epilogue reads tiles, shared memory also holds
    half a tile of the widest operand. If three stages do not fit even for the narrowest tile, the result has two
    stages.

    Args:
        target: The target. Its features and shared memory limit the tile.
        epilogue: The product and its epilogue.

    Returns:
        The tile, with two to four stages. A tile of 8-bit operands has twice the depth and, if it is wide, twice as
        many rows, if three stages of it fit. Partial sums are then added less often, and weights are read half as
        often.
    """
    count = len(epilogue.accumulators)
    size = BYTES[epilogue.x.type.dtype]
    tma = "tma" in target.features
    depths = [depth for depth in DEPTHS if depth <= epilogue.k] or [SHALLOWEST]
    deeper = 2 * DEPTHS[0]
    if tma and size == 1 and deeper <= epilogue.k and whole_tiles(epilogue.k, deeper) * 8 <= 9:
        depths = [deeper, *depths]
    # 8-bit products need additional registers for partial sums.
    most = max(WIDTHS) if "wgmma" in target.features and size > 1 else WIDEST_IN_REGISTERS
    widths = [width // count for width in WIDTHS if NARROWEST * count <= width <= most]
    for wide in [width for width in widths if whole_tiles(epilogue.n, width) * 8 <= 9] or [NARROWEST]:
        for deep in depths:
            rows = 2 * ROWS if deep == deeper and wide * count >= WIDEST_IN_REGISTERS else ROWS
            stage = (rows + wide * count) * deep * size
            stages = (target.shared_memory - BARRIERS - tma * _staged(epilogue, wide) * rows // ROWS) // stage
            if stages >= FEWEST_STAGES:
                return Tile(rows, wide, deep, _warps(wide * count), min(stages, MOST_STAGES))
    return Tile(ROWS, NARROWEST, depths[-1], _warps(NARROWEST * count), FEWEST_STAGES - 1)


# Rows, columns summed over all accumulators, depth, warps, stages, programs per multiprocessor; the most promising
# first.
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


def candidates(target: Target, epilogue: Epilogue) -> tuple[Tile, ...]:
    tma = "tma" in target.features
    # Blocks of 8-bit elements that are twice as deep have as many bytes as blocks of 16-bit elements. With deeper
    # blocks, partial sums are added less often.
    deeper = (2, 1) if BYTES[epilogue.x.type.dtype] == 1 else (1,)
    tiles = []
    for factor, (m, columns, deep, warps, stages, resident) in product(deeper, WITH_TMA if tma else BY_POINTER):
        tile = Tile(m, columns // len(epilogue.accumulators), factor * deep, warps, stages, resident)
        needed = loaded_bytes(epilogue, tile) + tma * _staged(epilogue, tile.n) * m // ROWS + BARRIERS
        if tile.n >= NARROWEST and tile.k <= epilogue.k and needed * resident <= target.shared_memory:
            tiles.append(tile)
    return tuple(tiles)


def loaded_bytes(epilogue: Epilogue, tile: Tile) -> int:
    """Returns the bytes of shared memory that hold the loads in flight of one program instance."""
    return (tile.m + tile.n * len(epilogue.accumulators)) * tile.k * BYTES[epilogue.x.type.dtype] * tile.stages


def whole_tiles(extent: int, side: int) -> float:
    """Returns `extent` rounded up to whole tiles of `side`, divided by `extent`."""
    return -(-extent // side) * side / extent


def _staged(epilogue: Epilogue, width: int) -> int:
    half = ROWS * width // 2
    written = max(BYTES[value.type.dtype] for value in epilogue.outputs)
    read = max((BYTES[value.type.dtype] for value in epilogue.operands if value.tile), default=0)
    masks = BYTES["f32"] * len(epilogue.draws)  # Triton may exchange a mask between threads
    codes = sum(result.rounding is not None for result in epilogue.results)  # in separate buffers
    return half * (written + read + masks + codes)


def _warps(columns: int) -> int:
    return 8 if columns >= 128 else 4
