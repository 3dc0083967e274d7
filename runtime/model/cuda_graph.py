"""CUDA graphs of functions such as a micro-batch or an optimizer update, which a GPU replays without the host."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM_UP = 2  # uncaptured calls before the capture: they compile kernels and allocate library workspaces


class Captured:
    """Runs `work(*tensors)` on a GPU: directly for the first two calls, and as a replayed CUDA graph from the third.

    All calls must have the same tensor shapes. `work` must write to the same addresses, and execute the same Python
    operations, in every call. The graph allocates from its own memory pool, or from `pool`. Several graphs may share a
    pool if only one of them runs at a time and tensors allocated in it are not read after another graph runs.

    Raises the errors of `work` and of CUDA, including errors of the capture. It never falls back to running without a
    graph.
    """

    def __init__(self, work: Callable[..., None], pool: Any = None) -> None:
        self._work, self._pool = work, pool
        self._passes = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *given: Tensor) -> None:
        """Runs the work once. Raises ValueError if the shapes differ from those of the captured call."""
        if self._passes < WARM_UP:
            self._passes += 1
            self._work(*given)
            return
        if self._graph is None:
            self._held = tuple(tensor.clone() for tensor in given)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._work(*self._held)
            self._graph = graph
        shapes = [[list(tensor.shape) for tensor in some] for some in (self._held, given)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"captured for {shapes[0]} tokens, not {shapes[1]}")
        for held, tensor in zip(self._held, given, strict=True):
            held.copy_(tensor, non_blocking=True)
        self._graph.replay()
