"""Deterministic training: the same seed gives the same bits on the same kind of device."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from specc.runtime.errors import EnvironmentFailure, RunFailure

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS reads this variable when a process first multiplies matrices
SIZES = (":4096:8", ":16:8")  # the cuBLAS workspace sizes that make the order of sums fixed
REDUCTION = "NCCL_ALGO"  # NCCL's ring adds the gradients in the order of the ranks
_MISSING = "does not have a deterministic implementation"


@contextmanager
def deterministic_algorithms(wanted: bool, device: torch.device) -> Iterator[None]:
    """A context manager in which repeated computations with Torch return the same bits.

    If `wanted` is False, the context manager does nothing. Enter the context before the first matrix product on a GPU,
    and before torch.distributed is initialized.

    Raises:
        EnvironmentFailure: if `CUBLAS_WORKSPACE_CONFIG` selects a cuBLAS workspace for which results may vary.
        RunFailure: if a Torch operation has no deterministic implementation on the device.
    """
    if not wanted:
        yield
        return
    if device.type == "cuda":
        if (size := os.environ.setdefault(WORKSPACE, SIZES[0])) not in SIZES:
            message = f"train.deterministic needs {WORKSPACE}={SIZES[0]}, but the environment has {size}"
            raise EnvironmentFailure(message, f"unset {WORKSPACE}")
        os.environ.setdefault(REDUCTION, "Ring")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, before[0], warn_only=before[1])
        torch.use_deterministic_algorithms(True)
        _set(
            stack, torch.utils.deterministic, "fill_uninitialized_memory", False
        )  # new memory needs no fill, because every kernel writes all of its outputs
        _set(stack, torch.backends.cudnn, "deterministic", True)
        _set(stack, torch.backends.cudnn, "benchmark", False)
        if device.type == "cuda":
            from torch._inductor import config

            stack.enter_context(
                config.patch(deterministic=True)
            )  # the compiler must not choose kernels by measured times, which vary between runs
        try:
            yield
        except RuntimeError as error:
            if _MISSING not in str(error):
                raise
            operation = str(error).partition(_MISSING)[0].strip()
            message = f"{operation} has no deterministic form on {device.type}, but train.deterministic is set"
            raise RunFailure(message, "remove train.deterministic, or the layer that needs it") from error


def _set(stack: ExitStack, owner: object, name: str, value: bool) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
