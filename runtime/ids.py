"""Holds token ids to a vocabulary: a GPU would read beyond the embedding, or lose its context."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def require_ids(name: str, ids: Tensor, vocabulary: int) -> None:
    """Raises ValueError, naming the first that is none, unless `ids` are whole numbers from 0 to `vocabulary` - 1.
    Waits for the device."""
    if ids.is_floating_point():
        raise ValueError(f"{name} is {ids.dtype}; token ids are torch.int64")
    wrong = ((ids < 0) | (ids >= vocabulary)).nonzero()
    if len(wrong):
        place = wrong[0].tolist()
        raise ValueError(f"{name}{place} is {int(ids[tuple(place)])}; the vocabulary has ids 0 to {vocabulary - 1}")


def checked_score(model: nn.Module, names: tuple[str, ...], vocabulary: int) -> Callable[..., Tensor]:
    """`model.score`, which refuses inputs, `names` in order, that hold no ids of the vocabulary. It keeps no model
    alive."""
    held = weakref.ref(model)

    def score(*given: Tensor, **named: Tensor) -> Tensor:
        own: Any = held()
        for name, ids in (*zip(names, given, strict=False), *named.items()):
            require_ids(name, ids, vocabulary)
        found: Tensor = type(own).score(own, *given, **named)
        return found

    return score
