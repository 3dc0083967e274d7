"""The `train:` and `eval:` sections of a spec."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import BeforeValidator, Field

from specc.compiler.architectures.architecture import Form
from specc.compiler.catalog import models
from specc.compiler.spec import adapt, data, optimizers
from specc.compiler.spec.adapt.adaptation import Adaptation
from specc.compiler.spec.data.kind import DataKind
from specc.compiler.spec.data.text import TextData
from specc.compiler.spec.optimizers.optimizer import OptimizerSpec
from specc.compiler.strict import NonNegative, Path, Positive, PositiveFloat, Problem, StrictModel, Unit, later

DATA = models(data, DataKind, "kind")
OPTIMIZERS = models(optimizers, OptimizerSpec, "kind")
ADAPTATIONS = models(adapt, Adaptation, "kind")
GENERATED = tuple(kind.usual for kind in DATA if kind.generated)


def _text_unless_said(value: Any) -> Any:
    """Adds `kind: text` to data that does not state its kind."""
    return {"kind": "text", **value} if isinstance(value, dict) else value


if TYPE_CHECKING:  # type checkers cannot see these unions, which are built from the packages' contents
    AnyData = DataKind
    AnyAdaptation = Adaptation
    AnyOptimizer = OptimizerSpec
else:
    AnyOptimizer = Annotated[Union[OPTIMIZERS], Field(discriminator="kind")]  # noqa: UP007
    AnyAdaptation = Annotated[Union[ADAPTATIONS], Field(discriminator="kind")]  # noqa: UP007
    AnyData = Annotated[Union[DATA], Field(discriminator="kind"), BeforeValidator(_text_unless_said)]  # noqa: UP007


class ScheduleSpec(StrictModel):
    """The multiplier of the learning rate over a run.

    It rises from 0 to 1 (warm-up), stays 1, then falls to `floor` (warm-down). Each span is set in steps or as a
    fraction of the run, which is measured in steps or in seconds, as the run itself is.

    Attributes:
        warmup_steps: the steps of the warm-up.
        warmdown_steps: the last steps of the run, over which the multiplier falls.
        warmup_fraction: the warm-up as a fraction of the run.
        warmdown_fraction: the warm-down as a fraction of the run.
        floor: the multiplier at the end of the run.
    """

    warmup_steps: NonNegative = 0
    warmdown_steps: NonNegative = 0
    warmup_fraction: Unit = 0.0
    warmdown_fraction: Unit = 0.0
    floor: Unit = 0.0

    def of(self, steps: int) -> tuple[int, int]:
        """Returns the steps of warm-up and of warm-down in a run of `steps` steps."""
        # 0.29 * 100 is slightly less than 29 in floating point
        parts = (int(part * steps + 1e-6) for part in (self.warmup_fraction, self.warmdown_fraction))
        up, down = (
            max(given, part) for given, part in zip((self.warmup_steps, self.warmdown_steps), parts, strict=True)
        )
        return up, down

    def lowest(self, steps: int | None, last: int = 1) -> float:
        """Returns the multiplier of the update that has `last` steps left, including itself.

        Args:
            steps: the steps of the run; None if the run is limited by seconds, for which the result is the lowest
                multiplier of the schedule.
            last: the steps left.
        """
        span = self.warmdown_fraction or self.warmdown_steps if steps is None else self.of(steps)[1]
        if not span:
            return 1.0
        return max(self.floor, 0.0 if steps is None else min(1.0, last / span))

    def problems(self) -> Iterator[Problem]:
        """Yields a problem if warm-up or warm-down is set both in steps and as a fraction."""
        for name in ("warmup", "warmdown"):
            if getattr(self, f"{name}_steps") and getattr(self, f"{name}_fraction"):
                message = f"{name} is set in steps and as a fraction"
                yield Problem((f"{name}_fraction",), "S229", message, "remove one of the two")


class EmaSpec(StrictModel):
    """An exponential moving average of the weights. It replaces the weights when the run ends.

    Attributes:
        decay: the weight of the average so far; each step's weights have 1 - `decay`.
    """

    kind: Literal["ema"]
    decay: Annotated[float, Field(gt=0, lt=1)]


class SwaSpec(StrictModel):
    """Stochastic weight averaging (Izmailov et al. 2018).

    The mean of weights sampled during the warm-down. It replaces the weights when the run ends.

    Attributes:
        every: the steps between two samples.
        below: the multiplier of the learning rate below which sampling begins.
    """

    kind: Literal["swa"]
    every: Positive = 50
    below: Annotated[float, Field(gt=0, le=1)] = 0.2


AverageSpec = Annotated[EmaSpec | SwaSpec, Field(discriminator="kind")]


class QatSpec(StrictModel):
    """Quantization-aware training in the last part of a run.

    The model computes with weights that are fake-quantized by the rules of `quant`, before any promotion, allocation or
    correction. Gradients use the straight-through estimator. If `quant` has int8 products, the scales of their inputs
    are measured at the first such step and saved for the artifact.

    Attributes:
        below: the multiplier of the learning rate below which it begins.
        inputs: whether inputs of int8 products are fake-quantized too, as in the deployed model. Steps are then slower,
            because recurrences run step by step.
    """

    below: Annotated[float, Field(gt=0, le=1)] = 0.15
    inputs: bool = True


class ForcingSpec(StrictModel):
    """Teacher forcing: the probability with which a decoder position receives the target token, else its own output.

    Attributes:
        points: [time, probability] pairs. The first time is 0. After the last point the probability is constant.
        by: the unit of the times, counted from 0.
        between: the probability between two points: that of the first (`hold`), or interpolated (`linear`).
    """

    points: Annotated[tuple[tuple[NonNegative, Unit], ...], Field(min_length=1)]
    by: Literal["step", "epoch"] = "step"
    between: Literal["hold", "linear"] = "hold"


OptimizerList = Annotated[tuple[AnyOptimizer, ...], Field(min_length=1)]
Lengths = Annotated[tuple[tuple[Unit, Positive], ...], Field(min_length=1, max_length=8)]


class TrainSpec(StrictModel):
    """One training run. Exactly one of `steps` and `budget_seconds` is set; it also drives the schedule.

    The size of a step is set either in tokens or in rows. A row is a window of text or a pair of lines.

    Attributes:
        data: the training data.
        micro_batch: the rows of a backward pass on each process. If unset, 8 if the step is in tokens, else all rows of
            the step.
        tokens_per_step: the size of a step in tokens, over all processes.
        batch: the size of a step in rows, over all processes.
        steps: the steps of the run.
        budget_seconds: the training time of the run in seconds.
        seed: the seed of initialization, data order and dropout.
        teacher_forcing: teacher forcing, for models of pairs of lines. A list is short for its `points`. If unset, its
            probability is 1.
        optimizers: the optimizers, in order. The first that matches a parameter updates it.
        schedule: the schedule of the learning rate.
        clip_norm: the largest norm of the gradient over all parameters. If unset, gradients are not clipped.
        tf32: whether f32 products of a training step on a GPU round their factors to TF32, with 10 bits of mantissa.
            Strict f32 does not use tensor cores. Evaluation stays in strict f32.
        average: an average of the weights, which replaces them when the run ends.
        qat: quantization-aware training.
        lengths: [share of the run, tokens] pairs. From that share on, by steps or by seconds, each window is cut into
            rows of that many tokens, which do not attend to each other. The tokens of a step and their order do not
            change. Evaluation always uses the whole context.
        validate_every: the steps between two validations; 0 for one at the end only.
        validate_tokens: the tokens of the validation split that a validation reads; all of them if unset.
        checkpoint_every: the steps between two checkpoints; 0 for one at the end only.
    """

    data: AnyData = TextData()
    micro_batch: Positive | None = None
    tokens_per_step: Positive | None = None
    batch: Positive | None = None
    steps: Positive | None = None
    budget_seconds: PositiveFloat | None = None
    seed: NonNegative = 1337
    teacher_forcing: tuple[tuple[NonNegative, Unit], ...] | ForcingSpec | None = None
    optimizers: OptimizerList
    schedule: ScheduleSpec = ScheduleSpec()
    clip_norm: PositiveFloat | None = None
    tf32: bool = later(False)
    average: AverageSpec | None = None
    qat: QatSpec | None = later(None)
    lengths: Lengths | None = later(None)
    validate_every: NonNegative = 0
    validate_tokens: Positive | None = None
    checkpoint_every: NonNegative = 0

    def rows(self, window: int) -> int:
        """Returns the rows of a step over all processes; `window` is the tokens of a row."""
        return self.batch if self.batch is not None else (self.tokens_per_step or 0) // window

    def at_once(self, world: int = 1) -> int:
        """Returns the rows of a backward pass on one of `world` processes."""
        if self.micro_batch is not None:
            return self.micro_batch
        return 8 if self.batch is None else max(self.batch // world, 1)

    @property
    def forcing(self) -> ForcingSpec | None:
        """The teacher forcing as a ForcingSpec, also if the spec has the short form."""
        given = self.teacher_forcing
        return ForcingSpec(points=given) if isinstance(given, tuple) else given

    def problems_of_shares(self, model: Iterable[tuple[Path, str, float]]) -> Iterator[Problem]:
        """Yields a problem for each setting that begins at a share of the run after its last step.

        Checks the settings of `model` (path, name, share), of `lengths` and of the optimizers. A run that is limited by
        seconds is not checked, because its number of steps is unknown.
        """
        starts = [*model]
        starts += [
            (("train", "lengths", i, 0), f"rows of {n} tokens", share)
            for i, (share, n) in enumerate(self.lengths or ())
        ]
        for i, optimizer in enumerate(self.optimizers):
            for path, what, share in optimizer.late_starts():
                starts.append((("train", "optimizers", i, *path), what, share))
        for path, what, share in starts:
            if self.steps is not None and share > (last := (self.steps - 1) / self.steps):
                message = f"{what} would begin at {share:.4g} of the run, whose last step begins at {last:.4g}"
                yield Problem(path, "S269", message, "choose an earlier start, or give the run more steps")

    def problems_of_lengths(self, window: int, reads: Form) -> Iterator[Problem]:
        """Yields a problem for each length that does not divide `window` tokens, or if the model reads lines."""
        if self.lengths is not None and reads == "lines":
            message = "lengths are for text, but the model translates lines"
            yield Problem(("lengths",), "S251", message, "remove lengths")
            return
        for i, (_, tokens) in enumerate(self.lengths or ()):
            if tokens > window or window % tokens:
                message = f"a window of {window} tokens cannot be cut into rows of {tokens}"
                yield Problem(("lengths", i, 1), "S251", message, f"use a divisor of {window}, the model's context")

    def problems_of_a_step(self, window: int) -> Iterator[Problem]:
        """Yields a problem if a step is not a whole number of micro-batches on one process; `window` is in tokens."""
        at_once = self.at_once() if self.batch is not None else self.at_once() * window
        size = self.batch if self.batch is not None else self.tokens_per_step
        if size is None or size % at_once == 0:
            return
        near = max(size // at_once, 1) * at_once
        unit, passes = ("rows", "") if self.batch is not None else ("tokens", f"{self.at_once()} x {window} = ")
        yield Problem(
            ("batch" if self.batch is not None else "tokens_per_step",),
            "S217",
            f"a step of {size:,} {unit} is not a whole number of micro-batches of {passes}{at_once:,}",
            f"use {near:,} or {near + at_once:,}, or another micro_batch",
            related=(("a micro-batch", ("micro_batch",)),) if "micro_batch" in self.model_fields_set else (),
        )

    def problems(self) -> Iterator[Problem]:
        """Yields problems of the step's size, the run's length, the schedule, `lengths` and teacher forcing."""
        if (self.tokens_per_step is None) == (self.batch is None):
            yield Problem(
                ("batch",) if self.batch is not None else (),
                "S224",
                "train needs exactly one of tokens_per_step and batch",
                "set `tokens_per_step:` for text, or `batch:` (rows) for pairs of lines",
            )
        given = self.teacher_forcing
        points = given.points if isinstance(given, ForcingSpec) else given if given is not None else ((0, 1.0),)
        times = [when for when, _ in points]
        if times[:1] != [0] or sorted(set(times)) != times:
            yield Problem(
                ("teacher_forcing",),
                "S225",
                f"the points of teacher_forcing are at [{', '.join(map(str, times))}]",
                "start at 0 and increase",
            )
        shares = [share for share, _ in self.lengths or ((0.0, 1),)]
        if shares[0] != 0 or shares[-1] >= 1 or sorted(set(shares)) != shares:
            message = f"lengths begin at shares [{', '.join(f'{share:g}' for share in shares)}] of the run"
            yield Problem(("lengths",), "S250", message, "start at 0 and increase; the last must be below 1")
        if (self.steps is None) == (self.budget_seconds is None):
            yield Problem(
                ("steps",) if self.steps is not None else (),
                "S201",
                "train needs exactly one of steps and budget_seconds",
                "set the one that ends the run and drives the schedule",
            )
        fractions = self.schedule.warmup_fraction + self.schedule.warmdown_fraction
        last = "warmdown_fraction" if self.schedule.warmdown_fraction else "warmup_fraction"
        if self.steps is None and fractions > 1 + 1e-9:
            message = f"warm-up and warm-down take {fractions:g} of the run"
            yield Problem(("schedule", last), "S202", message, "shorten them to at most 1 in total")
        if self.steps is not None and sum(self.schedule.of(self.steps)) > self.steps:
            yield Problem(
                ("schedule", last if fractions else "warmdown_steps"),
                "S202",
                f"warm-up and warm-down take {sum(self.schedule.of(self.steps))} steps, but the run has {self.steps}",
                "shorten them, or give the run more steps",
                related=(("the run's length", ("steps",)),),
            )
        yield from self._problems_of_beginning()

    def _problems_of_beginning(self) -> Iterator[Problem]:
        """Yields a problem for each of `qat` and `average` whose threshold the warm-down never reaches."""
        late = [("qat", self.qat.below, 1)] if self.qat is not None else []
        if isinstance(self.average, SwaSpec):  # its last sample may be long before the end
            every = self.average.every
            if self.steps is not None and every > self.steps:
                message = f"the average takes the weights every {every} steps, but the run has {self.steps}"
                yield Problem(("average", "every"), "S269", message, f"use at most {self.steps}")
                return
            late.append(("average", self.average.below, (self.steps or 0) % every + 1))
        for name, below, last in late:
            if (lowest := self.schedule.lowest(self.steps, last)) >= below:
                message = f"{name} starts at a multiplier below {below:g}, but the schedule only reaches {lowest:g}"
                hint = "lower the end of the schedule (warmdown_steps or warmdown_fraction, floor), or raise `below`"
                related = (("the schedule", ("schedule",)),) if "schedule" in self.model_fields_set else ()
                yield Problem((name, "below"), "S269", message, hint, related)


class BitsSpec(StrictModel):
    """`specc eval` in bits per byte.

    Attributes:
        window: the tokens of a window; the context if unset.
        stride: the tokens from one window to the next; the window if unset.
        batch: the windows of one forward pass.
        adapt: the settings of `specc eval --adapt KIND`. They do not affect the score.
    """

    untagged: ClassVar[bool] = True

    metric: Literal["bits_per_byte"] = "bits_per_byte"
    window: Positive | None = later(None)
    stride: Positive | None = None
    batch: Positive = 16
    adapt: AnyAdaptation | None = later(None)

    @property
    def halves(self) -> bool:
        """True if the model needs the two halves of its program `score`."""
        return self.adapt is not None

    def problems_with(self, window: int, reads: Form) -> Iterator[Problem]:
        """Yields a problem if the model reads lines, the window exceeds the context or the stride the window."""
        own = self.window or window
        if reads == "lines":
            message = "bits_per_byte is for text, but the model translates lines"
            yield Problem((), "S228", message, "use `eval: {metric: exact_match}`")
            return
        if own > window:
            message = f"windows of {own} tokens are longer than the context of {window}"
            yield Problem(("window",), "S218", message, f"use at most {window}")
        elif self.stride is not None and self.stride > own:
            what = "context" if self.window is None else "window"
            message = f"a stride of {self.stride} tokens skips some tokens; the {what} is {own}"
            yield Problem(("stride",), "S218", message, f"use at most {own}")
        if self.adapt is not None:
            found = self.adapt.problems_with(own, self.stride or own)
            yield from (problem.under("adapt") for problem in found)

    def problems_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
        """Yields the problems of `adapt` on a model with parameters of these shapes, by name."""
        if self.adapt is not None:
            yield from (problem.under("adapt") for problem in self.adapt.problems_of(shapes))


class ExactMatchSpec(StrictModel):
    """`specc eval` by exact match: the share of lines whose decoded text equals the target, character for character.

    Attributes:
        decode: the decoding method.
        beam: the number of beams of a beam search.
        batch: the lines that are decoded at once.
        lines: the lines of each split that are scored, if the data is generated.
    """

    metric: Literal["exact_match"]
    decode: Literal["greedy", "beam"] = "greedy"
    beam: Annotated[int, Field(ge=2, le=64)] | None = None
    batch: Positive = 1024
    lines: Annotated[int, Field(ge=1, le=100_000)] = 100_000
    halves: ClassVar[bool] = False  # models of lines do not use the halves of `score`

    def problems_with(self, window: int, reads: Form) -> Iterator[Problem]:
        """Yields a problem if the model does not read lines."""
        if reads != "lines":
            message = "exact_match compares lines, but the model reads one stream of tokens"
            yield Problem(("metric",), "S228", message, "use `metric: bits_per_byte`")

    def problems_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
        """Yields nothing: exact match has no requirements on parameters."""
        yield from ()

    def problems(self) -> Iterator[Problem]:
        """Yields a problem if a beam search has no `beam`, or greedy decoding has one."""
        if (self.beam is None) != (self.decode == "greedy"):
            message = "decode: beam needs `beam`" if self.beam is None else "decode: greedy has no `beam`"
            yield Problem(("decode",), "S226", message, "e.g. `decode: beam, beam: 4`, or `decode: greedy` alone")


def _bits_unless_said(value: Any) -> Any:
    """Adds `metric: bits_per_byte` to a section that does not state its metric."""
    return {"metric": "bits_per_byte", **value} if isinstance(value, dict) else value


EvalSpec = BitsSpec | ExactMatchSpec
AnyEval = Annotated[EvalSpec, Field(discriminator="metric"), BeforeValidator(_bits_unless_said)]
