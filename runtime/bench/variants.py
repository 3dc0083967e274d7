"""What a generated kernel or group is timed against: eager Torch and what torch.compile makes of the same function."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._inductor import config as inductor

Function = Callable[..., Any]
GENERATED, EAGER, COMPILE, MAX_AUTOTUNE, LIBRARY = "generated", "eager", "compile", "max_autotune", "library"
# Without CUDA graphs: their copies of the inputs would count, and a training step has no use for them here.
MODES: Mapping[str, str | None] = {COMPILE: None, MAX_AUTOTUNE: "max-autotune-no-cudagraphs"}
AGAINST = (MAX_AUTOTUNE, COMPILE, EAGER)  # what ratios are told against, the fastest first
LEFT_OUT = {"cpu": {MAX_AUTOTUNE: "max-autotune searches GEMM templates of GPUs; on the CPU it is left out"}}


def left_out(device: torch.device) -> Mapping[str, str]:
    """The variants that a device does not have, each with the reason."""
    return LEFT_OUT.get(device.type, {})


def baselines(plain: Function, device: torch.device) -> dict[str, Function]:
    """`plain` as it is and compiled in each mode, fullgraph and for fixed shapes; the first call compiles.

    Forgets what was compiled before. Between the modes nothing is shared: Dynamo keys its cache by the backend and
    Inductor by its whole configuration.
    """
    torch.compiler.reset()
    inductor.autotune_num_choices_displayed = 0  # its tables would drown ours
    made = {EAGER: plain}
    for name, mode in MODES.items():
        if name not in left_out(device):
            made[name] = torch.compile(plain, fullgraph=True, dynamic=False, mode=mode)
    return made


def failures(calls: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Makes every call once, which compiles what is to be compiled; tells which of torch.compile's variants raised,
    and what. Anything else that raises is no matter of torch.compile, and neither is too little memory."""
    failed: dict[str, str] = {}
    for name, call in calls.items():
        try:
            call()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if name not in MODES:
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return failed


def as_trained(function: Function, device: torch.device) -> Function:
    """Generated code as the trainer runs it: compiled on a GPU, as it is on the CPU."""
    return torch.compile(function, fullgraph=True, dynamic=False) if device.type == "cuda" else function
