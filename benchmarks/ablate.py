"""Ablations: trains the spec of a list as it is, with several seeds, and with one change at a time.

    python benchmarks/ablate.py benchmarks/gpt_mlp35.yaml --data PACKED --out DIR --target sm90
    python benchmarks/ablate.py benchmarks/gpt_mlp35.yaml --out DIR --table

A list names the spec, the `--set` overrides that all its runs have, the seeds of the whole model, and the changes:
names with further overrides. Each entry under `quantize` is laid over a run when that is quantized: over the run of
the change of its name, or else over the first run.

Runs are `specc train` and `specc quantize`, one after the other. Several processes with the same DIR, one per GPU by
CUDA_VISIBLE_DEVICES, share the work. A change whose run failed or was killed stays claimed: remove its folder in DIR
to try again. A folder belongs to one name, one text of the spec and one list of overrides: what an edit changes is
trained anew, and the old run stays beside it.

The table compares with the mean of the seeds, whose spread is the noise. Where a run averages its weights, the raw
weights of the whole model have a line too. Only a run whose log ends complete has a score; each other run has a line
with the reason.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

SPECC = (sys.executable, "-m", "specc.cli")
REPORT = "quantized/report.json"
EXIT = "exit_code.txt"  # beside a run, once its command has ended


@dataclass(frozen=True, slots=True)
class Plan:
    """A list. `changes` and `quantize` are overrides by name; `text` is the text of the spec's file."""

    spec: str
    text: str
    common: Sequence[str]
    seeds: Sequence[int]
    changes: Mapping[str, Sequence[str]]
    quantize: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls, path: Path) -> "Plan":
        data: Any = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
        text = Path(data["spec"]).read_text(encoding="utf-8")
        return cls(data["spec"], text, data["common"], data["seeds"], data["changes"], data.get("quantize", {}))

    def runs(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Name and overrides of every training; those of the whole model first."""
        for seed in self.seeds:
            yield f"whole, seed {seed}", (*self.common, f"train.seed={seed}")
        for name, sets in self.changes.items():
            yield name, (*self.common, *sets)

    def trained(self, name: str) -> str:
        """The folder of a training."""
        return folder(name, self.text, dict(self.runs())[name])

    def quantized(self, name: str) -> tuple[str, str]:
        """The folders of a run, and of its quantized copy."""
        run = self.trained(name if name in self.changes else next(self.runs())[0])
        return run, folder(f"quantized {name}", run, self.quantize[name])


def folder(name: str, of: str, sets: Sequence[str]) -> str:
    """A readable folder name, unique to a name, a text and overrides."""
    digest = hashlib.sha256(json.dumps([name, of, *sets]).encode()).hexdigest()[:8]
    return f"{''.join(c if c.isalnum() else '_' for c in name)}_{digest}"


def words(sets: Sequence[str]) -> list[str]:
    return [word for text in sets for word in ("--set", text)]


def claimed(place: Path) -> bool:
    """Claim the work of a folder for this process. Returns whether no other process had claimed it."""
    try:
        place.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def specc(place: Path, arguments: Sequence[str]) -> None:
    """Run specc with its output in output.txt, then write its exit code to EXIT."""
    with (place / "output.txt").open("ab") as file:
        code = subprocess.run([*SPECC, *arguments], stdout=file, stderr=subprocess.STDOUT).returncode
    (place / EXIT).write_text(f"{code}\n", encoding="utf-8")
    print(place.name, "done" if code == 0 else f"failed ({code}): see {file.name}", flush=True)


def train(plan: Plan, options: argparse.Namespace) -> None:
    """Run every training that no process has claimed, while there is time."""
    for name, sets in plan.runs():
        if time.monotonic() > options.until:
            return
        place = options.out / plan.trained(name)
        if claimed(place):
            shared = ["--run", str(place / "run"), "--data", options.data, "--target", options.target]
            specc(place, ["train", plan.spec, *shared, *words(sets)])


def quantize(plan: Plan, options: argparse.Namespace) -> None:
    """Quantize every run that has ended complete and that no process has claimed, while there is time."""
    for name, sets in plan.quantize.items():
        if time.monotonic() > options.until:
            return
        trained, place = (options.out / part for part in plan.quantized(name))
        if score(trained) is not None and claimed(place):
            subprocess.run(["cp", "-r", str(trained / "run"), str(place / "run")], check=True)
            specc(place, ["quantize", str(place / "run"), "--target", options.target, *words(sets)])


def events(log: Path) -> Iterator[Mapping[str, Any]]:
    """The events of a run's log, without lines that a killed process left torn."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else ():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def score(place: Path, weights: str | None = None) -> float | None:
    """Nats per token of a run that ended complete, of its final weights or of the named ones; else None."""
    score, scores = None, dict[str, float]()
    for event in events(place / "run/log.jsonl"):
        match event["event"]:
            case "start":  # also of a resumed run, whose earlier scores are of earlier weights
                scores.clear()
            case "validation":
                scores[event["weights"]] = float(event["nats"])
            case "end" if event["complete"]:
                score = scores.get(weights or event["weights"])
    return score


def reason(place: Path) -> str:
    """The reason why the work of a folder has no result."""
    if not place.is_dir():
        return "not begun"
    if not (place / EXIT).is_file():
        return "not finished: still running, or killed"
    code = int((place / EXIT).read_text(encoding="utf-8"))
    return f"failed ({code}): see {place.name}/output.txt" if code else "not finished: ended early"


def table(plan: Plan, out: Path) -> Iterator[str]:
    """Lines of a Markdown table: each run of the list with its score and its difference to the whole model's mean."""
    ended = {seed: out / plan.trained(f"whole, seed {seed}") for seed in plan.seeds}
    whole = {seed: value for seed, place in ended.items() if (value := score(place)) is not None}
    raw = [value for seed in whole if (value := score(ended[seed], "raw")) is not None]
    if not whole:
        reasons = "; ".join(f"seed {seed} is {reason(place)}" for seed, place in ended.items())
        raise SystemExit(f"no run of the whole model in {out} has a score yet: {reasons}")
    mean, spread = statistics.mean(whole.values()), max(whole.values()) - min(whole.values())
    yield "| | nats per token | to the whole |"
    yield "|---|---|---|"
    yield f"| the whole model, mean of {len(whole)} seeds, which differ by {spread:.4f} | {mean:.4f} | |"
    if raw and raw != [*whole.values()]:
        alone = statistics.mean(raw)
        yield f"| no averaging: the raw weights of these {len(raw)} | {alone:.4f} | {alone - mean:+.4f} |"
    for seed in plan.seeds:
        if seed not in whole:
            yield f"| the whole model, seed {seed} | {reason(ended[seed])} | |"
    for name in plan.changes:
        place = out / plan.trained(name)
        value = score(place)
        yield f"| {name} | {reason(place)} | |" if value is None else f"| {name} | {value:.4f} | {value - mean:+.4f} |"
    for name in plan.quantize:
        place = out / plan.quantized(name)[1]
        report = place / "run" / REPORT
        if not report.is_file():
            yield f"| quantized: {name} | {reason(place)} | |"
            continue
        data = json.loads(report.read_text(encoding="utf-8"))
        before, after = (data[when]["nats"] / data[when]["tokens"] for when in ("before", "after"))
        size = f"{data['artifact_bytes']:,} bytes"
        yield f"| quantized: {name}, {size} | {after:.4f} | {after - before:+.4f} to {before:.4f} as trained |"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing new after this many minutes")
    parser.add_argument("--table", action="store_true", help="train nothing, and print the results so far")
    options = parser.parse_args(arguments)
    options.until = time.monotonic() + 60 * options.minutes
    plan = Plan.read(options.list)
    if not options.table:
        train(plan, options)
        quantize(plan, options)
    print("\n".join(table(plan, options.out)))


if __name__ == "__main__":
    main(sys.argv[1:])
