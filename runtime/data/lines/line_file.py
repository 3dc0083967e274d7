"""Reads files of line pairs, which have a source, a separator and a target on each line."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specc.compiler.spec.data.lines import LinesData, file_settings
from specc.runtime.data.documents.corpus import in_share, is_val
from specc.runtime.data.documents.files import READ_ERRORS, open_file
from specc.runtime.data.errors import DataError, DataIntegrityError, LineError
from specc.runtime.data.lines.pairs import Pairs
from specc.runtime.data.missing_paths import data_hint, nearest_paths
from specc.runtime.data.tokenizers.characters import CharTokenizer, lines_of
from specc.runtime.storage.data_digests import DataDigests


@dataclass(frozen=True, slots=True)
class LineFile:
    """The line pairs of a file. The SHA-256 of a line determines whether the line is held out for validation.

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
    def read(cls, data: str, settings: LinesData, tokenizer: CharTokenizer, width: int) -> "LineFile":
        """Reads the file of line pairs that the option `--data` names, and encodes its lines.

        Args:
            data: the path of the file.
            settings: the separator, and the settings of the held-out lines, as in `train.data` of the spec.
            tokenizer: the tokenizer of the lines.
            width: the number of tokens of a row.

        Returns:
            The pairs of the file.

        Raises:
            LineError: if one side of a line has `width` or more characters, or a character that is not in the
                vocabulary.
            DataError, DataIntegrityError: as raised by `read_lines`.
        """
        path = Path(data).expanduser()
        sources, targets = read_lines(path, settings)
        try:
            pairs = Pairs(*(tokenizer.encode_rows(side, width) for side in (sources, targets)))
        except LineError as error:
            raise LineError(error.row, f"{path}:{error.row + 1}: {error.message}", error.hint) from error
        share, sides = settings.validation_fraction, zip(sources, targets, strict=True)
        selects = is_val if share is None else partial(in_share, share)
        start = f"{settings.seed}:" if settings.seed else ""
        held_out = np.array([selects(f"{start}{settings.separator.join(pair)}".encode()) for pair in sides])
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
            split = "validation split" if not self.held_out.any() else "training split"
            message = f"{self.path} has too few lines for a {split}"
            raise DataError(message, "a share of the lines, by hash, is used for validation: add more lines")


def read_lines(path: Path, settings: LinesData | None = None) -> tuple[list[str], list[str]]:
    """Returns the sources and the targets of all lines of a file. The file may be compressed (.xz, .gz).

    Raises DataError if the file does not exist, is not UTF-8, or has no lines. Raises DataError if a line does not have
    exactly one separator with text on both sides. Raises DataIntegrityError if a compressed file is damaged.
    """
    settings = settings or file_settings()
    try:
        with open_file(path) as file:
            texts = lines_of(file.read().decode("utf-8-sig"))
    except READ_ERRORS as error:
        raise DataIntegrityError(f"{path}: damaged compressed file: {error}", "copy the file again") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8 at byte {error.start}") from None
    except OSError as error:
        near = nearest_paths(path)
        raise DataError(
            f"{path}: {error.strerror or error}", " ".join(filter(None, (near, data_hint(settings))))
        ) from None
    sides: tuple[list[str], list[str]] = ([], [])
    for number, text in enumerate(texts, 1):
        left, _, right = text.partition(settings.separator)
        if not left or not right or settings.separator in right:
            raise DataError(f"{path}:{number}: expected {settings.form}, not {text!r}")
        sides[0].append(left)
        sides[1].append(right)
    if not texts:
        raise DataError(f"{path} has no lines")
    return sides
