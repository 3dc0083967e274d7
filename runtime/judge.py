"""The judge of kernels, for verify and tune: float64 on random inputs, and plain Torch in the kernel's dtype for what
rounding costs. A bench, on inputs too large for it, asks less of them in bench/accuracy.py."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc.compiler import reference
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.linear import Product
from specc.runtime.bench.operands import random_tensor
from specc.runtime.dtypes import DTYPES

RMS, PEAK = 1.005, 2.0  # what a kernel's errors may be, as multiples of those of the eager chain
ROUNDINGS = 4  # of f32: what a sum in another order may cost
SEQUENCE = 16  # tokens, at least, where tokens meet
TINIEST = 1e-30  # where reference and chain are both exactly 0
TINY = {"B": 1, "T": 8, "S": 8}
TILES = 3  # for each multiprocessor: it goes from one to the next, and uses each piece of its memory again
SIDE = 256  # rows and columns; no kernel's tile has more
TOKENS = 343  # of a sequence where there are many: no tile divides their product
EVERY = 7  # rows of a product one is judged where there are many: of each 8, which a tile's smallest part has, one


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
    largest error of plain Torch in the kernel's dtype, op after op, or what rounding may cost where it is exact.
    `rows` are those that it compares, by number, of whatever leading dims; all where None."""

    inputs: Sequence[Tensor]
    exact: Sequence[Tensor]
    bars: Sequence[tuple[float, float]]
    rows: Tensor | None = None

    @classmethod
    def of(cls, site: Site, inputs: Sequence[Tensor], sample: bool = False) -> "Judge":
        """For a node, on inputs that `inputs_of` made. With `sample` a product, whose rows know nothing of each other,
        is compared with float64 on every seventh row and the last."""
        rows, given = None, list(inputs)
        if sample and isinstance(site.node.op, Product):
            count = inputs[0].shape[:-1].numel()
            rows = torch.tensor(sorted({*range(0, count, EVERY), count - 1}), device=inputs[0].device)
            by_row = [type.shape[:-1] == site.inputs[0].shape[:-1] for type in site.inputs]
            given = [_some(value, rows) if row else value for value, row in zip(inputs, by_row, strict=True)]
        exact = reference.node_value(site.node, [upcast(value, torch.float64) for value in given])  # type: ignore[misc]
        bars = []
        for have, want in zip(reference.node_value(site.node, given), exact, strict=True):
            largest, error = want.abs().max().item(), (have.double() - want).abs()
            floor = torch.finfo(DTYPES[site.target.dtype]).eps * largest
            # which of two chains in f32 is nearer is chance
            close = ROUNDINGS * site.node.op.chained * torch.finfo(torch.float32).eps
            close = close if have.dtype == torch.float32 else 0.0
            rms = max(_rms(error), close * _rms(want), 1e-3 * floor, TINIEST)
            bars.append((rms, max(error.max().item(), close * largest, 0.5 * floor, TINIEST)))
        return cls(inputs, exact, bars, rows)

    @classmethod
    def many(cls, site: Site, device: torch.device | str, seed: int = 0) -> "Judge | None":
        """One on so many rows that every multiprocessor gets several tiles; None on a device that has none."""
        sizes = many_sizes(site, device)
        return None if sizes is None else cls.of(site, inputs_of(site, sizes, device, seed), sample=True)

    def errors(self, found: Sequence[Tensor]) -> tuple[Errors, ...]:
        """Of every output; infinite where one has another shape, or holds NaN because it was not all written."""
        return tuple(map(self._errors, found, self.exact, self.bars))

    def compared(self, value: Tensor) -> Tensor:
        """What of an output has its like in `exact`."""
        return value if self.rows is None else _some(value, self.rows)

    def _errors(self, value: Tensor, want: Tensor, bars: tuple[float, float]) -> Errors:
        shape = want.shape if self.rows is None else (*self.inputs[0].shape[:-1], *want.shape[1:])
        if value.shape != shape or bool(value.isnan().any()):
            return Errors(float("inf"), float("inf"))
        error = (self.compared(value).double() - want).abs()
        if bool(error.isnan().any()):
            return Errors(float("inf"), float("inf"))
        return Errors(_rms(error) / bars[0], error.max().item() / bars[1])

    def call(self, kernel: Callable[..., Any]) -> tuple[Tensor, ...]:
        """The kernel's outputs on the inputs, in memory that was full of NaN."""
        with poisoned():
            return many(kernel(*self.inputs))


def _some(value: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a value [..., N], as [R, N]."""
    return value.reshape(-1, value.shape[-1])[rows]


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
        return within(site, {"B": 2, "T": max(rows, SEQUENCE), "S": max(rows, SEQUENCE)})
    return {"B": 1, "T": rows, "S": rows}


def within(site: Site, sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Sizes with no longer sequences than the model has, or than measure anything, where tokens meet."""
    if site.context is None or not site.node.op.mixes_tokens:
        return sizes
    most = max(site.context, SEQUENCE)
    return {name: min(size, most) if name in ("T", "S") else size for name, size in sizes.items()}


def many_sizes(site: Site, device: torch.device | str, tiles: int = TILES) -> Mapping[str, int] | None:
    """What symbols stand for where tiles are many: each multiprocessor of `device` gets at least so many, however large
    a kernel's tile is. None on a device without multiprocessors."""
    count = multiprocessors(device)
    if count is None:
        return None
    shapes = [[dim for dim in type.shape if isinstance(dim, int)] for type in (*site.node.types, site.inputs[0])]
    dims = next(dims for dims in shapes if dims)
    tile = SIDE * min(SIDE, dims[-1])
    tokens = within(site, {"T": TOKENS, "S": TOKENS})
    sequences = -(-tiles * count * tile // (math.prod(dims) * tokens["T"]))
    return {"B": sequences | 1, **tokens}


def multiprocessors(device: torch.device | str) -> int | None:
    """How many a GPU has; None for the CPU."""
    if torch.device(device).type != "cuda":
        return None
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def inputs_of(site: Site, sizes: Mapping[str, int], device: torch.device | str, seed: int = 0) -> list[Tensor]:
    """Random inputs where symbols have `sizes`: what `random_tensor` makes, whole numbers that the op can take, and
    what belongs together where an input follows from others. Where operands have a domain, as sqrt(y) has, they are
    made positive."""
    return on_domain(site, _random(site, sizes, device, seed), _random(site, TINY, device, seed))


def on_domain(site: Site, values: Sequence[Tensor], sample: Sequence[Tensor]) -> list[Tensor]:
    """The values of a node's inputs with all operands made positive where its value on `sample` is no number, and such
    that they belong together."""
    arity = site.node.op.arity
    if any(bool(value.isnan().any()) for value in reference.node_value(site.node, list(sample))):
        values = [*values[:arity], *map(abs, values[arity:])]
    return list(site.node.op.belonging(values))


def _random(site: Site, sizes: Mapping[str, int], device: torch.device | str, seed: int) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    below = lambda dtype: site.node.op.ids_below(site.inputs)  # noqa: E731
    return [random_tensor(type, sizes, generator, below) for type in site.inputs]


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
