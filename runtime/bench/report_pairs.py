"""Report tables for models that map lines to lines: training, decoding, and int8 products."""

from collections.abc import Mapping, Sequence
from typing import Any

from specc.runtime.bench.decode_lines import Decoding
from specc.runtime.bench.products import OURS, ROWS, THEIRS, ProductRow
from specc.runtime.bench.table import Table

NONE = "-"
COLUMNS = ("steps/s", "samples/s", "tokens/s")


def table_lines(table: Table, steps: int) -> list[str]:
    """Returns the training table as lines of text, 120 columns wide. `steps` is the number of training steps."""
    groups = "".join(f"{name:>30}" for name in ("train", "validation", "overall"))
    heads = "".join(f"{head:>{width}}" for _ in range(3) for head, width in zip(COLUMNS, (9, 10, 11), strict=True))
    lines = [f"{'':<22}{groups}".rstrip(), f"{f'table, {steps} steps':<22}{heads}{'compile':>8}"]
    for row in table.rows:
        cells = "".join(
            f"{_rate(part.steps_per_second):>9}{part.samples_per_second:>10,.0f}{part.tokens_per_second:>11,.0f}"
            for part in (row.train, row.validation, row.overall)
        )
        lines.append(f"{f'{row.name}, {row.gpus}':<22}{cells}{f'{row.compile_seconds:.0f} s':>8}")
    lines += [f"{name:<22}not measured: {reason}" for name, reason in table.missing.items()]
    batch = {row.train.samples // row.train.steps for row in table.rows}
    size = next(iter(batch), 0)
    lines += [
        f"After a name: the number of processes, one per GPU. A step has {size:,} samples in total. train: updates as",
        "in `specc train`, with teacher forcing. validation: greedy decoding of held-out lines, from text to text, and",
        "exact match. Validation steps per training step are as in an epoch. overall: training and validation steps.",
        "tokens: of sources and targets, without pads. A rate is total work / total time, without compilation.",
        "Without a cache, the decoder runs again over all previous tokens for each token; the encoder runs once.",
        "Rows with the same number of processes share one training measurement.",
    ]
    if (gain := table.cached_over_uncached) is not None:
        lines.append(f"With the cache, one process validates {gain:.2f} times as fast as without it.")
    for row in table.rows:
        lines.append(f"{row.name}: {row.exact_match:.2%} of {row.validation.samples:,} lines exact after these steps.")
    return lines


def _rate(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3f}"


def decode_lines(decoding: Decoding) -> list[str]:
    first = next(iter(decoding.rows), None)
    count = first.lines if first is not None else 0
    heads = ("lines/s", "±", "seconds", "of uncached", "build s", "first s", "exact", "agree")
    lines = [f"{f'decode of {count:,} lines':<24}" + "".join(f"{head:>12}" for head in heads)]
    for row in decoding.rows:
        gain = decoding.over_uncached(row)
        cells = (
            f"{row.lines_per_second:,.0f}",
            f"{row.spread:.1%}",
            f"{row.ms / 1e3:.3f}",
            NONE if gain is None else f"{gain:.2f}x",
            f"{row.building:.1f}",
            f"{row.first:.1f}",
            f"{row.exact_match:.2%}",
            NONE if row.agreeing is None else f"{row.agreeing:.2%}",
        )
        lines.append(f"{row.name:<24}" + "".join(f"{cell:>12}" for cell in cells))
    lines += [f"not measured: {reason}" for reason in decoding.missing.values()]
    batch = first.batch if first is not None else 0
    lines += [
        f"From text to text in this process, {batch:,} lines at once (eval.batch), two passes after an untimed pass.",
        "build: from the spec to the module, with kernel compilation. first: the additional time of the untimed pass,",
        "which captures graphs. of uncached: lines/s divided by those without a cache. agree: equal lines.",
    ]
    if not decoding.trained:
        lines.append("The weights are initial (--weights selects others), so few lines end before the last position.")
    return lines


def product_lines(rows: Sequence[ProductRow]) -> list[str]:
    """Returns three lines of text for each int8 product: the times of the generated kernel, the times of the library,
    and the ratios of the times.
    """
    lines = [f"{'int8 products, us; rows M':<50}" + "".join(f"{m:>10,}" for m in ROWS)]
    for row in rows:
        lines.append(f"{row.name} ({row.language})")
        lines.append(f"  {f'{row.kernel}':<48}" + _cells(row.times, OURS))
        lines.append(f"  {'torch._int_mm + compiled epilogue':<48}" + _cells(row.times, THEIRS))
        lines.append(
            f"  {'ratio':<48}" + "".join(f"{NONE if r is None else f'{r:.3f}':>10}" for r in row.ratio.values())
        )
    refused = {m: reason for row in rows for m, reason in row.refused.items()}
    lines += [f"torch._int_mm does not accept M = {m:,}: {reason}" for m, reason in sorted(refused.items())]
    lines.append(
        "Medians of calls replayed as one CUDA graph on a GPU, operands in the cache. Values were compared first."
    )
    return lines


def _cells(times: Mapping[int, Mapping[str, Any]], name: str) -> str:
    cells = (f"{1e3 * times[m][name].ms:.2f}" if name in times[m] else NONE for m in ROWS)
    return "".join(f"{cell:>10}" for cell in cells)
