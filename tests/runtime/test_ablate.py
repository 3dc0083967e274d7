"""The lists of benchmarks/ are of changes that build, and their table is arithmetic on what runs have logged."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from specc.compiler.build import validate
from specc.compiler.check import load
from specc.runtime.run import readable

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LISTS = sorted(BENCHMARKS.glob("*.yaml"))
LIST = """\
spec: specs/gpt_mini.yaml
common: [train.steps=2]
seeds: [1, 2]
changes: {no decay: [train.optimizers.0.weight_decay=0], "gelu(x)": [], never run: []}
quantize: {to nearest: [quant.default.scheme=round], no decay: []}
"""


@pytest.fixture(scope="module")
def ablate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ablate", BENCHMARKS / "ablate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_change_of_a_list_builds(path: Path, ablate: ModuleType, tmp_path: Path) -> None:
    """Those of `quantize` are laid over the spec of a run, which has all its defaults written out."""
    plan = ablate.Plan.read(path)
    spec, runs = BENCHMARKS.parent / plan.spec, list(plan.runs())
    assert len({ablate.folder(Path(), name) for name, _ in runs}) == len(runs) > len(plan.seeds) > 1
    for _, sets in runs:
        validate(spec, tuple(sets))
    whole = tmp_path / "spec.json"
    whole.write_text(readable(load(spec, tuple(plan.common))[0]))
    for sets in plan.quantize.values():
        validate(whole, tuple(sets))


def test_work_is_shared_and_told(
    ablate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes, the second of which finds all but one change done: no run is made twice."""
    (tmp_path / "list.yaml").write_text(LIST)
    scores = {"whole__seed_1": 3.0, "whole__seed_2": 3.1, "no_decay": 3.15, "gelu_x_": 2.9}
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
            (place / "run").mkdir()
            raw, average = (
                {"event": "validation", "weights": w, "nats": scores[place.name] + d}
                for w, d in (("raw", 1), ("average", 0))
            )
            (place / "run/log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (raw, average)))

    monkeypatch.setattr(ablate, "specc", specc)
    given = [str(tmp_path / "list.yaml"), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="no run of the whole model"):
        ablate.main([*given, "--table"])
    (tmp_path / "out/gelu_x_").mkdir(parents=True)  # claimed by another process, which is at it
    for _ in range(2):
        ablate.main(given)
    assert [arguments[0] for arguments in ran] == ["train"] * 4 + ["quantize"] * 2
    copied = {
        name: (tmp_path / f"out/quantized_{name}/run/log.jsonl").read_text() for name in ("to_nearest", "no_decay")
    }
    assert '"nats": 3.0' in copied["to_nearest"] and '"nats": 3.15' in copied["no_decay"]  # of the first, of its own
    assert ran[0][-4:] == ["--set", "train.steps=2", "--set", "train.seed=1"]
    assert capsys.readouterr().out.splitlines()[-7:] == [
        "| | nats a token | to the whole |",
        "|---|---|---|",
        "| the whole model, mean of 2 seeds, which differ by 0.1000 | 3.0500 | |",
        "| no averaging: the raw weights of these 2 | 4.0500 | +1.0000 |",
        "| no decay | 3.1500 | +0.1000 |",
        "| quantized: to nearest, 1,234 bytes | 3.0200 | +0.0200 to 3.0000 as trained |",
        "| quantized: no decay, 1,234 bytes | 3.0200 | +0.0200 to 3.0000 as trained |",
    ]
