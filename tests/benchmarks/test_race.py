"""The race: the changes of the script, both clocks, the order of the legs, and records that are not repeated."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import race

SETS = {"whole": (), "no softcap": ("model.head.softcap=null",)}
# A script with the options, the changed lines and the output of the NoCap script: step 0 takes 100 s more.
SCRIPT = """\
import sys
import json, os
class torch:
    def manual_seed(seed):
        global SEED
        SEED = seed
class GPT:
    def __init__(self, config):
        pass
VAL_TOKENS = 1_048_576  # fixed
model_config = {}
if True:
    model = GPT(model_config)
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
every, steps = int(options["--val_loss_every"]), int(options["--num_iterations"])
off = abs(float(options["--learning_rate"]) / 0.0036 - 1)  # the best is twice the published one
print(f"{os.environ['WORLD_SIZE']} process, {VAL_TOKENS} tokens")
for step in range(steps + 1):
    if step % every == 0:
        loss = 10 - 5 * step / steps + off + SEED / 100
        print(f"step:{step}/{steps} | val loss {'nan' if off > 0.9 else f'{loss:.6f}'}")
    if step < steps:
        print(f"step:{step}/{steps} | loss nan | train_time:{100 + 2 * (step + 1):.2f}s | step_avg:1.00ms")
"""


@pytest.fixture
def prepared(tmp_path: Path) -> race.Race:
    (tmp_path / "train_gpt2.py").write_text(SCRIPT)
    return race.Race(tmp_path / "train_gpt2.py", tmp_path / "data", tmp_path, 20 * race.TOKENS_PER_STEP, 16, "cpu")


def test_the_script_gets_the_seed_and_the_validation_tokens(prepared: race.Race) -> None:
    text = race.patched(prepared.script, 7)
    assert "\n    torch.manual_seed(7)\n    model = GPT(model_config)\n" in text
    assert "\nVAL_TOKENS = 442368  # fixed\n" in text
    prepared.script.write_text(SCRIPT.replace("GPT(model_config)", "GPT()"))
    with pytest.raises(race.RaceError, match="occurs 0 times and not once"):
        race.patched(prepared.script, 7)


def test_compilation_is_not_on_the_clock_of_the_script(prepared: race.Race) -> None:
    record = prepared.run(race.original(2.0, 3))
    assert (record["loss"], record["tokens"], record["compiled"]) == (5.03, 160 * 524_288, 100.0)
    assert record["seconds"] == pytest.approx(320)
    curve = record["validations"]
    assert [point["seconds"] for point in curve] == pytest.approx(range(0, 321, 40))
    assert race.crossing(record, 7.0) == curve[5]
    assert "1 process, 442368 tokens" in (prepared.out / "original@2-seed3/output").read_text()
    with pytest.raises(race.RaceError, match="no validation at its end"):
        race.read_original(["step:0/160 | val loss 11.0"])


def test_the_log_of_a_run_is_read() -> None:
    steps = [{"event": "step", "step": k, "tokens": 100, "seconds": k / 2} for k in (1, 2, 3, 4)]
    log = [*steps[:2], {"event": "validation", "step": 2, "weights": "raw", "nats": 6.0}, *steps[2:]]
    log += [{"event": "validation", "step": 4, "weights": which, "nats": 5.0} for which in ("raw", "average")]
    first, last = ({"tokens": 200, "seconds": 1.0, "loss": 6.0}, {"tokens": 400, "seconds": 2.0, "loss": 5.0})
    assert race.read_fast(log) == {**last, "validations": [first, last]}


def test_a_race_is_not_repeated(prepared: race.Race, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best learning rate runs with all seeds. gpt2_fast then stops at the mean of their losses, less a margin."""

    def trained(_: race.Race, leg: race.Leg, settings: Mapping[str, Any], folder: Path) -> race.Record:
        point = {"tokens": 1000, "seconds": 32.0, "loss": 5.5 if "no softcap" in leg.name else 5.0}
        return {**point, "validations": [point], "loss_f32": 5.0 + leg.seed / 100}

    monkeypatch.setattr(race.Race, "_run_fast", trained)
    assert race.verdict(prepared, SETS, None) == [
        "the learning rate of the script is not decided: original@1, original@2, original@0.5, original@4"
    ]
    scripts = [f"original@{factor}-seed1" for factor in ("1", "2", "0.5", "4")]
    assert [leg.name for leg in race.legs(prepared, SETS, None)] == scripts  # if none of them succeeds
    ran = []
    for leg in race.legs(prepared, SETS, None):
        assert race.finished(prepared, leg) is None
        prepared.run(leg)
        ran.append(leg.name)
    assert ran == [
        *scripts,
        *("original@2-seed2", "original@2-seed3", "fast-seed1", "fast-seed2", "fast-seed3"),
        *("fast:whole-seed1", "fast:no softcap-seed1"),
    ]
    assert all(race.finished(prepared, leg) for leg in race.legs(prepared, SETS, None))
    assert prepared.records()[-3]["settings"]["overrides"][-1] == "train.stop_at_loss=5.019000"
    assert race.finished(race.Race(**{**_fields(prepared), "rows": 64}), race.original(2.0, 1)) is None
    assert race.verdict(prepared, SETS, 5.02) == [
        "target 5.0200: the script at 2 x 0.0018, 3 seeds, 320.0 s",
        "gpt2_fast 5.0200, 3 seeds, 32.0 s: target met, ratio 0.100",
    ]
    diverged, met, ablated = (race.table(prepared.records(), SETS, 5.02)[row] for row in (5, -3, -1))
    assert "| original@4-seed1 | inf |  | inf |" in diverged
    assert "| fast-seed3 | 5.0000 |  | 5.0300 | 1,000 | 32.0 | 32.0 |" in met
    assert "| fast:no softcap-seed1 | 5.5000 | +0.5000 | 5.0100 | 1,000 | 32.0 |  |" in ablated


def _fields(prepared: race.Race) -> dict[str, Any]:
    return {name: getattr(prepared, name) for name in race.Race.__dataclass_fields__}


def test_only_named_legs_run_and_a_failure_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train_gpt2.py"
    script.write_text(SCRIPT + "sys.exit('no GPU' if options['--learning_rate'] == '0.0072' else 0)\n")
    monkeypatch.setattr(race, "settings_of", lambda path: SETS)
    monkeypatch.setattr(race, "pack", lambda options, data: None)
    text = str(script)  # any file: nothing is packed
    command = ["--original", text, "--train", text, "--val", text, "--tokenizer", text, "--out", str(tmp_path)]
    assert race.main([*command, "--only", "original@2-seed1,original@4-seed1"]) == 1
    output = capsys.readouterr().out
    assert "original@4-seed1: " in output and "exit code 1" in output and "no GPU" in output
    records = [json.loads(line)["leg"] for line in (tmp_path / "race.jsonl").read_text().splitlines()]
    assert records == ["original@2-seed1"]
    assert race.main([*command, "--only", "original@*-seed?", "--max-seconds", "-1"]) == 0
    assert "original@1-seed1 and later legs were not started" in capsys.readouterr().out
    with pytest.raises(race.RaceError, match="no leg is named slow"):
        race.main([*command, "--only", "slow"])


def test_the_spacing_is_a_whole_number_of_steps(prepared: race.Race) -> None:
    leg = race.fast(SETS, 1, None)
    assert "train.validate_every=320" in prepared.settings(leg)["overrides"]
    with pytest.raises(race.RaceError, match="not a multiple of its step of 32768"):
        race.Race(**{**_fields(prepared), "spacing": 100_000}).settings(leg)


def test_losses_are_computed_in_f32_on_the_validation_text(tmp_path: Path) -> None:
    """The code for a CPU scores a run in f32, whatever it was trained with."""
    from specc.cli.app import run

    text = tmp_path / "text"
    text.mkdir()
    for split in ("train", "val"):
        (text / f"{split}.txt").write_text("a line of text\n" * 200)
    spec = Path(__file__).parents[2] / "specs/gpt_mini.yaml"
    small = ("model.blocks.count=1", "model.dim=32", "model.context=64", "train.steps=1", "train.tokens_per_step=128")
    sets = [
        text
        for override in (*small, "train.micro_batch=2", "train.schedule={}", "train.average=null")
        for text in ("--set", override)
    ]
    assert run(["train", str(spec), "--data", str(text), "--run", str(tmp_path / "run"), *sets]) == 0
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert race.loss_in_f32(tmp_path / "run", text) == pytest.approx(race.read_fast(log)["loss"], rel=1e-5)
