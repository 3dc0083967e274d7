"""Character vocabularies: three special tokens, then the characters in the order of the spec."""

from typing import Annotated

from pydantic import AfterValidator, Field

from specc.compiler.strict import StrictModel

PAD, START, STOP = 0, 1, 2  # padding, the first input of the decoder, and the end of a line
MARKS = 3
MOST = 2**8 - MARKS  # the largest number of characters, because data files store a token id in one byte


def _distinct(chars: str) -> str:
    if again := next((c for i, c in enumerate(chars) if c in chars[:i]), None):
        raise ValueError(f"{again!r} is in chars twice")
    if hidden := next((c for c in chars if not c.isprintable()), None):
        raise ValueError(f"{hidden!r} cannot be printed")
    return chars


class Vocabulary(StrictModel):
    """A vocabulary of characters. The ids are 0 for padding, 1 for start, 2 for stop, then the ids of the characters,
    in order.

    Attributes:
        chars: the characters.
    """

    chars: Annotated[str, Field(min_length=1, max_length=MOST), AfterValidator(_distinct)]

    @property
    def size(self) -> int:
        return MARKS + len(self.chars)
