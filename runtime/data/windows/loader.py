"""Batches of windows from a token stream: same order on any number of ranks, prefetched, exactly resumable.

The stream is cut into blocks of `length` tokens; a window is a block and one token more, so targets are the
inputs one later and no target is lost between blocks. All ranks derive one global order of windows per epoch.
Global step s takes the next `batch * world` of them, and of these the k-th goes to rank k % world: give each
rank a `batch` of (global batch / world) rows, and every step trains on the same windows for any `world`. The
last batch of an epoch is filled from the next one; nothing is dropped.

A thread reads ahead and calls nothing of CUDA: from another thread most calls would spoil a graph that is being
captured. For a GPU the caller's own thread sends each batch on its way one call early, on a stream of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import queue
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from specc.runtime.data.errors import DataError
from specc.runtime.data.windows.stream import TokenStream

if TYPE_CHECKING:  # token shards are packed and checked without torch
    import torch

    from specc.runtime.data.windows.transfer import Batch, Transfer

Order = Literal["sequential", "coprime_stride"]
ORDERS: tuple[Order, ...] = ("sequential", "coprime_stride")
# Of a state, and of the order that it is a place in: 1 took any coprime stride. Runs that began with it go on in it.
_STATE_VERSION = 2
_STATE_VERSIONS = (1, 2)
# A stride is drawn again where one of its first 16 multiples comes within 1/512 of the stream of where it began, or one
# of its first 192 within 1/6000: of 19,775 blocks, 38 and 3 of them. Without the first, some steps would read little
# but a part of the stream; without the second, steps of 384 windows read runs of neighbours.
_TOO_NEAR = ((16, 512), (192, 6000))


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """One permutation of the stream's blocks: the k-th window starts at `phase + length * ((start + k stride)
    mod blocks)`.

    `stride` and `blocks` are coprime, so k = 0 .. blocks - 1 meets every block once.
    """

    length: int
    blocks: int
    phase: int
    start: int
    stride: int

    def offset(self, k: int) -> int:
        """Stream position of the first token of window k (0 <= k < blocks)."""
        return self.phase + self.length * ((self.start + k * self.stride) % self.blocks)


def epoch_order(
    tokens: int, length: int, order: Order, seed: int, epoch: int, version: int = _STATE_VERSION
) -> EpochOrder:
    """The order of one epoch; a pure function of its arguments, on any machine and any library version.

    Coprime-stride sampling after parameter-golf PR 726, over one stream: each epoch has a random phase (so
    that windows are not cut at the same tokens again), a random start, and a random stride coprime to the
    number of blocks, which does not soon come back to near where it was. Order `version` 1 has strides that do.
    """
    if order == "sequential":
        return EpochOrder(length, (tokens - 1) // length, 0, 0, 1)

    def draw(what: str, bound: int) -> int:
        # not numpy's generators: their streams may change between versions, and a resume must not
        return int.from_bytes(hashlib.sha256(f"{seed} {epoch} {what}".encode()).digest()) % bound

    phase = draw("phase", min(length, tokens - length))
    blocks = (tokens - 1 - phase) // length
    stride, attempt = 1, 0
    while blocks > 1:
        stride = 1 + draw(f"stride {attempt}", blocks - 1)
        if math.gcd(stride, blocks) == 1 and (version == 1 or not _comes_back(stride, blocks)):
            break
        attempt += 1
    return EpochOrder(length, blocks, phase, draw("start", blocks), stride)


def _comes_back(stride: int, blocks: int) -> bool:
    """Whether a stride is so small, or so near to a small fraction of the blocks, that windows of a step would lie
    beside each other. Of few blocks none is."""
    for multiples, part in _TOO_NEAR:
        for k in range(1, multiples + 1 if blocks > part else 1):
            moved = k * stride % blocks
            if min(moved, blocks - moved) * part < blocks:
                return True
    return False


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which windows a rank reads at a step."""

    tokens: int
    length: int
    batch: int
    order: Order
    seed: int
    rank: int
    world: int
    version: int = _STATE_VERSION

    def step(self, epoch: int, position: int) -> tuple[list[int], int, int]:
        """Offsets of this rank's windows for the step that begins there, and where the next one begins."""
        order = self._order(epoch)
        offsets: list[int] = []
        for k in range(self.batch * self.world):
            while position >= order.blocks:
                epoch, position = epoch + 1, 0
                order = self._order(epoch)
            if k % self.world == self.rank:
                offsets.append(order.offset(position))
            position += 1
        return offsets, epoch, position

    def _order(self, epoch: int) -> EpochOrder:
        return epoch_order(self.tokens, self.length, self.order, self.seed, epoch, self.version)


@dataclass(frozen=True, slots=True)
class _Ready:
    windows: npt.NDArray[np.uint16]  # [batch, length + 1]
    epoch: int  # where the next step begins
    position: int


@dataclass(frozen=True, slots=True)
class _Sent:
    batch: Batch
    epoch: int
    position: int


class Loader:
    """An endless supply of batches. Not thread-safe; close it, or use it as a context manager.

    Args:
        stream: tokens to read.
        batch: windows a step on this rank.
        length: tokens a window.
        order: "sequential", or "coprime_stride" (a new permutation each epoch, from `seed`).
        rank, world: this process among all that share the order (see the module).
        prefetch: batches that a background thread keeps ready.
        device: where batches are wanted; on a GPU the coming one arrives while the one before is computed.

    Raises:
        DataError: the stream has fewer than length + 1 tokens.
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
    ) -> None:
        if order not in ORDERS:
            raise DataError(f"unknown order {order!r}", f"use {' or '.join(ORDERS)}")
        if batch < 1 or length < 1 or prefetch < 1 or not 0 <= rank < world:
            raise ValueError(f"{batch=}, {length=}, {prefetch=} must be positive, and 0 <= {rank=} < {world=}")
        if stream.tokens < length + 1:
            raise DataError(
                f"the stream has {stream.tokens:,} tokens; windows of length {length:,} need {length + 1:,}",
                "give more data, or a shorter length",
            )
        self._stream = stream
        self._plan = _Plan(stream.tokens, length, batch, order, seed, rank, world)
        self._prefetch = prefetch
        self._device = device
        self._epoch = 0
        self._position = 0
        self._worker: _Worker | None = None
        self._transfer: Transfer | None = None
        self._coming: _Sent | BaseException | None = None

    def next(self) -> Batch:
        """The next batch: inputs and targets, int64 [batch, length] on `device`; on a GPU for its current stream.

        Waits for the thread only, where it has nothing ready.

        Raises:
            DataError, OSError: what went wrong in the background thread; a later call tries the same batch
                again.
        """
        if self._worker is None or self._transfer is None:
            from specc.runtime.data.windows.transfer import transfer_to

            self._transfer = transfer_to(self._device)
            self._worker = _Worker(self._stream, self._plan, self._epoch, self._position, self._prefetch)
            weakref.finalize(self, self._worker.stop.set)
        item = self._coming or _sent(self._worker.ready.get(), self._transfer)
        self._coming = None
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._epoch, self._position = item.epoch, item.position
        batch = self._transfer.arrived(item.batch)  # before the coming one is sent, or it would wait for that one too
        if self._transfer.ahead:
            with contextlib.suppress(queue.Empty):
                self._coming = _sent(self._worker.ready.get_nowait(), self._transfer)
        return batch

    def state(self) -> dict[str, int]:
        """Where the caller stands, whatever was prefetched. Holds for any `batch`, `rank` and `world`."""
        return {"version": self._plan.version, **self._identity(), "epoch": self._epoch, "position": self._position}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on exactly after the batch that was the last one when `state` was taken, in the order of its version.

        Raises:
            DataError: the state is of other data, length, order, seed or an unknown version, or is incomplete.
        """
        identity = self._identity()
        differs = [name for name, value in identity.items() if state.get(name) != value]
        version = state.get("version", 0)
        if version not in _STATE_VERSIONS:
            differs.insert(0, "version")
        if differs:
            raise DataError(
                f"the saved position in the data does not fit: {', '.join(differs)} differ",
                "resume with the data, tokenizer, length, order and seed of the run, or start a new run",
            )
        epoch, position = state.get("epoch", -1), state.get("position", -1)
        if not (isinstance(epoch, int) and isinstance(position, int) and epoch >= 0 and position >= 0):
            raise DataError(f"the saved position in the data is not one: {epoch=}, {position=}")
        self.close()
        self._plan = replace(self._plan, version=version)
        self._epoch, self._position = epoch, position

    def _identity(self) -> dict[str, int]:
        return {
            "stream": int(self._stream.digest[:12], 16),  # 48 bits: exact in any JSON reader
            "length": self._plan.length,
            "order": ORDERS.index(self._plan.order),
            "seed": self._plan.seed,
        }

    def close(self) -> None:
        """Stop the background thread. The position stays; `next` would start it again."""
        if self._worker is not None:
            self._worker.close()
            self._worker = self._coming = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _sent(item: _Ready | BaseException, transfer: Transfer) -> _Sent | BaseException:
    if isinstance(item, BaseException):
        return item
    return _Sent(transfer.send(item.windows), item.epoch, item.position)


class _Worker:
    """The background thread. It does not refer to the Loader, so that one left unclosed can be collected."""

    def __init__(self, stream: TokenStream, plan: _Plan, epoch: int, position: int, prefetch: int) -> None:
        self.ready: queue.Queue[_Ready | BaseException] = queue.Queue(prefetch)
        self.stop = threading.Event()
        arguments = (stream, plan, epoch, position, self.ready, self.stop)
        self._thread = threading.Thread(target=_fill, args=arguments, name="specc-loader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.stop.set()
        with contextlib.suppress(queue.Empty):
            while True:  # make room for a thread that waits for it
                self.ready.get_nowait()
        self._thread.join()


def _fill(
    stream: TokenStream,
    plan: _Plan,
    epoch: int,
    position: int,
    ready: queue.Queue[_Ready | BaseException],
    stop: threading.Event,
) -> None:
    while not stop.is_set():
        item: _Ready | BaseException
        try:
            offsets, epoch, position = plan.step(epoch, position)
            windows = np.empty((plan.batch, plan.length + 1), np.uint16)
            for row, offset in enumerate(offsets):
                windows[row] = stream.read(offset, plan.length + 1)
            item = _Ready(windows, epoch, position)
        except BaseException as error:
            item = error
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.05)
                break
            except queue.Full:
                continue
        if isinstance(item, BaseException):
            return
