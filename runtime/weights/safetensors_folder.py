"""Reads weights from a safetensors file, or from all safetensors files of a folder.

A tensor is read only when it is requested.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specc.compiler.spec.spec import Spec
from specc.runtime.errors import IntegrityError
from specc.runtime.weights.source import Kind, StartError

FLOATS = ("F64", "F32", "F16", "BF16")  # the dtypes that can be converted to f32, possibly with rounding
SUFFIX = ".safetensors"


def safetensors_files(path: Path) -> list[Path]:
    """Returns `path` if it is a safetensors file, or the safetensors files directly in the folder `path`.

    The result is empty if there are no such files.
    """
    if path.is_file() and path.suffix == SUFFIX:
        return [path]
    return sorted(file for file in path.glob(f"*{SUFFIX}") if file.is_file()) if path.is_dir() else []


class SafetensorsFolder:
    """The tensors of safetensors files, by name.

    Args:
        files: the paths of the files; at least one.

    Raises:
        IntegrityError: if a file is damaged.
        StartError: if two files have a tensor of the same name.
    """

    kind: Kind = "safetensors"
    step: int | None = None
    spec: Spec | None = None

    def __init__(self, files: list[Path]) -> None:
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for path in files:
            file = _opened(path)
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name in self._files:
                    message = f"{name} is in {self._files[name].name} and in {path.name}"
                    raise StartError(f"{path.parent}: {message}", "remove one of the two files from the folder")
                part = file.get_slice(name)
                self._files[name], self._dtypes[name] = path, part.get_dtype()
                self._shapes[name] = tuple(part.get_shape())

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        """Returns a tensor, converted to f32.

        Raises StartError if the tensor in the file has no floating-point dtype. Raises IntegrityError if the file is
        damaged.
        """
        path, dtype = self._files[name], self._dtypes[name]
        if dtype not in FLOATS:
            hint = "store the weights as f32, bf16 or f16, or leave the tensor out with `skip`"
            raise StartError(f"{path}: {name} is {dtype}, but weights must be floats", hint)
        try:
            tensor: Tensor = _opened(path).get_tensor(name)
        except SafetensorError as error:
            raise IntegrityError(f"{path}: {name} cannot be read: {error}", "copy the file again") from None
        return tensor.to(torch.float32)


def _opened(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"{path}: damaged safetensors file: {error}", "copy the file again") from None
