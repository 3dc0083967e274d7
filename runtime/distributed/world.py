"""One of several processes that train together: which one it is, what they add up, what they agree on.

They are started by torchrun, or by `specc train --gpus N` (launch.py), with the same variables in the
environment: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Each holds the whole model. Only rank 0
writes, and what it alone knows or does the others get from it.
"""

import atexit
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from specc.runtime.distributed.launch import PEER_LOST, end_with_launcher, place
from specc.runtime.errors import EnvironmentFailure, RunFailure, RuntimeFailure

T = TypeVar("T")

# How long a rank waits for the others. One that dies is noticed before: its sockets close, and its launcher ends
# the ranks of its host; one that hangs, by its heartbeat. So this only bounds what a rank may do while the others
# wait: compile, write a checkpoint.
PATIENCE = timedelta(minutes=30)
# But NCCL notices no death, nor does the launcher of another host. There its own watchdog ends the process; it
# counts from when a sum is asked for, so a step must be shorter than this.
NCCL_PATIENCE = timedelta(seconds=45)
_CPU = torch.device("cpu")
# torch 2.13 has renamed them, and warns of the old names.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_HEAD_START = 1.0  # seconds for which the others let rank 0 report a failure that all have


class PeerLost(RunFailure):
    """Another process of the run has ended, so this one cannot go on."""

    exit_code = PEER_LOST


@dataclass(frozen=True)
class World:
    """This process among those that train one model. All of them must make the same calls in the same order.

    Attributes:
        rank, size: 0 .. size - 1 over all hosts.
        local_rank: of those on this host.
        device: where this process computes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = _CPU
    _one_host: bool = True
    _store: Any = None
    _heartbeat: Heartbeat | None = None
    _wire: Any = None  # the process group for tensors on `device`; the default one is gloo, for the host

    @classmethod
    def alone(cls) -> "World":
        """The only process: every call returns at once."""
        return cls()

    def on(self, device: torch.device) -> "World":
        """The same world with its sums on `device`, of which each process of a host gets its own.

        Raises EnvironmentFailure where this host has fewer GPUs than processes.
        """
        if self.size == 1 or device.type != "cuda":
            return replace(self, device=device)
        if self.local_rank >= torch.cuda.device_count():
            message = f"rank {self.rank} needs GPU {self.local_rank} of its host, and torch finds "
            raise EnvironmentFailure(message + f"{torch.cuda.device_count()}", "start one process a GPU")
        own = torch.device("cuda", self.local_rank)
        patience = PATIENCE if self._one_host else NCCL_PATIENCE
        with _peers():
            wire = dist.new_group(backend="nccl", timeout=patience, device_id=own)
        return replace(self, device=own, _wire=wire)

    def add(self, tensor: Tensor) -> None:
        """Replaces a tensor on `device` by its sum over all ranks, bit for bit the same on each.

        The host does not wait for a GPU.
        """
        if self.size > 1:
            with _peers():
                dist.all_reduce(tensor, group=self._wire)

    def add_parts(self, whole: Tensor, own: Tensor) -> "Waiting":
        """Begins to put this rank's equal part, along the first axis, of the sum of all ranks' `whole` into `own`; both
        are contiguous, on `device`."""
        with _peers():
            return Waiting(_reduce_scatter(own, whole, group=self._wire, async_op=True))

    def join_parts(self, own: Tensor, whole: Tensor) -> "Waiting":
        """Begins to put all ranks' `own`, one after the other along the first axis, into `whole`."""
        with _peers():
            return Waiting(_all_gather(whole, own, group=self._wire, async_op=True))

    def totals(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The sums of small float64 arrays, on the host."""
        if self.size == 1:
            return values
        total = torch.from_numpy(values.copy())
        with _peers():
            dist.all_reduce(total)
        return total.numpy()

    def most(self, *values: float) -> tuple[float, ...]:
        """The maximum of each value over all ranks, on the host."""
        if self.size == 1:
            return values
        maxima = torch.tensor(values, dtype=torch.float64)
        with _peers():
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        return tuple(maxima.tolist())

    def first(self, make: Callable[[], T]) -> T:
        """Broadcasts the result of `make`, which runs on rank 0 alone while the others wait. The result is pickled."""
        if self.size == 1:
            return make()
        results: list[Any] = [make() if self.rank == 0 else None]
        with _peers():
            dist.broadcast_object_list(results, src=0)
        result: T = results[0]
        return result

    def wait(self) -> None:
        """Returns when all ranks have called it."""
        self.most(0.0)

    @contextmanager
    def in_turn(self, name: str) -> Iterator[None]:
        """Rank 0 runs the block first, then all others at once: they find on disk what it has made.

        It may take as long as it likes. Each such block of a program has a `name` of its own. Raises PeerLost on those
        that wait where a rank has failed.
        """
        with _peers():
            while self.rank and not self._store.check([name]):
                if self._store.check(["failed"]):  # the store ends with rank 0, and torch tells of that at length
                    raise PeerLost("another process of this run has failed", "see what it says")
                time.sleep(0.05)
        yield
        if not self.rank and self._store is not None:
            self._store.set(name, "done")

    def require_same(self, what: str, facts: Mapping[str, object]) -> None:
        """Raises RunFailure on each rank on which a fact is not that of rank 0."""
        if self.size == 1:
            return
        wanted = self.first(lambda: dict(facts))
        differs = [name for name in {**wanted, **facts} if wanted.get(name) != facts.get(name)]
        if differs:
            more = f" and {len(differs) - 1} more" if len(differs) > 1 else ""
            message = f"rank {self.rank} has another {what} than rank 0: {differs[0]}{more}"
            raise RunFailure(message, "all processes need the same code, spec, data, checkpoints and kind of device")

    def speaks(self, error: BaseException) -> bool:
        """Whether this process should show `error`: the first that fails does. The others end because of it, or
        have found the same."""
        if self._store is None:
            return True
        try:
            if self.rank:
                self._poll(lambda: self._store.check(["failed"]))
            speaks = bool(self._store.add("failed", 1) == 1)
            if self._store.add("seen", 1) < self.size and not self.rank:  # the store ends with rank 0
                self._poll(lambda: self._store.add("seen", 0) >= self.size)
            return speaks
        except RuntimeError:
            return not isinstance(error, PeerLost)

    def _poll(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + _HEAD_START
        while not condition() and time.monotonic() < until:
            time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A call to other processes that has begun; what it reads and writes is its own until `wait` returns."""

    _work: Any = None  # None where there is nothing to wait for

    def wait(self) -> None:
        """On a GPU the current stream waits for it, not the host."""
        if self._work is not None:
            with _peers():
                self._work.wait()


@contextmanager
def joined() -> Iterator[World]:
    """The world that the environment describes. Of a failure in the block, one rank shows what it was.

    A process that comes through the block ends with 0. Raises EnvironmentFailure where the environment is not that
    of torchrun, and SystemExit, with the exit code of what went wrong, on ranks that have nothing to show.
    """
    world = _join()
    done: list[bool] = []
    atexit.register(lambda: _leave() if done else None)
    try:
        yield world
    except BaseException as error:  # no teardown: it could wait for ranks that are gone
        if not world.speaks(error):
            code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 70)
            raise SystemExit(code) from None
        if world.rank:
            error.add_note(f"on rank {world.rank} of {world.size}")
            if isinstance(error, RuntimeFailure):
                error.message = f"rank {world.rank}: {error.message}"
        raise
    if world._heartbeat is not None:
        world._heartbeat.stop()
    dist.destroy_process_group()
    done.append(True)


def _leave() -> None:
    """Ends the process. Python's own end would abort it, should a thread of gloo free a tensor meanwhile."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _join() -> World:
    rank, size, local_rank, local_size = place()
    end_with_launcher()
    if local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)  # before anything else: it would take memory on the first GPU
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=PATIENCE))
    except (ValueError, RuntimeError) as error:
        raise EnvironmentFailure(f"rank {rank} cannot join the others: {error}", "start it with torchrun") from error
    with _peers():
        dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=rank, world_size=size, timeout=PATIENCE)
    heartbeat = Heartbeat(rank, size, lambda: PrefixStore("heartbeat", store.clone())) if size > 1 else None
    return World(
        rank,
        size,
        local_rank,
        _one_host=local_size == size,
        _store=PrefixStore("specc", store),
        _heartbeat=heartbeat,
    )


@contextmanager
def _peers() -> Iterator[None]:
    """Around each call that needs the other processes."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # this process's own, which only showed here
    except RuntimeError as error:
        reason = re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". ")[0]
        message = f"another process of this run does not answer: {reason}"
        raise PeerLost(message, "it was killed, or its host or the network failed; --resume auto goes on") from error
