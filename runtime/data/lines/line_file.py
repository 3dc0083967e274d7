"""Files of pairs of lines, `source=target` on each line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specc.runtime.data.documents.corpus import is_val
from specc.runtime.data.documents.formats import READ_ERRORS, open_file
from specc.runtime.data.errors import DataError, DataIntegrityError, LineError
from specc.runtime.data.lines.pairs import Pairs
from specc.runtime.data.missing_paths import nearest_paths
from specc.runtime.data.tokenizers.characters import CharTokenizer, lines_of
from specc.runtime.storage.data_digests import DataDigests


@dataclass(frozen=True, slots=True)
class LineFile:
    """The lines of a file; one in ten, by SHA-256 of the line, is held out for validation.

    Attributes:
        path: the file.
        pairs: its lines as tokens.
        sources, targets: both sides as text.
        held_out: bool [N], the lines that are held out.
    """

    path: Path
    pairs: Pairs
    sources: list[str]
    targets: list[str]
    held_out: npt.NDArray[np.bool_]

    @classmethod
    def read(cls, path: Path, tokenizer: CharTokenizer, width: int) -> LineFile:
        """Reads a file. Raises as `read_lines` does, and LineError, with file and line, for a line of `width`
        characters or more, or with a character that the vocabulary lacks."""
        sources, targets = read_lines(path)
        try:
            pairs = Pairs(*(tokenizer.encode_rows(side, width) for side in (sources, targets)))
        except LineError as error:
            raise LineError(error.row, f"{path}:{error.row + 1}: {error.message}", error.hint) from error
        held_out = np.array([is_val(f"{a}={b}".encode()) for a, b in zip(sources, targets, strict=True)])
        return cls(path, pairs, sources, targets, held_out)

    @property
    def train(self) -> Pairs:
        return self.pairs[np.flatnonzero(~self.held_out)]

    @property
    def val(self) -> Pairs:
        return self.pairs[np.flatnonzero(self.held_out)]

    @property
    def digests(self) -> DataDigests:
        return DataDigests(train=self.train.digest, val=self.val.digest)

    def require_both_splits(self) -> None:
        """Raises DataError where all lines, or none, are held out."""
        if self.held_out.all() or not self.held_out.any():
            message = f"{self.path}: too few lines to hold some out"
            raise DataError(message, "one line in ten, by hash, validates: give more")


def read_lines(path: Path) -> tuple[list[str], list[str]]:
    """Both sides of every line `source=target` of a file, which may be compressed (.xz, .gz).

    Raises DataError where there is no such file, or a line has not one `=` with text on both sides;
    DataIntegrityError where it is damaged.
    """
    try:
        with open_file(path) as file:
            texts = lines_of(file.read().decode("utf-8-sig"))
    except READ_ERRORS as error:
        raise DataIntegrityError(f"{path}: damaged compressed file: {error}", "copy the file again") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}", _file_hint(path)) from None
    sides: tuple[list[str], list[str]] = ([], [])
    for number, text in enumerate(texts, 1):
        left, _, right = text.partition("=")
        if not left or not right or "=" in right:
            raise DataError(f"{path}:{number}: expected source=target, found {text!r}")
        sides[0].append(left)
        sides[1].append(right)
    if not texts:
        raise DataError(f"{path}: has no lines")
    return sides


def _file_hint(path: Path) -> str:
    hint = "for a model of lines, --data takes a file of lines `source=target`, or the name of its task"
    return f"{near} {hint}" if (near := nearest_paths(path)) else hint
