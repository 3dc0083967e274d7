"""Counts equal documents by their hashes, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MOST = 2**24  # hashes, 128 MiB of a split
DIGEST_BYTES = 8  # among MOST documents two different ones meet with a probability of 1 in 130,000


class Hashes:
    """The hashes of the documents of a split. Beyond MOST it keeps those of a share `2**-level`, chosen by their own
    bits: all of a document's copies or none, so that what is counted among them stands for a known share."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._parts: list[npt.NDArray[np.uint64]] = []
        self._count = self.level = 0

    def add(self, digests: Sequence[bytes]) -> None:
        """Takes digests of DIGEST_BYTES each."""
        part = _within(np.frombuffer(b"".join(digests), "<u8").astype(np.uint64), self.level)
        self._parts.append(part)
        self._count += len(part)
        while self._count > self._most:
            self.level += 1
            self._parts = [_within(np.concatenate(self._parts), self.level)]
            self._count = len(self._parts[0])

    def at(self, level: int) -> npt.NDArray[np.uint64]:
        """Those of the share `2**-level`, which is no larger than its own."""
        return _within(np.concatenate([np.zeros(0, np.uint64), *self._parts]), level)

    def repeated(self) -> int:
        """How many documents have come before: about, where the level is not 0."""
        hashes = self.at(self.level)
        return (len(hashes) - len(np.unique(hashes))) << self.level


def shared(some: Hashes, others: Hashes) -> tuple[int, bool]:
    """How many documents of `some` are among `others`, and whether that is exact."""
    level = max(some.level, others.level)
    return int(np.isin(some.at(level), others.at(level)).sum()) << level, level == 0


def _within(hashes: npt.NDArray[np.uint64], level: int) -> npt.NDArray[np.uint64]:
    return hashes[hashes >> np.uint64(64 - level) == 0] if level else hashes
