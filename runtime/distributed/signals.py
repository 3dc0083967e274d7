"""Deferred handling of SIGTERM, SIGHUP and Ctrl-C, so that work can be saved before the process ends."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from specc.runtime.errors import RuntimeFailure


class Preempted(RuntimeFailure):
    """SIGTERM or SIGHUP was received. The work is saved and can be resumed."""

    code = "P001"
    exit_code = 75


class Interrupted(RuntimeFailure):
    """Ctrl-C was received. The work is saved and can be resumed."""

    code = "P002"
    exit_code = 130


class Stopped(Exception):
    """A signal was received by this process or by another process of the same run."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self._number = number

    def failure(self, hint: str) -> RuntimeFailure:
        """Returns the exception with which the command should end."""
        if self._number == signal.SIGINT:
            return Interrupted("interrupted", hint)
        return Preempted(f"pre-empted by {self}", hint)


@contextmanager
def restored_signals() -> Iterator[None]:
    """A context manager that restores the handlers of SIGTERM, SIGHUP and SIGINT at its end.

    Python sets signal handlers only in the main thread. In another thread, the context manager has no effect.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, previous in before.items():
                if previous is not None:  # None: code outside of Python set it
                    signal.signal(number, previous)


@contextmanager
def handled_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """A context manager in which SIGTERM, SIGHUP and SIGINT only call `handle` with their number.

    A signal that is ignored, such as SIGHUP under nohup, stays ignored. Python handles signals only in the main thread.
    In another thread, the context manager has no effect.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        handle(number)

    with restored_signals():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if threading.current_thread() is threading.main_thread() and signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)
        yield
