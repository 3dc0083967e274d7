"""Types of generated models.

The methods of a generated module depend on its spec, so mypy does not know them. The functions in this file therefore
cast a module to one of these types.
"""

from typing import Any, Protocol, cast

from torch import Tensor

Cache = list[tuple[Tensor, ...]]  # for each layer, tensors with one row per text
State = dict[str, tuple[Tensor, ...]]  # for each location in the spec, tensors with one row per source


class GeneratedText(Protocol):
    """A generated text model. Ids and targets are i64 [B, T]. Logits are f32 [B, vocabulary].

    `score(ids, targets)` equals `nats(features(ids), targets)`. A module has the methods `features` and `nats` only if
    its spec has the field `eval.adapt`.
    """

    def score(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of each target in nats, f32 [B, T]."""

    def prefill(self, ids: Tensor, start: Tensor, cache: Cache) -> Tensor:
        """Appends `ids` to a cache that contains `start` (i64 []) tokens. Returns the logits after the last id."""

    def decode(self, ids: Tensor, start: Tensor, cache: Cache) -> Tensor:
        """Appends one token per row, i64 [B, 1], to a cache that contains `start` tokens.

        Returns the logits after the appended tokens.
        """

    def new_cache(self, rows: int, positions: int) -> Cache:
        """Returns an empty cache for `rows` texts of up to `positions` tokens."""

    def features(self, ids: Tensor) -> Tensor:
        """Returns the hidden states that the output head reads, [B, T, features]."""

    def nats(self, x: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of each target in nats, f32 [B, T]. `x` is a result of the method `features`."""


class GeneratedPages(Protocol):
    """A generated text model with a paged cache. Each text has a list of cache pages."""

    def step(self, ids: Tensor, starts: Tensor, table: Tensor, cache: Cache) -> Tensor:
        """Appends tokens to texts.

        Args:
            ids: K new tokens for each of R texts, i64 [R, K].
            starts: the number of tokens in the cache of each text, i64 [R].
            table: the indices of the pages of each text, i64 [R, N].
            cache: the pages, which are updated in place.

        Returns:
            The logits after the last token of each text, [R, vocabulary].
        """

    def new_cache(self, pages: int) -> Cache:
        """Returns a cache of `pages` empty pages."""


class GeneratedLines(Protocol):
    """A generated model that maps lines to lines. Sources are i64 [B, S], targets i64 [B, T]."""

    def score(self, source: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of each target token in nats, f32 [B, T]; 0 at padding."""

    def encode(self, source: Tensor) -> State:
        """Returns the state of the decoder before the first target token."""

    def extend(self, ids: Tensor, start: Tensor, state: State) -> Tensor:
        """Appends `ids` (i64 [B, 1]) at position `start` (i64 []). Returns the logits, f32 [B, vocabulary].

        `state` is updated in place.
        """


def text_model(module: Any) -> GeneratedText:
    """Casts a module to GeneratedText. The module must be generated from a text spec."""
    return cast(GeneratedText, module)


def paged_model(module: Any) -> GeneratedPages:
    """Casts a module to GeneratedPages. The module must be generated from a text spec with a paged cache."""
    return cast(GeneratedPages, module)


def line_model(module: Any) -> GeneratedLines:
    """Casts a module to GeneratedLines. The spec of the module must have the architecture `encoder_decoder`."""
    return cast(GeneratedLines, module)
