"""Notices a process of a run that hangs. A process that dies is noticed by its sockets; one that is stopped, swapped
out or deadlocked keeps them open, and the others would wait for it as long as a collective call may last.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from specc.runtime.distributed.launch import PEER_LOST
from specc.runtime.errors import RunFailure

INTERVAL = 1.0  # seconds between two reports of a process
PATIENCE = 60.0  # seconds without a report after which a process counts as hung
_HEAD_START = 2.0  # seconds for which the others let one process tell
_LEFT = 1 << 40  # added to the count of a process that ends in order


class Heartbeat:
    """Two threads that count, in the store of a run, that this process lives, and watch the count of the process
    before it, rank - 1. The store lies with rank 0: where it does not answer, that rank hangs.

    A process that finds another one hung ends this one, whose main thread waits within a collective call and cannot be
    interrupted.

    Args:
        rank: of this process.
        size: of the world, at least 2.
        connect: opens a connection to the store of its own, on which a call may block.
    """

    def __init__(self, rank: int, size: int, connect: Callable[[], Any]) -> None:
        self._rank, self._watched, self._connect = rank, (rank - 1) % size, connect
        self._ends = threading.Event()
        self._answered = time.monotonic()
        for loop in (self._report, self._watch_store):
            threading.Thread(target=loop, name=f"specc-heartbeat-{loop.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Ends it: this process leaves in order."""
        self._ends.set()

    def _report(self) -> None:
        """Counts, and ends this process where the watched one has not counted, or another one has found so."""
        try:
            store, before, changed = self._connect(), 0, time.monotonic()
            while True:
                leaves = self._ends.wait(INTERVAL)
                store.add(f"beat/{self._rank}", _LEFT if leaves else 1)
                if leaves:
                    return
                count, found = store.add(f"beat/{self._watched}", 0), store.add("found", 0)
                self._answered = time.monotonic()
                if count != before or not 0 < count < _LEFT:  # it counts, has not begun to, or has left
                    before, changed = count, self._answered
                if found or self._answered - changed > PATIENCE:
                    self._end(self._watched, reports=not found and store.add("found", 1) == 1)
        except RuntimeError:  # the store is gone, and rank 0 with it: that is noticed without a heartbeat
            self._ends.set()

    def _watch_store(self) -> None:
        """Ends this process where the store does not answer: rank 0, with which it lies, hangs."""
        while not self._ends.wait(INTERVAL):
            if time.monotonic() - self._answered > PATIENCE:
                time.sleep(0 if self._rank == 1 else _HEAD_START)
                self._end(0, reports=self._rank == 1)

    def _end(self, rank: int, reports: bool) -> NoReturn:
        if reports:
            message = f"rank {rank} has not answered for {PATIENCE:.0f} s: it is stopped, or hangs"
            hint = f"see what its process does (rank {self._rank} tells this); --resume auto continues the run"
            sys.stderr.write(f"error: {message}\n  = help: {hint}\n")
            sys.stderr.flush()
        os._exit(RunFailure.exit_code if reports else PEER_LOST)
