"""The target of the GPU of this machine, and what a test needs of it."""

import pytest
import torch

from specc.compiler.targets import TARGETS
from specc.runtime.model.load import runs_on


def gpu_target() -> str:
    """Returns the newest target that this GPU can run."""
    major, minor = torch.cuda.get_device_capability()
    usable = (name for name, target in TARGETS.items() if target.arch and runs_on(target, 10 * major + minor))
    return max(usable, key=lambda name: TARGETS[name].arch)


def skip_without_e4m3(target: str) -> None:
    """Skips a test if a target has no conversions to 8-bit floats, as GPUs before sm89."""
    if "fp8_mma" not in TARGETS[target].features:
        pytest.skip(f"{target} has no e4m3")
