"""Compiles generated CUDA C++ with nvcc and loads it with ctypes. Files with equal content are compiled once.

Libraries are cached in the folder `native` of SPECC_CACHE_DIR, or of the user's cache directory. Only the user may have
write access to this folder, because its files are loaded as code.
"""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_dir

from specc.runtime.errors import EnvironmentFailure, IntegrityError, RunFailure

FLAGS = (
    "-O3",
    "-std=c++17",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "-ftz=true",  # without this flag, every exp handles subnormals, which takes a quarter of the instructions of gelu
    "-prec-div=false",  # accurate to 2 ulp of f32; the exact forms need branches, and more registers than are free
    "-prec-sqrt=false",
    "-Xptxas=-v",
    "-shared",
    "-Xcompiler=-fPIC",
)
HEADERS = ("include", "tools/util/include")  # paths relative to cutlass_library/source in the wheel
CUTLASS = "nvidia-cutlass"
# A line of the source states the architecture. Without this line, the architecture is sm_90a.
ARCH = re.compile(rb"^// arch: sm_([0-9]+a?)$", re.MULTILINE)
RELEASE = re.compile(r"\bV(\d+(?:\.\d+)+)")  # the release in the output of `nvcc --version`
LOG_LINES = 40
waited = [0.0]  # the seconds that `library` has waited for nvcc in this process


def library(source: Path) -> ctypes.CDLL:
    """Compiles a generated .cu file, unless its library is in the cache, and loads the library into the process.

    Raises EnvironmentFailure if nvcc or the CUTLASS headers are missing. Raises RunFailure if nvcc rejects the source,
    or if ptxas reports a slow kernel. Raises IntegrityError if other users can write to the cache directory.
    """
    began = time.monotonic()
    compiled = compile_only(source)
    waited[0] += time.monotonic() - began
    return ctypes.CDLL(str(compiled))


def compile_only(source: Path) -> Path:
    """Compiles a .cu file, unless its library is in the cache, and returns the path of the library.

    The cache key ignores `//` comment lines. If the cached library is damaged, the file is compiled again.

    Raises EnvironmentFailure if nvcc or the CUTLASS headers are missing. Raises RunFailure if nvcc rejects the source,
    or if ptxas reports a slow kernel. Raises IntegrityError if other users can write to the cache directory.
    """
    text = source.read_bytes()
    nvcc, (version, headers) = find_nvcc(), find_cutlass()
    facts = (nvcc_version(nvcc), version, platform.machine(), *flags(text))
    code = b"\n".join(line for line in text.splitlines() if not line.lstrip().startswith(b"//"))
    key = hashlib.sha256(b"\0".join((code, *(fact.encode() for fact in facts)))).hexdigest()[:32]
    folder = cache_folder()
    compiled = folder / f"{source.stem}-{key}.so"
    with FileLock(folder / f"{source.stem}-{key}.lock", mode=0o600):
        if not _is_sound(compiled):
            _compile(nvcc, headers, source.name, text, compiled)
    return compiled


def flags(text: bytes) -> tuple[str, ...]:
    """Returns the nvcc flags of a source: `FLAGS`, and the architecture that the source names."""
    match = ARCH.search(text)
    arch = match[1].decode() if match else "90a"
    return (*FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}")


def compile_ahead(directory: Path) -> None:
    """Starts to compile every .cu file of a folder in background threads, at most one file per core.

    nvcc then runs in parallel to torch.compile. The threads ignore errors of nvcc. After an error, the first call of a
    kernel compiles its file again and raises the error.
    """
    cores = threading.Semaphore(os.cpu_count() or 1)

    def quietly(source: Path) -> None:
        with cores, contextlib.suppress(Exception):
            compile_only(source)

    for source in sorted(directory.glob("*.cu")):
        threading.Thread(target=quietly, args=(source,), daemon=True).start()


def initialize_driver() -> None:
    """Starts a background thread that initializes the CUDA driver, which is slow on a machine with many GPUs.

    The thread ignores errors, because Torch reports them when it uses the driver.
    """

    def initialize() -> None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libcuda.so.1").cuInit(0)

    threading.Thread(target=initialize, daemon=True).start()


def _compile(nvcc: str, headers: Path, name: str, text: bytes, compiled: Path) -> None:
    with tempfile.TemporaryDirectory(dir=compiled.parent) as scratch:
        copy, library = Path(scratch, name), Path(scratch, compiled.name)
        copy.write_bytes(text)
        includes = [f"-I{headers / folder}" for folder in HEADERS]
        command = [nvcc, *flags(text), *includes, str(copy), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        log = done.stdout + done.stderr
        end = "\n".join(log.splitlines()[-LOG_LINES:])
        if done.returncode:
            raise RunFailure(f"nvcc cannot compile {name} (exit {done.returncode})", end)
        if reason := slow(log):
            raise RunFailure(f"the kernel {name} is slow: {reason}", end)
        content = library.read_bytes()
        library.write_bytes(content + hashlib.sha256(content).digest())
        os.replace(library, compiled)


def _is_sound(compiled: Path) -> bool:
    try:
        content = compiled.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def slow(log: str) -> str | None:
    """Returns the reason why a kernel is slow: spilled registers or serialized wgmma instructions.

    `log` is the output of ptxas. Returns None if `log` reports neither of these problems.
    """
    if "C7510" in log:
        return "warning C7510, wgmma instructions are serialized"
    spilled = [f"{size} bytes {what}" for size, what in re.findall(r"(\d+) bytes (spill \w+)", log) if int(size)]
    return ", ".join(spilled) or None


def cache_root() -> Path:
    """Returns the folder that contains all caches of code.

    The environment variable SPECC_CACHE_DIR names the folder. The default is `specc` in the user's cache directory.
    """
    return Path(os.environ.get("SPECC_CACHE_DIR") or user_cache_dir("specc"))


def cache_folder(name: str = "native") -> Path:
    """Returns the cache folder `name`, whose files are loaded as code. The folder is created with mode 0700.

    Raises IntegrityError if the folder is a link, belongs to another user, or can be written or replaced by other
    users.
    """
    return private_folder(cache_root() / name)


def private_folder(folder: Path) -> Path:
    """Creates a folder with mode 0700, unless the folder exists, and returns its path.

    Raises IntegrityError if the folder is a link, belongs to another user, or can be written or replaced by other
    users.
    """
    with contextlib.suppress(FileExistsError):  # the path exists already, for example as a dangling link or a file
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        what = "a link" if stat.S_ISLNK(status.st_mode) else "not a directory"
        raise IntegrityError(f"{folder} is {what}", "It must be a directory, because its files are loaded as code.")
    if status.st_uid != os.getuid():
        hint = "Set SPECC_CACHE_DIR to a directory of your own."
        raise IntegrityError(f"{folder} belongs to user {status.st_uid}", hint)
    if status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        raise IntegrityError(f"{folder} has mode {mode:o}, so others can write to it", f"Run: chmod 700 {folder}")
    for parent in folder.absolute().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            message = f"{parent} is writable by all users, so they can replace {folder}"
            raise IntegrityError(message, "Set SPECC_CACHE_DIR to a directory of your own.")
    return folder


def find_nvcc() -> str:
    """Returns the path of nvcc. The function searches PATH first, and then CUDA_HOME (by default /usr/local/cuda).

    Raises EnvironmentFailure if there is no nvcc.
    """
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if nvcc is None:
        hint = "Install the CUDA toolkit, 12.4 or later, or set CUDA_HOME."
        raise EnvironmentFailure(f"the CUTLASS kernels need nvcc; it is neither on PATH nor in {home}/bin", hint)
    return nvcc


@cache
def nvcc_version(nvcc: str) -> str:
    """Returns the output of `nvcc --version`. Raises EnvironmentFailure if the command fails."""
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    if done.returncode:
        raise EnvironmentFailure(f"{nvcc} --version failed with exit code {done.returncode}", done.stderr.strip()[:200])
    return done.stdout


def nvcc_release(nvcc: str) -> str:
    """Returns the release of nvcc, such as `13.0.88`.

    If the output of `nvcc --version` states no release, returns its first line.

    Raises EnvironmentFailure if `nvcc --version` fails.
    """
    output = nvcc_version(nvcc)
    match = RELEASE.search(output)
    return match[1] if match else output.strip().partition("\n")[0][:200] or "unknown"


def find_cutlass() -> tuple[str, Path]:
    """Returns the version of the CUTLASS wheel, and the folder of its sources and headers.

    Raises EnvironmentFailure if the wheel or its headers are missing.
    """
    try:
        version = importlib.metadata.version(CUTLASS)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    package = importlib.util.find_spec("cutlass_library") if version else None
    for place in package.submodule_search_locations or () if package else ():
        if Path(place, "source", HEADERS[0], "cutlass", "cutlass.h").is_file():
            return version, Path(place, "source")
    hint = f"Install them: pip install --no-deps '{CUTLASS}>=4.2'"
    raise EnvironmentFailure(f"the CUTLASS kernels need the headers of the {CUTLASS} wheel", hint)
