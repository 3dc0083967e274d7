"""Opens tokenizers by name or path."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from specc.compiler.spec.data.text import TextData
from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.tokenizers.sentencepiece import SentencePieceTokenizer
from specc.runtime.data.tokenizers.tiktoken import TiktokenTokenizer
from specc.runtime.data.tokenizers.tokenizer import Tokenizer
from specc.runtime.data.tokenizers.tokenizer_json import JsonTokenizer


def _tiktoken(path: Path, data: TextData) -> Tokenizer:
    special = {entry.token: entry.id for entry in data.special}
    return TiktokenTokenizer(path, data.pattern, special, data.bos)


# The function that opens a file, for each suffix in `TOKENIZER_SETTINGS`.
BY_SUFFIX: Mapping[str, Callable[[Path, TextData], Tokenizer]] = {
    ".model": lambda path, data: SentencePieceTokenizer(path),
    ".tiktoken": _tiktoken,
    ".json": lambda path, data: JsonTokenizer(path, data.bos),
}


def open_tokenizer(data: str | TextData, search: Sequence[Path] = ()) -> Tokenizer:
    """Opens the tokenizer `bytes`, or a `.json`, `.model` or `.tiktoken` file. `find_file` searches for the file.

    Args:
        data: the name of the tokenizer, or the field `train.data` of a spec, which has the name and further settings.
        search: folders to search for the file.

    Raises:
        DataError: if the kind of tokenizer is unknown, a setting does not apply to the kind, or the file is invalid or
            not found.
        EnvironmentFailure: if the package that reads the file is not installed.
    """
    data = TextData.model_construct(tokenizer=data) if isinstance(data, str) else data
    name = data.tokenizer
    for problem in data.problems():  # a spec was already checked, but `data` may be any name
        raise DataError(problem.message, problem.hint)
    return ByteTokenizer() if name == "bytes" else BY_SUFFIX[Path(name).suffix](find_file(name, search), data)


def tokenizer_files(name: str, search: Sequence[Path] = ()) -> list[Path]:
    """Returns the files that `open_tokenizer` reads; empty for `bytes`. Raises DataError if a file is not found."""
    return [] if name == ByteTokenizer.name else [find_file(name, search)]


def find_file(name: str, search: Sequence[Path]) -> Path:
    """Returns the path of a tokenizer file. Raises DataError if the file is not found.

    The function searches the folders in `search`, in order, and then the current folder. In each folder, it first tries
    the path `name`, and then the last component of `name`.
    """
    path = Path(name).expanduser()
    candidates = [*(Path(folder) / part for folder in search for part in (path, path.name)), path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    searched = ", ".join(map(str, dict.fromkeys(candidates)))
    raise DataError(
        f"no tokenizer {name!r}; searched {searched}",
        f"give a path, download the file with `specc data fetch {path.name}`, or train one with `specc data tokenizer`",
    )
