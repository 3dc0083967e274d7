"""Loads batches of line pairs.

After a resume, a run receives the batches that an uninterrupted run would receive. The order of samples does not depend
on the number of ranks.

All ranks derive the same global order of samples. A training step takes the next samples of this order, and divides
them into passes (micro-batches). Rank r receives the samples of a pass whose index k in the pass satisfies k % world ==
r. If the number of samples per step is fixed, every step trains on the same samples for any number of ranks.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specc.runtime.data.background import BackgroundReader, saved_position
from specc.runtime.data.errors import DataError
from specc.runtime.data.lines.pairs import Ints, Pairs, lengths, placed
from specc.runtime.data.lines.task import LineStream
from specc.runtime.data.tokenizers.characters import CharTokenizer

_STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """The samples of one training step on all ranks, in order.

    Attributes:
        lengths: the number of tokens of each source and of each target, without padding, i64 [N] each.
        rows: a function that maps a slice of the samples and a device to the sources and targets of the samples in the
            slice, i64 [n, width] each.
    """

    lengths: tuple[Ints, Ints]
    rows: Callable[[slice, torch.device], tuple[Tensor, Tensor]]


class Samples(Protocol):
    """An endless sequence of samples. `digest` is a SHA-256 (hex) that identifies the sequence."""

    @property
    def digest(self) -> str: ...

    def take(self, position: int, count: int) -> tuple[SampleBatch, int]:
        """Returns the next `count` samples from `position`, and the position after these samples."""


class FixedSet:
    """A sequence of samples that repeats a set of N pairs endlessly. Each epoch has a new order. Position k is the
    sample with the index k % N in the order of epoch k // N.

    All tokens are stored on `device`. The order of an epoch is the argsort of N little-endian u64. The u64 are the
    output of SHAKE-256("specc pairs {seed} {epoch}"). Raises DataError if there are no pairs.
    """

    def __init__(self, pairs: Pairs, seed: int, device: torch.device) -> None:
        if not len(pairs):
            raise DataError("there are no lines to train on")
        self.digest = hashlib.sha256(f"{seed} {pairs.digest}".encode()).hexdigest()
        self._lengths = lengths(pairs.source), lengths(pairs.target)
        self._source, self._target = (torch.from_numpy(side).to(device) for side in (pairs.source, pairs.target))
        self._seed, self._size = seed, len(pairs)
        self._order: tuple[int, Ints] = (-1, np.zeros(0, np.int64))

    def take(self, position: int, count: int) -> tuple[SampleBatch, int]:
        parts, end = [], position + count
        while position < end:
            epoch, first = divmod(position, self._size)
            parts.append(self._epoch(epoch)[first : first + end - position])
            position += len(parts[-1])
        order = np.concatenate(parts)

        def rows(rows: slice, device: torch.device) -> tuple[Tensor, Tensor]:
            index = placed(order[rows], device)
            return self._source[index].long(), self._target[index].long()

        return SampleBatch((self._lengths[0][order], self._lengths[1][order]), rows), end

    def _epoch(self, epoch: int) -> Ints:
        if self._order[0] != epoch:
            words = hashlib.shake_256(f"specc pairs {self._seed} {epoch}".encode()).digest(8 * self._size)
            self._order = epoch, np.argsort(np.frombuffer(words, "<u8"), kind="stable")
        return self._order[1]


class FreshSamples:
    """A sequence of samples from the endless line stream of a task. Positions count the lines of the stream."""

    def __init__(self, stream: LineStream, tokenizer: CharTokenizer, width: int) -> None:
        self._stream, self._tokenizer, self._width = stream, tokenizer, width
        self.digest = hashlib.sha256(f"fresh {stream.identity} {tokenizer.chars}".encode()).hexdigest()

    def take(self, position: int, count: int) -> tuple[SampleBatch, int]:
        lines, position = self._stream.take(position, count)
        pairs = Pairs.of(lines, self._tokenizer, self._width)

        def rows(rows: slice, device: torch.device) -> tuple[Tensor, Tensor]:
            return placed(pairs.source[rows], device).long(), placed(pairs.target[rows], device).long()

        return SampleBatch((lengths(pairs.source), lengths(pairs.target)), rows), position


class PairLoader(BackgroundReader[tuple[SampleBatch, int]]):
    """An endless loader of batches of line pairs. A background thread prepares the data of the next training step.

    A loader is not thread-safe. Close it after use, or use it as a context manager. Raises ValueError if `batch` or
    `passes` is less than 1, or if `rank` is not from 0 to `world` - 1.

    Args:
        samples: the sequence of samples.
        batch: the number of rows per pass on this rank.
        passes: the number of passes per step. Each call of `next` returns the data of one pass.
        device: the device of the batches.
        rank, world: the index of this process, and the number of processes.
    """

    def __init__(
        self, samples: Samples, batch: int, passes: int, device: torch.device, rank: int = 0, world: int = 1
    ) -> None:
        if batch < 1 or passes < 1 or not 0 <= rank < world:
            given = f"{batch=}, {passes=}, {rank=}, {world=}"
            raise ValueError(f"batch and passes must be at least 1, and rank from 0 to world - 1; got {given}")
        super().__init__(1)
        self._samples, self._batch, self._passes = samples, batch, passes
        self._rank, self._world, self._device = rank, world, device
        self._position = self.samples = self.tokens = 0
        self._taken = passes  # the number of passes of the current step that `next` has returned

    def items(self) -> Iterator[tuple[SampleBatch, int]]:
        return _steps(self._samples, self._position, self.rows)

    @property
    def rows(self) -> int:
        return self._batch * self._passes * self._world

    def next(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the data of the next pass: the sources and the targets, i64 [batch, width] each, and the weight of
        the pass, f32 [].

        The loss of a step is the mean over all target tokens of the step, without padding. To compute this loss,
        multiply the mean loss of each pass by the weight of the pass. Then average the products over all passes of all
        ranks. The attributes `samples` and `tokens` count the samples and tokens that all ranks have received.
        """
        if self._taken == self._passes:
            self._begin()
        rows = self.local_rows(self._taken)
        self._taken += 1
        share = self._counts[rows].sum() * self._passes * self._world / self._counts.sum()
        weight = placed(np.array(share, np.float32), self._device)
        source, target = self._step.rows(rows, self._device)
        return source, target, weight

    def local_rows(self, part: int) -> slice:
        start = part * self._batch * self._world
        return slice(start + self._rank, start + self._batch * self._world, self._world)

    def _begin(self) -> None:
        self._step, self._position = self.take()
        sources, self._counts = self._step.lengths
        self._taken = 0
        self.samples += self.rows
        self.tokens += int(sources.sum() + self._counts.sum())

    def state(self) -> dict[str, int]:
        """Returns the position after the last complete step. A loader with a different `batch`, `passes`, `rank` or
        `world` can resume from this position.
        """
        place = {"position": self._position, "samples": self.samples, "tokens": self.tokens}
        return {**self._identity(), **place}

    def restore(self, state: Mapping[str, int]) -> None:
        """Moves the loader to the position in `state`, which is after the last complete step.

        Raises:
            DataError: if `state` was saved by a loader of other data, or is incomplete.
        """
        hint = "resume with the data, vocabulary and seed of the run, or start a new run"
        values = saved_position(state, self._identity(), ("position", "samples", "tokens"), hint)
        self.close()
        self._position, self.samples, self.tokens = values
        self._taken = self._passes

    def _identity(self) -> dict[str, int]:
        # the first 48 bits, because every JSON reader represents such an integer exactly
        return {"version": _STATE_VERSION, "pairs": int(self._samples.digest[:12], 16)}


def _steps(samples: Samples, position: int, rows: int) -> Iterator[tuple[SampleBatch, int]]:
    while True:
        step, position = samples.take(position, rows)
        yield step, position
