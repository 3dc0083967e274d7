"""How a parameter starts."""

from collections.abc import Iterator
from math import prod
from typing import Annotated

from pydantic import AfterValidator

from specc.compiler.expr import ExprError, number, parse
from specc.compiler.expr.values import Const, substitute
from specc.compiler.strict import Problem, StrictModel


def formula(*variables: str) -> AfterValidator:
    """Holds a field to a number, or a text of the pointwise language over `variables`, e.g. `1/sqrt(layer + 1)`."""

    def check(value: float | str) -> float | str:
        if isinstance(value, str):
            parse(value, variables)  # ExprError is a ValueError
        return value

    return AfterValidator(check)


def value_of(value: float | str, **variables: float) -> float:
    """The number that a formula stands for."""
    return number(parse(value, tuple(variables)), **variables) if isinstance(value, str) else float(value)


def stated(value: float | str, **variables: float) -> float | str:
    """A formula with some variables filled in, as text; a number as it is."""
    if not isinstance(value, str):
        return value
    return str(substitute(parse(value), {name: Const(number) for name, number in variables.items()}))


LARGEST = 3.4028234e38  # of f32
Size = Annotated[float | str, formula("fan_in", "fan_out", "layers")]


class Init(StrictModel):
    """Exactly one of: normal with this deviation, uniform within +-bound, orthogonal with this gain, or one constant.

    Numbers may be formulas over `fan_in` and `fan_out` (columns and rows of the matrix) and `layers`, the number of
    blocks of the model, in a model of pairs those of both sides.
    """

    normal: Size | None = None
    uniform: Size | None = None
    orthogonal: Size | None = None
    constant: float | None = None

    def problems(self) -> Iterator[Problem]:
        """One way to start, no more."""
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            hint = "keep one, e.g. `init: {normal: 0.02}`"
            yield Problem(
                (), "S205", f"init needs exactly one of normal, uniform, orthogonal, constant; found {found}", hint
            )

    def numbers(self, shape: tuple[int, ...], layers: int) -> tuple[str, float]:
        """The way to start and its number for one parameter; vectors count as matrices of one row.

        Raises ExprError where the formula has no value.
        """
        rows, columns = shape if len(shape) == 2 else (1, prod(shape))
        names = {"fan_in": float(columns), "fan_out": float(rows), "layers": float(layers)}
        way = next(name for name in type(self).model_fields if getattr(self, name) is not None)
        return way, value_of(getattr(self, way), **names)

    def refusal(self, shape: tuple[int, ...], layers: int) -> str | None:
        """Why a parameter of this shape cannot start so; None where it can."""
        try:
            way, value = self.numbers(shape, layers)
        except ExprError as error:
            return error.message
        if not abs(value) <= LARGEST:
            return f"it starts {way} with {value:g}, which f32 does not hold"
        if way in ("normal", "uniform") and value < 0:
            return f"it starts {way} with {value:g}, which is below 0"
        return None


def constant(value: float) -> Init:
    return Init(constant=value)
