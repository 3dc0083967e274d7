"""The training loop: steps, validation, checkpoints, a log, and an orderly end whatever happens."""

import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from specc.runtime.errors import RunFailure, RuntimeFailure
from specc.runtime.log import RunLog, Say, Silence, Step
from specc.runtime.metrics.validation import Measured, Validates
from specc.runtime.storage.checkpoint import Snapshot
from specc.runtime.train.signals import Signals, Stopped
from specc.runtime.train.trainer import Trainer

_MEMORY = "lower train.micro_batch; the size of a step may stay"


class Progress(Protocol):
    def show(self, step: Step, done: float) -> None: ...


class RunLabel(Protocol):
    """The names by which a run reports and resumes."""

    @property
    def directory(self) -> Path: ...
    @property
    def target(self) -> str: ...
    @property
    def spec_digest(self) -> str: ...
    @property
    def resume_command(self) -> str: ...


class _Noticed(Exception):
    """A signal came to this process; the others of its world do not know yet."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends this run early: a number of steps of the run in all, seconds in this loop."""

    steps: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended. `checkpoint` holds what it ends with: the averaged weights where the spec averages.

    `complete` is False where the run was ended early; `seconds` are those of training. `raw` and `averaged`
    are what validation gave for the plain and the averaged weights.
    """

    run: Path
    checkpoint: Path
    step: int
    seconds: float
    complete: bool
    raw: Measured
    averaged: Measured | None

    @property
    def final(self) -> Measured:
        return self.averaged or self.raw


class Loop:
    """One run from where its trainer stands to its end.

    `save` commits the state and returns where; it raises RunFailure when the disk is full.
    In a world of several processes each runs the loop. What ends it early, a signal to any of them or a clock,
    all of them look at together once a step, so they stop at the same one. Rank 0 saves and reports.
    """

    def __init__(
        self,
        run: RunLabel,
        save: Callable[[Snapshot], Path],
        trainer: Trainer,
        validation: Validates,
        log: RunLog | Silence,
        progress: Progress,
        say: Say,
        limits: Limits,
    ) -> None:
        self._run, self._save, self._trainer, self._validation = run, save, trainer, validation
        self._log, self._progress, self._say, self._limits = log, progress, say, limits
        self._signals = Signals()
        self._began = time.monotonic()
        self._elapsed = 0.0

    def run(self) -> TrainResult:
        """Raises RunFailure when the loss is not finite, memory or disk is full, or another process is lost, DataError
        when the data cannot be read on, and Preempted or Interrupted, with everything committed, after a signal."""
        with self._signals:
            try:
                self._train()
                return self._finish()
            except Stopped as stop:
                failure = stop.failure(f"saved as {self._commit()}; continue with: {self._run.resume_command}")
                self._log.write("stopped", step=self._trainer.step, message=failure.message)
                raise failure from None
            except torch.OutOfMemoryError as error:
                failure = RunFailure(f"step {self._trainer.step + 1}: out of GPU memory", _MEMORY)
                self._log_failure(failure)
                raise failure from error
            except RuntimeFailure as error:
                self._log_failure(error)
                raise

    def _log_failure(self, error: RuntimeFailure) -> None:
        with suppress(RunFailure):  # a full disk takes no log either; what is raised says it
            self._log.write("failure", step=self._trainer.step, message=error.message)

    def _train(self) -> None:
        trainer, train = self._trainer, self._trainer.train
        trainer.require_same()
        self._log.write(
            "start",
            step=trainer.step,
            spec_digest=self._run.spec_digest,
            target=self._run.target,
            device=str(trainer.device),
            processes=trainer.world.size,
            threads=torch.get_num_threads(),
            torch=str(torch.__version__),
            python=platform.python_version(),
        )
        if (trainer.compiled or train.budget_seconds is not None) and not self._ended():
            began = time.monotonic()
            trainer.warm_up(self._validation.vocabulary)  # so that the clock sees no compilation
            if coming := trainer.coming:
                took = time.monotonic() - began
                self._say(f"compiled {coming + 1} phases of the run in {took:.1f} s, before its clock starts")
        self._began = time.monotonic()
        self._look()
        trainer.clock.start()
        while not self._ended():
            before = trainer.stretch
            self._report(trainer.advance())
            if trainer.stretch != before:
                self._say(f"step {trainer.step:,}: from here on {trainer.stretch.words}")
            self._look()
            # a run whose scales cannot be measured goes on from there
            commits = self._due(train.checkpoint_every) or trainer.measures
            validates = self._due(train.validate_every)
            if (commits or validates) and not self._ended():
                self._report(trainer.settle())
                with trainer.paused():
                    if commits:
                        self._commit()
                    if validates:
                        self._validate("raw", None)
                self._look()
        self._report(trainer.settle())
        trainer.clock.stop()

    def _look(self) -> None:
        """What ends a run early, as it is now, and for all processes alike. Raises Stopped."""
        trainer = self._trainer
        leads = trainer.world.rank == 0
        number, seconds, self._elapsed = trainer.world.most(
            self._signals.came,
            trainer.clock.seconds if leads else 0.0,
            time.monotonic() - self._began if leads else 0.0,
        )
        if trainer.world.size > 1:
            trainer.clock.agree(seconds)
        if number:
            raise Stopped(int(number))

    def _due(self, every: int) -> bool:
        return every > 0 and self._trainer.step % every == 0

    def _ended(self) -> bool:
        limits, trainer = self._limits, self._trainer
        return (
            trainer.done >= 1
            or (limits.steps is not None and trainer.step >= limits.steps)
            or (limits.seconds is not None and self._elapsed >= limits.seconds)
        )

    def _finish(self) -> TrainResult:
        trainer = self._trainer
        path = self._commit()
        complete = trainer.done >= 1
        raw = self._validate("raw", None)
        begun = trainer.average is not None and trainer.average.begun
        if trainer.average is not None and not begun:
            self._say("the average never began: the run ends with the weights as they are")
        averaged = self._validate("average", trainer.average.tensors) if trainer.average is not None and begun else None
        ends_with = "raw" if averaged is None else "average"
        totals = trainer.totals()
        self._log.write(
            "end", step=trainer.step, seconds=trainer.clock.seconds, complete=complete, weights=ends_with, **totals
        )
        if totals:
            self._say(
                f"{totals['samples']:,} samples and {totals['tokens']:,} tokens in {trainer.clock.seconds:.1f} s: "
                f"{totals['samples_per_second']:,.0f} samples/s, {totals['tokens_per_second']:,.0f} tokens/s"
            )
        if not complete:
            self._say(f"ended early after step {trainer.step:,}; continue with: {self._run.resume_command}")
        return TrainResult(self._run.directory, path, trainer.step, trainer.clock.seconds, complete, raw, averaged)

    def _report(self, steps: list[Step]) -> None:
        for step in steps:
            self._log.step(step)
            self._progress.show(step, self._trainer.done)

    def _commit(self) -> Path:
        """Commits a checkpoint of where the trainer stands; never one whose last step was not finite."""
        trainer = self._trainer
        self._report(trainer.settle())
        trainer.require_same()
        trainer.gather()
        path = trainer.world.first(lambda: self._save(trainer.snapshot()))
        self._log.write("checkpoint", step=trainer.step, path=path.name)
        return path

    def _validate(self, which: str, weights: Mapping[str, Tensor] | None) -> Measured:
        trainer = self._trainer

        def glance(done: int, todo: int) -> None:
            if self._signals.came:
                raise _Noticed

        try:
            result = trainer.evaluate(self._validation, weights, glance, meet=self._look)
        except _Noticed:
            self._look()  # meets the others, who score their parts to the end; raises Stopped for all
            raise
        self._log.write("validation", step=trainer.step, weights=which, **result.record())
        rounded = "" if weights is not None or not trainer.rounds else ", rounded"
        rounded += ", of inputs as they are" if rounded and trainer.stretch.phase.rounds else ""
        self._say(f"step {trainer.step:,}  validation, {which} weights{rounded}: {result.line()}")
        return result
