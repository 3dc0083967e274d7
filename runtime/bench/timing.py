"""Times calls: after warm-up, many samples each, in two passes that alternate between the calls."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

Call = Callable[[], object]
SECONDS = 0.1  # the target time of one pass over one call, unless the least number of samples takes longer
CHUNK = 20  # calls that are enqueued before the device starts to run them
LONGEST_HEAD_START = 0.1  # seconds
CYCLES = 2e9  # cycles per second of the device's clock, about; only used for the head start
HOST_CACHE = 32 << 20  # bytes; Torch does not report the size of a CPU's cache


@dataclass(frozen=True, slots=True)
class Measured:
    """The time of a call: the median of all samples, in ms per call.

    `spread` is the difference between the medians of its two passes, as a share of the smaller. A smaller difference
    between two calls is noise.
    """

    ms: float
    spread: float

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> "Measured":
        """Computes the statistics from the samples of two passes, in ms."""
        a, b = sorted((median(first), median(second)))
        return cls(median((*first, *second)), b / a - 1)


class Clock(Protocol):
    """A clock that times calls on one device. `fewest` and `most` bound the samples of a pass."""

    fewest: int
    most: int

    def wait(self) -> None:
        """Waits until the device has finished all of its work."""

    def samples(self, call: Call, count: int, enqueue: float) -> list[float]:
        """Returns the ms of each of `count` calls. `enqueue` is the seconds that the host needs to enqueue a call."""


class DeviceClock:
    """Times calls with CUDA events. The host runs ahead, so that its own time does not count.

    If calls touch less than four times the L2 cache, it is filled with other data before each call. That data is read,
    not written, because dirty lines would have to be written back during the call.
    """

    fewest, most = 10, 200

    def __init__(self, touched: int) -> None:
        cache: int = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._cold = torch.ones(cache, device="cuda") if touched < 4 * cache else None  # f32: four times the cache

    def wait(self) -> None:
        torch.cuda.synchronize()

    def samples(self, call: Call, count: int, enqueue: float) -> list[float]:
        times: list[float] = []
        while len(times) < count:
            events = [(_event(), _event()) for _ in range(min(CHUNK, count - len(times)))]
            # the device spins until the host has enqueued all of them
            cycles = int(min(len(events) * enqueue, LONGEST_HEAD_START) * CYCLES)
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            for start, end in events:
                if self._cold is not None:
                    self._cold.sum()
                start.record()
                call()
                end.record()
            torch.cuda.synchronize()
            times += [start.elapsed_time(end) for start, end in events]
        return times


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class HostClock:
    """Times calls on the CPU with `perf_counter`."""

    fewest, most = 3, 30

    def __init__(self, touched: int) -> None:
        self._cold = torch.ones(HOST_CACHE // 2) if touched < 4 * HOST_CACHE else None  # f32: twice the cache

    def wait(self) -> None:
        """Does nothing: calls on the host are synchronous."""

    def samples(self, call: Call, count: int, enqueue: float) -> list[float]:
        times = []
        for _ in range(count):
            if self._cold is not None:
                self._cold.sum()
            before = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - before))
        return times


def clock_of(device: torch.device, touched: int) -> Clock:
    """Returns the clock of a device, for calls that touch this many bytes."""
    return DeviceClock(touched) if device.type == "cuda" else HostClock(touched)


def alternate(calls: Mapping[str, Call], device: torch.device, touched: int) -> dict[str, Measured]:
    """Times every call in two passes over all calls.

    Args:
        calls: the calls, by name.
        device: the device that they run on.
        touched: the bytes that a call moves.

    Returns:
        The time of each call, by name.
    """
    clock = clock_of(device, touched)
    prepared = {name: _prepare(clock, call) for name, call in calls.items()}
    passes = [{name: clock.samples(call, *prepared[name]) for name, call in calls.items()} for _ in range(2)]
    return {name: Measured.of(passes[0][name], passes[1][name]) for name in calls}


def _prepare(clock: Clock, call: Call) -> tuple[int, float]:
    """Warms a call up. Returns the number of samples per pass, and the seconds that the host needs to enqueue a
    call."""
    began = time.perf_counter()
    call()
    clock.wait()
    while True:
        before = time.perf_counter()
        for _ in range(3):
            call()
        enqueue = (time.perf_counter() - before) / 3
        clock.wait()
        each = (time.perf_counter() - before) / 3
        if time.perf_counter() - began > SECONDS / 2:
            return max(clock.fewest, min(clock.most, int(SECONDS / each))), enqueue
