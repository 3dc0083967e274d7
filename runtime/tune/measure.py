"""Calls one candidate: on inputs that show whether it is right, and on inputs of the real size for its time."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specc.runtime.judge import Judge, many
from specc.runtime.load import import_file

CHECKED = {"B": 3, "T": 343, "S": 343}  # their product is no multiple of any tile
REPEATS = 100


def loaded(folder: Path, module: str, function: str) -> Callable[..., Any]:
    """The function of a rendered kernel."""
    call: Callable[..., Any] = vars(import_file(folder, module))[function]
    return call


def refusal(judge: Judge, call: Callable[..., Any], deterministic: bool = True) -> str | None:
    """Why a candidate must not be used: it is less exact than plain Torch, leaves outputs unwritten, or gives other
    bits when it is called again though it says that it is `deterministic`."""
    found = judge.call(call)
    for i, error in enumerate(judge.errors(found)):
        if not error.ok:
            return f"output {i} has {error.rms:.2f}x the RMS error of plain Torch and {error.peak:.2f}x its largest"
    for _ in range(REPEATS if deterministic else 0):
        if not all(map(torch.equal, found, many(call(*judge.inputs)))):
            return "other bits when it is called again"
    return None


def forget(folder: Path) -> None:
    """Drops the modules that were imported from a folder, and the package that held them."""
    generated = [(name, module) for name, module in sys.modules.items() if name.startswith("specc_generated_")]
    for name, module in generated:
        places = (getattr(module, "__file__", None) or "", *getattr(module, "__path__", ()))
        if any(str(place).startswith(str(folder.resolve())) for place in places):
            del sys.modules[name]
