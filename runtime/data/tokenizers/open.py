"""Opens tokenizers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.tokenizers.sentencepiece import SentencePieceTokenizer
from specc.runtime.data.tokenizers.tiktoken import TiktokenTokenizer
from specc.runtime.data.tokenizers.tokenizer import Tokenizer

BY_SUFFIX: Mapping[str, Callable[[Path], Tokenizer]] = {
    ".model": SentencePieceTokenizer,
    ".tiktoken": TiktokenTokenizer,
}


def open_tokenizer(name: str, search: Sequence[Path] = ()) -> Tokenizer:
    """Open a tokenizer by name: `bytes`, or a `.model` or `.tiktoken` file, in one of `search` or as given.

    Raises:
        DataError: unknown kind, not found (the message lists where it looked), or not a valid file.
    """
    if name == "bytes":
        return ByteTokenizer()
    tokenizer = BY_SUFFIX.get(Path(name).suffix)
    if tokenizer is None:
        raise DataError(
            f"unknown tokenizer {name!r}",
            "use `bytes`, a SentencePiece file (*.model) or a tiktoken rank file (*.tiktoken)",
        )
    return tokenizer(find_file(name, search))


def tokenizer_files(name: str, search: Sequence[Path] = ()) -> list[Path]:
    """The files that `open_tokenizer` reads: none for `bytes`. Raises DataError where one is not found."""
    return [] if name == ByteTokenizer.name else [find_file(name, search)]


def find_file(name: str, search: Sequence[Path]) -> Path:
    """The file of a tokenizer, searched in the folders in their order, so that the copy of a run goes before a file of
    that name that happens to lie here. Copies, of a run or of packed data, have the file's name alone."""
    given = Path(name).expanduser()
    named = [Path(folder) / one for folder in search for one in (given, given.name)]
    places = list(dict.fromkeys([*named, given]))
    for place in places:
        if place.is_file():
            return place
    looked = ", ".join(str(place) for place in places)
    raise DataError(f"no tokenizer {name!r}; looked at {looked}", "give its path; tokenizers are never downloaded")
