"""Opens tokenizers by name or path."""

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
    """Opens the tokenizer `bytes`, or a `.model` or `.tiktoken` file, which is searched as in `find_file`.

    Raises:
        DataError: the kind is unknown, the file is not found (the message lists the searched paths), or it is invalid.
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
    """Returns the files that `open_tokenizer` reads, none for `bytes`. Raises DataError if a file is not found."""
    return [] if name == ByteTokenizer.name else [find_file(name, search)]


def find_file(name: str, search: Sequence[Path]) -> Path:
    """Returns the path of a tokenizer file. Raises DataError if it is not found.

    The folders in `search` come first, in order, so that the copy in a run has precedence over a file of the same name
    in the current folder. In each folder, both the path `name` and its last component are tried, because copies in runs
    and in packed data are stored under the last component. The path `name` itself is tried last.
    """
    path = Path(name).expanduser()
    candidates = [*(Path(folder) / part for folder in search for part in (path, path.name)), path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    searched = ", ".join(map(str, dict.fromkeys(candidates)))
    raise DataError(f"no tokenizer {name!r}; searched {searched}", "give its path; tokenizers are never downloaded")
