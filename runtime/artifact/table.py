"""The table of arrays of an artifact: the name, dtype, shape, memory order and checksum of each array.

The shapes of an artifact follow from its spec. An array that is multiplied in its stored form would be read with the
shape of the spec even if it was written with another shape. A file with arrays of this kind therefore has an additional
section, the table, with one JSON line per array.
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
AGAIN = "quantize the run again"  # the hint of errors about arrays that do not fit
ROWS, COLUMNS = "rows", "columns"  # memory orders: the last axis is contiguous, or the first


@dataclass(frozen=True, slots=True)
class Entry:
    """One array of the table.

    Attributes:
        name: the name of the parameter.
        suffix: the suffix of the array.
        dtype: the dtype as `Stored` spells it, or numpy's name of a dtype that `Stored` does not have.
        shape: the shape of the array.
        order: the memory order, ROWS or COLUMNS.
        checksum: the CRC-32 of the items in row-major order.
    """

    name: str
    suffix: str
    dtype: str
    shape: tuple[int, ...]
    order: str
    checksum: int

    @classmethod
    def of(cls, name: str, suffix: str, array: Array) -> "Entry":
        known = {np.dtype(spelt): word for word, spelt in NUMPY_TYPES.items()}
        dtype = known.get(array.dtype, str(array.dtype))
        return cls(name, suffix, dtype, array.shape, ROWS, zlib.crc32(array.tobytes()))

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.suffix

    @property
    def words(self) -> str:
        """The dtype and shape as text, e.g. `i8[31,128]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def entries(tensors: Mapping[str, Mapping[str, Array]]) -> dict[tuple[str, str], Entry]:
    """Returns the table entries of arrays, by name and suffix."""
    found = (Entry.of(name, suffix, array) for name, arrays in tensors.items() for suffix, array in arrays.items())
    return {entry.key: entry for entry in found}


def described(schemes: Mapping[str, Scheme], tensors: Mapping[str, Mapping[str, Array]]) -> bytes:
    """Returns the raw table section of an artifact; empty if no array is multiplied in its stored form."""
    integer = any(scheme.integer for scheme in schemes.values())
    return packed(entries(tensors).values()) if integer else b""


def packed(table: Iterable[Entry]) -> bytes:
    """Returns the raw bytes of the table section."""
    lines = ([e.name, e.suffix, e.dtype, list(e.shape), e.order, e.checksum] for e in table)
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


def unpacked(data: bytes) -> dict[tuple[str, str], Entry]:
    """Parses a table section into entries by name and suffix. Raises IntegrityError if the section is malformed."""
    found: dict[tuple[str, str], Entry] = {}
    try:
        for line in data.decode().splitlines():
            name, suffix, dtype, shape, order, checksum = json.loads(line)
            entry = Entry(name, suffix, dtype, tuple(shape), order, checksum)
            texts, numbers = (name, suffix, dtype, order), (*entry.shape, checksum)
            if not all(isinstance(word, str) for word in texts) or not all(type(n) is int for n in numbers):
                raise ValueError(line)
            if entry.key in found:
                raise ValueError(f"{name}, {suffix} twice")
            found[entry.key] = entry
    except (ValueError, TypeError, RecursionError) as error:
        raise IntegrityError("its table of arrays cannot be read", AGAIN) from error
    return found


def require_layout(table: Mapping[tuple[str, str], Entry], layout: Sequence[tuple[str, Stored]]) -> None:
    """Checks a table against a layout.

    Raises IntegrityError, which names the array, if an array is missing or unexpected, has another dtype or shape, or
    is not stored in row-major order.
    """
    wanted = {(name, stored.suffix): stored for name, stored in layout}
    for key in [*wanted, *table]:
        what = f"{key[0]}, {key[1]}"
        if key not in table:
            raise IntegrityError(f"{what} is not in the file", AGAIN)
        if key not in wanted:
            raise IntegrityError(f"{what} is in the file, and its spec has no such array", AGAIN)
        entry, stored = table[key], wanted[key]
        shape = f"{stored.dtype}[{','.join(map(str, stored.shape))}]"
        if entry.words != shape:
            raise IntegrityError(f"{what} is {entry.words} in the file but {shape} in the model", AGAIN)
        if entry.order != ROWS:
            raise IntegrityError(f"{what} is stored by {entry.order}, and is read by {ROWS}", AGAIN)


def require_values(table: Mapping[tuple[str, str], Entry], tensors: Mapping[str, Mapping[str, Array]]) -> None:
    """Checks the values of arrays against their table.

    Raises IntegrityError, which names the array, if a checksum differs.
    """
    for key, found in entries(tensors).items():
        if found.checksum != table[key].checksum:
            message = f"{key[0]}, {key[1]} {found.words} does not hold what its table of arrays says"
            raise IntegrityError(message, "it was changed, or transposed, after it was written: quantize the run again")
