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
        return self._before + (time.perf_counter() - self._since if self._since is not None else 0.0)

    @property
    def common(self) -> float:
        """The seconds of training for decisions that all processes must agree on.

        With several processes, this is the last value passed to `agree`. With one process, it is `seconds`.
        """
        return self._agreed if self._agreed is not None else self.seconds

    def agree(self, seconds: float) -> None:
        """Sets `common`. All processes of a run call this with the same value, once per step."""
        self._agreed = seconds

    def set(self, seconds: float) -> None:
        self._before, self._since, self._agreed = seconds, None, None

    def start(self) -> None:
        self._before, self._since = self.seconds, time.perf_counter()

    def stop(self) -> None:
        self._before, self._since = self.seconds, None
