"""Accuracy checks of kernels, for verify, tune and bench.

`Judge` compares the outputs of a kernel on random inputs with f64 references. The tolerance is computed from the errors
of eager Torch in the dtype of the kernel. `Composed` compares the outputs of a sequence of kernels, which also round
intermediate values.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc.compiler.ir.types import Dim, TensorType
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.fp8_codes import FORMATS
from specc.compiler.ops.linear import Product
from specc.compiler.programs import reference
from specc.runtime.dtypes import DTYPES
from specc.runtime.verify.random_inputs import random_tensor

# The limits of the RMS error and of the largest error of a kernel, as multiples of the errors of eager Torch
RMS, PEAK = 1.005, 2.0
MANY = 1000  # an output with fewer values is not subject to the limit RMS, because its RMS error depends on chance
ROUNDINGS = 4  # the allowed error of an f32 sum in another order, as a multiple of one rounding error
SEQUENCE = 16  # the minimum number of tokens per sequence for ops that mix tokens
TINIEST = 1e-30  # the minimum tolerance, for outputs that are exactly 0 in both f64 and eager Torch
TINY = {"B": 1, "T": 8, "S": 8}
# The minimum number of tiles per multiprocessor. With 3 tiles, a kernel reuses each shared-memory buffer.
TILES = 3
SIDE = 256  # the maximum number of rows or columns of a kernel's tile
# The sequence length of inputs with many tiles. It is 7^3, so that no tile size divides the number of rows.
TOKENS = 343
# In inputs with many tiles, every 7th row is compared. Each part of a tile has at least 8 rows, so that every part is
# compared.
EVERY = 7
PARTS = 8  # the number of parts of a sum over rows; their values estimate the magnitude of the terms of the sum
# The number of 8-bit codes that may differ is this fraction of all codes, plus this number. Some values are close to a
# rounding boundary.
NEXT_CODES = 0.2, 4
FEW = 16  # an output with at most this number of values has too few rounding errors for a fair ratio of errors
LOOSER = 1.5  # the allowed error of several kernels together, as a multiple of the error of unfused code
FEW_LOOSER = 10.0  # the value of LOOSER for outputs of at most FEW values
FLOORS = {torch.float32: 3e-5}  # a relative error that is always allowed, because unfused code may be exact by chance
FLOOR = 1e-3  # the value in place of FLOORS for other dtypes


@dataclass(frozen=True, slots=True)
class Errors:
    """The RMS error and the largest error of one output, each divided by its limit in `Judge.bars`.

    `count` is the number of values. If there are fewer than MANY values, the limit of the RMS error is PEAK instead of
    RMS, because the RMS error of few values depends on chance.
    """

    rms: float
    peak: float
    count: int

    @property
    def ok(self) -> bool:
        return self.rms <= (RMS if self.count >= MANY else PEAK) and self.peak <= PEAK

    @property
    def words(self) -> str:
        """Returns a phrase that states the errors. In a message, the phrase follows the name of the output."""
        if math.isinf(self.rms):
            return "has a wrong shape, NaN or infinity: it is incomplete or wrong"
        return f"has {self.rms:.2f}x the RMS error of plain Torch and {self.peak:.2f}x its largest error"


@dataclass(frozen=True, slots=True)
class Composed:
    """The relative errors of a sequence of generated kernels, and of the unfused code that computes the same function.

    A relative error is |output - reference| / |reference| in the Frobenius norm.

    Attributes:
        generated: the error of the generated kernels; the largest error if they have several outputs.
        eager: the error of the unfused code.
        exact: the dtype of the reference.
    """

    generated: float
    eager: float
    exact: str = "float64"

    def ok(self, dtype: torch.dtype, count: int = FEW + 1) -> bool:
        """Returns whether the error of the generated kernels is acceptable.

        The error must not exceed the larger of two limits. The first limit is LOOSER times the error of the unfused
        code. The second limit is FLOORS[dtype]. NaN is not acceptable. `count` is the number of compared values. If
        there are only a few values, the error of the unfused code may be small by chance. Both limits are then larger.
        """
        room, floor = LOOSER, FLOORS.get(dtype, FLOOR)
        if count <= FEW:
            room, floor = FEW_LOOSER, max(floor, torch.finfo(dtype).eps)
        return self.generated <= max(room * self.eager, floor)


@dataclass(frozen=True, slots=True)
class Sample:
    """A selection of rows or sequences from values with the leading dimensions `dims`.

    `rows` contains indices into the leading dimensions after they are flattened to a single dimension.
    """

    rows: Tensor
    dims: tuple[Dim, ...]

    @classmethod
    def of(cls, site: Site, inputs: Sequence[Tensor]) -> "Sample":
        """Selects every seventh row and the last row. If the op mixes tokens, the method selects sequences instead.

        Args:
            site: the node, with the types of its inputs.
            inputs: the inputs of the node.
        """
        dims = site.inputs[0].shape[: -1 if site.node.op.rowwise else 1]
        count = inputs[0].shape[: len(dims)].numel()
        return cls(torch.tensor(sorted({*range(0, count, EVERY), count - 1}), device=inputs[0].device), dims)

    def __call__(self, value: Tensor, type: TensorType) -> Tensor:
        return value.flatten(0, len(self.dims) - 1)[self.rows] if self.has(type) else value

    def has(self, type: TensorType) -> bool:
        return type.shape[: len(self.dims)] == self.dims


@dataclass(frozen=True, slots=True)
class Judge:
    """Compares kernels of one node with f64 references, on the same inputs for all kernels.

    Attributes:
        site: the node, with the types of its inputs and the target.
        inputs: the inputs of the kernels.
        exact: the f64 outputs, restricted to `sample`.
        bars: the limits of the RMS error and of the largest error of each output. A limit is the error of eager Torch
            in the dtype of the kernel, or the largest possible rounding error if that error is larger.
        sample: the rows or sequences that are compared; None for all.
    """

    site: Site
    inputs: Sequence[Tensor]
    exact: Sequence[Tensor]
    bars: Sequence[tuple[float, float]]
    sample: Sample | None = None

    @classmethod
    def of(cls, site: Site, inputs: Sequence[Tensor], sample: bool = False) -> "Judge":
        """Returns a judge that compares kernels of a node on `inputs`, which are a result of `inputs_of`.

        If `sample` is True, the judge compares only some rows or sequences.
        """
        masks = site.epilogue is not None and site.epilogue.draws  # their random numbers depend on the row
        chosen, compared = Sample.of(site, inputs) if sample and not masks else None, list(inputs)
        if chosen is not None:
            compared = [chosen(value, type) for value, type in zip(inputs, site.inputs, strict=True)]
        wide: Any = [upcast(value, torch.float64) for value in compared]
        values = reference.node_value(site.node, wide, inputs if sample else wide)
        # Integer outputs are codes. Codes are compared as numbers.
        exact = tuple(value if value.is_floating_point() else value.double() for value in values)
        bars = []
        for have, want, type in zip(
            reference.node_value(site.node, compared, inputs), exact, site.node.types, strict=True
        ):
            largest, error = want.abs().max().item(), (have.double() - want).abs()
            floor = torch.finfo(DTYPES[site.target.dtype]).eps * largest
            if type.dtype in FORMATS:  # `_errors_of_codes` compares these 8-bit codes
                share, number = NEXT_CODES
                share += number / want.numel()
                bars.append((max(share, (error > 0).double().mean().item()), max(floor, TINIEST)))
                continue
            dtype = DTYPES[type.dtype]
            if have.dtype.is_floating_point and dtype.itemsize < have.dtype.itemsize:
                # The epilogue of a product of codes has f32 operands. Eager Torch then rounds its result to the type
                error = (have.to(dtype).double() - want).abs()
            # The error of eager f32 may be small by chance, so that rounding alone must also be allowed
            close = ROUNDINGS * site.node.op.chained * torch.finfo(torch.float32).eps
            close = close if have.dtype == torch.float32 else 0.0
            rms = max(rms_of(error), close * rms_of(want), 1e-3 * floor, TINIEST)
            bars.append((rms, max(error.max().item(), close * largest, 0.5 * floor, TINIEST)))
        return cls(site, inputs, exact, bars, chosen)

    @classmethod
    def many(cls, site: Site, device: torch.device | str, seed: int = 0) -> "Judge | None":
        """Returns a judge with inputs so large that every multiprocessor of a GPU computes several tiles.

        Returns None if `device` is the CPU.
        """
        sizes = many_sizes(site, device)
        return None if sizes is None else cls.of(site, inputs_of(site, sizes, device, seed), by_tiles(site))

    def errors(self, outputs: Sequence[Tensor]) -> tuple[Errors, ...]:
        """Returns the errors of each output. If an output has a wrong shape, or a value that is not finite, its errors
        are infinite.
        """
        return tuple(self._errors(i, value) for i, value in enumerate(outputs))

    def relative(self, errors: Sequence[Errors]) -> Composed:
        """Returns the relative errors of a kernel and of eager Torch, for the output with the largest error.

        An error is relative to the RMS of the exact output. If the outputs are 8-bit codes, the error of a wrong code
        is about one step between adjacent codes.
        """
        shares = [
            bar[0] * torch.finfo(DTYPES[type.dtype]).eps
            if type.dtype in FORMATS
            else bar[0] / max(rms_of(want), TINIEST)
            for bar, want, type in zip(self.bars, self.exact, self.site.node.types, strict=True)
        ]
        return Composed(max(error.rms * share for error, share in zip(errors, shares, strict=True)), max(shares))

    def _errors(self, i: int, value: Tensor) -> Errors:
        want, bars, type, sample = self.exact[i], self.bars[i], self.site.node.types[i], self.sample
        shape = want.shape
        if sample is not None and sample.has(type):
            shape = torch.Size((*self.inputs[0].shape[: len(sample.dims)], *want.shape[1:]))
        if value.shape != shape or not bool(value.double().isfinite().all()):
            return Errors(float("inf"), float("inf"), want.numel())
        error = ((sample(value, type) if sample is not None else value).double() - want).abs()
        if type.dtype in FORMATS:
            return _errors_of_codes(error, want, DTYPES[type.dtype], bars)
        errors = Errors(rms_of(error) / bars[0], error.max().item() / bars[1], want.numel())
        if errors.ok or any(isinstance(dim, str) for dim in type.shape) or want.numel() > FEW:
            return errors
        bound = self.rounding_of_sum(i, value.dtype)
        return Errors(rms_of(error) / max(bars[0], bound), error.max().item() / max(bars[1], bound), want.numel())

    def rounding_of_sum(self, i: int, dtype: torch.dtype) -> float:
        """Returns a bound on the rounding error of output `i`, which is a sum over rows.

        The bound is half a unit in the last place of the result in `dtype`, plus the error of the f32 additions. The
        error of the additions depends on the terms of the sum, which may be much larger than the sum.
        """
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
        """Runs a kernel on copies of the inputs, and returns its outputs.

        The memory that the kernel allocates is filled with NaN first.
        """
        copies = [value.clone() for value in self.inputs]
        with poisoned():
            return many(kernel(*copies))


def composed(
    outputs: Sequence[Tensor], chain: Sequence[Tensor], exact: Sequence[Tensor]
) -> Iterator[tuple[Composed, bool]]:
    """Yields a pair (errors, whether the errors are acceptable) for each output of a sequence of kernels.

    If an output has a wrong shape or NaN, its errors are not acceptable.

    Args:
        outputs: the outputs of the kernels.
        chain: the outputs of unfused code.
        exact: the outputs of the reference.
    """
    for have, other, want in zip(outputs, chain, exact, strict=True):
        error = _norm_error(have, want) if have.shape == want.shape else math.inf
        errors = Composed(error, _norm_error(other, want), str(want.dtype).removeprefix("torch."))
        yield errors, errors.ok(have.dtype, count=want.numel())


def _norm_error(output: Tensor, exact: Tensor) -> float:
    error: float = ((output.to(exact.dtype) - exact).norm() / exact.norm().clamp_min(TINIEST)).item()
    return error


def by_tiles(site: Site) -> bool:
    """Returns whether a sample of rows suffices to check every tile of a node. This is true for matrix products."""
    return isinstance(site.node.op, Product)


def rms_of(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def many(value: Any) -> tuple[Tensor, ...]:
    """Converts one tensor, or a sequence of tensors, to a tuple of tensors."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _errors_of_codes(error: Tensor, want: Tensor, dtype: torch.dtype, bars: tuple[float, float]) -> Errors:
    """Returns the errors of 8-bit floating-point codes, divided by their limits `bars`.

    The errors are the fraction of codes that differ, and the largest error in steps. A step is the distance between a
    code and the next code. Small codes have smaller steps than large codes. An error of a small code is therefore
    detected even if the output contains large codes.
    """
    share, floor = bars
    step = torch.finfo(dtype).eps * want.abs().clamp(min=torch.finfo(dtype).tiny)
    return Errors((error > 0).double().mean().item() / share, (error / (step + floor)).max().item(), error.numel())


def sizes_of(site: Site, rows: int) -> Mapping[str, int]:
    """Returns the sizes of the symbolic dimensions for inputs of `rows` rows.

    If the op of the node mixes tokens, the inputs are two sequences of max(rows, SEQUENCE) tokens. In shorter
    sequences, gradients of attention would consist mainly of rounding errors.
    """
    if site.node.op.mixes_tokens:
        return within(site, {"B": 2, "T": max(rows, SEQUENCE), "S": max(rows, SEQUENCE)})
    return site.node.op.site_sizes({"B": 1, "T": rows, "S": rows})


def within(site: Site, sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Returns `sizes`. If the op of the node mixes tokens, the length of sequences is limited.

    The limit is the context of the model, but at least SEQUENCE tokens.
    """
    if site.context is None or not site.node.op.mixes_tokens:
        return sizes
    most = max(site.context, SEQUENCE)
    return {name: min(size, most) if name in ("T", "S") else size for name, size in sizes.items()}


def many_sizes(site: Site, device: torch.device | str, tiles: int = TILES) -> Mapping[str, int] | None:
    """Returns sizes of symbolic dimensions for which a kernel has at least `tiles` tiles per multiprocessor of
    `device`.

    A tile may have up to SIDE x SIDE elements. Returns None if `device` is the CPU.
    """
    count = multiprocessors(device)
    if count is None:
        return None
    shapes = [[dim for dim in type.shape if isinstance(dim, int)] for type in (*site.node.types, site.inputs[0])]
    dims = next(dims for dims in shapes if dims)
    tile = SIDE * min(SIDE, dims[-1])
    tokens = within(site, {"T": TOKENS, "S": TOKENS})
    sequences = -(-tiles * count * tile // (math.prod(dims) * tokens["T"]))
    return site.node.op.site_sizes({"B": sequences | 1, **tokens})


def multiprocessors(device: torch.device | str) -> int | None:
    if torch.device(device).type != "cuda":
        return None
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def inputs_of(site: Site, sizes: Mapping[str, int], device: torch.device | str, seed: int = 0) -> list[Tensor]:
    """Returns random inputs of a node, with values that its op accepts.

    Integers are smaller than the number of ids that the op accepts. If an input is a function of other inputs, it is
    computed from these inputs. If the op is not defined for negative values, its operands are positive.

    Args:
        site: the node and the types of its inputs.
        sizes: the sizes of the symbolic dims.
        device: the device of the inputs.
        seed: the seed of the random generator.

    Returns:
        The inputs, in the order of the inputs of the node, with the dtypes that the site states.
    """
    tiny = site.node.op.site_sizes(TINY)
    return on_domain(site, _random(site, sizes, device, seed), _random(site, tiny, device, seed))


def on_domain(site: Site, values: Sequence[Tensor], sample: Sequence[Tensor]) -> list[Tensor]:
    """Returns inputs on which the op of a node is defined.

    If the result of the op for `sample` contains NaN, the function replaces the operands by their absolute values. It
    then computes the inputs that are functions of other inputs.

    Args:
        site: the node, with the types of its inputs.
        values: random inputs of the node.
        sample: small random inputs of the node, with the types of `values`.
    """
    arity = site.node.op.arity
    sample = site.node.op.belonging(sample)
    if any(bool(value.isnan().any()) for value in reference.node_value(site.node, list(sample))):
        values = [*values[:arity], *map(abs, values[arity:])]
    return list(site.node.op.belonging(values))


def _random(site: Site, sizes: Mapping[str, int], device: torch.device | str, seed: int) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    below = lambda dtype: site.node.op.ids_below(site.inputs)  # noqa: E731
    return [random_tensor(type, sizes, generator, below) for type in site.inputs]


def upcast(value: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    """Returns a floating-point tensor in `dtype`. Returns integer tensors and Python numbers unchanged."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def poisoned() -> Iterator[None]:
    """A context manager in which Torch fills newly allocated memory with NaN, so that values that a kernel does not
    write are NaN.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
