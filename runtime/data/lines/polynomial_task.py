"""The polynomial task: its training set, its held-out splits, and the overlap between sets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from specc.compiler.spec.data.polynomial import PolynomialData
from specc.runtime.data.errors import DataError
from specc.runtime.data.lines.polynomial import BLOCK, Ints, Lines, draw, joined, parse
from specc.runtime.data.lines.task import Overlap, Task

MOST_HELD_OUT = 100_000  # the maximum size of a split; training excludes this many lines of each split
MOST_DRAWN = (
    1 << 25
)  # the maximum number of lines to sample for a split; structure-disjoint needs 40 % of it for 5 million training lines


@dataclass(frozen=True, slots=True)
class Split:
    """A held-out split. It has its own stream of lines, and a rule that selects lines from this stream.

    `apart` is a function that returns an integer for each line. The split excludes a line if a training line, or an
    earlier line of the split, has the same integer. If `apart` is None, the split excludes no line, and has the
    distribution of the training set.
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
    return draw("train", seed, 0, count)


def held_out(split: str, seed: int, count: int, training: Lines) -> Lines:
    """Returns the first `count` lines of a held-out split.

    Splits:
        same-law: all lines of a separate stream. About 35 % of these lines also occur in a training set of 800,000
            lines.
        duplicate-free: distinct lines that are not in `training`.
        structure-disjoint: distinct lines whose coefficients differ from the coefficients of all lines of `training`.

    Args:
        split: the name of the split.
        seed: the seed of the task.
        count: the number of lines, 1 to MOST_HELD_OUT.
        training: the training set.

    Returns:
        The `count` lines of the split.

    Raises:
        DataError: if the split does not exist, `count` is out of range, or `training` has too many of the possible
            lines.
    """
    if split not in SPLITS:
        raise DataError(f"unknown split {split!r}", f"use one of {', '.join(SPLITS)}")
    if not 1 <= count <= MOST_HELD_OUT:
        raise DataError(f"cannot hold out {count:,} lines", f"a split has 1 to {MOST_HELD_OUT:,} lines")
    apart = SPLITS[split].apart
    if apart is None:
        return draw(split, seed, 0, count)
    known = np.unique(apart(training))
    parts: list[Lines] = []
    seen = np.zeros(0, np.int64)
    start = 0
    while len(seen) < count:
        if start >= MOST_DRAWN:
            left = f"only {len(seen):,} are disjoint from the {len(training):,} training lines; {count:,} are needed"
            message = f"{split}: of {start:,} sampled lines, {left}"
            raise DataError(message, "train on fewer lines (train.data.lines)")
        drawn = draw(split, seed, start, BLOCK)
        start += BLOCK
        fitting = drawn[~_in(apart(drawn), known)]
        fitting = fitting[np.sort(np.unique(fitting.keys, return_index=True)[1])]
        fitting = fitting[~_in(fitting.keys, seen)]
        parts.append(fitting)
        seen = np.sort(np.concatenate((seen, fitting.keys)))
    return joined(parts)[:count]


class Fresh:
    """The endless stream of training lines, without the lines that are reserved for the held-out splits.

    The reserved lines are of two kinds: the first MOST_HELD_OUT lines of the split duplicate-free, and all lines that
    have the coefficients of one of the first MOST_HELD_OUT lines of the split structure-disjoint. The training set is
    the first `count` lines of the stream. Both splits exclude the training set, so that no line of the training set is
    reserved. About 1 in 10 of the later lines is reserved.
    """

    def __init__(self, seed: int, count: int) -> None:
        self.identity = f"{seed} {count}"
        self._seed = seed
        training = training_set(seed, count)
        self._held_out = [
            (split.apart, np.unique(split.apart(held_out(split.name, seed, MOST_HELD_OUT, training))))
            for split in SPLITS.values()
            if split.apart is not None
        ]

    def take(self, position: int, count: int) -> tuple[Lines, int]:
        parts: list[Lines] = []
        left = count
        while left > 0:
            drawn = draw("train", self._seed, position, max(left + left // 4, 256))
            allowed = np.flatnonzero(~self._is_held_out(drawn))[:left]
            parts.append(drawn[allowed])
            left -= len(allowed)
            position += len(drawn) if left else int(allowed[-1]) + 1
        return joined(parts), position

    def _is_held_out(self, lines: Lines) -> npt.NDArray[np.bool_]:
        held_out = np.zeros(len(lines), np.bool_)
        for apart, known in self._held_out:
            held_out |= _in(apart(lines), known)
        return held_out


def overlap(lines: Lines, training: Lines) -> Overlap:
    """Returns two fractions of `lines`: the lines that equal a line of `training`, and the lines that have the
    coefficients of a line of `training`.
    """
    sides = ((lines.keys, training.keys), (lines.structures, training.structures))
    lines_in, structures_in = (float(_in(ours, np.unique(theirs)).mean()) for ours, theirs in sides)
    return Overlap(lines_in, structures_in, "coefficients")


def _in(some: Ints, ordered: Ints) -> npt.NDArray[np.bool_]:
    if not len(ordered):
        return np.zeros(len(some), np.bool_)
    places = np.minimum(np.searchsorted(ordered, some), len(ordered) - 1)
    present: npt.NDArray[np.bool_] = ordered[places] == some
    return present


class PolynomialTask(Task[Lines]):
    """The task of expanding products of two linear forms."""

    name: ClassVar[str] = "polynomial"
    splits: ClassVar[Sequence[str]] = tuple(SPLITS)

    def __init__(self, settings: PolynomialData) -> None:
        self._settings = settings

    @cached_property
    def training(self) -> Lines:
        return self.first(self._settings.lines)

    @property
    def fresh(self) -> bool:
        return self._settings.fresh

    def stream(self) -> Fresh:
        return Fresh(self._settings.seed, self._settings.lines)

    def first(self, count: int) -> Lines:
        return training_set(self._settings.seed, count)

    def held_out(self, split: str, count: int) -> Lines:
        return held_out(split, self._settings.seed, count, self.training)

    def parse(self, sources: Sequence[str]) -> Lines:
        return parse(sources)

    def overlap(self, lines: Lines) -> Overlap:
        return overlap(lines, self.training)
