"""What a run reports: log.jsonl for programs, a progress bar or plain lines for people."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from specc.runtime.errors import RunFailure

Say = Callable[[str], None]
Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Step:
    """One update: `loss` in nats a token, mean over the step's tokens; `lr` the schedule's multiplier;
    `grad_norm` before clipping; `seconds` of training so far.
    Where steps are counted in samples, tokens are those of both sides, without pads."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    samples_per_second: float | None = None


class RunLog:
    """Appends one JSON object a line, each handed to the system at once. Its `event` is start, step,
    validation, checkpoint, end, stopped or failure. Raises RunFailure when the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
            torn = path.stat().st_size > 0 and _last_byte(path) != b"\n"
        except OSError as error:
            raise self._failure(error) from error
        if torn:  # a killed writer's last line
            self._append(b"\n")

    def write(self, event: str, **values: Value) -> None:
        self._append(json.dumps({"event": event, **values}, allow_nan=False).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> RunFailure:
        return RunFailure(f"cannot write {self._path}: {error.strerror or error}", "free some space")

    def step(self, step: Step) -> None:
        self.write("step", **{name: value for name, value in asdict(step).items() if value is not None})

    def close(self) -> None:
        self._file.close()


class Silence:
    """The log and the progress of a process that reports nothing: another one does."""

    def write(self, event: str, **values: Value) -> None: ...

    def step(self, step: Step) -> None: ...

    def show(self, step: Step, done: float) -> None: ...


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


class Lines:
    """Progress as a line at every twentieth of the run."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._shown = -1

    def show(self, step: Step, done: float) -> None:
        """`done` is the share of the run, 0 to 1."""
        part = int(done * 20)
        if part != self._shown:
            self._say(f"{done:4.0%}  {_in_words(step)}")
            self._shown = part


class Bar:
    """Progress as a bar on a terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("train", total=1.0, words="")

    def show(self, step: Step, done: float) -> None:
        self._progress.update(self._task, completed=done, words=_in_words(step))


@contextmanager
def open_progress(say: Say) -> Iterator[Lines | Bar]:
    """A bar where standard error is a terminal, else lines through `say`."""
    if not sys.stderr.isatty():
        yield Lines(say)
        return
    columns = (BarColumn(), TextColumn("{task.percentage:3.0f}%"), TextColumn("{task.fields[words]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        yield Bar(progress)


def _in_words(step: Step) -> str:
    samples = "" if step.samples_per_second is None else f"{step.samples_per_second:,.0f} samples/s  "
    return (
        f"step {step.step:,}  loss {step.loss:.4f}  lr x{step.lr:.3f}  norm {step.grad_norm:.3f}  {samples}"
        f"{step.tokens_per_second:,.0f} tokens/s  {step.seconds:.1f} s"
    )
