"""The `train.precision` section of a spec: the dtypes of training, and the factors that keep small numbers in range."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.strict import Pattern, Positive, PositiveFloat, Problem, StrictModel, later


class LossScaleSpec(StrictModel):
    """A factor of the loss that adapts to the range of f16 (Micikevicius et al., 2018).

    The gradients of a step are divided by the factor before they are clipped. If a gradient is not finite, the factor
    falls, and the step leaves weights, optimizer state and average unchanged.

    Attributes:
        initial: the factor at the first step.
        growth: the factor is multiplied by this number after `every` steps in a row with finite gradients.
        backoff: the factor is multiplied by this number after a step with a gradient that is not finite.
        every: the number of consecutive steps with finite gradients after which the factor grows.
        least: the smallest factor. A gradient that is not finite at this factor ends the run.
    """

    initial: PositiveFloat = 65536.0
    growth: Annotated[float, Field(ge=1, le=16)] = 2.0
    backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    every: Positive = 2000
    least: PositiveFloat = 1.0

    def problems(self) -> Iterator[Problem]:
        """Yields a problem if the first factor is below the smallest."""
        if self.initial < self.least:
            message = f"the loss scale begins at {self.initial:g}, below its least value {self.least:g}"
            yield Problem(("initial",), "S293", message, "raise initial, or lower least")


class Fp8Spec(StrictModel):
    """Linear layers that multiply 8-bit floats in training: e4m3 for inputs and weights, e5m2 for gradients.

    Each factor of a product is divided by a scale that maps the largest magnitude to the largest value of the format.
    GPUs have such products from sm89 on; on a CPU they are emulated. In a fusion point, scales must be delayed.

    Attributes:
        match: the pattern of the names of the layers, such as `blocks.*.mlp.*` or `head.logits`.
        scale: one scale per `tensor`, or one per `row` of each factor. Rows extend along the dim that the product sums
            over.
        scaling: `current`: scales are computed from the values themselves. `delayed`: scales are computed from the
            largest magnitudes of the last steps, which are stored in checkpoints.
        history: the number of steps from which delayed scales are computed; 16 if unset.
    """

    match: Pattern
    scale: Literal["tensor", "row"] = "tensor"
    scaling: Literal["current", "delayed"] = "current"
    history: Annotated[int, Field(ge=1, le=4096)] | None = None

    @property
    def steps(self) -> int:
        """The number of steps from which delayed scales are computed."""
        return self.history or 16

    def problems(self) -> Iterator[Problem]:
        """Yields a problem for delayed row scales, because a row contains another token in each step, and a problem for
        `history` without delayed scales."""
        if self.scaling == "delayed" and self.scale == "row":
            message = "row scales cannot be delayed, because a row contains other tokens in each step"
            yield Problem(("scaling",), "S293", message, "use `scaling: current`, or `scale: tensor`")
        if self.scaling == "current" and self.history is not None:
            message = "history applies to delayed scales, but scaling is current"
            yield Problem(("history",), "S293", message, "add `scaling: delayed`, or remove history")


class PrecisionSpec(StrictModel):
    """The dtypes of training.

    Attributes:
        compute: the dtype of activations, and of weights in matrix products. If unset, the dtype of the target: f32 on
            a CPU, bf16 on a GPU. Sums, losses and norms are always f32.
        masters: the dtype of the weights that optimizers update. With `bf16`, the parameters that the model reads in
            bf16 have no copy in f32. An update computes in f32 and rounds its result stochastically, with a probability
            proportional to the distance, so that updates below the resolution of bf16 add up in expectation (Zamirai et
            al., 2020, "Revisiting BFloat16 Training", arXiv 2010.06192). `bf16` requires `compute: bf16`.
        loss_scale: a factor of the loss during the backward pass, so that small gradients do not vanish: a constant
            number, or a mapping for a factor that changes. If unset, the factor changes with `compute: f16`, and is 1
            otherwise.
        tf32: whether f32 matrix products of a training step on a GPU round their inputs to TF32, which has 10 bits of
            mantissa. If false, they are computed in f32, without tensor cores. Evaluation always computes in f32.
        fp8: the linear layers that multiply 8-bit floats in training steps. The first rule that matches a layer
            applies. Evaluation and artifacts keep the compute dtype.
    """

    compute: Literal["f32", "bf16", "f16"] | None = None
    masters: Literal["f32", "bf16"] = later("f32")
    loss_scale: PositiveFloat | LossScaleSpec | None = None
    tf32: bool = later(False)
    fp8: tuple[Fp8Spec, ...] = later(())

    @property
    def scaling(self) -> LossScaleSpec | float | None:
        """The loss scale of training; None if the loss is not scaled."""
        return LossScaleSpec() if self.loss_scale is None and self.compute == "f16" else self.loss_scale
