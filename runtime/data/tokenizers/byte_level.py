"""The tokenizer `bytes`: one id per byte."""

import hashlib
from collections.abc import Sequence

import numpy as np

from specc.runtime.data.tokenizers.tokenizer import PieceBytes, TokenArray, Tokenizer


class ByteTokenizer(Tokenizer):
    """A tokenizer whose ids 0..255 are the byte values, and whose id 256 is BOS. The tokenizer is lossless for any
    bytes.
    """

    name = "bytes"
    vocab = 257
    bos = 256
    lossless = True
    _digest = hashlib.sha256(b"bytes 0..255, bos 256").hexdigest()

    def encode(self, text: bytes) -> TokenArray:
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[bytes]) -> list[TokenArray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | TokenArray) -> bytes:
        array = self.checked(ids)
        return bytes(array[array != 256].astype(np.uint8))

    def piece_bytes(self) -> PieceBytes:
        boundary = np.arange(257) == 256
        return PieceBytes((~boundary).astype(np.int64), np.zeros(257, np.bool_), boundary)
