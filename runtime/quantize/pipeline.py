"""`specc quantize`: from a trained run to the artifact that ships.

Calibrate, give the parameters that matter more bits, quantize each, write down what was done as a resolved
spec, and hold the artifact to its budget by its exact bytes.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from specc.compiler.build import canonical
from specc.compiler.passes.assign_quant import allocation
from specc.compiler.pattern import matches
from specc.compiler.quant.rows import PerRow
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec import RULES, SCHEMES, Spec
from specc.runtime import committed
from specc.runtime.data import BitsPerByte, open_stream
from specc.runtime.errors import QuantizeError, RunFailure
from specc.runtime.evaluate import EvaluateOptions, evaluate_opened
from specc.runtime.export.artifact import ArtifactSize, measured_bytes, write_artifact
from specc.runtime.load import assign
from specc.runtime.opened import (
    ARTIFACT,
    Deployment,
    Opened,
    Say,
    final_weights,
    opened_run,
    realize,
    token_cache,
)
from specc.runtime.quantize.budget import Allocation, choose, promoted
from specc.runtime.quantize.calibrate import calibration_windows, capture_gradients, capture_hessians
from specc.runtime.quantize.hessian import traces
from specc.runtime.quantize.report import Row, report
from specc.runtime.quantize.solve import added_nats, largest_errors, solve_bits
from specc.runtime.quantize.tensors import QuantizedModel, dequantized, entropy_bytes, quantize_tensors
from specc.runtime.run import SPEC, Run, locked, readable

REPORT = "report.json"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """What `quantize` made.

    Attributes:
        artifact: the file that ships.
        spec: the resolved spec in it, one rule a parameter.
        step: of the checkpoint that was quantized.
        size, budget: the bytes of the file, and how many it may have.
        rows: a row a parameter.
        promoted: the parameters that got more bits, by falling Hessian trace.
        before, after: the validation loss with the weights as trained, and as an artifact gives them.
    """

    artifact: Path
    spec: Spec
    step: int
    size: ArtifactSize
    budget: int | None
    rows: tuple[Row, ...]
    promoted: tuple[str, ...]
    before: BitsPerByte
    after: BitsPerByte


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """What is None is taken from the run or the machine.

    Attributes:
        data: a source as `specc.runtime.data.open_stream` takes it; its train split calibrates, its val split
            measures the loss.
        max_tokens: measure the loss on so many tokens only.
        target, device: where to compute.
        search: more folders to look for the tokenizer in.
        cache: where tokenized text is kept.
    """

    data: str | None = None
    max_tokens: int | None = None
    target: str | None = None
    device: str | None = None
    search: tuple[Path, ...] = ()
    cache: Path | None = None


def quantize(path: Path, options: QuantizeOptions, say: Say, progress: Progress | None = None) -> QuantizeResult:
    """Quantizes the weights that a run ends with, as its spec's `quant` says, into the run's `quantized/`.

    That folder holds the artifact, spec.json (resolved) and report.json, and is replaced as one. The same run
    gives the same bytes, on one machine with one number of threads. `progress(stage, done, total)` follows
    the stages `calibrate`, `quantize` and `evaluate`.

    Raises QuantizeError when the spec quantizes nothing, a parameter cannot be quantized as asked, or the
    budget cannot be met (nothing is written then); RunDirectoryError, RunFailure, IntegrityError and
    DataError for the run and the data.
    """
    tell = progress or (lambda stage, done, total: None)
    run = Run.open(path)
    quant = run.spec.quant
    if quant is None:
        raise QuantizeError(f"{run.spec.name} does not say how to quantize", "add quant: to the spec")
    weights, step = final_weights(run, say)
    opened = opened_run(run, weights, options.target, options.device, options.search)
    scored = EvaluateOptions(options.data, max_tokens=options.max_tokens, cache=options.cache)

    def measure_loss() -> BitsPerByte:
        return evaluate_opened(opened, scored, lambda done, total: tell("evaluate", done, total))

    before = measure_loss()
    say(f"before: {_loss(before)}")
    base: Allocation = {name: plain(s) for name, s in allocation(quant, opened.loaded.programs.params).items()}
    hessians: Mapping[str, Tensor] = {}
    gradients: Mapping[str, Tensor] = {}
    chooses = quant.promote is not None or quant.allocate is not None
    if chooses or any(scheme.needs_hessian for scheme in base.values()):
        hessians, gradients = _calibrate(run, opened, options, weights, tell)
    on_device = {name: tensor.to(opened.device) for name, tensor in weights.items()}
    quantizer = Quantizer(run.spec, on_device, hessians, gradients, tell)
    base = quantizer.corrected(base)
    schemes = quantizer.chosen(base, say)
    model = quantizer.model(schemes)

    assign(opened.loaded, dequantized(model))
    after = measure_loss()
    say(f"after: {_loss(after)}")
    result = _write(run, step, quantizer, schemes, base, (before, after))
    say(f"{result.artifact}: {result.size.total:,} bytes")
    return result


def plain(scheme: Scheme) -> Scheme:
    """The scheme of a rule, without what the rule matches."""
    kind = next(kind for kind in SCHEMES if isinstance(scheme, kind))
    settings = {name: getattr(scheme, name) for name in kind.model_fields}
    return cast(Scheme, kind.model_validate(settings))


def resolved(spec: Spec, schemes: Allocation) -> Spec:
    """`spec` with its quantization written out: one rule a parameter, and nothing left to choose."""
    assert spec.quant is not None
    rule_of = dict(zip(SCHEMES, RULES, strict=True))
    rules = tuple(
        rule_of[type(scheme)].model_validate({"match": name, **dict(scheme)}) for name, scheme in schemes.items()
    )
    decided = {"rules": rules, "promote": None, "allocate": None, "correct": None}
    return spec.model_copy(update={"quant": spec.quant.model_copy(update=decided)})


class Quantizer:
    """Quantizes parameters as allocations are tried; each (parameter, scheme) once."""

    def __init__(
        self,
        spec: Spec,
        weights: Mapping[str, Tensor],
        hessians: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        tell: Progress,
    ) -> None:
        self.spec, self.weights, self.hessians, self.gradients = spec, weights, hessians, gradients
        self._tell = tell
        self._made: dict[tuple[str, Scheme], QuantizedModel] = {}
        self._sizes: dict[tuple[str, Scheme], int] = {}

    def model(self, schemes: Allocation) -> QuantizedModel:
        """Every parameter by its scheme. Raises QuantizeError naming one that cannot be."""
        for done, (name, scheme) in enumerate(schemes.items(), 1):
            if (name, scheme) not in self._made:
                one = quantize_tensors({name: self.weights[name]}, {name: scheme}, self.hessians)
                self._made[name, scheme] = one
                self._sizes[name, scheme] = entropy_bytes(one)
                self._tell("quantize", done, len(schemes))
        shapes = {name: tuple(self.weights[name].shape) for name in schemes}
        tensors = {name: self._made[name, scheme].tensors[name] for name, scheme in schemes.items()}
        return QuantizedModel(dict(schemes), shapes, tensors)

    def corrected(self, schemes: Allocation) -> Allocation:
        """With the corrections of low rank that the spec asks for. Raises QuantizeError where fewer parameters can have
        one."""
        assert self.spec.quant is not None
        wish = self.spec.quant.correct
        if wish is None:
            return schemes
        able = {name: s for name, s in schemes.items() if isinstance(s, PerRow) and matches(wish.match, name)}
        if len(able) < wish.count:
            message = f"correct asks for {wish.count} parameters, and only {len(able)} that it covers have codes"
            raise QuantizeError(message, "lower quant.correct.count or widen quant.correct.match")
        taken = largest_errors(list(able), lambda name: self.error(name, able[name]), wish.count)
        return {n: able[n].with_correction(wish.rank) if n in taken else s for n, s in schemes.items()}

    def chosen(self, base: Allocation, say: Say) -> Allocation:
        """`base` with the bits that the spec leaves to choose. Raises QuantizeError as `solve_bits` and `choose` do."""
        quant = self.spec.quant
        assert quant is not None
        if quant.allocate is None or quant.budget_bytes is None:
            return choose(quant, base, traces(self.hessians), self.estimate, self.exact, say)

        def alone(name: str, scheme: Scheme) -> int:
            return self.estimate({name: scheme})

        return solve_bits(quant.allocate, quant.budget_bytes, base, self.cost, alone, self.exact, say)

    def error(self, name: str, scheme: Scheme) -> Tensor:
        """What a parameter loses by a scheme, where the parameter is."""
        made = self.model({name: scheme}).tensors[name]
        weight = self.weights[name]
        return weight - scheme.dequantize(made, tuple(weight.shape)).to(weight.device)

    def cost(self, name: str, scheme: Scheme) -> float | None:
        """What that adds to the loss, by estimate, in nats a token; None where calibration does not tell."""
        if name not in self.hessians or name not in self.gradients:
            return None
        return added_nats(self.error(name, scheme), self.hessians[name], self.gradients[name])

    def estimate(self, schemes: Allocation) -> int:
        """About how many bytes the arrays take compressed."""
        self.model(schemes)
        return sum(self._sizes[item] for item in schemes.items())

    def exact(self, schemes: Allocation) -> int:
        """The bytes of the artifact."""
        model = self.model(schemes)
        text = canonical(resolved(self.spec, schemes)).encode()
        return measured_bytes(spec=text, layout=model.layout(), tensors=model.tensors)


def _calibrate(
    run: Run, opened: Opened, options: QuantizeOptions, weights: Mapping[str, Tensor], tell: Progress
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """The Hessians of the run's spec, and where it allocates bits the gradients, from the unfused model on the training
    split."""
    quant = run.spec.quant
    assert quant is not None
    wanted = quant.calibrate
    unfused = realize(run.spec, opened.loaded.target.name, options.device, weights, fuse=False)
    stream = open_stream(options.data or run.data, "train", opened.tokenizer, options.cache or token_cache())

    def windows() -> Iterator[tuple[Tensor, Tensor]]:
        return calibration_windows(stream, wanted, run.spec.model.window, run.spec.train.seed)

    def telling(stage: str) -> Callable[[int], None]:
        return lambda done: tell(stage, done, wanted.sequences)

    try:
        hessians = capture_hessians(unfused.model, windows(), opened.device, telling("calibrate"))
        if quant.allocate is None:
            return hessians, {}
        return hessians, capture_gradients(unfused.model, windows(), opened.device, telling("gradients"))
    except torch.OutOfMemoryError as error:
        raise RunFailure("out of GPU memory while calibrating", "lower quant.calibrate.batch") from error
    finally:
        stream.close()


def _write(
    run: Run,
    step: int,
    quantizer: Quantizer,
    schemes: Allocation,
    base: Allocation,
    losses: tuple[BitsPerByte, BitsPerByte],
) -> QuantizeResult:
    """Puts the artifact, its spec and the report in place of what the run had."""
    spec = resolved(run.spec, schemes)
    model, deployment = quantizer.model(schemes), Deployment.of(spec)
    sensitivity = traces(quantizer.hessians)
    rows = report(quantizer.weights, model, quantizer.hessians, quantizer.gradients)
    more = promoted(base, schemes, sensitivity)
    assert spec.quant is not None
    before, after = losses
    # Beside the run's own lock: a run that still trains may be quantized from its last checkpoint.
    staging = run.directory / ".quantizing"
    with locked(staging):
        try:
            _clear(staging)
            size = write_artifact(
                staging / ARTIFACT,
                spec=canonical(spec).encode(),
                interface=deployment.interface,
                code=deployment.code,
                layout=deployment.layout,
                tensors=model.tensors,
            )
            result = QuantizeResult(
                run.quantized / ARTIFACT, spec, step, size, spec.quant.budget_bytes, rows, more, before, after
            )
            files = (
                (SPEC, readable(spec).encode()),
                (REPORT, report_json(result, sensitivity).encode()),
                (ARTIFACT, (staging / ARTIFACT).read_bytes()),
            )
            committed.write(staging / run.quantized.name, files)
            if run.quantized.exists():
                run.quantized.rename(staging / "before")
            (staging / run.quantized.name).rename(run.quantized)
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


def report_json(result: QuantizeResult, sensitivity: Mapping[str, float]) -> str:
    """What report.json says: sizes, the loss before and after, and a row a parameter.

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
        "promoted": list(result.promoted),
        "before": asdict(result.before),
        "after": asdict(result.after),
        "parameters": rows,
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _loss(bits: BitsPerByte) -> str:
    bpb = bits.bpb if bits.bpb is not None else bits.bpb_pieces
    return f"{bits.nats / bits.tokens:.4f} nats/token, {bpb:.4f} bpb"
