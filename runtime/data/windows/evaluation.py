"""Windows that score a stream of tokens: the targets that each scores, and the batches that they form."""

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
class WindowPlan:
    """The windows of an evaluation.

    Attributes:
        length: tokens of a window.
        batch: windows that are scored at once.
        stride: tokens from one window to the next, 1 to `length`; None for `length`, windows that do not overlap. A
            smaller one gives each target at least length - stride tokens of context (sliding evaluation).
    """

    length: int
    batch: int
    stride: int | None = None

    def __post_init__(self) -> None:
        if self.length < 1 or self.batch < 1 or not 1 <= self.step <= self.length:
            raise ValueError(f"{self.length=} and {self.batch=} must be positive, and {self.stride=} 1 .. length")

    @property
    def step(self) -> int:
        """Tokens from one window to the next."""
        return self.length if self.stride is None else self.stride


@dataclass(frozen=True, slots=True)
class Window:
    """Inputs [start, start + length) of the stream; of the targets, which are one token later, the last `new` are
    scored."""

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
        """The number of targets that the windows before `k` score, which is the position of the last of them."""
        return min(self.last, self.length + (k - 1) * self.stride) if k else 0

    def chunks(self, tokens: int | None) -> list[range]:
        """The windows in runs of about `tokens` targets: each run ends with the first window that reaches a multiple of
        `tokens`. One run for None."""
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
        number: index of this batch among all.
        ids, targets: i64 [B, T]. Rows behind the last window are copies of it, and do not count.
        at: i64 [B, T], the position in the stream of each target.
        new: bool [B, T], the targets that this batch scores.
        seen: bool [B, T], the targets that earlier windows have scored.
    """

    number: int
    ids: Ids
    targets: Ids
    at: Ids
    new: Mask
    seen: Mask


def read_batch(stream: TokenStream, windows: Windows, number: int, chosen: range, rows: int) -> Batch:
    """The windows `chosen`, filled up to `rows` rows with copies of the last."""
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
    """The windows of each chunk in batches of at most `rows`."""
    return [[chunk[first : first + rows] for first in range(0, len(chunk), rows)] for chunk in chunks]
