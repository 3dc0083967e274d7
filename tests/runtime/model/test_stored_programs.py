"""Programs that are stored compiled: a later start neither traces nor compiles them, and computes the same bits."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork_server import compiling_server

from specc.runtime.model import code_cache

SPEC = Path(__file__).parents[3] / "specs" / "gpt_mini.yaml"
OVERRIDES = (
    "model.dim=32",
    "model.context=16",
    "model.blocks={count: 1, layers: [{kind: mlp, ratio: 2, act: relu(x) ** 2}]}",
    'fuse=[{"blocks.*.mlp": [up, act, down]}]',
    "quant=null",
    'train.optimizers=[{kind: adamw, match: "*", lr: 0.001}]',
)
START = """
import json, sys
from pathlib import Path
import torch
import torch._inductor.config
from torch._dynamo.utils import counters
from specc.compiler.spec.check import load
from specc.runtime.model.code_cache import use_private_caches
from specc.runtime.model.load import import_file, initialize, instantiate
from specc.runtime.model.stored_programs import StoredPrograms
from specc.runtime.train.recompute_order import in_order
options = json.loads(sys.argv[2])
use_private_caches()
if options.get("spec"):
    loaded = instantiate(load(Path(options["spec"]), options["overrides"])[0], "cpu", Path(sys.argv[1]))
    initialize(loaded, 0)
    model = loaded.model
else:
    module = import_file(Path(sys.argv[1]), "model")
    module.PRODUCTS = options.get("products", module.PRODUCTS)
    torch.manual_seed(0)
    model = module.Model()
torch._inductor.config.fallback_random = options.get("config", False)
compile = torch.compile if options.get("plain") else StoredPrograms(("facts",)).compile
program, results = compile(model, fullgraph=True, options=in_order()), []
for rows in options.get("rows", [2, 2]):
    ids = torch.arange(16 * rows).reshape(rows, 16)
    inputs = (ids, ids) if options.get("spec") else (ids[:, :8] / 7.0, torch.ones(2, rows).double() / 3)
    inputs = [value if options.get("spec") else value.double() for value in inputs]
    loss = program(*inputs).sum()
    loss.backward()
    results.append([float(loss.detach()), *(float(p.grad.double().square().sum()) for p in model.parameters())])
counts = {key: value for part in ("stats", "aot_autograd") for key, value in counters[part].items()}
with torch.no_grad():  # a program of the same module that is not stored
    results.append(float(torch.compile(model.score, fullgraph=True)(*inputs).sum()))
print(json.dumps({"results": results, "traced": counts.get("unique_graphs", 0), "counts": counts}))
"""
# All operations are matrix products of at least two rows and columns, for which Inductor compiles no C++.
MODEL = """
import torch
from torch import nn

PRODUCTS = 2

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.square = nn.Parameter(torch.randn(8, 8, dtype=torch.float64) / 8)
        self.last = nn.Parameter(torch.randn(8, 2, dtype=torch.float64))

    def forward(self, x, weights):
        for _ in range(PRODUCTS):
            x = x @ self.square
        return weights @ x @ self.last

    def score(self, x, weights):
        return x @ self.square @ self.last
"""
OTHER = MODEL.replace("weights @ x @", "weights @ x @ self.square @")
Start = Callable[..., dict[str, Any]]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of an empty cache."""
    for variable in code_cache.CACHES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def start(root: Path, tmp_path: Path) -> Start:
    """A function that runs a compiled program in a new process, by default that of `MODEL`."""
    environment, number = {**os.environ, "OMP_NUM_THREADS": "1"}, iter(range(100))

    def run(text: str = MODEL, **options: Any) -> dict[str, Any]:
        folder = tmp_path / f"start{next(number)}"
        if "spec" not in options:
            folder.mkdir()
            (folder / "model.py").write_text(text)
        stdout, stderr = (folder.with_suffix(f".{stream}") for stream in ("stdout", "stderr"))
        process = compiling_server().start(START, (str(folder), json.dumps(options)), environment, stderr, stdout)
        assert process.wait() == 0, stderr.read_text()[-3000:]
        found: dict[str, Any] = json.loads(stdout.read_text().splitlines()[-1])
        return found

    return run


def stored(root: Path) -> list[Path]:
    return sorted((root / code_cache.PROGRAMS).rglob("entry"))


def test_a_second_start_of_a_spec_traces_nothing_and_computes_the_same(start: Start, root: Path) -> None:
    options = {"spec": str(SPEC), "overrides": OVERRIDES}
    first = start(**options)
    assert first["traced"] == 1 and len(stored(root)) == 1
    again = start(**options)
    assert again["traced"] == 0 and not again["counts"]
    plain = start(plain=True, **options)
    assert plain["traced"] == 1
    assert first["results"] == again["results"] == plain["results"]


def test_programs_that_differ_have_entries_of_their_own(start: Start, root: Path) -> None:
    """All of these have the same name and begin in the same line."""
    first, other, configured = start(), start(OTHER), start(config=True)
    assert [run["traced"] for run in (first, other, configured)] == [1, 1, 1] and len(stored(root)) == 3
    assert first["results"] == configured["results"] != other["results"]
    again = start(OTHER)
    assert again["traced"] == 0 and again["results"] == other["results"]


def test_a_changed_global_or_shape_is_traced_again(start: Start, root: Path) -> None:
    assert start()["traced"] == 1
    for options in ({"products": 3}, {"rows": [4, 2, 4]}):
        changed = start(**options)
        assert changed["traced"] == 1 and changed["results"] == start(plain=True, **options)["results"]
        again = start(**options)
        assert again["traced"] == 0 and again["results"] == changed["results"]
    assert start()["traced"] == 0 and len(stored(root)) == 1


def test_a_damaged_entry_is_written_again(start: Start, root: Path) -> None:
    first, (entry,) = start(), stored(root)
    content = entry.read_bytes()
    for damaged in (content[: len(content) // 2], b"text"):
        entry.write_bytes(damaged)
        rebuilt = start()
        assert rebuilt["traced"] == 1 and rebuilt["results"] == first["results"]
    entry.unlink()
    assert start()["traced"] == 1 and start()["traced"] == 0


def test_code_that_is_not_generated_is_not_stored(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from specc.runtime.model.stored_programs import StoredPrograms

    calls = []
    monkeypatch.setattr(torch, "compile", lambda program, **options: calls.append(options) or program)
    for whole in (True, False):
        StoredPrograms().compile(torch.nn.Linear(2, 2), fullgraph=whole)
    assert calls == [{"fullgraph": whole, "dynamic": None, "options": {}} for whole in (True, False)]
    assert not stored(root)
