"""Defers SIGTERM, SIGHUP and Ctrl-C, so that a command saves its work before the process ends."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from specc.runtime.errors import RuntimeFailure


class Preempted(RuntimeFailure):
    """Raised after SIGTERM or SIGHUP. The work is saved and can be resumed."""

    code = "P001"
    exit_code = 75


class Interrupted(RuntimeFailure):
    """Raised after Ctrl-C. The work is saved and can be resumed."""

    code = "P002"
    exit_code = 130


class Stopped(Exception):
    """Raised if this process, or another process of the run, received a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self._number = number

    def failure(self, hint: str) -> RuntimeFailure:
        if self._number == signal.SIGINT:
            return Interrupted("interrupted", hint)
        return Preempted(f"pre-empted by {self}", hint)


@contextmanager
def restored_signals() -> Iterator[None]:
    """A context manager that restores the earlier handlers of SIGTERM, SIGHUP and SIGINT when its block ends.

    The context manager does nothing outside the main thread, because Python sets signal handlers only in the main
    thread.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, previous in before.items():
                if previous is not None:  # None if code outside Python has set the handler
                    signal.signal(number, previous)


@contextmanager
def handled_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """A context manager. While its block runs, SIGTERM, SIGHUP and SIGINT only call `handle` with the signal number.

    A signal that the process ignores, such as SIGHUP under nohup, stays ignored. The context manager does nothing
    outside the main thread, because Python handles signals only in the main thread.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        handle(number)

    with restored_signals():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if threading.current_thread() is threading.main_thread() and signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)
        yield
