"""A model with the metadata that its training needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from specc.compiler.programs.programs import Parameter, Phase
from specc.compiler.quant.scheme import Scheme
from specc.runtime.calibration.input_scales import InputScales


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model to train.

    Attributes:
        module: the model. Calling it with the arguments that a feed returns computes the mean loss in nats, f32 [];
            `module.score` returns the loss of each target in nats, f32 [B, T]. Its parameters are f32, under the names
            in `parameters`.
        parameters: the parameters with the dtypes that the programs read them in.
        window: tokens per row.
        spec_digest: SHA-256 of the canonical spec, stored in checkpoints.
        phases: the phases of the run, as in `Programs`.
        schemes: the storage scheme of each parameter, by name, for `train.qat`. None without it.
        input_scales: the input scales of int8 products. None if no product will be int8.
    """

    module: nn.Module
    parameters: Sequence[Parameter]
    window: int
    spec_digest: str
    phases: Sequence[Phase] = ()
    schemes: Mapping[str, Scheme] | None = None
    input_scales: InputScales | None = None
