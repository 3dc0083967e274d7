"""Windows over a stream of tokens: which targets each scores, and which of them are scored at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from specc.runtime.data.windows.stream import TokenStream

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Window:
    """Inputs [start, start + length) of the stream; of the targets one later, the last `new` are scored."""

    start: int
    length: int
    new: int


@dataclass(frozen=True, slots=True)
class Windows:
    """A sequence of windows that scores each target position 1 .. `last` exactly once.

    The first window scores all its targets, each later one its last `stride`. The final one is moved left to
    keep its shape and scores only what is new, so its targets see more context. Below `length`, one short
    window is all.
    """

    last: int
    length: int
    stride: int

    def __len__(self) -> int:
        return 1 + max(0, -(-(self.last - self.length) // self.stride))

    def __getitem__(self, k: int) -> Window:
        end = min(self.last, self.length + k * self.stride)
        start = max(0, end - self.length)
        return Window(start, end - start, end - self.before(k))

    def before(self, k: int) -> int:
        """How many targets the windows before `k` score, which is the position of the last of them."""
        return min(self.last, self.length + (k - 1) * self.stride) if k else 0

    def chunks(self, tokens: int | None) -> list[range]:
        """The windows in runs that score about so many targets: each run ends with the first window behind which a
        multiple of `tokens` is reached. All are one run where there is no number."""
        if tokens is None:
            return [range(len(self))]
        reached = np.minimum(self.length + np.arange(len(self) - 1) * self.stride, self.last)
        firsts = 1 + np.flatnonzero(np.diff(np.concatenate(([0], reached)) // tokens))
        bounds = [0, *firsts.tolist(), len(self)]
        return [range(first, end) for first, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Windows of one length that are scored at once.

    Attributes:
        number: of this batch among all.
        ids, targets: i64 [B, T]. Rows behind the last window are copies of it, and do not count.
        at: i64 [B, T], the position in the stream of each target.
        new: of the targets, bool [B, T], those that are scored here.
        seen: those that windows before this one have scored.
    """

    number: int
    ids: Ids
    targets: Ids
    at: Ids
    new: Mask
    seen: Mask


def read_batch(stream: TokenStream, windows: Windows, number: int, chosen: range, rows: int) -> Batch:
    """The windows `chosen`, filled up to `rows` where there are fewer."""
    part = [windows[k] for k in chosen]
    length = part[0].length
    read = np.stack([stream.read(window.start, length + 1).astype(np.int64) for window in part])
    read = np.concatenate([read, np.repeat(read[-1:], rows - len(part), axis=0)])
    starts = np.array([window.start for window in part] + [part[-1].start] * (rows - len(part)))
    counts = np.array([window.new for window in part] + [0] * (rows - len(part)))
    place = np.arange(length)
    new = place >= length - counts[:, None]
    seen = ~new & (np.arange(rows) < len(part))[:, None]
    return Batch(number, read[:, :-1], read[:, 1:], starts[:, None] + 1 + place, new, seen)


def cut(chunks: Sequence[range], rows: int) -> list[list[range]]:
    """Each chunk's windows, `rows` at once."""
    return [[chunk[first : first + rows] for first in range(0, len(chunk), rows)] for chunk in chunks]


def share(count: int, rank: int, world: int) -> range:
    """Which of `count` things in a row are those of one of `world` ranks."""
    return range(count * rank // world, count * (rank + 1) // world)
