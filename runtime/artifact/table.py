"""The table of arrays of an artifact: the name, dtype, shape, memory order and checksum that the writer gave each.

Shapes of an artifact follow from its spec. Arrays that are multiplied as they are stored would be read in these shapes
whatever they are, so their file states them in one more section, of one line per array.
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
AGAIN = "quantize the run again"  # the hint where arrays do not fit
ROWS, COLUMNS = "rows", "columns"  # the axis that is contiguous in memory: the last, or the first


@dataclass(frozen=True, slots=True)
class Entry:
    """One array: `dtype` as `Stored` spells it, or as numpy does where that has no such dtype; `order` is ROWS where
    the last axis is contiguous; `checksum` is the CRC-32 of its items row by row."""

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
        """As types print, e.g. `i8[31,128]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def entries(tensors: Mapping[str, Mapping[str, Array]]) -> dict[tuple[str, str], Entry]:
    """What these arrays are, by name and suffix."""
    found = (Entry.of(name, suffix, array) for name, arrays in tensors.items() for suffix, array in arrays.items())
    return {entry.key: entry for entry in found}


def described(schemes: Mapping[str, Scheme], tensors: Mapping[str, Mapping[str, Array]]) -> bytes:
    """The section of an artifact of these arrays; empty where none of them is multiplied as it is stored."""
    integer = any(scheme.integer for scheme in schemes.values())
    return packed(entries(tensors).values()) if integer else b""


def packed(table: Iterable[Entry]) -> bytes:
    """The raw bytes of the section."""
    lines = ([e.name, e.suffix, e.dtype, list(e.shape), e.order, e.checksum] for e in table)
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


def unpacked(data: bytes) -> dict[tuple[str, str], Entry]:
    """The arrays that a section tells of, by name and suffix. Raises IntegrityError for what `packed` never writes."""
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
    """Raises IntegrityError, naming the array, unless a table has those of a layout, in their dtypes and shapes, row by
    row."""
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
    """Raises IntegrityError, naming the array, unless arrays hold what their table says."""
    for key, found in entries(tensors).items():
        if found.checksum != table[key].checksum:
            message = f"{key[0]}, {key[1]} {found.words} does not hold what its table of arrays says"
            raise IntegrityError(message, "it was changed, or transposed, after it was written: quantize the run again")
