"""The initialization of parameters."""

from collections.abc import Iterator
from math import prod
from typing import Annotated

from pydantic import AfterValidator

from specc.compiler.expr import ExprError, number, parse, variables
from specc.compiler.expr.traverse import substitute
from specc.compiler.expr.values import Const
from specc.compiler.strict import Problem, StrictModel, accepted_by


def formula(*variables: str) -> AfterValidator:
    """Returns a validator that accepts a number, or a formula over `variables` such as `1/sqrt(layer + 1)`."""

    def check(value: float | str) -> float | str:
        if isinstance(value, str):
            parse(value, variables)  # ExprError is a ValueError
        return value

    return AfterValidator(check)


def reading(name: str, message: str, *further: str) -> AfterValidator:
    """Returns a validator that requires an expression to read the variable `name`. The expression may also read the
    variables in `further`, but no other variables. `message` is the error message if the expression does not read
    `name`."""

    def check(text: str) -> None:
        if name not in variables(parse(text, (name, *further))):
            raise ValueError(message)

    return accepted_by(check)


LayerFormula = Annotated[float | str, formula("layer", "layers")]


def value_of(value: float | str, **variables: float) -> float:
    """Returns the value of a number, or of a formula in which `variables` have the given values. Raises ExprError if
    the formula has no value."""
    return number(parse(value, tuple(variables)), **variables) if isinstance(value, str) else float(value)


def stated(value: float | str, **variables: float) -> float | str:
    """Returns the text of a formula with the values of `variables` in place of their names. A number is returned
    unchanged."""
    if not isinstance(value, str):
        return value
    return str(substitute(parse(value), {name: Const(number) for name, number in variables.items()}))


LARGEST = 3.4028234e38  # the largest finite f32
Size = Annotated[float | str, formula("fan_in", "fan_out", "layers")]


class Init(StrictModel):
    """One initialization of a parameter. Exactly one field is set.

    A number may be a formula of `fan_in` (the columns of the matrix), `fan_out` (the rows) and `layers`: the number of
    blocks of the stack that contains the formula. Outside of stacks, `layers` is the number of all blocks of the model,
    including the blocks of both the encoder and the decoder.

    Attributes:
        normal: the standard deviation of a normal distribution.
        uniform: the bound of a uniform distribution within +-bound.
        orthogonal: the gain of an orthogonal matrix.
        constant: the value of all elements.
    """

    normal: Size | None = None
    uniform: Size | None = None
    orthogonal: Size | None = None
    constant: float | None = None

    def problems(self) -> Iterator[Problem]:
        """Yields a problem unless exactly one field is set."""
        names = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(names) != 1:
            stated = " and ".join(names) or "none"
            hint = "set one of them, e.g. `init: {normal: 0.02}`"
            yield Problem(
                (),
                "S205",
                f"`init` needs exactly one of normal, uniform, orthogonal and constant, but has {stated}",
                hint,
            )

    def with_layers(self, layers: int) -> "Init":
        """Returns the initialization with a number of blocks in place of `layers`."""
        fields = {name: stated(value, layers=float(layers)) for name, value in self if value is not None}
        return self.model_copy(update=fields)

    def numbers(self, shape: tuple[int, ...]) -> tuple[str, float]:
        """Returns the name and the value of the field that is set, for a parameter of this shape.

        For `fan_in` and `fan_out`, a vector counts as a matrix of one row, and a parameter of experts [experts, rows,
        columns] as the matrix of one expert. Raises ExprError if the formula has no value.
        """
        rows, columns = shape[-2:] if len(shape) in (2, 3) else (1, prod(shape))
        names = {"fan_in": float(columns), "fan_out": float(rows)}
        field = next(name for name in type(self).model_fields if getattr(self, name) is not None)
        return field, value_of(getattr(self, field), **names)

    def refusal(self, shape: tuple[int, ...]) -> str | None:
        """Returns the reason why a parameter of this shape cannot have this initialization, or None."""
        try:
            field, value = self.numbers(shape)
        except ExprError as error:
            return error.message
        if not abs(value) <= LARGEST:
            return f"`{field}` is {value:g}, which f32 cannot represent"
        if field in ("normal", "uniform") and value < 0:
            return f"`{field}` is {value:g}, but must be at least 0"
        return None


def constant(value: float) -> Init:
    return Init(constant=value)
