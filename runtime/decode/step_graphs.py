"""Runs the decoding steps of a model that maps lines to lines. On a GPU, each step can be a CUDA graph."""

from typing import Any, Protocol

import torch
from torch import Tensor

from specc.runtime.model.cuda_graph import captured
from specc.runtime.model.protocols import GeneratedLines, State

SMALLEST = 64  # in rows; a smaller step is not faster


class Steps(Protocol):
    """Runs the programs of a model that maps lines to lines. `Translator` calls these methods."""

    def encode(self, source: Tensor) -> State:
        """Encodes the source lines. Returns the state of the model before the first target token."""

    def begin(self, state: State, beam: int = 1) -> State:
        """Returns a copy of a state for `extend`. In the copy, every row is repeated `beam` times. The copy is valid
        until the next call of `begin`.
        """

    def extend(self, ids: Tensor, start: int, state: State) -> Tensor:
        """Appends `ids`, i64 [B, 1], at position `start` of the target. Returns the logits of the next token, f32 [B,
        V]. The logits are valid until the next call.
        """

    def rows(self, unfinished: int, now: int) -> int:
        """Returns the number of rows to compute in the next steps. `now` is the current number of rows, and
        `unfinished` is the number of rows that are not finished.
        """


class Eager:
    """Runs the steps by direct calls of the model."""

    def __init__(self, model: GeneratedLines) -> None:
        self._model = model

    def encode(self, source: Tensor) -> State:
        return self._model.encode(source)

    def begin(self, state: State, beam: int = 1) -> State:
        return repeated(state, beam)

    def extend(self, ids: Tensor, start: int, state: State) -> Tensor:
        return self._model.extend(ids, torch.tensor(start, device=ids.device), state)

    def rows(self, unfinished: int, now: int) -> int:
        """Returns `now` if fewer than a quarter of the rows are finished, and `unfinished` otherwise."""
        return unfinished if unfinished <= 0.75 * now else now


class Graphed:
    """Runs the steps by replaying CUDA graphs.

    Each number of rows has its own graph of `extend`. The possible numbers of rows are the powers of two, and the size
    of the whole batch. Each source shape that occurs at least twice has its own graph of `encode`. The graphs read the
    weights at fixed addresses, so they remain valid while the model trains.
    """

    def __init__(self, model: GeneratedLines) -> None:
        self._model = model
        self._graphs: dict[tuple[torch.Size, ...], _Graph] = {}
        self._graph: _Graph | None = None
        self._encoders: dict[torch.Size, _Encoder | None] = {}  # None for a shape that has occurred only once
        self._pool: Any = None

    def encode(self, source: Tensor) -> State:
        """Encodes the source lines. Returns the state before the first target token. The state is valid until the next
        call of `encode`.
        """
        if source.shape not in self._encoders:
            self._encoders[source.shape] = None
            return self._model.encode(source)
        encoder = self._encoders[source.shape]
        if encoder is None:
            # Encoders run one at a time, so that they can share one memory pool
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            encoder = self._encoders[source.shape] = _Encoder(self._model, source, self._pool)
        return encoder.replay(source)

    def begin(self, state: State, beam: int = 1) -> State:
        state = repeated(state, beam)
        key = tuple(tensor.shape for tensors in state.values() for tensor in tensors)
        if key not in self._graphs:
            self._graphs[key] = _Graph(self._model, state)
        self._graph = self._graphs[key]
        return self._graph.filled(state)

    def extend(self, ids: Tensor, start: int, state: State) -> Tensor:
        assert self._graph is not None and state is self._graph.state
        return self._graph.replay(ids, start)

    def rows(self, unfinished: int, now: int) -> int:
        """Returns the smallest power of two that is at least `unfinished` and at least `SMALLEST`. If this power
        exceeds `now`, the method returns `now`.
        """
        return min(max(1 << (unfinished - 1).bit_length(), SMALLEST), now)


class _Encoder:
    """A CUDA graph of `encode` for sources of one shape."""

    def __init__(self, model: GeneratedLines, source: Tensor, pool: Any) -> None:
        self._source = source.clone()
        self._graph, self._state = captured(lambda: model.encode(self._source), pool)

    def replay(self, source: Tensor) -> State:
        self._source.copy_(source)
        self._graph.replay()
        return self._state


class _Graph:
    """A CUDA graph of `extend` for states of one shape."""

    def __init__(self, model: GeneratedLines, state: State) -> None:
        self.state: State = {place: tuple(map(torch.clone, tensors)) for place, tensors in state.items()}
        first = next(iter(self.state.values()))[0]
        self._ids = torch.zeros(len(first), 1, dtype=torch.int64, device=first.device)
        self._start = torch.zeros((), dtype=torch.int64, device=first.device)
        self._graph, self._logits = captured(lambda: model.extend(self._ids, self._start, self.state))

    def filled(self, state: State) -> State:
        for place, tensors in state.items():
            for target, source in zip(self.state[place], tensors, strict=True):
                target.copy_(source)
        return self.state

    def replay(self, ids: Tensor, start: int) -> Tensor:
        self._ids.copy_(ids)
        self._start.fill_(start)
        self._graph.replay()
        return self._logits


def repeated(state: State, beam: int) -> State:
    """Returns a copy of the state in which every row is repeated `beam` times."""
    if beam == 1:
        return state
    return {place: tuple(tensor.repeat_interleave(beam, 0) for tensor in tensors) for place, tensors in state.items()}
