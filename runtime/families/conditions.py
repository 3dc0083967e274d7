"""Finds a short expression over `layer` that is true exactly for given layers."""

from collections.abc import Iterable, Iterator

from specc.runtime.families.config import ConfigError

LONGEST = 500  # the most characters of a condition


def where(layers: Iterable[int], count: int) -> str:
    """Returns a short expression that is true exactly for `layers`, such as `layer % 2 == 0`.

    Args:
        layers: the indices of the layers; at least one index.
        count: the number of layers of the model.

    Raises:
        ConfigError: if the expression is longer than a spec allows.
    """
    chosen = frozenset(layers)
    for text, holds in _candidates(count):
        if holds == chosen:
            return text
    text = " or ".join(_runs(sorted(chosen)))
    if len(text) > LONGEST:
        raise ConfigError(
            f"the layers {sorted(chosen)[:12]}... differ, but not in a regular pattern",
            "write the spec by hand, with a condition on `layer` that is true for these layers",
        )
    return text


def _candidates(count: int) -> Iterator[tuple[str, frozenset[int]]]:
    every = range(count)
    for k in range(1, count):
        yield f"layer < {k}", frozenset(range(k))
        yield f"layer >= {k}", frozenset(range(k, count))
        yield f"layer == {k}", frozenset((k,))
    yield "layer == 0", frozenset((0,))
    yield "layer < layers", frozenset(every)
    for n in range(2, count // 2 + 2):
        for r in range(n):
            held = frozenset(i for i in every if i % n == r)
            yield f"layer % {n} == {r}", held
            yield f"layer % {n} != {r}", frozenset(every) - held
            yield f"layer % {n} == {r} or layer == layers - 1", held | {count - 1}


def _runs(layers: list[int]) -> Iterator[str]:
    first = last = layers[0]
    for layer in [*layers[1:], -1]:
        if layer == last + 1:
            last = layer
            continue
        yield f"layer == {first}" if first == last else f"{first} <= layer and layer <= {last}"
        first = last = layer
