"""Quantizes the weights of a trained model: calibrates the model, chooses the bits, and quantizes the parameters.

`specc quantize` calls `quantize_weights` for a run. The program of a submission calls `quantize_weights` after
training.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.spec import QuantSpec
from specc.runtime.artifact.quantized_model import QuantizedModel
from specc.runtime.calibration.added_nats import added_nats
from specc.runtime.calibration.calibrate import capture_hessians
from specc.runtime.calibration.uses import capture_uses
from specc.runtime.decode.text import StepFunction
from specc.runtime.errors import RunFailure
from specc.runtime.log import Say
from specc.runtime.quantize.choose_bits import Measure, choose_bits
from specc.runtime.quantize.quantizer import IntegerInputs, Progress, Quantizer, Statistics
from specc.runtime.quantize.written_text import TextModel, WrittenText, write_text

Windows = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A trained model to quantize.

    Attributes:
        text: the model with its tokenizer and device, which can generate text.
        weights: the trained parameters, f32, by name, on the device of `text`.
        seed: the seed of the run.
        window: the length of the context in tokens.
        reused: the names of the parameters that do not belong to exactly one matrix product, as the function `reused`
            in compiler/passes/assign_quant.py returns them.
        unfused: a function that returns the module without fused kernels, with the parameters `weights`, in eval mode.
        windows: a function that yields batches (ids, targets) of the training text, i64 [rows, window] each. The
            setting `quant.calibrate` determines the number of rows and the window.
        step: maps a number of texts to the function that runs a decoding step. None for the decoding program of `text`.
    """

    text: TextModel
    weights: Mapping[str, Tensor]
    seed: int
    window: int
    reused: frozenset[str]
    unfused: Callable[[], nn.Module]
    windows: Callable[[], Windows]
    step: Callable[[int], StepFunction] | None = None


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """The result of `quantize_weights`.

    Attributes:
        schemes: the chosen scheme of each parameter.
        stored: the quantized arrays that the artifact stores.
        quantizer: the object that quantizes parameters and caches the results, with the calibration statistics.
        text: the calibration text that the model generated; None if calibration used the training text or no text.
        seconds: the duration of the calibration; None if nothing was calibrated.
    """

    schemes: Mapping[str, Scheme]
    stored: QuantizedModel
    quantizer: Quantizer
    text: WrittenText | None
    seconds: float | None


def quantize_weights(
    model: TrainedModel,
    quant: QuantSpec,
    base: Mapping[str, Scheme],
    measure: Measure,
    say: Say,
    progress: Progress,
    *,
    integer_inputs: Callable[[WrittenText | None], IntegerInputs] | None = None,
    reserved: int = 0,
) -> QuantizedWeights:
    """Quantizes the weights of a model.

    Args:
        model: the weights, the modules to calibrate, and the data.
        quant: the settings of the quantization.
        base: the scheme of each parameter according to the rules of `quant`.
        measure: returns the exact size in bytes of the artifact of a quantized model.
        say: the function that receives a message for each stage, and for each allocation that is measured.
        progress: a function called as `progress(stage, done, total)` in the stages `write`, `calibrate`, `uses`,
            `gradients` and `quantize`.
        integer_inputs: measures the inputs of int8 products on a text, or on the training data if the text is None. The
            argument is None if the model has no int8 products.
        reserved: the number of bytes of the budget that are reserved for the code of a submission.

    Returns:
        The chosen schemes, the stored arrays and the measurements.

    Raises:
        QuantizeError: if a scheme cannot store its parameter, or the budget is too small.
        RunFailure: if GPU memory is full.
        DataError: if the training data cannot be read.
    """
    hessians = quant.promote is not None or quant.allocate is not None
    hessians = hessians or any(scheme.needs_hessian for scheme in base.values())
    start_time, text = time.monotonic(), None
    if (hessians or integer_inputs) and quant.calibrate.source == "self":
        report = partial(progress, "write")
        text = write_text(model.text, quant.calibrate, model.window, model.seed, report, model.step)
        capture = f", of which {text.capture_seconds:.1f} s captured CUDA graphs" if text.capture_seconds else ""
        say(f"generated {text.tokens[:, 1:].numel():,} calibration tokens in {text.seconds:.1f} s{capture}")
    try:
        statistics = _statistics(model, quant, base, text, progress) if hessians else Statistics()
        inputs = integer_inputs(text) if integer_inputs else IntegerInputs()
    except torch.OutOfMemoryError as error:
        hint = f"lower quant.calibrate.batch, to {max(quant.calibrate.batch // 2, 1)} for instance"
        raise RunFailure("out of GPU memory while calibrating", hint) from error
    seconds = time.monotonic() - start_time if hessians or integer_inputs else None
    if seconds is not None:
        say(f"calibrated in {seconds:.1f} s")
    quantizer = Quantizer(model.weights, statistics, inputs, progress)
    schemes = choose_bits(quantizer, quant, base, measure, say, reserved)
    return QuantizedWeights(schemes, quantizer.model(schemes), quantizer, text, seconds)


def _statistics(
    model: TrainedModel, quant: QuantSpec, base: Mapping[str, Scheme], text: WrittenText | None, progress: Progress
) -> Statistics:
    def windows() -> Windows:
        return model.windows() if text is None else text.windows(quant.calibrate.batch)

    reused = {name for name in model.reused if base[name].needs_hessian}
    device, sequences = model.text.device, quant.calibrate.sequences
    return statistics_of(model.unfused(), windows, device, reused, progress, sequences, quant.allocate is not None)


def statistics_of(
    unfused: nn.Module,
    windows: Callable[[], Windows],
    device: torch.device,
    reused: Collection[str],
    progress: Progress,
    sequences: int,
    rises: bool,
) -> Statistics:
    """Measures the statistics that quantization needs, by running a model on text.

    Args:
        unfused: the model without fused kernels, on `device`.
        windows: returns batches (ids, targets) of the text, i64 [rows, window] each.
        device: the device of the model.
        reused: the names of the parameters for which `Statistics.uses` is measured.
        progress: a function called as `progress(stage, done, total)` in the stages `calibrate`, `uses` and `gradients`.
        sequences: the number of rows of the text.
        rises: whether to compute `Statistics.rises`.
    """

    def counted(stage: str) -> Callable[[int], None]:
        return lambda done: progress(stage, done, sequences)

    hessians = capture_hessians(unfused, windows(), device, counted("calibrate"))
    uses = capture_uses(unfused, reused, windows(), device, counted("uses")) if reused else {}

    def estimate(errors: Mapping[str, Sequence[Tensor]]) -> Mapping[str, Sequence[float]]:
        return added_nats(unfused, windows, errors, device, partial(progress, "gradients"))

    return Statistics(hessians, uses, estimate if rises else None)
