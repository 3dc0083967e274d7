"""Compares the planned backward pass of an expression with autograd, on inputs of many magnitudes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..records import record
from .backward import KEEPS, plan_backward
from .evaluate import torch_value
from .traverse import variables
from .values import Compare, Expr, children

if TYPE_CHECKING:
    from torch import Tensor

DECADES, STEPS = range(-4, 4), 16  # the decades from 1e-4 to 1e4, and the number of points per decade
GRID = (0.0, *(sign * 10 ** (d + step / STEPS) for d in DECADES for step in range(STEPS + 1) for sign in (1.0, -1.0)))
SHIFTS = (0, 1, 37, 101)  # offsets in the grid between consecutive variables
# Fraction of float32's maximum; for larger values, the order of the factors decides whether a product overflows
HEADROOM = 2.0**-8
TOLERANCE = 1e-3


@record
class Deviation:
    """A point at which a fused activation would compute a wrong value or gradient. The float32 number differs from both
    results of Torch: the float32 result and the float64 result."""

    title: str
    at: tuple[tuple[str, float], ...]
    planned: float
    exact: float

    def __str__(self) -> str:
        point = ", ".join(f"{name} = {value:.6g}" for name, value in self.at)
        return f"{self.title} is {self.planned:.4g} at {point}; float64 gives {self.exact:.4g}"


def deviations(expr: Expr, wrt: tuple[str, ...]) -> Iterator[Deviation]:
    """Yields the first deviation of the value and of each gradient, for every value of the argument `keep` of
    `plan_backward`.

    The plan of `plan_backward` is computed in float32 on GRID and compared with float64 autograd of `expr`. Points are
    excluded if the float32 result of Torch is not finite there, or if a part of `expr` is close to overflow.

    Args:
        expr: The expression, differentiable by Torch.
        wrt: The variables for which the backward pass computes gradients.
    """
    import torch

    names = variables(expr)
    grid = torch.tensor(GRID, dtype=torch.float32)
    columns = [torch.cat([grid.roll(shift * i) for shift in SHIFTS]) for i in range(len(names))]
    at = dict(zip(names, columns, strict=True))
    exact, single = _autograd(expr, wrt, at, torch.float64), _autograd(expr, wrt, at, torch.float32)
    fair = ~_near_overflow(expr, {name: column.double() for name, column in at.items()})
    for value in (exact["y"], single["y"]):
        fair &= value.isfinite()
    for keep in KEEPS:
        plan = plan_backward(expr, wrt, keep)
        values: dict[str, Tensor] = dict(at)
        values |= {name: torch_value(saved, at).expand_as(fair) for name, saved in plan.saves}
        values["y"] = torch_value(plan.value, values).expand_as(fair)
        values["d"] = torch.ones(len(fair))
        planned = {"y": values["y"]} | {name: torch_value(grad, values).expand_as(fair) for name, grad in plan.grads}
        for name, have in planned.items():
            want, plain = exact[name], single[name].double()
            bound = TOLERANCE * (1 + want.abs()) + 30 * (plain - want).abs()
            wrong = fair & want.isfinite() & plain.isfinite() & ~((have.double() - want).abs() <= bound)
            if wrong.any():
                i = int(wrong.nonzero()[0])
                title = "the value" if name == "y" else f"the gradient by {name}"
                point = tuple((variable, column[i].item()) for variable, column in at.items())
                yield Deviation(title, point, have[i].item(), want[i].item())


def _autograd(expr: Expr, wrt: tuple[str, ...], at: "dict[str, Tensor]", dtype: object) -> "dict[str, Tensor]":
    import torch

    leaves = {name: column.to(dtype).requires_grad_() for name, column in at.items()}  # type: ignore[call-overload]
    y = torch_value(expr, leaves).expand_as(next(iter(leaves.values())))
    grads = torch.autograd.grad(y.sum(), [leaves[name] for name in wrt], allow_unused=True)
    gradients = {name: torch.zeros_like(y) if grad is None else grad for name, grad in zip(wrt, grads, strict=True)}
    return {"y": y.detach(), **gradients}


def _near_overflow(expr: Expr, at: "dict[str, Tensor]") -> "Tensor":
    """Returns a mask of the points at which a part of `expr` is close to overflow in float32: its absolute value is
    finite, but more than HEADROOM (1/256) of float32's maximum."""
    import torch

    largest = torch.finfo(torch.float32).max
    size = next(iter(at.values()))
    near = torch.zeros(len(size), dtype=torch.bool)
    waiting, seen = [expr], {expr}
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Compare):
            value = torch_value(part, at).expand_as(size).abs()
            near |= (value > HEADROOM * largest) & (value <= largest)
        waiting += [inner for inner in children(part) if inner not in seen]
        seen.update(children(part))
    return near
