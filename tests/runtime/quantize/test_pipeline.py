"""`quantize`: what it writes, that it is what it measured, and the byte budget."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fork_server import output_of
from run_samples import HELPERS, add_checkpoint, make_run, model_of, random_weights, small_spec, write_text
from torch import Tensor, nn

from specc.compiler.build import canonical, spec_of
from specc.compiler.pattern import matches
from specc.compiler.quant.gptq import Gptq
from specc.compiler.spec.check import load
from specc.runtime.artifact.deployment import Deployment
from specc.runtime.errors import EnvironmentFailure, QuantizeError, RunFailure
from specc.runtime.eval.evaluate import evaluate
from specc.runtime.eval.options import EvaluateOptions
from specc.runtime.model.parameters import assign
from specc.runtime.open_model import open_model, read_verified
from specc.runtime.quantize import pipeline
from specc.runtime.quantize.assignment import base_schemes, resolved
from specc.runtime.quantize.pipeline import QuantizeOptions, QuantizeResult, quantize
from specc.runtime.storage.committed import Committed
from specc.runtime.storage.quantized_run import quantized_artifact
from specc.runtime.storage.run_directory import Run, RunDirectoryError, locked


@dataclass(frozen=True)
class Quantized:
    """A quantized run, and the model as it was in the process that quantized it."""

    run: Run
    result: QuantizeResult
    model: nn.Module
    options: QuantizeOptions
    said: tuple[str, ...]
    progress: tuple[tuple[str, int, int], ...]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    folder = tmp_path_factory.mktemp("pipeline")
    run = make_run(folder / "run", small_spec(), str(write_text(folder / "data")))
    options = QuantizeOptions(cache=folder / "cache", max_tokens=500)
    said: list[str] = []
    progress: list[tuple[str, int, int]] = []
    models: list[nn.Module] = []

    def keep(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        assign(model, tensors)
        models.append(model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "assign", keep)
        result = quantize(run.directory, options, said.append, lambda *step: progress.append(step))
    return Quantized(run, result, models[-1], options, tuple(said), tuple(progress))


def logits_digest(model: torch.nn.Module) -> str:
    """SHA-256 of every bit of the scores of some tokens, and of the logits after them."""
    ids, targets = torch.randint(257, (2, 3, 32), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        scores = model.score(ids, targets)  # type: ignore[operator]
        logits = model.prefill(ids, torch.tensor(0), model.new_cache(3, 32))  # type: ignore[operator]
    return hashlib.sha256(scores.numpy().tobytes() + logits.numpy().tobytes()).hexdigest()


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:4]
from test_pipeline import logits_digest
import specc.runtime
print(logits_digest(specc.runtime.load(sys.argv[1])))
"""


def test_the_artifact_in_another_process_gives_the_very_bits(quantized: Quantized, tmp_path: Path) -> None:
    artifact = shutil.copy(quantized.result.artifact, tmp_path / "shipped.specc")
    words = (str(artifact), str(Path(__file__).parent), str(HELPERS))
    there = output_of(SCRIPT, *words, folder=tmp_path).decode().strip()
    assert there == logits_digest(quantized.model)
    assert there != logits_digest(open_model(quantized.run.directory).model)


def test_the_loss_it_reports_is_that_of_the_artifact(quantized: Quantized) -> None:
    scored = EvaluateOptions(data=quantized.run.data, max_tokens=500, cache=quantized.options.cache)
    assert evaluate(quantized.result.artifact, scored) == quantized.result.after
    assert evaluate(quantized.run.directory, scored) == quantized.result.before
    assert quantized.result.before != quantized.result.after
    report = json.loads((quantized.run.quantized / "report.json").read_text())
    assert report["after"]["nats"] == quantized.result.after.nats
    assert report["before"]["bpb_pieces"] == quantized.result.before.bpb_pieces


def test_it_quantizes_the_weights_that_the_run_ends_with(quantized: Quantized) -> None:
    weights = random_weights(quantized.run.spec)  # the average; the plain weights are all 7
    stored = read_verified(quantized.result.artifact).weights
    for name, tensor in stored.items():
        error = (tensor - weights[name]).square().mean().sqrt() / weights[name].square().mean().sqrt()
        assert float(error) < 0.1, name


def test_the_rows_tell_what_was_done_to_each_parameter(quantized: Quantized) -> None:
    weights = random_weights(quantized.run.spec)
    stored = read_verified(quantized.result.artifact).weights
    report = json.loads((quantized.run.quantized / "report.json").read_text())
    assert [row["name"] for row in report["parameters"]] == list(stored)
    for row in report["parameters"]:
        name = row["name"]
        delta = weights[name].double() - stored[name].double()
        assert row["mse"] == pytest.approx(float(delta.square().mean()), rel=1e-12)
        assert (row["trace"] is None) == (row["output_error"] is None)
        assert row["bits"] == {"embed.token": 8, **dict.fromkeys(quantized.result.promoted, 6)}.get(
            name, 16 if weights[name].dim() == 1 or weights[name].shape[1] == 1 else 5
        )
    by_trace = sorted(
        (row for row in report["parameters"] if row["trace"] is not None and row["name"] != "embed.token"),
        key=lambda row: -row["trace"],
    )
    assert [row["name"] for row in by_trace[:2]] == list(quantized.result.promoted) == report["promoted"]
    assert [row["name"] for row in report["parameters"] if row["promoted"]] == sorted(quantized.result.promoted)
    assert report["artifact_bytes"] == quantized.result.artifact.stat().st_size == quantized.result.size.total
    assert (report["step"], report["budget_bytes"]) == (3, None)


def test_the_resolved_spec_says_all_by_name(quantized: Quantized) -> None:
    spec, _ = load(quantized.run.quantized / "spec.json")
    assert spec == quantized.result.spec == spec_of(canonical(spec)) == read_verified(quantized.result.artifact).spec
    assert spec.quant is not None and spec.quant.promote is None
    names = [name for name, _ in quantized.model.named_parameters()]
    assert {rule.match for rule in spec.quant.rules} == set(names) and len(spec.quant.rules) == len(names)
    schemes = Deployment.of(spec).schemes
    for rule in spec.quant.rules:
        assert [name for name in names if matches(rule.match, name)] == [rule.match]
        assert schemes[rule.match].label() == rule.label()
    assert spec.model_copy(update={"quant": quantized.run.spec.quant}) == quantized.run.spec


def test_again_gives_the_same_bytes(quantized: Quantized) -> None:
    before = {path.name: path.read_bytes() for path in quantized.run.quantized.iterdir()}
    assert set(before) == {"COMMIT", "model.specc", "report.json", "spec.json"}
    (quantized.run.quantized / "stray").write_text("of another version")
    quantize(quantized.run.directory, quantized.options, lambda _: None)
    assert {path.name: path.read_bytes() for path in quantized.run.quantized.iterdir()} == before


def test_it_says_what_it_does(quantized: Quantized) -> None:
    first = [line.split(" ")[0] for line in quantized.said]
    assert first == ["before:", "calibrated", "after:", f"{quantized.result.artifact}:"]
    stages = [stage for stage, _, _ in quantized.progress]
    assert list(dict.fromkeys(stages)) == ["evaluate", "calibrate", "quantize"]
    assert [step[1:] for step in quantized.progress if step[0] == "calibrate"] == [(4, 6), (6, 6)]
    for stage in ("evaluate", "quantize"):
        last = [(done, total) for name, done, total in quantized.progress if name == stage][-1]
        assert last[0] == last[1]


def copied(quantized: Quantized, folder: Path, *overrides: str) -> tuple[Run, QuantizeOptions]:
    """Another run of the same weights, with another spec."""
    run = make_run(folder / "run", small_spec(*overrides), quantized.run.data)
    return run, quantized.options


def test_without_a_word_on_quantization_there_is_an_error(quantized: Quantized, tmp_path: Path) -> None:
    run, options = copied(quantized, tmp_path, "quant=null")
    with pytest.raises(QuantizeError, match="gpt_mini has no `quant` section"):
        quantize(run.directory, options, lambda _: None)


def test_a_run_without_a_checkpoint_is_an_error(quantized: Quantized, tmp_path: Path) -> None:
    run, options = copied(quantized, tmp_path)
    shutil.rmtree(run.checkpoints / "step_00000003")
    with pytest.raises(RunFailure, match="has no checkpoint"):
        quantize(run.directory, options, lambda _: None)


def test_schemes_that_need_no_data_do_not_calibrate(tmp_path: Path) -> None:
    data = write_text(tmp_path / "data")
    (data / "train.txt").unlink()
    rules = '[{match: "*.{residual,q_gain}", scheme: none, dtype: bf16}]'
    spec = small_spec(f"quant={{default: {{scheme: round, bits: 8}}, rules: {rules}}}")
    run = make_run(tmp_path / "run", spec, str(data))
    result = quantize(run.directory, QuantizeOptions(cache=tmp_path / "cache"), lambda _: None)
    assert result.promoted == () and all(row.output_error is None for row in result.rows)
    assert abs(result.after.nats - result.before.nats) / result.before.tokens < 0.05


def test_a_failed_write_leaves_the_old_one(quantized: Quantized, tmp_path: Path) -> None:
    run, options = copied(quantized, tmp_path)
    quantize(run.directory, options, lambda _: None)
    before = {path.name: path.read_bytes() for path in run.quantized.iterdir()}
    add_checkpoint(run, seed=9, step=4)
    for name in ("written_artifact.write_artifact", "pipeline.committed.write"):
        with pytest.MonkeyPatch.context() as patch:

            def full(*_: object, **__: object) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(f"specc.runtime.quantize.{name}", full)
            with pytest.raises(EnvironmentFailure, match="No space left on device") as caught:
                quantize(run.directory, options, lambda _: None)
            assert caught.value.hint == "free some space, or make it writable; then quantize again"
        assert {path.name: path.read_bytes() for path in run.quantized.iterdir()} == before
    assert quantize(run.directory, options, lambda _: None).step == 4
    assert (run.quantized / "model.specc").read_bytes() != before["model.specc"]
    assert [path.name for path in (run.directory / ".quantizing").iterdir()] == [".lock"]


def test_where_nothing_can_be_written_nothing_is_worked_out(quantized: Quantized, tmp_path: Path) -> None:
    """Nor where another process quantizes the same run."""
    run, options = copied(quantized, tmp_path)
    said: list[str] = []
    with locked(run.staged.parent), pytest.raises(RunDirectoryError, match="in use by another process"):
        quantize(run.directory, options, said.append)
    shutil.rmtree(run.staged.parent)
    run.staged.parent.write_text("in the way")
    with pytest.raises(EnvironmentFailure, match="cannot write"):
        quantize(run.directory, options, said.append)
    assert said == []


# The byte budget


def run_with(quantized: Quantized, folder: Path, *overrides: str) -> QuantizeResult:
    folder.mkdir()
    run, options = copied(quantized, folder, *overrides)
    return quantize(run.directory, options, lambda _: None)


def test_as_many_are_promoted_as_the_budget_allows(quantized: Quantized, tmp_path: Path) -> None:
    ample = "quant.budget_bytes=99999"
    results = {
        count: run_with(quantized, tmp_path / str(count), f"quant.promote.count={count}", ample) for count in (2, 3, 4)
    }
    totals = {count: result.size.total for count, result in results.items()}
    assert totals[2] + 20 < totals[3] and totals[3] + 20 < totals[4]
    budget = (totals[3] + totals[4]) // 2
    free = "quant.promote={bits: 6, by: hessian_trace}"
    result = run_with(quantized, tmp_path / "budget", free, f"quant.budget_bytes={budget}")
    assert result.promoted == results[3].promoted
    assert result.artifact.stat().st_size == result.size.total <= budget == result.budget
    assert result.spec.quant is not None and result.spec.quant.budget_bytes == budget
    capped = run_with(quantized, tmp_path / "capped", "quant.promote.count=2", f"quant.budget_bytes={budget}")
    assert capped.promoted == results[2].promoted


def test_a_base_over_the_budget_is_an_error_with_both_numbers(quantized: Quantized, tmp_path: Path) -> None:
    whole = run_with(quantized, tmp_path / "whole", "quant.promote=null", "quant.budget_bytes=99999").size.total
    run, options = copied(quantized, tmp_path / "small", "quant.promote=null", "quant.budget_bytes=10000")
    with pytest.raises(QuantizeError, match=r"takes ([\d,]+) bytes .* the budget is 10,000") as caught:
        quantize(run.directory, options, lambda _: None)
    least = int(caught.value.message.split(" ")[3].replace(",", ""))
    assert abs(least - whole) < 10  # the budget itself stands in the spec in the artifact
    assert list(run.quantized.iterdir()) == []


def test_resolved_rules_keep_every_setting() -> None:
    spec = small_spec("quant.default={scheme: gptq, bits: 5, damping: 0.03, clip_quantiles: [0.9, 1.0]}")
    params = model_of(spec).programs.params
    schemes = base_schemes(spec.quant, params)
    again = base_schemes(spec_of(canonical(resolved(spec, schemes))).quant, params)
    assert again == schemes
    up = again["blocks.0.mlp.up"]
    assert isinstance(up, Gptq) and (up.damping, up.clip_quantiles) == (0.03, (0.9, 1.0))


class Killed(BaseException):
    """Ends a process at once, as far as anything here can see."""


def test_a_kill_at_each_rename_leaves_the_old_or_the_new(quantized: Quantized, tmp_path: Path) -> None:
    """Also between the two that put the new in the old one's place: whoever asks next finishes it."""
    run, options = copied(quantized, tmp_path)
    quantize(run.directory, options, lambda _: None)
    old = (run.quantized / "model.specc").read_bytes()
    add_checkpoint(run, seed=9, step=4)
    shutil.copytree(run.directory, tmp_path / "as_it_was")
    results = []
    for last in range(1, 20):
        shutil.rmtree(run.directory)
        shutil.copytree(tmp_path / "as_it_was", run.directory)
        left, real = last, os.rename

        def rename(source: Path, to: Path, real: Callable[[Path, Path], None] = real) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            real(source, to)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "rename", rename)
            try:
                quantize(run.directory, options, lambda _: None)
            except Killed:
                pass
            else:
                break
        results.append(quantized_artifact(run, lambda _: None).read_bytes())
        assert read_verified(run.quantized / "model.specc").same_code
        assert Committed.open(run.quantized).in_full_size()
    new = (run.quantized / "model.specc").read_bytes()
    assert results == [old, old, new] and old != new  # making it, moving the old one, moving the new one
    assert quantize(run.directory, options, lambda _: None).step == 4
    assert [path.name for path in (run.directory / ".quantizing").iterdir()] == [".lock"]
