"""`specc quantize`: quantizes the weights of a trained run and writes an artifact.

The pipeline calibrates the model, chooses the bits of each parameter, quantizes the parameters, and writes the artifact
and a spec with the chosen bits. Finally, it compares the exact size of the artifact with the byte budget.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from specc.compiler.int8.editor import Source
from specc.compiler.int8.products import integer_products
from specc.compiler.passes.assign_quant import reused
from specc.compiler.pipeline import lower
from specc.compiler.spec.spec import Calibrate, QuantSpec, Spec
from specc.compiler.text.shell import shell_path
from specc.runtime.artifact.artifact import ArtifactSize, measured_bytes
from specc.runtime.artifact.quantized_model import dequantized
from specc.runtime.calibration.calibrate import calibration_windows
from specc.runtime.calibration.hessian import traces
from specc.runtime.calibration.input_ranges import input_ranges, trained_scales
from specc.runtime.data.windows.stream import open_stream
from specc.runtime.decode.few_rows import step_of
from specc.runtime.errors import QuantizeError, cannot_write
from specc.runtime.eval.evaluate import METRICS, Scored
from specc.runtime.eval.options import EvaluateOptions
from specc.runtime.model.parameters import assign
from specc.runtime.open_model import OpenedModel, Say, as_trained, data_of, opened_run, realize, realize_stored
from specc.runtime.quantize.assignment import Allocation, base_schemes, resolved
from specc.runtime.quantize.promotion import promoted
from specc.runtime.quantize.quantizer import IntegerInputs, Progress
from specc.runtime.quantize.report import InputRow, Row, clipped_line, input_report, report
from specc.runtime.quantize.weights import QuantizedWeights, TrainedModel, Windows, quantize_weights
from specc.runtime.quantize.written_artifact import artifact_contents, write_quantized
from specc.runtime.quantize.written_text import WrittenText
from specc.runtime.storage import checkpoint, committed
from specc.runtime.storage.quantized_run import ARTIFACT, REPORT
from specc.runtime.storage.run_directory import SPEC, Run, locked, readable
from specc.runtime.train.sources.source import source_of

# Exact match is scored on at most this number of lines if none of these lines matches. The scoring of a barely trained
# model then ends quickly.
HOPELESS = 4096


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """The result of `quantize`.

    Attributes:
        artifact: the path of the artifact.
        spec: the spec in the artifact, with one rule per parameter.
        step: the training step of the checkpoint that was quantized.
        size: the size of the artifact in bytes, by section.
        budget: the limit in bytes; None without a budget.
        rows: one report row per parameter.
        inputs: one report row per input of int8 products.
        promoted: the names of the parameters that have more bits than the rules of the spec state, sorted by descending
            Hessian trace.
        before: the validation score with the trained weights.
        after: the validation score with the quantized weights.
        calibration: the source of the calibration, as in report.json; None if nothing was calibrated.
        seconds: the duration of the calibration; 0.0 without a calibration.
    """

    artifact: Path
    spec: Spec
    step: int
    size: ArtifactSize
    budget: int | None
    rows: tuple[Row, ...]
    inputs: tuple[InputRow, ...]
    promoted: tuple[str, ...]
    before: Scored
    after: Scored
    calibration: Mapping[str, Any] | None
    seconds: float


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """The options of `quantize`. If an option is None, the run or the machine determines the value.

    Attributes:
        data: the data, in the format of `specc train --data`. Calibration uses the training split, or text that the
            model generates. The loss is measured on the validation split.
        max_tokens: the number of tokens on which the loss is measured; None for the whole split.
        target: the target of the spec whose code is used.
        device: the torch device on which the code runs.
        search: additional folders to search for the tokenizer.
        cache: the folder of tokenized text.
        overrides: values of `--set` for the section `quant` of the spec.
        reserved: the number of bytes of the budget that are reserved for the code of a submission.
    """

    data: str | None = None
    max_tokens: int | None = None
    target: str | None = None
    device: str | None = None
    search: tuple[Path, ...] = ()
    cache: Path | None = None
    overrides: tuple[str, ...] = ()
    reserved: int = 0


@dataclass(frozen=True)
class _Quantization:
    """The quantization of one run: the run, its weights, and the modules and data for calibration."""

    run: Run
    quant: QuantSpec
    step: int
    opened: OpenedModel
    options: QuantizeOptions
    weights: Mapping[str, Tensor]
    sources: Sequence[Source]
    progress: Progress
    stack: ExitStack
    say: Say

    @property
    def model(self) -> TrainedModel:
        spec, train = self.run.spec, self.run.spec.train
        several = reused(lower(spec, self.opened.loaded.target.name))
        window = spec.model.window
        step = partial(step_of, self.opened.loaded)
        return TrainedModel(self.opened, self.weights, train.seed, window, several, self._unfused, self._windows, step)

    def _unfused(self) -> nn.Module:
        target = self.opened.loaded.target.name
        return realize(self.run.spec, target, self.options.device, self.weights, fuse=False).model

    def _windows(self) -> Windows:
        data, cache = data_of(self.run, self.options)
        stream = open_stream(data, "train", self.opened.tokenizer, cache)
        self.stack.callback(stream.close)
        spec = self.run.spec
        return calibration_windows(stream, self.quant.calibrate, spec.model.window, spec.train.seed)

    def integer_inputs(self, text: WrittenText | None) -> IntegerInputs:
        calibrate, trained = self.quant.calibrate, self._trained_scales()
        rows: Iterator[Mapping[str, Tensor]]
        if text is not None:
            rows = ({"ids": ids, "targets": targets} for ids, targets in text.windows(calibrate.batch))
        else:
            ready = source_of(self.run.spec)(self.run.spec, self.opened.search)
            data = ready.open(*data_of(self.run, self.options), self.stack)
            rows = data.calibration(calibrate.sequences, calibrate.batch)
        batches = ({name: ids.to(self.opened.device) for name, ids in batch.items()} for batch in rows)
        programs = lower(self.run.spec, self.opened.loaded.target.name)

        def count(done: int) -> None:
            self.progress("calibrate", done, calibrate.sequences)

        ranges = input_ranges(programs, self.sources, batches, self.weights, count, trained)
        return IntegerInputs(self.sources, ranges, trained)

    def _trained_scales(self) -> Mapping[str, Tensor]:
        """Returns the scale that training used for each input of int8 products.

        A key is the name of the first weight that multiplies the input. The mapping is empty if the run trained without
        input scales, or if the section `quant` of the run has changed since training.
        """
        run = self.run
        if run.spec.train.qat is None:
            return {}
        trained = trained_scales(
            checkpoint.load(checkpoint.path_of(run.checkpoints, self.step)).optimizer, self.sources
        )
        if trained and run.spec.quant != Run.open(run.directory).spec.quant:
            self.say("the section `quant` was changed after training, so scales are calibrated again")
            return {}
        if trained:
            self.say("inputs have the same scales as in training, and weights are rounded as in training")
        return trained


def quantize(path: Path, options: QuantizeOptions, say: Say, progress: Progress | None = None) -> QuantizeResult:
    """Quantizes the final weights of a run, and writes the result to the folder `quantized/` of the run.

    The folder contains the artifact, spec.json and report.json. The function replaces the folder atomically. The
    artifact has the same bytes each time the same run is quantized on the same machine with the same number of threads.
    The trained weights do not change.

    Args:
        path: the run directory.
        options: the options of the quantization.
        say: the function that receives a message for each stage.
        progress: a function called as `progress(stage, done, total)` in the stages `write`, `calibrate`, `uses`,
            `gradients`, `quantize` and `evaluate`.

    Returns:
        The path and size of the artifact, the spec with the chosen bits, and the report rows.

    Raises:
        QuantizeError: if the spec has no `quant`, a scheme cannot store its parameter, or the budget is too small. In
            these cases, nothing is written.
        EnvironmentFailure: the disk is full.
        RunDirectoryError, RunFailure, IntegrityError, DataError: the run or the data cannot be read.
        SpecError: an override is invalid.
    """
    try:
        run = Run.open(path).requantized(options.overrides)
        if run.spec.quant is None:
            raise QuantizeError(f"{run.spec.name} has no `quant` section", "add quant: to the spec")
        # The lock is taken before the work, so that a read-only folder causes an error early
        with locked(run.staged.parent), ExitStack() as stack:
            return _quantize(run, run.spec.quant, options, say, progress or (lambda stage, done, total: None), stack)
    except QuantizeError as error:
        again = f"specc quantize {shell_path(path)} --set quant.KEY=VALUE"
        resume = f"the trained weights are saved; resume with: {again}"
        raise QuantizeError(error.message, f"{error.hint}; {resume}" if error.hint else resume) from error


def _quantize(
    run: Run, quant: QuantSpec, options: QuantizeOptions, say: Say, progress: Progress, stack: ExitStack
) -> QuantizeResult:
    run, weights, step = as_trained(run, say)
    opened = opened_run(run, weights, options.target, options.device, options.search)
    scored = EvaluateOptions(options.data, max_tokens=options.max_tokens, cache=options.cache, hopeless=HOPELESS)
    metric = METRICS[run.spec.eval.metric]

    def measure(model: OpenedModel) -> Scored:
        return metric(model, scored, partial(progress, "evaluate"), None)

    before = measure(opened)
    say(f"before: {before.report()[0]}")
    base = base_schemes(quant, opened.loaded.programs.params)
    sources = integer_products(lower(run.spec, opened.loaded.target.name), base)
    on_device = {name: tensor.to(opened.device) for name, tensor in weights.items()}
    quantization = _Quantization(run, quant, step, opened, options, on_device, sources, progress, stack, say)
    quantized = quantize_weights(
        quantization.model,
        quant,
        base,
        lambda stored: measured_bytes(artifact_contents(run.spec, stored, run.data_digests)),
        say,
        progress,
        integer_inputs=quantization.integer_inputs if sources else None,
        reserved=options.reserved,
    )
    inputs = input_report(sources, quantized.quantizer.inputs.ranges, quantized.stored)
    if line := clipped_line(inputs):
        say(line)
    spec, restored = resolved(run.spec, quantized.schemes), dequantized(quantized.stored)
    if sources:
        target = opened.loaded.target.name
        loaded = realize_stored(spec, target, options.device, quantized.stored, restored)
        after = measure(replace(opened, loaded=loaded))
    else:
        assign(opened.loaded.model, restored)
        after = measure(opened)
    say(f"after: {after.report()[0]}")
    result = _write(quantization, quantized, base, inputs, before, after)
    say(f"{result.artifact}: {result.size.total:,} bytes")
    return result


def _calibration_facts(calibrate: Calibrate, seed: int, text: WrittenText | None) -> dict[str, Any]:
    facts = {"source": calibrate.source, "sequences": calibrate.sequences, "seed": seed}
    if text is None:
        return facts
    length = text.tokens.shape[1] - 1
    how = {"length": length, "temperature": calibrate.temperature, "begin": calibrate.begin}
    return {**facts, **how, "start_tokens": text.separators}


def _write(
    quantization: _Quantization,
    quantized: QuantizedWeights,
    base: Allocation,
    inputs: tuple[InputRow, ...],
    before: Scored,
    after: Scored,
) -> QuantizeResult:
    """Replaces the artifact, the spec and the report in the folder `quantized/` of the run.

    The caller must hold the lock of the folder in which the new files are prepared.
    """
    run, quant, quantizer = quantization.run, quantization.quant, quantized.quantizer
    spec = resolved(run.spec, quantized.schemes)
    hessians = traces(quantizer.statistics.hessians)
    calibration = None
    if quantized.seconds is not None:
        calibration = _calibration_facts(quant.calibrate, run.spec.train.seed, quantized.text)
    staging = run.staged.parent
    try:
        committed.settle(run.quantized, run.staged)
        _clear(staging)
        result = QuantizeResult(
            artifact=run.quantized / ARTIFACT,
            spec=spec,
            step=quantization.step,
            size=write_quantized(staging / ARTIFACT, run.spec, quantized.stored, run.data_digests),
            budget=quant.budget_bytes,
            rows=report(quantizer, quantized.schemes),
            inputs=inputs,
            promoted=promoted(base, quantized.schemes, hessians),
            before=before,
            after=after,
            calibration=calibration,
            seconds=quantized.seconds or 0.0,
        )
        files = (
            (SPEC, [readable(spec).encode()]),
            (REPORT, [report_json(result, hessians, quantization.options).encode()]),
            (ARTIFACT, [(staging / ARTIFACT).read_bytes()]),
        )
        committed.write(run.staged, files)
        committed.replace(run.quantized, run.staged)
        _clear(staging)
    except OSError as error:
        raise cannot_write(run.quantized, error, "make it writable; then quantize again") from error
    return result


def _clear(staging: Path) -> None:
    for entry in staging.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name == ARTIFACT:
            entry.unlink()


def report_json(result: QuantizeResult, traces: Mapping[str, float], options: QuantizeOptions) -> str:
    """Returns the text of report.json: sizes, the loss before and after quantization, and one row for each parameter
    and each int8 input.

    For a parameter without a Hessian, the fields `output_error` and `trace` are null. The field `output_error` is also
    null if the output of the trained parameter is zero.
    """
    rows = []
    for row in result.rows:
        error = row.output_error if row.output_error is not None and math.isfinite(row.output_error) else None
        promotion = {"trace": traces.get(row.name), "promoted": row.name in result.promoted}
        rows.append({**asdict(row), "output_error": error, **promotion})
    content = {
        "step": result.step,
        "artifact_bytes": result.size.total,
        "budget_bytes": result.budget,
        "reserved_bytes": options.reserved,
        "overrides": list(options.overrides),
        "promoted": list(result.promoted),
        "calibration": result.calibration,
        "before": result.before.facts(),
        "after": result.after.facts(),
        "parameters": rows,
        **({"inputs": [asdict(row) for row in result.inputs]} if result.inputs else {}),
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"
