"""CUDA graphs: work that a GPU replays without waiting for the host, such as a micro-batch or an update."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM_UP = 2  # passes before the capture: they compile, and allocate what libraries keep


class Captured:
    """`work(*tensors)` on a GPU, for tensors of one shape: run directly twice, then captured, and replayed ever after.

    `work` must write to the same addresses in every call, and its Python must do the same each time. The graph has
    memory of its own for what it allocates, or `pool`, which several graphs share if only one of them runs at a time
    and nothing of it is read later. Raises the errors of `work` and of CUDA, also while capturing: an operation that
    cannot be captured is an error, not a reason to continue without a graph.
    """

    def __init__(self, work: Callable[..., None], pool: Any = None) -> None:
        self._work, self._pool = work, pool
        self._passes = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *given: Tensor) -> None:
        """Runs the work once; the tensors lie on the device, and have the same shapes in every call."""
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
