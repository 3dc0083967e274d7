"""The metrics of specs, by name. A metric states its log field, its display format, and whether lower values are
better.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of model quality, with its unit.

    Attributes:
        name: the name of the log field that contains the metric, such as `bpb`.
        label: the name of the metric with the unit, for tables and axes.
        better: `lower` if a lower value is better, otherwise `higher`.
        digits: the number of decimals that are shown.
    """

    name: str
    label: str
    better: str
    digits: int = 4

    def value(self, values: Mapping[str, Any] | None) -> float | None:
        value = (values or {}).get(self.name)
        return None if value is None else float(value)

    def of_score(self, facts: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> float:
        """Returns the value of the metric from the fields of a score, as `specc eval` writes them.

        The field `nats` of a text is a sum, so that the method divides it by the number of tokens. For a model of
        lines, `facts` has one entry per set of lines. The method reads the first entry.
        """
        if not isinstance(facts, Mapping):
            return float(facts[0][self.name])
        return float(facts[self.name]) / (float(facts["tokens"]) if self.name == "nats" else 1.0)

    def show(self, value: float, sign: bool = False) -> str:
        return f"{value:+.{self.digits}f}" if sign else f"{value:.{self.digits}f}"


BITS = Metric("bpb", "bits per byte", "lower")
PIECE_BITS = Metric("bpb_pieces", "bits per piece byte", "lower")
EXACT = Metric("exact_match", "share of exact lines", "higher", 5)
NATS = Metric("nats", "nats per token", "lower")
_OF_SPECS: Mapping[str, Sequence[Metric]] = {"bits_per_byte": (BITS, PIECE_BITS), "exact_match": (EXACT,)}


def metric_of(spec_metric: str, scores: Sequence[Mapping[str, Any] | None]) -> Metric:
    """Returns a metric that the validations of all given runs contain.

    Args:
        spec_metric: the value of `eval.metric` in the spec: `bits_per_byte` or `exact_match`.
        scores: the validation of each run; None for a run without a validation.

    Returns:
        For `bits_per_byte`, the first of the metrics `BITS`, `PIECE_BITS` and `NATS` that all validations contain. For
        `exact_match`, the first of the metrics `EXACT` and `NATS` that all validations contain.
    """
    known = [score for score in scores if score is not None]
    choices = (*_OF_SPECS[spec_metric], NATS)
    return next((metric for metric in choices if all(metric.value(score) is not None for score in known)), NATS)
