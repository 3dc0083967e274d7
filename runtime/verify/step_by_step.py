"""Computes the scores of sequences token by token, with a cache."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from specc.compiler.characters import PAD
from specc.compiler.programs import reference
from specc.compiler.programs.programs import Programs
from specc.runtime.dtypes import DTYPES
from specc.runtime.train.sources.feed import shifted

STEPS = 48  # the number of tokens at the end of a text that are decoded one by one


class ExactModel:
    """A text model that runs the reference implementation of each op, in the precision of the weights.

    Args:
        programs: the unfused programs of a text model.
        weights: the parameters, by name.
    """

    def __init__(self, programs: Programs, weights: Mapping[str, Tensor]) -> None:
        self._programs, self._weights = programs, weights
        self._program = next(graph for graph in programs.programs if graph.name in STEPPED)
        self._types = {name: type for name, type in self._program.inputs if name.startswith("cache.")}

    def new_cache(self, rows: int, positions: int = 0) -> list[tuple[Tensor, ...]]:
        some = next(iter(self._weights.values()))
        sizes = {"B": rows, "S": positions, "P": rows}
        dtypes = {name: some.dtype if type.floating else DTYPES[type.dtype] for name, type in self._types.items()}
        return [tuple(some.new_zeros(t.extents(sizes), dtype=dtypes[name]) for name, t in self._types.items())]

    def prefill(self, *inputs: Any) -> Tensor:
        *given, (cache,) = inputs
        names = [name for name, _ in self._program.inputs if name not in self._types]
        values = dict(zip((*names, *self._types), (*given, *cache), strict=True))
        outputs = reference.run(self._programs, self._program.name, values, self._weights)
        for name, tensor in zip(self._types, cache, strict=True):
            tensor.copy_(outputs[name])
        return outputs["logits"]

    decode = step = prefill


def _stepped_text(model: Any, tokens: int, least: int, ids: Tensor, targets: Tensor) -> tuple[list[int], Tensor]:
    """Scores a text of `tokens` tokens with a cache. The first tokens are scored in chunks, and the last tokens one by
    one.

    The first chunk has at least `least` tokens. Returns the positions at which the model computed logits, and the
    losses at these positions in nats, [B, positions].
    """
    cache = model.new_cache(len(ids), tokens)
    last = max(tokens // 2, tokens - STEPS, 1)
    ends = sorted({max(tokens // 4, least), max(tokens // 2, least), *range(last, tokens + 1)})
    logits, start = [], 0
    for end in ends:
        logits.append(model.prefill(ids[:, start:end], torch.tensor(start, device=ids.device), cache))
        start = end
    read = [end - 1 for end in ends]
    return read, _nats(logits, targets[:, read])


def _stepped_pages(model: Any, tokens: int, least: int, ids: Tensor, targets: Tensor) -> tuple[list[int], Tensor]:
    """Scores texts of `tokens` tokens with a paged cache. Each row uses its pages in reverse order.

    For each row, the model first reads a chunk of at least `least` tokens, and then the other tokens one by one.
    Returns the positions at which the model computed logits, and the losses at these positions in nats, [B, positions].
    """
    page = next(tensor.shape[1] for layer in model.new_cache(1) for tensor in layer)
    each = -(-tokens // page)
    cache = model.new_cache(len(ids) * each)
    table = torch.arange(len(ids) * each - 1, -1, -1, device=ids.device).view(len(ids), each)
    last = max(tokens // 2, tokens - STEPS, 1)
    ends = sorted({max(tokens // 2, least), *range(last, tokens + 1)})
    starts = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    first = [model.step(ids[r : r + 1, : ends[0]], starts[:1], table[r : r + 1], cache) for r in range(len(ids))]
    logits = [torch.cat(first)]
    for start, end in itertools.pairwise(ends):
        logits.append(model.step(ids[:, start:end], starts + start, table, cache))
    read = [end - 1 for end in ends]
    return read, _nats(logits, targets[:, read])


def _stepped_pairs(model: Any, tokens: int, least: int, source: Tensor, target: Tensor) -> tuple[list[int], Tensor]:
    """Scores a target line token by token. Returns all positions, and the loss at each position in nats, [B, T]."""
    state, inputs = model.encode(source), shifted(target)
    starts = (torch.tensor(t, device=source.device) for t in range(tokens))
    logits = [model.extend(inputs[:, t : t + 1], start, state) for t, start in enumerate(starts)]
    return list(range(tokens)), _nats(logits, target) * (target != PAD)


def _nats(logits: list[Tensor], targets: Tensor) -> Tensor:
    return -torch.stack(logits, 1).log_softmax(-1).gather(-1, targets[..., None])[..., 0]


# The functions that score step by step, by the name of the program that extends a sequence.
STEPPED: Mapping[str, Callable[..., tuple[list[int], Tensor]]] = {
    "prefill": _stepped_text,
    "step": _stepped_pages,
    "extend": _stepped_pairs,
}
