"""The lists of benchmarks/ are of changes that build, and their table is arithmetic on what runs have logged."""

import json
from pathlib import Path
from typing import Any

import ablate
import pytest

from specc.compiler.build import plan_spec
from specc.compiler.spec.check import load
from specc.runtime.storage.run_directory import readable

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LISTS = sorted(BENCHMARKS.glob("*.yaml"))
START = {"event": "start", "step": 0}
SPEC = BENCHMARKS.parent / "specs/gpt_mini.yaml"
LIST = f"""\
spec: {SPEC}
common: [train.steps=2]
seeds: [1, 2]
changes: {{no decay: [train.optimizers.0.weight_decay=0], "gelu(x)": [], never run: []}}
quantize: {{to nearest: [quant.default.scheme=round], no decay: []}}
"""


def log(place: Path, *events: dict[str, Any]) -> None:
    (place / "run").mkdir(parents=True)
    (place / "run/log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def validation(weights: str, nats: float) -> dict[str, Any]:
    return {"event": "validation", "step": 2, "weights": weights, "nats": nats}


def ended(nats: float, complete: bool = True) -> list[dict[str, Any]]:
    """The log of a run to its end; its raw weights score 1 more than the average."""
    end = {"event": "end", "step": 2, "complete": complete, "weights": "average"}
    return [START, validation("raw", nats + 1), validation("average", nats), end]


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_change_of_a_list_builds(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `quantize` are laid over the spec of a run, which has all its defaults written out."""
    monkeypatch.chdir(BENCHMARKS.parent)
    plan = ablate.Plan.read(path)
    spec, runs = Path(plan.spec), list(plan.runs())
    assert len({plan.trained(name) for name, _ in runs}) == len(runs) > len(plan.seeds) > 1
    for _, sets in runs:
        plan_spec(spec, tuple(sets))
    whole = tmp_path / "spec.json"
    whole.write_text(readable(load(spec, tuple(plan.common))[0]))
    for sets in plan.quantize.values():
        plan_spec(whole, tuple(sets))


def test_work_is_shared_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes, the second of which finds all but one change done: no run is made twice."""
    (tmp_path / "list.yaml").write_text(LIST)
    plan = ablate.Plan.read(tmp_path / "list.yaml")
    nats = {"whole, seed 1": 3.0, "whole, seed 2": 3.1, "no decay": 3.15, "gelu(x)": 2.9}
    scores = {plan.trained(name): value for name, value in nats.items()}
    ran: list[list[str]] = []

    def specc(place: Path, arguments: list[str]) -> None:
        ran.append(list(arguments))
        if arguments[0] == "quantize":
            report = {
                "artifact_bytes": 1234,
                "before": {"nats": 30.0, "tokens": 10},
                "after": {"nats": 30.2, "tokens": 10},
            }
            (place / "run/quantized").mkdir()
            (place / "run/quantized/report.json").write_text(json.dumps(report))
        elif place.name in scores:
            log(place, *ended(scores[place.name]))

    monkeypatch.setattr(ablate, "specc", specc)
    given = [str(tmp_path / "list.yaml"), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="no run of the whole model"):
        ablate.main([*given, "--table"])
    (tmp_path / "out" / plan.trained("gelu(x)")).mkdir(parents=True)  # claimed by another process, which is at it
    for _ in range(2):
        ablate.main(given)
    assert [arguments[0] for arguments in ran] == ["train"] * 4 + ["quantize"] * 2
    copied = {
        name: (tmp_path / "out" / plan.quantized(name)[1] / "run/log.jsonl").read_text() for name in plan.quantize
    }
    assert '"nats": 3.0' in copied["to nearest"] and '"nats": 3.15' in copied["no decay"]  # of the first, of its own
    assert ran[0][-4:] == ["--set", "train.steps=2", "--set", "train.seed=1"]
    assert capsys.readouterr().out.splitlines()[-9:] == [
        "| | nats per token | to the whole |",
        "|---|---|---|",
        "| the whole model, mean of 2 seeds, which differ by 0.1000 | 3.0500 | |",
        "| no averaging: the raw weights of these 2 | 4.0500 | +1.0000 |",
        "| no decay | 3.1500 | +0.1000 |",
        "| gelu(x) | not finished: still running, or killed | |",
        "| never run | not finished: still running, or killed | |",
        "| quantized: to nearest, 1,234 bytes | 3.0200 | +0.0200 to 3.0000 as trained |",
        "| quantized: no decay, 1,234 bytes | 3.0200 | +0.0200 to 3.0000 as trained |",
    ]


def test_only_a_run_that_ended_complete_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not one that was killed in its midst or before its average was scored, nor one that ended early; it is not
    quantized either, and the table says why it has no score."""
    (tmp_path / "list.yaml").write_text(
        f"spec: {SPEC}\ncommon: []\nseeds: [1, 2]\n"
        "changes: {killed: [], killed late: [], early: [], went on: [], raw only: [], refused: [], waits: []}\n"
        "quantize: {killed: [], refused: [], went on: []}\n"
    )
    out, plan = tmp_path / "out", ablate.Plan.read(tmp_path / "list.yaml")
    at = {name: out / plan.trained(name) for name, _ in plan.runs()}
    log(at["whole, seed 1"], *ended(3.0))
    log(at["whole, seed 2"], START, validation("raw", 5.0))
    log(at["killed"], START, validation("raw", 5.0))
    with (at["killed"] / "run/log.jsonl").open("a") as file:
        file.write('{"event": "val')  # torn
    log(at["killed late"], *ended(2.0)[:-1])
    log(at["early"], *ended(2.0, complete=False))
    log(at["went on"], *ended(2.0, complete=False), *ended(3.5))
    log(at["raw only"], START, validation("raw", 3.2), {"event": "end", "complete": True, "weights": "raw"})
    at["refused"].mkdir()
    (at["early"] / "exit_code.txt").write_text("0\n")
    (at["refused"] / "exit_code.txt").write_text("2\n")
    assert [ablate.score(at[name]) for name in ("killed", "killed late", "early", "went on")] == [None] * 3 + [3.5]

    def fails(place: Path, arguments: list[str]) -> None:
        (place / "exit_code.txt").write_text("4\n")

    monkeypatch.setattr(ablate, "specc", fails)
    ablate.main([str(tmp_path / "list.yaml"), "--out", str(out), "--minutes", "0", "--table"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "| the whole model, mean of 1 seeds, which differ by 0.0000 | 3.0000 | |",
        "| no averaging: the raw weights of these 1 | 4.0000 | +1.0000 |",
        "| the whole model, seed 2 | not finished: still running, or killed | |",
        "| killed | not finished: still running, or killed | |",
        "| killed late | not finished: still running, or killed | |",
        "| early | not finished: ended early | |",
        "| went on | 3.5000 | +0.5000 |",
        "| raw only | 3.2000 | +0.2000 |",
        f"| refused | failed (2): see {at['refused'].name}/output.txt | |",
        "| waits | not begun | |",
        "| quantized: killed | not begun | |",
        "| quantized: refused | not begun | |",
        "| quantized: went on | not begun | |",
    ]
    ablate.main([str(tmp_path / "list.yaml"), "--out", str(out)])
    quantized_out = plan.quantized("went on")[1]
    assert [path.name for path in sorted(out.glob("quantized_*"))] == [quantized_out]
    *_, waits, _, _, quantized = capsys.readouterr().out.splitlines()
    assert waits == f"| waits | failed (4): see {at['waits'].name}/output.txt | |"
    assert quantized == f"| quantized: went on | failed (4): see {quantized_out}/output.txt | |"


def test_the_exit_code_is_kept(tmp_path: Path) -> None:
    ablate.specc(tmp_path, ["no-such-command"])
    assert ablate.reason(tmp_path) == f"failed (2): see {tmp_path.name}/output.txt"
    assert "no-such-command" in (tmp_path / "output.txt").read_text()
