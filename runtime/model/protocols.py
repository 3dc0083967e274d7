"""The methods of generated models, as structural types.

A generated module is an `nn.Module` whose methods follow from its spec. These functions state once which they are.
"""

from typing import Any, Protocol, cast

from torch import Tensor

Cache = list[tuple[Tensor, ...]]  # per layer, tensors with one row per text
State = dict[str, tuple[Tensor, ...]]  # by place in the spec, tensors with one row per source


class GeneratedText(Protocol):
    """A generated model of text. Ids and targets are i64 [B, T], logits f32 [B, vocabulary]."""

    def score(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Nats of each target, f32 [B, T]."""
        ...

    def prefill(self, ids: Tensor, start: Tensor, cache: Cache) -> Tensor:
        """Logits behind the last of `ids`, which are appended to `cache`, where `start` (i64 []) tokens are."""
        ...

    def decode(self, ids: Tensor, start: Tensor, cache: Cache) -> Tensor:
        """`prefill` of one token, ids [B, 1]."""
        ...

    def new_cache(self, rows: int, positions: int) -> Cache:
        """An empty cache for `rows` texts of up to `positions` tokens."""
        ...


class GeneratedHalves(Protocol):
    """A generated model of text whose `score` is available in two halves: the model before its head, and the head."""

    def score(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Nats of each target, f32 [B, T]."""
        ...

    def features(self, ids: Tensor) -> Tensor:
        """The input of the head, [B, T, D]."""
        ...

    def nats(self, x: Tensor, targets: Tensor) -> Tensor:
        """Nats of each target, f32 [B, T], of the input of the head."""
        ...


class GeneratedLines(Protocol):
    """A generated model of lines. Sources are i64 [B, S], targets i64 [B, T]."""

    def score(self, source: Tensor, target: Tensor) -> Tensor:
        """Nats of each target, f32 [B, T]; 0 at pads."""
        ...

    def encode(self, source: Tensor) -> State:
        """The state before the first token."""
        ...

    def extend(self, ids: Tensor, start: Tensor, state: State) -> Tensor:
        """Logits f32 [B, vocabulary] behind `ids` (i64 [B, 1]), which follow `start` (i64 []) others. `state` is
        updated in place."""
        ...


def text_model(module: Any) -> GeneratedText:
    """The module, generated from a spec of text."""
    return cast(GeneratedText, module)


def text_model_in_halves(module: Any) -> GeneratedHalves:
    """The module, generated from a spec of text whose `eval` adapts."""
    return cast(GeneratedHalves, module)


def line_model(module: Any) -> GeneratedLines:
    """The module, generated from a spec of lines."""
    return cast(GeneratedLines, module)
