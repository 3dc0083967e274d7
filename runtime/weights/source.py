"""Sources of weights. A source reads one tensor at a time, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from specc.compiler.spec.spec import Spec
from specc.runtime.errors import RuntimeFailure

Kind = Literal["run", "artifact", "hugging_face", "safetensors"]


class StartError(RuntimeFailure):
    """Raised if the weights from which a run should start do not exist, or do not match the model."""

    code = "U007"
    exit_code = 2


class Weights(Protocol):
    """The weights of a model in a run, an artifact or other files.

    Attributes:
        kind: the format of the files.
        step: the step of the checkpoint if the weights are from a run. None otherwise.
        spec: the spec of the model that was trained; None if unknown.
        shapes: the shapes of all tensors, by name. They are known before a tensor is read.
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
        """Returns a tensor in f32 on the CPU. Raises IntegrityError if the file of the tensor is damaged."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The weights of a run or an artifact, f32, by parameter name. The tensors were verified when they were loaded."""

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
