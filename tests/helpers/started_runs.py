"""Training by the command, in several processes, that tests disturb."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ranks import environment
from run_samples import SPEC, write_text

MAIN = "from specc.cli.app import main; main()"
SPECC = [sys.executable, "-c", MAIN]
SMALL = (
    "targets=[cpu]",
    "model.dim=32",
    "model.context=32",
    "model.blocks.count=2",
    "train.steps=12",
    "train.micro_batch=4",
    "train.tokens_per_step=512",
    "train.schedule={warmup_steps: 2, warmdown_steps: 4}",
    "train.average={kind: ema, decay: 0.8}",
    "train.validate_every=5",
)


def arguments(folder: Path, name: str, *more: str, steps: int = 12) -> list[str]:
    """`train` of a small model; the data are made where they are missing."""
    data = folder / "data"
    if not data.exists():
        write_text(data)
    overrides = [word for text in (*SMALL, f"train.steps={steps}") for word in ("--set", text)]
    return ["train", str(SPEC), "--data", str(data), "--run", str(folder / name), *overrides, *more]


@contextmanager
def started(folder: Path, words: Sequence[str] = ()) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """A long run of two processes in `folder/run`, once it trains, and the ids of its ranks."""
    words = words or arguments(folder, "run", "--target", "cpu", "--gpus", "2", steps=100_000)
    with subprocess.Popen([*SPECC, *words], env=environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            log, until = folder / "run" / "log.jsonl", time.monotonic() + 400
            while not (log.exists() and '"step": 3,' in log.read_text()):
                assert process.poll() is None and time.monotonic() < until, process.stderr and process.stderr.read()
                time.sleep(0.05)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield process, [int(child) for child in children]
        finally:
            process.kill()


def ended(process: "subprocess.Popen[str]", ranks: Sequence[int], timeout: float = 60) -> tuple[int, str]:
    """Exit code and what was shown. No rank is left behind."""
    _, shown = process.communicate(timeout=timeout)
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    return process.returncode, shown
