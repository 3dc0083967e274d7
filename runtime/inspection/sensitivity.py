"""The sensitivity of a matrix to quantization: the increase of the loss if only this matrix is quantized."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specc.compiler.quant.gptq import Gptq
from specc.compiler.quant.none import Unquantized
from specc.compiler.quant.scheme import Scheme, variants
from specc.runtime.errors import QuantizeError
from specc.runtime.metrics.bits_per_byte import BitsPerByte
from specc.runtime.quantize.quantizer import Quantizer

DEFAULT_BITS = 4


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The effect of quantizing one matrix on the loss of the validation text.

    Attributes:
        name: the name of the parameter.
        scheme: the label of the quantization scheme.
        bits: the number of bits per value.
        mse: the mean squared error of the quantized values.
        rise: the measured increase in bits per byte.
        estimate: the increase in bits per byte that the bit allocation of `specc quantize` estimates.
    """

    name: str
    scheme: str
    bits: float
    mse: float
    rise: float
    estimate: float

    @property
    def ratio(self) -> float | None:
        """The ratio of the estimate to the measured increase; None if the loss did not increase."""
        return self.estimate / self.rise if self.rise > 0 else None


def schemes_at(
    base: Mapping[str, Scheme], names: Sequence[str], bits: Sequence[int], weights: Mapping[str, Tensor]
) -> tuple[list[tuple[str, Scheme]], dict[str, str]]:
    """Returns the pairs (parameter, scheme) to measure, and the reason for each parameter that no scheme can quantize.

    Args:
        base: the scheme that the spec gives each parameter.
        names: the names of the parameters.
        bits: the numbers of bits to measure. If empty, the schemes of the spec are measured. If the spec does not
            quantize a parameter, the parameter is measured with GPTQ, by default in 4 bits.
        weights: the values of the parameters, by name.
    """
    pairs, refused = [], {}
    for name in names:
        scheme = base.get(name)
        schemes: Sequence[Scheme] = ()
        if scheme is not None and not isinstance(scheme, Unquantized):
            schemes = variants(scheme, bits, ()) if bits else (scheme,)
        if not schemes:
            schemes = [Gptq(bits=width) for width in sorted(set(bits or (DEFAULT_BITS,))) if 4 <= width <= 8]
        accepted = [scheme for scheme in schemes if scheme.rejects(tuple(weights[name].shape)) is None]
        pairs += [(name, scheme) for scheme in accepted]
        if not accepted:
            reason = schemes[0].rejects(tuple(weights[name].shape)) if schemes else "no scheme has these bits"
            refused[name] = f"not quantized: {reason}"
    return pairs, refused


def sensitivities(
    model: nn.Module,
    quantizer: Quantizer,
    pairs: Sequence[tuple[str, Scheme]],
    measure: Callable[[], BitsPerByte],
    refused: dict[str, str],
) -> Iterator[Sensitivity]:
    """Yields the sensitivity for each pair. Before each result, the parameters of `model` are restored.

    Args:
        model: the model that `measure` scores.
        quantizer: quantizes the parameters of `model`. It contains the statistics of a calibration.
        pairs: pairs of a parameter name and a scheme.
        measure: scores the model on the validation text.
        refused: the function adds the reason for each parameter that its scheme cannot quantize.
    """
    parameters = dict(model.named_parameters())
    before = measure()
    per_byte = before.tokens / _size(before) / math.log(2)  # the factor from nats per token to bits per byte
    options: dict[str, list[Scheme]] = {}
    for name, scheme in pairs:
        try:
            quantizer.model({name: scheme})
            options.setdefault(name, []).append(scheme)
        except QuantizeError as problem:
            refused[name] = f"not quantized: {problem.message}"
    estimates = {name: dict(zip(options[name], rises, strict=True)) for name, rises in quantizer.rises(options).items()}
    for name, scheme in ((name, scheme) for name, scheme in pairs if scheme in estimates.get(name, ())):
        error = quantizer.error(name, scheme)
        parameter = parameters[name]
        trained = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(quantizer.weights[name] - error)
            try:
                after = measure()
            finally:
                parameter.copy_(trained)
        yield Sensitivity(
            name=name,
            scheme=scheme.label(),
            bits=scheme.bits_per_value(),
            mse=float(error.double().square().mean()),
            rise=(after.nats - before.nats) / math.log(2) / _size(before),
            estimate=estimates[name][scheme] * per_byte,
        )


def _size(score: BitsPerByte) -> int:
    return score.document_bytes if score.bpb is not None and score.document_bytes else score.piece_bytes
