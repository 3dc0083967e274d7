"""Sets of lines of the polynomial task: what is trained on, what is scored, and how much of one is in another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specc.runtime.data.documents.formats import READ_ERRORS, open_file
from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.lines.polynomial import BLOCK, Ints, Lines, draw, joined
from specc.runtime.data.tokenizers.characters import lines_of

MOST_HELD_OUT = 100_000  # lines of each split; fresh samples avoid this many
MOST_DRAWN = 1 << 25  # lines, to find those; structure-disjoint, beside five million of training, takes two fifths


@dataclass(frozen=True, slots=True)
class Split:
    """How held-out lines are chosen from a stream of their own, in the order in which they are drawn.

    `apart` gives the number of a line that no line of the training set may share; then each line is taken once.
    None takes all as they come, repeats too: the law of the training set.
    """

    name: str
    apart: Callable[[Lines], Ints] | None


SPLITS: Mapping[str, Split] = {
    split.name: split
    for split in (
        Split("same-law", None),
        Split("duplicate-free", lambda lines: lines.keys),
        Split("structure-disjoint", lambda lines: lines.structures),
    )
}


def training_set(seed: int, count: int) -> Lines:
    """A fixed set: the first lines of the stream "train", repeats and all."""
    return draw("train", seed, 0, count)


def held_out(split: str, seed: int, count: int, training: Lines) -> Lines:
    """The first `count` lines of a split; the set of a smaller count is a part of it.

    same-law: as drawn, about 35 % of them are in a training set of 800,000.
    duplicate-free: distinct lines, none in `training`.
    structure-disjoint: distinct lines, whose coefficients are in no line of `training`, in whatever variable.

    Raises DataError for a split that there is not, a count above MOST_HELD_OUT, or a training set that leaves too few
    lines apart from it.
    """
    if split not in SPLITS:
        raise DataError(f"there is no split {split!r}", f"there are {', '.join(SPLITS)}")
    if not 1 <= count <= MOST_HELD_OUT:
        raise DataError(f"cannot hold out {count:,} lines", f"a split has up to {MOST_HELD_OUT:,}")
    apart = SPLITS[split].apart
    if apart is None:
        return draw(split, seed, 0, count)
    known = np.unique(apart(training))
    parts: list[Lines] = []
    seen = np.zeros(0, np.int64)
    start = 0
    while len(seen) < count:
        if start >= MOST_DRAWN:
            raise DataError(
                f"{split}: beside {len(training):,} lines to train on, {start:,} drawn ones have {len(seen):,} apart, "
                f"not {count:,}",
                "train on fewer lines (train.data.lines)",
            )
        drawn = draw(split, seed, start, BLOCK)
        start += BLOCK
        fitting = drawn[~_in(apart(drawn), known)]
        fitting = fitting[np.sort(np.unique(fitting.keys, return_index=True)[1])]
        fitting = fitting[~_in(fitting.keys, seen)]
        parts.append(fitting)
        seen = np.sort(np.concatenate((seen, fitting.keys)))
    return joined(parts)[:count]


class Fresh:
    """The stream "train" without end, and without what the splits apart from it hold, so that they stay unseen.

    Lines are left out where they equal one of the first MOST_HELD_OUT of duplicate-free, or have the coefficients of
    one of structure-disjoint; both as they are beside a training set of the stream's first `count` lines, which
    themselves stay. After those about one line in ten is left out; the rest are the law's.
    """

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count
        training = training_set(seed, count)
        self._held = [
            (split.apart, np.unique(split.apart(held_out(split.name, seed, MOST_HELD_OUT, training))))
            for split in SPLITS.values()
            if split.apart is not None
        ]

    def take(self, position: int, count: int) -> tuple[Lines, int]:
        """The next `count` lines from a position in the stream on, and the position after the last of them."""
        parts: list[Lines] = []
        left = count
        while left > 0:
            drawn = draw("train", self.seed, position, max(left + left // 4, 256))
            kept = np.flatnonzero(~self._is_held(drawn))[:left]
            parts.append(drawn[kept])
            left -= len(kept)
            position += len(drawn) if left else int(kept[-1]) + 1
        return joined(parts), position

    def _is_held(self, lines: Lines) -> npt.NDArray[np.bool_]:
        held = np.zeros(len(lines), np.bool_)
        for apart, known in self._held:
            held |= _in(apart(lines), known)
        return held


@dataclass(frozen=True, slots=True)
class Overlap:
    """The shares of a set's lines that are in another set: as they stand, and by their coefficients alone."""

    lines: float
    structures: float

    def __str__(self) -> str:
        lines, structures = 100 * self.lines, 100 * self.structures
        return f"{lines:.1f} % of the lines are in the training set, {structures:.1f} % by coefficients"


def overlap(lines: Lines, training: Lines) -> Overlap:
    """How much of `lines` was to be seen in `training`."""
    lines_in, structures_in = (
        float(_in(ours, np.unique(theirs)).mean())
        for ours, theirs in ((lines.keys, training.keys), (lines.structures, training.structures))
    )
    return Overlap(lines_in, structures_in)


def read_lines(path: Path) -> tuple[list[str], list[str]]:
    """Both sides of every line `factors=expansion` of a file, which may be compressed (.xz, .gz).

    Raises DataError where there is no such file, or a line has not one `=` with text on both sides;
    DataIntegrityError where it is damaged.
    """
    try:
        with open_file(path) as file:
            texts = lines_of(file.read().decode("utf-8-sig"))
    except READ_ERRORS as error:
        raise DataIntegrityError(f"{path}: damaged compressed file: {error}", "copy the file again") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}", "name a file of lines, or `polynomial`") from None
    sides: tuple[list[str], list[str]] = ([], [])
    for number, text in enumerate(texts, 1):
        left, _, right = text.partition("=")
        if not left or not right or "=" in right:
            raise DataError(f"{path}:{number}: expected factors=expansion, found {text!r}")
        sides[0].append(left)
        sides[1].append(right)
    if not texts:
        raise DataError(f"{path}: has no lines")
    return sides


def _in(some: Ints, ordered: Ints) -> npt.NDArray[np.bool_]:
    """Which of `some` are in `ordered`, distinct or not, but sorted."""
    if not len(ordered):
        return np.zeros(len(some), np.bool_)
    places = np.minimum(np.searchsorted(ordered, some), len(ordered) - 1)
    found: npt.NDArray[np.bool_] = ordered[places] == some
    return found
