"""Samples for the tests of the search: a machine and a fake compiler."""

import os
import sys
from pathlib import Path

import pytest

from specc.compiler.plan.lock import Machine

MACHINE = Machine(gpu="NVIDIA H200", driver="580", torch="2.11.0", triton="3.6.0", cuda="13.0")


def fake_nvcc(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, version: str = "nvcc 1") -> Path:
    """A compiler on PATH that runs `body`."""
    nvcc = folder / f"bin {version}/nvcc"
    nvcc.parent.mkdir()
    head = f"#!{sys.executable}\nimport os, pathlib, sys, time\n"
    nvcc.write_text(f"{head}if '--version' in sys.argv: sys.exit(print('{version}'))\n{body}")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}")
    return nvcc
