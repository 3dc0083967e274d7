"""The training clock of a run."""

import time


class Clock:
    """Measures the training time of a run in seconds, without the time for validation, checkpoints and compilation."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None
        self._agreed: float | None = None

    @property
    def seconds(self) -> float:
        return self._before + (time.perf_counter() - self._since if self._since is not None else 0.0)

    @property
    def common(self) -> float:
        """The training time in seconds, with the same value on all processes of the run.

        Use this value for decisions that all processes must make alike. With one process, the value is `seconds`. With
        several processes, the value is the last argument of `agree`.
        """
        return self._agreed if self._agreed is not None else self.seconds

    def agree(self, seconds: float) -> None:
        """Sets `common` to `seconds`. All processes of a run call this method with the same value, once per step."""
        self._agreed = seconds

    def set(self, seconds: float) -> None:
        self._before, self._since, self._agreed = seconds, None, None

    def start(self) -> None:
        self._before, self._since = self.seconds, time.perf_counter()

    def stop(self) -> None:
        self._before, self._since = self.seconds, None
