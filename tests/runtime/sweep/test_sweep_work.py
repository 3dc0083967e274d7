"""The work of a sweep in processes: several at once, failures that stay alone, signals, and time limits."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from specc.runtime.distributed.signals import Interrupted, Preempted
from specc.runtime.errors import EnvironmentFailure
from specc.runtime.sweep.work import Job, Slot, last_error, run_jobs, slots_of, threads_of

FOREVER = float("inf")
GOOD, BAD = ("--version",), ("no-such-command",)


def job(folder: Path, name: str, arguments: tuple[str, ...] = GOOD, result: str = "fine") -> Job:
    return Job(name, arguments, folder / f"{name}.txt", lambda: None, lambda: result)


def test_the_failure_of_one_does_not_stop_the_others(tmp_path: Path) -> None:
    lines: list[str] = []
    jobs = [job(tmp_path, "a"), job(tmp_path, "b", BAD), job(tmp_path, "c")]
    outcome = run_jobs(jobs, [Slot("cpu", {})], 1, FOREVER, lines.append)
    assert outcome.done == ["a", "c"] and outcome.left == 0
    assert list(outcome.failed) == ["b"]
    assert outcome.failed["b"].startswith("exit code 2: ") and outcome.failed["b"].endswith(f"see {tmp_path / 'b.txt'}")
    assert lines[0] == "a: started on cpu, 2 waiting"
    assert lines[-1].startswith("c: done in ") and lines[-1].endswith(" s, fine")
    assert (tmp_path / "a.txt").read_text().startswith("$ specc --version\nspecc, version ")


def test_a_preparation_that_fails_is_a_failure_of_its_job(tmp_path: Path) -> None:
    def full() -> None:
        raise EnvironmentFailure("the disk is full")

    broken = Job("a", GOOD, tmp_path / "a.txt", full, lambda: "")
    outcome = run_jobs([broken, job(tmp_path, "b")], [Slot("cpu", {})], 1, FOREVER, lambda line: None)
    assert outcome.failed == {"a": "the disk is full"} and outcome.done == ["b"]


def test_every_slot_works_with_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the interpreter notes what it was started with, and waits until both are there."""
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\n"
        f'echo "$CUDA_VISIBLE_DEVICES $OMP_NUM_THREADS" > {tmp_path}/gpu$CUDA_VISIBLE_DEVICES\n'
        f"while ! [ -f {tmp_path}/gpu0 -a -f {tmp_path}/gpu1 ]; do sleep 0.05; done\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    slots = [Slot(f"gpu {i}", {"CUDA_VISIBLE_DEVICES": str(i)}) for i in range(2)]
    outcome = run_jobs([job(tmp_path, name) for name in "abcd"], slots, 3, FOREVER, lambda line: None)
    assert sorted(outcome.done) == list("abcd")
    assert [(tmp_path / f"gpu{i}").read_text() for i in range(2)] == ["0 3\n", "1 3\n"]


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, Interrupted), (signal.SIGTERM, Preempted)])
def test_a_signal_reaches_the_jobs_and_starts_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    script = tmp_path / "python"
    name = signal.Signals(number).name.removeprefix("SIG")
    script.write_text(
        "#!/bin/bash\n"
        f"trap 'echo saved > {tmp_path}/saved; exit 75' {name}\n"
        f"touch {tmp_path}/ready\nwhile true; do sleep 0.05; done\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))

    def send() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        time.sleep(0.2)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(error, match="0 finished, 1 interrupted or failed, 1 not started"):
        run_jobs([job(tmp_path, "a"), job(tmp_path, "b")], [Slot("cpu", {})], 1, FOREVER, lambda line: None)
    thread.join()
    assert (tmp_path / "saved").read_text() == "saved\n" and not (tmp_path / "b.txt").exists()


def test_nothing_starts_after_the_time(tmp_path: Path) -> None:
    outcome = run_jobs([job(tmp_path, "a")], [Slot("cpu", {})], 1, time.monotonic(), lambda line: None)
    assert outcome.left == 1 and not outcome.done and not (tmp_path / "a.txt").exists()


def test_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [slot.name for slot in slots_of(["cpu"], 2, None)] == ["cpu 0", "cpu 1"]
    slots = slots_of(["cpu", "sm90"], 2, None)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["5", "7", "5", "7"]
    assert [slot.name for slot in slots_of(["sm90"], 1, 1)] == ["gpu 5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [slot.name for slot in slots_of(["sm90"], 1, None)] == ["gpu 0", "gpu 1"]
    with pytest.raises(EnvironmentFailure, match="--gpus 3 needs 3 NVIDIA GPUs"):
        slots_of(["sm90"], 1, 3)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert [slot.name for slot in slots_of(["cpu", "sm90"], 1, None)] == ["cpu"]


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_of(n) for n in (1, 3, 20)] == [8, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads_of(4) == 5


def test_the_last_error_of_an_output(tmp_path: Path) -> None:
    output = tmp_path / "out.txt"
    assert last_error(output) == "no output"
    output.write_text("$ specc train\nerror: old\n$ specc train\nstep 1\nerror: step 2: the loss is nan\n  = help: x\n")
    assert last_error(output) == "step 2: the loss is nan"
    output.write_text("$ specc train\nstep 1\nKilled\n")
    assert last_error(output) == "Killed"
