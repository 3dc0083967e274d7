"""Token shards: a header of 256 little-endian i32 (magic number, version, token count, zeros), then u16 or u32 tokens.

The magic number and the version determine whether tokens have 16 or 32 bits. llm.c uses the same values.

Shards are read with `pread` instead of a memory map. If a mapped file is truncated, an access ends the process with
SIGBUS. If a file is truncated before a `pread`, the call returns too few bytes, and an ordinary error is raised.
"""

import os
import re
import stat
import weakref
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.missing_paths import missing_source
from specc.runtime.data.split import Split

HEADER_BYTES = 1024
MAX_TOKENS = 2**31 - 1  # the header stores the number of tokens as an int32


@dataclass(frozen=True, slots=True)
class ShardFormat:
    """A file format of shards.

    Attributes:
        magic, version: the first two integers of the header.
        dtype: little-endian dtype of the tokens.
        highest: the highest token id. A 32-bit token uses at most 31 bits, so that it can be viewed as i32.
    """

    magic: int
    version: int
    dtype: np.dtype[Any]
    highest: int

    @property
    def bits(self) -> int:
        return 8 * int(self.dtype.itemsize)

    def file_bytes(self, tokens: int) -> int:
        """Returns the size in bytes of a file with `tokens` tokens. This size is also the offset of the token with the
        index `tokens`.
        """
        return HEADER_BYTES + int(self.dtype.itemsize) * tokens

    def header(self, tokens: int) -> bytes:
        header = np.zeros(256, "<i4")
        header[:3] = self.magic, self.version, tokens
        return header.tobytes()


NARROW = ShardFormat(20240520, 1, np.dtype("<u2"), 2**16 - 1)
WIDE = ShardFormat(20240801, 7, np.dtype("<u4"), 2**31 - 1)
FORMATS = {form.magic: form for form in (NARROW, WIDE)}


def format_for(vocab: int) -> ShardFormat:
    """Returns the format in which new shards are written, for a tokenizer with `vocab` ids."""
    return NARROW if vocab <= NARROW.highest + 1 else WIDE


Tokens = npt.NDArray[np.uint16 | np.uint32]
# For example, fineweb_val_bytes_000000.bin has the byte counts of the shard fineweb_val_000000.bin.
_BYTES_IN_NAME = re.compile(r"(?<![a-z])bytes(?![a-z])", re.IGNORECASE)
_SPLIT_IN_NAME = re.compile(r"(?<![a-z])(train|val)(?:ing|id|idation)?(?![a-z])", re.IGNORECASE)


class ShardWriter:
    """Writes a shard. Use the writer as a context manager.

    If the `with` block ends without an error, the writer writes the header and syncs the file. Until then, the header
    is invalid. The writer does not rename the file, so write into a temporary folder.
    """

    def __init__(self, path: str | Path, form: ShardFormat = NARROW) -> None:
        self.path, self.form = Path(path), form
        self.tokens = 0
        self._file = open(self.path, "wb")  # noqa: SIM115 (closed on exit)
        self._file.write(bytes(HEADER_BYTES))

    def write(self, tokens: npt.NDArray[np.integer[Any]]) -> None:
        """Appends tokens of any integer dtype.

        Raises ValueError if a token is negative or above `form.highest`, or if the shard would exceed MAX_TOKENS
        tokens.
        """
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) > self.form.highest):
            raise ValueError(f"tokens of a shard must be in 0..{self.form.highest}")
        if self.tokens + tokens.size > MAX_TOKENS:
            raise ValueError(f"a shard has at most {MAX_TOKENS:,} tokens")
        self._file.write(np.ascontiguousarray(tokens, self.form.dtype).data)
        self.tokens += int(tokens.size)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                self._file.write(self.form.header(self.tokens))
                self._file.flush()
                os.fsync(self._file.fileno())


class TokenShard:
    """An open shard. The constructor checks the header and the file size.

    Attributes:
        path: the file of the shard.
        form: the file format.
        tokens: the number of tokens.

    Raises:
        DataError: the file cannot be opened.
        DataIntegrityError: the file is not a shard, or has the wrong size.
    """

    __slots__ = ("__weakref__", "_descriptor", "_finalizer", "form", "path", "tokens")

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            # O_NONBLOCK prevents that opening a named pipe blocks
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)
        try:
            self.form, self.tokens = self._validated()
        except BaseException:
            self.close()
            raise

    def _validated(self) -> tuple[ShardFormat, int]:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise self._damage("it is not a regular file")
        size = status.st_size
        if size < HEADER_BYTES:
            raise self._damage(f"{size:,} bytes, but a shard's header alone has {HEADER_BYTES:,}")
        header = np.frombuffer(self._pread(HEADER_BYTES, 0), "<i4")
        form = FORMATS.get(int(header[0])) if header.size == 256 else None
        if form is None:
            expected = " or ".join(f"{form.magic} for {form.bits}-bit tokens" for form in FORMATS.values())
            raise self._damage(f"not a token shard (magic {header[0] if header.size else '?'}, expected {expected})")
        if header[1] != form.version:
            raise self._damage(
                f"shard format version {header[1]}, but specc reads version {form.version} for {form.bits}-bit tokens"
            )
        count = int(header[2])
        if count < 0 or size != form.file_bytes(count):
            raise self._damage(f"{size:,} bytes, but {count:,} tokens need {form.file_bytes(count):,}")
        if header[3:].any():
            raise self._damage("nonzero bytes in the reserved part of the header")
        return form, count

    def read(self, start: int, count: int) -> Tokens:
        """Returns the tokens with indices start .. start + count - 1 as a new u16 or u32 array [count].

        Raises:
            IndexError: if the range exceeds the shard.
            ValueError: if the shard is closed.
            DataIntegrityError: if the file was truncated after it was opened, or a disk error occurred.
        """
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens [{start}, {start + count}) are not within a shard of {self.tokens}")
        if not self._finalizer.alive:
            raise ValueError(f"{self.path}: the shard is closed")
        wanted = self.form.file_bytes(count) - HEADER_BYTES
        parts: list[bytes] = []
        while wanted:
            part = self._pread(wanted, self.form.file_bytes(start + count) - wanted)
            if not part:
                size = os.fstat(self._descriptor).st_size
                raise self._damage(
                    f"truncated while in use: {size:,} of {self.form.file_bytes(self.tokens):,} bytes are left"
                )
            parts.append(part)
            wanted -= len(part)
        return np.frombuffer(b"".join(parts), self.form.dtype).astype(self.form.dtype.newbyteorder("="))

    def _pread(self, size: int, offset: int) -> bytes:
        try:
            return os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise self._damage(f"unreadable at byte {offset:,}: {error.strerror}") from error

    def close(self) -> None:
        self._finalizer()

    def _damage(self, what: str) -> DataIntegrityError:
        return DataIntegrityError(f"{self.path}: {what}", "copy or write the file again")


def find_shards(source: str | Path, split: Split) -> list[Path] | None:
    """Returns the shards of a split, sorted by path. Returns None if `source` does not name shards.

    A source names shards if it is a `.bin` file, a pattern that ends in `.bin`, or a folder with `.bin` files. The word
    `train`, `val`, `valid` or `validation` in the file name of a shard names the split of the shard.

    Raises:
        DataError: if the shards that `source` names do not exist, or none of them belongs to the split.
    """
    text = str(Path(source).expanduser())
    if os.path.isdir(text):
        files = sorted(Path(text).glob("*.bin"))
        if not files:
            return None
    elif not text.endswith(".bin"):
        return None
    else:
        files = [Path(text)] if os.path.exists(text) or not has_magic(text) else sorted(map(Path, glob(text)))
    if not files or not (has_magic(text) or os.path.exists(text)):
        raise missing_source(Path(text))
    chosen = [path for path in files if split_of(path.name) == split]
    if not chosen:
        raise DataError(
            f"{source}: none of {len(files)} shard{'s' * (len(files) != 1)} belongs to the {split} split",
            f"rename shards, such as to corpus_{split}_000000.bin, or name a folder or pattern that has both splits",
        )
    return chosen


def holds_byte_counts(name: str) -> bool:
    """Returns whether `name` is the name of a byte-count file. A byte-count file has the size in bytes of each token of
    a shard.
    """
    return _BYTES_IN_NAME.search(name) is not None and _SPLIT_IN_NAME.search(name) is not None


def byte_counts_of(shard: Path) -> Path:
    """Returns the path of the byte-count file of a shard, which has the size in bytes of each token. The file need not
    exist.
    """
    named = _SPLIT_IN_NAME.sub(lambda match: f"{match[0]}_bytes", shard.name, count=1)
    return shard.with_name(named)


def split_of(name: str) -> Split | None:
    """Returns the split that a file name states. None if the name states no split, or is the name of a byte-count
    file.
    """
    match = _SPLIT_IN_NAME.search(name) if not holds_byte_counts(name) else None
    return None if match is None else "val" if match[1].lower() == "val" else "train"
