"""A process that hangs is noticed and named; one that is only slow is waited for."""

import signal
import subprocess
import sys
from typing import Any

from ranks import environment
from run_samples import HELPERS

from specc.runtime.distributed import launch

SIZE = 3


def world(stopped: int) -> list[tuple[int, str]]:
    """Exit code and stderr of the ranks that do not stop."""
    command = [sys.executable, str(HELPERS / "hang_scene.py"), str(stopped)]
    processes: list[subprocess.Popen[str]] = []
    try:
        with launch._reserved_port() as port:
            for rank in map(str, range(SIZE)):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(SIZE), "LOCAL_WORLD_SIZE": str(SIZE)}
                where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
                pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True}
                processes.append(subprocess.Popen(command, env=environment(**place, **where), **pipes))
            rest = [process for rank, process in enumerate(processes) if rank != stopped]
            errors = [process.communicate(timeout=120)[1] for process in rest]
        return [(process.returncode, error) for process, error in zip(rest, errors, strict=True)]
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def test_a_rank_that_is_stopped_is_named() -> None:
    ended = world(1)
    reports = [error for _, error in ended if "error:" in error]
    assert reports == [error for code, error in ended if code == 4] and len(reports) == 1, ended
    assert "rank 1 has not answered for 2 s" in reports[0]
    assert all(code in (4, launch.PEER_LOST) for code, _ in ended)


def test_a_slow_rank_is_waited_for() -> None:
    assert world(-1) == [(0, "")] * 3
