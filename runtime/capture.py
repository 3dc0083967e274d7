"""Replays one micro-batch's forward and backward as a CUDA graph, so that the device never waits for the host."""

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 2  # passes before the capture: they compile, and allocate what libraries keep


class Captured:
    """`work(ids, targets)` on a GPU, of one shape: run as it is twice, then captured, and from then on replayed.

    What `work` writes must lie at the same addresses in every call, and its Python must do the same each time. The
    graph keeps its own memory for what it allocates. Raises what `work` and CUDA raise, also while capturing: an
    operation that cannot be captured is an error, not a reason to go on without.
    """

    def __init__(self, work: Callable[[Tensor, Tensor], None]) -> None:
        self._work = work
        self._passes = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, ids: Tensor, targets: Tensor) -> None:
        """One micro-batch; ids and targets are i64 [B, T] on the device."""
        if self._passes < WARM_UP:
            self._passes += 1
            self._work(ids, targets)
            return
        if self._graph is None:
            self._ids, self._targets = torch.empty_like(ids), torch.empty_like(targets)
            self._ids.copy_(ids)
            self._targets.copy_(targets)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._work(self._ids, self._targets)
            self._graph = graph
        if ids.shape != self._ids.shape:
            raise ValueError(f"captured for {list(self._ids.shape)} tokens, not {list(ids.shape)}")
        self._ids.copy_(ids, non_blocking=True)
        self._targets.copy_(targets, non_blocking=True)
        self._graph.replay()
