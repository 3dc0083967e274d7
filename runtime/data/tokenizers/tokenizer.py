"""The interface of tokenizers of text. Nothing is ever downloaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specc.runtime.data.errors import DataError

TokenArray = npt.NDArray[np.integer[Any]]

MAX_UINT16_VOCAB = 1 << 16


@dataclass(frozen=True, slots=True)
class PieceBytes:
    """How many bytes of text each token stands for (the table of OpenAI's parameter-golf challenge).

    A target y after x counts `base[y]` bytes, and one more if y starts with a space mark and x is not a
    boundary: the space that a SentencePiece model puts in front of a document is not in the document.

    Attributes:
        base: int64 [vocab], bytes without a leading space mark; 0 for control, unknown and unused ids.
        leading_space: bool [vocab], the piece starts with a space mark.
        boundary: bool [vocab], control, unknown and unused ids.
    """

    base: npt.NDArray[np.int64]
    leading_space: npt.NDArray[np.bool_]
    boundary: npt.NDArray[np.bool_]

    def count(self, previous: TokenArray, targets: TokenArray) -> npt.NDArray[np.int64]:
        """Bytes (int64) charged to each of `targets` when it follows the same element of `previous`."""
        space = self.leading_space[targets] & ~self.boundary[previous]
        counts: npt.NDArray[np.int64] = self.base[targets] + space
        return counts


class Tokenizer(Protocol):
    """Bytes of a document to token ids and back.

    Attributes:
        name: what `open_tokenizer` takes to open it again, without its folder.
        vocab: number of ids, special ones included.
        bos: the id written before each document; None if the tokenizer has none.
        lossless: `decode(encode(text)) == text` for every document it accepts.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab(self) -> int: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def lossless(self) -> bool: ...

    def encode(self, text: bytes) -> TokenArray:
        """Ids of one document, without BOS: uint16, or uint32 if vocab needs it. Raises DataError."""
        ...

    def encode_batch(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """`encode` of each document, on all cores where the tokenizer can."""
        ...

    def decode(self, ids: Sequence[int] | TokenArray) -> bytes:
        """Text of the ids; control ids give nothing. Raises DataError for an id out of range."""
        ...

    def piece_bytes(self) -> PieceBytes:
        """The table of bytes per token. Raises DataError if this tokenizer cannot be counted by pieces."""
        ...

    def digest(self) -> str:
        """SHA-256 (hex) of everything that decides the ids."""
        ...


def require_16_bits(tokenizer: Tokenizer) -> None:
    """Raises DataError unless every id fits in the 16 bits of a token shard."""
    if tokenizer.vocab > MAX_UINT16_VOCAB:
        raise DataError(
            f"{tokenizer.name}: {tokenizer.vocab:,} ids do not fit in the 16 bits of a token shard",
            f"use a tokenizer of at most {MAX_UINT16_VOCAB:,} ids: larger vocabularies cannot be trained on yet",
        )


def require_bos(tokenizer: Tokenizer) -> None:
    """Raises DataError unless the tokenizer has an id to put before documents."""
    if tokenizer.bos is None:
        raise DataError(
            f"{tokenizer.name}: has neither BOS nor EOS, so documents cannot be separated",
            "train the SentencePiece model with a bos_id",
        )


def checked_ids(ids: Sequence[int] | TokenArray, tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """The ids as an array. Raises DataError for an id that the tokenizer does not have."""
    array = np.asarray(ids, np.int64)
    if array.size and (array.min() < 0 or array.max() >= tokenizer.vocab):
        bad = array[(array < 0) | (array >= tokenizer.vocab)][0]
        raise DataError(f"{tokenizer.name}: no token {bad}; the vocabulary has {tokenizer.vocab:,}")
    return array


def read_file(path: Path) -> bytes:
    """The content of a tokenizer's file. Raises DataError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def id_dtype(vocab: int) -> type[np.uint16] | type[np.uint32]:
    """The dtype of ids below `vocab`."""
    return np.uint16 if vocab <= MAX_UINT16_VOCAB else np.uint32


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
