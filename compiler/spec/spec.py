"""The spec: what one YAML file may say. Everything here is frozen, strict and without torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, Union

from pydantic import Field, create_model

from specc.compiler import architectures, quant
from specc.compiler.architectures.architecture import Architecture, Form
from specc.compiler.catalog import models
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.train import AnyEval, BitsSpec, TrainSpec
from specc.compiler.strict import Name, NodeName, One, Pattern, Positive, PositiveFloat, Problem, StrictModel, later
from specc.compiler.targets import TARGETS

SCHEMES = models(quant, Scheme, "scheme")
RULES = tuple(
    create_model(f"{scheme.__name__}Rule", __base__=scheme, __doc__=scheme.__doc__, match=(Pattern, ...))
    for scheme in SCHEMES
)
ARCHITECTURES = models(architectures, Architecture, "kind")

if TYPE_CHECKING:  # the unions below are made from what the packages hold, which no type checker can see

    class Rule(Scheme):
        match: str

    AnyScheme = Scheme
    AnyRule = Rule
    AnyModel = Architecture
    TargetName = str
else:
    AnyScheme = Annotated[Union[SCHEMES], Field(discriminator="scheme")]  # noqa: UP007
    AnyRule = Annotated[Union[RULES], Field(discriminator="scheme")]  # noqa: UP007
    AnyModel = (
        Annotated[Union[ARCHITECTURES], Field(discriminator="kind")] if len(ARCHITECTURES) > 1 else ARCHITECTURES[0]  # noqa: UP007
    )
    TargetName = Literal[tuple(TARGETS)]

FusePoint = Annotated[
    dict[Pattern, Annotated[tuple[NodeName, ...], Field(min_length=1)]], Field(min_length=1, max_length=1)
]


class Promote(StrictModel):
    """More bits for the tensors that matter most: the `count` of largest sensitivity among those that `match` covers.

    With `quant.budget_bytes` set and no count, as many as fit.
    """

    bits: Annotated[int, Field(ge=4, le=8)]
    by: Literal["hessian_trace"] = "hessian_trace"
    count: Positive | None = None
    match: Pattern = "*"


class Allocate(StrictModel):
    """Bits for each tensor that `match` covers, chosen together: those that add the least to the loss within
    `quant.budget_bytes`, by gradients and really measured sizes. Widths below that of the tensor's rule may be named
    too: they are what a model is stored in that would not fit otherwise.

    With `clip_stds` every width is tried at each of these clips, in standard deviations of a row, where the scheme has
    such: a wider clip makes coarser steps, which compress to fewer bytes.
    """

    bits: Annotated[tuple[Annotated[int, Field(ge=2, le=8)], ...], Field(min_length=1, max_length=7)] = (4, 5, 6, 7, 8)
    clip_stds: Annotated[tuple[PositiveFloat, ...], Field(max_length=16)] = later(())
    match: Pattern = "*"

    def problems(self) -> Iterator[Problem]:
        """There is something to choose."""
        if len(set(self.bits)) * max(len(set(self.clip_stds)), 1) < 2:
            hint = "name several bits, or several clip_stds"
            yield Problem(("bits",), "S268", "allocate has one width and nothing to choose", hint)


class Correct(StrictModel):
    """A correction of low rank, in 2 and 4 bits (LQER), for the `count` tensors that `match` covers whose quantization
    leaves the largest error, at the bits that `allocate` or `promote` gives them; these are then chosen anew."""

    rank: Annotated[int, Field(ge=1, le=256)] = 4
    count: Positive = 3
    match: Pattern = "*"


class Calibrate(StrictModel):
    """The text whose activations make the Hessians: `sequences` windows, of which `batch` are read at once.

    They come from the training split, of the context each; or with `source: self` the model writes them, of `length`
    tokens each (the context where unset), drawn at `temperature` from a start by `begin`: the mark between documents,
    or a token drawn evenly from the vocabulary.
    """

    sequences: Positive = 64
    batch: Positive = 8
    source: Literal["train", "self"] = later("train")
    length: Positive | None = later(None)
    temperature: Annotated[float, Field(gt=0, le=100)] = later(0.8)
    begin: Literal["bos", "uniform"] = later("bos")

    def problems(self) -> Iterator[Problem]:
        """How the model writes is said only where it does."""
        for name in ("length", "temperature", "begin"):
            if self.source != "self" and name in self.model_fields_set:
                message = f"calibrate has a {name}, which is of text that the model writes itself"
                yield Problem((name,), "S260", message, "add `source: self`, or take it out")

    def problems_with(self, window: int, reads: Form) -> Iterator[Problem]:
        """Text that the model can write."""
        if self.source == "self" and reads == "lines":
            message = "the model turns lines into lines, and writes no text by itself"
            yield Problem(("source",), "S261", message, "use `source: train`")
        elif (self.length or 0) > window:
            message = f"windows of {self.length} tokens are longer than the context of {window}"
            yield Problem(("length",), "S262", message, f"use at most {window}, or leave it out")


class QuantSpec(StrictModel):
    """How each parameter is stored. The first thing said of a parameter holds: a rule, else the default."""

    default: AnyScheme
    promote: Promote | None = None
    allocate: Allocate | None = later(None)
    correct: Correct | None = later(None)
    rules: tuple[AnyRule, ...] = ()
    calibrate: Calibrate = Calibrate()
    budget_bytes: Positive | None = None

    def problems(self) -> Iterator[Problem]:
        """A promotion has to end somewhere."""
        if self.promote is not None and self.promote.count is None and self.budget_bytes is None:
            yield Problem(
                ("promote",),
                "S203",
                "promote has neither a count nor a byte budget",
                "add `count: N` here, or `budget_bytes: N` under quant",
            )
        if self.allocate is not None and self.promote is not None:
            message = "promote and allocate both choose bits"
            yield Problem(("allocate",), "S245", message, "remove one of the two", (("the other", ("promote",)),))
        if self.allocate is not None and self.budget_bytes is None:
            message = "allocate chooses bits within a byte budget, and there is none"
            yield Problem(("allocate",), "S245", message, "add `budget_bytes: N` under quant")


class Spec(StrictModel):
    """One model: its shape, where it runs, what is fused, how it is quantized, trained and scored."""

    spec_version: One
    name: Name
    targets: Annotated[tuple[TargetName, ...], Field(min_length=1)]
    model: AnyModel
    fuse: tuple[FusePoint, ...] = ()
    quant: QuantSpec | None = None
    train: TrainSpec
    eval: AnyEval = BitsSpec()

    @property
    def at_rest(self) -> "Spec":
        """The spec of the model that is not training: without the rounding that only training does."""
        return self.model_copy(update={"train": self.train.model_copy(update={"qat": None})})

    def problems(self) -> Iterator[Problem]:
        """Each target once; steps, windows and vocabulary that fit each other."""
        for i, target in enumerate(self.targets):
            if target in self.targets[:i]:
                yield Problem(("targets", i), "S204", f"target {target} is listed twice", "remove one of the two")
        yield from (problem.under("train") for problem in self.train.problems_of_a_step(self.model.window))
        lengths = self.train.problems_of_lengths(self.model.window, self.model.reads)
        yield from (problem.under("train") for problem in lengths)
        yield from self.train.problems_of_shares(self.model.late)
        yield from self.train.data.problems_with(self.model)
        reads = self.model.reads
        if self.train.teacher_forcing is not None and reads != "lines":
            message = "teacher forcing is for models that turn lines into lines"
            yield Problem(("train", "teacher_forcing"), "S227", message, "take it out")
        if self.train.tf32 and self.model.computes_in != "f32":
            message = "train.tf32 is for products of f32 numbers, and the model computes in bf16 on a GPU"
            yield Problem(("train", "tf32"), "S277", message, "take it out, or give a model that can `dtype: f32`")
        if self.train.qat is not None and self.quant is None:
            message = "train.qat rounds weights as quant will store them, and there is no quant"
            yield Problem(("train", "qat"), "S244", message, "add a quant section, or remove qat")
        if self.quant is not None:
            found = self.quant.calibrate.problems_with(self.model.window, reads)
            yield from (problem.under("quant", "calibrate") for problem in found)
        yield from (problem.under("eval") for problem in self.eval.problems_with(self.model.window, reads))
