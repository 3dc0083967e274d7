"""Exports parameters as a safetensors file, and verifies the file by reading it back."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from specc.runtime.errors import IntegrityError, RunFailure
from specc.runtime.storage.atomic import write_atomically


def export_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes `tensors` and `metadata` to `path` atomically.

    Tensors that share memory are written separately. Before the file is renamed to `path`, it is read back and compared
    bit for bit.

    Raises RunFailure if a tensor cannot be stored. Raises EnvironmentFailure if the file cannot be written. Raises
    IntegrityError if the file differs when it is read back. After an error, `path` is unchanged.
    """
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise RunFailure(f"{path}: {name} is a {tensor.layout} tensor, but safetensors stores only dense tensors")
    dense = torch.contiguous_format
    copies = {name: tensors[name].detach().cpu().clone(memory_format=dense) for name in sorted(tensors)}
    try:
        data = _sorted_metadata(save(copies, dict(metadata)))
    except (SafetensorError, KeyError, ValueError) as error:
        raise RunFailure(f"{path}: safetensors cannot store these tensors: {error}") from error

    def check(temporary: Path) -> None:
        unreadable = IntegrityError(f"{path}: the file does not contain what was written", "check disk and memory")
        try:
            with safe_open(str(temporary), framework="pt") as file:
                same = set(file.keys()) == set(copies) and (file.metadata() or {}) == dict(metadata)
                same = same and all(_same_bits(file.get_tensor(name), tensor) for name, tensor in copies.items())
        except SafetensorError as error:
            raise unreadable from error
        if not same:
            raise unreadable

    write_atomically(path, [data], check)


def _sorted_metadata(data: bytes) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])  # the library writes the metadata in a varying order
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors must start at a multiple of 8
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
