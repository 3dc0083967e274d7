"""The record beside shards, `shards.json`: which files belong together, what they hold, what wrote them.

An empty one stands for a folder that is not complete; nothing reads shards beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from specc.compiler.generated_folder import replace_file
from specc.compiler.strict import StrictModel
from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards.shard_file import sync_folder
from specc.runtime.data.split import Split
from specc.runtime.data.tokenizers.tokenizer import Tokenizer
from specc.runtime.storage.committed import in_words

RECORD = "shards.json"
HINT = "make or fetch the folder again; `specc data check` tells all that is wrong"

Marks = Literal["document", "none"]
Count = Annotated[int, Field(ge=0)]


class ShardEntry(StrictModel):
    """`sha256` is that of the whole file."""

    name: str
    tokens: Count
    sha256: str


class SplitEntry(StrictModel):
    """`documents` and `document_bytes` are None where nobody counted them."""

    documents: Count | None
    document_bytes: Count | None
    shards: tuple[ShardEntry, ...]


class ShardRecord(StrictModel):
    """The content of the record.

    Attributes:
        source: where the tokens are from, for people.
        tokenizer, tokenizer_digest, vocab, bos: of the tokenizer.
        marks: BOS before each document, or only before the first of a split.
    """

    format: Literal[1]
    source: str
    tokenizer: str
    tokenizer_digest: str
    vocab: Annotated[int, Field(ge=1)]
    bos: Count
    marks: Marks
    splits: dict[Split, SplitEntry]

    def entries(self, split: Split) -> Mapping[str, ShardEntry]:
        """The shards of a split by name; none if it is not there."""
        return {entry.name: entry for entry in self.splits[split].shards} if split in self.splits else {}

    def require(self, tokenizer: Tokenizer, folder: Path) -> None:
        """Raises DataError unless `tokenizer` is the one that wrote the tokens."""
        if self.tokenizer_digest != tokenizer.digest():
            raise DataError(
                f"{folder}: holds tokens of {self.tokenizer} ({self.vocab:,} ids), not of this {tokenizer.name} "
                f"({tokenizer.vocab:,} ids)",
                f"give data of the model's tokenizer, or set train.data.tokenizer to {self.tokenizer}",
            )


def read_record(folder: Path) -> ShardRecord | None:
    """The record in a folder; None if there is none. Raises DataIntegrityError if it cannot be read."""
    path = folder / RECORD
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataIntegrityError(f"{path}: {error.strerror}", HINT) from None
    if not text:
        left = Path(folder).name.endswith(".packing")
        hint = "pack again with the same --out, which begins anew in it; or remove it" if left else HINT
        raise DataIntegrityError(f"{folder}: was never completed ({RECORD} is empty)", hint)
    try:
        return ShardRecord.model_validate_json(text)
    except ValidationError as error:
        raise DataIntegrityError(f"{path}: {in_words(error)}", HINT) from None


def begin_record(folder: Path) -> None:
    """Says that the folder is not complete."""
    replace_file(folder / RECORD, "")
    sync_folder(folder)


def write_record(folder: Path, record: ShardRecord) -> None:
    """Completes the folder; what it lists is there, and synced."""
    replace_file(folder / RECORD, record.model_dump_json(indent=1) + "\n")
    sync_folder(folder)
