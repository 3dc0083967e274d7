"""The metrics of specs by name: how to read them from logs, how to show them, and whether lower is better."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of model quality, with its unit.

    Attributes:
        name: the field of the metric in a log, such as `bpb`.
        label: the name of the metric with the unit, for tables and axes.
        better: `lower` or `higher`.
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
        """Returns the metric from the `facts` of a score.

        The `nats` of a text are a sum, and are divided by the number of tokens. For lines, `facts` has one entry per
        set of lines, and the first entry is used.
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
    """Returns the metric that the validations of several runs have in common.

    Args:
        spec_metric: `eval.metric` of the spec.
        scores: the validation of each run; None for a run without a validation.

    Returns:
        The first metric for `spec_metric` that all validations have; `NATS` if there is none. For text, `BITS` comes
            before `PIECE_BITS`.
    """
    known = [score for score in scores if score is not None]
    choices = (*_OF_SPECS[spec_metric], NATS)
    return next((metric for metric in choices if all(metric.value(score) is not None for score in known)), NATS)
