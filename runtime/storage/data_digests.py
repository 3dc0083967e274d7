"""Digests of the data that a model was trained on: two data sets are the same if their digests are."""

from typing import Annotated

from pydantic import Field

from specc.compiler.strict import StrictModel

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class DataDigests(StrictModel):
    """SHA-256 digests (hex) of the two splits of a data set, of its content and not of where it lies."""

    train: Sha256
    val: Sha256

    def packed(self) -> bytes:
        """64 bytes: the digest of the training split, then that of the validation split."""
        return bytes.fromhex(self.train + self.val)

    @classmethod
    def unpacked(cls, data: bytes) -> "DataDigests":
        return cls(train=data[:32].hex(), val=data[32:].hex())

    def held_out(self, digest: str) -> bool | None:
        """Whether the text with this digest is the split that training left out; None where it is neither split."""
        return digest == self.val if digest in (self.train, self.val) else None
