"""Compilation of CUDA C++ and its cache, with a program that replaces nvcc and logs its commands."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest

from specc.runtime.errors import EnvironmentFailure, IntegrityError, RunFailure
from specc.runtime.support import native
from specc.runtime.support.native import cache_folder, compile_only, slow

GOOD = "ptxas info : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
NVCC = """\
#!{python}
import pathlib, sys, time
if "--version" in sys.argv:
    print({version!r})
    sys.exit()
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
time.sleep({delay})
source, compiled = (pathlib.Path(a) for a in (sys.argv[-3], sys.argv[-1]))
compiled.write_bytes(b"compiled " + source.read_bytes())
sys.stderr.write({output!r})
sys.exit({code})
"""
Install = Callable[..., list[str]]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], list[str]]]:
    """Puts a replacement of nvcc on PATH and returns a function that returns the commands that it ran."""
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))

    def put(output: str = GOOD, code: int = 0, version: str = "nvcc 1.0", delay: float = 0) -> Callable[[], list[str]]:
        bin, log = tmp_path / "bin", tmp_path / "log"
        bin.mkdir(exist_ok=True)
        words = {"python": sys.executable, "log": str(log), "delay": delay}
        path = bin / "nvcc"
        path.write_text(NVCC.format(version=version, output=output, code=code, **words))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{bin}{os.pathsep}{os.environ['PATH']}")
        native.nvcc_version.cache_clear()
        return lambda: log.read_text().splitlines() if log.exists() else []

    return put


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "dgrad_mul__n64_k32.cu"
    path.write_text("// kernel\n")
    return path


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88\nBuild x", "13.0.88"),
        ("nvcc of somebody\nelse", "nvcc of somebody"),
        ("", "unknown"),
    ],
)
def test_nvcc_tells_its_version(install: Install, said: str, version: str) -> None:
    install(version=said)
    assert native.nvcc_release(native.find_nvcc()) == version


def libraries(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "native").iterdir() if path.suffix != ".lock")


def test_a_source_is_compiled_once_per_content(install: Install, source: Path, tmp_path: Path) -> None:
    commands = install()
    first = compile_only(source)
    assert first.read_bytes()[:-32] == b"compiled // kernel\n"
    other = tmp_path / "elsewhere" / source.name
    other.parent.mkdir()
    other.write_text("// kernel, with another comment\n")
    assert compile_only(source) == first == compile_only(other)
    assert len(commands()) == 1
    other.write_text("int another_kernel;\n")
    assert compile_only(other) != first and len(commands()) == 2
    assert len(libraries(tmp_path)) == 2


def test_the_command_targets_sm90a_and_finds_cutlass(install: Install, source: Path) -> None:
    commands = install()
    compile_only(source)
    (command,) = commands()
    for flag in ("-O3", "-DNDEBUG", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr", "-shared"):
        assert flag in command.split()
    includes = [Path(word[2:]) for word in command.split() if word.startswith("-I")]
    assert any((include / "cutlass" / "cutlass.h").is_file() for include in includes)
    assert any((include / "cutlass" / "util" / "packed_stride.hpp").is_file() for include in includes)


def test_another_compiler_flag_or_header_version_compiles_anew(
    install: Install, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = install()
    paths = {compile_only(source)}
    install(version="nvcc 2.0")
    paths.add(compile_only(source))
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-lineinfo"))
    paths.add(compile_only(source))
    headers = native.find_cutlass()[1]
    monkeypatch.setattr(native, "find_cutlass", lambda: ("9.9", headers))
    paths.add(compile_only(source))
    assert len(paths) == len(commands()) == 4


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [
        ("error: no such type\n", 2, "nvcc cannot compile dgrad_mul__n64_k32.cu (exit 2)"),
        (
            "ptxas info : 0 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads\n" + GOOD * 60,
            0,
            "the kernel dgrad_mul__n64_k32.cu is slow: 16 bytes spill stores, 8 bytes spill loads",
        ),
        (
            "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async\n" + GOOD,
            0,
            "the kernel dgrad_mul__n64_k32.cu is slow: warning C7510, wgmma instructions are serialized",
        ),
    ],
)
def test_a_bad_compile_fails_with_its_log_and_leaves_nothing(
    install: Install, source: Path, tmp_path: Path, output: str, code: int, message: str
) -> None:
    commands = install(output=output, code=code)
    for attempt in (1, 2):
        with pytest.raises(RunFailure) as caught:
            compile_only(source)
        assert caught.value.message == message and caught.value.exit_code == 4
        assert output.splitlines()[-1] in caught.value.hint
        assert libraries(tmp_path) == [] and len(commands()) == attempt
    install()
    assert compile_only(source).is_file()


def test_the_log_of_a_fast_kernel_has_no_reason() -> None:
    assert slow(GOOD + "ptxas info : Used 168 registers, used 2 barriers\n") is None


def test_processes_that_want_one_kernel_compile_it_once(install: Install, source: Path, tmp_path: Path) -> None:
    commands = install(delay=1.0)
    script = "import pathlib, sys; from specc.runtime.support.native import compile_only\n"
    script += "print(compile_only(pathlib.Path(sys.argv[1])).read_bytes()[:-32])"
    command = [sys.executable, "-c", script, str(source)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert outputs == ["b'compiled // kernel\\n'\n"] * 3
    assert len(commands()) == 1 and len(libraries(tmp_path)) == 1


def test_an_interrupted_compile_leaves_nothing_to_load(install: Install, source: Path, tmp_path: Path) -> None:
    commands = install(delay=5)
    script = "import pathlib, sys; from specc.runtime.support.native import compile_only\n"
    script += "compile_only(pathlib.Path(sys.argv[1]))"
    process = subprocess.Popen([sys.executable, "-c", script, str(source)])
    while not commands() and process.poll() is None:
        pass
    process.kill()
    process.wait()
    assert not [name for name in libraries(tmp_path) if name.endswith(".so")]
    install()
    assert compile_only(source).read_bytes()[:-32] == b"compiled // kernel\n"


def test_the_cache_is_the_users_alone(install: Install, source: Path, tmp_path: Path) -> None:
    install()
    folder = compile_only(source).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o770)
    with pytest.raises(IntegrityError, match="has mode 770, so others can write to it") as caught:
        compile_only(source)
    assert caught.value.exit_code == 5 and caught.value.hint == f"Run: chmod 700 {folder}"


@pytest.mark.parametrize("linked", [True, False], ids=["a link", "of another user"])
def test_an_unsafe_cache_is_refused(
    linked: bool, install: Install, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, owner = install(), os.getuid()
    if linked:
        (tmp_path / "cache").mkdir()
        (tmp_path / "real").mkdir(mode=0o700)
        (tmp_path / "cache" / "native").symlink_to(tmp_path / "real")
    else:
        cache_folder()
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(IntegrityError, match="is a link" if linked else f"belongs to user {owner}"):
        compile_only(source)
    assert commands() == []


def test_a_damaged_library_is_compiled_again(install: Install, source: Path) -> None:
    commands = install()
    content = compile_only(source).read_bytes()
    for number, damage in enumerate((b"", content[:-1], content[:5], content[:3] + b"?" + content[4:], content + b"x")):
        compile_only(source).write_bytes(damage)
        assert compile_only(source).read_bytes() == content
        assert len(commands()) == number + 2


def test_the_time_that_a_load_waits_for_nvcc_is_counted(install: Install, source: Path) -> None:
    install(delay=0.2)
    before = native.waited[0]
    with pytest.raises(OSError, match=r"invalid ELF header|file too short"):  # the replacement of nvcc writes text
        native.library(source)
    compiled = native.waited[0] - before
    assert compiled >= 0.2
    with pytest.raises(OSError, match=r"invalid ELF header|file too short"):
        native.library(source)
    assert native.waited[0] - before - compiled < 0.1


def test_without_nvcc_the_error_says_what_to_install(
    install: Install, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    with pytest.raises(EnvironmentFailure, match="need nvcc") as caught:
        compile_only(source)
    assert caught.value.exit_code == 3 and "CUDA toolkit" in caught.value.hint


def test_nvcc_of_cuda_home_is_found(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert native.find_nvcc() == str(tmp_path / "bin" / "nvcc")


def test_without_headers_the_error_says_what_to_install(
    install: Install, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setattr(native, "CUTLASS", "no-such-wheel")
    with pytest.raises(EnvironmentFailure) as caught:
        compile_only(source)
    assert caught.value.exit_code == 3
    assert caught.value.hint == "Install them: pip install --no-deps 'no-such-wheel>=4.2'"


def test_the_driver_is_initialized_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, errors = Queue[object](), list[object]()
    monkeypatch.setattr(threading, "excepthook", errors.append)

    def missing(name: str) -> None:
        calls.put(threading.current_thread())
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(native.ctypes, "CDLL", lambda name: SimpleNamespace(cuInit=calls.put))
    native.initialize_driver()
    assert calls.get(timeout=60) == 0
    monkeypatch.setattr(native.ctypes, "CDLL", missing)
    native.initialize_driver()
    thread = calls.get(timeout=60)
    assert isinstance(thread, threading.Thread) and thread is not threading.main_thread()
    thread.join(60)
    assert not thread.is_alive() and not errors
