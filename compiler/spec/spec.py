"""The root model of a spec, which is one YAML file. All models here are frozen and strict, and do not import torch."""

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, create_model

from specc.compiler import architectures, quant
from specc.compiler.architectures.architecture import Architecture, Form
from specc.compiler.catalog import Kinds
from specc.compiler.changing_values import Schedule, values_of
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.train import AnyEval, BitsSpec, TrainSpec
from specc.compiler.strict import (
    Name,
    NodeName,
    Path,
    Pattern,
    Positive,
    PositiveFloat,
    Problem,
    Refused,
    StrictModel,
    Two,
    later,
    values_in,
)
from specc.compiler.targets import TARGETS

_Match = Annotated[Pattern, Field(description="The pattern of the names of the parameters.")]


@cache
def rule_model(scheme: type[Scheme]) -> type[Scheme]:
    """Returns the Pydantic model of a quantization rule with this scheme. The model has the fields of the scheme, and
    the field `match`."""
    return create_model(f"{scheme.__name__}Rule", __base__=scheme, __doc__=scheme.__doc__, match=(_Match, ...))


SCHEMES = Kinds(quant, Scheme, tag="scheme")  # type: ignore[type-abstract]

if TYPE_CHECKING:  # type checkers see the base class as the type of such values

    class Rule(Scheme):
        match: str

    AnyScheme = Scheme
    AnyRule = Rule
    AnyModel = Architecture
    TargetName = str
else:
    AnyScheme, AnyRule = SCHEMES, Kinds(quant, Scheme, tag="scheme", form=rule_model)
    AnyModel = Kinds(architectures, Architecture)
    TargetName = Literal[tuple(TARGETS)]

Members = Annotated[Annotated[tuple[NodeName, ...], Field(min_length=1)], Tag("members")]
Chunks = Annotated[Annotated[int, Field(ge=2, le=1024)], Tag("chunks")]


def _one_pattern(point: dict[str, tuple[str, ...] | int]) -> dict[str, tuple[str, ...] | int]:
    numbers = {key for key, value in point.items() if isinstance(value, int)}
    if numbers - {"chunks"} or len(point) - len(numbers) != 1:
        message = "a fusion point must have one pattern with a list of nodes; only `chunks` may be a number"
        raise Refused(message, "write one pattern with its nodes, e.g. `head: [logits, softcap, loss]`")
    return point


FusePoint = Annotated[
    dict[Pattern, Annotated[Members | Chunks, Discriminator(lambda v: "chunks" if isinstance(v, int) else "members")]],
    Field(min_length=1, max_length=2),
    AfterValidator(_one_pattern),
]


class Promote(StrictModel):
    """More bits for the most sensitive tensors.

    Attributes:
        bits: the bits of the promoted tensors.
        by: the measure of sensitivity.
        count: the number of promoted tensors. If unset, as many tensors are promoted as fit into `quant.budget_bytes`,
            and `quant.budget_bytes` must be set.
        match: a pattern of the names of tensors to choose from.
    """

    bits: Annotated[int, Field(ge=4, le=8)]
    by: Literal["hessian_trace"] = "hessian_trace"
    count: Positive | None = None
    match: Pattern = "*"


class Allocate(StrictModel):
    """A joint choice of bits for several tensors.

    The choice minimizes the increase of the loss within `quant.budget_bytes`. The increase is estimated from Hessians
    and gradients. Sizes are measured on quantized, compressed data.

    Attributes:
        bits: the bits to choose from. A choice may have fewer bits than the rule for a tensor, so that larger models
            fit the budget.
        clip_stds: clips to try with each number of bits, in standard deviations of a row. These clips apply to tensors
            whose scheme supports clips. A wider clip has coarser steps, and gives codes that compress to fewer bytes.
        match: a pattern of the names of the tensors.
    """

    bits: Annotated[tuple[Annotated[int, Field(ge=2, le=8)], ...], Field(min_length=1, max_length=7)] = (4, 5, 6, 7, 8)
    clip_stds: Annotated[tuple[PositiveFloat, ...], Field(max_length=16)] = later(())
    match: Pattern = "*"

    def problems(self) -> Iterator[Problem]:
        if len(set(self.bits)) * max(len(set(self.clip_stds)), 1) < 2:
            hint = "list several `bits`, or several `clip_stds`"
            yield Problem(("bits",), "S268", "`allocate` has a single option, so there is nothing to choose", hint)


class Correct(StrictModel):
    """A low-rank correction, stored in 2 and 4 bits (LQER), for the tensors with the largest quantization errors.

    Errors are computed with the bits that `allocate` or `promote` chooses. After the correction, the bits of all
    tensors are chosen again.

    Attributes:
        rank: the rank of the correction.
        count: the number of corrected tensors.
        match: a pattern of the names of tensors to choose from.
    """

    rank: Annotated[int, Field(ge=1, le=256)] = 4
    count: Positive = 3
    match: Pattern = "*"


class Calibrate(StrictModel):
    """The text on which the model runs to measure the Hessians.

    Attributes:
        sequences: the number of windows.
        batch: the number of windows per forward pass.
        source: `train`: windows of the training split, as long as the context. `self`: text that the model generates.
        length: the number of tokens of a generated window, by default the context.
        temperature: the sampling temperature of generated text.
        begin: the first token of a generated window: the marker between documents (`bos`), or a random token of the
            vocabulary (`uniform`).
    """

    sequences: Positive = 64
    batch: Positive = 8
    source: Literal["train", "self"] = later("train")
    length: Positive | None = later(None)
    temperature: Annotated[float, Field(gt=0, le=100)] = later(0.8)
    begin: Literal["bos", "uniform"] = later("bos")

    def problems(self) -> Iterator[Problem]:
        for name in ("length", "temperature", "begin"):
            if self.source != "self" and name in self.model_fields_set:
                message = f"`{name}` applies only to `source: self`"
                yield Problem((name,), "S260", message, f"add `source: self`, or remove `{name}`")

    def problems_with(self, window: int, reads: Form) -> Iterator[Problem]:
        """Yields a problem if the model cannot generate the calibration text, or if the windows exceed the context."""
        if self.source == "self" and reads == "lines":
            message = "`source: self` is for text, but the model translates lines"
            yield Problem(("source",), "S261", message, "use `source: train`")
        elif (self.length or 0) > window:
            message = f"windows of {self.length} tokens are longer than the context of {window}"
            yield Problem(("length",), "S262", message, f"use at most {window}, or remove `length`")


class QuantSpec(StrictModel):
    """The storage scheme of each parameter.

    Attributes:
        default: the scheme of parameters that no rule matches.
        promote: more bits for the most sensitive tensors.
        allocate: a joint choice of bits within the byte budget.
        correct: a low-rank correction of the tensors with the largest error.
        rules: the schemes of parameters whose names match a pattern. At most one rule may match a parameter.
        calibrate: the text that calibrates the quantization.
        budget_bytes: the largest size of the artifact, in bytes.
    """

    default: AnyScheme
    promote: Promote | None = None
    allocate: Allocate | None = later(None)
    correct: Correct | None = later(None)
    rules: tuple[AnyRule, ...] = ()
    calibrate: Calibrate = Calibrate.model_construct()
    budget_bytes: Positive | None = None

    def problems(self) -> Iterator[Problem]:
        if self.promote is not None and self.promote.count is None and self.budget_bytes is None:
            message = "`promote` needs `count`, or the `budget_bytes` of `quant`"
            yield Problem(
                ("promote",), "S203", message, "add `count: N` under `promote`, or `budget_bytes: N` under `quant`"
            )
        if self.allocate is not None and self.promote is not None:
            message = "`promote` and `allocate` both choose bits"
            yield Problem(("allocate",), "S245", message, "remove one of the two", (("the other", ("promote",)),))
        if self.allocate is not None and self.budget_bytes is None:
            message = "`allocate` needs the `budget_bytes` of `quant`"
            yield Problem(("allocate",), "S245", message, "add `budget_bytes: N` under `quant`")


Rewritten = Literal["auto"] | tuple[Pattern, ...]


class Spec(StrictModel):
    """One model: its architecture, targets, fusions, quantization, training and evaluation.

    Attributes:
        spec_version: the version of this format.
        name: the name of the model. The folder in generated/ and runs have this name.
        targets: the machines to generate code for.
        model: the architecture.
        fuse: the fusion points. A fusion point has a pattern of parts of the model, and a list of the nodes to fuse in
            each part. A point that ends in the loss may have `chunks`: the number of chunks of tokens, which are
            computed one after another.
        merge: patterns of linear layers that read the same value. In programs over whole sequences, such layers become
            one product. `auto`: all layers for which one product moves fewer bytes.
        fold: patterns of linear layers whose outputs are multiplied by numbers or learned vectors. In programs over
            whole sequences, the matrices are multiplied by these factors instead. `auto`: all linear layers with such
            outputs.
        quant: how the parameters are stored. If unset, the model is not quantized.
        train: the training run.
        eval: how `specc eval` scores the model.
    """

    spec_version: Two
    name: Name
    targets: Annotated[tuple[TargetName, ...], Field(min_length=1)]
    model: AnyModel
    fuse: tuple[FusePoint, ...] = ()
    merge: Rewritten = later(())
    fold: Rewritten = later(())
    quant: QuantSpec | None = None
    train: TrainSpec
    eval: AnyEval = BitsSpec.model_construct()

    @property
    def plain(self) -> "Spec":
        """The spec without fusion points, merged layers and folded factors. The programs of this spec are exactly the
        programs of the model."""
        return self.model_copy(update={"fuse": (), "merge": (), "fold": ()})

    @property
    def at_rest(self) -> "Spec":
        """The spec of the model outside of training. This spec has no quantization-aware training (`train.qat`), and
        no loss terms that have modules."""
        losses = tuple(term for term in self.train.losses if not term.count)
        return self.model_copy(update={"train": self.train.model_copy(update={"qat": None, "losses": losses})})

    @property
    def marks(self) -> tuple[tuple[Path, int], ...]:
        """The ids that begin documents in the model and in terms of the loss, as pairs (path in the spec, id)."""
        terms = [(("train", "losses", i, "bos"), term.mark) for i, term in enumerate(self.train.losses)]
        return (*self.model.marks, *((path, mark) for path, mark in terms if mark is not None))

    def _problems_of_late_changes(self) -> Iterator[Problem]:
        """Yields a problem for each schedule change that begins after the last step of the run.

        A run that is limited by seconds is not checked, because its number of steps is unknown.
        """
        if (steps := self.train.steps) is None:
            return
        last = (steps - 1) / steps
        for path, schedule in values_in(self, Schedule):
            for i, share in schedule.changes:
                if last < share < 1:
                    message = f"`{path[-1]}` changes at time {share:.4g}, but the last step begins at {last:.4g}"
                    hint = "write an earlier time, or raise `steps`; a time is a share of the run, from 0 to 1"
                    yield Problem((*path, "at", i, 0), "S269", message, hint)

    def _problems_of_later_targets(self) -> Iterator[Problem]:
        """Yields a problem for each term of the loss with a target that no row of training contains."""
        rows = [tokens for _, tokens in values_of("context", self.train.context)] or [self.model.window]
        targets = max(max(rows) - self.model.unscored, 1)
        for i, term in enumerate(self.train.losses):
            field, furthest = term.furthest
            if furthest > targets:
                message = f"the furthest target is {furthest} tokens later, but a row has only {targets} targets"
                hint = f"lower `{field}`, or use rows of at least {furthest + self.model.unscored} tokens"
                yield Problem(("train", "losses", i, field), "S297", message, hint)

    def _problems_of_the_prefix(self) -> Iterator[Problem]:
        """Yields the problems of settings that conflict with the model's `prefix`, because the targets in the prefix
        are not scored."""
        least = self.model.unscored + 1
        if least == 1:
            return
        for path, tokens in values_of("context", self.train.context):
            if tokens < least:
                message = f"rows of {tokens} tokens are shorter than the prefix of {least} tokens"
                yield Problem(("train", *path), "S279", message, f"use at least {least} tokens")
        if self.eval.longest and self.eval.longest < least:
            message = f"a window of {self.eval.longest} tokens is shorter than the prefix of {least} tokens"
            yield Problem(("eval", "window"), "S279", message, f"use at least {least} tokens")
        if self.eval.halves:
            message = "adaptation trains on all targets of a window, but the targets of the prefix have no score"
            yield Problem(("eval", "adapt"), "S279", message, "remove `adapt`")
        if self.quant is not None and self.quant.calibrate.source == "self":
            message = f"generation begins with one token, but the prefix has {least} tokens"
            yield Problem(("quant", "calibrate", "source"), "S279", message, "use `source: train`")

    @property
    def computes_in(self) -> str | None:
        """The compute dtype of the spec, or None if the target determines the dtype."""
        return self.train.precision.compute or self.model.computes_in

    def _problems_of_precision(self) -> Iterator[Problem]:
        stated, model = self.train.precision.compute, self.model.computes_in
        if stated is not None and model is not None and stated != model:
            message = f"training computes in {stated}, but the model has `dtype: {model}`"
            yield Problem(("compute",), "S293", message, "remove one of the two", (("the model", ("model", "dtype")),))
        if self.train.precision.masters == "bf16" and self.computes_in != "bf16":
            dtype = self.computes_in or "the dtype of its target"
            message = f"`masters: bf16` needs `compute: bf16`, but this model computes in {dtype}"
            yield Problem(("masters",), "S293", message, "set `compute: bf16`, or remove `masters`")
        if self.train.precision.masters == "bf16" and self.model.reads == "lines":
            message = (
                "`masters: bf16` is only for models of kind `decoder`; "
                "in this model, dropout and rounding would share one random generator"
            )
            yield Problem(("masters",), "S293", message, "remove `masters`")
        if self.train.precision.masters == "bf16" and self.train.qat is not None:
            message = "`qat` rounds copies of weights in f32, but with `masters: bf16`, all weights are in bf16"
            yield Problem(("masters",), "S293", message, "remove `masters`, or remove `qat`")
        if self.train.precision.tf32 and self.computes_in != "f32":
            message = (
                f"`tf32` changes f32 matrix products, but the model computes in {self.computes_in or 'bf16'} on a GPU"
            )
            yield Problem(("tf32",), "S277", message, "remove `tf32`, or set `compute: f32`")

    def problems(self) -> Iterator[Problem]:
        for i, target in enumerate(self.targets):
            if target in self.targets[:i]:
                yield Problem(("targets", i), "S204", f"target {target} is listed twice", "remove one of the two")
        yield from (problem.under("train") for problem in self.train.problems_of_a_step(self.model.window))
        rows = self.train.problems_of_rows(self.model.window, self.model.reads)
        yield from (problem.under("train") for problem in rows)
        yield from self._problems_of_late_changes()
        yield from self._problems_of_the_prefix()
        yield from self._problems_of_later_targets()
        for path, mark in self.marks:
            if mark >= self.model.vocabulary:
                message = f"`bos` is {mark}, but the largest id of the vocabulary is {self.model.vocabulary - 1}"
                hint = "use the id that the tokenizer puts before a document, or remove `bos`"
                yield Problem(path, "S249", message, hint)
        stated = self.model.losses
        for i, term in enumerate(self.train.losses):
            if term.states and term.states not in stated:
                message = f"no layer has a loss with the name `{term.states}`"
                hint = (
                    f"choose from {', '.join(sorted(stated))}" if stated else "remove it; this model has no such losses"
                )
                yield Problem(("train", "losses", i, "name"), "S265", message, hint)
            for reason in self.model.refuses_modules() if term.count else ():
                message = f"this model cannot have the modules of `{term.kind}`: {reason}"
                yield Problem(("train", "losses", i, "kind"), "S265", message, "use `later_token`, or remove the term")
        yield from self.train.data.problems_with(self.model)
        reads = self.model.reads
        if self.train.teacher_forcing is not None and reads != "lines":
            message = "`teacher_forcing` is only for models of kind `encoder_decoder`"
            yield Problem(("train", "teacher_forcing"), "S227", message, "remove `teacher_forcing`")
        yield from (problem.under("train", "precision") for problem in self._problems_of_precision())
        if self.train.qat is not None and self.quant is None:
            message = "`train.qat` rounds weights as `quant` will store them, but the spec has no `quant`"
            yield Problem(("train", "qat"), "S244", message, "add a `quant` section, or remove `qat`")
        if self.quant is not None:
            problems = self.quant.calibrate.problems_with(self.model.window, reads)
            yield from (problem.under("quant", "calibrate") for problem in problems)
        yield from (
            problem.under("eval") for problem in self.eval.problems_with(self.model.window, reads, self.model.bounded)
        )
