"""The results of a sweep: the final metric, the training time, the throughput and the bytes of each setting."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specc.runtime.errors import IntegrityError
from specc.runtime.metrics.names import NATS, Metric, metric_of
from specc.runtime.storage.quantized_run import quantized_report
from specc.runtime.storage.run_history import NOT_SCORED, RunHistory
from specc.runtime.sweep.folder import SweepFolder
from specc.runtime.sweep.plan import PlannedRun
from specc.runtime.tables import aligned


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of one measurement for several seeds.

    Attributes:
        mean: the mean of the values.
        std: the sample standard deviation of the values (divisor n - 1); None for a single value.
        values: the value for each seed.
    """

    mean: float
    std: float | None
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        std = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), std, tuple(values))


@dataclass(frozen=True, slots=True)
class SettingResult:
    """The result of a setting, over its finished runs.

    Attributes:
        setting: the name of the setting.
        entry: the name of the entry of `settings`. Empty for a grid without entries.
        grid: the value of each path of the grid.
        seeds: the seeds of the finished runs.
        tokens: the number of tokens of the final validation; None if no run is finished.
        metric: the final validation metric; None if no run is finished.
        nats: the final validation loss in nats per token.
        raw: the metric of the weights without averaging; None if the runs do not average weights.
        difference: the mean of `metric`, minus the mean of `metric` for the first setting.
        seconds: the mean training time in seconds.
        tokens_per_second: the mean number of tokens per second of training.
        bytes: the size of the largest artifact; an estimate if no run is quantized. None if the spec has no section
            `quant`.
        measured: True if `bytes` is the size of an artifact, False if it is an estimate.
        unfinished: the reason for each run that is not finished.
    """

    setting: str
    entry: str
    grid: Mapping[str, Any]
    seeds: tuple[int, ...]
    tokens: int | None
    metric: Sample | None
    nats: Sample | None
    raw: Sample | None
    difference: float | None
    seconds: float | None
    tokens_per_second: float | None
    bytes: int | None
    measured: bool
    unfinished: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class QuantizedResult:
    """The result of an entry of `quantize`, over its finished runs.

    Attributes:
        setting: the name of the entry.
        seeds: the seeds of the finished runs.
        tokens: the number of tokens on which `specc quantize` scored the weights; None if no run is finished. A
            validation of training may score fewer tokens.
        metric: the metric of the quantized weights.
        difference: the mean of `metric`, minus the mean of the metric of the same runs before quantization.
        bytes: the size of the largest artifact.
        unfinished: the reason for each run that is not finished.
    """

    setting: str
    seeds: tuple[int, ...]
    tokens: int | None
    metric: Sample | None
    difference: float | None
    bytes: int | None
    unfinished: Mapping[str, str]


@dataclass(frozen=True)
class SweepResults:
    """All results of a sweep. Each setting is compared with the first entry of `settings`."""

    metric: Metric
    settings: tuple[SettingResult, ...]
    quantized: tuple[QuantizedResult, ...] = field(default=())

    def facts(self) -> dict[str, Any]:
        first = self.settings[0].setting if self.settings else None
        data = {"metric": asdict(self.metric), "compared_with": first}
        return {**data, "settings": [*map(asdict, self.settings)], "quantized": [*map(asdict, self.quantized)]}

    def table(self) -> list[str]:
        """Returns the lines of a Markdown table, with columns of equal width."""
        metric = self.metric
        head = ["setting", "seeds", metric.label, "std", "to the first", "seconds", "tokens/s", "bytes"]
        rows, reasons = [head], list[str]()
        for row in self.settings:
            rows.append([row.setting, *self._cells(row.metric, row.difference), *_costs(row)])
            if row.raw is not None and row is self.settings[0]:
                change = row.raw.mean - row.metric.mean if row.metric is not None else None
                rows.append([f"{row.setting}, weights not averaged", *self._cells(row.raw, change), "", "", ""])
            reasons += [f"{name}: {reason}" for name, reason in row.unfinished.items()]
        for entry in self.quantized:
            cells = self._cells(entry.metric, entry.difference)
            size = f"{entry.bytes:,}" if entry.bytes is not None else "-"
            rows.append([f"quantized: {entry.setting} (*)", *cells, "", "", size])
            reasons += [f"{name}: {reason}" for name, reason in entry.unfinished.items()]
        notes = ["std: sample standard deviation over the seeds; ~: bytes estimated from the spec"]
        notes += [f"(*) {self._tokens()}difference from the same runs before quantization"] if self.quantized else []
        return [*aligned(rows), *notes, *(f"not finished: {reason}" for reason in reasons)]

    def _tokens(self) -> str:
        """Returns a phrase about the scored tokens, unless quantized and trained weights are scored on equally many."""
        trained, quantized = (
            " or ".join(dict.fromkeys(f"{row.tokens:,}" for row in rows if row.tokens is not None))
            for rows in (self.settings, self.quantized)
        )
        same = trained == quantized or not (trained and quantized)
        return "" if same else f"scored on {quantized} tokens, the rows without * on {trained}; "

    def _cells(self, sample: Sample | None, difference: float | None) -> list[str]:
        if sample is None:
            return ["0", "-", "-", "-"]
        show = self.metric.show
        change = "" if difference is None else show(difference, sign=True)
        return [str(len(sample.values)), show(sample.mean), "-" if sample.std is None else show(sample.std), change]


def _costs(row: SettingResult) -> list[str]:
    seconds = "-" if row.seconds is None else f"{row.seconds:,.1f}"
    rate = "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
    return [seconds, rate, "-" if row.bytes is None else f"{'' if row.measured else '~'}{row.bytes:,}"]


def results_of(folder: SweepFolder, failed: Mapping[str, str]) -> SweepResults:
    """Reads the results of a sweep from its run directories.

    Args:
        folder: the folder of the sweep.
        failed: the reason for the failure of each run that failed in this process, by name.

    Returns:
        The results so far.

    Raises:
        SweepError: if a run directory contains another run.
        IntegrityError: if a run is damaged.
    """
    sweep = folder.sweep
    histories = {run.name: folder.history(run) for run in sweep.runs}
    metric = metric_of(sweep.metric, [history.final for history in histories.values()])
    reports, damaged = _reports(folder)
    rows: list[SettingResult] = []
    for setting in sweep.settings:
        runs = [run for run in sweep.runs if run.setting == setting]
        finished = [run for run in runs if histories[run.name].final is not None]
        read = _reader(finished, histories)
        sample = read(lambda history: metric.value(history.final))
        first = rows[0].metric if rows else None
        averaged = any(
            history.end is not None and history.end["weights"] != "raw" for history in _of(finished, histories)
        )
        bytes_of = [int(reports[run.name]["artifact_bytes"]) for run in runs if run.name in reports]
        rates = read(lambda history: history.tokens_per_second)
        seconds = read(lambda history: history.seconds)
        rows.append(
            SettingResult(
                setting,
                sweep.entries.get(setting, ""),
                sweep.values.get(setting, {}),
                tuple(run.seed for run in finished),
                next((int(final["tokens"]) for history in _of(finished, histories) if (final := history.final)), None),
                sample,
                read(lambda history: NATS.value(history.final)),
                read(lambda history: metric.value(history.scored("raw"))) if averaged else None,
                sample.mean - first.mean if first is not None and sample is not None else None,
                seconds.mean if seconds is not None else None,
                rates.mean if rates is not None else None,
                max(bytes_of) if bytes_of else runs[0].estimated_bytes,
                bool(bytes_of),
                {
                    run.name: _reason(run.name, histories[run.name], folder, failed)
                    for run in runs
                    if run not in finished
                }
                | {run.name: damaged[run.name] for run in runs if run.name in damaged},
            )
        )
    return SweepResults(metric, tuple(rows), tuple(_quantized(folder, metric, reports, {**damaged, **failed})))


def _of(runs: Sequence[PlannedRun], histories: Mapping[str, RunHistory]) -> list[RunHistory]:
    return [histories[run.name] for run in runs]


def _reader(
    runs: Sequence[PlannedRun], histories: Mapping[str, RunHistory]
) -> Callable[[Callable[[RunHistory], float | None]], Sample | None]:
    def read(value: Callable[[RunHistory], Any]) -> Sample | None:
        values = [value(history) for history in _of(runs, histories)]
        return Sample.of(values) if values and None not in values else None

    return read


def _reason(name: str, history: RunHistory, folder: SweepFolder, failed: Mapping[str, str]) -> str:
    if name in failed:
        return failed[name]
    if history.complete:
        return NOT_SCORED
    if history.message:
        return history.message
    return f"stopped after step {history.steps[-1].step:,}" if history.steps else "not begun"


def _reports(folder: SweepFolder) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
    """Returns the report of each quantized run, and the reason for each run whose report is damaged, by name."""
    reports: dict[str, Mapping[str, Any]] = {}
    damaged: dict[str, str] = {}
    for work in folder.sweep.work:
        try:
            report = quantized_report(folder.quantized(work))
        except IntegrityError as error:
            damaged[work.name] = error.message
        else:
            if report is not None:
                reports[work.name] = report
    return reports, damaged


def _quantized(
    folder: SweepFolder, metric: Metric, reports: Mapping[str, Mapping[str, Any]], reasons: Mapping[str, str]
) -> Iterator[QuantizedResult]:
    entries = folder.sweep.quantizations
    for setting in dict.fromkeys(entry.setting for entry in entries):
        members = [entry for entry in entries if entry.setting == setting]
        known = {entry.name: reports[entry.name] for entry in members if entry.name in reports}
        after = [metric.of_score(report["after"]) for report in known.values()]
        before = [metric.of_score(report["before"]) for report in known.values()]
        yield QuantizedResult(
            setting,
            tuple(entry.seed for entry in members if entry.name in known),
            next((_scored_tokens(report["after"]) for report in known.values()), None),
            Sample.of(after) if after else None,
            statistics.fmean(a - b for a, b in zip(after, before, strict=True)) if after else None,
            max((report["artifact_bytes"] for report in known.values()), default=None),
            {entry.name: reasons.get(entry.name, "not begun") for entry in members if entry.name not in known},
        )


def _scored_tokens(score: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> int:
    return int((score if isinstance(score, Mapping) else score[0])["tokens"])
