"""The interface of a quantization scheme: the arrays that it stores of a parameter, and both conversions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from specc.compiler.strict import StrictModel

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    Array = npt.NDArray[Any]
else:
    Array = Any  # the compiler imports without numpy

StoredType = Literal["i8", "i32", "f16", "bf16", "f32"]

# numpy has no bfloat16: its 16 bits are held as uint16, never converted.
NUMPY_TYPES: Mapping[StoredType, str] = {"i8": "<i1", "i32": "<i4", "f16": "<f2", "bf16": "<u2", "f32": "<f4"}
ITEM_BYTES: Mapping[StoredType, int] = {"i8": 1, "i32": 4, "f16": 2, "bf16": 2, "f32": 4}


class SchemeError(ValueError):
    """A parameter that a scheme cannot quantize, or stored arrays that it cannot have written.

    It does not know the parameter's name; the runtime adds it.
    """


@dataclass(frozen=True, slots=True)
class Stored:
    """One array that is stored of a parameter, such as its codes or its row scales.

    `dtype` "i8" is one signed code a byte, "i32" one in four; "bf16" arrays are numpy uint16 holding the 16 bits.
    """

    suffix: str
    dtype: StoredType
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes before compression."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def numpy_dtype(self) -> np.dtype[Any]:
        """The little-endian numpy dtype of the array."""
        import numpy as np

        return np.dtype(NUMPY_TYPES[self.dtype])


@dataclass(frozen=True, slots=True)
class Range:
    """Calibration statistics of a product's input x [.., K], in f64: the `largest` magnitude of each feature [K], and
    the mean of x^T x as `products` [K, K]. Where the input has a scale already, `beyond` [K] is the mean square of what
    its codes cut off, and `clipped` the share of all numbers that lose more than half a scale so."""

    largest: Tensor
    products: Tensor
    beyond: Tensor | None = None
    clipped: float = 0.0

    @property
    def square(self) -> Tensor:
        """The mean square of each feature [K]."""
        return self.products.diagonal()


@dataclass(frozen=True, slots=True)
class Solution:
    """How a matrix was solved for by a Hessian: the damping that was `asked`, and the one that let Cholesky succeed, in
    mean diagonals of the Hessian; how many columns are `dead`: without input, so that they were rounded to nearest."""

    asked: float
    damping: float
    dead: int


@dataclass(frozen=True, slots=True)
class Seen:
    """Calibration statistics of the product that a parameter is the weight of: X^T X of its input as `hessian`; the
    scale of its input, f32 [1] or [K], as its scheme chose it. Of a bias, `weight` are the stored arrays of the weight
    beside it. `solved` is told how the Hessian was used, where it was."""

    hessian: Tensor | None = None
    input_scale: Tensor | None = None
    weight: Mapping[str, Array] | None = None
    solved: Callable[[Solution], None] = lambda solution: None


class Scheme(StrictModel):
    """The base of every scheme. A subclass names itself by a `scheme` Literal and adds its settings."""

    needs_hessian: ClassVar[bool] = False
    # The deployed model multiplies with it in whole numbers, instead of bringing it back to floats when it is loaded.
    integer: ClassVar[bool] = False
    has_grid: ClassVar[bool] = False

    @abstractmethod
    def label(self) -> str:
        """The scheme as the plan and the reports spell it, such as `int5 gptq, per row`."""

    @abstractmethod
    def bits_per_value(self) -> float:
        """Bits of one stored value, scales not counted; the plan groups parameters by it."""

    @abstractmethod
    def stored(self, shape: tuple[int, ...]) -> tuple[Stored, ...]:
        """The arrays that a parameter of `shape` is stored as, in file order."""

    @abstractmethod
    def rejects(self, shape: tuple[int, ...]) -> str | None:
        """Why this scheme cannot take a parameter of `shape`; None where it can."""

    @abstractmethod
    def quantize(self, weight: Tensor, hessian: Tensor | None) -> dict[str, Array]:
        """`weight` (any float dtype and device) as the arrays of `stored`, by suffix.

        `hessian` is X^T X [columns, columns] up to a positive factor; schemes with `needs_hessian` False
        ignore it. Raises SchemeError for a shape that `rejects` refuses, for NaN or infinity, and for values
        out of range.
        """

    def input_scale(self, seen: Range, weights: Sequence[Tensor]) -> Tensor | None:
        """The scale f32 [1] or [K] of an input that `weights`, [N, K] each, are multiplied by, where the scheme rounds
        inputs."""
        return None

    @property
    def input_bits(self) -> Literal[8, 16]:
        """Bits of the input that a weight is multiplied by, where the scheme rounds inputs."""
        return 8

    @property
    def input_by_feature(self) -> bool:
        """Whether `input_scale` is one number a feature, [K]; all weights that share an input have to agree."""
        return False

    def quantize_seen(self, weight: Tensor, seen: Seen) -> dict[str, Array]:
        """As `quantize`, for a scheme that may ask for more than a Hessian."""
        return self.quantize(weight, seen.hessian)

    @abstractmethod
    def dequantize(self, arrays: Mapping[str, Array], shape: tuple[int, ...]) -> Tensor:
        """The float32 parameter of `shape`, the same bits in every process and on every device.

        Raises SchemeError when the arrays are not ones that `quantize` can have written.
        """

    def on_grid(self, weights: Tensor) -> Tensor:
        """`dequantize` of `quantize` without calibration data: f32 [P, ...], P parameters of one shape, each
        rounded on its own, on their device, without waiting for it. Only schemes with `has_grid` have it; values out of
        range are clipped."""
        raise SchemeError(f"{self.label()} has no grid to round to")

    @abstractmethod
    def estimate_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of the parameter in an artifact, after compression, at most about, estimated before there are weights,
        of which trained ones take less."""

    def with_bits(self, bits: int) -> Self:
        """This scheme at another width. Raises SchemeError where it has none or cannot take `bits`."""
        raise SchemeError(f"{self.label()} has no width to change")

    def with_clip(self, deviations: float) -> Self:
        """This scheme with rows clipped at so many standard deviations. Raises SchemeError where it cannot be."""
        raise SchemeError(f"{self.label()} has no clip in standard deviations")


def check_shape(scheme: Scheme, shape: tuple[int, ...]) -> None:
    """Raises SchemeError with the scheme's reason when it rejects `shape`."""
    if reason := scheme.rejects(shape):
        raise SchemeError(reason)


def check_finite(weight: Tensor) -> None:
    """Raises SchemeError when `weight` holds NaN or infinity."""
    if not bool(weight.isfinite().all()):
        raise SchemeError("it holds NaN or infinity")


def check_arrays(expected: tuple[Stored, ...], arrays: Mapping[str, Array]) -> None:
    """Raises SchemeError unless `arrays` has exactly the expected suffixes, dtypes and shapes."""
    if set(arrays) != {stored.suffix for stored in expected}:
        names = ", ".join(stored.suffix for stored in expected)
        raise SchemeError(f"its arrays are {', '.join(sorted(arrays)) or 'none'}, not {names}")
    for stored in expected:
        array = arrays[stored.suffix]
        if array.dtype != stored.numpy_dtype() or array.shape != stored.shape:
            wanted = f"{stored.numpy_dtype()}{list(stored.shape)}"
            raise SchemeError(f"{stored.suffix} is {array.dtype}{list(array.shape)}, not {wanted}")
