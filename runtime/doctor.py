"""Checks the machine for `specc doctor`: packages, GPUs, compilers, caches and disk. Imports torch only on request."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from specc.compiler.targets import TARGETS
from specc.compiler.text.shell import shell_path
from specc.runtime.errors import RuntimeFailure
from specc.runtime.model.code_cache import CACHES, entries, size_limit
from specc.runtime.support.native import cache_root, find_cutlass, find_nvcc, nvcc_release

State = Literal["ok", "note", "failed"]
LEAST_DISK = 2 * 10**9  # in bytes; this size suffices for a compile cache and the checkpoints of a small model
TORCH = ("2.11", "2.14")  # the first supported version, and the first later version that is not supported
TRITON = ("3.6", "3.8")
PYTHON = ("3.11", "3.13")
# Optional packages: for each package, its purpose and the extra that installs it.
OPTIONAL = {
    "sentencepiece": ("tokenizers *.model", "train"),
    "tiktoken": ("tokenizers *.tiktoken", "train"),
    "tokenizers": ("tokenizers tokenizer.json", "train"),
    "pyarrow": ("parquet and arrow files", "parquet"),
    "huggingface_hub": ("specc data fetch", "hub"),
    "matplotlib": ("pictures", "bench"),
}
_QUERY = ("nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader")


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked.
        state: `ok`; `note` if something optional is missing; `failed` if some commands of specc cannot run.
        detail: a description of the result.
        fix: what the user can do; empty if the state is `ok`.
    """

    name: str
    state: State
    detail: str
    fix: str = ""


def checks(import_torch: bool = False) -> Iterator[Check]:
    """Runs the checks of this machine in a fixed order, and yields the result of each check.

    Args:
        import_torch: whether to import torch, and to check which GPUs torch can use. The other checks read versions
            from package metadata, and the list of GPUs from the driver.
    """
    yield _python()
    torch = _package("torch", TORCH, "failed", "pip install 'specc[train]'")
    yield torch
    yield _cuda_of_torch()
    gpus = list(_gpus())
    needed: State = "failed" if any(gpu.state == "ok" for gpu in gpus) else "note"
    yield from gpus
    if sys.platform == "linux":
        yield _package("triton", TRITON, needed, "pip install 'specc[train]'")
    yield _cxx()
    yield _tool("nvcc", needed, lambda: _nvcc())
    yield _tool("cutlass", needed, lambda: " in ".join(map(str, find_cutlass())))
    yield _flash()
    yield from (_optional(name, *facts) for name, facts in OPTIONAL.items())
    yield from _caches()
    yield from _disks()
    yield _threads()
    if import_torch and torch.state == "ok":
        yield _torch_itself(needed)


def _python() -> Check:
    version, where = platform.python_version(), sys.executable
    if _numbers(PYTHON[0]) <= _numbers(version) < _numbers(PYTHON[1]):
        return Check("python", "ok", f"{version}, {where}")
    return Check("python", "failed", f"{version} is not supported", f"use Python {PYTHON[0]} or 3.12")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


def _package(name: str, supported: tuple[str, str], missing: State, fix: str) -> Check:
    version = _version(name)
    if version is None:
        return Check(name, missing, "not installed", fix)
    if _numbers(supported[0]) <= _numbers(version) < _numbers(supported[1]):
        return Check(name, "ok", version)
    between = f"at least {supported[0]} and below {supported[1]}"
    return Check(name, "failed", f"{version}; supported is {between}", fix)


def _cuda_of_torch() -> Check:
    package = importlib.util.find_spec("torch")
    folder = Path(package.origin).parent if package is not None and package.origin else None
    text = (folder / "version.py").read_text(encoding="utf-8") if folder and (folder / "version.py").exists() else ""
    match = re.search(r"^cuda[^=]*= *'([\d.]+)'", text, re.MULTILINE)
    if match:
        return Check("cuda", "ok", f"torch is built for CUDA {match[1]}")
    return Check("cuda", "note", "torch is built for the CPU", "to use a GPU, install a torch build with CUDA")


def _gpus() -> Iterator[Check]:
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20)
        lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
        reason = (
            "" if lines else f"nvidia-smi ended with {done.returncode}: {(done.stdout + done.stderr).strip()[:100]}"
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        lines, reason = [], "no NVIDIA driver" if isinstance(error, FileNotFoundError) else "nvidia-smi does not answer"
    if not lines:
        yield Check("gpu", "note", reason, "the target cpu needs no GPU; for other targets, install the NVIDIA driver")
    for number, line in enumerate(lines):
        name, capability, driver, memory = (part.strip() for part in [*line.split(","), "", "", ""][:4])
        arch = int(capability.replace(".", "") or 0)
        targets = [target.name for target in TARGETS.values() if target.arch == arch]
        detail = f"{number}: {name}, sm{arch}, {memory}, driver {driver}"
        if targets:
            yield Check("gpu", "ok", f"{detail}, target {targets[0]}")
        else:
            known = ", ".join(target.name for target in TARGETS.values() if target.arch)
            yield Check("gpu", "note", f"{detail}: no target matches it exactly", f"add a target to the spec: {known}")


def _cxx() -> Check:
    name = os.environ.get("CXX") or "c++"
    compiler = shutil.which(name) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        fix = "install a C++ compiler, such as the package g++, or set CXX"
        return Check("c++", "failed", f"{name} is not on PATH; torch.compile needs it on the CPU", fix)
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    return Check("c++", "ok", f"{compiler}, {(done.stdout.splitlines() or ['unknown version'])[0]}")


def _nvcc() -> str:
    nvcc = find_nvcc()
    return f"{nvcc_release(nvcc)}, {nvcc}"


def _tool(name: str, missing: State, find: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", find())
    except RuntimeFailure as error:
        return Check(name, missing, error.message, error.hint)


def _flash() -> Check:
    version = _version("flash-attn-4")
    if version:
        return Check("flash-attn-4", "ok", version)
    return Check("flash-attn-4", "note", "not installed; other kernels compute attention", "pip install 'specc[flash]'")


def _optional(name: str, purpose: str, extra: str) -> Check:
    version = _version(name)
    if version:
        return Check(name, "ok", version)
    return Check(name, "note", f"not installed; for {purpose}", f"pip install 'specc[{extra}]'")


def _caches() -> Iterator[Check]:
    root, size = cache_root(), sum(entry.size for entry in entries())
    cache = cache_check("cache specc", root, "SPECC_CACHE_DIR")
    if cache.state == "ok" and root.exists():
        bound = f"{size / 1e9:,.2f} GB of at most {size_limit() / 1e9:g} GB"
        cache = replace(cache, detail=f"{cache.detail}, {bound}, cleared by: rm -r {shell_path(root)}")
    yield cache
    for variable, name in CACHES.items():
        yield cache_check(f"cache {name}", Path(os.environ.get(variable) or root / name), variable)


def cache_check(name: str, folder: Path, variable: str) -> Check:
    """Checks the owner and the permissions of a folder from which code is loaded.

    Args:
        name: the name of the check.
        folder: the folder. The folder may not exist yet.
        variable: the environment variable that selects another folder.

    Returns:
        The result of the check. Its state is `failed` if the folder is a link, belongs to another user, or is writable
        by other users.
    """
    fix = f"set {variable} to a folder of your own"
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return Check(name, "ok", f"{folder}, not created yet")
    except OSError as error:
        return Check(name, "failed", f"{folder}: {error.strerror}", fix)
    mode, owner = stat.S_IMODE(status.st_mode), status.st_uid
    if stat.S_ISLNK(status.st_mode):
        return Check(name, "failed", f"{folder} is a link", f"remove it, or {fix}")
    if owner != os.getuid():
        return Check(name, "failed", f"{folder} belongs to user {owner}", fix)
    if mode & 0o022:
        return Check(name, "failed", f"{folder} has mode {mode:o}: others can write to it", f"chmod 700 {folder}")
    return Check(name, "ok", f"{folder}, user {owner}, mode {mode:o}")


def _disks() -> Iterator[Check]:
    for name, folder in (("disk here", Path.cwd()), ("disk tmp", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(folder).free
        if free >= LEAST_DISK:
            yield Check(name, "ok", f"{free / 1e9:,.1f} GB free in {folder}")
        else:
            yield Check(name, "failed", f"only {free / 1e9:,.2f} GB free in {folder}", "free some space")


def _threads() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = os.environ.get("OMP_NUM_THREADS")
    if chosen and chosen.isdecimal() and int(chosen) > cores:
        return Check(
            "threads", "note", f"OMP_NUM_THREADS is {chosen}, more than the {cores} cores", f"set it to {cores} or less"
        )
    return Check("threads", "ok", f"{cores} cores" + (f", OMP_NUM_THREADS is {chosen}" if chosen else ""))


def _torch_itself(missing: State) -> Check:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Check("torch.cuda", "ok", f"{len(names)} GPUs: {', '.join(names)}")
    fix = "install a torch build for the CUDA version that the driver supports, and check CUDA_VISIBLE_DEVICES"
    return Check("torch.cuda", missing, "torch finds no GPU", fix)
