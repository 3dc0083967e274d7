"""The base of loaders, which read ahead in a background thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class BackgroundReader(ABC, Generic[Item]):
    """Computes items before they are requested. It is not thread-safe. Close it, or use it as a context manager.

    Args:
        ahead: maximum number of items that are computed before they are requested.
    """

    def __init__(self, ahead: int) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._coming: deque[Future[Item]] = deque(maxlen=ahead + 1)

    @abstractmethod
    def items(self) -> Iterator[Item]:
        """Returns an iterator from the current position on. It must not reference `self`, which it would keep alive."""

    def take(self) -> Item:
        """Returns the next item. If its computation failed, raises the error, and the next call starts again."""
        if self._pool is None:
            self._pool, self._items = ThreadPoolExecutor(1, "specc-loader"), self.items()
        try:
            while len(self._coming) < self._coming.maxlen:  # type: ignore[operator]
                self._coming.append(self._pool.submit(next, self._items))
            return self._coming.popleft().result()
        except BaseException:
            self.close()
            raise

    @property
    def ready(self) -> bool:
        """Whether `take` returns an item without waiting."""
        return bool(self._coming) and self._coming[0].done() and self._coming[0].exception() is None

    def close(self) -> None:
        """Stops the background thread. The position is unchanged, and `take` starts the thread again."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._coming.clear()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
