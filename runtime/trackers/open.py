"""Opens trackers by name. A failure of a tracker does not end the run."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from typing import Any

from torch.random import fork_rng

from specc.compiler.catalog import classes
from specc.runtime import trackers
from specc.runtime.errors import EnvironmentFailure, RuntimeFailure
from specc.runtime.log import Say
from specc.runtime.trackers.tracker import TrackedRun, Tracker, numbers_of


class UnknownTracker(RuntimeFailure):
    """Raised if no tracker has the requested name (exit code 2)."""

    code = "U001"
    exit_code = 2


def tracker_names() -> tuple[str, ...]:
    return tuple(classes(trackers, Tracker))


def require_trackers(names: Sequence[str]) -> None:
    """Checks that trackers exist and that their packages are installed, without importing the packages.

    Raises:
        UnknownTracker: if no tracker has one of the names.
        EnvironmentFailure: if the package of a tracker is not installed.
    """
    known = classes(trackers, Tracker)
    for name in names:
        if name not in known:
            raise UnknownTracker(f"there is no tracker {name!r}", f"choose one of {', '.join(known)}")
        if find_spec(known[name].package) is None:
            install = f"pip install 'specc[{known[name].extra}]'"
            raise EnvironmentFailure(f"--track {name} needs the package {known[name].package}", install)


class Follower:
    """Passes log records to a tracker. After the first error of the tracker, it passes no more records.

    Args:
        tracker: the tracker.
        say: the function that receives a message about an error.
    """

    def __init__(self, tracker: Tracker, say: Say) -> None:
        self._tracker: Tracker | None = tracker
        self._say = say

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        step, numbers = values.get("step"), numbers_of(event, values)
        if self._tracker is None or not isinstance(step, int) or not numbers:
            return
        try:
            with fork_rng(devices=[]):  # restores the generator, so that a tracker does not change training
                self._tracker.log(step, numbers)
        except Exception as error:  # after any error, the run continues without this tracker
            self._give_up(error)

    def close(self) -> None:
        if self._tracker is not None:
            try:
                self._tracker.close()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        assert self._tracker is not None
        self._say(f"the tracker {self._tracker.name} failed, and training continues without it: {error}")
        tracker, self._tracker = self._tracker, None
        with suppress(Exception):
            tracker.close()


def open_trackers(names: Sequence[str], run: TrackedRun, say: Say, stack: ExitStack) -> list[Follower]:
    """Starts trackers, and returns the objects that pass log records to them.

    Args:
        names: the names of the trackers. A repeated name starts only one tracker.
        run: the run that the trackers show.
        say: the function that receives messages for the user.
        stack: the exit stack that closes the trackers.

    Raises:
        EnvironmentFailure: if a tracker cannot start.
    """
    known = classes(trackers, Tracker)
    followers = []
    for name in dict.fromkeys(names):
        try:
            with fork_rng(devices=[]):
                tracker = known[name](run)
        except Exception as error:  # an error ends the start, because nothing has been trained yet
            hint = f"leave out --track {name}, and continue the run with --resume auto"
            raise EnvironmentFailure(f"the tracker {name} cannot start: {error}", hint) from error
        followers.append(Follower(tracker, say))
        stack.callback(followers[-1].close)
    return followers
