"""Batches of line pairs: exactly resumable, in an order independent of the number of ranks.

All ranks derive the same global order of samples. A step uses the next `rows` samples and divides them into passes.
Within a pass, rank r gets the samples at indices k with k % world == r. Every step therefore trains on the same
samples for any number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from specc.runtime.data.errors import DataError
from specc.runtime.data.lines.pairs import Ints, Pairs, lengths, placed
from specc.runtime.data.lines.task import LineStream
from specc.runtime.data.tokenizers.characters import CharTokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_STATE_VERSION = 1


class SampleBatch(Protocol):
    """The samples of a step, in order, on all ranks."""

    @property
    def lengths(self) -> tuple[Ints, Ints]:
        """Number of tokens of each source and of each target, without pads, i64 [N] each."""
        ...

    def rows(self, rows: slice, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the sources and targets of the given rows, i64 [n, width] on `device`."""
        ...


class Samples(Protocol):
    """An endless sequence of samples. `digest` is a SHA-256 (hex) of everything that determines it."""

    @property
    def digest(self) -> str: ...

    def take(self, position: int, count: int) -> tuple[SampleBatch, int]:
        """Returns `count` samples from a position on, and the position after them. The sequence begins at 0."""
        ...


class FixedSet:
    """A set of N pairs in a new order for each epoch. Position k is sample k % N of epoch k // N.

    All tokens are stored on `device`. The order of an epoch is the argsort of SHAKE-256("specc pairs {seed} {epoch}")
    as N little-endian u64. Raises DataError if there are no pairs.
    """

    def __init__(self, pairs: Pairs, seed: int, device: torch.device) -> None:
        import torch

        if not len(pairs):
            raise DataError("there is no line to train on")
        self.digest = hashlib.sha256(f"{seed} {pairs.digest}".encode()).hexdigest()
        self.lengths = lengths(pairs.source), lengths(pairs.target)
        self.source, self.target = (torch.from_numpy(side).to(device) for side in (pairs.source, pairs.target))
        self._seed = seed
        self._order: tuple[int, Ints] = (-1, np.zeros(0, np.int64))

    def take(self, position: int, count: int) -> tuple[_SetBatch, int]:
        size, parts, end = len(self.lengths[0]), [], position + count
        while position < end:
            epoch, first = divmod(position, size)
            part = self._epoch(epoch)[first : first + end - position]
            parts.append(part)
            position += len(part)
        return _SetBatch(self, np.concatenate(parts)), end

    def _epoch(self, epoch: int) -> Ints:
        if self._order[0] != epoch:
            size = len(self.lengths[0])
            words = hashlib.shake_256(f"specc pairs {self._seed} {epoch}".encode()).digest(8 * size)
            self._order = epoch, np.argsort(np.frombuffer(words, "<u8"), kind="stable")
        return self._order[1]


@dataclass(frozen=True, slots=True)
class _SetBatch:
    samples: FixedSet
    order: Ints

    @property
    def lengths(self) -> tuple[Ints, Ints]:
        source, target = self.samples.lengths
        return source[self.order], target[self.order]

    def rows(self, rows: slice, device: torch.device) -> tuple[Tensor, Tensor]:
        index = placed(self.order[rows], device)
        return self.samples.source[index].long(), self.samples.target[index].long()


class FreshSamples:
    """Samples from the endless stream of a task. Positions are positions in that stream."""

    def __init__(self, stream: LineStream, tokenizer: CharTokenizer, width: int) -> None:
        self._stream, self._tokenizer, self._width = stream, tokenizer, width
        self.digest = hashlib.sha256(f"fresh {stream.identity} {tokenizer.chars}".encode()).hexdigest()

    def take(self, position: int, count: int) -> tuple[_DrawnBatch, int]:
        lines, position = self._stream.take(position, count)
        return _DrawnBatch(Pairs.of(lines, self._tokenizer, self._width)), position


@dataclass(frozen=True, slots=True)
class _DrawnBatch:
    pairs: Pairs

    @property
    def lengths(self) -> tuple[Ints, Ints]:
        return lengths(self.pairs.source), lengths(self.pairs.target)

    def rows(self, rows: slice, device: torch.device) -> tuple[Tensor, Tensor]:
        picked = self.pairs[rows]
        return placed(picked.source, device).long(), placed(picked.target, device).long()


class PairLoader:
    """An endless loader of batches, whose background thread prepares the next step.

    It is not thread-safe. Close it, or use it as a context manager. Raises ValueError if a number is out of range.

    Args:
        samples: the sequence of samples.
        batch: number of rows per pass on this rank.
        passes: number of passes per step. Each call of `next` returns a pass.
        device: device of the batches.
        rank, world: index of this process, and number of processes (see the module).
    """

    def __init__(
        self, samples: Samples, batch: int, passes: int, device: torch.device, rank: int = 0, world: int = 1
    ) -> None:
        if batch < 1 or passes < 1 or not 0 <= rank < world:
            raise ValueError(f"{batch=} and {passes=} must be positive, and 0 <= {rank=} < {world=}")
        self._samples, self._batch, self._passes = samples, batch, passes
        self._rank, self._world, self._device = rank, world, device
        self._position = self.samples = self.tokens = 0
        self._taken = passes  # passes of the current step that were returned
        self._pool: ThreadPoolExecutor | None = None
        self._prefetched: Future[tuple[SampleBatch, int]] | None = None

    @property
    def rows(self) -> int:
        """The number of samples per step, over all ranks."""
        return self._batch * self._passes * self._world

    def next(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the next pass: source and target, i64 [batch, width], and its weight, f32 [].

        The loss of a step is the mean over its target tokens without pads. It equals the mean over all passes of all
        ranks of the pass's mean loss times its weight. `samples` and `tokens` (of sources and targets, without pads)
        count the data of all ranks in whole steps.
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
        """Returns the indices, within a step, of this rank's samples in pass `part`."""
        start = part * self._batch * self._world
        return slice(start + self._rank, start + self._batch * self._world, self._world)

    def _begin(self) -> None:
        """Starts the next step, and starts to prepare the step after it in the background thread."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "specc-pairs")
        prefetched = self._prefetched or self._pool.submit(self._samples.take, self._position, self.rows)
        self._prefetched = None
        self._step, self._position = prefetched.result()
        self._prefetched = self._pool.submit(self._samples.take, self._position, self.rows)
        sources, self._counts = self._step.lengths
        self._taken = 0
        self.samples += self.rows
        self.tokens += int(sources.sum() + self._counts.sum())

    def state(self) -> dict[str, int]:
        """Returns the caller's position between two steps, for any `batch`, `passes`, `rank` and `world`."""
        place = {"position": self._position, "samples": self.samples, "tokens": self.tokens}
        return {**self._identity(), **place}

    def restore(self, state: Mapping[str, int]) -> None:
        """Resumes exactly after the last step before `state` was taken.

        Raises:
            DataError: the state belongs to other data, or is incomplete.
        """
        if any(state.get(name) != value for name, value in self._identity().items()):
            raise DataError(
                "the saved position in the data does not fit: the data differ",
                "resume with the data, vocabulary and seed of the run, or start a new run",
            )
        values = [state.get(name, -1) for name in ("position", "samples", "tokens")]
        if not all(isinstance(value, int) and value >= 0 for value in values):
            raise DataError(f"the saved position in the data is not one: {dict(state)}")
        self.close()
        self._position, self.samples, self.tokens = values
        self._taken = self._passes

    def _identity(self) -> dict[str, int]:
        return {"version": _STATE_VERSION, "pairs": int(self._samples.digest[:12], 16)}  # 48 bits: exact in any JSON

    def close(self) -> None:
        """Stops the background thread. The position is unchanged, and `next` starts the thread again."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = self._prefetched = None

    def __enter__(self) -> PairLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
