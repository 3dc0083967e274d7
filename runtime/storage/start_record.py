"""The record of the weights from which a run started."""

from typing import Literal

from specc.compiler.strict import StrictModel
from specc.runtime.storage.data_digests import Sha256


class StartRecord(StrictModel):
    """The weights that a run loaded before its first step.

    Attributes:
        path: the absolute path of the source.
        kind: the kind of the source.
        step: the step of the checkpoint if the source is a run; None for other sources.
        tensors: the SHA-256 (hex) of the f32 bytes of each loaded parameter, by name.
    """

    path: str
    kind: Literal["run", "artifact", "hugging_face", "safetensors"]
    step: int | None = None
    tensors: dict[str, Sha256]
