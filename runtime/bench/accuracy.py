"""No wrong kernel gets a time: each is compared with float64 once, on the inputs that it is timed on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.runtime.errors import RunFailure

LOOSER = 1.5  # times what plain Torch's own rounding costs; `specc verify` is the stricter judge
FLOORS = {torch.float32: 1e-5}  # relative; what rounding may cost where plain Torch happens to be exact
FLOOR = 1e-3


@dataclass(frozen=True, slots=True)
class Accuracy:
    """|found - exact| / |exact| of the worst output, of generated code and of plain Torch in the same dtype;
    `exact` is the precision of the reference."""

    generated: float
    eager: float
    exact: str


def compare(
    name: str, found: Sequence[Tensor], eager: Sequence[Tensor], reference: Callable[[torch.dtype], Sequence[Tensor]]
) -> Accuracy:
    """Holds every output to `reference(dtype)`, which is given in float64, or in float32 where the device's memory
    does not hold that. Raises RunFailure where one is further off than plain Torch explains, or not written."""
    exact, dtype = _exact(reference)
    worst = Accuracy(0.0, 0.0, dtype)
    for i, (have, other, want) in enumerate(zip(found, eager, exact, strict=True)):
        if have.shape != want.shape:
            raise _wrong(name, i, f"has shape {list(have.shape)}, not {list(want.shape)}")
        own, chain = _relative(have, want), _relative(other, want)
        floor = FLOORS.get(have.dtype, FLOOR)
        if not own <= max(LOOSER * chain, floor):
            words = f"is off by {own:.1e} of its norm against {dtype}, where plain Torch is by {chain:.1e}"
            raise _wrong(name, i, words if own == own else "holds NaN: it is not all written, or wrong")
        worst = Accuracy(max(worst.generated, own), max(worst.eager, chain), dtype)
    return worst


def _wrong(name: str, output: int, words: str) -> RunFailure:
    return RunFailure(f"{name}: output {output} {words}", "a wrong kernel gets no time; `specc verify` tells more")


def _exact(reference: Callable[[torch.dtype], Sequence[Tensor]]) -> tuple[Sequence[Tensor], str]:
    try:
        return reference(torch.float64), "float64"
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return reference(torch.float32), "float32"


def _relative(found: Tensor, exact: Tensor) -> float:
    """In the Frobenius norm."""
    error: float = ((found.to(exact.dtype) - exact).norm() / exact.norm().clamp_min(1e-30)).item()
    return error
