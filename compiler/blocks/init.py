"""How a parameter starts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from specc.compiler.expr import ExprError, number, parse
from specc.compiler.strict import Problem, StrictModel

if TYPE_CHECKING:
    from torch import Generator, Tensor


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


Size = Annotated[float | str, formula("fan_in", "fan_out", "layers")]


class Init(StrictModel):
    """Exactly one of: normal with this deviation, uniform within +-bound, orthogonal with this gain, or one constant.

    Numbers may be formulas over `fan_in` and `fan_out` (columns and rows of the matrix) and `layers`.
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

    def fill(self, tensor: "Tensor", layers: int, generator: "Generator") -> None:
        """Fills f32 `tensor` in place; vectors count as matrices of one row."""
        from torch import nn

        rows, columns = tensor.shape if tensor.dim() == 2 else (1, tensor.numel())
        names = {"fan_in": float(columns), "fan_out": float(rows), "layers": float(layers)}
        if self.normal is not None:
            nn.init.normal_(tensor, 0.0, value_of(self.normal, **names), generator=generator)
        elif self.uniform is not None:
            bound = value_of(self.uniform, **names)
            nn.init.uniform_(tensor, -bound, bound, generator=generator)
        elif self.orthogonal is not None:
            nn.init.orthogonal_(tensor, value_of(self.orthogonal, **names), generator=generator)
        else:
            assert self.constant is not None
            nn.init.constant_(tensor, self.constant)


def constant(value: float) -> Init:
    return Init(constant=value)


__all__ = ["ExprError", "Init", "constant", "formula", "value_of"]
