"""What each technique of a model is worth: its spec is trained as it is, by several seeds, and with one change at a
time.

    python benchmarks/ablate.py benchmarks/gpt_mlp35.yaml --data PACKED --out DIR --target sm90
    python benchmarks/ablate.py benchmarks/gpt_mlp35.yaml --out DIR --table

A list names the spec, the `--set` texts that all its runs have, the seeds of the whole model and the changes, each a
name and its `--set` texts; under `quantize`, further ones, each laid over a run when that is quantized: the run of the
change of that name, or else the first run. Runs are `specc train` and `specc quantize`, one after another in this
process. Several processes that are given one DIR, one a GPU by CUDA_VISIBLE_DEVICES, share the work. A change whose run
failed, or was killed, stays claimed: remove its folder in DIR to try again. A folder is of one name, one text of the
spec and these `--set` texts: what an edit of them changed is trained anew, and the old run stays beside it. The table
compares with the mean of the seeds, whose spread is the noise; where a run averages its weights, the raw ones of the
whole model have a line too. Only a run whose log says that it ended complete has a score; each other one has a line
that says why it has none.
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
    """A list as it is read. `changes` and `quantize` are `--set` texts by name; `text` is what the spec's file says."""

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
        """The name of every training, and its `--set` texts; those of the whole model first."""
        for seed in self.seeds:
            yield f"whole, seed {seed}", (*self.common, f"train.seed={seed}")
        for name, sets in self.changes.items():
            yield name, (*self.common, *sets)

    def trained(self, name: str) -> str:
        """The folder of a training."""
        return folder(name, self.text, dict(self.runs())[name])

    def quantized(self, name: str) -> tuple[str, str]:
        """The folders of a run, and of what is made of it when it is quantized."""
        run = self.trained(name if name in self.changes else next(self.runs())[0])
        return run, folder(f"quantized {name}", run, self.quantize[name])


def folder(name: str, of: str, sets: Sequence[str]) -> str:
    """A readable name of its own for work that is called `name`, and that is of a text and `--set` texts."""
    digest = hashlib.sha256(json.dumps([name, of, *sets]).encode()).hexdigest()[:8]
    return f"{''.join(c if c.isalnum() else '_' for c in name)}_{digest}"


def words(sets: Sequence[str]) -> list[str]:
    return [word for text in sets for word in ("--set", text)]


def claimed(place: Path) -> bool:
    """Whether the work of this folder is now this process's own."""
    try:
        place.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def specc(place: Path, arguments: Sequence[str]) -> None:
    """Runs specc, with what it says in output.txt, and then its exit code in EXIT."""
    with (place / "output.txt").open("ab") as file:
        code = subprocess.run([*SPECC, *arguments], stdout=file, stderr=subprocess.STDOUT).returncode
    (place / EXIT).write_text(f"{code}\n", encoding="utf-8")
    print(place.name, "done" if code == 0 else f"failed ({code}): see {file.name}", flush=True)


def train(plan: Plan, asked: argparse.Namespace) -> None:
    """Every training that nobody has claimed, while there is time."""
    for name, sets in plan.runs():
        if time.monotonic() > asked.until:
            return
        place = asked.out / plan.trained(name)
        if claimed(place):
            fixed = ["--run", str(place / "run"), "--data", asked.data, "--target", asked.target]
            specc(place, ["train", plan.spec, *fixed, *words(sets)])


def quantize(plan: Plan, asked: argparse.Namespace) -> None:
    """Every way to quantize that nobody has claimed and whose run has ended complete, while there is time."""
    for name, sets in plan.quantize.items():
        if time.monotonic() > asked.until:
            return
        trained, place = (asked.out / one for one in plan.quantized(name))
        if score(trained) is not None and claimed(place):
            subprocess.run(["cp", "-r", str(trained / "run"), str(place / "run")], check=True)
            specc(place, ["quantize", str(place / "run"), "--target", asked.target, *words(sets)])


def events(log: Path) -> Iterator[Mapping[str, Any]]:
    """What a run has logged, without lines that a killed process left torn."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else ():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def score(place: Path, weights: str | None = None) -> float | None:
    """Nats a token of a run that ended complete, of the weights that it ends with, or of those that are named; None
    where it has not, or has no such."""
    score, found = None, dict[str, float]()
    for event in events(place / "run/log.jsonl"):
        match event["event"]:
            case "start":  # of a run that goes on, too: what was scored before is of earlier weights
                found.clear()
            case "validation":
                found[event["weights"]] = float(event["nats"])
            case "end" if event["complete"]:
                score = found.get(weights or event["weights"])
    return score


def why_not(place: Path) -> str:
    """Why the work of this folder has no result."""
    if not place.is_dir():
        return "not begun"
    if not (place / EXIT).is_file():
        return "not finished: still at it, or killed"
    code = int((place / EXIT).read_text(encoding="utf-8"))
    return f"failed ({code}): see {place.name}/output.txt" if code else "not finished: ended early"


def table(plan: Plan, out: Path) -> Iterator[str]:
    """Markdown: every run of the list, with its score beside the mean of the whole model, or why it has none."""
    ended = {seed: out / plan.trained(f"whole, seed {seed}") for seed in plan.seeds}
    whole = {seed: value for seed, place in ended.items() if (value := score(place)) is not None}
    raw = [value for seed in whole if (value := score(ended[seed], "raw")) is not None]
    if not whole:
        told = "; ".join(f"seed {seed} is {why_not(place)}" for seed, place in ended.items())
        raise SystemExit(f"no run of the whole model in {out} has a score yet: {told}")
    mean, spread = statistics.mean(whole.values()), max(whole.values()) - min(whole.values())
    yield "| | nats a token | to the whole |"
    yield "|---|---|---|"
    yield f"| the whole model, mean of {len(whole)} seeds, which differ by {spread:.4f} | {mean:.4f} | |"
    if raw and raw != [*whole.values()]:
        alone = statistics.mean(raw)
        yield f"| no averaging: the raw weights of these {len(raw)} | {alone:.4f} | {alone - mean:+.4f} |"
    for seed in plan.seeds:
        if seed not in whole:
            yield f"| the whole model, seed {seed} | {why_not(ended[seed])} | |"
    for name in plan.changes:
        place = out / plan.trained(name)
        value = score(place)
        yield f"| {name} | {why_not(place)} | |" if value is None else f"| {name} | {value:.4f} | {value - mean:+.4f} |"
    for name in plan.quantize:
        place = out / plan.quantized(name)[1]
        report = place / "run" / REPORT
        if not report.is_file():
            yield f"| quantized: {name} | {why_not(place)} | |"
            continue
        found = json.loads(report.read_text(encoding="utf-8"))
        before, after = (found[when]["nats"] / found[when]["tokens"] for when in ("before", "after"))
        told = f"| quantized: {name}, {found['artifact_bytes']:,} bytes | {after:.4f}"
        yield f"{told} | {after - before:+.4f} to {before:.4f} as trained |"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so many")
    parser.add_argument("--table", action="store_true", help="train nothing, and print what there is")
    asked = parser.parse_args(arguments)
    asked.until = time.monotonic() + 60 * asked.minutes
    plan = Plan.read(asked.list)
    if not asked.table:
        train(plan, asked)
        quantize(plan, asked)
    print("\n".join(table(plan, asked.out)))


if __name__ == "__main__":
    main(sys.argv[1:])
