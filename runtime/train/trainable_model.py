"""A model with all that its training has to know of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from specc.compiler.programs.programs import Parameter, Phase
from specc.compiler.quant.scheme import Scheme
from specc.runtime.calibration.input_scales import InputScales


@dataclass(frozen=True, slots=True)
class FakeQuantization:
    """The quantization that a model computes with once `train.qat` has begun.

    Attributes:
        schemes: how each parameter will be stored, by name.
        inputs: the scales of the inputs of int8 products; None where no product will be one of int8.
    """

    schemes: Mapping[str, Scheme]
    inputs: InputScales | None = None


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model to train.

    Attributes:
        module: its call gives a mean loss in nats, f32 [], of the arguments that a feed makes; `module.score` gives
            the nats of each target, f32 [B, T]. Its parameters are f32, under the names of `parameters`.
        parameters: with the dtypes that the programs read them in.
        window: tokens of a row.
        spec_digest: SHA-256 of the canonical spec; checkpoints carry it.
        phases: as of `Programs`.
        fake_quantization: for `train.qat`.
    """

    module: nn.Module
    parameters: Sequence[Parameter]
    window: int
    spec_digest: str
    phases: Sequence[Phase] = ()
    fake_quantization: FakeQuantization | None = None
