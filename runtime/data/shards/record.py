"""The file `shards.json` in a folder of token shards. It lists the shards and their tokenizer.

If `shards.json` is empty, the folder is incomplete, and the shards are not read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from specc.compiler.generated_folder import replace_file
from specc.compiler.strict import StrictModel
from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.split import Split
from specc.runtime.data.tokenizers.tokenizer import Tokenizer, require_bos
from specc.runtime.storage.atomic import sync_folder
from specc.runtime.storage.committed import in_words

RECORD = "shards.json"
HINT = "pack or fetch the folder again; `specc data check` lists all problems"

Marks = Literal["document", "none"]
Count = Annotated[int, Field(ge=0)]


class ShardEntry(StrictModel):
    """A shard in the record. `tokens` is the number of tokens, and `sha256` is the SHA-256 (hex) of the whole file."""

    name: str
    tokens: Count
    sha256: str


class SplitEntry(StrictModel):
    """The shards of a split. `documents` is the number of documents, and `document_bytes` is their total size. Both are
    None if the documents were not counted.
    """

    documents: Count | None
    document_bytes: Count | None
    shards: tuple[ShardEntry, ...]


class ShardRecord(StrictModel):
    """The content of `shards.json`.

    Attributes:
        format: the version of the format of the record.
        source: a human-readable description of the source of the tokens.
        tokenizer, tokenizer_digest, vocab, bos: the name, the digest, the number of ids, and the BOS id of the
            tokenizer.
        marks: whether BOS precedes each document, or only the first document of a split.
        splits: the shards of each split.
    """

    format: Literal[1]
    source: str
    tokenizer: str
    tokenizer_digest: str
    vocab: Annotated[int, Field(ge=1)]
    bos: Count
    marks: Marks
    splits: dict[Split, SplitEntry]

    @classmethod
    def of(cls, source: str, tokenizer: Tokenizer, marks: Marks, splits: dict[Split, SplitEntry]) -> "ShardRecord":
        """Returns a record for new shards.

        Args:
            source: the source of the text, as the user stated it.
            tokenizer: the tokenizer of the shards.
            marks: where BOS tokens are placed.
            splits: the shards of each split.

        Raises:
            DataError: if the tokenizer has no BOS token.
        """
        return cls(
            format=1,
            source=source,
            tokenizer=tokenizer.name,
            tokenizer_digest=tokenizer.digest(),
            vocab=tokenizer.vocab,
            bos=require_bos(tokenizer),
            marks=marks,
            splits=splits,
        )

    def entries(self, split: Split) -> Mapping[str, ShardEntry]:
        return {entry.name: entry for entry in self.splits[split].shards} if split in self.splits else {}

    def require(self, tokenizer: Tokenizer, folder: Path) -> None:
        """Raises DataError, with the path `folder` in the message, unless `tokenizer` produced the tokens of the
        shards.
        """
        if self.tokenizer_digest != tokenizer.digest():
            raise DataError(
                f"{folder} has tokens of {self.tokenizer} ({self.vocab:,} ids), not of {tokenizer.name} "
                f"({tokenizer.vocab:,} ids)",
                f"use data of the model's tokenizer, or set train.data.tokenizer to {self.tokenizer}",
            )


def read_record(folder: Path) -> ShardRecord | None:
    """Returns the record in a folder, or None if the folder has no record. Raises DataIntegrityError if the record is
    empty or invalid.
    """
    path = folder / RECORD
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataIntegrityError(f"{path}: {error.strerror}", HINT) from None
    if not text:
        left = Path(folder).name.endswith(".packing")
        hint = "pack again with the same --out, which starts over; or remove the folder" if left else HINT
        raise DataIntegrityError(f"{path}: is empty, because the folder was never completed", hint)
    try:
        return parsed(text)
    except ValidationError as error:
        raise DataIntegrityError(f"{path}: {in_words(error)}", HINT) from None


def parsed(text: bytes) -> ShardRecord:
    """Parses the text of a record. Raises ValidationError if the text is invalid."""
    return ShardRecord.model_validate_json(text)


def begin_record(folder: Path) -> None:
    """Marks the folder as incomplete: writes an empty record."""
    replace_file(folder / RECORD, "")
    sync_folder(folder)


def write_record(folder: Path, record: ShardRecord) -> None:
    """Writes the record, which marks the folder as complete. Call this function only after all listed files are written
    and synced to disk.
    """
    replace_file(folder / RECORD, record.model_dump_json(indent=1) + "\n")
    sync_folder(folder)
