"""`specc doctor`: what it finds on a machine, and that each problem has a fix."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specc.cli.app import run
from specc.runtime import doctor
from specc.runtime.doctor import Check, cache_check, checks


def by_name(import_torch: bool = False) -> dict[str, Check]:
    return {check.name: check for check in checks(import_torch)}


def test_every_check_says_something_and_every_problem_has_a_fix() -> None:
    results = by_name()
    assert {"python", "torch", "cuda", "gpu", "c++", "nvcc", "cutlass", "flash-attn-4", "threads"} <= results.keys()
    assert {"cache specc", "cache inductor", "cache triton", "disk here", "disk tmp", "pyarrow"} <= results.keys()
    for check in results.values():
        assert check.detail and (check.state == "ok") == (check.fix == ""), check
    assert results["python"].state == results["torch"].state == "ok"
    assert results["torch"].detail == doctor.importlib.metadata.version("torch")


def test_torch_is_not_imported_without_a_request() -> None:
    code = "import sys; from specc.cli.app import run; run(['doctor', '--json']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_the_cache_is_shown_with_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "the cache"
    monkeypatch.setenv("SPECC_CACHE_DIR", str(root))
    monkeypatch.setenv("SPECC_CACHE_GB", "2.5")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert by_name()["cache specc"].detail == f"{root}, not created yet"
    for name in ("native", "inductor/ab"):
        (root / name).mkdir(mode=0o700, parents=True)
        (root / name / "file").write_bytes(bytes(10_000_000))
    results = by_name()
    wanted = f"{root}, user {os.getuid()}, mode 700, 0.02 GB of at most 2.5 GB, cleared by: rm -r '{root}'"
    root.chmod(0o700)
    assert by_name()["cache specc"].detail == wanted
    assert results["cache inductor"].detail.startswith(f"{root / 'inductor'}, ")


def test_caches_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    assert cache_check("c", folder, "V").state == "ok"
    folder.mkdir(mode=0o700)
    assert cache_check("c", folder, "V") == Check("c", "ok", f"{folder}, user {os.getuid()}, mode 700")
    folder.chmod(0o777)
    assert cache_check("c", folder, "V").fix == f"chmod 700 {folder}"
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    assert "is a link" in cache_check("c", tmp_path / "link", "V").detail
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    check = cache_check("c", folder, "V")
    assert check.state == "failed" and "set V to a folder of your own" in check.fix


@pytest.mark.parametrize(
    ("line", "state", "words"),
    [
        ("NVIDIA H100 80GB HBM3, 9.0, 550.54, 81559 MiB", "ok", "target sm90"),
        ("Tesla T4, 7.5, 550.54, 15360 MiB", "note", "no target matches it exactly"),
    ],
)
def test_a_gpu_and_what_it_then_needs(monkeypatch: pytest.MonkeyPatch, line: str, state: str, words: str) -> None:
    real = subprocess.run

    def answering(command: Any, *args: Any, **kwargs: Any) -> Any:
        if command[0] == "nvidia-smi":
            return subprocess.CompletedProcess(command, 0, f"{line}\n", "")
        return real(command, *args, **kwargs)

    monkeypatch.setattr(doctor.subprocess, "run", answering)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    results = by_name()
    assert results["gpu"].state == state and words in results["gpu"].detail
    assert results["nvcc"].state == ("failed" if state == "ok" else "note")
    assert results["c++"].state == "failed" and "g++" in results["c++"].fix


def test_exit_codes_and_formats(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    full = Check("disk here", "failed", "only 0.01 GB free", "free some space")
    for results, code in (((Check("a", "ok", "b"), Check("c", "note", "d", "e")), 0), ((full,), 3)):
        monkeypatch.setattr(doctor, "checks", lambda import_torch, results=results: iter(results))
        assert run(["doctor"]) == code
        text = capsys.readouterr().out
        assert all(check.detail in text and check.fix in text for check in results)
        assert run(["doctor", "--json"]) == code
        assert [entry["state"] for entry in json.loads(capsys.readouterr().out)] == [check.state for check in results]
        assert run(["doctor", "--format", "json"]) == code
        assert [entry["code"] for entry in json.loads(capsys.readouterr().out)] == ["E001"] * (code == 3)


def test_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "2.4.1+cpu" if name == "torch" else None)
    results = by_name()
    assert results["torch"].state == "failed" and "at least 2.11 and below 2.14" in results["torch"].detail
    assert results["pyarrow"].state == "note" and results["pyarrow"].fix == "pip install 'specc[parquet]'"
