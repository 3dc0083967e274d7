"""Measures the phases of the start of a run, from the command to the end of the first step."""

import time
from collections.abc import Mapping

from specc.runtime.support import native


class StartTimes:
    """Measures the consecutive phases of a start.

    Args:
        began: the value of `time.monotonic` when the command began. None for the current time.
    """

    def __init__(self, began: float | None = None) -> None:
        self._began = self._last = began if began is not None else time.monotonic()
        self._waited = native.waited[0]
        self._phases: dict[str, float] = {}
        self.ended = False

    def mark(self, phase: str) -> None:
        """Adds the seconds since the last call to the total of `phase`.

        The seconds in which this process waited for nvcc count for the phase `nvcc` instead.
        """
        now, waited = time.monotonic(), native.waited[0]
        nvcc = waited - self._waited
        for name, seconds in ((phase, now - self._last - nvcc), ("nvcc", nvcc)):
            if name == phase or seconds:
                self._phases[name] = self._phases.get(name, 0.0) + seconds
        self._last, self._waited = now, waited

    def end(self) -> Mapping[str, float]:
        """Ends the start with the phase `first_step`. Returns the seconds of each phase, and the total as `seconds`."""
        self.mark("first_step")
        self.ended = True
        return {**self._phases, "seconds": self._last - self._began}
