"""Measures the time of function calls.

After a warm-up, a first pass over all calls times each call many times. A second pass repeats these measurements.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

Call = Callable[[], object]
SECONDS = 0.1  # the target time in seconds of one pass over one call; the minimum number of samples may need more time
SAMPLES = {"cuda": (10, 200), "cpu": (3, 30)}  # the minimum and the maximum number of samples per pass
CHUNK = 20  # the number of calls that are enqueued before the device starts to run the first of them
LONGEST_HEAD_START = 0.1  # seconds
CYCLES = 2e9  # the approximate number of clock cycles per second of the device, which only affects the head start
HOST_CACHE = 32 << 20  # in bytes; Torch does not report the size of a CPU's cache


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured time of a call. `ms` is the median of all samples.

    The samples are taken in two passes. `spread` is the difference between the medians of the two passes, divided by
    the smaller median. If the relative difference between the times of two calls is below `spread`, the difference is
    noise.
    """

    ms: float
    spread: float

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> "Measured":
        a, b = sorted((median(first), median(second)))
        return cls(median((*first, *second)), b / a - 1)


def alternate(calls: Mapping[str, Call], device: torch.device, touched: int) -> dict[str, Measured]:
    """Times every call in two passes over all calls. CUDA events measure the time on a GPU, and `time.perf_counter`
    measures the time on the CPU.

    If a call moves little data, unrelated data are read before each call, to fill the last-level cache. The data are
    only read, because the cache would write modified data back during the timed call.

    Args:
        calls: the calls, by name.
        device: the device on which the calls run.
        touched: the number of bytes that a call reads and writes.

    Returns:
        The time of each call, by name.
    """
    gpu = device.type == "cuda"
    cache = torch.cuda.get_device_properties(device).L2_cache_size if gpu else HOST_CACHE
    other = torch.ones(cache if gpu else cache // 2, device=device) if touched < 4 * cache else None  # f32
    evict = other.sum if other is not None else lambda: None
    prepared = {name: _prepare(call, device) for name, call in calls.items()}
    samples = _device_samples if gpu else _host_samples
    passes = [{name: samples(call, evict, *prepared[name]) for name, call in calls.items()} for _ in range(2)]
    return {name: Measured.of(passes[0][name], passes[1][name]) for name in calls}


def _prepare(call: Call, device: torch.device) -> tuple[int, float]:
    fewest, most = SAMPLES[device.type]
    began = time.perf_counter()
    call()
    wait(device)
    while True:
        before = time.perf_counter()
        for _ in range(3):
            call()
        enqueue = (time.perf_counter() - before) / 3
        wait(device)
        each = (time.perf_counter() - before) / 3
        if time.perf_counter() - began > SECONDS / 2:
            return max(fewest, min(most, int(SECONDS / each))), enqueue


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_samples(call: Call, evict: Call, count: int, enqueue: float) -> list[float]:
    times: list[float] = []
    while len(times) < count:
        events = [(_event(), _event()) for _ in range(min(CHUNK, count - len(times)))]
        # A busy loop occupies the device until the host has enqueued all calls, so that launch overhead is not measured
        cycles = int(min(len(events) * enqueue, LONGEST_HEAD_START) * CYCLES)
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        for start, end in events:
            evict()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(end) for start, end in events]
    return times


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _host_samples(call: Call, evict: Call, count: int, enqueue: float) -> list[float]:
    times = []
    for _ in range(count):
        evict()
        before = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - before))
    return times
