"""`Quantizer`: a cache of quantized parameters, for the search for a bit allocation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from specc.compiler.int8.editor import Source
from specc.compiler.quant.scheme import Range, Scheme, Seen, Solution, Use
from specc.runtime.artifact.quantized_model import QuantizedModel, entropy_bytes, quantize_tensors

Estimate = Callable[[Mapping[str, Sequence[Tensor]]], Mapping[str, Sequence[float]]]
Progress = Callable[[str, int, int], None]  # called with the stage, the number of items done, and the total


@dataclass(frozen=True, slots=True)
class Statistics:
    """Measurements of a calibration, by parameter name.

    Attributes:
        hessians: the mean of `x x^T` over the tokens, where `x` is the input of the weight, f64 [columns, columns].
        uses: for each parameter that does not belong to exactly one matrix product, statistics of its uses. An example
            is an embedding table.
        rises: a function that maps the quantization errors of parameters to estimates of the increase of the loss, in
            nats per token. None if the spec requests no bit allocation.
    """

    hessians: Mapping[str, Tensor] = field(default_factory=dict)
    uses: Mapping[str, Sequence[Use]] = field(default_factory=dict)
    rises: Estimate | None = None


@dataclass(frozen=True, slots=True)
class IntegerInputs:
    """The inputs of int8 products.

    Attributes:
        sources: the int8 products that read the inputs.
        ranges: the measured range of each input. A key is the name of the first weight that multiplies the input.
        trained: the scale of each input in training, f32 [1] or [K]. A key is the name of the first weight that
            multiplies the input. The mapping is empty if calibration determines the scales.
    """

    sources: Sequence[Source] = ()
    ranges: Mapping[str, Range] = field(default_factory=dict)
    trained: Mapping[str, Tensor] = field(default_factory=dict)


class Quantizer:
    """A cache of quantized parameters. Each pair (parameter, scheme) is quantized only once.

    Args:
        weights: the trained parameters, f32, by name.
        statistics: the measurements of the calibration; may be empty if no scheme needs measurements.
        inputs: the inputs of int8 products; empty if the model has no int8 products.
        progress: a function called as `progress("quantize", done, total)` after each parameter.

    Attributes:
        solutions: the damping and the dead columns of each pair (parameter, scheme) that was quantized with a Hessian.
            A column is dead if its input is always 0.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        statistics: Statistics | None = None,
        inputs: IntegerInputs | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.weights, self.statistics = weights, statistics or Statistics()
        self.inputs, self._progress = inputs or IntegerInputs(), progress
        self._input_scales: dict[tuple[str, Scheme], Tensor | None] = {}
        self._leader_of = {source.weight: source.leader for source in self.inputs.sources}
        self._weight_of = {source.bias: source.weight for source in self.inputs.sources if source.bias}
        self.solutions: dict[tuple[str, Scheme], Solution] = {}
        self._stored: dict[tuple[str, Scheme], QuantizedModel] = {}
        self._sizes: dict[tuple[str, Scheme], int] = {}
        self._rises: dict[tuple[str, Scheme], float] = {}

    def model(self, schemes: Mapping[str, Scheme]) -> QuantizedModel:
        """Returns the quantized arrays of every parameter, for the schemes in `schemes`.

        Raises QuantizeError if a scheme cannot store its parameter. The message names the parameter.
        """
        for done, (name, scheme) in enumerate(schemes.items(), 1):
            if (name, scheme) not in self._stored:
                self._quantize(name, schemes)
                if self._progress is not None:
                    self._progress("quantize", done, len(schemes))
        shapes = {name: tuple(self.weights[name].shape) for name in schemes}
        tensors = {name: self._stored[name, scheme].tensors[name] for name, scheme in schemes.items()}
        return QuantizedModel(dict(schemes), shapes, tensors)

    def _quantize(self, name: str, schemes: Mapping[str, Scheme]) -> QuantizedModel:
        scheme = schemes[name]
        if (name, scheme) not in self._stored:
            weight = self._weight_of.get(name)
            beside = self._quantize(weight, schemes).tensors[weight] if weight is not None else None
            hessians, ranges = self.statistics.hessians, self.inputs.ranges
            hessian = hessians.get(name) if scheme.needs_hessian else None
            if scheme.integer and name in ranges and self._trained_scale(name, scheme) is None:
                hessian = ranges[name].products
            solved = partial(self.solutions.__setitem__, (name, scheme))
            uses = self.statistics.uses.get(name, ()) if scheme.needs_hessian else ()
            seen = Seen(hessian, self._input_scale(name, scheme), beside, solved, uses)
            stored = quantize_tensors({name: self.weights[name]}, {name: scheme}, hessians, seen={name: seen})
            self._stored[name, scheme] = stored
            self._sizes[name, scheme] = entropy_bytes(stored)
        return self._stored[name, scheme]

    def _input_scale(self, name: str, scheme: Scheme) -> Tensor | None:
        if name not in self.inputs.ranges:
            return None
        leader = self._leader_of[name]
        if (leader, scheme) not in self._input_scales:
            sharing = [self.weights[weight] for weight, other in self._leader_of.items() if other == leader]
            trained = self._trained_scale(leader, scheme)
            scale = scheme.input_scale(self.inputs.ranges[leader], sharing) if trained is None else trained
            self._input_scales[leader, scheme] = scale
        return self._input_scales[leader, scheme]

    def _trained_scale(self, name: str, scheme: Scheme) -> Tensor | None:
        trained = self.inputs.trained.get(self._leader_of[name]) if name in self._leader_of else None
        if trained is None or not scheme.integer:
            return None
        (size,) = next(s.shape for s in scheme.stored(tuple(self.weights[name].shape)) if s.suffix == "input_scale")
        return trained[:size]  # a run stores one scale per feature; with a single scale, all stored values are equal

    def error(self, name: str, scheme: Scheme) -> Tensor:
        stored = self.model({name: scheme}).tensors[name]
        weight = self.weights[name]
        return weight - scheme.dequantize(stored, tuple(weight.shape)).to(weight.device)

    def rises(self, options: Mapping[str, Sequence[Scheme]]) -> Mapping[str, Sequence[float]]:
        """Returns the estimated increase of the loss, in nats per token, for each scheme of each parameter.

        `options` lists the schemes of each parameter. The method estimates all increases in one pass over the
        calibration text.

        Raises:
            QuantizeError: if a scheme cannot store its parameter, or a gradient is not finite.
            ValueError: if `statistics.rises` is None.
        """
        if self.statistics.rises is None:
            raise ValueError("the calibration measured no gradients")
        errors = {name: [self.error(name, scheme) for scheme in schemes] for name, schemes in options.items()}
        rises = self.statistics.rises(errors) if errors else {}
        for name, schemes in options.items():
            self._rises |= {(name, scheme): rise for scheme, rise in zip(schemes, rises[name], strict=True)}
        return rises

    def rise(self, name: str, scheme: Scheme) -> float | None:
        return self._rises.get((name, scheme))

    def estimate(self, schemes: Mapping[str, Scheme]) -> int:
        self.model(schemes)
        return sum(self._sizes[item] for item in schemes.items())

    def overdamped(self, schemes: Mapping[str, Scheme]) -> list[str]:
        """Returns a message for each parameter whose Hessian needed more damping than its scheme states."""
        return [
            f"{name}: Cholesky failed; its Hessian is damped by {solution.damping:g} times its mean diagonal"
            for (name, scheme), solution in self.solutions.items()
            if schemes[name] == scheme and solution.damping > solution.requested
        ]
