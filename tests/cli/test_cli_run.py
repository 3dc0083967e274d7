"""The commands that run a model, as a user calls them: the quickstart in small, and what damage and mistakes end in."""

import json
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_server import folder_of_specc
from run_samples import SMALL, SPEC, write_text

from specc.cli.app import run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run directory that was trained and quantized by the commands, and its data."""
    folder = tmp_path_factory.mktemp("cli run")
    data = write_text(folder / "data")
    overrides = [word for text in SMALL for word in ("--set", text)]
    assert run(["train", str(SPEC), "--run", str(folder / "run"), "--data", str(data), *overrides]) == 0
    assert run(["quantize", str(folder / "run")]) == 0
    return folder / "run", data


def test_quantize_tells_what_each_parameter_became(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained[0], copy)
    capsys.readouterr()
    assert run(["quantize", str(copy)]) == 0
    report, printed = copy / "quantized" / "report.json", capsys.readouterr().out.splitlines()
    rows = json.loads(report.read_text())["parameters"]
    first = next(i for i, line in enumerate(printed) if line.startswith("parameter "))
    lines = printed[first + 1 : first + 1 + len(rows)]
    assert [line.split()[:2] for line in lines] == [[row["name"], f"{row['bits']:g}"] for row in rows]
    assert all(line.endswith(f" {row['bytes']:,}") for line, row in zip(lines, rows, strict=True))
    assert max(map(len, printed[first : first + len(rows) + 2])) <= 100
    assert any(line.startswith(f"report       {report}") for line in printed)
    assert run(["quantize", str(copy), "--json"]) == 0
    assert capsys.readouterr().out == report.read_text()


def test_the_next_command_can_be_copied(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a folder whose name has a space in it."""
    again = tmp_path / "a run"
    shutil.copytree(trained[0], again)
    shutil.rmtree(again / "quantized")
    assert run(["eval", str(again), "--quantized"]) == 4
    assert f"first: specc quantize '{again}'" in capsys.readouterr().err
    assert run(["train", "--run", str(again), "--resume", "auto"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: specc ")
    assert run([*shlex.split(command), "--max-tokens", "50"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: specc ")
    assert run(shlex.split(command.replace("TEXT", "the"))) == 0


def test_from_a_run_to_a_file_that_speaks(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, data = trained
    out = tmp_path / "tiny.specc"
    assert run(["export", str(directory), "--out", str(out)]) == 0
    assert run(["export", str(directory), "--out", str(out)]) == 2  # it exists
    total = out.stat().st_size
    assert run(["size", str(out), "--budget", str(total)]) == 0
    assert run(["size", str(out), "--budget", str(total - 1)]) == 1
    capsys.readouterr()
    assert run(["size", str(out), "--budget", str(total - 1), "--plain", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["total"], facts["artifact"], facts["over"]) == (total, total, True) and facts["plain"] > 0
    capsys.readouterr()
    assert run(["eval", str(out), "--data", str(data), "--json"]) == 0
    shipped = json.loads(capsys.readouterr().out)
    assert run(["eval", str(directory), "--quantized", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == shipped
    assert shipped["bpb"] == shipped["bpb_pieces"] and shipped["lossless"]
    assert shipped["piece_bytes"] == shipped["document_bytes"]
    texts = []
    for seed in ("1", "1", "2"):
        assert run(["generate", str(out), "--prompt", "the ", "--max-tokens", "30", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("the ")


def test_a_run_goes_on_by_its_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec, data and target are those of the run, with what was set; where there are no specs, too."""
    data, folder = write_text(tmp_path / "data"), tmp_path / "run"
    overrides = [word for text in SMALL for word in ("--set", text)]
    whole = ["train", str(SPEC), "--run", str(tmp_path / "whole"), "--data", str(data), *overrides]
    assert run(whole) == 0
    monkeypatch.chdir(tmp_path)
    begun = ["train", str(SPEC), "--run", str(folder), "--data", "data", *overrides, "--steps", "1"]
    assert run(begun) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run(["train", "--run", str(folder), "--resume", "auto", "--set", "train.seed=2"]) == 2
    assert run(["train", "--run", str(folder), "--resume", "auto"]) == 0
    ends = [sorted((where / "checkpoints").iterdir())[-1] for where in (folder, tmp_path / "whole")]
    assert ends[0].name == ends[1].name
    tensors = [{path.name: path.read_bytes() for path in end.glob("*.safetensors")} for end in ends]
    assert tensors[0] == tensors[1] != {}


def test_the_newest_run_of_a_spec_goes_on_with_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And its target, where the spec has several; another spec's run is not taken."""
    data = write_text(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    overrides = [word for text in (*SMALL, "targets=[sm90, cpu]") for word in ("--set", text)]
    begun = ["train", str(SPEC), "--data", "data", "--target", "cpu", *overrides, "--steps", "1"]
    assert run(begun) == 0 and run(begun) == 0
    capsys.readouterr()
    assert run(["train", str(SPEC), "--resume", "auto", *overrides]) == 0
    shown = capsys.readouterr().err
    assert "gpt_mini-002" in shown and "resuming after step 1" in shown
    assert json.loads((tmp_path / "runs/gpt_mini-002/run.json").read_text())["data"] == str(data)


def test_a_folder_that_is_no_run_is_not_begun_without_a_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even where there is one spec alone, which a command without one takes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    shutil.copy(SPEC, tmp_path / "specs")
    (tmp_path / "killed" / "checkpoints").mkdir(parents=True)
    for folder, what in (
        ("typo", "typo: no such run"),
        ("killed", "killed: is not a run, or ended before training began"),
    ):
        assert run(["train", "--run", folder, "--resume", "auto"]) == 2
        assert what in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


def test_a_run_whose_data_moved_goes_on_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it is now has to be said once; other data is refused, by the position in it."""
    data, moved, folder = write_text(tmp_path / "data"), tmp_path / "moved", tmp_path / "run"
    overrides = [word for text in SMALL for word in ("--set", text)]
    begun = ["train", str(SPEC), "--data", str(data), *overrides]
    assert run([*begun, "--run", str(folder), "--steps", "1"]) == 0
    shutil.copytree(folder, tmp_path / "empty")
    shutil.rmtree(tmp_path / "empty" / "checkpoints")
    data.rename(moved)
    again = ["train", "--run", str(folder), "--resume", "auto"]
    capsys.readouterr()
    assert run([*again, "--steps", "2"]) == 2
    shown = capsys.readouterr().err
    assert f"the data of the run, {data}, do not exist" in shown and f"{folder} --resume auto --data PATH" in shown
    other = write_text(tmp_path / "other", seed=1)
    assert run([*again, "--data", str(other)]) == 2
    assert (
        f"the training split of {other} is not the training split with which the run began" in capsys.readouterr().err
    )
    empty = ["train", "--run", str(tmp_path / "empty"), "--resume", "auto", "--data", str(moved)]
    for command in (empty, ["eval", str(tmp_path / "empty"), "--data", str(moved)]):
        assert run(command) == 5
        assert "every checkpoint of the run is damaged or missing" in capsys.readouterr().err
    assert run([*again, "--steps", "2", "--data", str(moved)]) == 0
    assert f"the data of the run are at {moved} now" in capsys.readouterr().err
    assert run(again) == 0 and run(["quantize", str(folder)]) == 0


def test_a_run_keeps_the_tokenizer_that_it_was_begun_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spec names it within a folder of its own; both are gone when the run goes on, and it has moved."""
    specs, moved = tmp_path / "specs", tmp_path / "elsewhere" / "run"
    (specs / "words").mkdir(parents=True)
    ranks = [f"{b64encode(bytes([value])).decode()} {value}\n" for value in range(256)]
    (specs / "words" / "bytes.tiktoken").write_text("".join(ranks))
    shutil.copy(SPEC, specs)
    data = write_text(tmp_path / "data")
    overrides = [word for text in (*SMALL, "train.data.tokenizer=words/bytes.tiktoken") for word in ("--set", text)]
    begun = ["train", str(specs / SPEC.name), "--run", str(tmp_path / "run"), "--data", str(data), *overrides]
    assert run([*begun, "--steps", "1"]) == 0
    shutil.rmtree(specs)
    moved.parent.mkdir()
    (tmp_path / "run").rename(moved)
    assert run(["train", "--run", str(moved), "--resume", "auto"]) == 0
    assert run(["quantize", str(moved)]) == 0
    (tmp_path / "here" / "words").mkdir(parents=True)  # another one of that name, where the command is given
    (tmp_path / "here" / "words" / "bytes.tiktoken").write_text("".join(reversed(ranks)).replace(" 65\n", " 66 \n"))
    monkeypatch.chdir(tmp_path / "here")
    for path in (moved, moved / "quantized" / "model.specc"):
        assert run(["generate", str(path), "--prompt", "the ", "--max-tokens", "3"]) == 0
    assert run(["export", str(moved), "--format", "submission"]) == 0


def test_a_flipped_bit_ends_with_exit_code_5(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = (trained[0] / "quantized" / "model.specc").read_bytes()
    chooser = random.Random(5)
    for i in range(20):
        position = chooser.randrange(8 * len(content)) if i else 0  # the magic too
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        path = tmp_path / f"{i}.specc"
        path.write_bytes(damaged)
        for command in (
            ["generate", str(path), "--max-tokens", "1"],
            ["size", str(path)],
            ["eval", str(path), "--data", "x"],
        ):
            assert run(command) == 5, (command, position)
            shown = capsys.readouterr()
            assert "error:" in shown.err and "Traceback" not in shown.err and not shown.out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["generate", "nowhere.specc"], 2),
        (["eval", "nowhere"], 2),
        (["quantize", "nowhere"], 2),
        (["train", str(SPEC), "--data", "/nowhere", "--run", "r"], 2),
        (["train", str(SPEC), "--target", "sm80", "--run", "r"], 2),
        (["generate", "{run}", "--temperature", "-1"], 2),
        (["generate", "{run}", "--top-p", "0"], 2),
        (["generate", "{run}", "--seed", str(2**64)], 2),
        (["generate", "{run}", "--prompt", "caf\udce9"], 2),  # an argument in Latin-1
        (["eval", "{run}", "--data", ""], 2),
        (["eval", "{run}", "--data", " "], 2),
        (["quantize", "{run}", "--data", ""], 2),
        (["train", str(SPEC), "--data", "", "--run", "r"], 2),
        (["export", "{run}", "--format", "gguf"], 2),
        (["train", str(SPEC), "--set", "train.steps=x", "--run", "r"], 2),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    trained: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [word.replace("{run}", str(trained[0])) for word in arguments]
    assert run(given) == code
    shown = capsys.readouterr().err
    assert shown and "Traceback" not in shown


@pytest.mark.parametrize(
    ("missing", "hint"),
    [
        ("train.text", "did you mean {data}/train.txt"),
        ("nothing alike", "name a text file, a jsonl file, a token shard, a folder of such files, or `stdlib`"),
        ("no/such/text.txt", "there is no {data}/no"),
    ],
)
def test_data_that_is_not_there_is_told_with_what_is(
    trained: tuple[Path, Path], capsys: pytest.CaptureFixture[str], missing: str, hint: str
) -> None:
    run_directory, data = trained
    assert run(["eval", str(run_directory), "--data", str(data / missing)]) == 2
    assert hint.replace("{data}", str(data)) in capsys.readouterr().err


def specc(*arguments: str, **variables: str) -> list[str]:
    return [
        "env",
        *(f"{name}={value}" for name, value in variables.items()),
        sys.executable,
        "-m",
        "specc.cli",
        *arguments,
    ]


def test_a_prompt_is_utf_8_in_every_locale(trained: tuple[Path, Path]) -> None:
    words = ("generate", str(trained[0]), "--prompt", "\N{SLIGHTLY SMILING FACE}", "--max-tokens", "3")
    plain = specc(*words, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    other = [str(folder_of_specc() / "specc"), *words]
    results = [subprocess.run(command, capture_output=True) for command in (plain, other)]
    assert [done.returncode for done in results] == [0, 0], results[0].stderr.decode()
    assert results[0].stdout == results[1].stdout and results[0].stdout.startswith("\N{SLIGHTLY SMILING FACE}".encode())


def test_a_reader_of_generated_text_that_leaves_is_no_error(trained: tuple[Path, Path]) -> None:
    command = f"{shlex.join(specc('generate', str(trained[0]), '--max-tokens', '400'))} | head -c 20"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True)
    assert (done.returncode, len(done.stdout)) == (0, 20), done.stderr.decode()
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr


@contextmanager
def training(folder: Path, steps: int, **pipes: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """A training run in `folder/run`, in a process of its own."""
    data = write_text(folder / "data")
    sets = [word for text in (*SMALL, f"train.steps={steps}", "train.schedule={}") for word in ("--set", text)]
    words = ["train", str(SPEC), "--run", str(folder / "run"), "--data", str(data), "--target", "cpu", *sets]
    with subprocess.Popen(specc(*words), **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)


def at_step(folder: Path, step: int) -> bool:
    log = folder / "run" / "log.jsonl"
    return log.exists() and f'"step": {step},' in log.read_text()


def test_a_reader_of_its_notes_that_leaves_does_not_end_training(tmp_path: Path) -> None:
    with training(tmp_path, 60, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.close()
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and b"60 steps in" in output
    assert at_step(tmp_path, 60)
    assert '"event": "end"' in (tmp_path / "run" / "log.jsonl").read_text()


def test_a_terminal_that_closes_pre_empts_training(tmp_path: Path) -> None:
    with training(tmp_path, 100_000, stderr=subprocess.PIPE) as process:
        wait_for(lambda: at_step(tmp_path, 3), process)
        process.send_signal(signal.SIGHUP)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 75 and b"pre-empted by SIGHUP" in errors and b"saved as" in errors
    assert run(["train", "--run", str(tmp_path / "run"), "--resume", "auto", "--steps", "4"]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_a_signal_while_torch_is_imported(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with training(tmp_path, 100_000, stderr=subprocess.PIPE) as process:
        wait_for(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(), process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == code and b"Traceback" not in errors, errors.decode()
    assert not (tmp_path / "run" / "spec.json").exists()
