"""Several processes score together; and the command says what a number is."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from adapt_scene import METHODS, all_of
from command_server import shell_environment
from ranks import outputs
from run_samples import make_run, small_spec

from specc.cli.app import run as specc
from specc.runtime.distributed import launch
from specc.runtime.storage.run_directory import Run


def test_three_processes_count_what_one_does(run: Run, tmp_path: Path) -> None:
    """To the last bit, where no weights learn; else but for the rounding of the sums of gradients."""
    ended = outputs("adapt_scene.py", 3, tmp_path, str(run.directory), run.data)
    assert all(out.startswith("{") for _, out, _ in ended), ended[0][2]
    first, *others = (json.loads(out) for _, out, _ in ended)
    assert all(other == first for other in others)
    alone = all_of(run.directory, Path(run.data), None)
    assert first.keys() == alone.keys() == {"plain", *METHODS}
    assert {k: first[k] for k in ("plain", "slot", "slot_causal")} == {
        k: alone[k] for k in ("plain", "slot", "slot_causal")
    }
    for name in ("sgd", "adamw", "lora"):
        assert first[name] == pytest.approx(alone[name], rel=1e-5)
        assert abs(first[name] - first["plain"]) > 100 * abs(first[name] - alone[name])


def test_the_command_shares_the_work_and_only_rank_0_speaks(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["eval", str(run.directory), "--json", "--stride", "8", "--max-tokens", "300"]
    assert specc(given) == 0
    alone = json.loads(capsys.readouterr().out)
    command = ["specc", *given, "--gpus", "2"]
    shared = subprocess.run(command, env=shell_environment(), capture_output=True, text=True, timeout=300)
    assert shared.returncode == 0, shared.stderr
    assert json.loads(shared.stdout) == alone and alone["tokens"] == 300


def test_the_command_says_what_a_number_is(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["eval", str(run.directory), "--stride", "8", "--max-tokens", "100", "--adapt"]
    for kind, key in (("slot", "non_causal"), ("slot_causal", "adapted"), ("{kind: ttt, chunk: 32}", "adapted")):
        assert specc([*given, kind]) == 0
        printed = capsys.readouterr().out
        assert ("NON-CAUSAL, not the model's score" in printed.splitlines()[-1]) == (kind == "slot")
        assert "without --adapt, eval scores the model" in printed.splitlines()[-1]
        assert specc([*given, kind, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert set(facts) == {"causal", key} and facts["causal"] is (kind != "slot")  # no `bpb` that is a score
        assert facts[key]["causal"] is facts["causal"] and facts[key]["bpb_pieces"] > 0 and facts[key]["stride"] == 8


def test_mistakes_end_with_exit_code_2(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["eval", str(run.directory)]
    for more, said in (
        (["--adapt", "slit"], "has an unknown kind, `slit`"),
        (["--adapt", "slot_causal"], "use a stride below 32"),
        (["--window", "8", "--stride", "9"], "the stride is 9, but must be from 1 to 8, the window"),
        (["--stride", "0"], "0 is not in the range"),
        (["--adapt", "{kind: ttt, match: nothing}"], "matches no parameter"),
    ):
        assert specc([*given, *more]) == 2
        assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_the_cpu_is_taken_unasked_where_nothing_else_is_the_models_own(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was trained there, or an artifact for it alone; not where a GPU of this machine would do, nor for a
    run that was trained on one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    both = small_spec("targets=[sm80, cpu]")
    assert launch.cpu_target(run.directory, run.spec) == "cpu"
    assert launch.cpu_target(make_run(tmp_path / "both", both, run.data).directory, both) == "cpu"
    trained = Run(tmp_path / "gpu", both, "sm80", run.data).create()
    assert launch.cpu_target(trained.directory, both) is None
    assert launch.cpu_target(tmp_path / "x.specc", run.spec) == "cpu"
    assert launch.cpu_target(tmp_path / "x.specc", both) is None
    assert specc(["eval", str(trained.directory), "--gpus", "2"]) == 3
    shown = " ".join(capsys.readouterr().err.split())
    assert "--gpus 2 needs 2 NVIDIA GPUs" in shown and "with --target cpu, the processes run on the CPU" in shown
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert launch.cpu_target(tmp_path / "both", both) is None
    assert launch.cpu_target(run.directory, run.spec) == "cpu"
