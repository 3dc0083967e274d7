"""Quantizes parameters while allocations of bits are tried."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from specc.compiler.int8.products import Source
from specc.compiler.quant.scheme import Range, Scheme, Seen, Solution
from specc.runtime.artifact.quantized_model import QuantizedModel, entropy_bytes, quantize_tensors
from specc.runtime.calibration.gradients import Gradients
from specc.runtime.quantize.bit_allocation import added_nats

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True, slots=True)
class Statistics:
    """Measurements of a calibration, by parameter name.

    Attributes:
        hessians: E[x x^T] a token of the inputs of each weight, f64 [columns, columns].
        gradients: second moments of the loss's gradients.
    """

    hessians: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Gradients] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IntegerInputs:
    """The inputs of int8 products.

    Attributes:
        sources: the products.
        ranges: the measured range of each input, by weight.
        trained: the scales f32 [1] or [K] that the run trained with, by the first weight that reads the input; empty
            where calibration chooses them.
    """

    sources: Sequence[Source] = ()
    ranges: Mapping[str, Range] = field(default_factory=dict)
    trained: Mapping[str, Tensor] = field(default_factory=dict)


class Quantizer:
    """Quantizes parameters while allocations are tried: each (parameter, scheme) once.

    Args:
        weights: f32, by parameter name.
        statistics: of the calibration; empty for schemes that need none.
        inputs: of int8 products; empty where the model has none.
        progress: called as `progress("quantize", done, total)` after each parameter.

    Attributes:
        solutions: how each (parameter, scheme) was solved for by its Hessian, where it was.
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

    def model(self, schemes: Mapping[str, Scheme]) -> QuantizedModel:
        """Every parameter by its scheme. Raises QuantizeError, naming the parameter, where a scheme refuses it."""
        for done, (name, scheme) in enumerate(schemes.items(), 1):
            if (name, scheme) not in self._stored:
                self._quantize(name, schemes)
                if self._progress is not None:
                    self._progress("quantize", done, len(schemes))
        shapes = {name: tuple(self.weights[name].shape) for name in schemes}
        tensors = {name: self._stored[name, scheme].tensors[name] for name, scheme in schemes.items()}
        return QuantizedModel(dict(schemes), shapes, tensors)

    def _quantize(self, name: str, schemes: Mapping[str, Scheme]) -> QuantizedModel:
        """One parameter by its scheme; a bias after its weight."""
        scheme = schemes[name]
        if (name, scheme) not in self._stored:
            weight = self._weight_of.get(name)
            beside = self._quantize(weight, schemes).tensors[weight] if weight is not None else None
            hessians, ranges = self.statistics.hessians, self.inputs.ranges
            hessian = hessians.get(name) if scheme.needs_hessian else None
            if scheme.integer and name in ranges and self._trained_scale(name, scheme) is None:
                hessian = ranges[name].products
            solved = partial(self.solutions.__setitem__, (name, scheme))
            seen = Seen(hessian, self._input_scale(name, scheme), beside, solved)
            stored = quantize_tensors({name: self.weights[name]}, {name: scheme}, hessians, seen={name: seen})
            self._stored[name, scheme] = stored
            self._sizes[name, scheme] = entropy_bytes(stored)
        return self._stored[name, scheme]

    def _input_scale(self, name: str, scheme: Scheme) -> Tensor | None:
        """The scale of the input of a weight, which the weight shares with its leader: the one that the run trained
        with, else the one that fits the measured range."""
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
        """The scale by which the run rounded the input of a weight; None where it did not. A run has one scale per
        feature, all equal where the scheme stores one number."""
        trained = self.inputs.trained.get(self._leader_of[name]) if name in self._leader_of else None
        if trained is None or not scheme.integer:
            return None
        (size,) = next(s.shape for s in scheme.stored(tuple(self.weights[name].shape)) if s.suffix == "input_scale")
        return trained[:size]

    def error(self, name: str, scheme: Scheme) -> Tensor:
        """The error of a parameter by a scheme, in the parameter's shape and on its device."""
        stored = self.model({name: scheme}).tensors[name]
        weight = self.weights[name]
        return weight - scheme.dequantize(stored, tuple(weight.shape)).to(weight.device)

    def cost(self, name: str, scheme: Scheme) -> float | None:
        """The estimated increase of the loss by that error, in nats a token; None without gradients."""
        gradients = self.statistics.gradients.get(name)
        if gradients is None:
            return None
        return added_nats(self.error(name, scheme), self.statistics.hessians.get(name), gradients)

    def estimate(self, schemes: Mapping[str, Scheme]) -> int:
        """The estimated compressed bytes of the arrays."""
        self.model(schemes)
        return sum(self._sizes[item] for item in schemes.items())

    def overdamped(self, schemes: Mapping[str, Scheme]) -> list[str]:
        """A line for each parameter whose Hessian needed more damping than its scheme asks for."""
        return [
            f"{name}: Cholesky failed; its Hessian is damped by {solution.damping:g} mean diagonals"
            for (name, scheme), solution in self.solutions.items()
            if schemes[name] == scheme and solution.damping > solution.asked
        ]
