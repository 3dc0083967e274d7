"""The environment of a measurement (machine, versions, date), and the check that this machine can run a target."""

import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from specc.compiler.plan.lock import Machine
from specc.compiler.targets import TARGETS
from specc.runtime.errors import EnvironmentFailure
from specc.runtime.model.load import device_of, runs_on
from specc.runtime.support.native import find_cutlass, find_nvcc, nvcc_release

NONE = "none"


@dataclass(frozen=True, slots=True)
class Environment:
    """A machine as locks record it (a CPU with its threads in the GPU field), the Python version and the time
    in UTC."""

    machine: Machine
    python: str
    date: str


def device_for(target: str) -> torch.device:
    """Returns the device that a target's code runs on here. Raises EnvironmentFailure if this machine has no such
    device."""
    row = TARGETS[target]
    if row.arch:
        if not torch.cuda.is_available():
            raise EnvironmentFailure(
                f"{target} needs a GPU of {row.title}, and torch finds none", "name another target"
            )
        major, minor = torch.cuda.get_device_capability()
        if not runs_on(row, major * 10 + minor):
            raise EnvironmentFailure(f"{target} needs {row.title}; this GPU is sm{major}{minor}", "name another target")
    return torch.device(device_of(row))


def environment(device: torch.device) -> Environment:
    """Returns the environment that a report states."""
    gpu, threads = device.type == "cuda", torch.get_num_threads()
    machine = Machine(
        gpu=torch.cuda.get_device_name() if gpu else f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}",
        driver=_driver() if gpu else NONE,
        torch=torch.__version__,
        triton=_version("triton"),
        cuda=torch.version.cuda or NONE if gpu else NONE,
        nvcc=_found(lambda: nvcc_release(find_nvcc())) if gpu else None,
        cutlass=_found(lambda: find_cutlass()[0]) if gpu else None,
    )
    return Environment(machine, platform.python_version(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))


def _found(version: Callable[[], str]) -> str | None:
    try:
        return version()
    except EnvironmentFailure:
        return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return NONE


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        said = []
    return said[0] if said else "unknown"


def _processor() -> str:
    """Returns the name of the CPU from /proc/cpuinfo, because Python's `platform` provides it on few systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
