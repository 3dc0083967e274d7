"""Pairs of lines as tokens, and batches of them: the same order for any number of ranks, exactly resumable.

All ranks derive one global order of samples. A step takes the next `rows` of them, cut into passes; of a pass's rows
the k-th goes to rank k % world, so every step trains on the same samples for any number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from specc.runtime.data.errors import DataError, LineError
from specc.runtime.data.lines.polynomial import Lines
from specc.runtime.data.lines.polynomial_sets import Fresh, read_lines
from specc.runtime.data.tokenizers.characters import PAD, CharTokenizer, Tokens

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Ints = npt.NDArray[np.int64]
_STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Pairs:
    """N pairs as tokens, u8 [N, width] each: characters, stop, pad."""

    source: Tokens
    target: Tokens

    @classmethod
    def of(cls, lines: Lines, tokenizer: CharTokenizer, width: int) -> Pairs:
        """Raises DataError where a line does not fit."""
        return cls(tokenizer.encode_codes(lines.factors(), width), tokenizer.encode_codes(lines.expansions(), width))

    @classmethod
    def read(cls, path: Path, tokenizer: CharTokenizer, width: int) -> tuple[Pairs, list[str], list[str]]:
        """Those of a file of lines, with both sides of them as text. Raises as `read_lines` does, and LineError, naming
        file and line, where one does not fit."""
        sides = read_lines(path)
        try:
            source, target = (tokenizer.encode_rows(side, width) for side in sides)
        except LineError as error:
            raise LineError(error.row, f"{path}:{error.row + 1}: {error.message}", error.hint) from error
        return cls(source, target), *sides

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, which: slice | Ints) -> Pairs:
        return Pairs(self.source[which], self.target[which])

    def within(self, tokens: int | None) -> Pairs:
        """The first pairs whose targets have so many tokens in all, stops included; at least one, all for None."""
        if tokens is None:
            return self
        count = int(np.searchsorted(lengths(self.target).cumsum(), tokens, side="right"))
        return self[: max(count, 1)]

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the tokens."""
        found = hashlib.sha256(np.ascontiguousarray(self.source).data)
        found.update(np.ascontiguousarray(self.target).data)
        return found.hexdigest()


def lengths(tokens: Tokens) -> Ints:
    """Tokens of each row that are no pad."""
    found: Ints = (tokens != PAD).sum(axis=1, dtype=np.int64)
    return found


class Chosen(Protocol):
    """Samples in order; those of a rank are picked from it."""

    @property
    def lengths(self) -> tuple[Ints, Ints]:
        """Tokens of each source and of each target."""
        ...

    def rows(self, which: slice, device: torch.device) -> tuple[Tensor, Tensor]:
        """Sources and targets, i64 [n, width] on `device`."""
        ...


class Samples(Protocol):
    """An endless order of samples. `digest` is of all that decides it, 64 hex digits."""

    @property
    def digest(self) -> str: ...

    def take(self, position: int, count: int) -> tuple[Chosen, int]:
        """The next `count` samples from a position on, and the position after them; the first is at 0."""
        ...


class FixedSet:
    """A set of pairs in a new order each epoch, from `seed`; position k is sample k % N of epoch k // N.

    The tokens lie on `device`, whole. The order of an epoch sorts SHAKE-256("specc pairs {seed} {epoch}"), read as N
    little-endian u64.
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

    def take(self, position: int, count: int) -> tuple[_OfSet, int]:
        size, parts, end = len(self.lengths[0]), [], position + count
        while position < end:
            epoch, first = divmod(position, size)
            part = self._epoch(epoch)[first : first + end - position]
            parts.append(part)
            position += len(part)
        return _OfSet(self, np.concatenate(parts)), end

    def _epoch(self, epoch: int) -> Ints:
        if self._order[0] != epoch:
            size = len(self.lengths[0])
            words = hashlib.shake_256(f"specc pairs {self._seed} {epoch}".encode()).digest(8 * size)
            self._order = epoch, np.argsort(np.frombuffer(words, "<u8"), kind="stable")
        return self._order[1]


@dataclass(frozen=True, slots=True)
class _OfSet:
    held: FixedSet
    order: Ints

    @property
    def lengths(self) -> tuple[Ints, Ints]:
        source, target = self.held.lengths
        return source[self.order], target[self.order]

    def rows(self, which: slice, device: torch.device) -> tuple[Tensor, Tensor]:
        index = placed(self.order[which], device)
        return self.held.source[index].long(), self.held.target[index].long()


class FreshSamples:
    """Lines that are drawn as they are needed, none twice but by chance; a position is one of the stream."""

    def __init__(self, fresh: Fresh, tokenizer: CharTokenizer, width: int) -> None:
        self._fresh, self._tokenizer, self._width = fresh, tokenizer, width
        self.digest = hashlib.sha256(f"fresh {fresh.seed} {fresh.count} {tokenizer.chars}".encode()).hexdigest()

    def take(self, position: int, count: int) -> tuple[_Drawn, int]:
        lines, position = self._fresh.take(position, count)
        return _Drawn(Pairs.of(lines, self._tokenizer, self._width)), position


@dataclass(frozen=True, slots=True)
class _Drawn:
    pairs: Pairs

    @property
    def lengths(self) -> tuple[Ints, Ints]:
        return lengths(self.pairs.source), lengths(self.pairs.target)

    def rows(self, which: slice, device: torch.device) -> tuple[Tensor, Tensor]:
        picked = self.pairs[which]
        return placed(picked.source, device).long(), placed(picked.target, device).long()


def placed(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor on `device`, without waiting for a GPU."""
    import torch

    tensor = torch.from_numpy(np.asarray(array, order="C"))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class PairLoader:
    """An endless supply of batches, prepared a step ahead in a thread.

    Not thread-safe; close it, or use it as a context manager.

    Args:
        samples: what to train on.
        batch: rows of a pass on this rank.
        passes: of a step; after so many calls of `next` a step is over.
        rank, world: this process among all that share the order (see the module).
        device: where batches are wanted.
    """

    def __init__(
        self, samples: Samples, batch: int, passes: int, device: torch.device, rank: int = 0, world: int = 1
    ) -> None:
        if batch < 1 or passes < 1 or not 0 <= rank < world:
            raise ValueError(f"{batch=} and {passes=} must be positive, and 0 <= {rank=} < {world=}")
        self._samples, self._batch, self._passes = samples, batch, passes
        self._rank, self._world, self._device = rank, world, device
        self._position = self.samples = self.tokens = 0
        self._given = passes  # of the step at hand
        self._pool: ThreadPoolExecutor | None = None
        self._coming: Future[tuple[Chosen, int]] | None = None

    @property
    def rows(self) -> int:
        """Samples of a step, on all ranks."""
        return self._batch * self._passes * self._world

    def next(self) -> tuple[Tensor, Tensor, Tensor]:
        """The next pass: source and target, i64 [batch, width], and its weight, f32 [].

        A step's loss is the mean over its target tokens, pads aside: of a pass's mean, times its weight, the plain mean
        over all passes of all ranks. `samples` and `tokens` (of sources and targets, without pads) count what was
        given to all ranks, by whole steps.
        """
        if self._given == self._passes:
            self._begin()
        mine = self.mine(self._given)
        self._given += 1
        share = self._counts[mine].sum() * self._passes * self._world / self._counts.sum()
        weight = placed(np.array(share, np.float32), self._device)
        source, target = self._step.rows(mine, self._device)
        return source, target, weight

    def mine(self, part: int) -> slice:
        """Which of a step's samples are this rank's in a pass."""
        start = part * self._batch * self._world
        return slice(start + self._rank, start + self._batch * self._world, self._world)

    def _begin(self) -> None:
        """Turns to the next step, and has the one after it prepared."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "specc-pairs")
        coming = self._coming or self._pool.submit(self._samples.take, self._position, self.rows)
        self._coming = None
        self._step, self._position = coming.result()
        self._coming = self._pool.submit(self._samples.take, self._position, self.rows)
        sources, self._counts = self._step.lengths
        self._given = 0
        self.samples += self.rows
        self.tokens += int(sources.sum() + self._counts.sum())

    def state(self) -> dict[str, int]:
        """Where the caller stands, between two steps. Holds for any `batch`, `passes`, `rank` and `world`."""
        where = {"position": self._position, "samples": self.samples, "tokens": self.tokens}
        return {**self._identity(), **where}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on exactly after the step that was the last one when `state` was taken.

        Raises:
            DataError: the state is of other data, or is incomplete.
        """
        if any(state.get(name) != value for name, value in self._identity().items()):
            raise DataError(
                "the saved position in the data does not fit: the data differ",
                "resume with the data, vocabulary and seed of the run, or start a new run",
            )
        found = [state.get(name, -1) for name in ("position", "samples", "tokens")]
        if not all(isinstance(value, int) and value >= 0 for value in found):
            raise DataError(f"the saved position in the data is not one: {dict(state)}")
        self.close()
        self._position, self.samples, self.tokens = found
        self._given = self._passes

    def _identity(self) -> dict[str, int]:
        return {"version": _STATE_VERSION, "pairs": int(self._samples.digest[:12], 16)}  # 48 bits: exact in any JSON

    def close(self) -> None:
        """Stop the thread. The position stays; `next` would start it again."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = self._coming = None

    def __enter__(self) -> PairLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
