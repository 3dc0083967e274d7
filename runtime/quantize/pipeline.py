"""`specc quantize`: from a trained run to the artifact that ships.

Calibrate, give the parameters that matter more bits, quantize each, write down what was done as a resolved
spec, and hold the artifact to its budget by its exact bytes.
"""

import json
import math
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.compiler.build import canonical
from specc.compiler.int8.products import Source, integer_products
from specc.compiler.passes.assign_quant import allocation
from specc.compiler.pipeline import lower
from specc.compiler.quant.scheme import Range
from specc.compiler.spec.spec import Calibrate, Spec
from specc.runtime.artifact.artifact import ArtifactSize, write_artifact
from specc.runtime.artifact.deployment import Deployment
from specc.runtime.artifact.table import described
from specc.runtime.artifact.tensors import dequantized
from specc.runtime.calibration.calibrate import calibration_windows, capture_gradients, capture_hessians
from specc.runtime.calibration.gradients import Gradients
from specc.runtime.calibration.hessian import traces
from specc.runtime.calibration.input_ranges import trained_scales
from specc.runtime.calibration.ranges import input_ranges
from specc.runtime.data.windows.stream import open_stream
from specc.runtime.errors import QuantizeError, RunFailure
from specc.runtime.eval.evaluate import METRICS, Scored
from specc.runtime.eval.options import EvaluateOptions
from specc.runtime.model.load import assign
from specc.runtime.open_model import OpenedModel, Say, as_trained, opened_run, realize, realize_stored, token_cache
from specc.runtime.quantize.budget import Allocation, promoted
from specc.runtime.quantize.own_text import OwnText, write_text
from specc.runtime.quantize.quantizer import Progress, Quantizer, plain, resolved
from specc.runtime.quantize.report import InputRow, Row, input_report, report, told_clipped
from specc.runtime.storage import checkpoint, committed
from specc.runtime.storage.quantized_run import ARTIFACT, REPORT
from specc.runtime.storage.run_directory import SPEC, Run, locked, readable
from specc.runtime.train.sources.source import source_of

HOPELESS = 4096  # lines of a set, none of them exact: a model that has hardly trained is not decoded to the end


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """What `quantize` made.

    Attributes:
        artifact: the file that ships.
        spec: the resolved spec in it, one rule a parameter.
        step: of the checkpoint that was quantized.
        size, budget: the bytes of the file, and how many it may have.
        rows: a row a parameter.
        inputs: a row for each input of int8 products.
        promoted: the parameters that got more bits, by falling Hessian trace.
        before, after: the validation loss with the weights as trained, and as an artifact gives them.
        calibration: what was calibrated on, as report.json has it; None where nothing was.
        seconds: what the calibration took, with the writing of its text; report.json is the same whatever it took.
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
    """What is None is taken from the run or the machine.

    Attributes:
        data: a source as `specc.runtime.data.windows.stream.open_stream` takes it; its train split calibrates, unless
            the model writes that text itself, its val split measures the loss.
        max_tokens: measure the loss on so many tokens only.
        target, device: where to compute.
        search: more folders to look for the tokenizer in.
        cache: where tokenized text is kept.
        overrides: `--set` texts about the spec's `quant`, for a run that was trained with another one.
        reserved: bytes of the spec's budget that are left to what ships beside the artifact.
    """

    data: str | None = None
    max_tokens: int | None = None
    target: str | None = None
    device: str | None = None
    search: tuple[Path, ...] = ()
    cache: Path | None = None
    overrides: tuple[str, ...] = ()
    reserved: int = 0


def quantize(path: Path, options: QuantizeOptions, say: Say, progress: Progress | None = None) -> QuantizeResult:
    """Quantizes the weights that a run ends with, as its spec's `quant` says, into the run's `quantized/`.

    That folder holds the artifact, spec.json (resolved) and report.json, and is replaced as one. The same run
    gives the same bytes, on one machine with one number of threads. `progress(stage, done, total)` follows
    the stages `write`, `calibrate`, `quantize` and `evaluate`.

    Raises QuantizeError when the spec quantizes nothing, a parameter cannot be quantized as asked, or the
    budget cannot be met (nothing is written then); RunDirectoryError, RunFailure, IntegrityError and
    DataError for the run and the data; SpecError for overrides. What the run was trained to stays as it was.
    """
    try:
        run = Run.open(path).requantized(options.overrides)
        if run.spec.quant is None:
            raise QuantizeError(f"{run.spec.name} does not say how to quantize", "add quant: to the spec")
        with locked(run.staged.parent):  # first: where nothing can be written, nothing is worked out
            return _quantize(run, options, say, progress)
    except QuantizeError as error:
        again = f"specc quantize {shlex.quote(str(path))} --set quant.KEY=VALUE"
        kept = f"the trained weights are kept; go on with: {again}"
        raise QuantizeError(error.message, f"{error.hint}\n{kept}" if error.hint else kept) from error


def _quantize(run: Run, options: QuantizeOptions, say: Say, progress: Progress | None) -> QuantizeResult:
    tell = progress or (lambda stage, done, total: None)
    quant = run.spec.quant
    assert quant is not None
    run, weights, step = as_trained(run, say)
    opened = opened_run(run, weights, options.target, options.device, options.search)
    scored = EvaluateOptions(options.data, max_tokens=options.max_tokens, cache=options.cache, hopeless=HOPELESS)

    def measure(model: OpenedModel) -> Scored:
        metric = METRICS[run.spec.eval.metric]
        return metric(model, scored, lambda done, total: tell("evaluate", done, total), None)

    before = measure(opened)
    say(f"before: {before.report()[0]}")
    base: Allocation = {name: plain(s) for name, s in allocation(quant, opened.loaded.programs.params).items()}
    hessians: Mapping[str, Tensor] = {}
    gradients: Mapping[str, Gradients] = {}
    ranges: Mapping[str, Range] = {}
    own: OwnText | None = None
    chooses = quant.promote is not None or quant.allocate is not None
    sees = chooses or any(scheme.needs_hessian for scheme in base.values())
    on_device = {name: tensor.to(opened.device) for name, tensor in weights.items()}
    sources = integer_products(lower(run.spec, opened.loaded.target.name), base)
    trained = _trained(run, step, sources, say)
    began = time.monotonic()
    if (sees or sources) and quant.calibrate.source == "self":
        seed = run.spec.train.seed
        own = write_text(opened, quant.calibrate, seed, lambda done, total: tell("write", done, total))
        captured = f", {own.preparing:.1f} s of them to capture its steps" if own.preparing else ""
        say(f"wrote {own.tokens[:, 1:].numel():,} tokens to calibrate on in {own.seconds:.1f} s{captured}")
    if sees:
        hessians, gradients = _calibrate(run, opened, options, weights, own, tell)
    if sources:
        ranges = _ranges(run, opened, options, on_device, sources, trained, own, tell)
    calibration, seconds = (_facts(run, own) if sees or sources else None), time.monotonic() - began
    if calibration is not None:
        say(f"calibrated in {seconds:.1f} s")
    quantizer = Quantizer(run.spec, on_device, hessians, gradients, tell, sources, ranges, trained, run.data_digests)
    schemes = quantizer.chosen(base, say, options.reserved)
    model = quantizer.model(schemes)
    inputs = input_report(sources, ranges, model)
    if line := told_clipped(inputs):
        say(line)

    if sources:
        loaded = realize_stored(
            resolved(run.spec, schemes), opened.loaded.target.name, options.device, model, dequantized(model)
        )
        after = measure(replace(opened, loaded=loaded))
    else:
        assign(opened.loaded, dequantized(model))
        after = measure(opened)
    say(f"after: {after.report()[0]}")
    result = _write(run, options, step, quantizer, schemes, base, inputs, (before, after), calibration, seconds)
    say(f"{result.artifact}: {result.size.total:,} bytes")
    return result


def _trained(run: Run, step: int, sources: Sequence[Source], say: Say) -> Mapping[str, Tensor]:
    """The scales of inputs, by leader, that the run trained with and quantizes by; empty where it has none, or trained
    for another `quant`."""
    if not sources or run.spec.train.qat is None:
        return {}
    trained = trained_scales(checkpoint.load(checkpoint.path_of(run.checkpoints, step)).optimizer, sources)
    if trained and run.spec.quant != Run.open(run.directory).spec.quant:
        say("quant is not what the run trained with: its scales are calibrated anew")
        return {}
    if trained:
        say("inputs keep the scales that the run trained with, and weights are rounded as it rounded them")
    return trained


def _facts(run: Run, own: OwnText | None) -> dict[str, Any]:
    """Where the calibration came from, for the report."""
    assert run.spec.quant is not None
    wanted = run.spec.quant.calibrate
    facts = {"source": wanted.source, "sequences": wanted.sequences, "seed": run.spec.train.seed}
    if own is None:
        return facts
    length = own.tokens.shape[1] - 1
    how = {"length": length, "temperature": wanted.temperature, "begin": wanted.begin}
    return {**facts, **how, "start_tokens": own.starts}


def _calibrate(
    run: Run,
    opened: OpenedModel,
    options: QuantizeOptions,
    weights: Mapping[str, Tensor],
    own: OwnText | None,
    tell: Progress,
) -> tuple[Mapping[str, Tensor], Mapping[str, Gradients]]:
    """The Hessians of the run's spec, and where it allocates bits the gradients, from the unfused model on its own text
    or the training split."""
    quant = run.spec.quant
    assert quant is not None
    wanted = quant.calibrate
    unfused = realize(run.spec, opened.loaded.target.name, options.device, weights, fuse=False)
    with ExitStack() as stack:
        windows: Callable[[], Iterator[tuple[Tensor, Tensor]]]
        if own is not None:
            windows = partial(own.windows, wanted.batch)
        else:
            stream = open_stream(options.data or run.data, "train", opened.tokenizer, options.cache or token_cache())
            stack.callback(stream.close)
            windows = partial(calibration_windows, stream, wanted, run.spec.model.window, run.spec.train.seed)

        def telling(stage: str) -> Callable[[int], None]:
            return lambda done: tell(stage, done, wanted.sequences)

        try:
            hessians = capture_hessians(unfused.model, windows(), opened.device, telling("calibrate"))
            if quant.allocate is None:
                return hessians, {}
            return hessians, capture_gradients(unfused.model, windows(), opened.device, telling("gradients"))
        except torch.OutOfMemoryError as error:
            raise _too_large(run, wanted) from error


def _too_large(run: Run, wanted: Calibrate) -> RunFailure:
    fewer = f"specc quantize {shlex.quote(str(run.directory))} --set quant.calibrate.batch={max(wanted.batch // 2, 1)}"
    return RunFailure("out of GPU memory while calibrating", f"the trained weights are kept; go on with: {fewer}")


def _ranges(
    run: Run,
    opened: OpenedModel,
    options: QuantizeOptions,
    weights: Mapping[str, Tensor],
    sources: Sequence[Source],
    trained: Mapping[str, Tensor],
    own: OwnText | None,
    tell: Progress,
) -> Mapping[str, Range]:
    """What the inputs of int8 products hold, by weight, on the model's own text or the training data, and what the
    scales that they were trained with cut off."""
    assert run.spec.quant is not None
    wanted = run.spec.quant.calibrate
    programs = lower(run.spec, opened.loaded.target.name)
    with ExitStack() as stack:
        rows: Iterator[Mapping[str, Tensor]]
        if own is not None:
            rows = ({"ids": ids, "targets": targets} for ids, targets in own.windows(wanted.batch))
        else:
            ready = source_of(run.spec).ready(run.spec, opened.search)
            data = ready.open(options.data or run.data, options.cache or token_cache(), stack)
            rows = data.calibration(wanted.sequences, wanted.batch)
        batches = ({name: ids.to(opened.device) for name, ids in batch.items()} for batch in rows)
        try:

            def telling(done: int) -> None:
                tell("calibrate", done, wanted.sequences)

            return input_ranges(programs, sources, batches, weights, telling, trained)
        except torch.OutOfMemoryError as error:
            raise _too_large(run, wanted) from error


def _write(
    run: Run,
    options: QuantizeOptions,
    step: int,
    quantizer: Quantizer,
    schemes: Allocation,
    base: Allocation,
    inputs: tuple[InputRow, ...],
    losses: tuple[Scored, Scored],
    calibration: Mapping[str, Any] | None,
    seconds: float,
) -> QuantizeResult:
    """Puts the artifact, its spec and the report in place of what the run had; its staging folder is locked."""
    spec = resolved(run.spec, schemes)
    model, deployment = quantizer.model(schemes), Deployment.of(spec)
    sensitivity = traces(quantizer.hessians)
    rows = report(quantizer.weights, model, quantizer.hessians, quantizer.gradients, quantizer.solutions)
    more = promoted(base, schemes, sensitivity)
    assert spec.quant is not None
    staging = run.staged.parent
    try:
        committed.settle(run.quantized, run.staged)
        _clear(staging)
        size = write_artifact(
            staging / ARTIFACT,
            spec=canonical(spec).encode(),
            interface=deployment.interface,
            code=deployment.code,
            layout=deployment.layout,
            tensors=model.tensors,
            table=described(schemes, model.tensors),
            trained_on=run.data_digests,
        )
        artifact, budget = run.quantized / ARTIFACT, spec.quant.budget_bytes
        facts = (spec, step, size, budget, rows, inputs, more, *losses)
        result = QuantizeResult(artifact, *facts, calibration, seconds)
        files = (
            (SPEC, readable(spec).encode()),
            (REPORT, report_json(result, sensitivity, options).encode()),
            (ARTIFACT, (staging / ARTIFACT).read_bytes()),
        )
        committed.write(run.staged, files)
        committed.replace(run.quantized, run.staged)
        _clear(staging)
    except OSError as error:
        hint = "free some space, then quantize again"
        raise RunFailure(f"cannot write {run.quantized}: {error.strerror}", hint) from error
    return result


def _clear(staging: Path) -> None:
    """Removes what this, or a run that was killed, left in the staging folder; the lock in it stays."""
    for entry in staging.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name == ARTIFACT:
            entry.unlink()


def report_json(result: QuantizeResult, sensitivity: Mapping[str, float], options: QuantizeOptions) -> str:
    """What report.json says: sizes, the loss before and after, a row a parameter, and one an input of int8 products.

    `output_error` is null where there was no Hessian or no output to compare with; `trace` is null without
    a Hessian.
    """
    rows = []
    for row in result.rows:
        error = row.output_error if row.output_error is not None and math.isfinite(row.output_error) else None
        promotion = {"trace": sensitivity.get(row.name), "promoted": row.name in result.promoted}
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
