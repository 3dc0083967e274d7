"""The one judge of kernels: float64 on random inputs, and plain Torch in the kernel's dtype for what rounding costs."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc.compiler import reference
from specc.compiler.kernels.kernel import Site
from specc.runtime.bench.operands import DTYPES

RMS, PEAK = 1.005, 2.0  # what a kernel's errors may be, as multiples of those of the eager chain
ROUNDINGS = 4  # of f32: what a sum in another order may cost
SEQUENCE = 16  # tokens, at least, where tokens meet
TINIEST = 1e-30  # where reference and chain are both exactly 0
TINY = {"B": 1, "T": 8, "S": 8}


@dataclass(frozen=True, slots=True)
class Errors:
    """The RMS and the largest error of one output, as multiples of what the eager chain's may count as."""

    rms: float
    peak: float

    @property
    def ok(self) -> bool:
        return self.rms <= RMS and self.peak <= PEAK


@dataclass(frozen=True, slots=True)
class Judge:
    """Holds kernels of one node to float64, on inputs that all of them share. `bars` are, an output, the RMS and the
    largest error of plain Torch in the kernel's dtype, op after op, or what rounding may cost where it is exact."""

    inputs: Sequence[Tensor]
    exact: Sequence[Tensor]
    bars: Sequence[tuple[float, float]]

    @classmethod
    def of(cls, site: Site, inputs: Sequence[Tensor]) -> "Judge":
        """For a node, on inputs that `inputs_of` made."""
        exact = reference.node_value(site.node, [upcast(value, torch.float64) for value in inputs])  # type: ignore[misc]
        bars = []
        for have, want in zip(reference.node_value(site.node, list(inputs)), exact, strict=True):
            largest, error = want.abs().max().item(), (have.double() - want).abs()
            floor = torch.finfo(DTYPES[site.target.dtype]).eps * largest
            # which of two chains in f32 is nearer is chance
            close = ROUNDINGS * site.node.op.chained * torch.finfo(torch.float32).eps
            close = close if have.dtype == torch.float32 else 0.0
            rms = max(_rms(error), close * _rms(want), 1e-3 * floor, TINIEST)
            bars.append((rms, max(error.max().item(), close * largest, 0.5 * floor, TINIEST)))
        return cls(inputs, exact, bars)

    def errors(self, found: Sequence[Tensor]) -> tuple[Errors, ...]:
        """Of every output; infinite where one has another shape, or holds NaN because it was not all written."""
        return tuple(map(_errors, found, self.exact, self.bars))

    def call(self, kernel: Callable[..., Any]) -> tuple[Tensor, ...]:
        """The kernel's outputs on the inputs, in memory that was full of NaN."""
        with poisoned():
            return many(kernel(*self.inputs))


def _errors(have: Tensor, want: Tensor, bars: tuple[float, float]) -> Errors:
    if have.shape != want.shape:
        return Errors(float("inf"), float("inf"))
    error = (have.double() - want).abs()
    if bool(error.isnan().any()):
        return Errors(float("inf"), float("inf"))
    return Errors(_rms(error) / bars[0], error.max().item() / bars[1])


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def many(value: Any) -> tuple[Tensor, ...]:
    """One tensor or several as several."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def sizes_of(site: Site, rows: int) -> Mapping[str, int]:
    """What symbols stand for on `rows` rows. Where tokens meet, these are two sequences of so many tokens, or of the
    shortest that measures anything: the gradient of attention to oneself alone is exactly 0, and to two or three it is
    a difference of nearly equal numbers, which says more of the numbers than of a kernel."""
    if site.node.op.mixes_tokens:
        return {"B": 2, "T": max(rows, SEQUENCE), "S": max(rows, SEQUENCE)}
    return {"B": 1, "T": rows, "S": rows}


def inputs_of(site: Site, sizes: Mapping[str, int], device: torch.device | str, seed: int = 0) -> list[Tensor]:
    """Random inputs where symbols have `sizes`: normal numbers, weights scaled so that products are about 1, whole
    numbers that the op can take, and what belongs together where an input follows from others. Where operands have a
    domain, as sqrt(y) has, they are made positive."""
    made = _random(site, sizes, device, seed)
    if not any(value.isnan().any() for value in reference.node_value(site.node, _random(site, TINY, device, seed))):
        return list(site.node.op.belonging(made))
    arity = site.node.op.arity
    return [*made[:arity], *(operand.abs() for operand in made[arity:])]


def _random(site: Site, sizes: Mapping[str, int], device: torch.device | str, seed: int) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    made: list[Tensor] = []
    for type in site.inputs:
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in type.shape]
        dtype, known = DTYPES[type.dtype], all(isinstance(dim, int) for dim in type.shape)
        if not dtype.is_floating_point:
            end = site.node.op.ids_below(site.inputs)
            made.append(torch.randint(end, shape, generator=generator, device=device).to(dtype))
            continue
        values = torch.randn(shape, generator=generator, device=device)
        made.append((values.mul_(shape[-1] ** -0.5) if known and len(shape) > 1 else values).to(dtype))
    return made


def upcast(value: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    """A floating tensor in another precision; whole numbers and plain numbers as they are."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that Torch hands out is full of NaN, so that what a kernel does not write is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
