"""The interface of quantization schemes. A scheme states the stored arrays of a parameter, and how to quantize and
dequantize the parameter.

A new scheme is a subclass of `Scheme` in a new module of this folder. docs/extending.md has the steps.
runtime/quantize/assignment.py decides the scheme of each parameter.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from specc.compiler.ir.types import Tensor
from specc.compiler.records import record
from specc.compiler.strict import StrictModel

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:
    Array = Any  # so that the compiler can be imported without numpy

StoredType = Literal["i8", "i32", "f16", "bf16", "f32"]

# numpy has no bfloat16, so the 16 bits of a bfloat16 are stored as uint16 without conversion.
NUMPY_TYPES: Mapping[StoredType, str] = {"i8": "<i1", "i32": "<i4", "f16": "<f2", "bf16": "<u2", "f32": "<f4"}
ITEM_BYTES: Mapping[StoredType, int] = {"i8": 1, "i32": 4, "f16": 2, "bf16": 2, "f32": 4}


class SchemeError(ValueError):
    """Raised if a scheme cannot quantize a parameter, or if stored arrays are invalid. The runtime adds the name of
    the parameter to the message."""


@record
class Stored:
    """One stored array of a parameter, such as its codes or its row scales.

    `dtype` "i8" is one signed code per byte, and "i32" is one signed code per four bytes. "bf16" arrays are numpy
    uint16 arrays with the same 16 bits.
    """

    suffix: str
    dtype: StoredType
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def numpy_dtype(self) -> "np.dtype[Any]":
        import numpy as np

        return np.dtype(NUMPY_TYPES[self.dtype])


@record
class Range:
    """Calibration statistics of the input x [.., K] of a matrix product, in f64.

    Attributes:
        largest: the largest magnitude of each feature [K].
        products: the mean of x^T x [K, K].
        beyond: the mean square of the amount that clipping removes from each feature [K]. None if the input has no
            scale yet.
        clipped: the fraction of all values that clipping changes by more than half a scale.
    """

    largest: Tensor
    products: Tensor
    beyond: Tensor | None = None
    clipped: float = 0.0

    @property
    def square(self) -> Tensor:
        return self.products.diagonal()


@record
class Solution:
    """The use of the Hessian in the quantization of a matrix.

    Attributes:
        requested: The requested damping, relative to the mean diagonal of the Hessian.
        damping: The damping with which the Cholesky factorization succeeded, relative to the mean diagonal.
        dead: The number of columns without input, which were rounded to nearest.
    """

    requested: float
    damping: float
    dead: int


@record
class Use:
    """One product or lookup that reads a parameter [N, K]. If row i of the parameter has the error `d_i`, the loss
    rises by `1/2 sum_i rows[i] d_i C d_i^T`, where `C` is `columns`.

    A parameter may have several uses, such as a tied embedding table. The increases of the loss from all uses are
    added.

    Attributes:
        rows: The weight of each row, f64 [N], at least 0.
        columns: A matrix, symmetric positive semidefinite, f64 [K, K].
    """

    rows: Tensor
    columns: Tensor


@record
class Seen:
    """Calibration data for the weight or the bias of a matrix product.

    Attributes:
        hessian: The matrix X^T X [K, K] of the inputs X of a weight.
        input_scale: The scale of the input of a weight, f32 [1] or [K], from `Scheme.input_scale`.
        weight: For a bias, the stored arrays of the weight of the same product.
        solved: A function that is called with a `Solution` if the Hessian is used.
        uses: All uses of a parameter that several products or lookups read. If `uses` is not empty, schemes ignore
            `hessian`.
    """

    hessian: Tensor | None = None
    input_scale: Tensor | None = None
    weight: Mapping[str, Array] | None = None
    solved: Callable[[Solution], None] = lambda solution: None
    uses: Sequence[Use] = ()


class Scheme(StrictModel):
    """The base class of all schemes. A subclass is identified by a `scheme` Literal, and adds its settings."""

    needs_hessian: ClassVar[bool] = False
    # Whether the deployed model multiplies the integer codes. Otherwise, the codes are dequantized when the model is
    # loaded.
    integer: ClassVar[bool] = False
    has_grid: ClassVar[bool] = False

    @abstractmethod
    def label(self) -> str:
        """Returns the name of the scheme in plans and reports, such as `int5 gptq, per row`."""

    @abstractmethod
    def bits_per_value(self) -> float:
        """Returns the number of bits per stored value, without scales. The plan groups parameters by this number."""

    @abstractmethod
    def stored(self, shape: tuple[int, ...]) -> tuple[Stored, ...]:
        """Returns the stored arrays of a parameter of `shape`, in file order."""

    def row_codes(self, shape: tuple[int, ...]) -> int | str:
        """If a parameter of `shape` is stored as one code per value and one scale per row, returns the number of bits
        of a code. Otherwise, returns the reason why a kernel cannot decode the parameter."""
        return f"{self.label()} has no codes"

    @abstractmethod
    def rejects(self, shape: tuple[int, ...]) -> str | None:
        """Returns the reason why this scheme cannot store a parameter of `shape`, or None if the scheme can store the
        parameter."""

    @abstractmethod
    def quantize(self, weight: Tensor, hessian: Tensor | None) -> dict[str, Array]:
        """Converts `weight` (any float dtype and device) to the arrays of `stored`, by suffix.

        `hessian` is X^T X [columns, columns], up to a positive factor. Schemes with `needs_hessian` False ignore the
        Hessian. Raises SchemeError if `rejects` refuses the shape, if the weight holds NaN or infinity, or if a value
        is out of range.
        """

    def input_scale(self, seen: Range, weights: Sequence[Tensor]) -> Tensor | None:
        """Returns the scale, f32 [1] or [K], of an input that is multiplied by `weights`, [N, K] each. Returns None if
        the scheme does not round inputs."""
        return None

    @property
    def input_bits(self) -> Literal[8, 16]:
        """Returns the number of bits of a product's input, if the scheme rounds inputs."""
        return 8

    @property
    def input_by_feature(self) -> bool:
        """Whether `input_scale` has one number per feature, [K]. Weights that multiply the same input must have schemes
        with the same value of this property."""
        return False

    def quantize_seen(self, weight: Tensor, seen: Seen) -> dict[str, Array]:
        """Converts `weight` to the arrays of `stored`, by suffix. Schemes that need more calibration data than a
        Hessian override this method. Raises SchemeError if the weight or the data are invalid."""
        return self.quantize(weight, seen.hessian)

    @abstractmethod
    def dequantize(self, arrays: Mapping[str, Array], shape: tuple[int, ...]) -> Tensor:
        """Returns the float32 parameter of `shape`. The bits are the same in every process and on every device.

        Raises SchemeError if the arrays cannot be a result of `quantize`.
        """

    def on_grid(self, weights: Tensor) -> Tensor:
        """Returns `weights` quantized and dequantized without calibration data, for fake quantization.

        `weights` is [P, ...]: P parameters of one shape, each rounded separately. The result is f32, with the same
        shape and on the same device. The computation does not synchronize with the device. Values out of range are
        clipped. Raises SchemeError if `has_grid` is False.
        """
        raise SchemeError(f"{self.label()} cannot round weights for training")

    @abstractmethod
    def estimate_bytes(self, shape: tuple[int, ...]) -> int:
        """Estimates the bytes of the parameter in an artifact after compression. The estimate needs no weights. The
        estimate is approximately an upper bound, because trained weights take fewer bytes."""

    def with_bits(self, bits: int) -> Self:
        """Returns this scheme with `bits` bits per code. Raises SchemeError if the scheme has no setting `bits` or
        rejects the number."""
        raise SchemeError(f"{self.label()} has no setting `bits`")

    def with_clip(self, deviations: float) -> Self:
        """Returns this scheme with rows clipped at `deviations` standard deviations. Raises SchemeError if the scheme
        has no such setting."""
        raise SchemeError(f"{self.label()} has no setting `clip_stds`")


def variants(scheme: Scheme, bits: Sequence[int], clip_stds: Sequence[float]) -> tuple[Scheme, ...]:
    """Returns one variant of the scheme for each supported combination of bits and clip. The variants are sorted by
    ascending bits, then by descending clip."""
    schemes: list[Scheme] = []
    for width in sorted(set(bits)):
        try:
            wider = scheme.with_bits(width)
        except SchemeError:
            continue
        for clip in sorted(set(clip_stds), reverse=True) or (None,):
            try:
                schemes.append(wider if clip is None else wider.with_clip(clip))
            except SchemeError:
                schemes.append(wider)
    return tuple(dict.fromkeys(schemes))


def check_weight(scheme: Scheme, weight: Tensor) -> None:
    """Raises SchemeError if `scheme` rejects the shape of `weight`, or if `weight` holds NaN or infinity."""
    if reason := scheme.rejects(tuple(weight.shape)):
        raise SchemeError(reason)
    if not bool(weight.isfinite().all()):
        raise SchemeError("the tensor holds NaN or infinity")


def check_codes(codes: Tensor, largest: int) -> None:
    if bool(((codes > largest) | (codes < -largest)).any()):
        raise SchemeError(f"a code is outside [-{largest}, {largest}]")


def check_arrays(expected: tuple[Stored, ...], arrays: Mapping[str, Array]) -> None:
    """Raises SchemeError unless `arrays` has exactly the expected suffixes, dtypes and shapes."""
    if set(arrays) != {stored.suffix for stored in expected}:
        names = ", ".join(stored.suffix for stored in expected)
        raise SchemeError(f"the stored arrays are {', '.join(sorted(arrays)) or 'none'}, not {names}")
    for stored in expected:
        array = arrays[stored.suffix]
        if array.dtype != stored.numpy_dtype() or array.shape != stored.shape:
            wanted = f"{stored.numpy_dtype()}{list(stored.shape)}"
            raise SchemeError(f"{stored.suffix} is {array.dtype}{list(array.shape)}, not {wanted}")
