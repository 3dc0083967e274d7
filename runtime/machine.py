"""The machine of a run: the name of the device, and the memory that a process uses."""

import platform
import resource
from contextlib import suppress
from pathlib import Path

import torch


def processor() -> str:
    """Returns the name of the CPU. The name comes from /proc/cpuinfo if this file exists, because Python often does not
    know the name.
    """
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Returns the name of `device`: the model of the GPU, or the model of the CPU."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else processor()


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory of this process in bytes. For a GPU, the result is the memory of all tensors on the GPU.
    For the CPU, the result is the memory of the whole process.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux states this value in KiB
