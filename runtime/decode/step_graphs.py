"""Runs the programs of a model of lines step by step: directly, or on a GPU each step as one CUDA graph."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from specc.runtime.model.protocols import GeneratedLines, State

WARM_UP = 2  # steps before the capture: they allocate what libraries keep
SMALLEST = 64  # rows: below this a step takes as long as with this many


class Steps(Protocol):
    """The programs of a model of lines, as a decoder calls them."""

    def encode(self, source: Tensor) -> State:
        """The state before the first token."""
        ...

    def begin(self, state: State, beam: int = 1) -> State:
        """The state with `beam` rows for each, where `extend` takes it; it lasts until the next `begin`."""
        ...

    def extend(self, ids: Tensor, start: int, state: State) -> Tensor:
        """Logits f32 [B, V] after ids i64 [B, 1]; they last until the next call."""
        ...

    def rows(self, going: int, now: int) -> int:
        """The number of rows to continue with where `going` of `now` are not done."""
        ...


class Eager:
    """Calls the model."""

    def __init__(self, model: GeneratedLines) -> None:
        self._model = model

    def encode(self, source: Tensor) -> State:
        return self._model.encode(source)

    def begin(self, state: State, beam: int = 1) -> State:
        return repeated(state, beam)

    def extend(self, ids: Tensor, start: int, state: State) -> Tensor:
        return self._model.extend(ids, torch.tensor(start, device=ids.device), state)

    def rows(self, going: int, now: int) -> int:
        """All rows until a quarter of them is done."""
        return going if going <= 0.75 * now else now


class Graphed:
    """Replays CUDA graphs: one of `extend` for each number of rows (powers of two, and that of a whole batch), and one
    of `encode` for each shape of sources that occurs again.

    The state of each size lies at fixed addresses. Weights are read where they are, so the graphs stay right while a
    model trains in place.
    """

    def __init__(self, model: GeneratedLines) -> None:
        self._model = model
        self._graphs: dict[tuple[torch.Size, ...], _Graph] = {}
        self._graph: _Graph | None = None
        self._encoders: dict[torch.Size, _Encoder | None] = {}  # None of a shape that came once
        self._pool: Any = None

    def encode(self, source: Tensor) -> State:
        """As the protocol says; the state lasts until the next `encode`."""
        if source.shape not in self._encoders:
            self._encoders[source.shape] = None
            return self._model.encode(source)
        encoder = self._encoders[source.shape]
        if encoder is None:
            self._pool = self._pool or torch.cuda.graph_pool_handle()  # encoders run one at a time and share memory
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

    def rows(self, going: int, now: int) -> int:
        """The next power of two, at most `now`."""
        return min(max(1 << (going - 1).bit_length(), SMALLEST), now)


Result = TypeVar("Result")


def captured(work: Callable[[], Result], device: torch.device, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A CUDA graph of `work`, which reads at fixed addresses, and what it returns, which each replay writes anew."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = work()
    return graph, result


class _Encoder:
    """`encode` for sources of one shape, captured."""

    def __init__(self, model: GeneratedLines, source: Tensor, pool: Any) -> None:
        self._source = source.clone()
        self._graph, self._state = captured(lambda: model.encode(self._source), source.device, pool)

    def replay(self, source: Tensor) -> State:
        self._source.copy_(source)
        self._graph.replay()
        return self._state


class _Graph:
    """`extend` for states of one shape, captured."""

    def __init__(self, model: GeneratedLines, state: State) -> None:
        self.state: State = {place: tuple(map(torch.clone, tensors)) for place, tensors in state.items()}
        first = next(iter(self.state.values()))[0]
        self._ids = torch.zeros(len(first), 1, dtype=torch.int64, device=first.device)
        self._start = torch.zeros((), dtype=torch.int64, device=first.device)
        self._graph, self._logits = captured(lambda: model.extend(self._ids, self._start, self.state), first.device)

    def filled(self, state: State) -> State:
        """The graph's own state, with the values of another."""
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
    """The state with every row `beam` times."""
    if beam == 1:
        return state
    return {place: tuple(tensor.repeat_interleave(beam, 0) for tensor in tensors) for place, tensors in state.items()}
