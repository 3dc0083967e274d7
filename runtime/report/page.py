"""The page of a report: tables and charts of a run in one HTML file, without scripts.

All numbers are read from the files of the run. The template escapes every string.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from specc.compiler.changing_values import Schedule
from specc.runtime.metrics.expert_load import imbalance
from specc.runtime.report.charts import Series, cells, curves
from specc.runtime.run_facts import RunFacts
from specc.runtime.storage.records import Record, Records, is_number
from specc.runtime.storage.run_directory import readable
from specc.runtime.storage.samples import Samples

LIMIT = 2_000_000  # the maximum number of bytes of a page
ROWS = 400  # the maximum number of rows of a table; a longer table states the number of omitted rows
VALIDATED = [
    ("nats", "nats per token", 4),
    ("bpb", "bits per byte", 4),
    ("bpb_pieces", "bits per byte of pieces", 4),
    ("exact_match", "exact match, share", 5),
    ("token_accuracy", "token accuracy, share", 5),
    ("tokens", "tokens", 0),
    ("lines", "lines", 0),
    ("document_bytes", "document bytes", 0),
    ("piece_bytes", "token bytes", 0),
]  # for each field of a validation, its label and the number of digits
WEIGHTS = {"raw": "plain", "average": "averaged"}
WIDEST = 16  # the maximum number of experts of a layer in a map
_BLOCK = re.compile(r"(?:^|\.)(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart with its caption."""

    svg: Markup
    caption: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts.

    The columns from index `numbers` on contain numbers. `left_out` is the number of rows that the page omits.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: int = 1
    left_out: int = 0

    @classmethod
    def of(cls, head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 1) -> "Table":
        return cls(head, rows[:ROWS], numbers, max(len(rows) - ROWS, 0))


def report_page(facts: RunFacts, samples: Samples | None, no_samples: str = "") -> str:
    """Returns the page of a run.

    Args:
        facts: the properties and results of the run.
        samples: the samples to show; None for no samples.
        no_samples: the reason why there are no samples.
    """
    curves_of_run = [picture for picture in _training(facts) if picture is not None]
    loads = facts.records.last("experts").get("loads")
    context = {
        "name": facts.run.spec.name,
        "title": facts.run.spec.model.title,
        "tiles": list(_tiles(facts)),
        "problems": facts.problems,
        "training": list(facts.training()),
        "commands": facts.commands(),
        "parameters": _parameters(facts),
        "spec": readable(facts.run.spec),
        "curves": curves_of_run,
        "missing_curves": _missing(facts),
        "validations": _validations(facts),
        "scores": _scores(facts),
        "quantization": facts.quantization is not None,
        "stale": facts.quantized_step is not None and facts.quantized_step != facts.step,
        "sizes": list(_sizes(facts)),
        "quantized": _quantized(facts),
        "quantized_pictures": list(_quantized_pictures(facts)),
        "has_experts": "moe" in json.dumps(facts.run.spec.model.model_dump(mode="json")),
        "experts": list(_experts(facts)) if isinstance(loads, Mapping) and loads else [],
        "samples": samples,
        "no_samples": no_samples,
    }
    return _template().render(context)


@cache
def _template() -> jinja2.Template:
    text = files("specc.runtime.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text)


def _tiles(facts: RunFacts) -> Iterator[tuple[str, str]]:
    yield "parameters", f"{facts.count:,}"
    if facts.step is not None:
        yield "steps", f"{facts.step:,}"
    seen = set()
    for score in facts.scores():
        if score.metric.startswith(("bits per byte", "exact match")) and score.model not in seen:
            seen.add(score.model)
            over = score.over.partition(", ")[0]
            yield f"{score.metric}, {score.model}{f', over {over}' if over else ''}", f"{score.value:.4f}"
    if is_number(size := (facts.quantization or {}).get("artifact_bytes")):
        yield "artifact, bytes", f"{size:,}"


def _training(facts: RunFacts) -> Iterator[Picture | None]:
    records = facts.records
    raw, averaged = ({"weights": name} for name in ("raw", "average"))
    several = len(records.series("validation", "nats", **averaged)) > 0
    of_raw = "validation, plain weights" if several else "validation"

    def chart(
        title: str, label: str, series: Sequence[Series], caption: str = "", zero: bool = False
    ) -> Picture | None:
        if not any(s.points for s in series):
            return None
        svg = curves(title, "step", label, series, zero=zero)
        longest = max(len(s.points) for s in series)
        means = f"Of {longest:,} steps, each point is the mean of {longest / 300:.1f}. " if longest > 300 else ""
        return Picture(svg, f"{title}. {means}{caption}".strip())

    loss = Series("training", records.series("step", "loss"))
    validation = Series(of_raw, records.series("validation", "nats", **raw), True)
    average = Series("validation, averaged weights", records.series("validation", "nats", **averaged), True)
    yield chart("Loss", "nats per token", [loss, validation, average])
    bpb = "bpb" if records.series("validation", "bpb") else "bpb_pieces"
    metrics = (
        ("Bits per byte of the validation split", "bits per byte", bpb),
        ("Exact match on the validation split", "share of lines", "exact_match"),
    )
    for title, label, key in metrics:
        plain = Series("plain weights" if several else "final weights", records.series("validation", key, **raw), True)
        averages = Series("averaged weights", records.series("validation", key, **averaged), True)
        yield chart(title, label, [plain, averages], zero=key == "exact_match")
    for name, points in _terms(records).items():
        caption = "Measured at each validation on its first windows, without the weight of the term."
        yield chart(f"Term of the loss: {name}", "mean", [Series(name, points, True)], caption)
    yield chart(
        "Learning rate", "learning-rate multiplier", [Series("multiplier", records.series("step", "lr"))], zero=True,
        caption=f"Each optimizer multiplies its rate by this value: {_rates(facts)}.",
    )  # fmt: skip
    yield chart("Norm of the gradient", "norm before clipping", [Series("norm", records.series("step", "grad_norm"))])
    rate = records.series("step", "tokens_per_second")
    yield chart("Throughput", "tokens per second", [Series("tokens per second", rate)], zero=True)
    memory = [(step, value / 1e9) for step, value in records.series("step", "memory_bytes")]
    what = "of tensors on the GPU" if facts.start.get("device", "").startswith("cuda") else "of the process"
    yield chart(f"Peak memory {what}", "GB", [Series("peak so far", memory)], zero=True)
    if facts.run.spec.model.reads == "text":
        points = [(r["step"], imbalance(r["loads"])) for r in records.of("experts", weights="raw") if _are_loads(r)]
        series = [Series("all layers", points, True)]
        yield chart("Largest load of an expert in any layer", "largest load / mean load", series)


def _terms(records: Records) -> dict[str, list[tuple[float, float]]]:
    points: dict[str, list[tuple[float, float]]] = {}
    for record in records.of("losses", weights="raw"):
        step, terms = record.get("step"), record.get("terms")
        for name, value in terms.items() if isinstance(terms, Mapping) else ():
            if is_number(step) and is_number(value):
                points.setdefault(name, []).append((step, value))
    return points


def _rates(facts: RunFacts) -> str:
    rates = []
    for optimizer in facts.run.spec.train.optimizers:
        rate = optimizer.lr
        words = rate.words if isinstance(rate, Schedule) else rate if isinstance(rate, str) else f"{rate:g}"
        rates.append(f"{optimizer.kind} {words} of {optimizer.match}")
    return ", ".join(rates)


def _missing(facts: RunFacts) -> list[str]:
    records = facts.records
    if not records.of("step"):
        return ["The log of the run has no steps, so there are no curves."]
    missing = []
    if not records.of("validation"):
        missing.append("The log has no validation.")
    if not records.series("step", "memory_bytes"):
        missing.append("The log does not record memory: the run was trained by an older specc.")
    return missing


def _parameters(facts: RunFacts) -> Table:
    roles: dict[str, list[Any]] = {}
    for parameter in facts.parameters:
        roles.setdefault(_BLOCK.sub(lambda m: m[0].replace(m[1], "*"), parameter.name), []).append(parameter)
    rows = []
    for role, members in roles.items():
        shapes = " or ".join(dict.fromkeys(" x ".join(map(str, member.shape)) for member in members))
        rows.append((role, shapes, f"{len(members)}", f"{sum(member.count for member in members):,}"))
    return Table.of(("parameters", "shape", "tensors", "values"), rows, 2)


def _validations(facts: RunFacts) -> Table | None:
    records = facts.records.of("validation")
    keys = [key for key in VALIDATED if any(is_number(record.get(key[0])) for record in records)]
    if all(record.get("bpb") == record.get("bpb_pieces") for record in records):
        keys = [key for key in keys if key[0] != "bpb_pieces"]
    rows = [
        (
            _text(r.get("step")),
            WEIGHTS.get(_text(r.get("weights")), ""),
            *(_number(r.get(key), digits) for key, _, digits in keys),
        )
        for r in records
    ]
    return Table.of(("step", "weights", *(label for _, label, _ in keys)), rows, 2) if rows else None


def _scores(facts: RunFacts) -> Table | None:
    rows = []
    for score in facts.scores():
        error = "" if score.error is None else f" ± {score.error:.4f}"
        step = "" if score.step is None else f"{score.step:,}"
        rows.append((score.model, score.data, score.metric, score.over, step, f"{score.value:.4f}{error}"))
    head = ("model", "data", "metric", "over", "step", "value")
    return Table.of(head, rows, 4) if rows else None


def _sizes(facts: RunFacts) -> Iterator[tuple[str, str]]:
    report = facts.quantization
    if report is None:
        return
    size, budget, reserved = (report.get(f"{key}_bytes") for key in ("artifact", "budget", "reserved"))
    yield "artifact", f"{_number(size)} bytes"
    if is_number(budget):
        yield "budget", f"{budget:,} bytes" + (f", of which {reserved:,} are reserved for code" if reserved else "")
    yield "step", _number(report.get("step"))
    calibration = report.get("calibration")
    if isinstance(calibration, Mapping):
        yield "calibration", ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in calibration.items())
    promoted = report.get("promoted")
    if isinstance(promoted, list) and promoted:
        yield "promoted", ", ".join(map(str, promoted))


def _rows(facts: RunFacts) -> Sequence[Record]:
    rows = (facts.quantization or {}).get("parameters")
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _quantized(facts: RunFacts) -> Table | None:
    head = ("parameter", "scheme", "bits", "MSE", "relative output error", "estimated rise, nats per token",
            "stored bytes", "compressed bytes")  # fmt: skip
    rows = [
        (
            _text(row.get("name")),
            _text(row.get("scheme")),
            f"{row['bits']:g}" if is_number(row.get("bits")) else "",
            f"{row['mse']:.2e}" if is_number(row.get("mse")) else "",
            f"{row['output_error']:.3%}" if is_number(row.get("output_error")) else "",
            f"{row['added_nats']:.2g}" if is_number(row.get("added_nats")) else "",
            _number(row.get("bytes")),
            _number(row.get("compressed")),
        )
        for row in _rows(facts)
    ]
    columns = [i for i in range(len(head)) if i < 2 or any(row[i] for row in rows)]
    rows = [tuple(row[i] for i in columns) for row in rows]  # type: ignore[misc]
    return Table.of([head[i] for i in columns], rows, 2) if rows else None


def _quantized_pictures(facts: RunFacts) -> Iterator[Picture]:
    errors: dict[str, list[tuple[float, float]]] = {}
    bits: dict[tuple[str, str], float] = {}
    for row in _rows(facts):
        place = _BLOCK.search(_text(row.get("name")))
        if place is None or not is_number(row.get("bits")):
            continue
        role = _text(row["name"])[: place.start(1)] + "*" + _text(row["name"])[place.end(1) :]
        if is_number(row.get("output_error")):
            errors.setdefault(role, []).append((float(place[1]), 100 * row["output_error"]))
            bits[role, place[1]] = row["bits"]
    if errors:
        series = [Series(role, sorted(points), True) for role, points in errors.items()]
        svg = curves("Relative output error by block", "block", "output error, %", series, zero=True)
        yield Picture(
            svg, "Relative output error of each quantized matrix, ||ΔW X|| / ||W X|| over the calibration text."
        )
    if bits:
        blocks = sorted({block for _, block in bits}, key=int)
        svg = cells("Bits of each matrix", list(errors), blocks, bits, "g", "block")
        yield Picture(svg, "Bits per value of each quantized matrix. Larger values have a stronger shade.")


def _are_loads(record: Record) -> bool:
    loads = record.get("loads")
    return isinstance(loads, Mapping) and bool(loads) and all(
        isinstance(load, list) and load and all(map(is_number, load)) for load in loads.values()
    )  # fmt: skip


def _experts(facts: RunFacts) -> Iterator[Picture]:
    record = facts.records.last("experts")
    if not _are_loads(record):
        return
    loads = record["loads"]
    step, weights = _text(record.get("step")), WEIGHTS.get(_text(record.get("weights")), "")
    note = f"at step {step}, {weights} weights, on the first batch of the validation split"
    if max(map(len, loads.values())) <= WIDEST:
        values = {(layer, str(i)): 100 * share for layer, load in loads.items() for i, share in enumerate(load)}
        columns = [str(i) for i in range(max(map(len, loads.values())))]
        svg = cells("Load of each expert", list(loads), columns, values, ".1f", "expert")
        yield Picture(svg, f"Share of the tokens of each expert in %, {note}. Larger values have a stronger shade.")
    else:
        series = [
            Series(layer, list(enumerate(sorted((100 * share for share in load), reverse=True))))
            for layer, load in loads.items()
        ]
        svg = curves("Load of each expert", "expert, by load", "share of the tokens, %", series, zero=True)
        yield Picture(svg, f"Share of the tokens of each expert in %, {note}.")


def _number(value: object, digits: int = 0) -> str:
    return f"{value:,.{digits}f}" if is_number(value) else ""


def _text(value: object) -> str:
    return "" if value is None else str(value)
