"""Starts one process per GPU on this machine for `specc train --gpus N`, with the environment variables of torchrun.

torchrun itself starts the processes only if several machines take part. On one machine, torchrun has drawbacks. It
always exits with 1 after a failure. After a signal, it leaves a command only 30 seconds to save its work. It reports
one failure several times.
"""

import ctypes
import io
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from specc.compiler.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from specc.compiler.spec.spec import Spec
from specc.compiler.targets import TARGETS
from specc.runtime.distributed.signals import handled_signals, restored_signals
from specc.runtime.errors import EnvironmentFailure, RunFailure, RuntimeFailure
from specc.runtime.model.load import choose_target, device_of
from specc.runtime.storage.run_directory import Run

PEER_LOST = 76  # the exit code of a process that ends because another process failed; no command uses this code
GRACE = 20.0  # after one process fails, the other processes get this number of seconds to end by themselves
_LAUNCHER = "SPECC_LAUNCHER"
_RENDEZVOUS = ("--nnodes", "--rdzv", "--master", "--node-rank", "--node_rank", "--standalone")


class LaunchError(RuntimeFailure):
    """Raised if the processes cannot be started with the given options."""

    code = "U001"
    exit_code = 2


def is_launched() -> bool:
    """Returns whether torchrun or `launch` started this process as one of the processes of a run."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def place() -> tuple[int, int, int, int]:
    """Returns (rank, size, local rank, local size) of this process from the environment variables of torchrun.

    Rank and size refer to the processes on all hosts. Local rank and local size refer to the processes on this host.
    Raises EnvironmentFailure if a variable is missing or not an integer.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    try:
        rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
    except (KeyError, ValueError) as error:
        hint = "unset RANK and WORLD_SIZE, or start the processes with torchrun"
        raise EnvironmentFailure(f"a variable of torchrun is missing or invalid: {error}", hint) from None
    return rank, size, local_rank, local_size


def started_here(size: int) -> int:
    """Returns how many of the `size` processes of the run are on this machine."""
    return place()[3] if is_launched() else size


def require_devices(count: int, spec: Spec, target: str | None) -> None:
    """Checks that this machine has a GPU for each of `count` processes. Does nothing if `target` is a CPU target.

    Raises:
        EnvironmentFailure: if there are fewer GPUs than processes.
        TargetError: if the spec does not list the target.
    """
    if target in spec.targets and device_of(TARGETS[target]) == "cpu":
        return
    import torch

    if target is not None:
        choose_target(spec, target)
    if (present := torch.cuda.device_count()) < count:
        message = f"--gpus {count} needs {count} NVIDIA GPU{'s' if count > 1 else ''}, and torch finds {present}"
        raise EnvironmentFailure(message, "with --target cpu, the processes run on the CPU")


def target_of(spec: Spec, wanted: str | None, gpus: int | None) -> str:
    """Returns the target of a run, as `choose_target` selects it.

    `wanted` is the target that the user requested, or None. `gpus` is the number of GPUs that the user requested, or
    None. If the user requested GPUs, the result is a CPU target only if `wanted` names this target. Raises the errors
    of `choose_target`. Raises EnvironmentFailure if GPUs are requested, but no target of the spec runs on the GPUs of
    this machine.
    """
    chosen = choose_target(spec, wanted)
    if gpus is not None and wanted is None and device_of(TARGETS[chosen]) == "cpu":
        message = f"no target of {spec.name} runs on the GPUs of this machine"
        raise EnvironmentFailure(message, f"the targets are {', '.join(spec.targets)}")
    return chosen


def cpu_target(path: Path, spec: Spec) -> str | None:
    """Returns the CPU target on which the model of a run or an artifact runs. Returns None if the model does not run on
    the CPU.

    For a run, the candidate is the target of its training. For an artifact with a single target, the candidate is this
    target. Other artifacts have no candidate. The result is None if there is no candidate, the candidate is not a CPU
    target, or a GPU of this machine can run another target of the spec. Raises the errors of `Run.open`.
    """
    if not path.is_dir() and len(spec.targets) > 1:
        return None
    target = Run.open(path).target if path.is_dir() else spec.targets[0]
    devices = {device_of(TARGETS[name]) for name in (target, choose_target(spec, None))}
    return target if devices == {"cpu"} else None


def launch(size: int, command: Sequence[str], say: Callable[[str], None]) -> int:
    """Runs a command in `size` processes. Returns the exit code of the process that failed first, or 0.

    SIGTERM, SIGHUP and SIGINT are forwarded to all processes. After a process fails, the other processes have GRACE
    seconds to end. If the process that calls `launch` is killed, all started processes receive SIGTERM. If a signal
    ended a process, `say` is called with a message.
    """
    with ExitStack() as stack:
        environment = {**_environment(size), "MASTER_PORT": str(stack.enter_context(_reserved_port()))}
        processes: list[subprocess.Popen[bytes]] = []
        received: list[int] = []
        stack.enter_context(handled_signals(received.append))
        stack.callback(_kill, processes)
        for rank in range(size):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # In a new session, the child process receives Ctrl-C only from this process
            processes.append(subprocess.Popen([*command], env={**environment, **ranks}, start_new_session=True))
        return _outcome(_ended(processes, received), size, received, say)


def launch_with_torchrun(size: int, options: Sequence[str], command: Sequence[str], say: Callable[[str], None]) -> int:
    """Runs a command in `size` processes of this machine with torchrun. Processes of other machines can join the run.

    Args:
        size: the number of processes on this machine.
        options: options of torchrun, such as `--nnodes 2 --rdzv-endpoint HOST:29400`.
        command: the command to run in each process.
        say: is called with a message if a signal ended a process.

    Returns:
        The exit code of the process that failed first; 0 if no process failed.

    Raises:
        LaunchError: if torchrun does not accept the options.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they would report each failure again
    alone = not any(word.startswith(_RENDEZVOUS) for word in options)
    for name, value in _environment(size).items():
        if name == "OMP_NUM_THREADS" or (alone and name == "GLOO_SOCKET_IFNAME"):
            os.environ[name] = value
    words = [
        *(["--standalone"] if alone else []),
        "--nproc-per-node",
        str(size),
        *options,
        "--no-python",
        "--",
        *command,
    ]
    arguments = _torchrun_arguments(words)
    try:
        with restored_signals():  # torchrun does not restore the signal handlers itself
            run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        return _outcome([(rank, failure.exitcode) for rank, failure in failures], size, (), say)
    except SignalException as stop:
        return EXIT_INTERRUPTED if stop.sigval == signal.SIGINT else EXIT_PREEMPTED
    return 0


def _torchrun_arguments(words: Sequence[str]) -> Any:
    from torch.distributed.run import config_from_args, parse_args

    shown = io.StringIO()
    try:
        with redirect_stderr(shown):
            arguments = parse_args([*words])  # type: ignore[no-untyped-call]
        config_from_args(arguments)
        return arguments
    except (SystemExit, ValueError) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise  # the options contain --help
        reason = shown.getvalue().strip().rpartition("error: ")[2] or error
        raise LaunchError(
            f"torchrun does not accept the options after `--`: {reason}", "see `torchrun --help`"
        ) from None


def _environment(size: int) -> dict[str, str]:
    linux = sys.platform == "linux"
    cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    # Without a given interface, gloo uses the address of the host name
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // size)), **({"GLOO_SOCKET_IFNAME": "lo"} if linux else {})}
    places = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    return {**defaults, **os.environ, **places, **parent_environment()}


def parent_environment() -> dict[str, str]:
    """Returns the environment variable that child processes need for `end_with_launcher`. The value is the id of this
    process.
    """
    return {_LAUNCHER: str(os.getpid())}


@contextmanager
def _reserved_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])


def _ended(processes: Sequence["subprocess.Popen[bytes]"], received: Sequence[int]) -> list[tuple[int, int]]:
    """Waits for all processes, and forwards the signals in `received` to them. Returns a pair (rank, return code) for
    each process, in the order in which the processes ended.

    GRACE seconds after a process fails, the remaining processes are killed. The result omits the killed processes.
    """
    ended: dict[int, int] = {}
    until = math.inf
    sent = 0
    while len(ended) < len(processes):
        for rank, process in enumerate(processes):
            if rank not in ended and (code := process.poll()) is not None:
                ended[rank] = code
                until = min(until, time.monotonic() + GRACE) if code else until
        for number in received[sent:]:
            sent += 1
            for process in processes:
                process.send_signal(number)
        if time.monotonic() > until:
            _kill(processes)
            break
        time.sleep(0.02)
    return list(ended.items())


def _outcome(ended: Sequence[tuple[int, int]], size: int, received: Sequence[int], say: Callable[[str], None]) -> int:
    causes = [(rank, code) for rank, code in ended if code not in (0, PEER_LOST)]
    if not causes:
        return RunFailure.exit_code if any(code for _, code in ended) else 0
    rank, code = causes[0]
    if code > 0:
        return code
    if -code in received:  # the signal arrived before Python started, so that there was nothing to save
        return EXIT_INTERRUPTED if -code == signal.SIGINT else EXIT_PREEMPTED
    say(f"error: rank {rank} of {size} was ended by signal {-code} ({signal.strsignal(-code)})")
    return RunFailure.exit_code


def _kill(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        process.kill()  # no effect if the process has ended
    for process in processes:
        process.wait()


def has_launcher() -> bool:
    """Returns whether `launch`, `launch_with_torchrun` or a sweep started this process."""
    return _LAUNCHER in os.environ


def end_with_launcher() -> None:
    """Makes the operating system send SIGTERM to this process when the process that launched it ends.

    Has no effect if neither `launch` nor a sweep started this process.
    """
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)
    if os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGTERM)
