"""Test-time training: a chunk is scored, and only then trained on."""

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from specc.compiler.pattern import matches
from specc.compiler.spec.adapt.adaptation import Adaptation
from specc.compiler.strict import NonNegativeFloat, Pattern, Positive, PositiveFloat, Problem, StrictModel, Unit


class SgdSettings(StrictModel):
    """Gradient descent with momentum, as torch.optim.SGD does it."""

    kind: Literal["sgd"]
    lr: PositiveFloat = 0.005
    momentum: Unit = 0.9
    nesterov: bool = False
    weight_decay: NonNegativeFloat = 0.0

    def problems(self) -> Iterator[Problem]:
        """Nesterov's form is one of momentum."""
        if self.nesterov and not self.momentum:
            hint = "give a momentum above 0, or leave nesterov out"
            yield Problem(("nesterov",), "S259", "nesterov is a form of momentum, and there is none", hint)


class AdamWSettings(StrictModel):
    """AdamW (Loshchilov and Hutter, 2019), as torch.optim.AdamW does it."""

    kind: Literal["adamw"]
    lr: PositiveFloat = 1e-4
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0


class LoraSettings(StrictModel):
    """W + scale / rank * B A in place of each matrix W (Hu et al. 2021): A [rank, in] starts uniform in
    +-1/sqrt(in), B [out, rank] at 0, and these are what learns."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 96
    scale: PositiveFloat = 144.0


class TestTimeTraining(Adaptation):
    """Score-first test-time training (openai/parameter-golf pull requests 549, 1413, 1493): the windows of a chunk are
    scored, then the weights that `match` covers take `epochs` epochs of steps of `batch` rows over the chunk's tokens,
    each once an epoch, and the next chunk is scored with what they have become. The last chunk is not trained on.

    A chunk is `chunk` tokens, in whole windows. The learning rate goes from its value to 0 over the chunks (`cosine`),
    for which the length of the text has to be known before it is read, or stays. Gradients are clipped to `clip_norm`
    over all that learns. The optimizer is gradient descent where unset. With `lora`, each matrix that `match` covers
    learns a correction of low rank in its place, by AdamW where unset, and what is no matrix stays as it is.
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
        """The optimizer, also where unset. The rate of gradient descent would break a correction, which starts at 0."""
        return self.optimizer or (SgdSettings(kind="sgd") if self.lora is None else AdamWSettings(kind="adamw"))

    @property
    def sees(self) -> str:
        if self.schedule == "constant":
            return super().sees
        return "the artifact, earlier tokens and how many there are in all (schedule: cosine)"

    def problems_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
        """Something learns."""
        covered = [shape for name, shape in shapes.items() if matches(self.match, name)]
        if not covered:
            message, hint = f"ttt {self.match} matches no parameter", f"parameters are named like {next(iter(shapes))}"
            yield Problem(("match",), "S305", message, f"{hint}; e.g. `blocks.*` or `*`")
        elif self.lora is not None and not any(len(shape) == 2 for shape in covered):
            message = f"ttt {self.match} matches no matrix, and lora corrects matrices"
            yield Problem(("match",), "S305", message, "widen it, or take lora out")
