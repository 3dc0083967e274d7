"""Digests of training data. Equal digests mean equal data."""

from typing import Annotated

from pydantic import Field

from specc.compiler.strict import StrictModel

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class DataDigests(StrictModel):
    """The SHA-256 digests (hex) of the two splits of a data set.

    A digest depends only on the content of a split, not on the location of the files.
    """

    train: Sha256
    val: Sha256

    def packed(self) -> bytes:
        return bytes.fromhex(self.train + self.val)

    @classmethod
    def unpacked(cls, data: bytes) -> "DataDigests":
        return cls(train=data[:32].hex(), val=data[32:].hex())

    def held_out(self, digest: str) -> bool | None:
        """Returns True if `digest` is the digest of the validation split, and False if it is the digest of the training
        split. Returns None otherwise.
        """
        return digest == self.val if digest in (self.train, self.val) else None
