"""The processes that train a model together.

The module provides the rank of this process, collective calls, and checks that all ranks agree.

torchrun or `specc train --gpus N` (launch.py) starts the processes. Both set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
and MASTER_PORT. Each process has the whole model. Only rank 0 writes files. If only rank 0 computes a result, it
broadcasts the result to all ranks.
"""

import atexit
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from specc.runtime.distributed.heartbeat import Heartbeat
from specc.runtime.distributed.launch import PEER_LOST, end_with_launcher, has_launcher, place
from specc.runtime.errors import EnvironmentFailure, RunFailure, RuntimeFailure

T = TypeVar("T")

# The time that a rank waits for the other ranks. Other checks detect dead and hung ranks earlier. This limit applies
# only to long work of one rank, such as a compilation or a checkpoint.
PATIENCE = timedelta(minutes=30)
# NCCL does not detect a dead rank on another host. The watchdog of NCCL ends the process after this time. The time
# counts from the start of a collective call, so that a step must be shorter than this time.
NCCL_PATIENCE = timedelta(seconds=45)
_CPU = torch.device("cpu")
# Torch 2.13 renamed these functions, and warns about the old names.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_HEAD_START = 1.0  # in seconds; after a failure, other ranks wait for this time, so that one rank reports it first


class PeerLost(RunFailure):
    """Raised if another process of the run has ended, so that this process cannot continue."""

    exit_code = PEER_LOST


@dataclass(frozen=True)
class World:
    """One of the processes that train a model together. All processes must make the same calls in the same order.

    Attributes:
        rank, size: the rank of this process, from 0 to size - 1, and the number of processes on all hosts.
        local_rank: the rank of this process among the processes on this host.
        device: the device on which this process computes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = _CPU
    _single_host: bool = True
    _store: Any = None
    _heartbeat: Heartbeat | None = None
    _wire: Any = None  # the process group for tensors on `device`; the default group is gloo, for host tensors

    @classmethod
    def alone(cls) -> "World":
        return cls()

    def on(self, device: torch.device) -> "World":
        """Returns a copy of this world whose collective calls work on `device`.

        If `device` is a GPU, each process of a host gets a different GPU. Raises EnvironmentFailure if this host has
        fewer GPUs than processes.
        """
        if self.size == 1 or device.type != "cuda":
            return replace(self, device=device)
        if self.local_rank >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            message = f"rank {self.rank} needs the GPU with index {self.local_rank}, but torch finds {count} GPUs"
            raise EnvironmentFailure(message, "start one process per GPU")
        gpu = torch.device("cuda", self.local_rank)
        patience = PATIENCE if self._single_host else NCCL_PATIENCE
        with _peers():
            wire = dist.new_group(backend="nccl", timeout=patience, device_id=gpu)
        return replace(self, device=gpu, _wire=wire)

    def add(self, tensor: Tensor) -> None:
        """Replaces a tensor on `device` in place by its sum over all ranks. The sum is bitwise equal on all ranks.

        The host does not wait for a GPU.
        """
        if self.size > 1:
            with _peers():
                dist.all_reduce(tensor, group=self._wire)

    def largest(self, tensor: Tensor) -> None:
        """Replaces a tensor on `device` in place by its elementwise maximum over all ranks. The host does not wait for
        a GPU.
        """
        if self.size > 1:
            with _peers():
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._wire)

    def add_parts(self, whole: Tensor, part: Tensor) -> "Waiting":
        """Starts a reduce-scatter: sums `whole` over all ranks, and writes this rank's part of the sum to `part`.

        The first dimension of `whole` is divided into equal parts, one per rank. Both tensors must be contiguous and on
        `device`.
        """
        with _peers():
            return Waiting(_reduce_scatter(part, whole, group=self._wire, async_op=True))

    def join_parts(self, part: Tensor, whole: Tensor) -> "Waiting":
        """Starts an all-gather: concatenates the tensors `part` of all ranks along the first dimension, and writes the
        result to `whole`.
        """
        with _peers():
            return Waiting(_all_gather(whole, part, group=self._wire, async_op=True))

    def totals(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return self._reduced(torch.from_numpy(values.copy()), dist.ReduceOp.SUM).numpy()

    def most(self, *values: float) -> tuple[float, ...]:
        return tuple(self._reduced(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MAX).tolist())

    def _reduced(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size > 1:
            with _peers():
                dist.all_reduce(values, op=operation)
        return values

    def first(self, make: Callable[[], T]) -> T:
        """Calls `make` on rank 0 only, and returns its result on all ranks. The result is pickled and broadcast."""
        if self.size == 1:
            return make()
        results: list[Any] = [make() if self.rank == 0 else None]
        with _peers():
            dist.broadcast_object_list(results, src=0)
        result: T = results[0]
        return result

    def wait(self) -> None:
        self.most(0.0)

    @contextmanager
    def in_turn(self, name: str) -> Iterator[None]:
        """A context manager for a block that rank 0 runs before all other ranks.

        The other ranks wait without a time limit until rank 0 has finished the block. They can then read files that
        rank 0 wrote. Each block needs a unique `name`. Raises PeerLost on a waiting rank if another rank has failed.
        """
        with _peers():
            while self.rank and not self._store.check([name]):
                # if rank 0 has ended, the store has ended with it, and the error message of Torch would be long
                if self._store.check(["failed"]):
                    raise PeerLost("another process of this run has failed", "see the messages of that process")
                time.sleep(0.05)
        yield
        if not self.rank and self._store is not None:
            self._store.set(name, "done")

    def require_same(self, what: str, facts: Mapping[str, object]) -> None:
        if self.size == 1:
            return
        expected = self.first(lambda: dict(facts))
        if differs := [name for name in {**expected, **facts} if expected.get(name) != facts.get(name)]:
            more = f" and {len(differs) - 1} more" if len(differs) > 1 else ""
            message = f"the {what} of rank {self.rank} differs from that of rank 0: {differs[0]}{more}"
            raise RunFailure(message, "all processes need the same code, spec, data, checkpoints and kind of device")

    def reports(self, error: BaseException) -> bool:
        """Returns whether this process should show `error`.

        Only the process that fails first shows its error. All other processes end because of the first failure, or with
        the same error. If a process is killed, the launcher reports the death, because the launcher knows the signal.
        """
        if self._store is None:
            return True
        if isinstance(error, PeerLost) and self._single_host and has_launcher():
            return False
        try:
            if self.rank:
                self._poll(lambda: self._store.check(["failed"]))
            is_first = bool(self._store.add("failed", 1) == 1)
            if self._store.add("seen", 1) < self.size and not self.rank:  # the store ends with rank 0
                self._poll(lambda: self._store.add("seen", 0) >= self.size)
            return is_first
        except RuntimeError:
            return not isinstance(error, PeerLost)

    def leave(self, waits: bool = True) -> None:
        """Ends the use of the store of torch.distributed by this process.

        Rank 0 hosts the store, and briefly waits until no other rank uses the store. Otherwise, Torch would print a
        stack trace for each unanswered call. With `waits=False`, rank 0 does not wait.
        """
        if self._heartbeat is not None:
            self._heartbeat.stop()
        others = [f"left/{rank}" for rank in range(1, self.size)]
        try:
            if self.rank:
                self._store.set(f"left/{self.rank}", "")
            elif others and waits:
                self._poll(lambda: self._store.check(others))
        except RuntimeError:  # the store has ended with rank 0
            pass

    def _poll(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + _HEAD_START
        while not condition() and time.monotonic() < until:
            time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A pending collective call. Do not use the tensors of the call before `wait` returns."""

    _work: Any = None  # None if there is no call to wait for

    def wait(self) -> None:
        if self._work is not None:
            with _peers():
                self._work.wait()


@contextmanager
def joined() -> Iterator[World]:
    """A context manager that joins the processes of a run, and yields the world.

    The environment variables of torchrun describe the processes. If the block fails, one rank shows the error. A
    process that completes the block exits with 0.

    Raises:
        EnvironmentFailure: if a variable of torchrun is missing, or is not an integer.
        SystemExit: if the block failed, and this rank does not show the error. The exit code is the exit code of the
            error.
    """
    world = _join()
    codes: list[int] = []
    atexit.register(lambda: _leave(codes[0]) if codes else None)
    try:
        yield world
    # No process group is destroyed here, because this could wait for ranks that have ended
    except BaseException as error:
        shows = world.reports(error)
        world.leave(waits=not isinstance(error, PeerLost))
        if not shows:
            codes.append(130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 70))
            if dist.is_torchelastic_launched():
                # torchrun ends all ranks as soon as one rank ends. The rank that shows the error needs time to do so.
                with suppress(BaseException):  # a signal ends the delay early
                    time.sleep(_HEAD_START)
            raise SystemExit(codes[0]) from None
        if world.rank:
            error.add_note(f"on rank {world.rank} of {world.size}")
            if isinstance(error, RuntimeFailure):
                error.message = f"rank {world.rank}: {error.message}"
        raise
    dist.destroy_process_group()
    world.leave()
    codes.append(0)


def _leave(code: int) -> None:
    """Ends the process with the exit code `code` by `os._exit`. In a normal exit of Python, threads of gloo or of the
    heartbeat could abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join() -> World:
    rank, size, local_rank, local_size = place()
    end_with_launcher()
    if local_rank < torch.cuda.device_count():
        # Must precede any other CUDA call, which would allocate memory on the first GPU
        torch.cuda.set_device(local_rank)
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=PATIENCE))
    except (ValueError, RuntimeError) as error:
        raise EnvironmentFailure(
            f"rank {rank} cannot join the others: {error}", "start every rank with torchrun"
        ) from error
    with _peers():
        dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=rank, world_size=size, timeout=PATIENCE)
    heartbeat = Heartbeat(rank, size, lambda: PrefixStore("heartbeat", store.clone())) if size > 1 else None
    return World(
        rank,
        size,
        local_rank,
        _single_host=local_size == size,
        _store=PrefixStore("specc", store),
        _heartbeat=heartbeat,
    )


@contextmanager
def _peers() -> Iterator[None]:
    """A context manager for calls that need the other processes of the run. Raises PeerLost if a process does not
    answer.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # the call only repeats an earlier error of this process
    except RuntimeError as error:
        reason = re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". ")[0]
        message = f"another process of this run does not answer: {reason}"
        raise PeerLost(
            message, "it was killed, or its host or the network failed; resume with --resume auto"
        ) from error
