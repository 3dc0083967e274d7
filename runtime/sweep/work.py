"""Runs the jobs of a sweep, several at a time. Each job is one process, on one GPU or on a part of the CPU."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from specc.compiler.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from specc.compiler.targets import TARGETS
from specc.runtime.distributed.launch import parent_environment
from specc.runtime.distributed.signals import Stopped, handled_signals
from specc.runtime.errors import EnvironmentFailure, RuntimeFailure, cannot_write
from specc.runtime.model.load import device_of

Say = Callable[[str], None]
POLL = 0.1  # the seconds between two polls of the processes


@dataclass(frozen=True, slots=True)
class Job:
    """A command of a sweep.

    Attributes:
        name: the name of the run.
        arguments: the arguments of `specc`.
        output: the file to which the output is appended.
        prepare: a function that is called directly before the command starts.
        result: a function that is called after the command has ended. It returns a line about the result of the
            command.
    """

    name: str
    arguments: Sequence[str]
    output: Path
    prepare: Callable[[], None]
    result: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Slot:
    """A GPU, or a part of a GPU or of the CPU, that runs one job at a time.

    `environment` contains the environment variables that select the GPU for the job.
    """

    name: str
    environment: Mapping[str, str]


@dataclass
class Outcome:
    """The results of jobs.

    Attributes:
        failed: the reason for each job that failed, by name.
        done: the names of the jobs that ended with exit code 0.
        left: the number of jobs that were not started.
    """

    failed: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    left: int = 0


def slots_of(targets: Sequence[str], jobs: int, gpus: int | None) -> list[Slot]:
    """Returns `jobs` slots for each GPU. If the machine has no GPU, or the targets are CPU targets, returns `jobs`
    slots on the CPU.

    Args:
        targets: the targets of the spec, or the single target of the sweep.
        jobs: the number of jobs that run at the same time on each GPU, or on the CPU.
        gpus: the number of GPUs to use. None for all GPUs.

    Returns:
        The slots. Consecutive slots are on different GPUs.

    Raises:
        EnvironmentFailure: if there are fewer than `gpus` GPUs.
    """
    names = [] if all(device_of(TARGETS[name]) == "cpu" for name in targets) else _visible_gpus()
    if gpus is not None and gpus > len(names):
        message = f"--gpus {gpus} needs {gpus} NVIDIA GPU{'s' if gpus > 1 else ''}, but the sweep can use {len(names)}"
        raise EnvironmentFailure(message, "without --gpus, all GPUs are used, or else the CPU")
    names = names[:gpus]
    if not names:
        return [Slot(f"cpu {i}" if jobs > 1 else "cpu", {}) for i in range(jobs)]
    return [Slot(f"gpu {name}", {"CUDA_VISIBLE_DEVICES": name}) for _ in range(jobs) for name in names]


def _visible_gpus() -> list[str]:
    import torch

    count = torch.cuda.device_count()
    stated = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return stated[:count] if stated else [str(i) for i in range(count)]


def threads_of(slots: int) -> int:
    """Returns the number of CPU threads for each of `slots` jobs.

    The environment variable OMP_NUM_THREADS states the number. By default, the jobs share the cores equally.
    """
    stated = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return int(stated) if stated.isdecimal() and int(stated) else max(1, cores // slots)


@dataclass
class _Running:
    job: Job
    slot: Slot
    process: "subprocess.Popen[bytes]"
    began: float


def run_jobs(jobs: Sequence[Job], slots: Sequence[Slot], threads: int, until: float, say: Say) -> Outcome:
    """Runs jobs, at most one per slot at a time. The failure of a job does not stop the other jobs.

    Args:
        jobs: the jobs, in the order in which they start.
        slots: the slots.
        threads: the number of CPU threads of each job.
        until: the value of `time.monotonic` after which no job starts.
        say: the function that receives a message when a job starts or ends.

    Returns:
        The names of the jobs that are done, the names of the jobs that failed, and the number of jobs that were not
        started.

    Raises:
        Preempted, Interrupted: after a signal. The function first forwards the signal to the jobs, and waits until they
            have saved their state and ended.
    """
    waiting, free, running = deque(jobs), deque(slots), list[_Running]()
    outcome, received, sent = Outcome(), list[int](), 0
    with ExitStack() as stack:
        stack.enter_context(handled_signals(received.append))
        stack.callback(_kill, running)
        while running or (waiting and not received):
            while waiting and free and not received and time.monotonic() < until:
                job, slot = waiting.popleft(), free.popleft()
                try:
                    running.append(_started(job, slot, threads))
                except RuntimeFailure as error:
                    outcome.failed[job.name] = error.message
                    free.appendleft(slot)
                    say(f"{job.name}: failed: {error.message}")
                else:
                    say(f"{job.name}: started on {slot.name}, {len(waiting)} waiting")
            if not running and time.monotonic() >= until:
                break
            for number in received[sent:]:
                sent += 1
                say(f"{signal.Signals(number).name}: {len(running)} runs save and end")
                for entry in running:
                    entry.process.send_signal(number)
            for entry in [entry for entry in running if entry.process.poll() is not None]:
                running.remove(entry)
                free.appendleft(entry.slot)
                _note(entry, outcome, say)
            time.sleep(POLL)
    outcome.left = len(waiting)
    if received:
        where = f"{len(outcome.done)} finished, {len(outcome.failed)} interrupted or failed, {len(waiting)} not started"
        raise Stopped(received[0]).failure(f"{where}; the same command continues")
    return outcome


def _started(job: Job, slot: Slot, threads: int) -> _Running:
    job.prepare()
    environment = {**os.environ, **parent_environment(), "OMP_NUM_THREADS": str(threads), **slot.environment}
    command = [sys.executable, "-P", "-m", "specc.cli", *job.arguments]
    try:
        with job.output.open("ab") as file:
            file.write(f"$ specc {shlex.join(job.arguments)}\n".encode())
            file.flush()
            # In a new session, the job receives Ctrl-C only from this process
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )
    except OSError as error:
        raise cannot_write(job.output, error) from error
    return _Running(job, slot, process, time.monotonic())


def _note(entry: _Running, outcome: Outcome, say: Say) -> None:
    job, code = entry.job, entry.process.returncode
    seconds = time.monotonic() - entry.began
    if code == 0:
        outcome.done.append(job.name)
        say(f"{job.name}: done in {seconds:,.1f} s, {job.result()}")
        return
    how = f"exit code {code}" if code > 0 else f"ended by signal {-code} ({signal.strsignal(-code)})"
    reason = f"{how}: {last_error(job.output)}; see {job.output}"
    outcome.failed[job.name] = reason
    ending = "interrupted" if code in (EXIT_PREEMPTED, EXIT_INTERRUPTED) else "failed"
    say(f"{job.name}: {ending} after {seconds:,.1f} s, {reason}")


def last_error(output: Path) -> str:
    """Returns the first line of the last error message in the output of a command.

    If the output contains no error message, returns its last line.
    """
    try:
        lines = output.read_text(encoding="utf-8", errors="replace").rpartition("$ specc ")[2].splitlines()[1:]
    except OSError:
        lines = []
    written = [line.strip() for line in lines if line.strip()]
    errors = [line for line in written if line.startswith("error: ")]
    return (errors or written[-1:] or ["no output"])[-1].removeprefix("error: ")


def _kill(running: Sequence[_Running]) -> None:
    for entry in running:
        entry.process.kill()
    for entry in running:
        entry.process.wait()
