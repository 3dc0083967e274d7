"""The judge of kernels, for verify, tune and bench: float64 on random inputs, and plain Torch in the kernel's dtype for
what rounding costs. What several kernels give together, which round what they keep for others, `Composed` judges."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc.compiler.ir.graph import Dim, TensorType
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.linear import Product
from specc.compiler.programs import reference
from specc.runtime.dtypes import DTYPES
from specc.runtime.verify.random_inputs import random_tensor

RMS, PEAK = 1.005, 2.0  # what a kernel's errors may be, as multiples of those of the eager chain
ROUNDINGS = 4  # of f32: what a sum in another order may cost
SEQUENCE = 16  # tokens, at least, where tokens meet
TINIEST = 1e-30  # where reference and chain are both exactly 0
TINY = {"B": 1, "T": 8, "S": 8}
TILES = 3  # for each multiprocessor: it goes from one to the next, and uses each piece of its memory again
SIDE = 256  # rows and columns; no kernel's tile has more
TOKENS = 343  # of a sequence where there are many: no tile divides their product
EVERY = 7  # rows of a product one is judged where there are many: of each 8, which a tile's smallest part has, one
PARTS = 8  # into which the rows of a sum are cut to estimate the size of its terms
FEW = 16  # numbers whose rounding errors are too few to be compared by ratio alone
LOOSER = 1.5  # what the error of several kernels together may be, as a multiple of that of the unfused chain
FEW_LOOSER = 10.0  # the same for few numbers
FLOORS = {torch.float32: 1e-5}  # relative; what rounding may cost where that chain happens to be exact
FLOOR = 1e-3


@dataclass(frozen=True, slots=True)
class Errors:
    """The RMS and the largest error of one output, as multiples of what the eager chain's may count as."""

    rms: float
    peak: float

    @property
    def ok(self) -> bool:
        return self.rms <= RMS and self.peak <= PEAK

    @property
    def words(self) -> str:
        """What an output has, for an error message."""
        if math.isinf(self.rms):
            return "has another shape, or holds NaN or infinity: it is not all written, or wrong"
        return f"has {self.rms:.2f}x the RMS error of plain Torch and {self.peak:.2f}x its largest"


@dataclass(frozen=True, slots=True)
class Composed:
    """|found - exact| / |exact| in the Frobenius norm of the worst output, of what several kernels give together and of
    the unfused chain; `exact` is the precision of the reference."""

    generated: float
    eager: float
    exact: str = "float64"

    def ok(self, dtype: torch.dtype, room: float = LOOSER, count: int = FEW + 1) -> bool:
        """Whether the kernels are no further off than the chain explains, or rounding to `dtype`; not with NaN. Of few
        numbers, `count`, the chain's error may be small by chance: each may be off by one unit of `dtype`."""
        floor = FLOORS.get(dtype, FLOOR)
        if count <= FEW:
            room, floor = max(room, FEW_LOOSER), max(floor, torch.finfo(dtype).eps)
        return self.generated <= max(room * self.eager, floor)


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows, or sequences, by number: of the values that have the `dims` in front, all of these as one."""

    rows: Tensor
    dims: tuple[Dim, ...]

    @classmethod
    def of(cls, site: Site, inputs: Sequence[Tensor]) -> "Sample":
        """Every seventh of a node's rows where they know nothing of each other, else of its sequences; and the last."""
        dims = site.inputs[0].shape[: -1 if site.node.op.rowwise else 1]
        count = inputs[0].shape[: len(dims)].numel()
        return cls(torch.tensor(sorted({*range(0, count, EVERY), count - 1}), device=inputs[0].device), dims)

    def __call__(self, value: Tensor, type: TensorType) -> Tensor:
        """What of a value of some type is compared."""
        return value.flatten(0, len(self.dims) - 1)[self.rows] if self.has(type) else value

    def has(self, type: TensorType) -> bool:
        return type.shape[: len(self.dims)] == self.dims


@dataclass(frozen=True, slots=True)
class Judge:
    """Holds kernels of one node to float64, on inputs that all of them share. `bars` are, an output, the RMS and the
    largest error of plain Torch in the kernel's dtype, op after op, or what rounding may cost where it is exact.
    `sample` is what it compares; everything where None."""

    site: Site
    inputs: Sequence[Tensor]
    exact: Sequence[Tensor]
    bars: Sequence[tuple[float, float]]
    sample: Sample | None = None

    @classmethod
    def of(cls, site: Site, inputs: Sequence[Tensor], sample: bool = False) -> "Judge":
        """For a node, on inputs that `inputs_of` made; of what a `sample` has of them where that is asked for."""
        chosen, given = Sample.of(site, inputs) if sample else None, list(inputs)
        if chosen is not None:
            given = [chosen(value, type) for value, type in zip(inputs, site.inputs, strict=True)]
        wide: Any = [upcast(value, torch.float64) for value in given]
        exact = reference.node_value(site.node, wide, inputs if sample else wide)
        bars = []
        for have, want in zip(reference.node_value(site.node, given, inputs), exact, strict=True):
            largest, error = want.abs().max().item(), (have.double() - want).abs()
            floor = torch.finfo(DTYPES[site.target.dtype]).eps * largest
            # which of two chains in f32 is nearer is chance
            close = ROUNDINGS * site.node.op.chained * torch.finfo(torch.float32).eps
            close = close if have.dtype == torch.float32 else 0.0
            rms = max(rms_of(error), close * rms_of(want), 1e-3 * floor, TINIEST)
            bars.append((rms, max(error.max().item(), close * largest, 0.5 * floor, TINIEST)))
        return cls(site, inputs, exact, bars, chosen)

    @classmethod
    def many(cls, site: Site, device: torch.device | str, seed: int = 0) -> "Judge | None":
        """One on so many rows that every multiprocessor gets several tiles; None on a device that has none."""
        sizes = many_sizes(site, device)
        return None if sizes is None else cls.of(site, inputs_of(site, sizes, device, seed), by_tiles(site))

    def errors(self, found: Sequence[Tensor]) -> tuple[Errors, ...]:
        """Of every output; infinite where one has another shape, or is not finite: what was not written is NaN."""
        return tuple(self._errors(i, value) for i, value in enumerate(found))

    def relative(self, errors: Sequence[Errors]) -> Composed:
        """RMS errors as shares of the RMS of what is exact, of a kernel that has `errors` and of the bars."""
        shares = [bar[0] / max(rms_of(want), TINIEST) for bar, want in zip(self.bars, self.exact, strict=True)]
        return Composed(max(error.rms * share for error, share in zip(errors, shares, strict=True)), max(shares))

    def _errors(self, i: int, value: Tensor) -> Errors:
        want, bars, type, sample = self.exact[i], self.bars[i], self.site.node.types[i], self.sample
        shape = want.shape
        if sample is not None and sample.has(type):
            shape = torch.Size((*self.inputs[0].shape[: len(sample.dims)], *want.shape[1:]))
        if value.shape != shape or not bool(value.isfinite().all()):
            return Errors(float("inf"), float("inf"))
        error = ((sample(value, type) if sample is not None else value).double() - want).abs()
        errors = Errors(rms_of(error) / bars[0], error.max().item() / bars[1])
        if errors.ok or any(isinstance(dim, str) for dim in type.shape) or want.numel() > FEW:
            return errors
        bound = self.rounding_of_sum(i, value.dtype)
        return Errors(rms_of(error) / max(bars[0], bound), error.max().item() / max(bars[1], bound))

    def rounding_of_sum(self, i: int, dtype: torch.dtype) -> float:
        """A bound on the rounding error of output `i`, a sum over rows: half a unit of the result in `dtype`, and f32
        additions, whose errors grow with the terms and not with their sum, which may cancel."""
        op, types = self.site.node.op, self.site.inputs
        dim = "B" if op.mixes_tokens else "T"
        places = [type.shape.index(dim) if dim in type.shape else None for type in types]
        rows = next(value.shape[at] for value, at in zip(self.inputs, places, strict=True) if at is not None)
        square = torch.zeros_like(self.exact[i])
        for part in torch.arange(rows).tensor_split(min(PARTS, rows)):
            start, count = int(part[0]), len(part)
            cut = [
                value if at is None else value.narrow(at, start, count)
                for value, at in zip(self.inputs, places, strict=True)
            ]
            wide: Any = [upcast(value, torch.float64) for value in cut]
            square += reference.node_value(self.site.node, wide)[i].square()
        additions: float = ROUNDINGS * op.chained * torch.finfo(torch.float32).eps * rows**0.5
        largest: float = self.exact[i].abs().max().item()
        terms: float = square.sqrt().max().item()
        return torch.finfo(dtype).eps / 2 * largest + additions * terms

    def call(self, kernel: Callable[..., Any]) -> tuple[Tensor, ...]:
        """The kernel's outputs on the inputs, in memory that was full of NaN."""
        with poisoned():
            return many(kernel(*self.inputs))


def composed(
    found: Sequence[Tensor], chain: Sequence[Tensor], exact: Sequence[Tensor]
) -> Iterator[tuple[Composed, bool]]:
    """What there is to say of each output of several kernels together, and whether it is good: one of another shape, or
    with NaN, is not."""
    for have, other, want in zip(found, chain, exact, strict=True):
        own = _norm_error(have, want) if have.shape == want.shape else math.inf
        seen = Composed(own, _norm_error(other, want), str(want.dtype).removeprefix("torch."))
        yield seen, seen.ok(have.dtype, count=want.numel())


def _norm_error(found: Tensor, exact: Tensor) -> float:
    error: float = ((found.to(exact.dtype) - exact).norm() / exact.norm().clamp_min(TINIEST)).item()
    return error


def by_tiles(site: Site) -> bool:
    """Whether every tile has rows of a sample, so that with tiles enough no more need be compared: a product's have."""
    return isinstance(site.node.op, Product)


def rms_of(values: Tensor) -> float:
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
