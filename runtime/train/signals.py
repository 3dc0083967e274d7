"""Deferred handling of SIGTERM, SIGHUP and Ctrl-C, so that long work can be saved before the process ends."""

import signal
import threading
from types import FrameType, TracebackType

from specc.runtime.errors import RuntimeFailure

CAUGHT = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Preempted(RuntimeFailure):
    """SIGTERM or SIGHUP was received. The work is saved and can be resumed."""

    exit_code = 75


class Interrupted(RuntimeFailure):
    """Ctrl-C was received. The work is saved and can be resumed."""

    exit_code = 130


class Stopped(Exception):
    """A signal was received by this process or by another process of the same run."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self._number = number

    def failure(self, hint: str) -> RuntimeFailure:
        """Returns the exception that the command should end with."""
        if self._number == signal.SIGINT:
            return Interrupted("interrupted", hint)
        return Preempted(f"pre-empted by {self}", hint)


class Signals:
    """A context manager in which SIGTERM, SIGHUP and the first SIGINT are only recorded. A second SIGINT interrupts at
    once.

    A signal that is ignored, such as SIGHUP under nohup, stays ignored. Signals can be caught only in the main thread;
    in another thread the context manager has no effect.

    Attributes:
        received: the number of the first signal received, or 0.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in CAUGHT:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number
