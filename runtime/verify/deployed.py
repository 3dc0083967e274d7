"""Compares the int8 programs of an artifact with references."""

import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.compiler import pipeline
from specc.compiler.expr import torch_value
from specc.compiler.int8.products import integer_products
from specc.compiler.kernels.int8.gemm import int8_epilogue
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.quantized import LARGEST, Int8Linear
from specc.compiler.programs import reference
from specc.compiler.spec.spec import Spec
from specc.compiler.targets import TARGETS
from specc.runtime.artifact.quantized_model import QuantizedModel, dequantized
from specc.runtime.calibration.input_ranges import input_ranges
from specc.runtime.model.load import Loaded, device_of, instantiate, unavailable
from specc.runtime.open_model import realize_stored
from specc.runtime.quantize.assignment import base_schemes, resolved
from specc.runtime.quantize.quantizer import IntegerInputs, Quantizer, Statistics
from specc.runtime.verify.judge import LOOSER, PEAK, RMS, Judge, inputs_of, rms_of, sizes_of
from specc.runtime.verify.random_inputs import int8_operands
from specc.runtime.verify.step_by_step import STEPPED
from specc.runtime.verify.verify import Check, batch_of, sample_tokens, traces

ROWS = (1, 7, 16, 33, 129)
SAMPLES = 16
# The allowed RMS errors, as fractions of the RMS error of int8 quantization. A value whose last bit differs may be
# rounded to the next code. All later values of the same sample then differ. Only the limit for the median sample is
# therefore strict. Among 180 small models, the fraction was at most 0.02 for the median sample, and at most 0.2 for all
# samples.
SHARE = 0.1  # for the median sample
WHOLE_SHARE = 0.5  # for all samples together
ROUNDING = 1e-5  # this error in nats, which f32 sums cause, is always allowed


def verify_deployed(spec: Spec, targets: tuple[str, ...], seed: int = 0) -> Iterator[Check]:
    """Checks the int8 programs of a spec on each target, and yields the results.

    Targets without int8 programs are skipped. The parameters are random, and are quantized as the spec states. The
    input ranges of int8 products are measured on random token ids. Modules that exist only in training have no int8
    products.
    """
    spec = spec.at_rest
    for target in targets:
        if pipeline.deployed(spec, target) is None:
            continue
        with tempfile.TemporaryDirectory(prefix="specc-verify-") as folder:
            yield from traces(instantiate(spec, target, Path(folder), deployed=True), "deployed")
        if reason := unavailable(TARGETS[target]):
            yield Check(target, "values, kernels, cache, deployed", None, reason)
            continue
        torch.manual_seed(seed)
        programs = pipeline.lower(spec, target)
        weights = {
            param.name: torch.randn(param.shape) * (0.2 if len(param.shape) < 2 else (3.0 / param.shape[-1]) ** 0.5)
            for param in programs.params
        }
        hessians = {name: torch.eye(weight.shape[-1]).double() for name, weight in weights.items() if weight.dim() > 1}
        batches = [batch_of(spec, programs, "score", 16, _tokens(spec), "cpu")]
        stored, final = quantized(spec, target, weights, batches, hessians)
        loaded = realize_stored(final, target, None, stored, dequantized(stored))
        yield from _values(spec, loaded, weights)
        yield from _kernels(spec, loaded)


def quantized(
    spec: Spec,
    target: str,
    weights: Mapping[str, Tensor],
    batches: Iterable[Mapping[str, Tensor]],
    hessians: Mapping[str, Tensor] | None = None,
) -> tuple[QuantizedModel, Spec]:
    """Quantizes weights as `specc quantize` does, but without a search for the best bit widths.

    Args:
        spec: the spec. Its section `quant` states the schemes.
        target: the target of the int8 programs.
        weights: the parameters by name, f32, on the device of `batches`.
        batches: the token ids on which the input ranges of int8 products are measured.
        hessians: the Hessians by weight name, f64 [columns, columns].

    Returns:
        The stored arrays, and the spec with the scheme of each parameter.
    """
    programs = pipeline.lower(spec, target)
    schemes = base_schemes(spec.quant, programs.params)
    sources = integer_products(programs, schemes)
    inputs = IntegerInputs(sources, input_ranges(programs, sources, batches, weights))
    return Quantizer(weights, Statistics(hessians or {}), inputs).model(schemes), resolved(spec, schemes)


def _tokens(spec: Spec) -> int:
    return sample_tokens(spec, 48)


def _values(spec: Spec, loaded: Loaded, weights: Mapping[str, Tensor]) -> Iterator[Check]:
    """Compares the scores of whole sequences, and the scores of token-by-token decoding, with f64 references.

    The references use the same quantized codes as the model.
    """
    target = loaded.target.name
    model: Any = loaded.model
    inputs = batch_of(spec, loaded.programs, "score", SAMPLES, _tokens(spec), device_of(loaded.target))
    stored = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    exact = {n: t.detach().cpu() for n, t in stored.items()}
    exact = {name: value.double() if value.is_floating_point() else value for name, value in exact.items()}
    ids = {name: value.cpu() for name, value in inputs.items()}
    floats = {name: weight.double() for name, weight in weights.items()}
    with torch.no_grad():
        truth = reference.run(loaded.programs, "score", ids, exact)["loss"]
        whole = reference.run(pipeline.lower(spec, target), "score", ids, floats)["loss"]
        cost = rms_of(truth - whole)
        # Operations between int8 products compute in the dtype of the model
        rounded = reference.run(loaded.programs, "score", ids, {n: t.detach().cpu() for n, t in stored.items()})["loss"]
        rounding = rounded.double() - truth
        scores = model.score(*inputs.values()).cpu().double()
        stepped = next(STEPPED[program.name] for program in loaded.programs.programs if program.name in STEPPED)
        read, nats = stepped(model, _tokens(spec), spec.model.unscored + 1, *inputs.values())
    for name, wrong in (
        ("score against float64", scores - truth),
        ("cached equals uncached", nats.cpu().double() - truth[:, read]),
    ):
        detail = f"RMS error {rms_of(wrong):.1e} nats, median {_middle(wrong):.1e}; error of int8 {cost:.1e}"
        yield Check(target, f"{name}, deployed", near(wrong, cost, rounding), detail)


def near(wrong: Tensor, cost: float, rounding: Tensor) -> bool:
    """Returns whether errors are within the tolerance. NaN is never within the tolerance.

    Args:
        wrong: the errors of the int8 model relative to its reference, in nats, [samples, tokens].
        cost: the RMS error in nats of the int8 model relative to the floating-point model. The tolerance is a fraction
            of this error.
        rounding: the errors of eager Torch in the dtype of the model, in nats, [samples, tokens]. The tolerance
            includes LOOSER times these errors.
    """
    middle = SHARE * cost + LOOSER * _middle(rounding) + ROUNDING
    return _middle(wrong) <= middle and rms_of(wrong) <= WHOLE_SHARE * cost + LOOSER * rms_of(rounding) + ROUNDING


def _kernels(spec: Spec, loaded: Loaded) -> Iterator[Check]:
    plan = pipeline.deployed_plan(spec, loaded.target.name, "")
    assert plan is not None
    source = sys.modules[type(loaded.model).__module__]
    for choice in plan.generated:
        function, device = vars(source)[plan.called(choice)], device_of(loaded.target)
        error = _product_error if isinstance(choice.site.node.op, Int8Linear) else _judged_error
        worst = max(error(choice.site, function, rows, device) for rows in ROWS)
        detail = f"rows {list(ROWS)}: at most {worst:.2f} of the allowed rounding error"
        yield Check(loaded.target.name, f"kernel {choice.rendered.module}, deployed", worst <= 1.0, detail)


def _judged_error(site: Site, function: Any, rows: int, device: str) -> float:
    judge = Judge.of(site, inputs_of(site, sizes_of(site, rows), device))
    return max(max(error.rms / RMS, error.peak / PEAK) for error in judge.errors(judge.call(function)))


def _product_error(site: Site, function: Any, rows: int, device: str) -> float:
    """Returns the largest error of an int8 product, divided by the largest rounding error that its epilogue can cause.

    The epilogue converts the exact integer sums to the outputs. The result is infinity if an output is NaN or has a
    wrong shape.
    """
    epilogue = int8_epilogue(site)
    operands = int8_operands(epilogue, rows, torch.device(device))
    output = function(*operands).cpu()
    x, w, offset, *others = (tensor.cpu() for tensor in operands)
    sums = torch.from_numpy(x.long().numpy() @ w.long().numpy().T) + offset.long()
    values = {value.name: other.double() for value, other in zip(epilogue.operands, others, strict=True)}
    want = torch_value(epilogue.expr, {**values, "p": sums.double()})
    if output.shape != want.shape or bool(output.isnan().any()):
        return float("inf")
    room = {torch.int8: 0.501, torch.float32: 2e-5}.get(output.dtype, 1e-2)
    if epilogue.codes:
        return float((output.double() - want.clamp(-LARGEST, LARGEST)).abs().max()) / room
    return float(((output.double() - want).abs() / want.abs().clamp_min(1.0)).max()) / room


def _middle(values: Tensor) -> float:
    """Returns the median of the root mean squares of `values[0]`, `values[1]`, ..."""
    return float(values.square().flatten(1).mean(1).sqrt().median())
