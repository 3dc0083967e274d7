"""The base class of data loaders, which compute items in a background thread before the caller requests them."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

from specc.runtime.data.errors import DataError

Item = TypeVar("Item")


def saved_position(
    state: Mapping[str, int], identity: Mapping[str, int], places: Sequence[str], hint: str
) -> list[int]:
    """Checks the state of a loader from a checkpoint, and returns the position in the data.

    Args:
        state: the saved state.
        identity: the names and values that determine the order of the data in this run. `state` must contain the same
            names with the same values.
        places: the names of the entries of `state` that form the position.
        hint: the hint of the error that is raised if `state` does not match `identity`.

    Returns:
        The entries of `state` that `places` names, in the order of `places`. Each value is at least 0.

    Raises:
        DataError: if the state does not match `identity`, or is incomplete.
    """
    differs = [name for name, value in identity.items() if state.get(name) != value]
    if differs:
        raise DataError(
            f"the saved position belongs to other data or settings; the difference is in {', '.join(differs)}", hint
        )
    values = [state.get(place, -1) for place in places]
    if not all(isinstance(value, int) and value >= 0 for value in values):
        raise DataError(f"the saved position in the data is invalid: {dict(state)}")
    return values


class BackgroundReader(ABC, Generic[Item]):
    """Computes items in a background thread before the caller requests them. A reader is not thread-safe. Close it
    after use, or use it as a context manager.

    Args:
        ahead: the maximum number of items that are computed before the caller requests them.
    """

    def __init__(self, ahead: int) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._coming: deque[Future[Item]] = deque(maxlen=ahead + 1)

    @abstractmethod
    def items(self) -> Iterator[Item]:
        """Returns an iterator over the items, from the current position onward.

        The iterator must not reference `self`. Otherwise, the background thread would keep the reader alive.
        """

    def take(self) -> Item:
        """Returns the next item.

        If the computation of an item fails, the method raises the error. The next call computes the item again.
        """
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
        """Whether the next call of `take` returns an item without waiting."""
        return bool(self._coming) and self._coming[0].done() and self._coming[0].exception() is None

    def close(self) -> None:
        """Stops the background thread. The position in the data does not change. A later call of `take` starts a new
        thread.
        """
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
