"""Times calls: warm, many times, in two passes with the other calls between them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

Call = Callable[[], object]
SECONDS = 0.1  # what one pass over one call may take, as far as the least number of samples lets it
CHUNK = 20  # calls that are enqueued before the device may start with them
LONGEST_HEAD_START = 0.1  # seconds
CYCLES = 2e9  # a second of the device's clock, about; only the head start is counted in it
HOST_CACHE = 32 << 20  # bytes; Torch does not tell the size of a CPU's cache


@dataclass(frozen=True, slots=True)
class Measured:
    """The median of all samples of a call, in ms a call. `spread` is how far the medians of its two passes lie
    apart, as a share of the smaller: a difference between two calls that is smaller than that is noise."""

    ms: float
    spread: float

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> "Measured":
        """From the samples of two passes, in ms."""
        a, b = sorted((median(first), median(second)))
        return cls(median((*first, *second)), b / a - 1)


class Clock(Protocol):
    """A way to time calls on one device. `fewest` and `most` bound the samples of a pass."""

    fewest: int
    most: int

    def wait(self) -> None:
        """Until the device has done all that it was given."""

    def samples(self, call: Call, count: int, enqueue: float) -> list[float]:
        """ms of each of `count` calls; the host takes `enqueue` seconds to hand one to the device."""


class DeviceClock:
    """CUDA events around each call. The host runs ahead, so that its own time is not in the numbers.

    Calls that touch less than a few times the L2 cache find it full of other data: read, not written, as what is
    dirty there would have to be written back within the time of the call.
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
            # the device spins until the host is that far ahead
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
    """`perf_counter` around each call, on the CPU."""

    fewest, most = 3, 30

    def __init__(self, touched: int) -> None:
        self._cold = torch.ones(HOST_CACHE // 2) if touched < 4 * HOST_CACHE else None  # f32: twice the cache

    def wait(self) -> None:
        """The host has done all that it does."""

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
    """The clock of a device for calls that touch so many bytes."""
    return DeviceClock(touched) if device.type == "cuda" else HostClock(touched)


def alternate(calls: Mapping[str, Call], device: torch.device, touched: int) -> dict[str, Measured]:
    """Times every call twice: all of them in turn, and all of them again. `touched` bytes are what one moves."""
    clock = clock_of(device, touched)
    prepared = {name: _prepare(clock, call) for name, call in calls.items()}
    passes = [{name: clock.samples(call, *prepared[name]) for name, call in calls.items()} for _ in range(2)]
    return {name: Measured.of(passes[0][name], passes[1][name]) for name in calls}


def _prepare(clock: Clock, call: Call) -> tuple[int, float]:
    """Warms a call up; returns how many samples a pass takes, and the seconds that the host takes to enqueue one."""
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
