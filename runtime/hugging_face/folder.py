"""Reads a folder of Transformers: config.json, and the tensors of safetensors files, one tensor at a time.

The module executes no code of the folder. Before it reads tensors, it checks the header of the safetensors file.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from specc.runtime.errors import IntegrityError
from specc.runtime.families.config import CONFIG, ConfigError, require_folder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
LARGEST_JSON = 1 << 26  # bytes
LARGEST_HEADER = 100_000_000  # in bytes; the safetensors library has the same limit
FLOATS: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in FLOATS.items()}
# Small files of a model, which an export copies unchanged
CARRIED = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)
CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('{0}').save_pretrained('{0}-safetensors')\""
)


@dataclass(frozen=True, slots=True)
class Stored:
    """The location of a tensor in a safetensors file.

    Attributes:
        file: the path of the file.
        dtype: the dtype in the spelling of safetensors, such as `BF16`.
        shape: the shape of the tensor.
        start: the offset of the first byte of the tensor in the file.
        size: the number of bytes of the tensor.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def read(self) -> Tensor:
        """Reads the tensor from the file. Raises IntegrityError if the file is shorter than its header states."""
        buffer = bytearray(self.size)
        with open(self.file, "rb") as file:
            file.seek(self.start)
            if file.readinto(buffer) != self.size:
                raise IntegrityError(f"{self.file}: the file changed while it was read", "copy the folder again")
        tensor = torch.frombuffer(buffer, dtype=FLOATS[self.dtype]) if buffer else torch.empty(0)
        return tensor.reshape(self.shape)


@dataclass(frozen=True)
class Folder:
    """A folder of Transformers.

    Attributes:
        path: the folder.
        config: the fields of config.json.
        tensors: the tensors of all files, by name.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored] = field(default_factory=dict)

    @property
    def carried(self) -> list[Path]:
        return [path for name in CARRIED if (path := self.path / name).is_file()]


def open_folder(path: Path) -> Folder:
    """Reads config.json and the headers of the weight files.

    Raises:
        ConfigError: `path` is not a folder of Transformers, or the folder has only pickled weights.
        IntegrityError: a file is damaged.
    """
    require_folder(path)
    return Folder(path, read_json(path / CONFIG), _tensors(path))


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that contains an object. Raises IntegrityError if the file is damaged or too large."""
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise IntegrityError(f"{path}: is larger than {LARGEST_JSON:,} bytes", "use the original file")
        data = _parsed(path.read_bytes())
    except OSError as error:
        raise IntegrityError(f"{path}: {error.strerror}", "copy the folder again") from None
    except (ValueError, RecursionError) as error:
        what = error if isinstance(error, ValueError) else "nested too deeply"
        raise IntegrityError(f"{path}: is not JSON: {what}", "copy the folder again") from None
    if not isinstance(data, dict):
        raise IntegrityError(f"{path}: is not a JSON object", "copy the folder again")
    return data


def _parsed(text: bytes) -> Any:
    """Parses JSON. Raises ValueError for duplicate keys and for NaN, because JSON parsers treat them differently."""
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name, value in pairs:
        if name in data:
            raise ValueError(f"the key {name!r} occurs twice")
        data[name] = value
    return data


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")


def _tensors(path: Path) -> dict[str, Stored]:
    if (path / INDEX).is_file():
        placed = read_json(path / INDEX).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
            raise IntegrityError(f"{path / INDEX}: has no weight_map of names to files", "copy the folder again")
        files = {name: _header(path / _inside(path, name)) for name in sorted(set(placed.values()))}
        for name, file in placed.items():
            if name not in files[file]:
                raise IntegrityError(f"{path / file}: has no tensor {name}, but {INDEX} lists it", "copy it again")
        return {name: files[file][name] for name, file in placed.items()}
    if (path / WEIGHTS).is_file():
        return _header(path / WEIGHTS)
    pickles = [name for name in PICKLES if (path / name).is_file()] or sorted(p.name for p in path.glob("*.bin"))
    if pickles:
        message = f"{path / pickles[0]}: specc does not read pickles, because they can run code"
        raise ConfigError(message, f"if you trust the file, convert it: {CONVERT.format(path)}")
    raise ConfigError(f"{path}: has neither {WEIGHTS} nor {INDEX}", "name a folder with safetensors")


def _inside(path: Path, name: str) -> str:
    if os.path.basename(name) != name or not name.endswith(".safetensors") or not name.isprintable():
        raise IntegrityError(f"{path / INDEX}: {name!r} is not a file of safetensors in this folder", "copy it again")
    return name


def _header(path: Path) -> dict[str, Stored]:
    again = "copy the file again"

    def damaged(what: str) -> IntegrityError:
        return IntegrityError(f"{path}: {what}", again)

    try:
        whole = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if whole < 8 or not 2 <= length <= min(whole - 8, LARGEST_HEADER):
                raise damaged(f"its header would have {length:,} bytes")
            text = file.read(length)
    except OSError as error:
        raise damaged(error.strerror or str(error)) from None
    try:
        entries = _parsed(text)
    except (ValueError, RecursionError) as error:
        raise damaged(f"its header is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise damaged("its header is not an object")
    tensors, end = {}, 0
    placed = []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        stored = _stored(path, entry, 8 + length)
        if stored is None:
            raise damaged(f"its header has no valid entry of {name}")
        tensors[name] = stored
        placed.append((stored.start - 8 - length, stored.size))
    for start, size in sorted(placed):
        if start != end:
            raise damaged("its tensors overlap, or leave gaps")
        end = start + size
    if end != whole - 8 - length:
        raise damaged(f"its header declares {end:,} bytes of tensors, but the file has {whole - 8 - length:,}")
    return tensors


def _stored(path: Path, entry: Any, offset: int) -> Stored | None:
    if not isinstance(entry, dict):
        return None
    dtype, shape, place = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _is_list(shape) or not _is_list(place) or len(place) != 2 or len(shape) > 8:
        return None
    size = place[1] - place[0]
    if dtype in FLOATS and math.prod(shape) * FLOATS[dtype].itemsize != size:
        return None
    return Stored(path, dtype, tuple(shape), offset + place[0], size) if size >= 0 else None


def _is_list(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)
