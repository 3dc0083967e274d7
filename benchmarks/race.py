"""Races specs/gpt2_fast.yaml against the training script of the NoCap benchmark, on one GPU.

python benchmarks/race.py --original train_gpt2.py --train train.txt.xz --val val.txt.xz --tokenizer gpt2.tiktoken

The target is the mean loss that the script reaches in 160 steps of 524,288 tokens with the best of four learning rates,
over three seeds. gpt2_fast trains on the same text until its validation is at the target. Both clocks stop during
validation and leave out compilation. Both sides validate every `--spacing` tokens, on the first 442,368 targets.

Each leg of the race is a process of its own, on the first visible GPU. Its record is a line of `race.jsonl` in `--out`.
A leg that has a record with the same settings is not repeated, so the same command continues a race. `--only` chooses
legs by patterns: `original@2-*`, `fast-seed1`, `fast:no softcap-*`. `--dry-run` lists them. Two commands with the same
`--out` may run at once, on two GPUs.

The script is not part of this repository. The command applies the changes in `CHANGES` to it and prints them.
Everything else is set by options of the script.
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

from filelock import FileLock

SWEEP = Path(__file__).with_name("gpt2_fast.yaml")
SEEDS = (1, 2, 3)
RATE, FACTORS = 0.0018, (1.0, 2.0, 0.5, 4.0)  # the published learning rate, and what it is multiplied by
STEPS, TOKENS_PER_STEP = 160, 524_288
WARM_UP, WARM_DOWN = round(STEPS * 256 / 4768), round(STEPS * 1024 / 4768)  # the published shares of a run
VALIDATION_TOKENS, ROWS = 442_368, 16  # 432 rows of 1,024; rows per batch
MARGIN = 0.001  # gpt2_fast validates in bf16 and stops this far below the target, which f32 confirms

# What is replaced in the script, by what, and why. Each must occur exactly once.
CHANGES = (
    (r"^VAL_TOKENS = 1_048_576\b", f"VAL_TOKENS = {VALIDATION_TOKENS}", "the validation text has fewer tokens"),
    (r"^( *)(model = GPT\(model_config\))$", r"\1torch.manual_seed({seed})\n\1\2", "the script sets no seed"),
)
STEP = re.compile(r"^step:(\d+)/\d+ \| loss \S+ \| train_time:([\d.]+)s")
VALIDATED = re.compile(r"^step:(\d+)/\d+ \| val loss ([\d.]+|nan|inf)")

Record = dict[str, Any]


class RaceError(SystemExit):
    """A leg cannot run, or has failed."""


@dataclass(frozen=True)
class Leg:
    """A training run of the race.

    Attributes:
        name: the name in the table.
        seed: the seed of the weights, and of the order of the data where the side has one.
        factor: what the published learning rate of the script is multiplied by. None for gpt2_fast.
        overrides: the `--set` texts of gpt2_fast.
        stop: the loss at which gpt2_fast stops.
    """

    name: str
    seed: int
    factor: float | None = None
    overrides: tuple[str, ...] = ()
    stop: float | None = None


def original(factor: float, seed: int) -> Leg:
    return Leg(f"original@{factor:g}-seed{seed}", seed, factor)


def fast(sets: Mapping[str, tuple[str, ...]], seed: int, stop: float | None) -> Leg:
    """Returns the leg of gpt2_fast with the first setting of the sweep file. It ends when the loss is `stop` or
    less."""
    return Leg(f"fast-seed{seed}", seed, None, next(iter(sets.values())), stop)


def ablation(sets: Mapping[str, tuple[str, ...]], setting: str, seed: int) -> Leg:
    """Returns the leg of gpt2_fast with a setting of the sweep file. It trains the whole schedule."""
    return Leg(f"fast:{setting}-seed{seed}", seed, None, sets[setting])


@dataclass(frozen=True)
class Race:
    """The files and options of a race."""

    script: Path
    data: Path
    out: Path
    spacing: int
    rows: int  # of a micro-batch of the script
    target: str
    overrides: tuple[str, ...] = ()

    def records(self) -> list[Record]:
        path = self.out / "race.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def settings(self, leg: Leg) -> dict[str, Any]:
        """Returns everything that determines the result of a leg, as fields of its record."""
        shared = {"seed": leg.seed, "data": self.data.name, "spacing": self.spacing}
        if leg.factor is not None:
            text = patched(self.script, leg.seed)
            return {**shared, "script": sha256(text.encode()).hexdigest(), "options": self.options(leg)}
        overrides, tokens_per_step = self._overrides(leg), _tokens_per_step(self._overrides(leg))
        if self.spacing % tokens_per_step:
            raise RaceError(f"{leg.name}: --spacing {self.spacing} is not a multiple of its step of {tokens_per_step}")
        overrides = (*overrides, f"train.validate_every={self.spacing // tokens_per_step}")
        stop = () if leg.stop is None else (f"train.stop_at_loss={leg.stop - MARGIN:.6f}",)
        return {**shared, "spec": sha256(spec_path().read_bytes()).hexdigest(), "overrides": [*overrides, *stop]}

    def run(self, leg: Leg) -> Record:
        """Runs a leg and appends its record. Raises RaceError if it fails."""
        settings, began = self.settings(leg), time.time()
        folder = self.out / leg.name.replace(":", "_").replace(" ", "_")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        measured = self._run_original(leg, settings, folder) if leg.factor else self._run_fast(leg, settings, folder)
        record = {"leg": leg.name, **measured, "wall": time.time() - began, "settings": settings, **machine()}
        with (self.out / "race.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        return record

    def options(self, leg: Leg) -> list[str]:
        """Returns the options of the script, which runs in a folder beside the data."""
        shards = f"../{self.data.name}/*"
        values = {
            "input_bin": f"{shards}_train_*.bin",
            "input_val_bin": f"{shards}_val_0*.bin",
            "model": "d12",
            "batch_size": self.rows,
            "grad_accumulation_steps": TOKENS_PER_STEP // (1024 * self.rows),
            "sequence_length": 1024,
            "val_loss_every": self.spacing // TOKENS_PER_STEP,
            "val_batch_size": ROWS,
            "num_iterations": STEPS,
            "weight_decay": 0.1,
            "learning_rate": f"{RATE * (leg.factor or 0):g}",
            "warmup_iters": WARM_UP,
            "warmdown_iters": WARM_DOWN,
        }
        return [text for name, value in values.items() for text in (f"--{name}", str(value))]

    def _run_original(self, leg: Leg, settings: Mapping[str, Any], folder: Path) -> Record:
        script = folder / self.script.name
        script.write_text(patched(self.script, leg.seed))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **address, "PYTHONUNBUFFERED": "1"}
        output = _run([sys.executable, script.name, *settings["options"]], folder, environment)
        shutil.rmtree(folder / "logs", ignore_errors=True)  # the weights
        return read_original(output.splitlines())

    def _overrides(self, leg: Leg) -> tuple[str, ...]:
        tokens = f"train.validate_tokens={VALIDATION_TOKENS}"
        return (*self.overrides, *leg.overrides, f"train.seed={leg.seed}", tokens)

    def _run_fast(self, leg: Leg, settings: Mapping[str, Any], folder: Path) -> Record:
        run = folder / "run"
        sets = [text for override in settings["overrides"] for text in ("--set", override)]
        command = [sys.executable, "-P", "-m", "specc.cli", "train", str(spec_path()), "--data", str(self.data)]
        _run([*command, "--target", self.target, "--run", str(run), *sets], folder, {})
        record = read_fast([json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()])
        if not leg.name.startswith("fast:"):
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                record["loss_f32"] = process.submit(loss_in_f32, run, self.data).result()
        shutil.rmtree(run / "checkpoints", ignore_errors=True)  # several GB
        return record


def spec_path() -> Path:
    return SWEEP.parents[1] / "specs" / SWEEP.name


def patched(script: Path, seed: int) -> str:
    """Returns the text of the script with the changes of `CHANGES`. Raises RaceError if one does not apply."""
    text = script.read_text()
    for pattern, replacement, _ in CHANGES:
        text, count = re.subn(pattern, replacement.replace("{seed}", str(seed)), text, flags=re.MULTILINE)
        if count != 1:
            reason = f"{pattern!r} occurs {count} times and not once"
            raise RaceError(f"{script}: {reason}; give train_gpt2.py of NoCap-Test, commit 09d9b38")
    return text


def read_original(lines: Iterable[str]) -> Record:
    """Reads the output of the script.

    The clock of the script begins before the first step, which compiles. This step is counted with the mean time of the
    other steps.
    """
    seconds: dict[int, float] = {}
    losses: dict[int, float] = {}
    for line in lines:
        if match := STEP.match(line):
            seconds[int(match[1]) + 1] = float(match[2])
        elif match := VALIDATED.match(line):
            losses[int(match[1])] = float(match[2].replace("nan", "inf"))  # it diverged
    if len(seconds) < 2 or STEPS not in losses:
        raise RaceError("the script printed no steps, or no validation at its end")
    last = max(seconds)
    step = (seconds[last] - seconds[1]) / (last - 1)
    compiled = seconds[1] - step
    validations = [
        {"tokens": count * TOKENS_PER_STEP, "seconds": seconds.get(count, compiled) - compiled, "loss": loss}
        for count, loss in sorted(losses.items())
    ]
    return {**_ended(validations), "compiled": compiled}


def read_fast(log: Sequence[Mapping[str, Any]]) -> Record:
    """Reads the log of a run. Its clock begins after compilation."""
    tokens, at = 0, dict[int, tuple[int, float]]()
    for event in log:
        if event["event"] == "step":
            tokens += event["tokens"]
            at[event["step"]] = (tokens, event["seconds"])
    validations = [
        {"tokens": at[event["step"]][0], "seconds": at[event["step"]][1], "loss": event["nats"]}
        for event in log
        if event["event"] == "validation" and event["weights"] == "raw"
    ]
    if not validations:
        raise RaceError("the run has no validation")
    return _ended(validations)


def _ended(validations: Sequence[Record]) -> Record:
    return {**validations[-1], "validations": validations}


def loss_in_f32(run: Path, data: Path) -> float:
    """Returns the loss of a finished run in nats per target. It is computed in f32, like the validation of the script.

    The code for a CPU computes in f32. Without fusion points it is plain Torch, which runs on a GPU too, without TF32.
    """
    import torch

    from specc.runtime.eval.options import EvaluateOptions
    from specc.runtime.eval.text import evaluate_text
    from specc.runtime.open_model import open_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    opened = open_model(run, "cpu", device, search=(data,), prepared=lambda spec: spec.model_copy(update={"fuse": ()}))
    options = EvaluateOptions(str(data), batch=ROWS, max_tokens=VALIDATION_TOKENS, compiled=False)
    result = evaluate_text(opened, options)
    return result.nats / result.tokens


def machine() -> Record:
    """Returns the GPU and the versions, for a record."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "torch": str(torch.__version__), "python": sys.version.split()[0], "at": time.strftime("%F %T")}


def _tokens_per_step(overrides: tuple[str, ...]) -> int:
    from specc.compiler.spec.check import load

    tokens = load(spec_path(), overrides)[0].train.tokens_per_step
    if not isinstance(tokens, int):
        raise RaceError("validations at equal distances need a step of constant size")
    return tokens


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Runs a command in a folder and returns its output, which is also written to the file `output` in the folder.
    Raises RaceError if the command fails."""
    path = folder / "output"
    with path.open("w") as file:
        ended = subprocess.run(
            command, cwd=folder, env={**os.environ, **environment}, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    output = path.read_text()
    if ended.returncode:
        raise RaceError(f"{' '.join(command)}\nexit code {ended.returncode}:\n{output[-3000:]}")
    return output


def settings_of(path: Path) -> dict[str, tuple[str, ...]]:
    """Checks the specs of a sweep file, and returns the overrides of each setting."""
    from specc.runtime.sweep.plan import read_sweep

    return {run.setting: run.overrides for run in read_sweep(path).runs}


def finished(race: Race, leg: Leg) -> Record | None:
    """Returns the record of a leg with the same settings, if there is one."""
    settings = race.settings(leg)
    return next((r for r in race.records() if r["leg"] == leg.name and r["settings"] == settings), None)


def best_factor(race: Race) -> float | None:
    """Returns the factor of the learning rate with the least loss. None if a factor has not run."""
    records = {factor: finished(race, original(factor, SEEDS[0])) for factor in FACTORS}
    losses = {factor: record["loss"] for factor, record in records.items() if record is not None}
    return min(losses, key=losses.__getitem__) if len(losses) == len(FACTORS) else None


def originals(race: Race, factor: float) -> list[Record]:
    """Returns the records of the finished legs of the script with a factor, in the order of seeds."""
    return [record for seed in SEEDS if (record := finished(race, original(factor, seed))) is not None]


def legs(race: Race, sets: Mapping[str, tuple[str, ...]], target: float | None) -> Iterator[Leg]:
    """Yields the legs in their order. Each is decided when it is due, because later legs depend on earlier results."""
    yield from (original(factor, SEEDS[0]) for factor in FACTORS)
    if (best := best_factor(race)) is not None:
        yield from (original(best, seed) for seed in SEEDS[1:])
        if target is None and len(records := originals(race, best)) == len(SEEDS):
            target = mean(record["loss"] for record in records)
    if target is None:  # a leg of the script has failed
        return
    yield from (fast(sets, seed, target) for seed in SEEDS)
    yield from (ablation(sets, setting, SEEDS[0]) for setting in sets)


def explicit(sets: Mapping[str, tuple[str, ...]], target: float | None) -> list[Leg]:
    """Returns every leg that `--only` can name, whether or not the race needs it."""
    return [
        *(original(factor, seed) for factor in FACTORS for seed in SEEDS),
        *(fast(sets, seed, target) for seed in SEEDS),
        *(ablation(sets, setting, seed) for setting in sets for seed in SEEDS),
    ]


def crossing(record: Record, target: float) -> Record | None:
    """Returns the first validation at or below the target."""
    return next((point for point in record["validations"] if point["loss"] <= target), None)


def table(records: Sequence[Record], sets: Iterable[str], target: float | None) -> list[str]:
    """Returns one row per record, as Markdown. Ablations are compared with the leg of the first setting."""
    whole = {f"fast:{next(iter(sets))}-seed{seed}": seed for seed in SEEDS}
    base = {whole[record["leg"]]: record["loss"] for record in records if record["leg"] in whole}
    rows = ["| leg | loss | to the whole | in f32 | tokens | seconds | to the target | whole process, s |"]
    rows.append("|---|--:|--:|--:|--:|--:|--:|--:|")
    for record in records:
        at = crossing(record, target) if target is not None else None
        f32 = record.get("loss_f32", record["loss"] if record["leg"].startswith("original") else None)
        compared = base.get(record["settings"]["seed"]) if record["leg"].startswith("fast:") else None
        values = (
            record["leg"],
            f"{record['loss']:.4f}",
            "" if compared is None else f"{record['loss'] - compared:+.4f}",
            "" if f32 is None else f"{f32:.4f}",
            f"{record['tokens']:,}",
            f"{record['seconds']:.1f}",
            "" if at is None else f"{at['seconds']:.1f}",
            f"{record['wall']:.0f}",
        )
        rows.append("| " + " | ".join(values) + " |")
    return rows


def verdict(race: Race, sets: Mapping[str, tuple[str, ...]], target: float | None) -> list[str]:
    """Returns the target, both times and their ratio, as far as the legs have run."""
    best = best_factor(race)
    if best is None or target is None:
        return ["the learning rate of the script is not decided: " + ", ".join(f"original@{f:g}" for f in FACTORS)]
    records = originals(race, best)
    seconds = mean(record["seconds"] for record in records)
    lines = [f"target {target:.4f}: the script at {best:g} x {RATE:g}, {len(records)} seeds, {seconds:.1f} s"]
    finished_legs = (finished(race, fast(sets, seed, target)) for seed in SEEDS)
    ours = [record for record in finished_legs if record is not None]
    if len(records) == len(ours) == len(SEEDS):
        loss, taken = mean(record["loss_f32"] for record in ours), mean(record["seconds"] for record in ours)
        state = "met" if loss <= target else "NOT met"
        lines.append(f"gpt2_fast {loss:.4f}, 3 seeds, {taken:.1f} s: target {state}, ratio {taken / seconds:.3f}")
    return lines


def pack(arguments: argparse.Namespace, data: Path) -> None:
    """Packs the text into token shards for both sides, unless the shards exist. Another race may be packing them at the
    same time."""
    with FileLock(f"{data}.lock"):
        if data.exists():
            return
        command = [sys.executable, "-P", "-m", "specc.cli", "data", "pack", str(arguments.train)]
        options = ["--validation", str(arguments.val), "--tokenizer", str(arguments.tokenizer), "--out", str(data)]
        if code := subprocess.run([*command, *options], check=False).returncode:
            raise RaceError(f"specc data pack ended with exit code {code}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--original", type=Path, required=True, help="train_gpt2.py of BottleCapAI/NoCap-Test")
    parser.add_argument("--train", type=Path, required=True, help="the training text")
    parser.add_argument("--val", type=Path, required=True, help="the validation text")
    parser.add_argument("--tokenizer", type=Path, required=True, help="gpt2.tiktoken")
    parser.add_argument("--out", type=Path, default=Path("runs/race"), help="folder of the records")
    parser.add_argument("--only", help="patterns of legs, with commas between them")
    parser.add_argument("--spacing", type=int, default=10 * TOKENS_PER_STEP, help="tokens between two validations")
    parser.add_argument("--rows", type=int, default=16, help="rows of a micro-batch of the script")
    parser.add_argument("--loss", type=float, help="the loss at which gpt2_fast stops, instead of the script's")
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="start no leg after this time")
    parser.add_argument("--set", action="append", default=[], dest="sets", help="an override of every gpt2_fast leg")
    parser.add_argument("--target", default="sm90", help="the target of gpt2_fast")
    parser.add_argument("--sweep", type=Path, default=SWEEP, help="the sweep file with the settings of gpt2_fast")
    parser.add_argument("--dry-run", action="store_true", help="list the legs, and start none")
    options = parser.parse_args(arguments)
    out, sets = options.out.resolve(), settings_of(options.sweep)
    data = out / f"data-{_digest(options.train, options.val, options.tokenizer)}"
    race = Race(options.original, data, out, options.spacing, options.rows, options.target, tuple(options.sets))
    for pattern, replacement, reason in CHANGES:
        print(f"{options.original.name}: {pattern} -> {replacement}: {reason}")
    print("options:", *race.options(original(1.0, SEEDS[0])))
    patched(race.script, SEEDS[0])
    if options.only:
        patterns = [pattern.strip() for pattern in options.only.split(",")]
        every = explicit(sets, options.loss)
        if unknown := [p for p in patterns if not any(fnmatchcase(leg.name, p) for leg in every)]:
            raise RaceError(f"no leg is named {', '.join(unknown)}; --dry-run lists them")
        due: Iterable[Leg] = [leg for pattern in patterns for leg in every if fnmatchcase(leg.name, pattern)]
    else:
        due = explicit(sets, options.loss) if options.dry_run else legs(race, sets, options.loss)
    if options.dry_run:
        print(*(f"{leg.name}: {' '.join(map(str, leg.overrides))}".rstrip(": ") for leg in due), sep="\n")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    pack(options, data)
    began, failed = time.monotonic(), list[str]()
    for leg in due:
        if (record := finished(race, leg)) is not None:
            continue
        if time.monotonic() - began > options.max_seconds:
            print(f"{leg.name} and later legs were not started: --max-seconds {options.max_seconds:g}")
            break
        try:
            record = race.run(leg)
        except RaceError as error:
            failed.append(f"{leg.name}: {error}")
            print(failed[-1], flush=True)
            continue
        print(table([record], sets, options.loss)[-1], flush=True)
    records = race.records()
    machines = sorted({f"{record['gpu']}, torch {record['torch']}" for record in records})
    target = options.loss or _target(race)
    print(*table(records, sets, target), *machines, *verdict(race, sets, target), *failed, sep="\n")
    return 1 if failed else 0


def _digest(*files: Path) -> str:
    return sha256(b"".join(sha256(file.read_bytes()).digest() for file in files)).hexdigest()[:12]


def _target(race: Race) -> float | None:
    best = best_factor(race)
    return None if best is None else mean(record["loss"] for record in originals(race, best))


if __name__ == "__main__":
    sys.exit(main())
