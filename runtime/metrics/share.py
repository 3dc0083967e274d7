"""Divides a measurement among processes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Sums = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a measurement that one of `size` processes performs.

    Raises ValueError if `rank` is out of range, or if `reduce` is None and `size` is greater than 1.

    Attributes:
        rank: the index of this process, 0 to size - 1.
        size: the number of processes.
        reduce: sums a float64 array [N] over all processes. None for a single process.
    """

    rank: int = 0
    size: int = 1
    reduce: Callable[[Sums], Sums] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"{self.size=} must be positive, and {self.rank=} must be from 0 to size - 1")
        if self.size > 1 and self.reduce is None:
            raise ValueError("sharing the work among processes needs `reduce`")

    def of(self, count: int) -> range:
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def total(self, sums: Sums) -> Sums:
        return sums if self.reduce is None else self.reduce(sums)


WHOLE = Share()
