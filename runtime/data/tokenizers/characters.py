"""The tokenizer for single characters. A spec lists the characters in `model.vocab: {chars: ...}`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specc.compiler.characters import MOST
from specc.runtime.data.errors import DataError, LineError

Codes = npt.NDArray[np.integer[Any]]  # code points
Tokens = npt.NDArray[np.uint8]

PAD, START, STOP = 0, 1, 2
SPECIAL = 3  # the number of ids before the first character
_SHOWN = 60  # the maximum number of characters of a line in a message


def lines_of(text: str) -> list[str]:
    """Splits a text into lines. Unlike str.splitlines, only "\\n" and "\\r\\n" end a line."""
    lines = text.replace("\r\n", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


class CharTokenizer:
    """A tokenizer with one token per character.

    The ids 0, 1 and 2 are the padding, start and stop tokens. The ids from 3 on are the characters of `chars`, in
    order. A line is stored as the tokens of its characters, then a stop token, then padding. The start token is not
    stored, because it is only the first input of a decoder.

    Raises DataError if `chars` is empty, has more than MOST characters, has a character twice, or contains NUL.
    """

    pad, start, stop = PAD, START, STOP

    def __init__(self, chars: str) -> None:
        twice = next((char for i, char in enumerate(chars) if char in chars[:i]), None)
        if twice is not None:
            raise DataError(f"the vocabulary has the character {twice!r} twice", "remove one of the two")
        if not 0 < len(chars) <= MOST or "\0" in chars:
            raise DataError(f"a vocabulary of characters must have 1 to {MOST} characters, none of them NUL")
        self.chars = chars
        self.vocab = SPECIAL + len(chars)
        self._codes = _codes([chars])[0]
        self._ids = np.zeros(int(self._codes.max()) + 1, np.uint8)  # the ids by code point; 0 for unknown characters
        self._ids[self._codes] = np.arange(SPECIAL, self.vocab)

    def encode(self, text: str) -> Tokens:
        """Returns the tokens of the characters, u8 [len(text)], without a stop token. Raises LineError if a character
        is not in the vocabulary.
        """
        return self.encode_rows([text], len(text) + 1)[0, :-1]

    def encode_rows(self, lines: Sequence[str], width: int) -> Tokens:
        """Returns tokens, u8 [N, width]. A row has the tokens of the characters, then a stop token, then padding.

        Raises LineError if a line has `width` or more characters, or a character that is not in the vocabulary.
        """
        for row, line in enumerate(lines):
            if "\0" in line:
                raise self._unknown(row, line, "\0")
            if len(line) >= width:  # checked first, because the table below is as wide as the longest line
                raise _too_long(row, line, width)
        return self.encode_codes(_codes(lines), width)

    def encode_codes(self, codes: Codes, width: int) -> Tokens:
        """Returns tokens, u8 [N, width]. A row has the tokens of the characters, then a stop token, then padding.

        `codes` are code points [N, W], with zeros after the last character of a row. Raises LineError if a row has
        `width` or more characters, or a character that is not in the vocabulary.
        """
        filled = codes != 0
        known = self._ids[np.where(codes < len(self._ids), codes, 0)]
        unknown = filled & (known == 0)
        if unknown.any():
            row, column = (int(where[0]) for where in np.nonzero(unknown))
            raise self._unknown(row, "".join(map(chr, codes[row][filled[row]])), chr(codes[row, column]))
        lengths = filled.sum(axis=1)
        if lengths.size and lengths.max() >= width:
            row = int((lengths >= width).argmax())
            raise _too_long(row, "".join(map(chr, codes[row][filled[row]])), width)
        tokens = np.full((len(codes), width), PAD, np.uint8)
        columns = min(width, codes.shape[1])
        tokens[:, :columns] = known[:, :columns]
        tokens[np.arange(len(codes)), lengths] = STOP
        return tokens

    def _unknown(self, row: int, line: str, char: str) -> LineError:
        message = f"{_shown(line)} has {char!r}, which is not in the vocabulary"
        return LineError(row, message, f"the vocabulary is {self.chars}")

    def decode(self, ids: Sequence[int] | Codes) -> str:
        """Returns the text before the first stop token, without padding and start tokens. Raises DataError if an id is
        out of range.
        """
        return self.decode_rows(np.asarray(ids, np.int64)[None])[0]

    def decode_rows(self, ids: Codes) -> list[str]:
        """Returns the text of each row of `ids` [N, T] before the first stop token, without padding and start
        tokens.
        """
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab):
            bad = ids[(ids < 0) | (ids >= self.vocab)][0]
            raise DataError(f"no token {bad}; the vocabulary has {self.vocab} ids")
        alive = (ids >= SPECIAL) & ((ids == STOP).cumsum(axis=1) == 0)
        text = self._codes[ids[alive].astype(np.int64) - SPECIAL].astype("<u4").tobytes().decode("utf-32-le")
        ends = alive.sum(axis=1).cumsum().tolist()
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _too_long(row: int, line: str, width: int) -> LineError:
    room = f"a context of {width} tokens has room for {width - 1} characters and a stop token"
    message = f"{_shown(line)} has {len(line):,} characters; {room}"
    return LineError(row, message, "shorten the line, or train a model with a longer model.context")


def _shown(line: str) -> str:
    return repr(line) if len(line) <= _SHOWN else f"{line[:_SHOWN]!r}..."


def _codes(lines: Sequence[str]) -> npt.NDArray[np.uint32]:
    width = max((len(line) for line in lines), default=0)
    return np.array(lines, f"<U{max(width, 1)}").view("<u4").reshape(len(lines), max(width, 1)).astype(np.uint32)
