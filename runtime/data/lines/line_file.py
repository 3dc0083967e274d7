"""Reads files of line pairs, which have `source=target` on each line."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specc.runtime.data.documents.corpus import is_val
from specc.runtime.data.documents.files import READ_ERRORS, open_file
from specc.runtime.data.errors import DataError, DataIntegrityError, LineError
from specc.runtime.data.lines.pairs import Pairs
from specc.runtime.data.missing_paths import nearest_paths
from specc.runtime.data.tokenizers.characters import CharTokenizer, lines_of
from specc.runtime.storage.data_digests import DataDigests


@dataclass(frozen=True, slots=True)
class LineFile:
    """The line pairs of a file. The SHA-256 of a line selects about 1 line in 10, which is held out for validation.

    Attributes:
        path: the file.
        pairs: the line pairs as tokens.
        sources, targets: the left and the right sides of the lines, as text.
        held_out: whether each line is held out, bool [N].
    """

    path: Path
    pairs: Pairs
    sources: list[str]
    targets: list[str]
    held_out: npt.NDArray[np.bool_]

    @classmethod
    def read(cls, path: Path, tokenizer: CharTokenizer, width: int) -> "LineFile":
        """Reads a file of line pairs, and encodes its lines.

        Raises the errors that `read_lines` raises. Raises LineError if one side of a line has `width` or more
        characters, or a character that is not in the vocabulary.
        """
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
        if self.held_out.all() or not self.held_out.any():
            message = f"{self.path} has too few lines for a validation split"
            raise DataError(message, "one line in ten, by hash, is used for validation: add more lines")


def read_lines(path: Path) -> tuple[list[str], list[str]]:
    """Returns the sources and the targets of all lines `source=target` of a file. The file may be compressed (.xz,
    .gz).

    Raises DataError if the file does not exist, is not UTF-8 or has no lines, or if a line does not have exactly one
    `=` with text on both sides. Raises DataIntegrityError if a compressed file is damaged.
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
            raise DataError(f"{path}:{number}: expected source=target, not {text!r}")
        sides[0].append(left)
        sides[1].append(right)
    if not texts:
        raise DataError(f"{path} has no lines")
    return sides


def _file_hint(path: Path) -> str:
    hint = "--data must be a file of lines `source=target`, or the name of the task in the spec"
    return f"{near} {hint}" if (near := nearest_paths(path)) else hint
