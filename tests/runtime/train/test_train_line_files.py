"""Runs on files of pairs of lines, `data: {kind: lines}`: training, resuming, the held-out part, and damaged files."""

import gzip
import json
from itertools import compress
from pathlib import Path

import pytest
from log_lines import read_log
from test_train_lines import SMALL, SPEC, go
from test_train_lines import small as generated

from specc.cli.app import run as command
from specc.compiler.build import plan_spec
from specc.compiler.spec.check import load
from specc.compiler.spec.data.lines import LinesData
from specc.compiler.spec.spec import Spec
from specc.runtime.bench.dry_run import dry_run
from specc.runtime.data.errors import DataError, DataIntegrityError, LineError
from specc.runtime.data.lines.line_file import LineFile
from specc.runtime.data.tokenizers.from_spec import characters_of
from specc.runtime.errors import RuntimeFailure
from specc.runtime.eval.evaluate import evaluate
from specc.runtime.eval.lines import SetScore
from specc.runtime.eval.options import EvaluateError, EvaluateOptions
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.report.sampling import SampleOptions, samples_of
from specc.runtime.storage.run_directory import Run, RunDirectoryError

LINES = [f"{i}*z={2 * i}*z" for i in range(300)]
DATA = "train.data={kind: lines, validation_fraction: 0.2, seed: 3}"


def small(*overrides: str) -> Spec:
    return generated(DATA, "train.steps=4", "train.teacher_forcing=null", *overrides)


def written(folder: Path, lines: list[str] = LINES) -> str:
    path = folder / "lines.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def held_out(data: str, **settings: object) -> list[str]:
    kind = LinesData.model_validate({"kind": "lines", "validation_fraction": 0.2, "seed": 3, **settings})
    file = LineFile.read(data, kind, characters_of(small()), 30)
    return list(compress(file.sources, file.held_out))


def scored(model: Path, **options: object) -> SetScore:
    (only,) = evaluate(model, EvaluateOptions(**options)).sets  # type: ignore[union-attr, arg-type]
    return only


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    return go(folder / "run", small(), written(folder)).run


def test_the_held_out_part_is_scored_without_data_and_by_the_name_of_the_file(run: Path, tmp_path: Path) -> None:
    count = len(held_out(Run.open(run).data))
    assert 40 < count < 80
    for data in (None, Run.open(run).data, written(tmp_path)):
        result = scored(run, data=data)
        assert (result.name, result.score.lines, result.held_out) == ("lines.txt", count, True)
    other = scored(run, data=written(tmp_path, [*LINES, "1=1"]))
    assert (other.score.lines, other.held_out, other.overlap) == (301, False, None)
    data = Path(Run.open(run).data)
    data.write_text(data.read_text() + "1=1\n")
    with pytest.raises(EvaluateError, match="has changed since"):
        scored(run)
    data.write_text("".join(f"{line}\n" for line in LINES))
    assert scored(run).held_out
    validation = next(record for record in read_log(run / "log.jsonl") if record["event"] == "validation")
    assert 0 < validation["lines"] <= count


def test_settings_choose_the_lines_that_are_held_out(tmp_path: Path) -> None:
    data = written(tmp_path)
    usual, other = held_out(data), held_out(data, seed=4)
    assert set(usual) != set(other) and usual == held_out(data)
    assert len(held_out(data, validation_fraction=0.5)) > 2 * len(usual)
    spaced = written(tmp_path, [line.replace("=", "->") for line in LINES])
    assert held_out(spaced, separator="->", validation_fraction=None, seed=0)
    with pytest.raises(DataError, match=r"lines.txt:1: expected source->target, not '0\*z=0\*z'"):
        held_out(written(tmp_path), separator="->")


def test_resuming_is_exact_and_needs_the_same_lines(run: Path, tmp_path: Path) -> None:
    data = written(tmp_path)
    go(tmp_path / "parts", small(), data, stop_after_steps=2)
    with pytest.raises(RunDirectoryError, match="is not the training split with which the run began"):
        go(tmp_path / "parts", small(), written(tmp_path, LINES[1:]), resume="auto")
    go(tmp_path / "parts", small(), written(tmp_path), resume="auto")
    both = ([r["loss"] for r in read_log(at / "log.jsonl") if r["event"] == "step"] for at in (run, tmp_path / "parts"))
    assert next(both) == next(both)


def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    def refused(data: str, error: type[RuntimeFailure] = DataError, *overrides: str) -> str:
        with pytest.raises(error) as caught:
            go(tmp_path / "run", small(*overrides), data)
        assert not (tmp_path / "run").exists()
        return f"{caught.value.message}; {caught.value.hint}"

    data = written(tmp_path)
    assert f"did you mean {data}?" in refused(str(tmp_path / "line.txt"))
    assert "Is a directory" in refused(str(tmp_path))
    packed = gzip.compress(Path(data).read_bytes())
    (tmp_path / "lines.gz").write_bytes(packed[: len(packed) // 2])
    assert "damaged compressed file" in refused(str(tmp_path / "lines.gz"), DataIntegrityError)
    (tmp_path / "latin.txt").write_bytes(b"1=1\n\xe9=1\n")
    assert "not valid UTF-8 at byte 4" in refused(str(tmp_path / "latin.txt"))
    assert "has no lines" in refused(written(tmp_path, []))
    assert "lines.txt:2: expected source=target, not ''" in refused(written(tmp_path, ["1=1", "", "2=2"]))
    assert "lines.txt:1: expected source=target, not '1='" in refused(written(tmp_path, ["1="]))
    lacks = refused(written(tmp_path, ["1=1", "1=é"]), LineError)
    assert "lines.txt:2: 'é' has 'é', which is not in the vocabulary" in lacks
    few = "train.data.validation_fraction=1e-9"
    assert "too few lines for a validation split" in refused(written(tmp_path), DataError, few)
    most = "train.data.validation_fraction=0.999999999"
    assert "too few lines for a training split" in refused(written(tmp_path), DataError, most)


@pytest.mark.parametrize("spec", [small(), generated("train.steps=1", "train.teacher_forcing=null")])
def test_an_artifact_of_a_file_is_not_scored_on_generated_lines(spec: Spec, tmp_path: Path) -> None:
    data = written(tmp_path)
    run = go(tmp_path / "run", spec, data).run
    quantize(run, QuantizeOptions(max_tokens=50), lambda _: None)
    artifact = run / "quantized" / "model.specc"
    with pytest.raises(EvaluateError, match="was trained on a file of lines"):
        evaluate(artifact, EvaluateOptions())
    assert scored(artifact, data=data).held_out


def test_the_report_shows_held_out_lines(run: Path) -> None:
    opened = Run.open(run)
    samples = samples_of(opened, None, SampleOptions(), False, lambda _: None).samples
    assert [sample.prompt for sample in samples] == held_out(opened.data)[:4]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for override in (*SMALL, DATA, "train.steps=1") for word in ("--set", override)]
    run, data = str(tmp_path / "run"), written(tmp_path)
    assert command(["train", str(SPEC), "--run", run, *words]) == 2
    assert "data of kind `lines` have no default" in (said := capsys.readouterr().err) and "--data" in said
    assert not Path(run).exists()
    assert command(["train", str(SPEC), "--dry-run", *words]) == 0
    assert "not checked: name it with --data" in capsys.readouterr().out
    assert command(["train", str(SPEC), "--run", run, *words, "--data", data]) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data"] == data
    capsys.readouterr()
    assert command(["eval", run, "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert only["name"] == "lines.txt" and only["held_out"]
    for part in ("table", "decode"):
        assert command(["bench", str(SPEC), "--target", "cpu", "--only", part, *words]) != 0
        assert "needs lines that specc generates, but data of kind `lines` are in files" in capsys.readouterr().err


def test_a_spec_of_lines_is_planned_and_checked(tmp_path: Path) -> None:
    plan_spec(SPEC, ("train.data={kind: lines}",))
    data, spec = written(tmp_path), load(SPEC, (*SMALL, "train.data={kind: lines}"))[0]
    lines = dry_run(spec, "cpu", data, (), tmp_path, lambda _: None).lines()
    assert any(line.startswith(f"data         {data}: train ") for line in lines)
