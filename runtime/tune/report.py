"""The report of a search, as text and as data."""

from collections.abc import Iterator, Sequence
from typing import Any

from specc.compiler.plan.lock import tile_data
from specc.runtime.tune.search import Found


def data(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Returns every node with all its candidates, as JSON data."""
    return [
        {
            "node": one.label,
            "symbol": one.symbol,
            "rows": one.rows,
            "floor_ms": one.floor_ms,
            "candidates": [
                {
                    "kernel": outcome.candidate.kernel.name,
                    "tile": tile_data(outcome.candidate.kernel),
                    "ms": outcome.ms,
                    "reason": outcome.reason or None,
                }
                for outcome in one.outcomes
            ],
        }
        for one in found
    ]


def text(found: Sequence[Found]) -> str:
    """Returns a table per node: times, then the rejected candidates with reasons."""
    return "\n\n".join("\n".join(_lines(one)) for one in found)


def _lines(one: Found) -> Iterator[str]:
    yield f"{one.label} ({one.symbol}), {one.rows:,} rows, floor {one.floor_ms:.4f} ms" if one.rows else one.label
    for outcome in one.outcomes:
        if outcome.ms is not None:
            yield f"  {outcome.ms:8.4f} ms  {one.floor_ms / outcome.ms:4.0%} of floor  {outcome.candidate.label}"
    for outcome in one.outcomes:
        if outcome.ms is None:
            yield f"  {outcome.candidate.label}: {outcome.reason}"
