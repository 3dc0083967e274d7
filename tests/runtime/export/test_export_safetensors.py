"""The safetensors export reads back as what was given, or leaves no file."""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from specc.runtime.errors import IntegrityError, RunFailure
from specc.runtime.export.safetensors_file import export_safetensors


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 8, generator=generator)
    return {
        "z.weight": base,
        "a.transposed": base.T,
        "a.shared": base,
        "a.slice": base[1:3, ::2],
        "bf16": base.bfloat16(),
        "f16": base.half(),
        "f64": base.double(),
        "codes": torch.arange(-128, 128, dtype=torch.int16).to(torch.int8),
        "special": torch.tensor([math.nan, -0.0, math.inf, -math.inf, 1e-45]),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "grad": torch.nn.Parameter(base[0].clone()),
        "flag": torch.tensor([True, False]),
    }


def test_every_tensor_and_the_metadata_come_back(tmp_path: Path) -> None:
    given, metadata = tensors(), {"spec": '{"name": "ü"}', "format": "pt", "a": ""}
    export_safetensors(tmp_path / "m", given, metadata)
    with safe_open(str(tmp_path / "m"), framework="pt") as file:
        assert file.metadata() == metadata
        assert sorted(file.keys()) == sorted(given)
        for name, want in given.items():
            got = file.get_tensor(name)
            assert got.dtype == want.dtype and got.shape == want.shape
            assert (
                got.numpy().tobytes() == want.detach().contiguous().numpy().tobytes()
                if got.dtype != torch.bfloat16
                else torch.equal(got, want)
            )
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_equal_contents_are_equal_bytes(tmp_path: Path) -> None:
    metadata = {f"key{i}": str(i) for i in range(12)}
    digests = set()
    for i in range(10):
        order = list(tensors().items())
        export_safetensors(
            tmp_path / "m", dict(order[i:] + order[:i]), dict(reversed(metadata.items())) if i % 2 else metadata
        )
        digests.add(hashlib.sha256((tmp_path / "m").read_bytes()).hexdigest())
    assert len(digests) == 1
    data = (tmp_path / "m").read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0 and list(json.loads(data[8 : 8 + size])["__metadata__"]) == sorted(metadata)


def test_without_metadata(tmp_path: Path) -> None:
    export_safetensors(tmp_path / "m", {"a": torch.ones(2)}, {})
    with safe_open(str(tmp_path / "m"), framework="pt") as file:
        assert torch.equal(file.get_tensor("a"), torch.ones(2))


@pytest.mark.parametrize("at", [5, 60, -1])
def test_a_byte_that_the_disk_changed_is_noticed_and_the_old_file_stays(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_safetensors(tmp_path / "m", {"a": torch.ones(4)}, {"k": "v"})
    old = (tmp_path / "m").read_bytes()
    whole = os.write

    def corrupt(descriptor: int, data: Any) -> int:
        changed = bytearray(data)
        changed[at] ^= 0x10
        return whole(descriptor, bytes(changed))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", corrupt)
        with pytest.raises(IntegrityError, match="does not contain what was written"):
            export_safetensors(tmp_path / "m", {"a": torch.zeros(4)}, {"k": "w"})
    assert (tmp_path / "m").read_bytes() == old
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_what_safetensors_cannot_hold_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match=r"a is a torch\.sparse_coo tensor"):
        export_safetensors(tmp_path / "m", {"a": torch.ones(2).to_sparse()}, {})
    with pytest.raises(RunFailure, match="cannot store"):
        export_safetensors(tmp_path / "m", {"a": torch.ones(2, dtype=torch.complex128)}, {})
    assert list(tmp_path.iterdir()) == []
