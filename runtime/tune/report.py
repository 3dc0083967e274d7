"""The report of a search, as text and as data."""

from collections.abc import Iterator, Sequence
from typing import Any

from specc.compiler.plan.lock import tile_data
from specc.runtime.tune.search import NodeResult


def data(results: Sequence[NodeResult]) -> list[dict[str, Any]]:
    """Returns the results of every node and its candidates, as JSON data."""
    return [
        {
            "node": result.label,
            "symbol": result.symbol,
            "rows": result.rows,
            "floor_ms": result.floor_ms,
            "candidates": [
                {
                    "kernel": candidate.kernel.name,
                    "tile": tile_data(candidate.kernel),
                    "ms": result.times.get(candidate),
                    "reason": result.reasons.get(candidate),
                }
                for candidate in (*result.times, *result.reasons)
            ],
        }
        for result in results
    ]


def text(results: Sequence[NodeResult]) -> str:
    """Returns a table per node, with the times of usable candidates and the reasons for rejected candidates."""
    return "\n\n".join("\n".join(_lines(result)) for result in results)


def _lines(result: NodeResult) -> Iterator[str]:
    title = f"{result.label} ({result.symbol}), {result.rows:,} rows, floor {result.floor_ms:.4f} ms"
    yield title if result.rows else result.label
    for candidate, ms in result.times.items():
        yield f"  {ms:8.4f} ms  {result.floor_ms / ms:4.0%} of floor  {candidate.label}"
    for candidate, reason in result.reasons.items():
        yield f"  {candidate.label}: {reason}"
