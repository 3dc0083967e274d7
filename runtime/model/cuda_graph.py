"""CUDA graphs of functions, such as a micro-batch or a decoding step.

A GPU replays all kernels of a graph after a single launch from the host.

Calls before a capture also run on the capture stream. Autograd accumulates the gradient of a leaf on the stream on
which the leaf was first used, and may remember this stream until the capture. A capture cannot wait for the default
stream, so that a leaf must not be used there first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

WARM_UP = 2  # uncaptured calls before the capture, in which kernels are compiled and libraries allocate workspaces
Result = TypeVar("Result")


def captured(
    work: Callable[[], Result], pool: Any = None, warm_up: int = WARM_UP
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Captures `work`, which must read from fixed addresses, as a CUDA graph on the current device.

    Args:
        work: the function to capture.
        pool: the memory pool of the graph; None for a new pool. Graphs may share a pool if they never run at the same
            time. The caller must read the results of one graph before another graph of the pool runs.
        warm_up: the number of calls of `work` before the capture.

    Returns:
        The graph, and the result of `work`. Each replay overwrites the tensors of the result.

    Raises:
        RuntimeError: if the capture fails.
    """
    with _on_capture_stream():
        for _ in range(warm_up):
            work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=_capture_stream(torch.cuda.current_device())):
        result = work()
    return graph, result


class Captured:
    """Runs `work(*tensors)` on a GPU. The first two calls run the function directly. Later calls replay a CUDA graph.

    Each call runs `work` exactly once, so that `work` may have side effects such as an optimizer update. All calls must
    pass tensors of equal shapes. `work` must always write to the same addresses and launch the same kernels.
    """

    def __init__(self, work: Callable[..., None], pool: Any = None) -> None:
        self._work, self._pool = work, pool
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *tensors: Tensor) -> None:
        """Runs `work` once. Raises ValueError if the tensors have other shapes than during the capture."""
        if self._calls < WARM_UP:
            self._calls += 1
            with _on_capture_stream():
                self._work(*tensors)
            return
        if self._graph is None:
            self._inputs = tuple(tensor.clone() for tensor in tensors)
            self._graph, _ = captured(partial(self._work, *self._inputs), self._pool, warm_up=0)
        expected, shapes = ([list(tensor.shape) for tensor in group] for group in (self._inputs, tensors))
        if shapes != expected:
            raise ValueError(f"the CUDA graph was captured for inputs of the shapes {expected}, not {shapes}")
        for buffer, tensor in zip(self._inputs, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        self._graph.replay()


@contextmanager
def _on_capture_stream() -> Iterator[None]:
    """A context manager whose body runs on the capture stream.

    The body begins after the earlier work of the current stream. The later work of the current stream begins after the
    body. Only one thread at a time may use a device.
    """
    current, stream = torch.cuda.current_stream(), _capture_stream(torch.cuda.current_device())
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
