"""Tiles of attention with a score and a mask."""

from collections.abc import Iterable

from specc.compiler.errors import counted
from specc.compiler.kernels.generated import constants
from specc.compiler.kernels.tile import between, power
from specc.compiler.records import record
from specc.compiler.targets import Target

NARROWEST = 16  # the fewest rows and columns of a product on tensor cores


@record
class ScoreTile:
    """A tile of `queries` by `keys` attention scores. One program instance computes the tiles in sequence, with
    `warps` warps and `stages` loads in flight.

    Raises ValueError if a field is out of its bounds.
    """

    queries: int
    keys: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        power("queries", self.queries, NARROWEST, 256)
        power("keys", self.keys, NARROWEST, 256)
        power("warps", self.warps, 1, 16)
        between("stages", self.stages, 1, 8)

    def __str__(self) -> str:
        return f"{self.queries}x{self.keys}, {counted(self.warps, 'warp')}, {counted(self.stages, 'stage')}"

    def settings(self, prefix: str = "") -> str:
        names = ("QUERIES", "KEYS", "WARPS", "STAGES")
        values = (self.queries, self.keys, self.warps, self.stages)
        return constants({prefix + name: value for name, value in zip(names, values, strict=True)})


@record
class ScoreGradTile:
    """The tiles of the two gradient kernels: `queries` is the tile of the kernel for dq, and `keys` the tile of the
    kernel for dk and dv."""

    queries: ScoreTile
    keys: ScoreTile

    def __str__(self) -> str:
        return f"dq {self.queries}; dk, dv {self.keys}"


# Queries, keys, warps, stages; the most promising tile first.
FORWARD_TILES = ((64, 64, 4, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 2))
QUERIES_TILES = ((64, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 3), (64, 32, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2))
KEYS_TILES = ((32, 64, 4, 2), (64, 64, 4, 2), (128, 64, 4, 2), (64, 32, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2))
MOST_SUMS = 128  # f32 sums of products per thread; a thread has 255 registers


def fitting(
    target: Target, channels: int, choices: Iterable[tuple[int, int, int, int]], by_keys: bool = False
) -> list[ScoreTile]:
    """Returns the tiles whose blocks fit into shared memory, and whose sums fit into registers.

    Args:
        target: The target.
        channels: The number of channels per head.
        choices: The queries, keys, warps and stages of each tile, most promising first.
        by_keys: Whether a program instance sums dk and dv for a block of keys. Otherwise, a program instance sums y or
            dq for a block of queries.
    """
    width = block(channels)
    fit = []
    for queries, keys, warps, stages in choices:
        resident, loaded = (keys, queries) if by_keys else (queries, keys)
        room = 2 * 2 * width * (resident + stages * loaded)
        sums = (1 + by_keys) * resident * width // (32 * warps)
        if room <= target.shared_memory and sums <= MOST_SUMS:
            fit.append(ScoreTile(queries, keys, warps, stages))
    return fit or [ScoreTile(32, 32, 4, 1)]


def block(number: int) -> int:
    """Returns the smallest power of two that is at least `number` and large enough for tensor cores."""
    return max(NARROWEST, 1 << (number - 1).bit_length())
