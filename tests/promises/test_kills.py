"""Processes that die or hang, as often as promised. `make test` kills a few: tests/runtime/storage/test_killed.py and
tests/runtime/distributed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from started_runs import arguments, ended, started
from tiers import Trials, rounds_left, soak

from specc.cli.app import run
from specc.runtime.storage import checkpoint

ROUND = 100  # kills after which a soak that is stopped need not repeat them
TESTS = Path(__file__).parents[1]


def kill(test: str, trials: Trials, config: pytest.Config) -> None:
    """Runs a test of kills in rounds. Those of exporting and of training by several processes are of `make soak`."""
    command = [sys.executable, "-m", "pytest", "-m", "soak or not soak", "-p", "no:xdist", "-p", "no:cacheprovider"]
    (kills,), path = trials.values(), TESTS / "runtime" / "storage" / "test_killed.py"
    sizes = {f"{first} of {kills}": min(ROUND, kills - first) for first in range(0, kills, ROUND)}
    assert config.cache is not None
    for name in rounds_left(config.cache, f"C24 {test}", [*sizes]):
        environment = {**os.environ, "SPECC_KILLS": str(sizes[name]), "SPECC_KILL_SEED": str(int(time.time()))}
        words = [*command, "--timeout", "0", "-v", f"{path}::{test}"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        reasons = "\n".join(line for line in done.stdout.splitlines() if line.startswith("E  "))
        seed = environment["SPECC_KILL_SEED"]
        assert done.returncode == 0 and "1 passed" in done.stdout, (
            f"seed {seed}: {reasons[:4000]}\n{done.stdout[-2000:]}"
        )


@soak("C24", kills_of_training=500)
def test_kills_of_training(trials: Trials, pytestconfig: pytest.Config) -> None:
    kill("test_training_goes_on_from_the_newest_checkpoint[1]", trials, pytestconfig)


@soak("C24", kills_of_training_by_two_processes=500)
def test_kills_of_training_by_two_processes(trials: Trials, pytestconfig: pytest.Config) -> None:
    """A part of the kills hit both processes at once, the others one of them."""
    kill("test_training_goes_on_from_the_newest_checkpoint[2]", trials, pytestconfig)


@soak("C24", kills_of_training_by_eight_processes=500)
def test_kills_of_training_by_eight_processes(trials: Trials, pytestconfig: pytest.Config) -> None:
    kill("test_training_goes_on_from_the_newest_checkpoint[8]", trials, pytestconfig)


@soak("C24", kills_of_quantizing=500)
def test_kills_of_quantizing(trials: Trials, pytestconfig: pytest.Config) -> None:
    kill("test_quantizing_leaves_the_old_or_the_new", trials, pytestconfig)


@soak("C24", kills_of_exporting=500)
def test_kills_of_exporting(trials: Trials, pytestconfig: pytest.Config) -> None:
    kill("test_exporting_leaves_the_old_or_the_new", trials, pytestconfig)


@soak("C29", killed_ranks=20, hung_ranks=10)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_ranks_that_die_or_hang(trials: Trials, tmp_path: Path) -> None:
    """One of two processes. Within 60 seconds of a death, and within 60 seconds after the patience with a process that
    hangs, all are gone, one error is shown, and the run can be resumed."""
    chance = random.Random(29)
    for number in range(trials["killed_ranks"] + trials["hung_ranks"]):
        hangs = number >= trials["killed_ranks"]
        folder = tmp_path / f"{number}"
        folder.mkdir()
        with started(folder) as (process, ranks):
            time.sleep(chance.random())
            victim = chance.choice(ranks)
            os.kill(victim, signal.SIGSTOP if hangs else signal.SIGKILL)
            began = time.monotonic()
            code, shown = ended(process, ranks, 400)
            assert time.monotonic() - began < (360 if hangs else 60)
        assert code == 4 and "Traceback" not in shown and shown.count("error:") == 1, shown
        newest = checkpoint.latest(folder / "run" / "checkpoints", print)
        step = 0 if newest is None else checkpoint.read_state(newest).step
        more = ("--target", "cpu", "--resume", "auto", "--steps", str(step + 2))
        assert run(arguments(folder, "run", *more, steps=100_000)) == 0
