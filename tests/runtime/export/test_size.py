"""`size`: to the byte what the file system says, and where it goes."""

import io
from pathlib import Path

import brotli
import pytest
import torch
from run_samples import make_run, random_weights, small_spec, write_text

from specc.cli.app import run as specc
from specc.runtime.errors import RunFailure
from specc.runtime.export.size import size
from specc.runtime.open_model import read_verified
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.storage.run_directory import Run, RunDirectoryError
from specc.runtime.submission.plain import plain_size


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("size")
    spec = small_spec("quant.budget_bytes=24000", "quant.promote={bits: 6, count: 1}")
    trained = make_run(folder / "run", spec, str(write_text(folder / "data")))
    quantize(trained.directory, QuantizeOptions(cache=folder / "cache", max_tokens=100), lambda _: None)
    return trained


def test_every_byte_is_accounted_for(run: Run) -> None:
    artifact = run.quantized / "model.specc"
    result = size(run.directory)
    assert result == size(artifact)
    assert result.path == artifact and result.total == artifact.stat().st_size == len(artifact.read_bytes())
    assert result.header + sum(section.compressed for section in result.sections) == result.total
    assert [section.kind for section in result.sections] == ["spec", "codes", "scales", "f16"]


def test_groups_are_the_parameters(run: Run) -> None:
    result = size(run.directory)
    weights = random_weights(run.spec)
    assert sum(group.parameters for group in result.groups) == sum(w.numel() for w in weights.values())
    assert sum(group.tensors for group in result.groups) == len(weights)
    raw = sum(section.raw for section in result.sections if section.kind != "spec")
    assert sum(group.stored for group in result.groups) == raw
    groups = {group.name: group for group in result.groups}
    up = groups["blocks.*.mlp.up"]
    assert (up.tensors, up.parameters, up.stored) == (2, 2 * 112 * 32, 2 * 112 * (32 + 2))
    assert groups["blocks.*.mlp.down"].scheme == "int6 gptq, per row + int5 gptq, per row"
    assert groups["embed.token"].scheme == "int8 round, per row"
    assert (groups["blocks.*.mlp.residual"].scheme, groups["blocks.*.mlp.residual"].stored) == ("f16", 128)
    parameters = size(run.directory, by_layer=True).groups
    assert [(group.name, group.tensors) for group in parameters] == [(name, 1) for name in weights]
    assert sum(group.stored for group in parameters) == raw
    assert {group.scheme for group in parameters if ".mlp.down" in group.name} == {
        "int6 gptq, per row",
        "int5 gptq, per row",
    }
    blocks = [name.replace(".0.", ".*.").replace(".1.", ".*.") for name in weights]
    assert list(groups) == list(dict.fromkeys(blocks))


def test_the_plain_scheme_takes_more_of_the_same_arrays(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = plain_size(run.directory)
    assert sizes == plain_size(run.quantized / "model.specc") and sizes.artifact == size(run.directory).total
    arrays = read_verified(run.quantized / "model.specc").stored.tensors
    saved = io.BytesIO()
    flat = {f"{n}.{s}": torch.from_numpy(a.copy()) for n, stored in arrays.items() for s, a in stored.items()}
    assert all(tensor.dtype == torch.int8 for name, tensor in flat.items() if name.endswith(".codes"))
    torch.save(flat, saved)
    assert sizes.plain == len(brotli.compress(saved.getvalue(), quality=11, lgwin=24))
    assert specc(["size", str(run.directory), "--plain"]) == 0
    output = capsys.readouterr().out
    assert f"plain scheme {sizes.plain:,} bytes" in output and f"model.specc {sizes.artifact:,}: " in output
    assert ("smaller" in output) == (sizes.artifact < sizes.plain) and f"{sizes.artifact:,} bytes of 24,000" in output


def test_the_budget_is_decimal_bytes_and_may_be_met_exactly(run: Run) -> None:
    total = size(run.directory).total
    assert size(run.directory).budget == 24000
    assert [size(run.directory, total + n).over for n in (-1, 0, 1)] == [True, False, False]
    assert size(run.directory, total - 1).budget == total - 1


def test_without_a_budget_nothing_is_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", small_spec("quant.promote=null"), str(write_text(tmp_path / "data")))
    quantize(run.directory, QuantizeOptions(cache=tmp_path / "cache", max_tokens=50), lambda _: None)
    result = size(run.directory)
    assert result.budget is None and not result.over


def test_what_is_no_model_or_not_quantized_says_so(run: Run, tmp_path: Path) -> None:
    bare = make_run(tmp_path / "bare", small_spec(), "stdlib")
    with pytest.raises(RunFailure, match="is not quantized"):
        size(bare.directory)
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(RunDirectoryError):
            size(path)
