"""Decoding without a cache, as a baseline: for each token, the decoder runs again over all previous tokens."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specc.compiler.build import uncached_files
from specc.runtime.data.tokenizers.from_spec import characters_of
from specc.runtime.decode.lines import Translator
from specc.runtime.decode.step_graphs import SMALLEST, repeated
from specc.runtime.model.cuda_graph import captured
from specc.runtime.model.load import Loaded, sharing
from specc.runtime.model.protocols import State

TOKENS = "tokens"  # the key of the decoded tokens in the state


def uncached_translator(loaded: Loaded, folder: Path, device: torch.device, batch: int, beam: int = 1) -> Translator:
    """Returns a decoder that runs a model without a cache. The model maps lines to lines.

    Args:
        loaded: the model.
        folder: the folder for the generated code.
        device: the device of the model. On a GPU, the decoder replays CUDA graphs.
        batch: the number of lines that are decoded at once.
        beam: the beam size; 1 for greedy decoding.

    Returns:
        The decoder, with the current weights of the model.

    Raises:
        ValueError: if the model cannot decode without a cache.
    """
    model = loaded.spec.model
    steps = Rerun(rerun_model(loaded, folder), model.window, device.type == "cuda")
    return Translator(steps, characters_of(loaded.spec), model.window, model.reads_pads, device, batch, beam)


def rerun_model(loaded: Loaded, folder: Path) -> nn.Module:
    """Returns a module that decodes without a cache, and that shares the weights of the model `loaded`.

    The generated code is written to `folder`. Raises ValueError if the model cannot decode without a cache.
    """
    return sharing(loaded, uncached_files(loaded.spec, loaded.target.name), folder)


class Rerun:
    """Runs the decoding steps of a module that `rerun_model` returned.

    With `graphs`, each step replays a CUDA graph. Each number of rows and each number of previous tokens has its own
    graph. The possible numbers of rows are the powers of two, and the size of the whole batch.
    """

    def __init__(self, model: Any, window: int, graphs: bool) -> None:
        self._model, self._window, self._graphed = model, window, graphs
        self._states: dict[tuple[torch.Size, ...], State] = {}
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def encode(self, source: Tensor) -> State:
        state: State = self._model.encode(source)
        return {**state, TOKENS: (source.new_zeros(len(source), self._window),)}

    def begin(self, state: State, beam: int = 1) -> State:
        state = repeated(state, beam)
        if not self._graphed:
            return state
        key = tuple(tensor.shape for tensors in state.values() for tensor in tensors)
        if key not in self._states:
            self._states[key] = {place: tuple(map(torch.clone, tensors)) for place, tensors in state.items()}
        for place, tensors in state.items():
            for buffer, tensor in zip(self._states[key][place], tensors, strict=True):
                buffer.copy_(tensor)
        return self._states[key]

    def extend(self, ids: Tensor, start: int, state: State) -> Tensor:
        state[TOKENS][0][:, start] = ids[:, 0]
        if not self._graphed:
            return self._logits(start, state)
        key = id(state), start  # for each shape, `begin` returns the same state object
        if key not in self._graphs:
            # the graphs run one at a time, so that they can share one memory pool
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._graphs[key] = captured(lambda: self._logits(start, state), self._pool)
        graph, logits = self._graphs[key]
        graph.replay()
        return logits

    def rows(self, going: int, now: int) -> int:
        """Returns the number of rows to compute in the next steps. `now` is the current number of rows, and `going` is
        the number of unfinished rows. The method returns the same number as the method `rows` of a decoder with a
        cache.
        """
        if self._graphed:
            return min(max(1 << (going - 1).bit_length(), SMALLEST), now)
        return going if going <= 0.75 * now else now

    def _logits(self, start: int, state: State) -> Tensor:
        logits: Tensor = self._model.logits(state[TOKENS][0][:, : start + 1], *state["encoder"])
        return logits[:, -1]
