"""Character vocabularies: three marks, then the characters in the order in which a spec writes them."""

from typing import Annotated

from pydantic import AfterValidator, Field

from specc.compiler.strict import StrictModel

PAD, START, STOP = 0, 1, 2  # what fills a row, what the decoder is fed first, what ends a line
MARKS = 3
MOST = 2**8 - MARKS  # characters: data keeps a token as a byte


def _distinct(chars: str) -> str:
    if again := next((c for i, c in enumerate(chars) if c in chars[:i]), None):
        raise ValueError(f"{again!r} stands in chars twice")
    if hidden := next((c for c in chars if not c.isprintable()), None):
        raise ValueError(f"{hidden!r} cannot be printed")
    return chars


class Vocabulary(StrictModel):
    """Ids 0 pad, 1 start and 2 stop, then those of `chars`."""

    chars: Annotated[str, Field(min_length=1, max_length=MOST), AfterValidator(_distinct)]

    @property
    def size(self) -> int:
        return MARKS + len(self.chars)
