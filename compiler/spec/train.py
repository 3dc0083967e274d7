"""The `train:` and `eval:` sections of a spec."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from specc.compiler import losses
from specc.compiler.architectures.architecture import Form
from specc.compiler.catalog import Kinds
from specc.compiler.changing_values import ForcingSchedule, Schedule, Sizes, SizeSchedule, last, points_of, values_of
from specc.compiler.losses.next_token import NextToken
from specc.compiler.losses.term import LossTerm
from specc.compiler.spec import adapt, data, optimizers
from specc.compiler.spec.adapt.adaptation import Adaptation
from specc.compiler.spec.data.kind import DataKind
from specc.compiler.spec.data.text import TextData
from specc.compiler.spec.learning_rate import ScheduleSpec
from specc.compiler.spec.optimizers.optimizer import OptimizerSpec
from specc.compiler.spec.precision import PrecisionSpec
from specc.compiler.spec.start import Place, StartSpec
from specc.compiler.strict import NonNegative, Positive, PositiveFloat, Problem, StrictModel, Unit, as_tuples, later

DATA = Kinds(data, DataKind)
OPTIMIZERS = Kinds(optimizers, OptimizerSpec)
BLOCK = "block"  # the entry of `recompute` that stands for whole blocks


def _tagged(key: str, default: str) -> Any:
    """Returns a validator that adds the tag `key: default` to a section without the key `key`."""

    def add(value: Any) -> Any:
        return {key: default, **as_tuples(value)} if isinstance(value, dict) else value

    return BeforeValidator(add)


def generated_data() -> tuple[str, ...]:
    """Returns the values of `--data` for the kinds of data that are generated without files."""
    return tuple(kind.usual for kind in DATA.models if kind.generated)


if TYPE_CHECKING:  # type checkers see the base class as the type of such values
    AnyData = DataKind
    AnyAdaptation = Adaptation
    AnyOptimizer = OptimizerSpec
    AnyLoss = LossTerm
else:
    AnyLoss, AnyOptimizer, AnyAdaptation = Kinds(losses, LossTerm), OPTIMIZERS, Kinds(adapt, Adaptation)
    AnyData = Annotated[DATA, _tagged("kind", "text")]


class EmaSpec(StrictModel):
    """An exponential moving average of the weights. The average replaces the weights when the run ends.

    Attributes:
        decay: the factor of the previous average. The factor of the current weights is 1 - `decay`.
    """

    kind: Literal["ema"]
    decay: Annotated[float, Field(gt=0, lt=1)]


class SwaSpec(StrictModel):
    """Stochastic weight averaging (Izmailov et al. 2018).

    The weights are sampled during the warm-down. The mean of the samples replaces the weights when the run ends.

    Attributes:
        every: the number of steps between two samples.
        below: the learning-rate multiplier below which sampling begins.
    """

    kind: Literal["swa"]
    every: Positive = 50
    below: Annotated[float, Field(gt=0, le=1)] = 0.2


AverageSpec = Annotated[EmaSpec | SwaSpec, Field(discriminator="kind")]


class QatSpec(StrictModel):
    """Quantization-aware training in the last part of a run.

    The model computes with fake-quantized weights, by the rules of `quant` without promotion, allocation or correction.
    Gradients use the straight-through estimator. The input scales of int8 products are measured at the first step with
    fake-quantized weights, and stored in the artifact.

    Attributes:
        below: the learning-rate multiplier below which rounding begins.
        inputs: whether the inputs of int8 products are also fake-quantized, as in the deployed model. Recurrent layers
            then run step by step, which is slower.
    """

    below: Annotated[float, Field(gt=0, le=1)] = 0.15
    inputs: bool = True


LossList = Annotated[tuple[AnyLoss, ...], Field(min_length=1, max_length=16)]
OptimizerList = Annotated[tuple[AnyOptimizer, ...], Field(min_length=1)]


class TrainSpec(StrictModel):
    """One training run, limited by `steps` or by `budget_seconds`. Exactly one of these fields is set. Schedules run
    over steps with `steps`, and over seconds with `budget_seconds`.

    The size of a step is stated in tokens or in rows. A row is a window of text or a pair of lines.

    Attributes:
        data: the training data.
        micro_batch: the number of rows per backward pass on each process. The default is 8 for a step size in tokens,
            and all rows of the step for a step size in rows.
        tokens_per_step: the size of a step in tokens, over all processes: a number or a schedule.
        batch: the size of a step in rows, over all processes: a number or, for text, a schedule.
        context: the number of tokens per row, at most the model's context: a number or a schedule. Each window of text
            is cut into rows of this length. Tokens do not attend to other rows. The tokens of a step and their order do
            not change. Evaluation uses whole windows. By default, a row is a whole window.
        steps: the steps of the run.
        budget_seconds: the training time of the run in seconds.
        seed: the seed of initialization, data order and dropout.
        start: weights that replace the initial values. The value is a run, an artifact, a folder of Transformers, a
            file `*.safetensors`, a folder of such files, or a mapping that selects some of the tensors.
        deterministic: whether runs with the same seed give the same bits, on the same kind of device and with the same
            numbers of processes and CPU threads. The compiler then uses no kernels that may return other bits in
            repeated calls.
        teacher_forcing: a probability, as a number or a schedule, for models of lines. With this probability, a decoder
            position receives the target token. Otherwise, the position receives the model's previous output.
        losses: the weighted terms of the training loss. By default, only the loss of the next token.
        optimizers: the optimizers, in order. The first optimizer whose pattern matches a parameter updates the
            parameter.
        schedule: the schedule of the learning rate.
        clip_norm: the largest norm of the gradient, over all parameters except the parameters of `sign` optimizers. If
            unset, gradients are not clipped.
        precision: the dtypes of training.
        recompute: the parts of each block that the backward pass recomputes, to save memory. A part is the name of a
            layer, such as `mlp` or `attention`, or `block` for the whole block. Losses and gradients do not change.
        average: an average of the weights, which replaces the weights when the run ends.
        qat: quantization-aware training.
        validate_every: the steps between two validations. 0 for a single validation at the end.
        stop_at_loss: a loss in nats per target. The run ends at the first validation at which the current weights have
            at most this loss. The log states the seconds of training until then, without compilation and validation.
        validate_tokens: the number of tokens that a validation reads, by default the whole validation split.
        checkpoint_every: the steps between two checkpoints. 0 for a single checkpoint at the end.
    """

    data: AnyData = TextData.model_construct()
    micro_batch: Positive | None = None
    tokens_per_step: Sizes | None = None
    batch: Sizes | None = None
    context: Sizes | None = later(None)
    steps: Positive | None = None
    budget_seconds: PositiveFloat | None = None
    seed: NonNegative = 1337
    start: Place | StartSpec | None = later(None)
    deterministic: bool = later(False)
    teacher_forcing: Unit | ForcingSchedule | None = None
    losses: LossList = later((NextToken(kind="next_token"),))
    optimizers: OptimizerList
    schedule: ScheduleSpec = ScheduleSpec.model_construct()
    clip_norm: PositiveFloat | None = None
    precision: PrecisionSpec = later(PrecisionSpec())
    recompute: tuple[str, ...] = later(())
    average: AverageSpec | None = None
    qat: QatSpec | None = later(None)
    validate_every: NonNegative = 0
    validate_tokens: Positive | None = None
    stop_at_loss: PositiveFloat | None = later(None)
    checkpoint_every: NonNegative = 0

    @property
    def loss_weights(self) -> Mapping[str, float | str | Schedule]:
        return {term.input: term.weight for term in self.losses if term.input}

    @property
    def starts_from(self) -> StartSpec | None:
        return StartSpec(path=self.start) if isinstance(self.start, str) else self.start

    @property
    def step_size(self) -> Sizes:
        """The size of a step, in rows if `batch` is set, otherwise in tokens."""
        size = self.batch if self.batch is not None else self.tokens_per_step
        assert size is not None  # the spec has exactly one of the two
        return size

    def rows(self, window: int) -> int:
        """Returns the number of rows of the last step, over all processes. A row has `window` tokens."""
        size: int = last(self.step_size)
        return size if self.batch is not None else size // window

    def at_once(self, world: int = 1) -> int:
        if self.micro_batch is not None:
            return self.micro_batch
        smallest = min(size for _, size in points_of(self.batch or 8))
        return 8 if self.batch is None else max(smallest // world, 1)

    def micro_batch_rows(self, window: int) -> tuple[int, int]:
        """Returns the number and the length of the rows of a micro-batch at the end of training. Both follow from
        `window`, the model's context, and from `context`."""
        length: int = last(self.context) or window
        return self.at_once() * (window // length), length

    def pass_tokens(self, window: int, world: int = 1) -> int:
        return self.at_once(world) * world * window

    def problems_of_rows(self, window: int, reads: Form) -> Iterator[Problem]:
        """Yields a problem for each row length that does not divide `window` tokens. `reads` is the form of the data
        that the model reads. For a model of lines, yields a problem if `context` is set, or if `batch` has a
        schedule."""
        if reads == "lines":
            if self.context is not None:
                message = "`context` cuts windows of text, but the model translates lines"
                yield Problem(("context",), "S251", message, "remove `context`")
            if isinstance(self.batch, SizeSchedule):
                message = "`batch` cannot have a schedule in a model that translates lines"
                yield Problem(("batch",), "S251", message, "write one number of rows")
            return
        for path, tokens in values_of("context", self.context):
            if tokens > window or window % tokens:
                message = f"a window of {window} tokens cannot be cut into rows of {tokens}"
                yield Problem(path, "S251", message, f"use a divisor of {window}, the model's context")

    def problems_of_a_step(self, window: int) -> Iterator[Problem]:
        """Yields a problem for each step size that one process cannot divide into whole micro-batches. A row has
        `window` tokens."""
        if (self.batch is None) == (self.tokens_per_step is None):
            return
        name = "batch" if self.batch is not None else "tokens_per_step"
        at_once = self.at_once() if self.batch is not None else self.at_once() * window
        unit, passes = ("rows", "") if self.batch is not None else ("tokens", f"{self.at_once()} x {window} = ")
        related = (("a micro-batch", ("micro_batch",)),) if "micro_batch" in self.model_fields_set else ()
        for path, size in values_of(name, self.step_size):
            if size % at_once:
                near = max(size // at_once, 1) * at_once
                message = f"a step of {size:,} {unit} is not a whole number of micro-batches of {passes}{at_once:,}"
                hint = f"use {near:,} or {near + at_once:,}, or another `micro_batch`"
                yield Problem(path, "S217", message, hint, related)

    def problems(self) -> Iterator[Problem]:
        if (self.tokens_per_step is None) == (self.batch is None):
            message = "`train` needs exactly one of `tokens_per_step` and `batch`"
            hint = "set `tokens_per_step` for text, or `batch` (in rows) for pairs of lines"
            yield Problem(("batch",) if self.batch is not None else (), "S224", message, hint)
        if self.stop_at_loss is not None and not self.validate_every:
            message = "`stop_at_loss` checks the loss of each validation, but the run validates only at its end"
            hint = "set `validate_every`, the number of steps between two validations"
            yield Problem(("stop_at_loss",), "S266", message, hint)
        names = [term.title for term in self.losses]
        for i, name in enumerate(names):
            if name in names[:i]:
                message = f"the term `{name}` is listed twice"
                one, other = (self.losses[j].model_copy(update={"weight": 0}) for j in (names.index(name), i))
                hint = (
                    "remove one of the two, and give the other the sum of both weights"
                    if one == other
                    else "a loss can have only one term of this name; remove one of the two"
                )
                yield Problem(("losses", i), "S264", message, hint)
        if "next_token" not in names:
            message = f"the loss has no term `next_token`, only {', '.join(names)}"
            yield Problem(("losses",), "S264", message, "add `{kind: next_token}`")
        for i, part in enumerate(self.recompute):
            if part in self.recompute[:i] or (part != BLOCK and BLOCK in self.recompute):
                message = f"an earlier entry already recomputes `{part}`"
                yield Problem(("recompute", i), "S295", message, "remove it")
        if (self.steps is None) == (self.budget_seconds is None):
            message = "`train` needs exactly one of `steps` and `budget_seconds`"
            hint = "set one of the two; the run ends after that many steps or seconds, and schedules follow them"
            yield Problem(("steps",) if self.steps is not None else (), "S201", message, hint)
        fractions = self.schedule.warmup_fraction + self.schedule.warmdown_fraction
        longer = "warmdown_fraction" if self.schedule.warmdown_fraction else "warmup_fraction"
        if self.steps is None and fractions > 1 + 1e-9:
            message = f"warm-up and warm-down together take {100 * fractions:g} % of the run"
            yield Problem(("schedule", longer), "S202", message, "shorten them to at most 100 % in total")
        if self.steps is not None and sum(self.schedule.of(self.steps)) > self.steps:
            path = ("schedule", longer if fractions else "warmdown_steps")
            message = (
                f"warm-up and warm-down take {sum(self.schedule.of(self.steps))} steps, but `steps` is {self.steps}"
            )
            related = (("the run's length", ("steps",)),)
            yield Problem(path, "S202", message, "shorten them, or give the run more steps", related)
        for i, optimizer in enumerate(self.optimizers):
            if self.steps is not None and optimizer.every > self.steps:
                message = f"the optimizer updates every {optimizer.every:,} steps, but `steps` is {self.steps:,}"
                yield Problem(("optimizers", i, "every"), "S288", message, f"use at most {self.steps}")
        yield from self._problems_of_beginning()

    def _problems_of_beginning(self) -> Iterator[Problem]:
        """Yields a problem if the learning-rate multiplier never falls below the threshold `below` of `qat` or of
        `average`."""
        late = [("qat", self.qat.below, 1)] if self.qat is not None else []
        if isinstance(self.average, SwaSpec):  # the last sample may be taken up to `every` steps before the end
            every = self.average.every
            if self.steps is not None and every > self.steps:
                message = f"`average` samples the weights every {every:,} steps, but `steps` is {self.steps:,}"
                yield Problem(("average", "every"), "S269", message, f"set `every` to at most {self.steps}")
                return
            late.append(("average", self.average.below, (self.steps or 0) % every + 1))
        for name, below, left in late:
            if (lowest := self.schedule.lowest(self.steps, left)) >= below:
                message = (
                    f"`{name}` starts when the learning rate is below {below:g} of its peak, "
                    f"but `schedule` lowers it only to {lowest:g}"
                )
                hint = "raise `warmdown_steps` or `warmdown_fraction`, lower `floor`, or raise `below`"
                related = (("the schedule", ("schedule",)),) if "schedule" in self.model_fields_set else ()
                yield Problem((name, "below"), "S269", message, hint, related)


class BitsSpec(StrictModel):
    """`specc eval` in bits per byte.

    Attributes:
        window: the number of tokens per window, by default the context. A window may be longer than the context, unless
            the model has learned positions.
        stride: the tokens from the start of one window to the next, by default the window.
        batch: the number of windows per forward pass.
        adapt: the settings of `specc eval --adapt KIND`. Without `--adapt`, `specc eval` ignores these settings.
    """

    untagged: ClassVar[bool] = True

    metric: Literal["bits_per_byte"] = "bits_per_byte"
    window: Positive | None = later(None)
    stride: Positive | None = None
    batch: Positive = 16
    adapt: AnyAdaptation | None = later(None)

    @property
    def halves(self) -> bool:
        """Whether the model needs the programs `features` and `nats`, the halves of `score`."""
        return self.adapt is not None

    @property
    def longest(self) -> int:
        return self.window or 0

    def problems_with(self, window: int, reads: Form, bounded: str = "") -> Iterator[Problem]:
        """Yields a problem if the model reads lines, or if the stride exceeds the window. Also yields a problem if the
        model has learned positions and the window of the evaluation exceeds `window`, the context. `bounded` is the
        name of the part with the learned positions."""
        length = self.window or window
        if reads == "lines":
            message = "`bits_per_byte` is for text, but the model translates lines"
            yield Problem((), "S228", message, "use `eval: {metric: exact_match}`")
            return
        if length > window and bounded:
            message = f"windows of {length} tokens exceed the context of {window}, the length of the learned {bounded}"
            yield Problem(("window",), "S218", message, f"use at most {window}, or rotary positions")
        elif self.stride is not None and self.stride > length:
            what = "context" if self.window is None else "window"
            message = f"a stride of {self.stride} tokens skips some tokens, because the {what} is {length}"
            yield Problem(("stride",), "S218", message, f"use at most {length}")
        if self.adapt is not None:
            problems = self.adapt.problems_with(length, self.stride or length)
            yield from (problem.under("adapt") for problem in problems)

    def problems_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
        if self.adapt is not None:
            yield from (problem.under("adapt") for problem in self.adapt.problems_of(shapes))


class ExactMatchSpec(StrictModel):
    """`specc eval` by exact match: the share of lines whose decoded text is identical to the target.

    Attributes:
        decode: the decoding method.
        beam: the number of beams of a beam search.
        batch: the number of lines that are decoded at once.
        lines: the number of scored lines per split, if the data is generated.
    """

    metric: Literal["exact_match"]
    decode: Literal["greedy", "beam"] = "greedy"
    beam: Annotated[int, Field(ge=2, le=64)] | None = None
    batch: Positive = 1024
    lines: Annotated[int, Field(ge=1, le=100_000)] = 100_000
    halves: ClassVar[bool] = False  # models of lines do not use `features` and `nats`
    longest: ClassVar[int] = 0

    def problems_with(self, window: int, reads: Form, bounded: str = "") -> Iterator[Problem]:
        if reads != "lines":
            message = "`exact_match` compares lines, but the model reads one stream of tokens"
            yield Problem(("metric",), "S228", message, "use `metric: bits_per_byte`")

    def problems_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
        yield from ()

    def problems(self) -> Iterator[Problem]:
        if (self.beam is None) != (self.decode == "greedy"):
            message = (
                "`decode: beam` also needs `beam`, the number of beams"
                if self.beam is None
                else "`decode: greedy` takes no `beam`"
            )
            yield Problem(("decode",), "S226", message, "e.g. `decode: beam, beam: 4`, or `decode: greedy` alone")


EvalSpec = BitsSpec | ExactMatchSpec
AnyEval = Annotated[EvalSpec, Field(discriminator="metric"), _tagged("metric", "bits_per_byte")]
