"""Chooses the bits of each parameter by promotion or allocation, and chooses the parameters with low-rank corrections.

The section `quant` of the spec contains the settings.
"""

from collections.abc import Callable, Mapping, Sequence

from specc.compiler.pattern import matches
from specc.compiler.quant.none import Unquantized
from specc.compiler.quant.rows import correctable, largest_rank
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.spec import Correct, QuantSpec
from specc.runtime.artifact.quantized_model import QuantizedModel
from specc.runtime.calibration.hessian import traces
from specc.runtime.errors import QuantizeError
from specc.runtime.log import Say
from specc.runtime.quantize.bit_allocation import allocate_bits, largest_errors
from specc.runtime.quantize.promotion import Allocation, promote
from specc.runtime.quantize.quantizer import Quantizer

Measure = Callable[[QuantizedModel], int]


def choose_bits(
    quantizer: Quantizer, quant: QuantSpec, base: Allocation, measure: Measure, say: Say, reserved: int = 0
) -> Allocation:
    """Returns `base` with the numbers of bits and the low-rank corrections that the settings in `quant` request.

    First, the function chooses the bits. Then it adds corrections to the parameters with the largest errors. Finally,
    it chooses the bits again, because the corrections use a part of the budget.

    Args:
        quantizer: quantizes the weights, and estimates costs and sizes.
        quant: the settings. The function reads only `promote`, `allocate`, `correct` and `budget_bytes`.
        base: the scheme of each parameter according to the rules of `quant`.
        measure: returns the exact size in bytes of the artifact of a quantized model.
        say: the function that receives a message for each allocation that is measured.
        reserved: the bytes of the budget that are reserved for the code of a submission.

    Returns:
        The scheme of each parameter, in the order of `base`.

    Raises:
        QuantizeError: if the budget is too small, no parameter has a choice of bits, or a pattern matches too few
            parameters.
    """
    if quant.budget_bytes is not None:
        quant = quant.model_copy(update={"budget_bytes": quant.budget_bytes - reserved})
    schemes = _widths(quantizer, quant, base, measure, say, reserved)
    if quant.correct is None:
        return schemes
    names = _largest(quantizer, quant.correct, base, schemes)
    say(f"correct: {', '.join(names)}")
    corrected = {
        name: scheme.with_correction(quant.correct.rank) if name in names and correctable(scheme) else scheme
        for name, scheme in base.items()
    }
    try:
        return _widths(quantizer, quant, corrected, measure, say, reserved)
    except QuantizeError as error:  # without corrections, the first call has found an allocation that fits
        message = f"with corrections of rank {quant.correct.rank}, for {', '.join(names)}: {error.message}"
        raise QuantizeError(
            message, "lower the rank or count of quant.correct; without corrections, the artifact fits"
        ) from error


def _largest(quantizer: Quantizer, correct: Correct, base: Allocation, schemes: Allocation) -> tuple[str, ...]:
    able = [
        name
        for name, scheme in base.items()
        if correctable(scheme) and matches(correct.match, name)
        if largest_rank(tuple(quantizer.weights[name].shape)) >= correct.rank
    ]
    return largest_errors(able, lambda name: quantizer.error(name, schemes[name]), correct.count)


def _widths(
    quantizer: Quantizer, quant: QuantSpec, base: Allocation, measure: Measure, say: Say, reserved: int
) -> Allocation:
    def exact(schemes: Allocation) -> int:
        return measure(quantizer.model(schemes))

    if quant.allocate is None or quant.budget_bytes is None:
        hessians = traces(quantizer.statistics.hessians)
        return promote(quant, base, hessians, quantizer.estimate, exact, say, reserved)

    def costs(options: Mapping[str, Sequence[Scheme]]) -> Mapping[str, Sequence[float]]:
        others = {name: (scheme,) for name, scheme in base.items() if not isinstance(scheme, Unquantized)}
        return quantizer.rises(
            {**others, **options}
        )  # parameters without a choice are also estimated, because the report states the increase for every parameter

    return allocate_bits(
        quant.allocate,
        quant.budget_bytes,
        base,
        costs,
        lambda name, scheme: quantizer.estimate({name: scheme}),
        exact,
        say,
        reserved,
    )
