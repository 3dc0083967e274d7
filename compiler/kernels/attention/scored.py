"""Causal attention and its gradient in Triton, with a score and a mask that are expressions. The kernels skip fully
masked tiles."""

from dataclasses import replace
from typing import ClassVar

from specc.compiler.kernels.attention.attention import heads_refusal, inputs_of, unequal
from specc.compiler.kernels.attention.score_tile import (
    FORWARD_TILES,
    KEYS_TILES,
    QUERIES_TILES,
    ScoreGradTile,
    ScoreTile,
    fitting,
)
from specc.compiler.kernels.attention.scored_context import MOST_ENTRIES, Writer, lines_of, prefix_reason
from specc.compiler.kernels.generated import number_of, python_file
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.ops.saved_attention import ScoredAttention, ScoredAttentionGrad
from specc.compiler.records import record

WIDEST = 256  # channels of a head
RANK = 3  # ranks after the libraries' kernels for plain causal attention


class ScoredKernel(Kernel):
    """The base class of the forward and the gradient kernel. Both kernels accept 16-bit heads of at most 256 channels.

    A separate kernel first lists the tiles that are not fully masked. For tiles without masked pairs, the kernels do
    not compute the mask.
    """

    RANK: ClassVar[int] = RANK

    def rejects(self, site: Site) -> str | None:
        return heads_refusal(inputs_of(site)["q"], WIDEST) or prefix_reason(site) or unequal(site)


@record
class ScoredForward(ScoredKernel):
    """The forward kernel. `tile` is the measured tile. If `tile` is None, the kernel uses the first tile that fits."""

    TILE: ClassVar[type | None] = ScoreTile
    tile: ScoreTile | None = None

    def variants(self, site: Site) -> tuple[Kernel, ...]:
        return tuple(replace(self, tile=tile) for tile in self._tiles(site))

    def _tiles(self, site: Site) -> list[ScoreTile]:
        return fitting(site.target, number_of(inputs_of(site)["q"].width), FORWARD_TILES)

    def render(self, site: Site) -> Rendered:
        tile = self.tile or self._tiles(site)[0]
        context = Writer(site).context(tile)
        return python_file(context.op, "triton/scored_attention.py.jinja", context, str(tile))


@record
class ScoredBackward(ScoredKernel):
    """The two gradient kernels. `tile` holds the measured tiles. If `tile` is None, each kernel uses the first tile
    that fits."""

    TILE: ClassVar[type | None] = ScoreGradTile
    tile: ScoreGradTile | None = None

    def rejects(self, site: Site) -> str | None:
        if (reason := ScoredKernel.rejects(self, site)) is not None:
            return reason
        lines = lines_of(site)
        for reading in lines.readings:
            if reading.general and reading.size > MOST_ENTRIES:
                limit = f"tables of at most {MOST_ENTRIES:,} elements if the index is not a function of i - j"
                return f"adds up gradients of {limit}; {reading.table} has {reading.size:,}"
        tile = self.tile.queries if self.tile is not None else None
        if tile is not None and lines.by_distance and tile.queries != tile.keys:
            return f"takes square tiles for dq where a table is read at i - j, and not {tile.queries}x{tile.keys}"
        return None

    def variants(self, site: Site) -> tuple[Kernel, ...]:
        queries, keys = self._tiles(site)
        pairs = [(queries[0], tile) for tile in keys] + [(tile, keys[0]) for tile in queries[1:]]
        return tuple(replace(self, tile=ScoreGradTile(*pair)) for pair in pairs)

    def _tiles(self, site: Site) -> tuple[list[ScoreTile], list[ScoreTile]]:
        lines = lines_of(site)
        queries = [tile for tile in QUERIES_TILES if not lines.by_distance or tile[0] == tile[1]]
        # The fastest tiles for dk and dv on an H100 have 32 queries for a plain score, 128 for a score that reads a
        # table at i - j, and 64 for other scores.
        first = KEYS_TILES[0 if lines.plain else 2 if lines.by_distance else 1]
        keys_tiles = sorted(KEYS_TILES, key=first.__ne__)
        target, channels = site.target, number_of(inputs_of(site)["q"].width)
        return fitting(target, channels, queries), fitting(target, channels, keys_tiles, by_keys=True)

    def render(self, site: Site) -> Rendered:
        tile = self.tile or ScoreGradTile(*(choices[0] for choices in self._tiles(site)))
        context = Writer(site).context(tile)
        return python_file(context.op, "triton/scored_attention.py.jinja", context, str(tile))


_NEEDS = frozenset({"gpu", "mma"})
SCORED = ScoredForward("scored_attention", "triton", _NEEDS, ScoredAttention)
SCORED_GRAD = ScoredBackward("scored_attention_grad", "triton", _NEEDS, ScoredAttentionGrad)
