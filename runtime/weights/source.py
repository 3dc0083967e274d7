"""Sources of weights. A source provides tensors by name, one at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from specc.compiler.spec.spec import Spec
from specc.runtime.errors import RuntimeFailure

Kind = Literal["run", "artifact", "hugging_face", "safetensors"]


class StartError(RuntimeFailure):
    """Raised if the weights to start from do not exist, or do not fit the model."""

    code = "U007"
    exit_code = 2


class Weights(Protocol):
    """Tensors by name.

    Attributes:
        kind: the format of the files.
        step: the step of the checkpoint of a run; None for files.
        spec: the spec of the model that was trained; None if unknown.
        shapes: the shapes by name. The shapes are known before any tensor is read.
    """

    @property
    def kind(self) -> Kind: ...
    @property
    def step(self) -> int | None: ...
    @property
    def spec(self) -> Spec | None: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> Tensor:
        """Returns a tensor, f32 on the CPU. Raises IntegrityError if the file of the tensor is damaged."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The weights of a specc model, f32, by parameter name. All tensors have been verified."""

    path: Path
    kind: Kind
    step: int | None
    spec: Spec | None
    tensors: Mapping[str, Tensor]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]
