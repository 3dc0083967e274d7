"""Divides a token stream into evaluation windows, and reads batches of windows.

A plan determines the targets that each window scores.
"""

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
    """The settings of the windows of an evaluation.

    Raises ValueError if a value is out of range.

    Attributes:
        length: the length of a window in tokens.
        batch: the number of windows per batch.
        stride: the distance between the starts of adjacent windows, 1 to `length` tokens. None selects `length`, and
            windows do not overlap. With a smaller stride, each target after the first window has at least `length -
            stride` tokens of context.
        unscored: the number of targets at the start of each window that are not scored.
    """

    length: int
    batch: int
    stride: int | None = None
    unscored: int = 0

    def __post_init__(self) -> None:
        if self.length < 1 or self.batch < 1 or not 1 <= self.step <= self.length:
            raise ValueError(f"{self.length=} and {self.batch=} must be positive, and {self.stride=} 1 .. length")

    @property
    def step(self) -> int:
        return self.length if self.stride is None else self.stride


@dataclass(frozen=True, slots=True)
class Window:
    """A window of a token stream. The inputs are the `length` tokens from position `start` on. The target of each input
    is the next token.

    Only the last `new` targets of the window are scored.
    """

    start: int
    length: int
    new: int


@dataclass(frozen=True, slots=True)
class Windows:
    """A sequence of windows over a token stream. The windows score each target at the positions 1 .. `last` exactly
    once.

    The first window scores all its targets. Each later window scores its last `stride` targets. The final window is
    shifted left to have full length, and scores only the remaining targets. If `last` is less than `length`, there is a
    single shorter window.
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
        return min(self.last, self.length + (k - 1) * self.stride) if k else 0

    def chunks(self, tokens: int | None) -> list[range]:
        """Divides the windows into consecutive ranges. Each range scores about `tokens` targets. If `tokens` is None,
        there is a single range.

        A range ends with the window at which the total number of scored targets reaches a multiple of `tokens`.
        """
        if tokens is None:
            return [range(len(self))]
        reached = np.minimum(self.length + np.arange(len(self) - 1) * self.stride, self.last)
        firsts = 1 + np.flatnonzero(np.diff(np.concatenate(([0], reached)) // tokens))
        bounds = [0, *firsts.tolist(), len(self)]
        return [range(first, end) for first, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A batch of windows of equal length.

    Attributes:
        number: the index of the batch.
        ids, targets: the inputs, and the next token after each input, i64 [B, T]. If there are fewer than B windows,
            copies of the last window fill the batch. The copies are not scored.
        at: the position of each target in the stream, i64 [B, T].
        new: the targets that this batch scores, bool [B, T].
        seen: the targets that earlier windows have already scored, bool [B, T].
    """

    number: int
    ids: Ids
    targets: Ids
    at: Ids
    new: Mask
    seen: Mask


def read_batch(
    stream: TokenStream, windows: Windows, number: int, chosen: range, rows: int, unscored: int = 0
) -> Batch:
    """Reads a batch of windows.

    Args:
        stream: the token stream.
        windows: all windows of the evaluation.
        number: the index of the batch.
        chosen: the indices of the windows in the batch. These windows have equal lengths.
        rows: the number of rows of the batch. If `chosen` has fewer windows, copies of the last window fill the batch.
        unscored: the number of targets at the start of each window that are not scored.

    Returns:
        The batch.
    """
    part = [windows[k] for k in chosen]
    length = part[0].length
    read = np.stack([stream.read(window.start, length + 1).astype(np.int64) for window in part])
    read = np.concatenate([read, np.repeat(read[-1:], rows - len(part), axis=0)])
    starts = np.array([window.start for window in part] + [part[-1].start] * (rows - len(part)))
    counts = np.array([window.new for window in part] + [0] * (rows - len(part)))
    place = np.arange(length)
    new = place >= np.maximum(length - counts[:, None], unscored)
    seen = (place < length - counts[:, None]) & (np.arange(rows) < len(part))[:, None]
    return Batch(number, read[:, :-1], read[:, 1:], starts[:, None] + 1 + place, new, seen)


def cut(chunks: Sequence[range], rows: int) -> list[list[range]]:
    """Divides each range of window indices into batches of at most `rows` windows."""
    return [[chunk[first : first + rows] for first in range(0, len(chunk), rows)] for chunk in chunks]
