"""The interface of text tokenizers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specc.runtime.data.errors import DataError

TokenArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class PieceBytes:
    """The number of bytes that each token represents, as in OpenAI's parameter-golf challenge.

    A token y after a token x represents `base[y]` bytes. The token represents one more byte if y starts with a space
    mark and x is not a boundary. The space mark that a SentencePiece model inserts before a document therefore
    represents no byte.

    Attributes:
        base: the number of bytes of each token without a leading space mark, i64 [vocab]; 0 for control, unknown and
            unused ids.
        leading_space: whether each token starts with a space mark, bool [vocab].
        boundary: whether each id is a control id, the unknown id or an unused id, bool [vocab].
    """

    base: npt.NDArray[np.int64]
    leading_space: npt.NDArray[np.bool_]
    boundary: npt.NDArray[np.bool_]

    def count(self, previous: TokenArray, targets: TokenArray) -> npt.NDArray[np.int64]:
        """Returns the number of bytes that each token in `targets` represents, i64. `previous` has the token before
        each target.
        """
        space = self.leading_space[targets] & ~self.boundary[previous]
        counts: npt.NDArray[np.int64] = self.base[targets] + space
        return counts


class Tokenizer(ABC):
    """A mapping between the bytes of a document and token ids.

    Attributes:
        name: the name that `open_tokenizer` accepts, without a folder.
        vocab: the number of ids, including special ids.
        bos: the id that is written before each document; None if the tokenizer has no BOS token.
        lossless: whether `decode(encode(text)) == text` for every document that the tokenizer accepts.
    """

    name: str
    vocab: int
    bos: int | None
    lossless: bool
    _digest: str

    @abstractmethod
    def encode(self, text: bytes) -> TokenArray:
        """Returns the ids of a document, without BOS, as uint16, or as uint32 if `vocab` exceeds 65,536.

        Raises DataError if the document cannot be encoded.
        """

    @abstractmethod
    def encode_batch(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """Encodes several documents. Uses all CPU cores if the tokenizer library supports this."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | TokenArray) -> bytes:
        """Returns the text of the ids, omitting control ids. Raises DataError if an id is out of range."""

    @abstractmethod
    def piece_bytes(self) -> PieceBytes:
        """Returns the table of bytes per token. Raises DataError if the bytes of a token depend on its context."""

    def byte_counts(self, text: bytes, ids: TokenArray) -> npt.NDArray[np.int64]:
        """Returns the number of bytes that each token of a document represents, i64 [len(ids)].

        Args:
            text: the document.
            ids: the result of `encode`.

        Returns:
            The numbers of bytes, whose sum is `len(text)`. A byte that no token represents is assigned to the next
            token. Without a next token, it is assigned to the last token.
        """
        counts = np.diff(np.maximum.accumulate(self._ends(text, ids)), prepend=0)
        if counts.size:
            counts[-1] += len(text) - int(counts.sum())
        return counts

    def _ends(self, text: bytes, ids: TokenArray) -> npt.NDArray[np.int64]:
        return np.cumsum(self.piece_bytes().base[ids])

    def digest(self) -> str:
        """Returns the SHA-256 (hex) of everything that determines the ids of a text."""
        return self._digest

    def checked(self, ids: Sequence[int] | TokenArray) -> npt.NDArray[np.int64]:
        array = np.asarray(ids, np.int64)
        bad = array[(array < 0) | (array >= self.vocab)]
        if bad.size:
            raise DataError(f"{self.name}: no token {bad[0]}; the vocabulary has {self.vocab:,} ids")
        return array


def require_bos(tokenizer: Tokenizer) -> int:
    """Returns the BOS id, which is written before each document. Raises DataError if the tokenizer has no BOS token."""
    if tokenizer.bos is None:
        message = f"{tokenizer.name} has neither BOS nor EOS, so documents cannot be separated"
        raise DataError(message, "train the SentencePiece model with a bos_id")
    return tokenizer.bos
