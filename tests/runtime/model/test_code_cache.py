"""The cache of generated and compiled code: shared by runs and processes, rebuilt where damaged, bounded in size."""

import json
import os
import py_compile
import shutil
import subprocess
import sys
import time
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest
from fork_server import Forked, compiling_server
from log_lines import read_log

from specc.compiler.spec.check import load
from specc.runtime.errors import IntegrityError
from specc.runtime.model import code_cache
from specc.runtime.model.code_cache import cached_code, content_digest, entries, trim
from specc.runtime.model.load import import_file, instantiate

SPEC = Path(__file__).parents[3] / "specs" / "gpt_mini.yaml"
SMALL = (
    "model.dim=32",
    "model.context=16",
    "model.blocks={count: 1, layers: [{kind: mlp, ratio: 2, act: relu(x) ** 2}]}",
    "fuse=[]",
    "quant=null",
    'train.optimizers=[{kind: adamw, match: "*", lr: 0.001}]',
)
START = """
import json, sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from specc.compiler.spec.check import load
from specc.runtime.model.code_cache import use_private_caches
from specc.runtime.model.load import initialize, instantiate
spec = load(Path(sys.argv[1]), json.loads(sys.argv[2]))[0]
use_private_caches()
loaded = instantiate(spec, "cpu", Path(sys.argv[3]))
initialize(loaded, 0)
ids = torch.arange(32).reshape(2, 16)
loss = torch.compile(loaded.model, fullgraph=True)(ids, ids)
loss.backward()
gradient = sum(float(p.grad.double().square().sum()) for p in loaded.model.parameters())
counts = {key: value for part in ("aot_autograd", "inductor") for key, value in counters[part].items()}
print(json.dumps({"loss": float(loss.detach()), "gradient": gradient, **counts}))
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of an empty cache."""
    for variable in code_cache.CACHES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def begin(folder: Path) -> Forked:
    """Starts a process that generates a model into a folder, compiles it and runs it forward and backward."""
    stdout, stderr = (folder.with_suffix(f".{stream}") for stream in ("stdout", "stderr"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return compiling_server().start(START, (str(SPEC), json.dumps(SMALL), str(folder)), environment, stderr, stdout)


def result(process: Forked) -> dict[str, Any]:
    assert process.wait() == 0, process.stderr.read_text()[-3000:]
    found: dict[str, Any] = json.loads(process.stdout.read_text().splitlines()[-1])
    return found


def test_starts_share_compiled_graphs_and_rebuild_damaged_ones(tmp_path: Path, root: Path) -> None:
    first, second = map(result, [begin(tmp_path / name) for name in "ab"])  # at the same time
    assert "autograd_cache_bypass" not in first and "fxgraph_cache_bypass" not in first
    assert first["autograd_cache_saved"] == 1
    again = result(begin(tmp_path / "c"))
    assert again["autograd_cache_hit"] == 1 and "autograd_cache_miss" not in again and "fxgraph_cache_miss" not in again
    damaged = [path for path in (root / "inductor").rglob("*") if path.is_file() and "autograd" in str(path)]
    damaged += [path for path in (root / "inductor" / "fxgraph").rglob("*") if path.is_file()]
    assert len(damaged) >= 3
    for number, path in enumerate(damaged):
        content = path.read_bytes()
        path.write_bytes(b"" if number % 2 else content[: len(content) // 2])
    rebuilt = result(begin(tmp_path / "d"))
    assert "autograd_cache_hit" not in rebuilt
    for other in (second, again, rebuilt):
        assert (other["loss"], other["gradient"]) == (first["loss"], first["gradient"])


def write(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_generated_code_is_cached_by_content(tmp_path: Path, root: Path) -> None:
    one, two = (write(tmp_path / name, model="x = 1", other="y = 2") for name in ("one", "two"))
    other = write(tmp_path / "other", model="x = 1", othe="ry = 2")
    assert content_digest(one) == content_digest(two) != content_digest(other)
    copy = cached_code(one)
    assert copy == cached_code(two) == root / "generated" / content_digest(one)[:32] != cached_code(other)
    assert {path.name: path.read_text() for path in copy.iterdir()} == {"model.py": "x = 1", "other.py": "y = 2"}
    assert copy.stat().st_mode & 0o777 == 0o700
    (copy / "model.py").write_text("x = ")
    (copy / "other.py").unlink()
    (copy / "other.py").symlink_to("/dev/null")
    assert cached_code(two) == copy
    assert (copy / "model.py").read_text() == "x = 1" and (copy / "other.py").read_text() == "y = 2"
    assert not (copy / "other.py").is_symlink()
    copy.chmod(0o770)
    with pytest.raises(IntegrityError, match="has mode 770"):
        cached_code(one)


def test_equal_code_is_one_module_even_after_its_folder_is_gone(tmp_path: Path) -> None:
    folders = [write(tmp_path / name, model="x = object()", late="y = object()") for name in ("one", "two")]
    first, second = (import_file(folder, "model") for folder in folders)
    assert first is second and first.__package__ == f"specc_generated_{content_digest(folders[0])[:16]}"
    shutil.rmtree(folders[0])
    assert import_file(folders[1], "late").__package__ == first.__package__


def test_generated_code_is_imported_without_bytecode(tmp_path: Path) -> None:
    folder = write(tmp_path / "code", model="from .other import y", other="y = 3")
    for file in list(folder.iterdir()):
        cached = Path(cache_from_source(file))
        cached.parent.mkdir(exist_ok=True)
        py_compile.compile(str(file), cached)
        cached.write_bytes(cached.read_bytes()[:16])  # a full disk leaves only the header
    assert import_file(folder, "model").y == 3 and {path.stat().st_size for path in cached.parent.iterdir()} == {16}


def test_a_model_of_a_gpu_runs_from_the_cache(tmp_path: Path, root: Path) -> None:
    spec = load(SPEC, ("targets=[cpu, sm90]", *SMALL))[0]
    loaded = [instantiate(spec, "sm90", tmp_path / name) for name in ("one", "two")]
    assert loaded[0].directory == loaded[1].directory and loaded[0].directory.parent == root / "generated"
    assert type(loaded[0].model) is type(loaded[1].model)
    assert (tmp_path / "two" / "sm90" / "model.py").is_file()  # the run states its code


def test_the_cache_is_bounded(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = [f"{name}/{key}/{file}" for name in code_cache.FOLDERS for key in "abc" for file in "xy"]
    now = time.time()
    for age, name in enumerate(files):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (now - 1800 * (len(files) - age),) * 2)  # within a day, the last one first
    total = sum(entry.size for entry in entries())
    assert total == 1000 * len(files)
    monkeypatch.setenv("SPECC_CACHE_GB", f"{5500 / 1e9:.9f}")
    trim()
    assert sum(entry.size for entry in entries()) == total - 0  # used within a day
    for name in files:
        facts = (root / name).stat()
        os.utime(root / name, (facts.st_mtime - code_cache.IN_USE,) * 2)
    trim()
    assert 4000 <= sum(entry.size for entry in entries()) <= 5500
    left = [name for name in files if (root / name).exists()]
    assert left == files[-len(left) :]
    assert all((root / name[:-1] / other).exists() for name in left if "inductor" not in name for other in "xy")
    monkeypatch.setenv("SPECC_CACHE_GB", "many")
    assert code_cache.size_limit() == code_cache.LIMIT * 1e9


@pytest.mark.gpu
def test_a_second_start_compiles_nothing(tmp_path: Path, root: Path) -> None:
    starts, files, programs = list[dict[str, Any]](), list[dict[Path, int]](), list[dict[Path, int]]()
    for name in ("first", "second"):
        command = [sys.executable, "-m", "specc.cli", "train", str(SPEC), "--data", "stdlib", "--run"]
        subprocess.run([*command, str(tmp_path / name), "--target", "sm90", "--steps", "1"], check=True, cwd=tmp_path)
        starts += [record for record in read_log(tmp_path / name / "log.jsonl") if record["event"] == "start_up"]
        made = [path for folder in ("native", "triton", "inductor/aotautograd") for path in (root / folder).rglob("*")]
        files.append({path: path.stat().st_mtime_ns for path in made if path.suffix not in ("", ".lock")})
        stored = (root / code_cache.PROGRAMS).rglob("entry")
        programs.append({path: path.stat().st_mtime_ns for path in stored})
    assert programs[0] and programs[0] == programs[1]  # the second start reads the stored program
    assert len(starts) == 2 and files[0] and {path: files[1].get(path) for path in files[0]} == files[0]
    assert not [path for path in files[1].keys() - files[0].keys() if path.suffix in (".so", ".cubin")]
    compiling = [start["trace"] + start.get("nvcc", 0.0) for start in starts]
    assert compiling[1] < 0.5 * compiling[0] and starts[1]["seconds"] < starts[0]["seconds"]
