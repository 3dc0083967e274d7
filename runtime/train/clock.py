"""The clock of a run."""

import time


class Clock:
    """Seconds of training. Validation, checkpoints and compilation are not training."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None
        self._agreed: float | None = None

    @property
    def seconds(self) -> float:
        """By this process."""
        return self._before + (time.perf_counter() - self._since if self._since is not None else 0.0)

    @property
    def common(self) -> float:
        """The seconds that decisions go by: of several processes those that they last agreed on, else `seconds`."""
        return self._agreed if self._agreed is not None else self.seconds

    def agree(self, seconds: float) -> None:
        """All processes of a run call it with the same number, once a step: then all decide alike."""
        self._agreed = seconds

    def set(self, seconds: float) -> None:
        self._before, self._since, self._agreed = seconds, None, None

    def start(self) -> None:
        self._before, self._since = self.seconds, time.perf_counter()

    def stop(self) -> None:
        self._before, self._since = self.seconds, None
