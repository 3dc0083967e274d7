"""Messages of a submission about its data and its machine, before it trains."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from run_samples import SMALL, SPEC, write_text
from submissions import Submission, alone

from specc.cli.app import run as specc
from specc.runtime.artifact.codecs import Codec
from specc.runtime.data.shards.pack import PackOptions, pack
from specc.runtime.data.shards.record import RECORD
from specc.runtime.data.shards.shard_file import ShardWriter
from specc.runtime.eval.evaluate import evaluate
from specc.runtime.eval.options import EvaluateOptions
from specc.runtime.submission.export import export_submission
from specc.runtime.submission.names import CODE, WEIGHTS


def packed(folder: Path, **changes: object) -> Path:
    """Shards that fit the model, beside a record with other fields."""
    pack(PackOptions((str(write_text(folder / "text")),), folder / "packed", "bytes", shard_tokens=2000))
    record = folder / "packed" / RECORD
    record.write_text(json.dumps(json.loads(record.read_text()) | changes))
    return folder / "packed"


def test_shards_that_are_not_those_of_their_record_are_refused(submission: Submission, tmp_path: Path) -> None:
    """Of another tokenizer, whose bytes would be counted by the wrong table; and with shards missing, or no record."""
    code = shutil.copytree(submission.folder, tmp_path / "out")
    other = packed(tmp_path / "other", tokenizer="else.model", tokenizer_digest="0" * 64, vocab=300)
    cut, none = packed(tmp_path / "cut"), packed(tmp_path / "none")
    (cut / "tokens_train_000001.bin").unlink()
    (none / RECORD).write_text('{"format": 1, "splits": {"train": 5}}')
    for command, data, status, words in (
        ("train", other, 2, "has tokens of else.model (300 ids), not of bytes (257 ids)"),
        ("score", other, 2, "has tokens of else.model (300 ids), not of bytes (257 ids)"),
        ("train", cut, 5, f"has no tokens_train_000001.bin, which {RECORD} lists"),
        ("train", none, 5, f"{none / RECORD}: the text is unreadable"),
    ):
        done = alone(submission, code, command, "--data", str(data))
        assert done.returncode == status and words in done.stderr, (command, data, done.stderr)
        assert not done.stdout and "Traceback" not in done.stderr


def test_without_data_it_takes_the_folder_of_its_vocabulary(submission: Submission, tmp_path: Path) -> None:
    """Where the challenge has it; what the record there tells of the documents counts as for specc."""
    code = shutil.copytree(submission.folder, tmp_path / "out")
    for vocab in (257, 1024):
        shutil.copytree(packed(tmp_path / str(vocab)), code / f"data/datasets/fineweb10B_sp{vocab}")
    (code / f"data/datasets/fineweb10B_sp1024/{RECORD}").write_text("another set")
    done = alone(submission, code, "score")
    assert done.returncode == 0, done.stderr
    facts = evaluate(code / WEIGHTS, EvaluateOptions(str(tmp_path / "257/packed"))).facts()
    assert json.loads(done.stdout) == facts and json.loads(done.stdout)["document_bytes"]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([65, 66, 67], "the stream starts with token 65, not with the separator 256 of bytes"),
        ([256], "nothing to score: the stream has 1 tokens"),
    ],
)
def test_a_val_that_cannot_be_scored_is_told_before_training(
    submission: Submission, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokens: list[int], words: str
) -> None:
    for name, values in (("train", [256, *b"text" * 999]), ("val", tokens)):
        with ShardWriter(tmp_path / f"{name}.bin") as writer:
            writer.write(np.array(values))
    done = alone(submission, submission.folder, "--data", str(tmp_path))
    assert done.returncode == 2 and words in done.stderr and not done.stdout
    sets = [word for text in SMALL for word in ("--set", text)]
    assert specc(["train", str(SPEC), "--data", str(tmp_path), "--run", str(tmp_path / "run"), *sets]) == 2
    shown = capsys.readouterr()
    assert words in " ".join(shown.err.split()) and "step" not in shown.out
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_brotli_is_missed_before_training(submission: Submission, tmp_path: Path) -> None:
    export_submission(submission.run.directory, tmp_path / "out", codec=Codec.BROTLI)
    done = alone(submission, tmp_path / "out", "--data", str(submission.shards))
    assert done.returncode == 3 and "brotli, which is not installed" in done.stderr and not done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [WEIGHTS, CODE]


def test_earlier_weights_are_not_taken_for_those_of_a_run_that_failed(submission: Submission, tmp_path: Path) -> None:
    """They are kept beside it, until there are new ones."""
    out, data = shutil.copytree(submission.folder, tmp_path / "out"), ("--data", str(submission.shards))
    good = (out / WEIGHTS).read_bytes()
    done = alone(submission, out, *data, "--budget", "1000")
    assert done.returncode == 4 and f"{WEIGHTS} is renamed to {WEIGHTS}.before until" in done.stderr
    assert (out / f"{WEIGHTS}.before").read_bytes() == good and not (out / WEIGHTS).exists()
    done = alone(submission, out, "score", *data)
    assert done.returncode == 5 and WEIGHTS in done.stderr and "Traceback" not in done.stderr
    done = alone(submission, out, "quantize", *data)
    assert done.returncode == 0 and (out / WEIGHTS).read_bytes() == good
    assert sorted(path.name for path in out.iterdir()) == [WEIGHTS, CODE]
