"""Reports the progress of a training run: log.jsonl for programs, and a progress bar or plain lines for people."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from specc.runtime.errors import cannot_write

Say = Callable[[str], None]
Value = str | int | float | bool | None | Mapping[str, Sequence[float]] | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Step:
    """Measurements of one optimizer step.

    Attributes:
        step: the number of the step.
        loss: the mean loss over the tokens of the step, in nats per token.
        lr: the learning-rate multiplier of the schedule.
        grad_norm: the norm of the gradient before clipping.
        tokens_per_second: the throughput in tokens per second, without padding. For line pairs, the tokens of sources
            and of targets count.
        seconds: the training time so far.
        samples_per_second: the throughput in samples; None if the data have no samples.
        tokens: the number of tokens of the step, without padding. For line pairs, the tokens of sources and of targets
            count.
        loss_scale: the factor by which the loss is multiplied for the backward pass; None if the factor is constant.
        skipped: True if the step did not change the weights, because a gradient was infinite or NaN.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    samples_per_second: float | None = None
    tokens: int | None = None
    loss_scale: float | None = None
    skipped: bool | None = None


# Shows a step. The float is the completed fraction of the run, from 0 to 1.
Progress = Callable[[Step, float], None]


class Follower(Protocol):
    """A receiver of log records, such as an experiment tracker. Its methods must not raise exceptions."""

    def write(self, event: str, values: Mapping[str, Value]) -> None: ...


class RunLog:
    """Writes a log file with one JSON object per line, without buffering.

    The field `event` of an object is one of: machine, start, start_up, step, validation, losses, experts, reached,
    checkpoint, end, stopped, failure. All methods raise EnvironmentFailure if the file cannot be written.

    Args:
        path: the log file. If the file exists, records are appended.
        memory: a function that returns the peak memory of the process in bytes, for the records of steps. None omits
            the memory from these records.
        followers: the receivers of each record. Each record is written to the file first.
    """

    def __init__(self, path: Path, memory: Callable[[], int] | None = None, followers: Sequence[Follower] = ()) -> None:
        self._path, self._memory, self._followers = path, memory, followers
        try:
            self._file = path.open("ab", buffering=0)
            torn = path.stat().st_size > 0 and _last_byte(path) != b"\n"
        except OSError as error:
            raise cannot_write(self._path, error) from error
        if torn:  # an interrupted run may have left an incomplete last line
            self._append(b"\n")

    def write(self, event: str, **values: Value) -> None:
        self._append(json.dumps({"event": event, **values}, allow_nan=False).encode() + b"\n")
        for follower in self._followers:
            follower.write(event, values)

    def _append(self, line: bytes) -> None:
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def step(self, step: Step) -> None:
        values = {name: value for name, value in asdict(step).items() if value is not None and math.isfinite(value)}
        self.write("step", **values, **({"memory_bytes": self._memory()} if self._memory else {}))

    def close(self) -> None:
        self._file.close()


class Silence:
    """A log that discards all records, for processes that do not report."""

    def write(self, event: str, **values: Value) -> None: ...

    def step(self, step: Step) -> None: ...


def logged(path: Path, event: str) -> bool:
    """Returns whether the log at `path` has a record of `event`."""
    start = json.dumps({"event": event})[:-1].encode()
    try:
        with path.open("rb") as file:
            return any(line.startswith(start) for line in file)
    except FileNotFoundError:
        return False


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


def lines(say: Say) -> Progress:
    """Returns a progress display that calls `say` with one line for every 5 % of the run."""
    shown = -1

    def show(step: Step, done: float) -> None:
        nonlocal shown
        part = int(done * 20)
        if part != shown:
            say(f"{done:4.0%}  {_line_of(step)}")
            shown = part

    return show


@contextmanager
def open_progress(say: Say) -> Iterator[Progress]:
    """Shows a progress bar if standard error is a terminal. Otherwise, calls `say` with one line for every 5 % of the
    run.

    Errors of the terminal are ignored, so that the run continues after the user closes the terminal.
    """
    if not sys.stderr.isatty():
        yield lines(say)
        return
    columns = (BarColumn(), TextColumn("{task.percentage:3.0f}%"), TextColumn("{task.fields[words]}"))
    progress = RichProgress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
    task = progress.add_task("train", total=1.0, words="")

    def show(step: Step, done: float) -> None:
        with suppress(OSError):
            progress.update(task, completed=done, words=_line_of(step))

    with suppress(OSError):
        progress.start()
    try:
        yield show
    finally:
        with suppress(OSError):
            progress.stop()


def unfailing(say: Say) -> Say:
    """Returns a function that calls `say`, and ignores its write errors, so that the run continues."""

    def report(line: str) -> None:
        try:
            say(line)
        except OSError:  # for example a closed pipe, a closed terminal or a full disk
            _silence_broken_streams()

    return report


def _silence_broken_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # without a redirection, Python would flush the stream at exit, and fail again
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


@dataclass(frozen=True, slots=True)
class Reporter:
    """The destinations to which a run is reported."""

    log: RunLog | Silence
    progress: Progress
    say: Say


def _line_of(step: Step) -> str:
    samples = "" if step.samples_per_second is None else f"{step.samples_per_second:,.0f} samples/s  "
    skipped = f"  skipped at loss scale {step.loss_scale:g}" if step.skipped else ""
    return (
        f"step {step.step:,}  loss {step.loss:.4f}  lr x{step.lr:.3f}  norm {step.grad_norm:.3f}  {samples}"
        f"{step.tokens_per_second:,.0f} tokens/s  {step.seconds:.1f} s{skipped}"
    )
