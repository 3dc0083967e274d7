"""Traces of training steps: what they contain, the times that they state, and their limit."""

import gzip
import json
from pathlib import Path

import pytest

from specc.cli.app import run
from specc.compiler.spec.check import load
from specc.runtime.bench.trace import _packed, record_trace
from specc.runtime.errors import ExportError, RunFailure

SPEC = Path(__file__).parents[3] / "specs" / "gpt_mini.yaml"
SMALL = ("train.tokens_per_step=512", "train.micro_batch=2", "model.dim=64", "model.blocks.count=2", "train.steps=100")


def test_a_trace_has_every_step_and_its_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json.gz"
    words = [word for text in SMALL for word in ("--set", text)]
    arguments = ["profile", str(SPEC), "--target", "cpu", "--out", str(path), *words]
    assert run([*arguments, "--steps", "2", "--top", "5"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 8 and "more" in shown[-2]  # a head, five rows, the rest, the file
    assert f"wrote {path}: 2 steps on cpu, all events, {path.stat().st_size:,} bytes" == shown[-1]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "specc.optimizer" and event.get("ph") == "X" for event in events) == 2
    assert run([*arguments, "--json"]) == 2  # the file exists
    assert "exists" in capsys.readouterr().err
    assert run([*arguments, "--steps", "1", "--force", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    times = [entry["ms"] for entry in data["entries"]]
    assert times == sorted(times, reverse=True) and data["ms"] == pytest.approx(sum(times))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    products = sum(event.get("name") in ("aten::mm", "aten::addmm", "aten::bmm") for event in events)
    stated = sum(e["calls"] for e in data["entries"] if e["name"] in ("aten::mm", "aten::addmm", "aten::bmm"))
    assert products == stated > 0


def test_a_trace_over_its_limit_loses_the_operators_of_the_host_or_is_refused() -> None:
    kernels = [{"cat": "kernel", "name": f"k{i}"} for i in range(10)]
    data = {"traceEvents": [*kernels, *({"cat": "cpu_op", "name": f"{i * 7919 % 10_007}"} for i in range(5_000))]}
    whole, complete = _packed(data, 10**6)
    assert complete and json.loads(gzip.decompress(whole)) == data
    packed, complete = _packed(data, 1_000)
    assert not complete and json.loads(gzip.decompress(packed)) == {"traceEvents": kernels}
    with pytest.raises(RunFailure, match="more than 10"):
        _packed(data, 10)


def test_a_bad_place_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="not the path of a file"):
        record_trace(load(SPEC)[0], "cpu", 1, tmp_path / "none" / "x.json.gz")
