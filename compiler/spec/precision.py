"""The `train.precision` section of a spec: the dtypes of training, and the factors that keep small numbers in range."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.strict import Pattern, Positive, PositiveFloat, Problem, StrictModel, later


class LossScaleSpec(StrictModel):
    """A factor of the loss that adapts to the range of f16 (Micikevicius et al., 2018).

    Gradients are divided by the factor before the gradients are clipped. If a gradient is not finite, the factor falls.
    Weights, optimizer state and average then stay the same in this step.

    Attributes:
        initial: the factor at the first step.
        growth: the multiplier of the factor after `every` consecutive steps with finite gradients.
        backoff: the multiplier of the factor after a step with a gradient that is not finite.
        every: the number of consecutive steps with finite gradients after which the factor grows.
        least: the smallest factor. The run ends if a gradient is not finite at this factor.
    """

    initial: PositiveFloat = 65536.0
    growth: Annotated[float, Field(ge=1, le=16)] = 2.0
    backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    every: Positive = 2000
    least: PositiveFloat = 1.0

    def problems(self) -> Iterator[Problem]:
        if self.initial < self.least:
            message = f"`initial` is {self.initial:g}, which is below `least`, {self.least:g}"
            yield Problem(("initial",), "S293", message, "raise `initial`, or lower `least`")


class Fp8Spec(StrictModel):
    """Linear layers that multiply 8-bit floats in training: e4m3 for inputs and weights, e5m2 for gradients.

    Each factor of a product is divided by a scale. The scale maps the factor's largest magnitude to the largest number
    of the format. GPUs from sm89 on compute such products, and CPUs emulate such products. Fusion points need delayed
    scales.

    Attributes:
        match: a pattern of the names of the layers, such as `blocks.*.mlp.*` or `head.logits`.
        scale: one scale per `tensor`, or one per `row` of each factor. Rows extend along the dim that the product sums
            over.
        scaling: `current`: the values that are rounded determine the scales. `delayed`: the largest magnitudes of the
            last steps determine the scales. These magnitudes are stored in checkpoints.
        history: the number of steps that determine a delayed scale, 16 if unset.
    """

    match: Pattern
    scale: Literal["tensor", "row"] = "tensor"
    scaling: Literal["current", "delayed"] = "current"
    history: Annotated[int, Field(ge=1, le=4096)] | None = None

    @property
    def steps(self) -> int:
        return self.history or 16

    def problems(self) -> Iterator[Problem]:
        if self.scaling == "delayed" and self.scale == "row":
            message = "`scale: row` cannot have `scaling: delayed`, because a row contains other tokens in each step"
            yield Problem(("scaling",), "S293", message, "use `scaling: current`, or `scale: tensor`")
        if self.scaling == "current" and self.history is not None:
            message = "`history` applies only to `scaling: delayed`, but `scaling` is current"
            yield Problem(("history",), "S293", message, "add `scaling: delayed`, or remove `history`")


class PrecisionSpec(StrictModel):
    """The dtypes of training.

    Attributes:
        compute: the dtype of activations, and of weights in matrix products. If unset, f32 on a CPU and bf16 on a GPU.
            Sums, losses and norms are always f32.
        masters: the dtype of the weights that optimizers update. With `bf16`, parameters that the model reads in bf16
            have no copy in f32. An update computes in f32 and rounds its result stochastically. Updates below the
            resolution of bf16 therefore add up in expectation (Zamirai et al., 2020, "Revisiting BFloat16 Training",
            arXiv 2010.06192). `bf16` requires `compute: bf16`.
        loss_scale: a factor of the loss during the backward pass, so that small gradients do not vanish. A number is
            constant, and a mapping describes a factor that adapts during the run. If unset, the factor adapts
            with `compute: f16`, and is 1 with any other dtype.
        tf32: whether the inputs of f32 matrix products are rounded to TF32 (10 bits of mantissa) in training steps on a
            GPU. Otherwise, these products are computed in f32, without tensor cores. Evaluation always computes in f32.
        fp8: the linear layers that multiply 8-bit floats in training steps. The first rule that matches a layer
            applies. Evaluation and artifacts have the compute dtype.
    """

    compute: Literal["f32", "bf16", "f16"] | None = None
    masters: Literal["f32", "bf16"] = later("f32")
    loss_scale: PositiveFloat | LossScaleSpec | None = None
    tf32: bool = later(False)
    fp8: tuple[Fp8Spec, ...] = later(())

    @property
    def scaling(self) -> LossScaleSpec | float | None:
        """The loss scale of training, or None if the loss is not scaled."""
        return LossScaleSpec() if self.loss_scale is None and self.compute == "f16" else self.loss_scale
