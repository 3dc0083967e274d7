"""The clock of a run."""

import time


class Clock:
    """Seconds of training. Validation, checkpoints and compilation are not training."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._before + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def set(self, seconds: float) -> None:
        self._before, self._since = seconds, None

    def start(self) -> None:
        self.set(self.seconds)
        self._since = time.perf_counter()

    def stop(self) -> None:
        self.set(self.seconds)
