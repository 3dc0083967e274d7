"""The `train:` section of a spec: data, batch, length of the run, optimizers, schedule, averaging."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.strict import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Problem,
    StrictModel,
    Unit,
)

Pattern = Annotated[str, Field(min_length=1, max_length=256)]


class DataSpec(StrictModel):
    """What a run reads: `bytes`, a SentencePiece `*.model` or a tiktoken rank file, and the order of its windows."""

    tokenizer: Annotated[str, Field(min_length=1, max_length=256)] = "bytes"
    order: Literal["sequential", "coprime_stride"] = "coprime_stride"


class Ramp(StrictModel):
    """A value that goes from `start` to `end` in a straight line over `steps` steps, and stays there."""

    start: Unit
    end: Unit
    steps: Positive


class AdamWSpec(StrictModel):
    """AdamW (Loshchilov and Hutter, 2019) for the parameters that `match` covers."""

    kind: Literal["adamw"]
    match: Pattern
    lr: NonNegativeFloat
    betas: tuple[Unit, Unit] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0


class MuonSpec(StrictModel):
    """Muon (Jordan, 2024): momentum whose matrix is orthogonalized by `steps` Newton-Schulz iterations."""

    kind: Literal["muon"]
    match: Pattern
    lr: NonNegativeFloat
    momentum: Unit | Ramp = 0.95
    nesterov: bool = True
    steps: Annotated[int, Field(ge=1, le=20)] = 5
    weight_decay: NonNegativeFloat = 0.0


OptimizerSpec = Annotated[AdamWSpec | MuonSpec, Field(discriminator="kind")]


class ScheduleSpec(StrictModel):
    """The learning rate's multiplier: up from 0 over `warmup_steps`, 1, then down to `floor` over the last
    `warmdown_steps`."""

    warmup_steps: NonNegative = 0
    warmdown_steps: NonNegative = 0
    floor: Unit = 0.0


class EmaSpec(StrictModel):
    """An exponential moving average of the weights, which replaces them when the run ends."""

    kind: Literal["ema"]
    decay: Annotated[float, Field(gt=0, lt=1)]


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
    average: EmaSpec | None = None
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
