"""The parts of a report for models of pairs: the training table, decoding, int8 products; as tables and as data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specc.runtime.bench.decode import Decoding
from specc.runtime.bench.products import OURS, ROWS, THEIRS, ProductRow
from specc.runtime.bench.table import Table, TableRow, Totals

NONE = "-"
COLUMNS = ("steps/s", "samples/s", "tokens/s")


def table_lines(table: Table, steps: int) -> list[str]:
    """Returns the training table as lines, 120 columns wide."""
    groups = "".join(f"{name:>30}" for name in ("train", "validation", "overall"))
    heads = "".join(f"{head:>{width}}" for _ in range(3) for head, width in zip(COLUMNS, (9, 10, 11), strict=True))
    lines = [f"{'':<22}{groups}".rstrip(), f"{f'table, {steps} steps':<22}{heads}{'compile':>8}"]
    for row in table.rows:
        cells = "".join(
            f"{_rate(a):>9}{b:>10,.0f}{c:>11,.0f}"
            for a, b, c in (one.rates for one in (row.train, row.validation, row.overall))
        )
        lines.append(f"{f'{row.name}, {row.gpus}':<22}{cells}{f'{row.compiling:.0f} s':>8}")
    lines += [f"{name:<22}not measured: {reason}" for name, reason in table.missing.items()]
    batch = {row.train.samples // row.train.steps for row in table.rows}
    size = next(iter(batch), 0)
    lines += [
        f"Behind a name: processes, one a GPU. A step has {size:,} samples of all of them together. train: updates as",
        "`specc train` makes them, with teacher forcing. validation: greedy decoding of held-out lines from text to",
        "text, and exact match; as many steps to a training step as an epoch has. overall: all steps over all seconds.",
        "tokens: of sources and targets, no pads. Rates are totals over totals, compile stands apart. Without a cache",
        "a decoder runs again over all that it has written, for each token; the encoder runs once a line in both.",
        "Rows of as many processes share their training, which decodes nothing.",
    ]
    if (gain := table.cached_gain) is not None:
        lines.append(f"With the cache one process validates {gain:.2f} times as fast as without.")
    for row in table.rows:
        share = row.exact / row.validation.samples
        lines.append(f"{row.name}: {share:.2%} of {row.validation.samples:,} lines exact after these steps.")
    return lines


def _rate(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3f}"


def table_data(table: Table) -> dict[str, Any]:
    return {
        "rows": [_table_row(row) for row in table.rows],
        "cached_over_uncached": table.cached_gain,
        "missing": dict(table.missing),
    }


def _table_row(row: TableRow) -> dict[str, Any]:
    parts = {"train": row.train, "validation": row.validation, "overall": row.overall}
    return {
        "name": row.name,
        "gpus": row.gpus,
        "cache": row.cache,
        **{name: _totals(part) for name, part in parts.items()},
        "compile_seconds": row.compiling,
        "exact": row.exact,
        "exact_match": row.exact / row.validation.samples,
    }


def _totals(one: Totals) -> dict[str, float]:
    names = ("steps_per_second", "samples_per_second", "tokens_per_second")
    return {**asdict(one), **dict(zip(names, one.rates, strict=True))}


def decode_lines(found: Decoding) -> list[str]:
    """Returns the decoding table as lines, one per decoder."""
    first = next(iter(found.rows), None)
    count = first.lines if first is not None else 0
    heads = ("lines/s", "±", "seconds", "of uncached", "build s", "first s", "exact", "agree")
    lines = [f"{f'decode of {count:,} lines':<24}" + "".join(f"{head:>12}" for head in heads)]
    for row in found.rows:
        gain = found.gain(row)
        cells = (
            f"{row.lines_per_second:,.0f}",
            f"{row.passes.spread:.1%}",
            f"{row.passes.ms / 1e3:.3f}",
            NONE if gain is None else f"{gain:.2f}x",
            f"{row.building:.1f}",
            f"{row.first:.1f}",
            f"{row.exact / row.lines:.2%}",
            NONE if row.agreeing is None else f"{row.agreeing:.2%}",
        )
        lines.append(f"{row.name:<24}" + "".join(f"{cell:>12}" for cell in cells))
    lines += [f"not measured: {reason}" for reason in found.missing.values()]
    batch = first.batch if first is not None else 0
    lines += [
        f"From text to text in this process, {batch:,} lines at once (eval.batch); two passes after a first one.",
        "build: from the spec to the module, kernels compiled; first: what the first pass took beyond, which captures",
        "graphs; of uncached: lines/s as a multiple; agree: lines that both give, but for rounding.",
    ]
    if not found.trained:
        lines.append(
            "The weights are as training starts (--weights names others): few lines end before the last position."
        )
    return lines


def decode_data(found: Decoding) -> dict[str, Any]:
    rows = [
        {
            **{name: value for name, value in asdict(row).items() if name != "passes"},
            "ms": row.passes.ms,
            "spread": row.passes.spread,
            "lines_per_second": row.lines_per_second,
            "over_uncached": found.gain(row),
            "exact_match": row.exact / row.lines,
        }
        for row in found.rows
    ]
    return {"rows": rows, "trained": found.trained, "missing": dict(found.missing)}


def product_lines(rows: Sequence[ProductRow]) -> list[str]:
    """Returns three lines per product: our time, the library's, and their ratio, for each number of rows."""
    lines = [f"{'int8 products, us; rows M':<50}" + "".join(f"{m:>10,}" for m in ROWS)]
    for row in rows:
        lines.append(f"{row.name} ({row.language})")
        ratios = [row.ratio(m) for m in ROWS]
        lines.append(f"  {f'{row.kernel}':<48}" + _cells(row.times, OURS))
        lines.append(f"  {'torch._int_mm + compiled epilogue':<48}" + _cells(row.times, THEIRS))
        lines.append(f"  {'ratio':<48}" + "".join(f"{NONE if r is None else f'{r:.3f}':>10}" for r in ratios))
    refused = {m: reason for row in rows for m, reason in row.refused.items()}
    lines += [f"torch._int_mm refuses M = {m:,}: {reason}" for m, reason in sorted(refused.items())]
    lines.append(
        "Medians of calls replayed as one CUDA graph on a GPU, operands in the cache. Values were compared first."
    )
    return lines


def _cells(times: Mapping[int, Mapping[str, Any]], name: str) -> str:
    cells = (f"{1e3 * times[m][name].ms:.2f}" if name in times[m] else NONE for m in ROWS)
    return "".join(f"{cell:>10}" for cell in cells)


def product_data(row: ProductRow) -> dict[str, Any]:
    times = {
        str(m): {name: {"ms": one.ms, "spread": one.spread} for name, one in found.items()}
        for m, found in row.times.items()
    }
    return {
        "name": row.name,
        "kernel": row.kernel,
        "language": row.language,
        "n": row.n,
        "k": row.k,
        "makes": row.makes,
        "times": times,
        "ratio": {str(m): row.ratio(m) for m in row.times},
        "refused": {str(m): reason for m, reason in row.refused.items()},
    }
