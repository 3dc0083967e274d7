"""The load of each expert on each kind of document.

If the loads differ between kinds of documents, the experts specialize.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specc.runtime.metrics.expert_load import imbalance


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The load of the experts of a layer on one kind of document.

    Attributes:
        layer: the path of the layer, such as `blocks.1.moe`.
        kind: the kind of the documents.
        loads: the fraction of tokens that each expert receives. The fractions sum to 1.
        largest: the ratio of the largest load to the mean load.
        differs: the total variation distance, from 0 to 1, between `loads` and the mean loads over all kinds of
            documents. None if there is only one kind.
    """

    layer: str
    kind: str
    loads: tuple[float, ...]
    largest: float
    differs: float | None


def expert_loads_by_kind(measured: Mapping[str, Sequence[Mapping[str, Sequence[float]]]]) -> Iterator[ExpertLoad]:
    """Yields the load of the experts for each layer and each kind of document.

    Args:
        measured: the loads by kind of document. Each kind has one mapping per batch, from the path of a layer to the
            loads of its experts. All batches have the same size.
    """
    layers = dict.fromkeys(layer for batches in measured.values() for loads in batches for layer in loads)
    for layer in layers:
        by_kind = {kind: _mean([loads[layer] for loads in batches]) for kind, batches in measured.items()}
        center = _mean(list(by_kind.values()))
        for kind, loads in by_kind.items():
            distance = sum(abs(load - mean) for load, mean in zip(loads, center, strict=True)) / 2
            differs = distance if len(by_kind) > 1 else None
            yield ExpertLoad(layer, kind, loads, imbalance({layer: loads}), differs)


def _mean(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))
