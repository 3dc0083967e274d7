"""The table of arrays of an artifact: the name, dtype, shape, memory order and checksum of each array.

The spec determines the shapes of all arrays. However, kernels of int8 products read the stored codes directly, and
would not detect a wrong shape. The file of a model with int8 products therefore stores the table as an additional
section. The table has one JSON line per array.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specc.compiler.quant.scheme import NUMPY_TYPES, Scheme, Stored
from specc.runtime.errors import IntegrityError

Array = npt.NDArray[Any]
Tensors = Mapping[str, Mapping[str, Array]]
Layout = Sequence[tuple[str, Stored]]  # the arrays of all parameters, in file order
AGAIN = "quantize the run again"  # the hint of errors about arrays that do not match the model
# The memory orders. In ROWS, the last dimension is contiguous. In COLUMNS, the first dimension is contiguous.
ROWS, COLUMNS = "rows", "columns"


@dataclass(frozen=True, slots=True)
class Entry:
    """One array in the table.

    Attributes:
        name: the name of the parameter.
        suffix: the suffix of the array, such as `codes`.
        dtype: `i8`, `i32`, `f16`, `bf16` or `f32`; for any other dtype, the name in numpy, such as `float64`.
        shape: the shape of the array.
        order: the memory order of the array, ROWS for row-major or COLUMNS for column-major.
        checksum: the CRC-32 of the items in row-major order.
    """

    name: str
    suffix: str
    dtype: str
    shape: tuple[int, ...]
    order: str
    checksum: int

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.suffix

    @property
    def form(self) -> str:
        """The dtype and shape as text, e.g. `i8[31,128]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def layout(schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Returns the layout of an artifact: a pair (parameter name, description of the array) for each stored array. The
    pairs are in the order of `schemes`. `shapes` has the shape of each parameter.
    """
    return tuple((name, stored) for name, scheme in schemes.items() for stored in scheme.stored(shapes[name]))


def entries(tensors: Tensors) -> dict[tuple[str, str], Entry]:
    """Returns the table entries that describe the given arrays, by parameter name and suffix."""
    dtypes = {np.dtype(numpy_type): stored_type for stored_type, numpy_type in NUMPY_TYPES.items()}
    table: dict[tuple[str, str], Entry] = {}
    for name, arrays in tensors.items():
        for suffix, array in arrays.items():
            dtype = dtypes.get(array.dtype, str(array.dtype))
            table[name, suffix] = Entry(name, suffix, dtype, array.shape, ROWS, zlib.crc32(array.tobytes()))
    return table


def described(schemes: Mapping[str, Scheme], tensors: Tensors) -> bytes:
    """Returns the raw table section of an artifact; empty if there are no int8 products."""
    integer = any(scheme.integer for scheme in schemes.values())
    return packed(entries(tensors).values()) if integer else b""


def packed(table: Iterable[Entry]) -> bytes:
    """Returns the raw bytes of the table section."""
    lines = ([e.name, e.suffix, e.dtype, list(e.shape), e.order, e.checksum] for e in table)
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


def unpacked(data: bytes) -> dict[tuple[str, str], Entry]:
    """Parses a table section. Returns its entries by parameter name and suffix. Raises IntegrityError if the section is
    malformed.
    """
    table: dict[tuple[str, str], Entry] = {}
    try:
        for line in data.decode().splitlines():
            name, suffix, dtype, shape, order, checksum = json.loads(line)
            entry = Entry(name, suffix, dtype, tuple(shape), order, checksum)
            texts, numbers = (name, suffix, dtype, order), (*entry.shape, checksum)
            if any(type(text) is not str for text in texts) or any(type(n) is not int for n in numbers):
                raise ValueError(line)
            if entry.key in table:
                raise ValueError(f"the table lists the array {name}, {suffix} twice")
            table[entry.key] = entry
    except (ValueError, TypeError, RecursionError) as error:
        raise IntegrityError("the table of arrays cannot be read", AGAIN) from error
    return table


def require_layout(table: Mapping[tuple[str, str], Entry], layout: Layout) -> None:
    """Checks that a table has exactly the arrays of a layout.

    Raises IntegrityError if an array is missing from the table or from the layout, has a wrong dtype or shape, or is
    not stored in row-major order. The message names the array.
    """
    expected = {(name, stored.suffix): stored for name, stored in layout}
    for key in [*expected, *table]:
        array = ", ".join(key)
        if key not in table:
            raise IntegrityError(f"{array} is not in the file", AGAIN)
        if key not in expected:
            raise IntegrityError(f"{array} is in the file, but not in the spec", AGAIN)
        entry, stored = table[key], expected[key]
        form = f"{stored.dtype}[{','.join(map(str, stored.shape))}]"
        if entry.form != form:
            raise IntegrityError(f"{array} is {entry.form} in the file but {form} in the model", AGAIN)
        if entry.order != ROWS:
            raise IntegrityError(f"{array} is stored by {entry.order}, but is read by {ROWS}", AGAIN)


def require_values(table: Mapping[tuple[str, str], Entry], tensors: Tensors) -> None:
    """Checks that arrays have the checksums of their table entries.

    Raises IntegrityError if a checksum differs. The message names the array.
    """
    for key, entry in entries(tensors).items():
        if entry.checksum != table[key].checksum:
            message = f"{', '.join(key)} {entry.form} does not have the checksum in its table of arrays"
            raise IntegrityError(message, f"the array was changed or transposed after it was written: {AGAIN}")
