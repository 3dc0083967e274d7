"""Loads batches of windows of a token stream in the background.

After a resume, a run receives the batches that an uninterrupted run would receive.

The stream is divided into blocks of `length` tokens. A window is a block and the token after the block. The targets are
the inputs shifted by one token. Every token of the stream except the first is therefore a target.

All ranks derive the same order of windows for each epoch. A step takes the next `batch * world` windows. Rank r
receives the windows of the step whose index k in the step satisfies k % world == r. If `batch * world` is fixed, every
step trains on the same windows for any number of ranks. Windows of the next epoch complete the last batch of an epoch.
With the order `best_fit`, a batch has rows of packed documents (see packing.py) instead of windows.

A background thread reads batches ahead. The thread makes no CUDA calls, because they could invalidate the capture of a
CUDA graph. For a GPU, each call of `Loader.next` also starts to copy the following batch, on a separate CUDA stream.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Literal

import numpy as np
import torch

from specc.runtime.data.background import BackgroundReader, saved_position
from specc.runtime.data.errors import DataError
from specc.runtime.data.shards.shard_file import Tokens
from specc.runtime.data.windows.packing import best_fit, document_starts, lengths_from, read_row
from specc.runtime.data.windows.stream import TokenStream
from specc.runtime.data.windows.transfer import Batch, Transfer, Windows

Order = Literal["sequential", "coprime_stride", "best_fit"]
ORDERS: tuple[Order, ...] = ("sequential", "coprime_stride", "best_fit")
# The version of a saved state, which determines the order of windows. Version 1 accepted every stride that is coprime
# to the number of blocks. A run resumes with the version of its saved state.
_STATE_VERSION = 2
_STATE_VERSIONS = (1, 2)
# Pairs (multiples, part) for rejecting strides. Let d be the distance between two windows of an epoch, in blocks,
# modulo the number of blocks. A stride is rejected if d is less than 1/part of the stream for two windows that are at
# most `multiples` positions apart in the order. With 19,775 blocks, the limits of d are 38 and 3 blocks. Without the
# first pair, the windows of some steps would cover only a part of the stream. Without the second pair, steps of 384
# windows would contain runs of adjacent windows.
_TOO_NEAR = ((16, 512), (192, 6000))


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The order of the windows in one epoch: a permutation of the blocks of the stream.

    Window k starts at token `phase + length * ((start + k * stride) mod blocks)`. `stride` and `blocks` are coprime.
    The windows k = 0 .. blocks - 1 therefore visit every block exactly once.
    """

    length: int
    blocks: int
    phase: int
    start: int
    stride: int

    def offset(self, k: int) -> int:
        return self.phase + self.length * ((self.start + k * self.stride) % self.blocks)


def epoch_order(
    tokens: int, length: int, order: Order, seed: int, epoch: int, version: int = _STATE_VERSION
) -> EpochOrder:
    """Returns the order of the windows in one epoch. The order depends only on the arguments, and not on the machine or
    the versions of libraries.

    The order `coprime_stride` is from parameter-golf PR 726. Each epoch has a random phase, a random start, and a
    random stride coprime to the number of blocks. The phase shifts the boundaries of all windows. Version 2 rejects
    strides that return close to an earlier block after a few steps.

    Args:
        tokens: the length of the stream in tokens.
        length: the length of a window in tokens.
        order: `sequential` or `coprime_stride`.
        seed: the seed of the run.
        epoch: the index of the epoch.
        version: the version of the order, 1 or 2.

    Returns:
        The order.
    """
    if order == "sequential":
        return EpochOrder(length, (tokens - 1) // length, 0, 0, 1)

    draw = partial(_draw, seed, epoch)
    phase = draw("phase", min(length, tokens - length))
    blocks = (tokens - 1 - phase) // length
    stride, attempt = 1, 0
    while blocks > 1:
        stride = 1 + draw(f"stride {attempt}", blocks - 1)
        if math.gcd(stride, blocks) == 1 and (version == 1 or not _comes_back(stride, blocks)):
            break
        attempt += 1
    return EpochOrder(length, blocks, phase, draw("start", blocks), stride)


def _draw(seed: int, epoch: int, what: str, bound: int) -> int:
    # SHA-256, because the streams of numpy's generators may change between versions.
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch} {what}".encode()).digest()) % bound


def _comes_back(stride: int, blocks: int) -> bool:
    for multiples, part in _TOO_NEAR:
        for k in range(1, multiples + 1 if blocks > part else 1):
            moved = k * stride % blocks
            if min(moved, blocks - moved) * part < blocks:
                return True
    return False


@dataclass(frozen=True, slots=True)
class Crop:
    """Counts of document tokens in packing. `cropped` is the number of tokens that the rows leave out, and `tokens` is
    the number of all tokens that were read.
    """

    cropped: int
    tokens: int


# A window: its epoch, its index, a function that reads its tokens, and the number of tokens that it leaves out.
_Row = tuple[int, int, Callable[[], Tokens], int]


@dataclass(frozen=True, slots=True)
class _Step:
    """The windows of a step on one rank, with the epoch and the position in the epoch after the step, and with the
    token counts since the first step.
    """

    windows: Windows
    epoch: int
    position: int
    crop: Crop


@dataclass(frozen=True, slots=True)
class _Plan:
    """Determines the windows that a rank reads at each step."""

    tokens: int
    length: int
    batch: int
    order: Order
    seed: int
    rank: int
    world: int
    bos: int | None
    version: int = _STATE_VERSION

    def steps(self, stream: TokenStream, epoch: int, position: int) -> Iterator[_Step]:
        epochs = self._packed if self.order == "best_fit" else self._windows
        coming = epochs(stream, epoch, position)
        crop = Crop(0, 0)
        while True:
            rows = []
            for k in range(self.batch * self.world):
                epoch, position, read, cropped = next(coming)
                crop = Crop(crop.cropped + cropped, crop.tokens + self.length + 1 + cropped)
                if k % self.world == self.rank:
                    rows.append(read())
            yield _Step(np.stack(rows), epoch, position + 1, crop)

    def _windows(self, stream: TokenStream, epoch: int, position: int) -> Iterator[_Row]:
        while True:
            order = epoch_order(self.tokens, self.length, self.order, self.seed, epoch, self.version)
            for k in range(position, order.blocks):
                yield epoch, k, partial(stream.read, order.offset(k), self.length + 1), 0
            epoch, position = epoch + 1, 0

    def _packed(self, stream: TokenStream, epoch: int, position: int) -> Iterator[_Row]:
        assert self.bos is not None
        starts = document_starts(stream, self.bos)
        if not len(starts) or self.tokens - starts[0] < self.length + 1:
            message = f"the documents of the stream have fewer than {self.length + 1:,} tokens"
            raise DataError(message, "give more data, or a shorter length")
        while True:
            first = _draw(self.seed, epoch, "document", len(starts)) if epoch else 0
            rows = best_fit(lengths_from(starts, self.tokens, first), self.length + 1)
            for k, row in enumerate(islice(rows, position, None), position):
                yield epoch, k, partial(read_row, stream, starts, row), row.cropped
            epoch, position = epoch + 1, 0


class Loader(BackgroundReader[_Step]):
    """An endless loader of batches of windows. A loader is not thread-safe. Close it after use, or use it as a context
    manager.

    Args:
        stream: the token stream.
        batch: the number of windows per step on this rank.
        length: the length of a window in tokens.
        order: "sequential", "coprime_stride" (a new permutation for each epoch), or "best_fit" (rows of documents).
        seed: the seed of the order.
        rank, world: the index of this process, and the number of processes.
        prefetch: the maximum number of batches that the background thread reads ahead.
        device: the device of the batches. A GPU receives the next batch while it computes with the current batch.
        bos: the id that starts a document; required by "best_fit".

    Attributes:
        crop: the numbers of document tokens that were read and left out since the loader was created or restored.

    Raises:
        DataError: if the order is unknown, or the stream has fewer than length + 1 tokens.
        ValueError: if a number is out of range.
    """

    def __init__(
        self,
        stream: TokenStream,
        batch: int,
        length: int,
        order: Order,
        seed: int,
        rank: int = 0,
        world: int = 1,
        prefetch: int = 4,
        device: torch.device | str = "cpu",
        bos: int | None = None,
    ) -> None:
        if order not in ORDERS:
            raise DataError(f"unknown order {order!r}", f"use {' or '.join(ORDERS)}")
        if batch < 1 or length < 1 or prefetch < 1 or not 0 <= rank < world:
            raise ValueError(f"{batch=}, {length=}, {prefetch=} must be positive, and 0 <= {rank=} < {world=}")
        if order == "best_fit" and bos is None:
            raise ValueError("best_fit needs the id that starts a document")
        if stream.tokens < length + 1:
            message = f"the stream has {stream.tokens:,} tokens; windows of length {length:,} need {length + 1:,}"
            raise DataError(message, "give more data, or a shorter length")
        super().__init__(prefetch)
        self._stream = stream
        self._plan = _Plan(stream.tokens, length, batch, order, seed, rank, world, bos)
        self.crop = Crop(0, 0)
        self._before = self.crop
        self._epoch = 0
        self._position = 0
        self._transfer = Transfer(torch.device(device))
        self._sent: tuple[Batch, _Step] | None = None  # the next batch, whose copy to a GPU has already started

    def items(self) -> Iterator[_Step]:
        return self._plan.steps(self._stream, self._epoch, self._position)

    def next(self) -> Batch:
        """Returns the next batch: inputs and targets, i64 [batch, length] on `device`.

        For a GPU, use the batch on the CUDA stream that is current during this call. The call waits only if the
        background thread has no batch ready.

        Raises:
            DataError, OSError: if the background thread failed to read the batch. The next call tries to read the batch
                again.
        """
        batch, step = self._sent or self._send()
        self._sent, self._epoch, self._position = None, step.epoch, step.position
        self.crop = Crop(self._before.cropped + step.crop.cropped, self._before.tokens + step.crop.tokens)
        # Called before the next copy starts, because this batch would otherwise wait for the next copy
        batch = self._transfer.arrived(batch)
        if self._transfer.ahead and self.ready:
            self._sent = self._send()
        return batch

    def _send(self) -> tuple[Batch, _Step]:
        step = self.take()
        return self._transfer.send(step.windows), step

    def state(self) -> dict[str, int]:
        """Returns the position after the last batch that `next` returned.

        A loader with a different `batch`, `rank` or `world` can resume from this position.
        """
        return {"version": self._plan.version, **self._identity(), "epoch": self._epoch, "position": self._position}

    def restore(self, state: Mapping[str, int]) -> None:
        """Moves the loader to the position in `state`. The version in `state` determines the order of the windows.

        Raises:
            DataError: if `state` is incomplete, has an unknown version, or does not match the data, length, order or
                seed of this loader.
        """
        version = state["version"] if state.get("version") in _STATE_VERSIONS else _STATE_VERSION
        hint = "resume with the data, tokenizer, length, order and seed of the run, or start a new run"
        identity = {"version": version, **self._identity()}
        epoch, position = saved_position(state, identity, ("epoch", "position"), hint)
        self.close()
        self._plan = replace(self._plan, version=version)
        self._epoch, self._position = epoch, position

    def _identity(self) -> dict[str, int]:
        return {
            "stream": int(self._stream.digest[:12], 16),  # 48 bits, which any JSON reader represents exactly
            "length": self._plan.length,
            "order": ORDERS.index(self._plan.order),
            "seed": self._plan.seed,
        }

    def cropped_share(self) -> float | None:
        """Returns the fraction of document tokens that packed rows have left out so far. None if the rows are not
        packed documents.
        """
        return self.crop.cropped / self.crop.tokens if self._plan.order == "best_fit" and self.crop.tokens else None

    def close(self) -> None:
        super().close()
        self._sent, self._before = None, self.crop
