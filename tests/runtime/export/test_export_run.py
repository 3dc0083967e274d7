"""`export`: one file out of a run, read back, and never over another."""

import shutil
from pathlib import Path

import pytest
import torch
from run_samples import add_checkpoint, make_run, random_weights, small_spec, write_text
from safetensors import safe_open

from specc.runtime.errors import ExportError, IntegrityError, RunFailure
from specc.runtime.export.format import ExportRequest
from specc.runtime.export.formats import format_names, format_of, formats_with
from specc.runtime.log import Say
from specc.runtime.open_model import open_model
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.storage.run_directory import Run

FORMATS = ("artifact", "safetensors")


def export(path: Path, format: str, out: Path | None = None, *, force: bool = False, say: Say = lambda _: None) -> Path:
    """The one file of a format."""
    (written,) = format_of(format).write(ExportRequest(path, out, force, say=say)).paths
    return written


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("export")
    trained = make_run(folder / "run", small_spec(), str(write_text(folder / "data")))
    quantize(trained.directory, QuantizeOptions(cache=folder / "cache", max_tokens=100), lambda _: None)
    return trained


@pytest.fixture
def run(base: Run, tmp_path: Path) -> Run:
    return Run.open(Path(shutil.copytree(base.directory, tmp_path / "run")))


def test_the_artifact_is_the_quantized_one(run: Run, tmp_path: Path) -> None:
    out = export(run.directory, "artifact", tmp_path / "x.specc")
    assert out == tmp_path / "x.specc"
    assert out.read_bytes() == (run.quantized / "model.specc").read_bytes()
    open_model(out)


def test_safetensors_are_the_weights_that_the_run_ends_with(run: Run, tmp_path: Path) -> None:
    out = export(run.directory, "safetensors", tmp_path / "x.safetensors")
    expected = random_weights(run.spec)
    with safe_open(str(out), framework="pt") as file:
        assert set(file.keys()) == set(expected)
        for name, tensor in expected.items():
            assert file.get_tensor(name).dtype == torch.float32 and torch.equal(file.get_tensor(name), tensor)
        about = {"format": "pt", "name": "gpt_mini", "spec_digest": run.spec_digest, "step": "3"}
        assert file.metadata() == about


@pytest.mark.parametrize("format", FORMATS)
def test_it_goes_into_the_run_unless_told_and_is_the_same_again(run: Run, format: str) -> None:
    out = export(run.directory, format)
    assert out == run.directory / {"artifact": "gpt_mini.specc"}.get(format, "gpt_mini.safetensors")
    data = out.read_bytes()
    with pytest.raises(ExportError, match="exists") as caught:
        export(run.directory, format)
    assert caught.value.exit_code == 2
    out.write_bytes(b"something of mine")
    with pytest.raises(ExportError):
        export(run.directory, format)
    assert out.read_bytes() == b"something of mine"
    assert export(run.directory, format, force=True).read_bytes() == data


@pytest.mark.parametrize("format", FORMATS)
def test_a_place_that_is_none_is_a_usage_error(run: Run, tmp_path: Path, format: str) -> None:
    for out in (tmp_path, tmp_path / "none" / "x"):
        with pytest.raises(ExportError, match="is not the path of a file"):
            export(run.directory, format, out, force=True)


def test_a_run_that_was_not_quantized_has_no_artifact(tmp_path: Path) -> None:
    bare = make_run(tmp_path / "bare", small_spec(), "stdlib")
    with pytest.raises(RunFailure, match="is not quantized") as caught:
        export(bare.directory, "artifact")
    assert f"specc quantize {bare.directory}" in caught.value.hint
    assert not (bare.directory / "gpt_mini.specc").exists()


def test_damage_is_not_passed_on(run: Run, tmp_path: Path) -> None:
    artifact = run.quantized / "model.specc"
    data = bytearray(artifact.read_bytes())
    data[-3] ^= 1
    artifact.write_bytes(data)
    with pytest.raises(IntegrityError):
        export(run.directory, "artifact", tmp_path / "x.specc")
    assert not (tmp_path / "x.specc").exists()


def test_what_does_not_read_back_leaves_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(path: Path, parts: object, check: object) -> None:
        path.write_bytes((run.quantized / "model.specc").read_bytes()[:-1] + b"\0")
        try:
            check(path)  # type: ignore[operator]
        finally:
            path.unlink()

    monkeypatch.setattr("specc.runtime.export.formats.artifact.write_atomically", spoiled)
    with pytest.raises(IntegrityError):
        export(run.directory, "artifact", tmp_path / "x.specc")
    assert list(tmp_path.glob("*.specc")) == []


def test_an_artifact_older_than_the_weights_is_told(run: Run, tmp_path: Path) -> None:
    said: list[str] = []
    export(run.directory, "artifact", tmp_path / "a.specc", say=said.append)
    assert said == []
    add_checkpoint(run, seed=2, step=9)
    export(run.directory, "artifact", tmp_path / "b.specc", say=said.append)
    assert len(said) == 1 and "the artifact has the weights of step 3" in said[0] and "step_00000009" in said[0]


def test_each_format_is_a_file_of_its_name_and_the_only_reader_of_its_options() -> None:
    assert format_names() == ("artifact", "hf", "onnx", "pt2", "safetensors", "submission")
    readers = {option: formats_with(option) for name in format_names() for option in format_of(name).options}
    assert readers == {
        "dtype": ("hf",),
        "shard_bytes": ("hf",),
        "codec": ("submission",),
        "targets": ("submission",),
        "program": ("onnx", "pt2"),
        "quantized": ("onnx", "pt2"),
    }


def test_an_option_of_another_format_is_a_usage_error(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    from specc.cli.app import run as specc

    for words, formats in (
        (["--dtype", "f16"], "--dtype is for --format hf"),
        (["--target", "cpu"], "--target is for --format submission"),
        (["--quantized"], "--quantized is for --format onnx or pt2"),
    ):
        assert specc(["export", str(run.directory), "--format", "safetensors", *words]) == 2
        assert formats in capsys.readouterr().err
    assert not list(run.directory.glob("*.safetensors"))
