"""Signals that end long work: noted until the work can be saved, or raised where there is nothing to save."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from specc.runtime.errors import RuntimeFailure

PREEMPTING = (signal.SIGTERM, signal.SIGHUP)


class Preempted(RuntimeFailure):
    """SIGTERM or SIGHUP came; the work can go on later."""

    exit_code = 75


class Interrupted(RuntimeFailure):
    """Ctrl-C came; the work is saved and can go on later."""

    exit_code = 130


class Stopped(Exception):
    """A signal came, to this process or to another that trains with it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self._number = number

    def failure(self, hint: str) -> RuntimeFailure:
        """The exception that the command should end with."""
        if self._number in PREEMPTING:
            return _preempted(self._number, hint)
        return Interrupted("interrupted", hint)


class _Raised(BaseException):
    """A signal came. Like KeyboardInterrupt it passes code that catches every Exception."""


class Signals:
    """While it is open, SIGTERM, SIGHUP and the first SIGINT are only noted; a second SIGINT interrupts at once.

    A signal that is ignored, as SIGHUP under nohup, stays ignored. Outside the main thread signals cannot be caught:
    there it notes nothing.

    Attributes:
        received: the number of the first signal, else 0.
    """

    def __init__(self) -> None:
        self.received = 0
        self._handlers = _Handlers((*PREEMPTING, signal.SIGINT), self._note)

    def __enter__(self) -> "Signals":
        self._handlers.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handlers.remove()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number


@contextmanager
def preemptible(hint: str) -> Iterator[None]:
    """Within it SIGTERM and SIGHUP raise Preempted at once: there is nothing to save yet."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Raised(number)

    handlers = _Handlers(PREEMPTING, interrupt)
    try:
        handlers.install()
        yield
    except _Raised as raised:
        raise _preempted(raised.args[0], hint) from None
    finally:
        handlers.remove()


class _Handlers:
    """Handlers of signals that are not ignored, and those to put back in their place."""

    def __init__(self, numbers: tuple[signal.Signals, ...], handler: object) -> None:
        self._numbers, self._handler = numbers, handler
        self._before: dict[signal.Signals, object] = {}

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handler)  # type: ignore[arg-type]

    def remove(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()


def _preempted(number: int, hint: str) -> Preempted:
    return Preempted(f"pre-empted by {signal.Signals(number).name}", hint)
