"""The training clock of a run."""

import time


class Clock:
    """Counts seconds of training. Validation, checkpoints and compilation do not count."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None
        self._agreed: float | None = None

    @property
    def seconds(self) -> float:
        """The training seconds measured by this process."""
        return self._before + (time.perf_counter() - self._since if self._since is not None else 0.0)

    @property
    def common(self) -> float:
        """The training seconds on which decisions depend. With several processes, this is the last agreed value; with a
        single process, it is `seconds`."""
        return self._agreed if self._agreed is not None else self.seconds

    def agree(self, seconds: float) -> None:
        """Sets the agreed seconds. All processes of a run call this with the same number once per step, so that all
        make the same decision."""
        self._agreed = seconds

    def set(self, seconds: float) -> None:
        self._before, self._since, self._agreed = seconds, None, None

    def start(self) -> None:
        self._before, self._since = self.seconds, time.perf_counter()

    def stop(self) -> None:
        self._before, self._since = self.seconds, None
