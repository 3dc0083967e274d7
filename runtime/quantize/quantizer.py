"""Quantizes parameters as allocations are tried, and writes down what was chosen as a resolved spec."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

from torch import Tensor

from specc.compiler.build import canonical
from specc.compiler.int8.products import Source
from specc.compiler.pattern import matches
from specc.compiler.quant.rows import correctable, largest_rank
from specc.compiler.quant.scheme import Range, Scheme, Seen, Solution
from specc.compiler.spec.spec import RULES, SCHEMES, QuantSpec, Spec
from specc.runtime.artifact.artifact import measured_bytes
from specc.runtime.artifact.table import described
from specc.runtime.artifact.tensors import QuantizedModel, entropy_bytes, quantize_tensors
from specc.runtime.calibration.gradients import Gradients
from specc.runtime.calibration.hessian import traces
from specc.runtime.errors import QuantizeError
from specc.runtime.log import Say
from specc.runtime.quantize.budget import Allocation, choose
from specc.runtime.quantize.solve import added_nats, largest_errors, solve_bits
from specc.runtime.storage.data_digests import DataDigests

Progress = Callable[[str, int, int], None]


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
        gradients: Mapping[str, Gradients],
        tell: Progress,
        sources: Sequence[Source] = (),
        ranges: Mapping[str, Range] | None = None,
        trained: Mapping[str, Tensor] | None = None,
        data_digests: DataDigests | None = None,
    ) -> None:
        self.spec, self.weights, self.hessians, self.gradients = spec, weights, hessians, gradients
        self._tell, self._data_digests = tell, data_digests
        self.sources, self.ranges, self._trained = sources, ranges or {}, trained or {}
        self._input_scales: dict[tuple[str, Scheme], Tensor | None] = {}
        self._leader_of = {source.weight: source.leader for source in sources}
        self._weight_of = {source.bias: source.weight for source in sources if source.bias}
        self.solutions: dict[tuple[str, Scheme], Solution] = {}
        self._made: dict[tuple[str, Scheme], QuantizedModel] = {}
        self._sizes: dict[tuple[str, Scheme], int] = {}

    def model(self, schemes: Allocation) -> QuantizedModel:
        """Every parameter by its scheme. Raises QuantizeError naming one that cannot be."""
        for done, (name, scheme) in enumerate(schemes.items(), 1):
            if (name, scheme) not in self._made:
                self._one(name, schemes)
                self._tell("quantize", done, len(schemes))
        shapes = {name: tuple(self.weights[name].shape) for name in schemes}
        tensors = {name: self._made[name, scheme].tensors[name] for name, scheme in schemes.items()}
        return QuantizedModel(dict(schemes), shapes, tensors)

    def _one(self, name: str, schemes: Allocation) -> QuantizedModel:
        """One parameter by its scheme; the weight that it is the bias of before it."""
        scheme = schemes[name]
        if (name, scheme) not in self._made:
            weight = self._weight_of.get(name)
            beside = self._one(weight, schemes).tensors[weight] if weight is not None else None
            hessian = self.hessians.get(name) if scheme.needs_hessian else None
            if scheme.integer and name in self.ranges and self._trained_with(name, scheme) is None:
                hessian = self.ranges[name].products
            solved = partial(self.solutions.__setitem__, (name, scheme))
            seen = Seen(hessian, self._input_scale(name, scheme), beside, solved)
            one = quantize_tensors({name: self.weights[name]}, {name: scheme}, self.hessians, seen={name: seen})
            self._made[name, scheme] = one
            self._sizes[name, scheme] = entropy_bytes(one)
        return self._made[name, scheme]

    def _input_scale(self, name: str, scheme: Scheme) -> Tensor | None:
        """The scale of the input that a weight shares with its leader and the others that it leads: the one that the
        run trained with, else the one that suits what calibration saw."""
        if name not in self.ranges:
            return None
        leader = self._leader_of[name]
        if (leader, scheme) not in self._input_scales:
            shared = [self.weights[weight] for weight, other in self._leader_of.items() if other == leader]
            kept = self._trained_with(leader, scheme)
            scale = scheme.input_scale(self.ranges[leader], shared) if kept is None else kept
            self._input_scales[leader, scheme] = scale
        return self._input_scales[leader, scheme]

    def _trained_with(self, name: str, scheme: Scheme) -> Tensor | None:
        """The scale by which the run rounded the input of a weight, which it rounded to nearest then; None where it did
        not. A run has one a feature, all the same where the scheme keeps one number."""
        kept = self._trained.get(self._leader_of[name]) if name in self._leader_of else None
        if kept is None or not scheme.integer:
            return None
        (size,) = next(s.shape for s in scheme.stored(tuple(self.weights[name].shape)) if s.suffix == "input_scale")
        return kept[:size]

    def chosen(self, base: Allocation, say: Say, reserved: int = 0) -> Allocation:
        """`base` with the bits and the corrections of low rank that the spec leaves to choose, within its budget less
        the `reserved` bytes. Corrections are for the largest errors of those that have so many ranks, which are known
        once bits are chosen; beside them bits are chosen anew. Raises QuantizeError as `solve_bits` and `choose` do."""
        quant = self.spec.quant
        assert quant is not None
        schemes = self._widths(quant, base, say, reserved)
        if (wish := quant.correct) is None:
            return schemes
        able = [
            name
            for name, scheme in base.items()
            if correctable(scheme) and matches(wish.match, name)
            if largest_rank(tuple(self.weights[name].shape)) >= wish.rank
        ]
        mended = largest_errors(able, lambda name: self.error(name, schemes[name]), wish.count)
        say(f"correct: {', '.join(mended)}")
        corrected = {
            name: scheme.with_correction(wish.rank) if name in mended and correctable(scheme) else scheme
            for name, scheme in base.items()
        }
        try:
            return self._widths(quant, corrected, say, reserved)
        except QuantizeError as error:  # without them it fits
            message = f"with corrections of rank {wish.rank}, for {', '.join(mended)}: {error.message}"
            raise QuantizeError(message, "lower quant.correct's rank or count; without them it fits") from error

    def _widths(self, quant: QuantSpec, base: Allocation, say: Say, reserved: int) -> Allocation:
        """`base` with the bits that `quant` leaves to choose."""
        if quant.budget_bytes is not None:
            quant = quant.model_copy(update={"budget_bytes": quant.budget_bytes - reserved})
        if quant.allocate is None or quant.budget_bytes is None:
            return choose(quant, base, traces(self.hessians), self.estimate, self.exact, say, reserved)

        def alone(name: str, scheme: Scheme) -> int:
            return self.estimate({name: scheme})

        return solve_bits(quant.allocate, quant.budget_bytes, base, self.cost, alone, self.exact, say, reserved)

    def error(self, name: str, scheme: Scheme) -> Tensor:
        """What a parameter loses by a scheme, where the parameter is."""
        made = self.model({name: scheme}).tensors[name]
        weight = self.weights[name]
        return weight - scheme.dequantize(made, tuple(weight.shape)).to(weight.device)

    def cost(self, name: str, scheme: Scheme) -> float | None:
        """What that adds to the loss, by estimate, in nats a token; None where calibration does not tell."""
        if name not in self.gradients:
            return None
        return added_nats(self.error(name, scheme), self.hessians.get(name), self.gradients[name])

    def estimate(self, schemes: Allocation) -> int:
        """About how many bytes the arrays take compressed."""
        self.model(schemes)
        return sum(self._sizes[item] for item in schemes.items())

    def exact(self, schemes: Allocation) -> int:
        """The bytes of the artifact."""
        model = self.model(schemes)
        text = canonical(resolved(self.spec, schemes)).encode()
        table = described(schemes, model.tensors)
        return measured_bytes(
            spec=text, layout=model.layout(), tensors=model.tensors, table=table, trained_on=self._data_digests
        )
