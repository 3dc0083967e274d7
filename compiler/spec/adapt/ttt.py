"""Test-time training: each chunk is scored before the model is trained on this chunk."""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from specc.compiler.pattern import matches
from specc.compiler.spec.adapt.adaptation import Adaptation
from specc.compiler.strict import NonNegativeFloat, Pattern, Positive, PositiveFloat, Problem, StrictModel, Unit


class SgdSettings(StrictModel):
    """Gradient descent with momentum, as in torch.optim.SGD.

    Attributes:
        lr: the learning rate.
        momentum: the momentum.
        nesterov: whether to use Nesterov momentum.
        weight_decay: the L2 penalty.
    """

    kind: Literal["sgd"]
    lr: PositiveFloat = 0.005
    momentum: Unit = 0.9
    nesterov: bool = False
    weight_decay: NonNegativeFloat = 0.0

    def problems(self) -> Iterator[Problem]:
        if self.nesterov and not self.momentum:
            hint = "set `momentum`, or remove `nesterov`"
            yield Problem(("nesterov",), "S259", "`nesterov` needs a `momentum` above 0", hint)


class AdamWSettings(StrictModel):
    """AdamW (Loshchilov and Hutter, 2019), as in torch.optim.AdamW.

    Attributes:
        lr: the learning rate.
        betas: the decays of the first and second moments.
        eps: the epsilon of the denominator.
        weight_decay: the decoupled weight decay.
    """

    kind: Literal["adamw"]
    lr: PositiveFloat = 1e-4
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0


class LoraSettings(StrictModel):
    """Low-rank adaptation (Hu et al. 2021): W + scale / rank * B A replaces each matrix W.

    Only A [rank, in] and B [out, rank] are trained. The initial A is uniform in +-1/sqrt(in), and the initial B is 0.

    Attributes:
        rank: the rank of the correction.
        scale: the factor of the correction, before the division by `rank`.
    """

    rank: Annotated[int, Field(ge=1, le=4096)] = 96
    scale: PositiveFloat = 144.0


class TestTimeTraining(Adaptation):
    """Score-first test-time training (openai/parameter-golf pull requests 549, 1413, 1493).

    The windows of a chunk are scored. Then weights are trained on the tokens of the chunk. The next chunk is scored
    with the updated weights. Each epoch reads each token once. The model is not trained on the last chunk.

    Attributes:
        match: a pattern of the names of trained weights.
        chunk: the number of tokens per chunk, a multiple of the window.
        epochs: the number of epochs over each chunk.
        batch: the number of rows per training step.
        optimizer: the optimizer. By default, gradient descent without `lora`, and AdamW with `lora`.
        schedule: the learning rate over the chunks: `cosine` falls to 0, `constant` does not change. `cosine` needs the
            length of the text in advance.
        clip_norm: the largest norm of the gradient over all trained weights.
        lora: if set, only low-rank corrections of the matched matrices are trained.
    """

    causal: ClassVar[bool] = True

    kind: Literal["ttt"]
    match: Pattern = "*"
    chunk: Positive = 32_768
    epochs: Positive = 3
    batch: Positive = 32
    optimizer: Annotated[SgdSettings | AdamWSettings, Field(discriminator="kind")] | None = None
    schedule: Literal["cosine", "constant"] = "cosine"
    clip_norm: PositiveFloat | None = 1.0
    lora: LoraSettings | None = None

    @property
    def learns_by(self) -> SgdSettings | AdamWSettings:
        """The optimizer of the spec, or the default.

        With `lora`, the default is AdamW. The default learning rate of gradient descent does not fit a correction that
        begins at 0.
        """
        return self.optimizer or (SgdSettings(kind="sgd") if self.lora is None else AdamWSettings(kind="adamw"))

    @property
    def sees(self) -> str:
        if self.schedule == "constant":
            return super().sees
        return "the artifact, earlier tokens, and the total number of tokens (schedule: cosine)"

    def problems_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
        covered = [shape for name, shape in shapes.items() if matches(self.match, name)]
        if not covered:
            hint = f"the parameters have names such as {next(iter(shapes))}; use a pattern such as `blocks.*` or `*`"
            yield Problem(("match",), "S305", f"`{self.match}` of `ttt` matches no parameter", hint)
        elif self.lora is not None and not any(len(shape) == 2 for shape in covered):
            message = f"`{self.match}` of `ttt` matches no matrix, but `lora` needs one"
            yield Problem(("match",), "S305", message, "widen the pattern, or remove `lora`")
