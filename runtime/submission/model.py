"""The model of a submission: generated modules, and a table of token sizes.

`CarriedModel` and `artifact_contents` replace classes of specc that need the compiler.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from specc.compiler.build import interface_digest
from specc.compiler.passes.assign_quant import storage_name
from specc.compiler.quant.scheme import Scheme
from specc.runtime.artifact.artifact import ArtifactContents, read_artifact
from specc.runtime.artifact.codecs import Codec
from specc.runtime.artifact.quantized_model import QuantizedModel
from specc.runtime.artifact.table import layout
from specc.runtime.calibration.calibrate import calibration_windows
from specc.runtime.data.tokenizers.tokenizer import PieceBytes
from specc.runtime.data.windows.stream import TokenStream
from specc.runtime.dtypes import DTYPES
from specc.runtime.model.parameters import assign, fill, place
from specc.runtime.model.protocols import GeneratedText, text_model
from specc.runtime.quantize.weights import TrainedModel
from specc.runtime.storage.data_digests import DataDigests
from specc.runtime.submission import plan

CODEC = Codec(plan.CODEC)
PARAMETERS = next(iter(plan.PARAMS.values()))
SHAPES = {parameter.name: tuple(parameter.shape) for parameter in PARAMETERS}


class TokenTable:
    """The data of the tokenizer that token shards need: the id that separates documents, and the size of each token."""

    name, vocab, bos, lossless, _digest = plan.TOKENIZER

    def digest(self) -> str:
        return self._digest

    def piece_bytes(self) -> PieceBytes:
        marks = np.array([*map(ord, plan.PIECES)], np.int64) - 32
        boundary = np.zeros(len(marks), np.bool_)
        boundary[list(plan.BOUNDARIES)] = True
        return PieceBytes(marks // 2, marks % 2 == 1, boundary)


TOKENIZER: Any = TokenTable()


def module(target: str, plain: bool = False) -> nn.Module:
    """Returns the generated model in f32, with uninitialized parameters.

    With `plain`, the code of the model has no fused kernels.
    """
    package = __name__.rpartition(".")[0]
    model: nn.Module = importlib.import_module(f"{package}.{target}{'_plain' if plain else ''}.model").Model()
    return model


def folder(target: str) -> Path:
    """Returns the folder of the generated sources of a target."""
    return Path(__file__).with_name(target)


def initialized(target: str) -> nn.Module:
    """Returns the generated model with its initial weights."""
    model = module(target)
    fill(model, plan.INITS, plan.TRAIN.seed)
    return model


def realized(target: str, weights: Mapping[str, Tensor], device: torch.device, plain: bool = False) -> Any:
    """Returns the generated model with trained weights.

    Args:
        target: the name of the target.
        weights: the parameters, f32, by name.
        device: the device of the model.
        plain: whether to use the code without fused kernels.

    Returns:
        The model in its compute dtypes, in eval mode, on `device`.
    """
    model = module(target, plain)
    assign(model, weights)
    place(model, {parameter.name: DTYPES[parameter.dtype] for parameter in plan.PARAMS[target]}, device)
    return model


@dataclass(frozen=True)
class CarriedModel:
    """The trained model of a submission, with its tokenizer."""

    target: str
    device: torch.device
    weights: Mapping[str, Tensor]

    name: ClassVar[str] = plan.NAME
    targets: ClassVar[tuple[str, ...]] = plan.TARGETS
    tokenizer: ClassVar[Any] = TOKENIZER

    @cached_property
    def text_model(self) -> GeneratedText:
        return text_model(realized(self.target, self.weights, self.device))


def trained_model(model: CarriedModel, stream: TokenStream) -> TrainedModel:
    """Returns the model in the form that `quantize_weights` accepts. Calibration reads the training text `stream`."""
    seed, window = plan.TRAIN.seed, plan.WINDOW
    return TrainedModel(
        model,
        model.weights,
        seed,
        window,
        frozenset(plan.REUSED),
        lambda: realized(model.target, model.weights, model.device, plain=True),
        lambda: calibration_windows(stream, plan.QUANT.calibrate, window, seed),
    )


def artifact_contents(stored: QuantizedModel, trained_on: DataDigests) -> ArtifactContents:
    """Returns the contents of the weights file for `stored`."""
    data = json.loads(plan.SPEC)
    data["quant"]["rules"] = [{"match": name, **scheme.model_dump()} for name, scheme in stored.schemes.items()]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))  # the canonical form, as the compiler writes it
    interface = _interface(stored.schemes)
    return ArtifactContents(text.encode(), stored.layout(), stored.tensors, interface, plan.CODE, b"", trained_on)


def read_weights(path: Path) -> tuple[QuantizedModel, DataDigests | None]:
    """Reads a weights file. Returns the quantized parameters, and the digests of the training data.

    Raises IntegrityError if the file is not a valid weights file of this model.
    """
    schemes: dict[str, Scheme] = {}

    def expected(text: bytes) -> tuple[bytes, Any]:
        data = json.loads(text)
        rules, data["quant"]["rules"] = data["quant"]["rules"], []
        if data != json.loads(plan.SPEC):
            raise ValueError("the weights belong to another model")
        for rule in rules:
            settings = {k: tuple(v) if isinstance(v, list) else v for k, v in rule.items() if k != "match"}
            schemes[rule["match"]] = plan.SCHEMES[rule["scheme"]](**settings)
        if list(schemes) != list(plan.BASE):
            raise ValueError("the file has parameters of another model")
        return _interface(schemes), layout(schemes, SHAPES)

    artifact = read_artifact(path, expected)
    return QuantizedModel(schemes, SHAPES, artifact.tensors), artifact.trained_on


def _interface(schemes: Mapping[str, Scheme]) -> bytes:
    return interface_digest(PARAMETERS, {name: storage_name(scheme) for name, scheme in schemes.items()})
