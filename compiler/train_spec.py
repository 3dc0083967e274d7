"""The `train:` section of a spec: data, batch, length of the run, optimizers, schedule, averaging."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.optimizer_spec import OptimizerSpec
from specc.compiler.strict import (
    NonNegative,
    Positive,
    PositiveFloat,
    Problem,
    StrictModel,
    Unit,
    later,
)


class DataSpec(StrictModel):
    """What a run reads: `bytes`, a SentencePiece `*.model` or a tiktoken rank file, and the order of its windows."""

    tokenizer: Annotated[str, Field(min_length=1, max_length=256)] = "bytes"
    order: Literal["sequential", "coprime_stride"] = "coprime_stride"


class ScheduleSpec(StrictModel):
    """The learning rate's multiplier: up from 0 over `warmup_steps`, 1, then down to `floor` over the last
    `warmdown_steps`, or over the last `warmdown_share` of the run."""

    warmup_steps: NonNegative = 0
    warmdown_steps: NonNegative = 0
    warmdown_share: Annotated[float, Field(gt=0, le=1)] | None = later(None)
    floor: Unit = 0.0

    def problems(self) -> Iterator[Problem]:
        """One length of the warm-down."""
        if self.warmdown_steps and self.warmdown_share is not None:
            message = "a schedule with both warmdown_steps and warmdown_share"
            yield Problem(("warmdown_share",), "S231", message, "keep one of the two")


class EmaSpec(StrictModel):
    """An exponential moving average of the weights, which replaces them when the run ends."""

    kind: Literal["ema"]
    decay: Annotated[float, Field(gt=0, lt=1)]


class SwaSpec(StrictModel):
    """The plain mean of the weights after every `every` steps, once the warm-down has taken the multiplier below
    `below` (Izmailov et al. 2018); it replaces them when the run ends."""

    kind: Literal["swa"]
    every: Positive = 50
    below: Annotated[float, Field(gt=0, le=1)] = 0.2


AverageSpec = Annotated[EmaSpec | SwaSpec, Field(discriminator="kind")]


class QatSpec(StrictModel):
    """Quantization-aware training: once the warm-down has taken the multiplier below `below`, the model computes with
    weights rounded as `quant` will store them, before any promotion; gradients pass as if they were not."""

    below: Annotated[float, Field(gt=0, le=1)] = 0.15


class TrainSpec(StrictModel):
    """One run. Give either `steps` or `budget_seconds`; both drive the schedule."""

    data: DataSpec = DataSpec()
    micro_batch: Positive = 8
    tokens_per_step: Positive
    steps: Positive | None = None
    budget_seconds: PositiveFloat | None = None
    seed: NonNegative = 1337
    optimizers: Annotated[tuple[OptimizerSpec, ...], Field(min_length=1)]
    schedule: ScheduleSpec = ScheduleSpec()
    clip_norm: PositiveFloat | None = None
    average: AverageSpec | None = None
    qat: QatSpec | None = later(None)
    validate_every: NonNegative = 0
    validate_tokens: Positive | None = None
    checkpoint_every: NonNegative = 0

    def problems(self) -> Iterator[Problem]:
        """A run ends either by steps or by the clock, and its warm-down fits inside it."""
        if (self.steps is None) == (self.budget_seconds is None):
            yield Problem(
                ("steps",) if self.steps is not None else (),
                "S201",
                "train needs exactly one of steps and budget_seconds",
                "keep the one that should end the run and drive the schedule",
            )
        if self.steps is not None and self.schedule.warmup_steps + self.schedule.warmdown_steps > self.steps:
            yield Problem(
                ("schedule", "warmdown_steps"),
                "S202",
                f"warm-up and warm-down take {self.schedule.warmup_steps + self.schedule.warmdown_steps} steps "
                f"but the run has {self.steps}",
                "shorten them or give the run more steps",
                related=(("the run's length", ("steps",)),),
            )


class EvalSpec(StrictModel):
    """How `specc eval` scores: windows of the context, each advanced by `stride` tokens (the context where unset)."""

    stride: Positive | None = None
    batch: Positive = 16
