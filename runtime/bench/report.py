"""The report of a benchmark, as text tables and as JSON data."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from specc.runtime.bench import report_pairs, report_text
from specc.runtime.bench.ceilings import Ceilings
from specc.runtime.bench.decode_lines import Decoding
from specc.runtime.bench.decode_text import TextDecoding
from specc.runtime.bench.kernels import Row
from specc.runtime.bench.profile import ORDER, Profile
from specc.runtime.bench.step import UNFUSED, Build
from specc.runtime.bench.suite import Report
from specc.runtime.bench.variants import AGAINST, COMPILE, EAGER, GENERATED, LIBRARY, MAX_AUTOTUNE, MODES

WIDTH = 120
NAME = 35
SHORT = {GENERATED: "ours", MAX_AUTOTUNE: "max-at", COMPILE: "compile", EAGER: "eager"}
TOP = 40  # the maximum number of kernels of a profile in the data
NONE = "-"


def library_name(report: Report) -> str:
    """Returns the name of the library that computes Torch's matrix products on the device of the report."""
    return "cuBLAS" if report.machine.cuda != "none" else "torch"


def text(report: Report) -> str:
    """Returns the report as tables, without a trailing newline."""
    parts: list[list[str]] = [_head(report)]
    if report.kernels:
        parts.append(_rows(report, "kernels", report.kernels, True))
    if report.groups:
        parts.append(_rows(report, "groups", report.groups, False))
    if report.kernels or report.groups:
        parts.append(_legend(report))
    if report.builds:
        parts.append(_step(report))
        if any(build.profile is not None for build in report.builds.values()):
            parts.append(_profiles(report.builds))
    if report.updates is not None:
        parts.append(report_text.update_lines(report.updates))
    if report.table is not None:
        parts.append(report_pairs.table_lines(report.table, report.options.steps))
    if isinstance(report.decoding, TextDecoding):
        parts.append(report_text.decode_lines(report.decoding))
    elif report.decoding is not None:
        parts.append(report_pairs.decode_lines(report.decoding))
    if report.products:
        parts.append(report_pairs.product_lines(report.products))
    if report.left_out:
        parts.append([f"left out: {reason}" for reason in report.left_out.values()])
    return "\n\n".join("\n".join(part) for part in parts)


def _head(report: Report) -> list[str]:
    machine, peak, sizes = report.machine, report.ceilings, report.sizes
    rows = sizes["B"] * sizes["T"]
    nvcc = f" · nvcc {report.nvcc_seconds:.0f} s" if report.nvcc_seconds else ""
    return [
        report.options.command,
        " · ".join((machine.gpu, *machine.versions, report.date)),
        f"{report.options.spec.name} for {report.options.target}: a micro-batch of {sizes['B']} x {sizes['T']} = "
        f"{rows:,} rows, {peak.dtype} · {report.seconds:.0f} s in all{nvcc}",
        f"ceilings: GEMM of {peak.gemm_size}^3 {peak.flops_per_second / 1e12:,.4g} TFLOP/s "
        f"(±{peak.gemm.spread:.1%}) · copy {peak.bytes_per_second / 1e9:,.4g} GB/s (±{peak.copy.spread:.1%}) "
        f"· read {peak.read_bytes_per_second / 1e9:,.4g} GB/s (±{peak.read.spread:.1%})",
    ]


def _rows(report: Report, title: str, rows: Sequence[Row], with_library: bool) -> list[str]:
    last = library_name(report) if with_library else ""
    heads = [*(SHORT[name] for name in AGAINST), "ours", *(SHORT[name] for name in AGAINST), last]
    lines = [
        " " * NAME + f"{'ours as a share of':>24}{'ms':>8}",
        f"{title:<{NAME}}" + "".join(f"{head:>8}" for head in heads) + f"{'floor':>8}{'of it':>7}{'±':>6}",
    ]
    for row in rows:
        floor = report.ceilings.floor_ms(row.work)
        ratios = [row.ratio(name) for name in AGAINST]
        times = [row.times.get(name) for name in (GENERATED, *AGAINST, *((LIBRARY,) if with_library else ()))]
        cells = [NONE if ratio is None else f"{ratio:.3f}" for ratio in ratios]
        cells += [NONE if measured is None else _ms(measured.ms) for measured in times]
        cells += [] if with_library else [""]
        spread = max(measured.spread for measured in row.times.values())
        name = row.name if len(row.name) < NAME else f"{row.name}\n"
        line = f"{name:<{NAME}}" if len(row.name) < NAME else name + " " * NAME
        line += "".join(f"{cell:>8}" for cell in cells)
        lines += (line + f"{_ms(floor):>8}{floor / row.time.ms:>7.0%}{_spread(spread):>6}").split("\n")
        lines += _joined(_details(report, row))
    return lines


def _joined(words: Sequence[str]) -> list[str]:
    lines = [f"  {words[0]}"]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 > WIDTH:
            lines.append(f"  {word}")
        else:
            lines[-1] += f" · {word}"
    return lines


def _details(report: Report, row: Row) -> list[str]:
    words = [f"{row.kernel} ({row.language})" if row.language else row.kernel]
    words += [row.tile] if row.tile else []
    bound = report.ceilings.bound(row.work)
    words.append(f"{row.work.flops / 1e9:,.4g} GFLOP, {row.work.bytes / 1e6:,.4g} MB, {bound} bind")
    if row.accuracy is not None:
        words.append(f"error {row.accuracy.generated:.1e}, eager {row.accuracy.eager:.1e}")
    words += [f"{SHORT[name]} failed: {reason}" for name, reason in row.failed.items()]
    return words


def _legend(report: Report) -> list[str]:
    mode = MODES[MAX_AUTOTUNE]
    return [
        "Times are medians. floor: the minimum time of the bytes or operations at the ceilings above. of it: the floor",
        "divided by our time. Bytes are compared with the copy, or with the read if at most 1/16 of them is written.",
        f"±: the largest difference between two passes in the row. max-at: torch.compile, {mode}.",
        f"{library_name(report)}: products only. error: |output - exact| / |exact| of the worst output, by float64.",
    ]


def _ms(ms: float) -> str:
    return f"{ms:.4f}" if ms < 0.1 else f"{ms:.3f}" if ms < 100 else f"{ms:.1f}"


def _spread(spread: float) -> str:
    return f"{spread:.1%}" if spread < 1 else ">100%"


def _step(report: Report) -> list[str]:
    heads = ("of fuse:[]", "ms", "±", "tokens/s", "TFLOP/s", "peak GB", "start s", "compile s", "loss")
    build = next(iter(report.builds.values()))
    spec = report.options.spec
    count = spec.train.rows(report.sizes["T"]) // report.sizes["B"]
    title = f"step of {build.tokens:,} tokens"
    lines = [f"{title:<{NAME - 5}}" + "".join(f"{head:>10}" for head in heads)]
    for name, build in report.builds.items():
        memory = NONE if build.peak_bytes is None else f"{build.peak_bytes / 1e9:.1f}"
        cells = (
            f"{_ratio(report, build):.3f}",
            f"{build.step.ms:.1f}",
            _spread(build.step.spread),
            f"{build.tokens_per_second:,.0f}",
            f"{build.model_flops_per_second / 1e12:.3g}",
            memory,
            f"{build.start_seconds:.1f}",
            f"{build.compile_seconds:.1f}",
            f"{build.loss:.3f}",
        )
        lines.append(f"{name:<{NAME - 5}}" + "".join(f"{cell:>10}" for cell in cells))
    lines += [
        f"Medians of {build.steps} steps of {count} micro-batches, one build after the other. Pads do not count.",
        "TFLOP/s: three times the operations of the forward pass. start: from the spec to the end of the warm-up,",
        "without nvcc. compile: start without the time of normal steps.",
    ]
    return lines


def _profiles(builds: Mapping[str, Build]) -> list[str]:
    profiles = {name: build.profile for name, build in builds.items() if build.profile is not None}
    heads = "".join(f"{f'{name}: ms':>14}{'share':>7}{'calls':>7}" for name in profiles)
    lines = [f"{'where a step goes':<18}{heads}  largest"]
    first = next(iter(profiles.values()))
    for kind in ORDER:
        if not any(kind in profile.classes for profile in profiles.values()):
            continue
        totals = [
            (profile.classes.get(kind, {"ms": 0.0, "calls": 0.0}), profile.wall_ms) for profile in profiles.values()
        ]
        line = f"{kind:<18}" + "".join(
            f"{total['ms']:>14.2f}{total['ms'] / wall:>7.1%}{total['calls']:>7.0f}" for total, wall in totals
        )
        largest = next((kernel.name for kernel in first.kernels if kernel.kind == kind), "")
        lines.append(f"{line}  {largest}"[:WIDTH].rstrip())
    ends = {"idle": [p.idle_ms for p in profiles.values()], "wall clock": [p.wall_ms for p in profiles.values()]}
    for name, values in ends.items():
        shares = [ms / wall for ms, wall in zip(values, ends["wall clock"], strict=True)]
        pairs = zip(values, shares, strict=True)
        lines.append(f"{name:<18}" + "".join(f"{ms:>14.2f}{share:>7.1%}{'':>7}" for ms, share in pairs).rstrip())
    lines += [
        "Times in ms per step. optimizer: all kernels of `step` of an optimizer, including products, and the foreach",
        "kernels of accumulation, clipping and casts. fused: the generated kernels. idle: no kernel runs.",
    ]
    return lines


def data(report: Report) -> dict[str, Any]:
    """Returns the report as data for one JSON object. Times are in ms. Values that were not measured are null."""
    options, decoding = report.options, report.decoding
    return {
        "spec": options.spec.name,
        "title": report.title,
        "target": options.target,
        "command": options.command,
        "machine": report.machine.model_dump(),
        "python": platform.python_version(),
        "date": report.date,
        "seconds": report.seconds,
        "nvcc_seconds": report.nvcc_seconds,
        "sizes": dict(report.sizes),
        "ceilings": _data(report.ceilings),
        "kernels": [_row_data(report.ceilings, row) for row in report.kernels],
        "groups": [_row_data(report.ceilings, row) for row in report.groups],
        "step": {name: {**_data(build), "ratio": _ratio(report, build)} for name, build in report.builds.items()}
        or None,
        "optimizer": None
        if (updates := report.updates) is None
        else {
            "step": _data(updates.step),
            "rows": [
                {**_data(row), "of_step": updates.of_step(row), "over_fused": updates.over_fused(row)}
                for row in updates.rows
            ],
        },
        "table": _data(report.table),
        "decode": {
            **_data(decoding),
            "rows": [{**_data(row), "over_uncached": decoding.over_uncached(row)} for row in decoding.rows],
        }
        if isinstance(decoding, Decoding)
        else _data(decoding),
        "int8": _data(report.products),
        "left_out": dict(report.left_out),
    }


def _data(value: Any) -> Any:
    if is_dataclass(value):
        properties = (name for name, member in vars(type(value)).items() if isinstance(member, property))
        names = (*(field.name for field in fields(value)), *properties)
        data = {name: _data(getattr(value, name)) for name in names}
        # lists only the largest kernels, but the sums per class include all kernels
        return {**data, "kernels": data["kernels"][:TOP]} if isinstance(value, Profile) else data
    if isinstance(value, Mapping):
        return {key: _data(entry) for key, entry in value.items()}
    return [_data(entry) for entry in value] if isinstance(value, tuple) else value


def _row_data(ceilings: Ceilings, row: Row) -> dict[str, Any]:
    values = _data(row)
    values |= values.pop("work")
    floor = ceilings.floor_ms(row.work)
    return {
        **values,
        "floor_ms": floor,
        "bound": ceilings.bound(row.work),
        "share_of_floor": floor / row.time.ms,
        "ratio": {name: row.ratio(name) for name in AGAINST},
    }


def _ratio(report: Report, build: Build) -> float:
    return build.step.ms / report.builds[UNFUSED].step.ms
