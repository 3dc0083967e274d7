"""The types of values: dims, dtypes, and errors of type rules."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specc.compiler.records import record

if TYPE_CHECKING:
    from torch import Tensor as Tensor
else:  # names, because a build does not import torch; only reference implementations import torch
    Tensor = Any

Tensors = Tensor | tuple[Tensor, ...]
BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i8": 1, "u8": 1, "bool": 1}
BYTES |= {"e4m3": 1, "e5m2": 1}
DTYPES = {"f64": "torch.float64", "f32": "torch.float32", "bf16": "torch.bfloat16", "f16": "torch.float16"}
DTYPES |= {"i64": "torch.int64", "i32": "torch.int32", "i8": "torch.int8", "u8": "torch.uint8", "bool": "torch.bool"}
DTYPES |= {"e4m3": "torch.float8_e4m3fn", "e5m2": "torch.float8_e5m2"}
COMPUTE = "bf16"  # the compute dtype of programs until the dtype of a target replaces it
Dim = int | str
Sizes = Mapping[str, int]


class Size(int):
    """An integer dim with a symbolic name for generated code, such as `D` or `H * C`.

    Three operations return a Size: a size times a size, an integer times a size, and a product divided by one of its
    factors (`H * C` // `H` is `C`). The rightmost factor is an exception: `H * C` // `C` is a plain number. All other
    operations return plain numbers.
    """

    text: str

    def __new__(cls, value: int, text: str) -> "Size":
        number = super().__new__(cls, value)
        number.text = text
        return number

    def __reduce__(self) -> tuple[Any, ...]:  # makes a Size picklable, because processes pass plans to one another
        return Size, (int(self), self.text)

    def __mul__(self, other: Any) -> Any:
        product = int(self) * other
        return Size(product, f"{self.text} * {other.text}") if isinstance(other, Size) else product

    def __rmul__(self, other: Any) -> Any:
        return Size(other * int(self), f"{other} * {self.text}") if isinstance(other, int) else other * int(self)

    def __floordiv__(self, other: int) -> int:
        words = self.text.split(" * ")
        if isinstance(other, Size) and other.text in words[:-1]:
            words.remove(other.text)
            return Size(int(self) // int(other), " * ".join(words))
        return int(self) // int(other)


def spelled(value: object) -> str:
    """Returns the text of a number or dim in generated code: the name of a Size, otherwise the number."""
    return value.text if isinstance(value, Size) else str(value)


class TypeRuleError(ValueError):
    """Raised if an op cannot accept its inputs.

    Attributes:
        message: the problem.
        inputs: the positions of the wrong inputs, in ascending order.
        hint: how to fix the error.
        origins: the names of the nodes that determine the numbers of features of the wrong inputs.
    """

    def __init__(
        self, message: str, inputs: tuple[int, ...] = (), hint: str = "", origins: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.inputs = inputs
        self.hint = hint
        self.origins = origins


@record
class TensorType:
    """The shape and dtype of a value.

    A dim is an integer or the name of a symbolic dim, such as `B` for rows and `T` for tokens. `storage` is the format
    of a deployed parameter, such as `int5`. `storage` is empty if the parameter is stored in `dtype`.
    """

    shape: tuple[Dim, ...]
    dtype: str
    storage: str = ""

    def __str__(self) -> str:
        stored = f"{self.storage}:" if self.storage else ""
        return f"{stored}{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def width(self) -> Dim:
        """Returns the last dim, which is the number of features for most values."""
        return self.shape[-1]

    @property
    def floating(self) -> bool:
        """Returns whether the dtype is a float. The value can then have a gradient."""
        return self.dtype in ("f64", "f32", "bf16", "f16")

    def with_shape(self, *shape: Dim) -> "TensorType":
        return TensorType(shape, self.dtype, self.storage)

    def count(self, sizes: Sizes) -> int:
        return math.prod(map(int, self.extents(sizes)))

    def extents(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)

    def bytes(self, sizes: Sizes) -> int:
        return self.count(sizes) * BYTES[self.dtype]
