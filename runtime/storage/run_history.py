"""Reads the history of a run from its log: steps, validations and the end. Repeated steps are removed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specc.runtime.storage.records import Record, Records, is_number

NOT_SCORED = "the final validation is missing or damaged"
_NUMBERS = {"step": ("step", "loss", "seconds"), "validation": ("step", "nats", "tokens"), "end": ("step", "seconds")}
_NUMBERS_OR_NONE = {"validation": ("bpb", "bpb_pieces", "exact_match")}


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A step of a run.

    Attributes:
        step: the number of the step.
        loss: the mean training loss of the step, in nats per token.
        seconds: the seconds of training until the end of the step.
        tokens: the number of training tokens until the end of the step.
    """

    step: int
    loss: float
    seconds: float
    tokens: float


@dataclass(frozen=True, slots=True)
class LoggedValidation:
    """A validation of a run.

    Attributes:
        step: the number of updates of the weights.
        weights: `raw` or `average`.
        values: the measured values by name. `nats` is the mean loss in nats per token. A value may be None.
    """

    step: int
    weights: str
    values: Mapping[str, Any]


@dataclass
class RunHistory:
    """The content of the log of a run.

    If a resumed run repeats steps, the history contains only the last record of each step.

    Attributes:
        steps, validations: the records in order of steps.
        end: the fields of the last `end` record; None if the log has no such record.
        message: the reason why the last process stopped early or failed. Empty if the process ended normally.
        unreadable: the number of lines that were skipped, because they are not records or lack fields.
    """

    steps: list[LoggedStep] = field(default_factory=list)
    validations: list[LoggedValidation] = field(default_factory=list)
    end: Mapping[str, Any] | None = None
    message: str = ""
    unreadable: int = 0

    @classmethod
    def read(cls, log: Path) -> "RunHistory":
        """Reads a log. If the file does not exist, the history is empty. Incomplete lines are skipped."""
        records = Records.read(log)
        history = cls(unreadable=records.unreadable)
        for record in records.all:
            if _has_fields(record):
                history._add(record)
            else:
                history.unreadable += 1
        return history

    @property
    def complete(self) -> bool:
        """Whether the run has reached the end of its schedule, or `train.stop_at_loss`."""
        return self.end is not None and bool(self.end.get("complete"))

    @property
    def final(self) -> Mapping[str, Any] | None:
        return self.scored(str(self.end["weights"])) if self.end is not None and self.complete else None

    def scored(self, weights: str) -> Mapping[str, Any] | None:
        """Returns the fields of the validation of the `raw` or `average` weights at the step at which the run ended.

        Returns None if the run is not complete, or the log has no such validation.
        """
        if self.end is None or not self.complete:
            return None
        wanted = (self.end["step"], weights)
        return next((v.values for v in reversed(self.validations) if (v.step, v.weights) == wanted), None)

    @property
    def seconds(self) -> float:
        return float(self.end["seconds"]) if self.end is not None else self.steps[-1].seconds if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        return self.steps[-1].tokens / self.seconds if self.steps and self.seconds else None

    def _add(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "start":
                self.end, self.message = None, ""
            case "step":
                last = self.steps[-1] if self.steps else LoggedStep(0, math.nan, 0.0, 0.0)
                tokens = event.get("tokens")
                if not is_number(tokens):  # the logs of old versions contain only the rate
                    tokens = event["tokens_per_second"] * (event["seconds"] - last.seconds)
                loss = event.get("loss", last.loss)  # a skipped step whose loss is infinite has none
                self.steps.append(LoggedStep(event["step"], loss, event["seconds"], last.tokens + tokens))
            case "validation":
                values = {key: value for key, value in event.items() if key not in ("event", "step", "weights")}
                self.validations.append(LoggedValidation(event["step"], event["weights"], values))
            case "end":
                self.end = event
            case "stopped" | "failure":
                self.message = str(event.get("message", ""))


def _has_fields(record: Record) -> bool:
    """Returns whether a record has all fields that the history reads."""
    event, skipped = record["event"], record.get("skipped") is True  # the loss of a skipped step may be infinite
    return (
        all(is_number(record.get(name)) for name in _NUMBERS.get(event, ()) if name != "loss" or not skipped)
        and (event != "step" or any(is_number(record.get(name)) for name in ("tokens", "tokens_per_second")))
        and (event not in ("validation", "end") or isinstance(record.get("weights"), str))
        and all(record.get(name) is None or is_number(record[name]) for name in _NUMBERS_OR_NONE.get(event, ()))
    )
