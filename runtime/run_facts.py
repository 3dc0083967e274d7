"""Reads facts about a run from its files.

The files are the spec, the log, the checkpoints, and the results of quantization and evaluation.

Reports and model cards take all numbers from this module. The module never estimates a missing number.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specc.compiler.changing_values import Schedule
from specc.compiler.pipeline import lower
from specc.compiler.programs.programs import Parameter
from specc.compiler.spec.start import StartSpec
from specc.compiler.text.shell import shell_path
from specc.runtime.errors import IntegrityError
from specc.runtime.storage import checkpoint
from specc.runtime.storage.evaluations import recorded_evaluations
from specc.runtime.storage.quantized_run import quantized_report
from specc.runtime.storage.records import Record, Records, is_number, note_of_unreadable
from specc.runtime.storage.run_directory import Run
from specc.runtime.storage.run_history import NOT_SCORED

MISSING = "not recorded"
RAW, AVERAGED, QUANTIZED = "final weights", "averaged weights", "quantized"


@dataclass(frozen=True, slots=True)
class Score:
    """One measurement of the quality of a model.

    Attributes:
        model: the weights that were scored: `final weights`, `averaged weights`, `quantized`, `before quantization`, or
            `weights of step N`.
        step: the training step of the weights; None if the step is not recorded.
        data: the data on which the weights were scored.
        metric: the name of the metric.
        value: the value of the metric.
        error: the standard error of the value; None if the error is not recorded.
        over: the amount of data over which the value is a mean, for example `1,024 tokens`.
    """

    model: str
    step: int | None
    data: str
    metric: str
    value: float
    error: float | None = None
    over: str = ""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of a run.

    Attributes:
        run: the run.
        records: the records of the log.
        step: the step of the newest checkpoint; None if there is none.
        weights: the weights that this checkpoint gives the model, `raw` or `average`. Without a checkpoint, the weights
            at the end of the log; None if the log does not state them.
        parameters: the parameters of the final model.
        quantization: the report of `specc quantize`; None if the run is not quantized.
        evaluations: the results of `specc eval --task`.
        problems: one sentence for each file that cannot be read.
    """

    run: Run
    records: Records
    step: int | None
    weights: str | None
    parameters: tuple[Parameter, ...]
    quantization: Mapping[str, Any] | None
    evaluations: Sequence[Mapping[str, Any]]
    problems: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "RunFacts":
        """Reads the files of a run.

        Raises RunDirectoryError if the directory is not a run. Raises IntegrityError if spec.json or run.json of the
        run is damaged.
        """
        run = Run.open(path)
        problems: list[str] = []
        records = Records.read(run.log)
        if records.unreadable:
            problems.append(note_of_unreadable(run.log.name, records.unreadable))
        step, weights, quantization = None, records.last("end").get("weights"), None
        for folder in reversed(checkpoint.all_in(run.checkpoints)):
            try:
                state = checkpoint.read_state(folder)
                step, weights = state.step, "average" if state.weights == checkpoint.AVERAGE else "raw"
                break
            except IntegrityError as error:
                problems.append(error.message)
        try:
            quantization = quantized_report(run.quantized)
        except IntegrityError as error:
            problems.append(error.message)
        parameters = tuple(p for p in lower(run.spec, run.target).params if not p.training)
        evaluations = recorded_evaluations(run.directory, problems.append)
        facts = cls(run, records, step, weights, parameters, quantization, evaluations, tuple(problems))
        end = records.last("end")
        if end.get("complete") is True and step in (None, end.get("step")) and not facts.final_validation()[1]:
            facts = replace(facts, problems=(*facts.problems, f"{run.log.name}: {NOT_SCORED}"))
        return facts

    @property
    def count(self) -> int:
        return sum(parameter.count for parameter in self.parameters)

    @property
    def quantized_step(self) -> int | None:
        step = (self.quantization or {}).get("step")
        return step if isinstance(step, int) else None

    @property
    def start(self) -> Record:
        return self.records.last("start")

    @property
    def machine(self) -> str:
        name, processes = self.records.last("machine").get("name"), self.start.get("processes")
        if not isinstance(name, str):
            device = self.start.get("device")
            name = f"{device}, name {MISSING}" if isinstance(device, str) else MISSING
        return f"{processes} x {name}" if is_number(processes) and processes > 1 else name

    def training(self) -> Iterator[tuple[str, str]]:
        """Yields pairs (label, value) that describe the model and its training."""
        run, train = self.run, self.run.spec.train
        start, end = self.start, self.records.last("end")
        yield "model", run.spec.model.title
        yield "parameters", f"{self.count:,}"
        yield "spec digest", run.spec_digest
        yield "overrides", "  ".join(run.overrides) or "none"
        yield "started from", self._origin()
        yield "data", Path(run.data).name
        digests = run.data_digests
        yield "digest of the training split", digests.train if digests else MISSING
        yield "digest of the validation split", digests.val if digests else MISSING
        yield "seed", str(train.seed)
        yield "steps", f"{self.step:,}" if self.step is not None else MISSING
        unit, size = ("rows", train.batch) if train.batch is not None else ("tokens", train.tokens_per_step)
        yield f"{unit} per step", size.words if isinstance(size, Schedule) else f"{size:,}"
        if is_number(end.get("tokens")):
            yield "tokens seen", f"{end['tokens']:,}"
        seconds = end.get("seconds")
        yield "training time", f"{seconds:,.1f} s" if is_number(seconds) else MISSING
        yield "complete", {True: "yes", False: "no, it ended early"}.get(end.get("complete"), MISSING)  # type: ignore[arg-type]
        yield "target", run.target
        yield "machine", self.machine
        yield "threads", _text(start.get("threads"))
        yield "versions", f"Torch {_text(start.get('torch'))}, Python {_text(start.get('python'))}"

    def _origin(self) -> str:
        start, recorded = self.run.spec.train.starts_from, self.run.start
        if recorded is not None:
            step = f", step {recorded.step:,}" if recorded.step is not None else ""
            return f"{recorded.kind} {Path(recorded.path).name}{step}"
        return f"{Path(start.path).name}" if isinstance(start, StartSpec) else "initial values"

    def final_validation(self) -> tuple[str, Record]:
        """Returns the name of the final weights, and the log record of their validation. If the final weights were
        never validated, the record is empty.

        The final weights are the weights of the newest checkpoint. Without a checkpoint, they are the weights at the
        step at which the run ended.
        """
        step = self.step if self.step is not None else self.records.last("end").get("step")
        record = self.records.last("validation", weights=self.weights, step=step) if is_number(step) else {}
        return (AVERAGED if self.weights == "average" else RAW), record

    def scores(self) -> Iterator[Score]:
        """Yields all scores of the run: the validation of the final weights, the losses before and after quantization,
        and the results of evaluation tasks.
        """
        which, record = self.final_validation()
        step = record.get("step")
        yield from _scores(which, step if isinstance(step, int) else None, "validation split", record)
        if self.quantization is not None:
            for model, key in (("before quantization", "before"), (QUANTIZED, "after")):
                results = self.quantization.get(key)
                for result in results if isinstance(results, list) else [results]:
                    if isinstance(result, Mapping):
                        name = result.get("name") if isinstance(result.get("name"), str) else None
                        yield from _scores(model, self.quantized_step, name or _split(result), result)
        for result in self.evaluations:
            measures, step = result.get("measures"), result.get("step")
            of_checkpoint = step is None or self.step in (None, step)
            model = QUANTIZED if result["model"] == "quantized" else RAW if of_checkpoint else f"weights of step {step}"
            for metric, measure in measures.items() if isinstance(measures, Mapping) else ():
                if isinstance(measure, Mapping) and is_number(measure.get("value")):
                    error = measure.get("standard_error")
                    yield Score(
                        model,
                        step if isinstance(step, int) else None,
                        f"{_text(result.get('file'))} ({_text(result.get('task'))})",
                        str(metric),
                        measure["value"],
                        error if is_number(error) else None,
                        f"{result['examples']:,} examples" if is_number(result.get("examples")) else "",
                    )

    def commands(self) -> Sequence[str]:
        lines = [
            f"specc train spec.json --data {shell_path(Path(self.run.data).name)} --target {self.run.target} --run RUN"
        ]
        if self.quantization is not None:
            overrides = self.quantization.get("overrides")
            sets = [f" --set {shlex.quote(str(text))}" for text in overrides] if isinstance(overrides, list) else []
            lines.append(f"specc quantize RUN{''.join(sets)}")
        return lines


def _scores(model: str, step: int | None, data: str, record: Record) -> Iterator[Score]:
    tokens, pieces, size = (record.get(key) for key in ("tokens", "piece_bytes", "document_bytes"))
    counts = [f"{tokens:,} tokens"] if is_number(tokens) else []
    known = size if is_number(size) else pieces
    bits = [*counts, f"{known:,} bytes" if is_number(known) else f"bytes {MISSING}"]
    lines = [f"{record['lines']:,} lines"] if is_number(record.get("lines")) else []
    bpb = "bpb" if is_number(record.get("bpb")) else "bpb_pieces"
    metrics = (
        ("bits per byte" if bpb == "bpb" else "bits per byte of pieces", bpb, 1.0, bits),
        ("exact match, %", "exact_match", 100.0, lines),
        ("token accuracy, %", "token_accuracy", 100.0, counts),
    )
    for metric, key, scale, over in metrics:
        if is_number(record.get(key)):
            yield Score(model, step, data, metric, scale * record[key], None, ", ".join(over))
    nats = record.get("nats")
    if is_number(nats) and is_number(tokens) and "event" not in record and "name" not in record:
        # The field `nats` is a sum over tokens in a result of `quantize`, and a mean in a log record
        nats = nats / tokens
    if is_number(nats):
        yield Score(model, step, data, "nats per token", nats, None, ", ".join(counts))


def _split(result: Record) -> str:
    split = {True: "validation split", False: "training split"}
    return split.get(result.get("held_out"), "other text")  # type: ignore[arg-type]


def _text(value: object) -> str:
    return MISSING if value is None else str(value)
