"""Runs that start from the weights of a run, of an artifact, or of safetensors files."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_samples import make_run, random_weights, small_spec, write_text
from safetensors.torch import save_file
from torch import Tensor

from specc.runtime.errors import RuntimeFailure
from specc.runtime.export.format import ExportRequest
from specc.runtime.export.formats import format_of
from specc.runtime.open_model import open_model, read_verified
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.storage import checkpoint
from specc.runtime.storage.run_directory import Run
from specc.runtime.train.train import TrainOptions, train

STOPS = "train.validate_tokens=64"


def begin(tmp_path: Path, name: str, start: Any, steps: int = 0) -> tuple[Run, dict[str, Tensor], list[str]]:
    """A run, the weights of its newest checkpoint, and what it printed."""
    data, lines = tmp_path / "data", list[str]()
    if not data.exists():
        write_text(data)
    spec = small_spec(STOPS, f"train.start={json.dumps(start)}")
    options = TrainOptions(spec, "cpu", str(data), tmp_path / name, stop_after_steps=steps, resume="auto")
    result = train(replace(options, cache=tmp_path / "cache"), lines.append)
    return Run.open(tmp_path / name), dict(checkpoint.load(result.checkpoint).weights), lines


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def base(tmp_path: Path) -> Run:
    return make_run(tmp_path / "base", small_spec(), str(write_text(tmp_path / "data")), seed=4, step=7)


def test_from_a_run_its_artifact_and_its_export(base: Run, tmp_path: Path) -> None:
    """The averaged weights, in whole; the run goes on to be quantized."""
    wanted = random_weights(base.spec, 4)
    run, weights, lines = begin(tmp_path, "from_run", str(base.directory))
    assert same(weights, wanted)
    assert run.start is not None and (run.start.kind, run.start.step) == ("run", 7)
    assert run.start.tensors == {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in wanted.items()}
    assert any(f"{len(wanted)} of {len(wanted)} parameters" in line for line in lines)
    artifact = quantize(run.directory, QuantizeOptions(cache=tmp_path / "cache", max_tokens=64), lines.append).artifact
    run, weights, _ = begin(tmp_path, "from_artifact", str(artifact))
    assert same(weights, read_verified(artifact).weights) and run.start is not None and run.start.kind == "artifact"
    (file,) = format_of("safetensors").write(ExportRequest(base.directory)).paths
    run, weights, _ = begin(tmp_path, "from_file", str(file))
    assert same(weights, wanted) and run.start is not None and run.start.kind == "safetensors"
    assert open_model(run.directory, "cpu").spec.train.start is not None


def test_by_patterns_from_a_folder_of_half_precision(tmp_path: Path) -> None:
    """Attention alone, without its values; everything else has initial values, and other tensors are ignored."""
    _, initial, _ = begin(tmp_path, "initial", None)
    tensors = random_weights(small_spec(), 5)
    folder = tmp_path / "weights"
    folder.mkdir()
    names = list(tensors)
    for i, dtype in enumerate((torch.float16, torch.bfloat16)):
        part = {name: tensors[name].to(dtype) for name in names[i::2]}
        save_file({**part, f"lora.{i}": torch.zeros(3)}, folder / f"model-{i}.safetensors")
    run, weights, lines = begin(tmp_path, "part", {"path": str(folder), "take": ["*.attention.*"], "skip": ["*.v"]})
    for i, name in enumerate(names):
        stored = tensors[name].to((torch.float16, torch.bfloat16)[i % 2]).float()
        taken = ".attention." in name and not name.endswith(".v")
        assert torch.equal(weights[name], stored if taken else initial[name]), name
    assert run.start is not None and 0 < len(run.start.tensors) < len(names)
    assert any("initial values: embed" in line for line in lines)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "nowhere": ({"path": "none"}, "/none: no such file or folder"),
    "empty": ({"path": "empty"}, "/empty: has no weights"),
    "extra": ({}, "/file.safetensors lacks blocks.1.mlp.down; blocks.0.mlp.up is [4, 4] in the source and ["),
    "many": ({}, "the model lacks a, b, c, d, e, f and 2 more; "),
    "shape": ({"skip": ["{a,b,c,d,e,f,g,h}", "*.down"]}, "train.start: blocks.0.mlp.up is [4, 4] in the source and ["),
    "a pattern of nothing": ({"take": ["encoder.*"]}, "no parameter of the model and no tensor of"),
    "integers": ({"take": ["blocks.0.mlp.down"]}, "blocks.0.mlp.down is I32, but weights must be floats"),
    "not finite": ({"take": ["blocks.0.attention.q"]}, "blocks.0.attention.q has NaN or infinity"),
    "damaged": ({"path": "bad.safetensors"}, "damaged safetensors file"),
    "twice": ({"path": "twice"}, "x is in a.safetensors and in b.safetensors"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_named(name: str, tmp_path: Path) -> None:
    tensors = random_weights(small_spec(), 5)
    tensors["blocks.0.mlp.up"] = torch.zeros(4, 4)
    tensors["blocks.0.mlp.down"] = tensors["blocks.0.mlp.down"].int()
    tensors["blocks.0.attention.q"][0, 0] = torch.nan
    del tensors["blocks.1.mlp.down"]
    save_file({**tensors, **{key: torch.zeros(1) for key in "abcdefgh"}}, tmp_path / "file.safetensors")
    (tmp_path / "bad.safetensors").write_bytes((tmp_path / "file.safetensors").read_bytes()[:-9])
    (tmp_path / "twice").mkdir()
    for file in "ab":
        save_file({"x": torch.zeros(1)}, tmp_path / "twice" / f"{file}.safetensors")
    changes, message = REFUSALS[name]
    (tmp_path / "empty").mkdir()
    path = f"{tmp_path}/{changes.get('path', 'file.safetensors')}"
    with pytest.raises(RuntimeFailure) as caught:
        begin(tmp_path, "run", {**changes, "path": path})
    assert message in caught.value.message and caught.value.hint
    assert not (tmp_path / "run").exists()


def test_resuming_reads_the_weights_only_before_the_first_checkpoint(base: Run, tmp_path: Path) -> None:
    _, whole, _ = begin(tmp_path, "whole", str(base.directory), steps=3)
    begin(tmp_path, "half", str(base.directory), steps=1)
    begun, _, _ = begin(tmp_path, "early", str(base.directory), steps=1)
    for path in begun.checkpoints.iterdir():
        path.rename(tmp_path / path.name)
    begun.log.unlink()  # as if the process had ended before its first checkpoint
    _, weights, lines = begin(tmp_path, "early", str(base.directory), steps=3)
    assert same(weights, whole) and any("starting from" in line for line in lines)
    for path in begun.checkpoints.iterdir():
        path.rename(tmp_path / f"second_{path.name}")
    begun.log.unlink()
    for path in base.checkpoints.iterdir():
        path.rename(tmp_path / f"base_{path.name}")
    make_again = make_run(tmp_path / "other", base.spec, base.data, seed=5, step=7)
    next(make_again.checkpoints.iterdir()).rename(base.checkpoints / "step_00000007")
    with pytest.raises(RuntimeFailure, match="differ from the weights with which the run began"):
        begin(tmp_path, "early", str(base.directory), steps=3)
    _, weights, lines = begin(tmp_path, "half", str(base.directory), steps=3)
    assert same(weights, whole) and not any("starting from" in line for line in lines)
