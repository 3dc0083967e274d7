"""Writes safetensors files one tensor at a time, so that the whole file is never in memory."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES: Mapping[torch.dtype, str] = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class Entry:
    """The name, dtype and shape of a tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count * self.dtype.itemsize


def stream(
    entries: Sequence[Entry], read: Callable[[str], Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes]:
    """Yields the bytes of a safetensors file in parts: the header, then each tensor.

    Args:
        entries: the tensors, in the order of the file.
        read: a function that returns the tensor with a given name. It is called once for each entry, in order.
        metadata: texts for the header, by name.

    Raises:
        ValueError: if the dtype or shape of a tensor differs from its entry.
    """
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.size],
        }
        end += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for entry in entries:
        tensor = read(entry.name)
        if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
            raise ValueError(f"{entry.name} is {tensor.dtype}{list(tensor.shape)}, not {entry}")
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
