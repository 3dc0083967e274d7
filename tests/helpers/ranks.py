"""Processes that are ranks of one world, and their environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fork_server import Forked, started_script
from run_samples import HELPERS

from specc.runtime.distributed import launch


def environment(**more: str) -> dict[str, str]:
    """One thread, the helpers on the path, the loopback interface, and `more`."""
    path = os.pathsep.join((str(HELPERS), os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", **more}


@contextmanager
def world(script: str, size: int, folder: Path, *words: str) -> Iterator[list[Forked]]:
    """Runs a script of the helpers in `size` processes, in the environment of torchrun. Their output is in files of
    `folder`. Processes that have not ended are killed."""
    ranks: list[Forked] = []
    with launch._reserved_port() as port:
        shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(port)}
        try:
            for rank in map(str, range(size)):
                place = environment(RANK=rank, LOCAL_RANK=rank, **shared)
                ranks.append(started_script(HELPERS / script, words, folder, place, f"rank{rank}"))
            yield ranks
        finally:
            for process in ranks:
                process.kill()


def outputs(script: str, size: int, folder: Path, *words: str) -> list[tuple[int, str, str]]:
    """The exit code of each rank of a world, and what it printed and said."""
    with world(script, size, folder, *words) as ranks:
        return [(rank.wait(), rank.stdout.read_text(), rank.stderr.read_text()) for rank in ranks]
