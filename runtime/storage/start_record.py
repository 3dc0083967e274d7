"""The record of the weights that a run started from."""

from typing import Literal

from specc.compiler.strict import StrictModel
from specc.runtime.storage.data_digests import Sha256


class StartRecord(StrictModel):
    """The weights that a run took before its first step.

    Attributes:
        path: the absolute path of the source.
        kind: the kind of the source.
        step: the step of the checkpoint of a run; None for files.
        tensors: the SHA-256 (hex) of the f32 bytes of each parameter that was taken, by name.
    """

    path: str
    kind: Literal["run", "artifact", "hugging_face", "safetensors"]
    step: int | None = None
    tensors: dict[str, Sha256]
