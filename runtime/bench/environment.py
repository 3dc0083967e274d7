"""The setup of a benchmark, the device that runs a target, and a description of the machine."""

import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from specc.compiler.plan.lock import NO_LOCK, Lock, Machine
from specc.compiler.spec.spec import Spec
from specc.compiler.targets import TARGETS
from specc.runtime.errors import EnvironmentFailure
from specc.runtime.machine import processor
from specc.runtime.model.load import device_of, unavailable
from specc.runtime.support.native import find_cutlass, find_nvcc, nvcc_release

NONE = "none"


@dataclass(frozen=True, slots=True)
class Setup:
    """The inputs that all parts of a benchmark share.

    Attributes:
        spec: the spec.
        target: the target to measure.
        device: the device to measure on.
        folder: a temporary folder for generated code and data.
        say: is called with messages about the progress.
        lock: the kernels that were fastest in measurements.
    """

    spec: Spec
    target: str
    device: torch.device
    folder: Path
    say: Callable[[str], None]
    lock: Lock = NO_LOCK


def device_for(target: str) -> torch.device:
    """Returns the device of this machine that runs code for a target. Raises EnvironmentFailure if this machine has no
    such device.
    """
    if reason := unavailable(TARGETS[target]):
        raise EnvironmentFailure(f"{target} {reason}", "name another target")
    return torch.device(device_of(TARGETS[target]))


def machine_of(device: torch.device) -> Machine:
    """Returns a description of this machine for lock files and reports.

    For a CPU, the field `gpu` contains the name of the CPU and the number of threads.
    """
    gpu, threads = device.type == "cuda", torch.get_num_threads()
    nvcc = cutlass = None
    if gpu:
        with suppress(EnvironmentFailure):
            nvcc = nvcc_release(find_nvcc())
        with suppress(EnvironmentFailure):
            cutlass, _ = find_cutlass()
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = NONE
    return Machine(
        gpu=torch.cuda.get_device_name() if gpu else f"{processor()}, {threads} thread{'s' if threads > 1 else ''}",
        driver=_driver() if gpu else NONE,
        torch=torch.__version__,
        triton=triton,
        cuda=torch.version.cuda or NONE if gpu else NONE,
        nvcc=nvcc,
        cutlass=cutlass,
    )


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        if output.strip():
            return output.split()[0]
    return "unknown"
