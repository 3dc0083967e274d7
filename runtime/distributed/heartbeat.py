"""Detects processes of a run that hang.

When a process dies, its sockets close, which the other processes notice. A stopped, swapped or deadlocked process keeps
its sockets open. Without heartbeats, all other processes would wait for such a process until the timeout of a
collective call.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from specc.runtime.distributed.launch import PEER_LOST
from specc.runtime.errors import RunFailure

INTERVAL = 1.0  # the seconds between two heartbeats of a process
PATIENCE = 60.0  # the seconds without a heartbeat after which a process is considered hung
LEAVE = 1.0  # the seconds that a process waits for its threads when it exits
_HEAD_START = 2.0  # the other ranks delay their report by this number of seconds, so that rank 1 reports first
_LEFT = 1 << 40  # added to the count of a process that exits normally


class Heartbeat:
    """Runs two threads that detect hung processes.

    One thread increments the heartbeat count of this process in the store of torch.distributed, and watches the count
    of the previous rank. Rank 0 hosts the store. If the store does not answer, the other thread concludes that rank 0
    hangs. A thread that detects a hung process ends its own process, because a collective call of the main thread
    cannot be interrupted.

    Args:
        rank: the rank of this process.
        size: the number of processes, at least 2.
        connect: a function that opens a separate connection to the store. A blocked call of a thread then does not
            block the main thread.
    """

    def __init__(self, rank: int, size: int, connect: Callable[[], Any]) -> None:
        self._rank, self._watched, self._connect = rank, (rank - 1) % size, connect
        self._ends = threading.Event()
        self._answered = time.monotonic()
        self._threads = [
            threading.Thread(target=loop, name=f"specc-heartbeat-{loop.__name__}", daemon=True)
            for loop in (self._report, self._watch_store)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends both threads. Waits for each thread for at most LEAVE seconds.

        Call `stop` before the process exits. If Python exits while a thread calls the store, the process aborts.
        """
        self._ends.set()
        for thread in self._threads:
            thread.join(LEAVE)

    def _report(self) -> None:
        try:
            store, before, changed = self._connect(), 0, time.monotonic()
            while True:
                leaves = self._ends.wait(INTERVAL)
                store.add(f"beat/{self._rank}", _LEFT if leaves else 1)
                if leaves:
                    return
                count, reported = store.add(f"beat/{self._watched}", 0), store.add("reported", 0)
                self._answered = time.monotonic()
                if (
                    count != before or not 0 < count < _LEFT
                ):  # the watched process is counting, has not begun to count, or has exited
                    before, changed = count, self._answered
                if reported or self._answered - changed > PATIENCE:
                    self._end(self._watched, reports=not reported and store.add("reported", 1) == 1)
        except RuntimeError:  # rank 0 and its store have ended; their closed sockets show this without heartbeats
            self._ends.set()

    def _watch_store(self) -> None:
        while not self._ends.wait(INTERVAL):
            if time.monotonic() - self._answered > PATIENCE:
                time.sleep(0 if self._rank == 1 else _HEAD_START)
                self._end(0, reports=self._rank == 1)

    def _end(self, rank: int, reports: bool) -> NoReturn:
        if reports:
            message = f"rank {rank} has not answered for {PATIENCE:.0f} s: it is stopped, or hangs"
            hint = f"check the process (reported by rank {self._rank}); resume with --resume auto"
            print(f"error: {message}\n  = help: {hint}", file=sys.stderr, flush=True)
        os._exit(RunFailure.exit_code if reports else PEER_LOST)
