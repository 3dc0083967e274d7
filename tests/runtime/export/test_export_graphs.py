"""Formats pt2 and onnx: graphs that run without specc, compared with the model before the file gets its name."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_exports import LINES, export, text_run
from run_samples import EXPERTS, VARIANTS, make_run, random_weights, small_spec
from torch import Tensor
from torch.nn import functional as F

from specc.cli.app import run as specc
from specc.compiler import pipeline
from specc.compiler.programs import reference
from specc.compiler.spec.check import load
from specc.runtime.errors import ExportError, IntegrityError
from specc.runtime.export import program
from specc.runtime.open_model import read_verified
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.storage.run_directory import Run

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
ort = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
SIZES = ((1, 1), (1, 2), (2, 7), (3, 31), (1, 32))
# Loads a file in a process that cannot import specc, and prints logits of given ids.
ALONE = """
import json, sys
sys.modules["specc"] = None
import torch
ids = torch.tensor(json.loads(sys.argv[2]))
print(json.dumps(torch.export.load(sys.argv[1]).module()(ids).tolist()))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("graphs")
    run = text_run(folder / "run", folder / "data")
    quantize(run.directory, QuantizeOptions(cache=folder / "cache", max_tokens=100), lambda _: None)
    return run


@pytest.fixture
def run(base: Run, tmp_path: Path) -> Run:
    return Run.open(Path(shutil.copytree(base.directory, tmp_path / "run")))


def logits64(run: Run, ids: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
    """The logits by the references of the ops in float64, which share no code with what is exported."""
    programs = pipeline.run(run.spec.plain, "cpu", form="exported")
    params = {name: value.double() for name, value in (weights or random_weights(run.spec)).items()}
    return reference.run(programs, "logits", {"ids": ids}, params)["logits"]


def random_ids(run: Run, rows: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 100 + tokens)
    return torch.randint(run.spec.model.vocabulary, (rows, tokens), generator=generator)


def test_pt2_has_the_logits_of_the_model_where_specc_is_not(run: Run, tmp_path: Path) -> None:
    said: list[str] = []
    (file,) = export(run, "pt2", tmp_path / "x.pt2", say=said.append)
    module = torch.export.load(file).module()
    for rows, tokens in SIZES:
        ids = random_ids(run, rows, tokens)
        assert (module(ids) - logits64(run, ids)).abs().max() < 1e-5
    ids = random_ids(run, 2, 5)
    end = subprocess.run(
        [sys.executable, "-c", ALONE, str(file), json.dumps(ids.tolist())], capture_output=True, text=True, check=True
    )
    assert torch.tensor(json.loads(end.stdout)).sub(logits64(run, ids)).abs().max() < 1e-5
    assert any("compared on 64 batches" in line for line in said)
    assert "program logits: ids i64[batch, tokens] -> f32[batch, tokens, vocabulary]; 1 to 32 tokens" in said[-1]
    with pytest.raises(AssertionError, match="Guard failed"):
        module(random_ids(run, 1, 33))  # longer than the context
    assert b"/specc-" not in file.read_bytes() and str(tmp_path).encode() not in file.read_bytes()


def test_onnx_has_the_logits_of_the_model_in_onnxruntime(run: Run, tmp_path: Path) -> None:
    (file,) = export(run, "onnx", tmp_path / "x.onnx")
    onnx.checker.check_model(str(file), full_check=True)
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    ((given,), (output,)) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape, given.type) == ("ids", ["batch", "tokens"], "tensor(int64)")
    assert (output.name, output.shape, output.type) == ("logits", ["batch", "tokens", 257], "tensor(float)")
    for rows, tokens in SIZES:
        ids = random_ids(run, rows, tokens)
        (logits,) = session.run(None, {"ids": ids.numpy()})
        assert (torch.from_numpy(logits) - logits64(run, ids)).abs().max() < 1e-5
    about = session.get_modelmeta().custom_metadata_map
    assert about == {
        "name": "gpt_mini",
        "program": "logits",
        "spec_digest": run.spec_digest,
        "step": "3",
        "weights": "trained",
    }
    text = file.read_bytes()
    assert b".py" not in text and b"specc-" not in text  # nothing of this machine


def test_score_is_the_loss_of_each_target(run: Run, tmp_path: Path) -> None:
    (file,) = export(run, "onnx", tmp_path / "x.onnx", program="score")
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    ids, targets = random_ids(run, 3, 9), random_ids(run, 3, 10)[:, 1:]
    (nats,) = session.run(["score"], {"ids": ids.numpy(), "targets": targets.numpy()})
    expected = F.cross_entropy(logits64(run, ids).mT, targets, reduction="none")
    assert (torch.from_numpy(nats) - expected).abs().max() < 1e-5


def test_quantized_has_the_dequantized_weights_and_says_so(run: Run, tmp_path: Path) -> None:
    said: list[str] = []
    (file,) = export(run, "pt2", tmp_path / "x.pt2", say=said.append, quantized=True)
    weights = read_verified(run.quantized / "model.specc").weights
    ids = random_ids(run, 2, 8)
    logits = torch.export.load(file).module()(ids)
    assert (logits - logits64(run, ids, weights)).abs().max() < 1e-5
    assert (logits - logits64(run, ids)).abs().max() > 1e-3  # which are not the trained ones
    assert "dequantized weights" in said[0]


@pytest.mark.parametrize("variant", ["window", "skips, scaled norms"])
def test_other_models(variant: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", small_spec(*VARIANTS[variant]), "stdlib")
    (file,) = export(run, "pt2")
    module = torch.export.load(file).module()
    for rows, tokens in SIZES:
        ids = random_ids(run, rows, tokens)
        assert (module(ids) - logits64(run, ids)).abs().max() < 2e-5


def test_a_model_of_pairs_reads_source_and_target(tmp_path: Path) -> None:
    spec = load(LINES.spec, LINES.overrides)[0]
    run = make_run(tmp_path / "run", spec, "poly")
    said: list[str] = []
    (file,) = export(run, "onnx", say=said.append)
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    assert [(entry.name, entry.shape) for entry in session.get_inputs()] == [
        ("source", ["batch", "source_tokens"]),
        ("target", ["batch", "tokens"]),
    ]
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(3, spec.model.vocabulary, (2, 9), generator=generator)
    target = torch.randint(3, spec.model.vocabulary, (2, 6), generator=generator)
    (logits,) = session.run(None, {"source": source.numpy(), "target": target.numpy()})
    programs = pipeline.run(spec.plain, "cpu", form="exported")
    params = {name: value.double() for name, value in random_weights(spec).items()}
    expected = reference.run(programs, "logits", {"source": source, "target": target}, params)["logits"]
    assert (torch.from_numpy(logits) - expected).abs().max() < 1e-5


POOL = ("model.blocks.layers.0.mask=j <= i and i - j < 9", "model.blocks.layers.0.pool={block: 4}", "fuse=[]")


@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_what_has_no_graph_says_why_and_leaves_nothing(format: str, tmp_path: Path, capfd: Any) -> None:
    for name, overrides, place in (
        ("experts", EXPERTS, "model.blocks.layers.1 has a product per expert"),
        ("pool", POOL, "model.blocks.layers.0 has attention to pooled blocks"),
        ("loop", None, "model.encoder.1 has a loop over tokens"),
    ):
        spec = small_spec(*overrides) if overrides else load(LINES.spec.with_name("poly_lstm.yaml"))[0]
        run = make_run(tmp_path / name, spec, "stdlib")
        before = sorted(path.name for path in run.directory.iterdir())
        assert specc(["export", str(run.directory), "--format", format]) == 2
        assert place in (error := capfd.readouterr().err) and "--format safetensors" in error
        assert sorted(path.name for path in run.directory.iterdir()) == before


@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_a_graph_of_another_model_is_noticed_and_the_old_file_stays(
    format: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x"
    out.write_bytes(b"the old file")
    graph = program._graph

    def spoiled(module: Any, *rest: Any) -> Any:
        exported, least = graph(module, *rest)
        weight = exported.state_dict["model.blocks.1.mlp.down"].clone()  # one value, after the graph was made
        weight[3, 5] += 0.05
        exported._state_dict = {**exported.state_dict, "model.blocks.1.mlp.down": torch.nn.Parameter(weight, False)}
        return exported, least

    monkeypatch.setattr(program, "_graph", spoiled)
    with pytest.raises(IntegrityError, match="the outputs of the exported program differ"):
        export(run, format, out, force=True)
    assert out.read_bytes() == b"the old file" and [path.name for path in tmp_path.glob("*x*")] == ["x"]


def test_a_bad_place_or_run_is_refused_before_any_work(run: Run, tmp_path: Path) -> None:
    for format in ("pt2", "onnx"):
        (tmp_path / f"there.{format}").write_bytes(b"mine")
        with pytest.raises(ExportError, match="exists"):
            export(run, format, tmp_path / f"there.{format}")
        with pytest.raises(ExportError, match="not the path of a file"):
            export(run, format, tmp_path / "none" / "x")
        assert (tmp_path / f"there.{format}").read_bytes() == b"mine"
