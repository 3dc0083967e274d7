"""Decoding without a cache: for each token the decoder runs again over all previous tokens. This is the baseline for
the cached state of a model of pairs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specc.compiler.build import uncached_files
from specc.runtime.decode.step_graphs import SMALLEST, WARM_UP, repeated
from specc.runtime.model.load import Loaded, import_model
from specc.runtime.model.protocols import State

TOKENS = "tokens"  # the key of the decoded tokens in the state


def rerun_model(loaded: Loaded, folder: Path) -> nn.Module:
    """Returns a module that decodes without a cache and shares the current weights of a loaded model of pairs.

    Its code is written to `folder`. Raises ValueError if the model cannot decode without a cache.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in uncached_files(loaded.spec, loaded.target.name).items():
        (folder / name).write_text(text, encoding="utf-8")
    model: nn.Module = import_model(folder).Model()
    own = dict(loaded.model.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data = own[name].data
    return model.eval()


class Rerun:
    """The decoding steps of a `rerun_model` module.

    With `captured`, on a GPU, a CUDA graph is replayed for each number of rows and of tokens. The numbers of rows are
    powers of two and that of the whole batch, as in a decoder with a cache.
    """

    def __init__(self, model: Any, window: int, captured: bool) -> None:
        self._model, self._window, self._captured = model, window, captured
        self._held: dict[tuple[torch.Size, ...], State] = {}
        self._graphs: dict[tuple[torch.Size, ...], dict[int, tuple[torch.cuda.CUDAGraph, Tensor]]] = {}
        self._pool: Any = None

    def encode(self, source: Tensor) -> State:
        state: State = self._model.encode(source)
        return {**state, TOKENS: (source.new_zeros(len(source), self._window),)}

    def begin(self, state: State, beam: int = 1) -> State:
        state = repeated(state, beam)
        if not self._captured:
            return state
        key = _shapes(state)
        if key not in self._held:
            self._held[key] = {place: tuple(map(torch.clone, tensors)) for place, tensors in state.items()}
            self._graphs[key] = {}
        for place, tensors in state.items():
            for own, given in zip(self._held[key][place], tensors, strict=True):
                own.copy_(given)
        return self._held[key]

    def extend(self, ids: Tensor, start: int, state: State) -> Tensor:
        state[TOKENS][0][:, start] = ids[:, 0]
        if not self._captured:
            return self._logits(start, state)
        graphs = self._graphs[_shapes(state)]
        if start not in graphs:
            graphs[start] = self._capture(lambda: self._logits(start, state), ids.device)
        graph, logits = graphs[start]
        graph.replay()
        return logits

    def rows(self, going: int, now: int) -> int:
        """Returns the number of rows to continue with, by the same rule as decoders with a cache."""
        if self._captured:
            return min(max(1 << (going - 1).bit_length(), SMALLEST), now)
        return going if going <= 0.75 * now else now

    def _logits(self, start: int, state: State) -> Tensor:
        """Returns the logits, f32 [B, V], after the first `start` + 1 tokens of the state."""
        logits: Tensor = self._model.logits(state[TOKENS][0][:, : start + 1], *state["encoder"])
        return logits[:, -1]

    def _capture(self, work: Callable[[], Tensor], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                work()
        torch.cuda.current_stream(device).wait_stream(stream)
        # graphs run one at a time and can share one memory pool
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = work()
        return graph, logits


def _shapes(state: State) -> tuple[torch.Size, ...]:
    return tuple(kept.shape for tensors in state.values() for kept in tensors)
