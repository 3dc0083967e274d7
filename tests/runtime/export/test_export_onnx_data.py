"""Weights in a second file of an ONNX model: written for large models, and only read from a plain file beside it."""

import os
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_exports import export
from run_samples import make_run, small_spec, write_text

from specc.runtime.errors import IntegrityError
from specc.runtime.export.format import ExportRequest
from specc.runtime.export.formats import onnx as format
from specc.runtime.export.program import ProgramExport, export_program
from specc.runtime.storage.run_directory import Run

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
ort = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("data")
    return make_run(folder / "run", small_spec("model.blocks.count=1"), str(write_text(folder / "text")))


@pytest.fixture(scope="module")
def converted(base: Run) -> tuple[ProgramExport, Any]:
    """The graph of the run, and the ONNX model of the graph: both take seconds."""
    program = export_program(ExportRequest(base.directory, None, False, (), lambda _: None, {}), base)
    return program, format._converted(program)


@pytest.fixture
def reused(converted: tuple[ProgramExport, Any], monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Exports take copies of `converted`, until this patch is undone."""
    monkeypatch.setattr(format, "export_program", lambda *_: converted[0])
    monkeypatch.setattr(format, "_converted", lambda _: deepcopy(converted[1]))
    return monkeypatch


def logits(file: Path) -> torch.Tensor:
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"ids": torch.arange(24).reshape(2, 12).numpy()})[0])


def test_a_large_model_is_two_files_and_a_new_one_replaces_both(
    base: Run, tmp_path: Path, reused: pytest.MonkeyPatch
) -> None:
    (whole,) = export(base, "onnx", tmp_path / "whole.onnx")
    reused.setattr(format, "LARGEST", 10_000)
    model, data = export(base, "onnx", tmp_path / "m.onnx")
    assert data.parent == tmp_path and data.name.startswith("m.onnx.") and data.suffix == ".data"
    assert model.stat().st_size < whole.stat().st_size - 70_000 < data.stat().st_size
    assert torch.equal(logits(model), logits(whole))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in (model, data):
        shutil.copy(file, moved)
    assert torch.equal(logits(moved / "m.onnx"), logits(whole))
    (tmp_path / "m.onnx.0123456789abcdef.data").write_bytes(b"of an older model")
    (tmp_path / "m.onnx.notes.data").write_bytes(b"not of specc")
    before = model.read_bytes()
    reused.undo()  # a conversion of its own has the same bytes
    reused.setattr(format, "LARGEST", 10_000)
    assert export(base, "onnx", tmp_path / "m.onnx", force=True) == (model, data)
    assert model.read_bytes() == before
    names = {path.name for path in tmp_path.glob("m.onnx*")}
    assert names == {"m.onnx", data.name, "m.onnx.notes.data"}


def test_a_failed_comparison_leaves_neither_file(base: Run, tmp_path: Path, reused: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise IntegrityError("differs")

    reused.setattr(format, "LARGEST", 10_000)
    reused.setattr(format, "compare", never)
    with pytest.raises(IntegrityError, match="differs"):
        export(base, "onnx", tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def small_model(location: str, offset: str = "0", length: str = "16", place: str = "initializer") -> Any:
    """A model with a tensor of four numbers in another file, as an initializer or as the attribute of a node."""
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=value)
    node = onnx.helper.make_node("Identity", ["w"], ["y"])
    if place == "attribute":
        node = onnx.NodeProto(op_type="Constant", output=["y"])
        node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)
    output = onnx.helper.make_tensor_value_info("y", 1, [4])
    graph = onnx.helper.make_graph([node], "g", [], [output], [tensor] if place == "initializer" else [])
    return onnx.helper.make_model(graph)


ATTACKS = {
    "parent": ("../w.data", "0", "16"),
    "absolute": ("/etc/hostname", "0", "1"),
    "through a folder": ("sub/../../w.data", "0", "16"),
    "in a folder": ("sub/w.data", "0", "16"),
    "windows": ("..\\w.data", "0", "16"),
    "drive": ("C:w.data", "0", "16"),
    "nothing": ("", "0", "16"),
    "the folder": (".", "0", "16"),
    "link": ("link.data", "0", "16"),
    "NUL": ("w.data\0.data", "0", "16"),
    "beyond the end": ("w.data", "8", "16"),
    "before the start": ("w.data", "-4", "16"),
    "no length": ("w.data", "0", "many"),
    "a pipe": ("pipe.data", "0", "16"),
}


@pytest.mark.parametrize("place", ["initializer", "attribute"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_data_that_is_no_plain_file_beside_the_model_is_refused(attack: str, place: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for path in (tmp_path / "w.data", folder / "w.data", folder / "sub" / "w.data"):
        path.write_bytes(bytes(16))
    (folder / "link.data").symlink_to(tmp_path / "w.data")
    os.mkfifo(folder / "pipe.data")
    with pytest.raises(IntegrityError, match=r"not a file next to the model|is not within"):
        format.require_safe(small_model(*ATTACKS[attack], place), folder)
    format.require_safe(small_model("w.data", place=place), folder)
