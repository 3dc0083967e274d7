"""The loop over the steps of a run.

The loop also validates the model, writes checkpoints and the log, and ends the run cleanly after a failure.

trainer.py computes each step, and train.py prepares the run.
"""

import platform
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from specc.runtime.distributed.signals import Stopped, handled_signals
from specc.runtime.errors import RunFailure, RuntimeFailure
from specc.runtime.log import Reporter, Step
from specc.runtime.metrics.expert_load import imbalance
from specc.runtime.metrics.validation import Measured, Validates
from specc.runtime.storage.checkpoint import Snapshot
from specc.runtime.train.out_of_memory import GENERAL
from specc.runtime.train.start_times import StartTimes
from specc.runtime.train.trainer import Trainer


class RunLabel(Protocol):
    """The properties of a run that the training loop needs for messages and for resuming."""

    @property
    def directory(self) -> Path: ...
    @property
    def target(self) -> str: ...
    @property
    def spec_digest(self) -> str: ...
    @property
    def resume_command(self) -> str: ...

    def logged_loss(self, step: int) -> float | None:
        """Returns the loss that the validation at `step` logged, in nats per token. None without such a validation."""


class _SignalReceived(Exception):
    """Raised after this process has received a signal, before the other processes know of the signal."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that end a run early.

    Attributes:
        steps: the number of steps, counted from step 0, after which the run ends; None for no limit.
        seconds: the wall-clock time of the loop, in seconds, after which the run ends; None for no limit.
    """

    steps: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run.

    Attributes:
        run: the run directory.
        checkpoint: the checkpoint with the final weights.
        step: the number of optimizer updates.
        seconds: the training time in seconds.
        complete: False if the run ended early.
        reached: whether the run ended because a validation reached `train.stop_at_loss`.
        raw: the last validation result of the master weights.
        averaged: the last validation result of the averaged weights; None if the run does not average its weights.
    """

    run: Path
    checkpoint: Path
    step: int
    seconds: float
    complete: bool
    raw: Measured
    averaged: Measured | None
    reached: bool = False

    @property
    def final(self) -> Measured:
        return self.averaged or self.raw


class Loop:
    """Trains one run, from the current step of the trainer to the end of the run.

    With several processes, each process runs the loop. Once per step, the processes exchange their signals and elapsed
    times, so that all processes stop at the same step. Rank 0 writes checkpoints and the log.

    Args:
        run: the names and paths of the run.
        trainer: the model in training.
        validation: the data on which the model is scored.
        reporter: the log, the progress display and the function that prints lines.
        limits: the limits that end the run early.
        save: writes a snapshot and returns the path of the checkpoint. Raises RunFailure if the disk is full.
        advice: returns the hint for the user after a GPU has run out of memory.
        start: the measurement of the start of the run, if it has already begun. None for a new measurement.
    """

    def __init__(
        self,
        run: RunLabel,
        trainer: Trainer,
        validation: Validates,
        reporter: Reporter,
        limits: Limits,
        save: Callable[[Snapshot], Path],
        advice: Callable[[], str] = lambda: GENERAL,
        start: StartTimes | None = None,
    ) -> None:
        self._run, self._trainer, self._validation = run, trainer, validation
        self._limits, self._save, self._advice, self._start = limits, save, advice, start or StartTimes()
        self._log, self._progress, self._say = reporter.log, reporter.progress, reporter.say
        self._signal = 0  # the number of the first signal received
        self._began = time.monotonic()
        self._elapsed = 0.0
        self._reached: Measured | None = None  # the validation that reached `train.stop_at_loss`

    def run(self) -> TrainResult:
        """Runs the loop and returns its result.

        Raises:
            RunFailure: if the loss is not finite, memory or disk is full, or another process has ended.
            DataError: if a batch cannot be read.
            Preempted, Interrupted: after a signal. A checkpoint of the current step was written.
        """
        with handled_signals(self._note_signal):
            try:
                self._train()
                return self._finish()
            except Stopped as stop:
                self._trainer.clock.stop()
                failure = stop.failure(f"saved as {self._commit()}; continue with: {self._run.resume_command}")
                self._log.write("stopped", step=self._trainer.step, message=failure.message)
                raise failure from None
            except torch.OutOfMemoryError as error:
                failure = RunFailure(f"step {self._trainer.step + 1}: out of GPU memory", self._advice())
                self._log_failure(failure)
                raise failure from error
            except RuntimeFailure as error:
                self._log_failure(error)
                raise

    def _note_signal(self, number: int) -> None:
        if number == signal.SIGINT == self._signal:  # a second Ctrl-C ends the process at once
            raise KeyboardInterrupt
        self._signal = self._signal or number

    def _log_failure(self, error: RuntimeFailure) -> None:
        with suppress(
            RunFailure
        ):  # if the disk is full, this log entry cannot be written either; the error in progress is reported anyway
            self._log.write("failure", step=self._trainer.step, message=error.message)

    def _train(self) -> None:
        trainer, train = self._trainer, self._trainer.train
        trainer.require_same()
        self._start.mark("model")
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
            trainer.warm_up(self._validation.vocabulary, self._start.mark)
            if left := trainer.segments_left:
                seconds = time.monotonic() - began
                self._say(f"compiled {left + 1} segments of the run in {seconds:.1f} s, before the clock starts")
        self._began = time.monotonic()
        self._agree()
        if self._begins_with_validation():
            self._stop_at_loss(self._validate("raw", None))
            self._start.mark("scoring")
        trainer.clock.start()
        while not self._ended():
            before = trainer.segment
            self._report(trainer.advance())
            if not self._start.ended:
                self._report(trainer.settle())
                self._log_start(self._start.end())
            if trainer.segment != before:
                self._say(f"step {trainer.step:,}: continues with {trainer.segment.description}")
            self._agree()
            # The checkpoint is written first. If measuring the input scales fails, the run can resume from here.
            commits = self._due(train.checkpoint_every) or trainer.calibrates_next
            validates = self._due(train.validate_every)
            if (commits or validates) and not self._ended():
                self._report(trainer.settle())
                with trainer.paused():
                    if commits:
                        self._commit()
                    if validates:
                        self._stop_at_loss(self._validate("raw", None))
                self._agree()
        self._report(trainer.settle())
        trainer.clock.stop()

    def _log_start(self, phases: Mapping[str, float]) -> None:
        self._log.write("start_up", step=self._trainer.step, **phases)
        parts = [f"{name.replace('_', ' ')} {part:.1f}" for name, part in phases.items() if part >= 0.1]
        if self._trainer.compiled:
            self._say(f"first step after {phases['seconds']:.1f} s: {', '.join(parts[:-1])}")

    def _begins_with_validation(self) -> bool:
        """Returns whether the loop begins with a validation.

        A resumed run validates first if the validation of the current step is due, but the log does not contain this
        validation. The run also validates first if the logged loss of the current step reached `train.stop_at_loss`. In
        the second case, the validation ends the run.
        """
        trainer, limit = self._trainer, self._trainer.train.stop_at_loss
        if trainer.step == 0 or not self._due(trainer.train.validate_every) or self._ended():
            return False
        loss = trainer.world.first(lambda: self._run.logged_loss(trainer.step))
        return loss is None or (limit is not None and loss <= limit)

    def _stop_at_loss(self, result: Measured) -> None:
        limit, trainer = self._trainer.train.stop_at_loss, self._trainer
        if limit is None or (loss := result.nats / result.tokens) > limit:
            return
        self._reached = result
        seconds = trainer.clock.seconds
        self._log.write("reached", step=trainer.step, loss=loss, stop_at_loss=limit, seconds=seconds)
        self._say(f"step {trainer.step:,}: the loss {loss:.4f} reached {limit:g} after {seconds:.2f} s of training")

    def _agree(self) -> None:
        trainer = self._trainer
        leads = trainer.world.rank == 0
        number, seconds, self._elapsed = trainer.world.most(
            self._signal, trainer.clock.seconds if leads else 0.0, time.monotonic() - self._began if leads else 0.0
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
            or self._reached is not None
            or (limits.steps is not None and trainer.step >= limits.steps)
            or (limits.seconds is not None and self._elapsed >= limits.seconds)
        )

    def _finish(self) -> TrainResult:
        trainer = self._trainer
        path = self._commit()
        raw = self._reached or self._validate("raw", None)
        if self._reached is None and (trainer.done >= 1 or self._due(trainer.train.validate_every)):
            self._stop_at_loss(raw)
        complete = trainer.done >= 1 or self._reached is not None
        averaged = None
        if trainer.average is not None and trainer.average.begun:
            averaged = self._validate("average", trainer.average.tensors)
        elif trainer.average is not None:
            self._say("the run ended before the average began: the final weights are not averaged")
        step, seconds, totals = trainer.step, trainer.clock.seconds, trainer.totals()
        weights = "raw" if averaged is None else "average"
        reached = self._reached is not None
        ends: dict[str, Any] = {"reached": True} if reached else {}
        if trainer.loss_scale is not None and trainer.loss_scale.changes:
            ends["skipped_steps"] = skipped = trainer.loss_scale.skipped
            self._say(f"{skipped:,} of {step:,} steps skipped; the loss scale is {trainer.loss_scale.value:g}")
        if (cropped := trainer.feed.cropped_share()) is not None:
            ends["cropped_share"] = cropped
            self._say(f"packing left out {100 * cropped:.1f} % of the tokens of the documents")
        self._log.write("end", step=step, seconds=seconds, complete=complete, weights=weights, **ends, **totals)
        if totals:
            self._say(
                f"{totals['samples']:,} samples and {totals['tokens']:,} tokens in {seconds:.1f} s: "
                f"{totals['samples_per_second']:,.0f} samples/s, {totals['tokens_per_second']:,.0f} tokens/s"
            )
        if not complete:
            self._say(f"ended early after step {step:,}; continue with: {self._run.resume_command}")
        return TrainResult(self._run.directory, path, step, seconds, complete, raw, averaged, reached)

    def _report(self, steps: list[Step]) -> None:
        for step in steps:
            self._log.step(step)
            self._progress(step, self._trainer.done)

    def _commit(self) -> Path:
        trainer = self._trainer
        self._report(trainer.settle())
        trainer.require_same()
        trainer.gather()
        path = trainer.world.first(lambda: self._save(trainer.snapshot()))
        self._log.write("checkpoint", step=trainer.step, path=path.name)
        return path

    def _validate(self, which: str, weights: Mapping[str, Tensor] | None) -> Measured:
        trainer = self._trainer

        def check_signals(done: int, total: int) -> None:
            if self._signal:
                raise _SignalReceived

        try:
            result = trainer.evaluate(self._validation, weights, check_signals, meet=self._agree)
        except _SignalReceived:
            # Wait until all ranks have scored their parts. If any rank received a signal, `_agree` raises Stopped on
            # all ranks.
            self._agree()
            raise
        self._log.write("validation", step=trainer.step, weights=which, **result.record())
        quantized = "" if weights is not None or not trainer.fake_quantizes else ", fake-quantized"
        quantized += ", inputs exact" if quantized and trainer.segment.phase.rounds else ""
        self._say(f"step {trainer.step:,}  validation, {which} weights{quantized}: {result.line()}")
        if trainer.terms:
            self._log.write("losses", step=trainer.step, weights=which, terms=trainer.terms)
            values = ", ".join(f"{name} {value:.4g}" for name, value in trainer.terms.items())
            self._say(f"step {trainer.step:,}  losses, {which} weights: {values}")
        if trainer.loads:
            self._log.write("experts", step=trainer.step, weights=which, loads=trainer.loads)
            largest = f"the largest load is {imbalance(trainer.loads):.2f} times the mean"
            self._say(f"step {trainer.step:,}  experts, {which} weights: {largest}")
        return result
