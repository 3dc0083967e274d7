"""Formats a comparison as text."""

import json
from collections.abc import Iterator
from typing import Any

from specc.runtime.compare.comparison import LEVEL, SHOWN, THRESHOLD, Comparison, PairResult
from specc.runtime.compare.evaluations import evaluation_lines
from specc.runtime.metrics.names import Metric
from specc.runtime.tables import aligned


def report(comparison: Comparison) -> list[str]:
    """Returns a comparison as lines of text: tables of the groups, the pairs and the recorded evaluations, followed by
    the notes.
    """
    metric = comparison.metric
    rows = [["group", "n", f"mean {metric.label}", "std", "nats/token", "seconds", "tokens/s", "seeds"]]
    for group in comparison.groups:
        several = group.summary.n > 1
        rate = group.tokens_per_second
        rows.append(
            [
                group.name,
                str(group.summary.n),
                metric.show(group.summary.mean),
                metric.show(group.summary.std) if several else "-",
                f"{group.nats.mean:.4f}" if group.nats is not None else "-",
                f"{group.seconds:,.1f}",
                f"{rate:,.0f}" if rate is not None else "-",
                " ".join(map(str, group.seeds)),
            ]
        )
    lines = [*aligned(rows), "std: sample standard deviation over the runs"]
    for pair in comparison.pairs:
        lines += ["", *_pair(pair, metric)]
    if comparison.pairs and any(pair.nats is not None for pair in comparison.pairs):
        lines += ["", _meaning()]
    lines += evaluation_lines(comparison.evaluations)
    if comparison.notes:
        lines += ["", *(f"note: {note}" for note in comparison.notes)]
    return lines


def _pair(pair: PairResult, metric: Metric) -> Iterator[str]:
    yield f"{pair.first} -> {pair.second}"
    test = pair.test
    if test is None:
        yield f"  no test: {pair.reason}"
    else:
        word = "no change" if test.difference == 0 else _word(test.difference, metric)
        yield f"  difference {metric.show(test.difference, sign=True)} {metric.label} ({word}), 95 % interval " + (
            f"{metric.show(test.low, sign=True)} to {metric.show(test.high, sign=True)}"
        )
        yield f"  Welch's t {test.t:.3f}, df {test.df:.2f}, two-sided p {probability(test.p)}"
    if pair.nats is not None and pair.improves_by_threshold is not None:
        passes = pair.nats.difference <= -THRESHOLD and pair.improves_by_threshold < LEVEL
        yield f"  threshold {'met' if passes else 'not met'}: {pair.nats.difference:+.4f} nats per token, " + (
            f"one-sided p {probability(pair.improves_by_threshold)} of {THRESHOLD:g} nats less"
        )
    changes = list(pair.spec.items())
    for path, (old, new) in changes[:SHOWN]:
        yield f"  {path}: {shown(old)} -> {shown(new)}"
    if len(changes) > SHOWN:
        yield f"  and {len(changes) - SHOWN} more differences of the specs"
    if not changes:
        yield "  the specs are equal"


def _word(difference: float, metric: Metric) -> str:
    return "better" if (difference < 0) == (metric.better == "lower") else "worse"


def _meaning() -> str:
    return (
        f"threshold: a record of openai/parameter-golf must have a loss at least {THRESHOLD:g} nats per token lower, "
        f"and show that with p < {LEVEL:g}: here, by the one-sided Welch test of a difference beyond -{THRESHOLD:g}"
    )


def probability(p: float) -> str:
    return f"{p:.3g}" if p >= 1e-4 else f"{p:.2e}"


def shown(value: Any) -> str:
    """Returns a value of a spec as one line of at most 60 characters. Longer values are truncated."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
