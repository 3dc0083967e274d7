"""A whole run on pairs of lines, from the spec: training, resuming, scoring every split and files of lines."""

import json
from pathlib import Path

import pytest
from log_lines import read_log

from specc.cli.app import run as command
from specc.compiler.build import canonical
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec
from specc.runtime.artifact.artifact import ArtifactContents, write_artifact
from specc.runtime.artifact.deployment import Deployment
from specc.runtime.artifact.table import described
from specc.runtime.data.documents.corpus import is_val
from specc.runtime.data.errors import DataError
from specc.runtime.data.lines.polynomial_task import training_set
from specc.runtime.distributed.world import World
from specc.runtime.eval.evaluate import evaluate
from specc.runtime.eval.lines import ExactMatches
from specc.runtime.eval.options import EvaluateError, EvaluateOptions
from specc.runtime.metrics.exact_match import ExactMatch
from specc.runtime.open_model import read_verified
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.train.loop import TrainResult
from specc.runtime.train.train import TrainOptions, train

SPEC = Path(__file__).parents[3] / "specs" / "poly_attn.yaml"
SMALL = (
    "targets=[cpu]",
    "train.data={kind: polynomial, lines: 600, seed: 1}",
    "train.batch=32",
    "train.steps=8",
    "train.schedule={}",
    "train.qat=null",
    "train.teacher_forcing={at: [[0, 1.0], [6, 0.5]], by: step}",
    "train.validate_every=0",
    "train.validate_tokens=300",
    "train.optimizers.0.lr=0.01",
    "eval={metric: exact_match, lines: 40, batch: 32}",
)


def small(*overrides: str) -> Spec:
    return load(SPEC, (*SMALL, *overrides))[0]


def go(folder: Path, spec: Spec, data: str = "polynomial", **more: object) -> TrainResult:
    said: list[str] = []
    options = TrainOptions(spec, "cpu", data, folder, **more)  # type: ignore[arg-type]
    return train(options, said.append, World.alone())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return go(tmp_path_factory.mktemp("lines") / "run", small()).run


def test_it_trains_logs_and_scores(run: Path) -> None:
    records = read_log(run / "log.jsonl")
    steps = [record for record in records if record["event"] == "step"]
    assert len(steps) == 8 and steps[-1]["loss"] < steps[0]["loss"] - 0.4
    assert all(step["tokens_per_second"] > step["samples_per_second"] > 0 for step in steps)
    validation = next(record for record in records if record["event"] == "validation")
    assert set(validation) == {
        "event", "step", "weights", "nats", "tokens", "lines", "exact_match", "token_accuracy"
    }  # fmt: skip
    assert 280 < validation["tokens"] <= 300
    end = records[-1]
    assert end["samples"] == 8 * 32 and end["tokens"] > 20 * end["samples"]
    assert end["tokens_per_second"] == pytest.approx(end["tokens"] / end["seconds"])


def test_resuming_is_exact(run: Path, tmp_path: Path) -> None:
    """Also where the first part ends before, and the second after, the model's own tokens are fed."""
    go(tmp_path / "parts", small(), stop_after_steps=5)
    result = go(tmp_path / "parts", small(), resume="auto")
    assert result.step == 8
    both = ([r["loss"] for r in read_log(at / "log.jsonl") if r["event"] == "step"] for at in (run, tmp_path / "parts"))
    assert next(both) == next(both)


def test_every_split_is_scored(run: Path) -> None:
    result = evaluate(run, EvaluateOptions())
    assert isinstance(result, ExactMatches)
    assert [subset.name for subset in result.sets] == ["same-law", "duplicate-free", "structure-disjoint"]
    assert [subset.score.lines for subset in result.sets] == [40, 40, 40]
    seen = [subset.overlap for subset in result.sets]
    assert seen[0] is not None and seen[0].structures > 0
    assert seen[1] is not None and seen[1].lines == 0
    assert seen[2] is not None and (seen[2].lines, seen[2].structures) == (0, 0)
    (alone,) = evaluate(run, EvaluateOptions(data="polynomial:duplicate-free", batch=7)).sets  # type: ignore[union-attr]
    assert isinstance(alone.score, ExactMatch)
    assert alone.score.nats == pytest.approx(result.sets[1].score.nats, rel=1e-5)
    assert alone.score.tokens == result.sets[1].score.tokens
    assert result.report()[2].endswith("0.0 % of lines are training lines, 0.0 % have coefficients of a training line")
    assert result.facts()[1]["seen"] == 0


def test_a_file_of_lines_is_scored(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("\n".join(training_set(1, 20).texts()) + "\n")
    (subset,) = evaluate(run, EvaluateOptions(data=str(path))).sets  # type: ignore[union-attr]
    assert (subset.name, subset.score.lines) == ("some.txt", 20)
    assert subset.overlap is not None and subset.overlap.lines == 1
    (part,) = evaluate(run, EvaluateOptions(data=str(path), max_tokens=50)).sets  # type: ignore[union-attr]
    assert part.score.tokens <= 50 and 1 <= part.score.lines < 20
    path.write_text("x+1=1+x\n")  # no product, but of the same characters
    (other,) = evaluate(run, EvaluateOptions(data=str(path))).sets  # type: ignore[union-attr]
    assert (other.score.lines, other.overlap) == (1, None)
    path.write_text("x+1=1+w\n")
    with pytest.raises(DataError, match="'w', which is not in the vocabulary"):
        evaluate(run, EvaluateOptions(data=str(path)))


def test_what_cannot_be_scored_is_refused(run: Path) -> None:
    with pytest.raises(EvaluateError, match="--stride does not apply to a model that maps lines to lines"):
        evaluate(run, EvaluateOptions(stride=4))
    with pytest.raises(DataError, match="unknown split 'mine'"):
        evaluate(run, EvaluateOptions(data="polynomial:mine"))


def test_a_file_of_lines_is_trained_on_but_for_a_tenth(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    lines = training_set(9, 300).texts()
    path.write_text("\n".join(lines) + "\n")
    result = go(tmp_path / "run", small("train.steps=2", "train.teacher_forcing=null"), str(path))
    (subset,) = evaluate(result.run, EvaluateOptions()).sets  # type: ignore[union-attr]
    assert subset.score.lines == sum(is_val(line.encode()) for line in lines)
    assert subset.overlap is None and subset.held_out
    with pytest.raises(DataError, match="the data is a file"):
        go(tmp_path / "fresh", small("train.data.fresh=true"), str(path))
    path.write_text("x**2=x**2\n")
    with pytest.raises(DataError, match="too few lines for a validation split"):
        go(tmp_path / "few", small(), str(path))


def test_the_training_file_is_known_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever path, and from an artifact that is elsewhere, only the lines that training left out are scored;
    of any other file nothing is said about what was trained on."""
    path = tmp_path / "lines.txt"
    lines = training_set(9, 300).texts()
    path.write_text("\n".join(lines) + "\n")
    run = go(tmp_path / "run", small("train.steps=1", "train.teacher_forcing=null"), str(path)).run
    quantize(run, QuantizeOptions(max_tokens=50), lambda _: None)
    artifact = tmp_path / "away" / "model.specc"
    artifact.parent.mkdir()
    artifact.write_bytes((run / "quantized" / "model.specc").read_bytes())
    (tmp_path / "link.txt").symlink_to(path)
    (tmp_path / "copy.txt").write_bytes(path.read_bytes())
    (tmp_path / "more.txt").write_text("\n".join([*lines, "x*(x-1)=x**2-x"]) + "\n")
    monkeypatch.chdir(tmp_path)
    held_out = sum(is_val(line.encode()) for line in lines)
    for model, paths in ((run, ("lines.txt", "link.txt")), (artifact, ("copy.txt", "away/../lines.txt"))):
        for data in paths:
            (subset,) = evaluate(model, EvaluateOptions(data=data, hopeless=1)).sets  # type: ignore[union-attr]
            assert (subset.score.lines + subset.untried, subset.held_out, subset.overlap) == (held_out, True, None)
        (more,) = evaluate(model, EvaluateOptions(data="more.txt", hopeless=1)).sets  # type: ignore[union-attr]
        assert (more.score.lines + more.untried, more.held_out, more.overlap) == (301, False, None)
        assert "overlap with the training data unknown" in str(more)
        split = evaluate(model, EvaluateOptions(data="polynomial:duplicate-free", hopeless=1))
        assert split.sets[0].overlap is None  # type: ignore[union-attr]


def test_an_artifact_of_generated_lines_claims_what_its_digests_tell(run: Path, tmp_path: Path) -> None:
    quantize(run, QuantizeOptions(max_tokens=50), lambda _: None)
    artifact = run / "quantized" / "model.specc"
    options = EvaluateOptions(data="polynomial:duplicate-free", hopeless=1)
    (known,) = evaluate(artifact, options).sets  # type: ignore[union-attr]
    assert known.overlap is not None and known.overlap.lines == 0
    old = read_verified(artifact)
    deployment = Deployment.of(old.spec)
    contents = ArtifactContents(
        canonical(old.spec).encode(),
        deployment.layout,
        old.stored.tensors,
        deployment.interface,
        deployment.code,
        described(deployment.schemes, old.stored.tensors),
    )
    write_artifact(tmp_path / "old.specc", contents, quality=1)
    (unknown,) = evaluate(tmp_path / "old.specc", options).sets  # type: ignore[union-attr]
    assert unknown.score.nats == known.score.nats and unknown.overlap is None


def test_empty_data_are_refused(run: Path) -> None:
    with pytest.raises(EvaluateError, match="--data is empty"):
        evaluate(run, EvaluateOptions(data=""))


def test_a_missing_file_names_what_is_near(run: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("x*(x-1)=x**2-x\n")
    with pytest.raises(DataError) as caught:
        evaluate(run, EvaluateOptions(data=str(tmp_path / "line.txt")))
    assert f"did you mean {tmp_path / 'lines.txt'}?" in caught.value.hint and "stdlib" not in caught.value.hint


def test_fresh_samples_train_and_what_is_held_out_stays_unseen(tmp_path: Path) -> None:
    spec = small("train.steps=3", "train.teacher_forcing=null", "train.data.fresh=true", "train.data.lines=64")
    result = go(tmp_path / "run", spec)
    output = evaluate(result.run, EvaluateOptions(max_tokens=100))
    assert isinstance(output, ExactMatches) and [subset.overlap for subset in output.sets] == [None, None, None]


def test_the_command_line_selects_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--data polynomial` names the kind where the spec states none, and leaves one that it states as it is."""
    text = SPEC.read_text()
    start = text.index("  data: {")
    path = tmp_path / "poly_none.yaml"
    path.write_text(text[:start] + text[text.index("\n", start) + 1 :])
    words = [word for override in SMALL for word in ("--set", override) if "train.data=" not in override]
    words += ["--steps", "1", "--data", "polynomial"]
    small_set = ["--set", "eval.lines=2"]
    assert command(["train", str(path), "--run", str(tmp_path / "none"), *words, *small_set]) == 0
    assert "1 steps in" in (said := capsys.readouterr()).out and "% exact" in said.out
    assert json.loads((tmp_path / "none" / "spec.json").read_text())["train"]["data"] == {
        "fresh": False, "kind": "polynomial", "lines": 800_000, "seed": 42
    }  # fmt: skip
    assert "train.data={kind: polynomial}" in (tmp_path / "none" / "run.json").read_text()
    for more in ([], ["--data", "polynomial"]):
        run = tmp_path / f"stated{len(more)}"
        words = [word for override in (*SMALL, "eval.lines=2") for word in ("--set", override)]
        assert command(["train", str(SPEC), "--run", str(run), "--steps", "1", *words, *more]) == 0
        assert json.loads((run / "spec.json").read_text())["train"]["data"]["lines"] == 600
        assert json.loads((run / "run.json").read_text())["data"] == "polynomial"
    capsys.readouterr()
    assert command(["eval", str(run), "--json"]) == 0
    assert [subset["name"] for subset in json.loads(capsys.readouterr().out)] == [
        "same-law", "duplicate-free", "structure-disjoint"
    ]  # fmt: skip
    gpt = SPEC.with_name("gpt_mini.yaml")
    assert command(["train", str(gpt), "--run", str(tmp_path / "gpt"), "--data", "polynomial"]) == 2
    assert "S222 `polynomial` gives pairs of lines" in capsys.readouterr().err
