"""Counts duplicate documents by the hashes of the documents, in bounded memory."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MOST = 2**24  # the maximum number of hashes per split, which take 128 MiB
DIGEST_BYTES = 8  # with this size, the probability of a collision among MOST different documents is 1 in 130,000


class Hashes:
    """The set of the hashes of all documents in a split.

    If there are more than MOST hashes, the set stores only a sample of the hashes. The sample consists of the hashes
    whose first `level` bits are 0, which are about `2**-level` of all hashes. The sample has either all copies of a
    document or no copy. Counts over the sample can therefore be scaled up.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._parts: list[npt.NDArray[np.uint64]] = []
        self._count = self.level = 0

    def add(self, digests: Sequence[bytes]) -> None:
        part = _within(np.frombuffer(b"".join(digests), "<u8").astype(np.uint64), self.level)
        self._parts.append(part)
        self._count += len(part)
        while self._count > self._most:
            self.level += 1
            self._parts = [_within(np.concatenate(self._parts), self.level)]
            self._count = len(self._parts[0])

    def at(self, level: int) -> npt.NDArray[np.uint64]:
        """Returns the stored hashes whose first `level` bits are 0, u64 [N]. `level` must be at least `self.level`."""
        return _within(np.concatenate([np.zeros(0, np.uint64), *self._parts]), level)

    def repeated(self) -> int:
        """Returns the number of documents that equal an earlier document. The number is an estimate if `self.level` is
        not 0.
        """
        hashes = self.at(self.level)
        return (len(hashes) - len(np.unique(hashes))) << self.level


def shared(some: Hashes, others: Hashes) -> tuple[int, bool]:
    """Returns the number of documents of `some` that are also in `others`, and whether this number is exact. A number
    that is not exact is an estimate.
    """
    level = max(some.level, others.level)
    return int(np.isin(some.at(level), others.at(level)).sum()) << level, level == 0


def _within(hashes: npt.NDArray[np.uint64], level: int) -> npt.NDArray[np.uint64]:
    return hashes[hashes >> np.uint64(64 - level) == 0] if level else hashes
