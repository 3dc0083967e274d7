"""`evaluate`: the number is the model's loss over the split, whatever the windows."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_samples import make_run, model_of, random_weights, small_spec, write_text

from specc.runtime.data.errors import DataError
from specc.runtime.errors import RunFailure
from specc.runtime.eval.evaluate import evaluate
from specc.runtime.eval.options import EvaluateError, EvaluateOptions
from specc.runtime.metrics.bits_per_byte import BitsPerByte
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.run_facts import RunFacts
from specc.runtime.storage import checkpoint
from specc.runtime.storage.evaluations import FOLDER, evaluation_line, recorded_evaluations
from specc.runtime.storage.run_directory import Run, RunDirectoryError
from specc.runtime.train.train import TrainOptions, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("evaluate")
    trained = make_run(folder / "run", small_spec(), str(write_text(folder / "data")))
    quantize(trained.directory, QuantizeOptions(cache=folder / "cache"), lambda _: None)
    return trained


def scored(run: Run, stride: int | None = None, max_tokens: int | None = None) -> EvaluateOptions:
    return EvaluateOptions(stride=stride, max_tokens=max_tokens, cache=run.directory.parent / "cache")


def expected_nats(run: Run, stride: int, last: int | None, window: int = 32) -> tuple[float, int, int]:
    """Nats, tokens and bytes by the definition: each target once, one window at a time, in float64."""
    longer = run.spec.model.model_copy(update={"context": max(window, 32)})
    model = model_of(run.spec.model_copy(update={"model": longer}), fuse=False).model.double()
    documents = (Path(run.data) / "val.txt").read_bytes().split(b"<|endoftext|>\n")
    tokens = [token for document in documents for token in (256, *document)]
    last = len(tokens) - 1 if last is None else last
    nats, scored_to, end = 0.0, 0, min(window, last)
    while scored_to < last:
        ids = torch.tensor([tokens[max(0, end - window) : end]])
        targets = torch.tensor([tokens[max(0, end - window) + 1 : end + 1]])
        with torch.no_grad():
            losses = model.score(ids, targets)[0]  # type: ignore[operator]
        nats += float(losses[-(end - scored_to) :].sum())
        scored_to, end = end, min(end + stride, last)
    return nats, last, sum(token != 256 for token in tokens[1 : last + 1])


@pytest.mark.parametrize(("stride", "max_tokens"), [(None, None), (32, 100), (7, None), (1, 80), (32, 20)])
def test_it_is_the_loss_of_every_token_once(run: Run, stride: int | None, max_tokens: int | None) -> None:
    result = evaluate(run.directory, scored(run, stride, max_tokens))
    nats, tokens, size = expected_nats(run, stride or 32, max_tokens)
    assert (result.tokens, result.piece_bytes) == (tokens, size)
    assert result.nats == pytest.approx(nats, rel=1e-6)
    assert result.bpb == result.bpb_pieces == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    whole = max_tokens is None
    assert ("==" in result.audit()) == whole and ("unknown" in result.audit()) != whole


@pytest.mark.parametrize(("window", "stride"), [(16, None), (20, 7), (1, 1), (32, 32), (64, None), (48, 16)])
def test_windows_may_be_shorter_or_longer_than_the_context(run: Run, window: int, stride: int | None) -> None:
    options = replace(scored(run, stride, 150), window=window)
    result = evaluate(run.directory, options)
    nats, tokens, size = expected_nats(run, stride or window, 150, window)
    assert (result.tokens, result.piece_bytes) == (tokens, size)
    assert result.nats == pytest.approx(nats, rel=1e-6)


def test_learned_positions_end_with_the_context(run: Run, tmp_path: Path) -> None:
    spec = small_spec("model.embed=[{kind: token}, {kind: positions}]").model_copy(update={"quant": None})
    other = make_run(tmp_path / "run", spec, run.data)
    options = EvaluateOptions(cache=run.directory.parent / "cache", max_tokens=99, window=33)
    with pytest.raises(
        EvaluateError, match=r"the window 33 is not in 1 \.\. 32, the context of the model, .* positions"
    ):
        evaluate(other.directory, options)
    assert evaluate(other.directory, replace(options, window=32)).tokens == 99


def test_a_spec_may_state_its_windows(run: Run, tmp_path: Path) -> None:
    """A shorter window that is asked for is no error where the spec's stride is longer: it then is the stride."""
    other = make_run(tmp_path / "run", small_spec("eval={batch: 4, window: 16, stride: 12}"), run.data)
    cache = run.directory.parent / "cache"
    results = [evaluate(other.directory, EvaluateOptions(cache=cache, max_tokens=99, window=w)) for w in (None, 16, 8)]
    same = [replace(scored(run, stride, 99), window=window) for window, stride in ((16, 12), (16, 12), (8, 8))]
    assert results == [evaluate(run.directory, options) for options in same]


def test_more_context_scores_each_token_with_more(run: Run) -> None:
    results = [evaluate(run.directory, scored(run, stride)).nats for stride in (32, 8)]
    assert results[0] != results[1]


def test_the_quantized_model_is_another_one(run: Run) -> None:
    plain = evaluate(run.directory, scored(run))
    inside = evaluate(run.directory, scored(run), quantized=True)
    assert inside.nats != plain.nats
    assert abs(inside.nats - plain.nats) / plain.tokens < 0.2
    data = EvaluateOptions(data=run.data, cache=run.directory.parent / "cache")
    assert evaluate(run.quantized / "model.specc", data) == inside


def test_the_text_is_known_by_its_content(tmp_path: Path) -> None:
    """A run says of the text that it scores whether it is what training left out, what it read, or neither."""
    text = write_text(tmp_path / "text")
    options = TrainOptions(small_spec("train.steps=1"), "cpu", str(text), tmp_path / "run", cache=tmp_path / "cache")
    run = train(options, lambda _: None).run

    def held_out(folder: Path) -> bool | None:
        result = evaluate(run, EvaluateOptions(data=str(folder), cache=tmp_path / "cache", max_tokens=50))
        assert isinstance(result, BitsPerByte) and len(result.report()) == 3
        return result.held_out

    moved, swapped, other = (tmp_path / name for name in ("moved", "swapped", "other"))
    for folder in (moved, swapped, other):
        folder.mkdir()
        (folder / "train.txt").write_bytes((text / "train.txt").read_bytes())
    (moved / "val.txt").write_bytes((text / "val.txt").read_bytes())
    (swapped / "val.txt").write_bytes((text / "train.txt").read_bytes())
    (other / "val.txt").write_bytes((text / "val.txt").read_bytes() + b"and more")
    assert [held_out(folder) for folder in (moved, swapped, other)] == [True, False, None]
    shutil.rmtree(text)
    other.rename(text)  # the run's own folder, with another validation split
    assert held_out(text) is None
    with pytest.raises(
        RunDirectoryError, match=r"the validation split of .* is not the validation split with which the run began"
    ):
        train(replace(options, resume="auto"), lambda _: None)
    shutil.rmtree(text)
    moved.rename(text)
    assert train(replace(options, resume="auto"), lambda _: None).step == 1


def test_the_score_of_data_is_in_the_run(run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.directory, copy, ignore=shutil.ignore_patterns(FOLDER))
    other = write_text(tmp_path / "other", seed=5)
    options = replace(scored(run, 16, 100), data=str(other))
    for _ in range(2):
        result = evaluate(copy, options)
    evaluate(copy, scored(run), quantized=True)
    assert isinstance(result, BitsPerByte)
    recorded = {each["file"]: each for each in recorded_evaluations(copy, print)}
    assert recorded.keys() == {"other", "data"}
    assert recorded["other"]["task"] == "data, stride 16, max_tokens 100" and recorded["other"]["model"] == "run"
    measures = recorded["other"]["measures"]
    assert measures["bpb"]["value"] == result.bpb and measures["nats_per_token"]["value"] == result.nats / 100
    assert recorded["data"]["model"] == "quantized"
    scores = [
        score for score in RunFacts.read(copy).scores() if score.data == "other (data, stride 16, max_tokens 100)"
    ]
    assert [(score.metric, score.value) for score in scores] == [(name, m["value"]) for name, m in measures.items()]
    assert "other (data, stride 16, max_tokens 100, run, step 3): bpb" in evaluation_line(recorded["other"])
    moved = tmp_path / "elsewhere"
    other.rename(moved)
    write_text(other, seed=6)  # the name remains, the content changes
    for folder in (moved, other):
        evaluate(copy, replace(options, data=str(folder)))
    known = {(each["file"], each["data_sha256"] == recorded["other"]["data_sha256"]): each["sha256"]
             for each in recorded_evaluations(copy, print) if each["model"] == "run"}  # fmt: skip
    assert known.keys() == {("other", True), ("elsewhere", True), ("other", False)}
    assert known["elsewhere", True] == known["other", True] == recorded["other"]["sha256"] != known["other", False]


def test_a_run_that_cannot_be_written_is_scored_all_the_same(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    shutil.copytree(run.directory, tmp_path / "run", ignore=shutil.ignore_patterns(FOLDER))
    (tmp_path / "run/evaluations").write_text("a file")
    assert evaluate(tmp_path / "run", scored(run, None, 50), say=said.append).tokens == 50  # type: ignore[union-attr]
    assert "not recorded in the run: " in said[-1]


def test_progress_counts_tokens(run: Run) -> None:
    seen: list[tuple[int, int]] = []
    result = evaluate(run.directory, scored(run), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (result.tokens, result.tokens) and seen == sorted(seen) and len(seen) > 2


def test_what_cannot_be_scored_is_a_usage_error(run: Run) -> None:
    with pytest.raises(EvaluateError, match="does not state its training data") as caught:
        evaluate(run.quantized / "model.specc", EvaluateOptions())
    assert caught.value.exit_code == 2
    for stride in (33, -1):
        with pytest.raises(EvaluateError, match=r"must be from 1 to 32"):
            evaluate(run.directory, scored(run, stride))
    with pytest.raises(EvaluateError, match="cannot score 0 tokens"):
        evaluate(run.directory, scored(run, max_tokens=0))
    with pytest.raises(DataError, match="no such file"):
        evaluate(run.directory, EvaluateOptions(data="/nowhere", cache=run.directory.parent / "cache"))


def test_a_broken_model_is_a_failure(run: Run, tmp_path: Path) -> None:
    broken = make_run(tmp_path / "run", small_spec(), run.data, step=1)
    snapshot = checkpoint.load(broken.checkpoints / "step_00000001")
    assert snapshot.average is not None
    weights = random_weights(broken.spec) | {"embed.token": torch.full((257, 32), float("nan"))}
    checkpoint.save(broken.checkpoints, replace(snapshot, step=2, average=weights))
    with pytest.raises(RunFailure, match="the loss is nan"):
        evaluate(broken.directory, scored(run))
