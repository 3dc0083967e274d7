"""Trackio: a database on this machine, in the folder TRACKIO_DIR. `trackio show` displays it."""

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from specc.runtime.trackers.tracker import TrackedRun, Tracker


class Trackio(Tracker):
    """Writes to the local database of Trackio.

    The project has the name of the spec, and the run has the name of its directory.
    """

    name, package, extra = "trackio", "trackio", "trackio"

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._finish: Any = trackio.finish
        with redirect_stdout(sys.stderr):  # Trackio prints notes to stdout, which is reserved for the results of specc
            self._run: Any = trackio.init(
                project=run.project,
                name=f"{run.directory.absolute().name}-{run.digest[:8]}",
                config=dict(run.config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
            )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._finish()  # not `_run.finish`, which Trackio itself calls at the end of the process
