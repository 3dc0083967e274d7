"""The baselines of a generated kernel or group.

The baselines are a plain Torch function in eager mode, and the plain function under torch.compile.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._inductor import config as inductor

Function = Callable[..., Any]
GENERATED, EAGER, COMPILE, MAX_AUTOTUNE, LIBRARY = "generated", "eager", "compile", "max_autotune", "library"
# No mode uses CUDA graphs. A graph needs copies of its inputs, which would be timed, but which a training step does not
# make.
MODES: Mapping[str, str | None] = {COMPILE: None, MAX_AUTOTUNE: "max-autotune-no-cudagraphs"}
AGAINST = (MAX_AUTOTUNE, COMPILE, EAGER)  # ratios refer to the first of these variants that was measured
LEFT_OUT = {"cpu": {MAX_AUTOTUNE: "max-autotune searches GEMM templates for GPUs, so it is not measured on the CPU"}}


def left_out(device: torch.device) -> Mapping[str, str]:
    """Returns the reason for each variant that is not measured on the device, by name of the variant."""
    return LEFT_OUT.get(device.type, {})


def baselines(plain: Function, device: torch.device) -> dict[str, Function]:
    """Returns the baselines by name: `plain` itself, and `plain` under each mode of torch.compile, compiled for fixed
    shapes.

    Resets the state of torch.compile. A compiled baseline is compiled when it is first called. The compiled baselines
    share no cache entries.
    """
    torch.compiler.reset()
    inductor.autotune_num_choices_displayed = 0  # otherwise, tables of max-autotune would hide the output of specc
    functions = {EAGER: plain}
    for name, mode in MODES.items():
        if name not in left_out(device):
            functions[name] = torch.compile(plain, fullgraph=True, dynamic=False, mode=mode)
    return functions


def failures(calls: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Calls every function once, so that torch.compile compiles it. Returns the error messages of the torch.compile
    variants that fail, by name.

    The function raises the errors of other variants, and all out-of-memory errors.
    """
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
    """Returns a generated function in the form that the trainer runs. On a GPU, torch.compile compiles the function. On
    the CPU, the function is unchanged.
    """
    return torch.compile(function, fullgraph=True, dynamic=False) if device.type == "cuda" else function
