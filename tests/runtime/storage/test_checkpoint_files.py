"""Checkpoints: what is saved comes back, and what is damaged is never used."""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specc.runtime.errors import IntegrityError
from specc.runtime.storage import checkpoint, committed
from specc.runtime.storage.checkpoint import Snapshot

FILES = ["COMMIT", "state.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors", "ema.safetensors"]


def snapshot(step: int, averaged: bool = True) -> Snapshot:
    generator = torch.Generator().manual_seed(step)

    def tensors(*names: str) -> dict[str, Tensor]:
        return {name: torch.randn(3, 5, generator=generator) for name in names}

    weights = tensors("embed", "blocks.0.mlp.up")
    weights["blocks.0.gain"] = torch.tensor([float("inf"), -0.0, 1e-42])
    return Snapshot(
        step=step,
        seconds=step * 0.1,
        weights=weights,
        average=tensors("embed", "blocks.0.mlp.up", "blocks.0.gain") if averaged else None,
        optimizer={**tensors("adamw.exp_avg/embed"), "adamw.step/embed": torch.tensor(float(step))},
        rng={"cpu": torch.get_rng_state()},
        loader={"epoch": 1, "position": 2**48 - 1},
        spec_digest="ab" * 32,
    )


def bits(tensors: dict[str, Tensor] | None) -> dict[str, tuple[object, ...]]:
    return {name: (tensor.dtype, tensor.shape, tensor.numpy().tobytes()) for name, tensor in (tensors or {}).items()}


def same(first: Snapshot, other: Snapshot) -> bool:
    plain = ("step", "seconds", "loader", "spec_digest")
    tensors = ("weights", "average", "optimizer", "rng")
    return all(getattr(first, name) == getattr(other, name) for name in plain) and all(
        bits(getattr(first, name)) == bits(getattr(other, name)) for name in tensors
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


def no_warning(text: str) -> None:
    raise AssertionError(text)


def test_copies_are_equal_bit_for_bit_and_those_of_zeros_have_one_element() -> None:
    last = torch.zeros(3, 5)
    last[-1, -1] = 1e-45
    zeros = {"f32": torch.zeros(3, 5), "i64": torch.zeros(2, dtype=torch.int64), "strided": torch.zeros(4, 6)[:, ::2]}
    zeros |= {"scalar": torch.tensor(0.0), "empty": torch.zeros(0, 3)}
    others = {"negative": torch.full((3, 5), -0.0), "last": last, "turned": torch.arange(6.0).reshape(2, 3).T}
    original = replace(snapshot(1), optimizer={**zeros, **others})
    copy = original.copied()
    assert same(original, copy)
    assert all(copy.optimizer[name].untyped_storage().nbytes() <= 8 for name in zeros)
    before = bits(dict(copy.optimizer))
    for tensor in original.optimizer.values():
        tensor.fill_(1)
    assert bits(dict(copy.optimizer)) == before


@pytest.mark.parametrize("averaged", [True, False])
def test_what_is_saved_comes_back_bit_for_bit(folder: Path, averaged: bool) -> None:
    path = checkpoint.save(folder, snapshot(7, averaged))
    assert path == folder / "step_00000007"
    assert {entry.name for entry in path.iterdir()} == set(FILES if averaged else FILES[:-1])
    assert same(checkpoint.load(path), snapshot(7, averaged))
    ends_with = snapshot(7, averaged).average if averaged else snapshot(7, averaged).weights
    assert bits(checkpoint.weights(path)) == bits(dict(ends_with or {}))
    state = checkpoint.read_state(path)
    assert state.threads == torch.get_num_threads() and state.versions["torch"] == torch.__version__


def test_strided_tensors_are_saved_by_value(folder: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    strided = Snapshot(
        1, 0.0, {"a": base.T, "b": base[:, 1:3]}, None, {}, {"cpu": torch.zeros(1, dtype=torch.uint8)}, {}, ""
    )
    loaded = checkpoint.load(checkpoint.save(folder, strided))
    assert torch.equal(loaded.weights["a"], base.T) and torch.equal(loaded.weights["b"], base[:, 1:3])


def test_the_newest_are_kept(folder: Path) -> None:
    for step in (1, 5, 12, 100_000_000):
        checkpoint.save(folder, snapshot(step))
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000012", "step_100000000"]
    assert checkpoint.latest(folder, no_warning) == folder / "step_100000000"
    with pytest.raises(ValueError, match="at least 2"):
        checkpoint.save(folder, snapshot(100_000_001), keep=1)


def test_a_damaged_one_does_not_count_as_kept(folder: Path) -> None:
    checkpoint.save(folder, snapshot(1))
    checkpoint.save(folder, snapshot(2))
    (folder / "step_00000002" / "model.safetensors").write_bytes(b"short")
    checkpoint.save(folder, snapshot(3))
    assert (folder / "step_00000001").is_dir()
    checkpoint.save(folder, snapshot(4))
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000003", "step_00000004"]


def test_a_sound_one_of_the_same_step_stays_and_a_damaged_one_is_replaced(folder: Path) -> None:
    path = checkpoint.save(folder, snapshot(3))
    before = (path / "COMMIT").stat().st_ino
    assert checkpoint.save(folder, snapshot(3)) == path
    assert (path / "COMMIT").stat().st_ino == before
    (path / "model.safetensors").unlink()
    assert checkpoint.save(folder, snapshot(3)) == path
    assert same(checkpoint.load(path), snapshot(3)) and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer", "missing", "folder"])
def test_damage_is_seen_and_skipped(folder: Path, name: str, damage: str) -> None:
    checkpoint.save(folder, snapshot(1))
    path = checkpoint.save(folder, snapshot(2))
    file = path / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "cut":
        del data[-1]
    elif damage == "empty":
        data.clear()
    elif damage == "longer":
        data += b"{"
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage != "missing":
        file.write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        checkpoint.load(path)
    assert name in caught.value.message and caught.value.exit_code == 5
    warnings: list[str] = []
    assert checkpoint.latest(folder, warnings.append) == folder / "step_00000001"
    assert len(warnings) == 1 and name in warnings[0] and str(path) in warnings[0]


def test_no_bit_flip_anywhere_goes_unseen(folder: Path) -> None:
    path = checkpoint.save(folder, snapshot(2))
    draw = random.Random(1)
    for _ in range(300):
        file = path / draw.choice(FILES)
        data = file.read_bytes()
        spot, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
        file.write_bytes(data[:spot] + bytes([data[spot] ^ bit]) + data[spot + 1 :])
        try:
            assert same(checkpoint.load(path), snapshot(2))  # white space in COMMIT
        except IntegrityError:
            pass
        else:
            assert file.name == "COMMIT"
        file.write_bytes(data)
    assert same(checkpoint.load(path), snapshot(2))


def test_a_file_of_another_checkpoint_is_no_substitute(folder: Path) -> None:
    first, two = (checkpoint.save(folder, snapshot(step)) for step in (1, 2))
    shutil.copy(first / "model.safetensors", two / "model.safetensors")
    with pytest.raises(IntegrityError, match=r"model\.safetensors: its SHA-256"):
        checkpoint.load(two)
    shutil.rmtree(two)
    shutil.copytree(first, two)
    with pytest.raises(IntegrityError, match="not of step_00000002"):
        checkpoint.load(two)


COMMITS = [
    b"", b"[]", b"null", b"\xff\xfe", b'{"format": 2}', b"[" * 100_000,
    b'{"format":1,"name":"step_00000001","members":{}}',
    b'{"format":1,"name":"step_00000001","members":{"../x":{"size":1,"sha256":""}}}',
    b'{"format":1,"name":"step_00000001","members":{"state.json":{"size":-5,"sha256":""}}}',
    b'{"format":1,"name":"step_00000001","members":{"state.json":{"size":9e99,"sha256":""}}}',
    b'{"format":1,"name":"step_00000001","members":{"state.json":{"size":1000000000000,"sha256":""}}}',
    b'{"format":1,"name":"step_00000001","members":{"state.json":{"size":"1","sha256":""}}}',
    b'{"format":1,"name":"step_00000001","members":{"state.json":{"size":1,"sha256":""}},"more":1}',
]  # fmt: skip


@pytest.mark.parametrize("text", COMMITS)
def test_an_odd_commit_file_is_an_integrity_error(folder: Path, text: bytes) -> None:
    path = checkpoint.save(folder, snapshot(1))
    (path / "COMMIT").write_bytes(text)
    with pytest.raises(IntegrityError):
        checkpoint.load(path)


def reseal(path: Path) -> None:
    """Makes COMMIT fit what is there, as an attacker would."""
    files = [(file.name, [file.read_bytes()]) for file in sorted(path.iterdir()) if file.name != "COMMIT"]
    shutil.rmtree(path)
    committed.write(path, files)


HOSTILE = {
    "model.safetensors": [
        b"\x80\x04N.",
        b"PK\x03\x04" + bytes(40),
        (2**63).to_bytes(8, "little"),
        b"\x02" + bytes(7) + b"[]",
    ],
    "state.json": [b"{}", b'{"step": 1}', b"\x80\x04N.", b'{"weights": "/etc/passwd"}'],
}


@pytest.mark.parametrize(("name", "data"), [(name, data) for name in HOSTILE for data in HOSTILE[name]])
def test_hostile_content_with_right_hashes_is_an_integrity_error(folder: Path, name: str, data: bytes) -> None:
    path = checkpoint.save(folder, snapshot(1))
    (path / name).write_bytes(data)
    reseal(path)
    with pytest.raises(IntegrityError):
        checkpoint.load(path)


def test_files_that_do_not_belong_are_refused(folder: Path) -> None:
    path = checkpoint.save(folder, snapshot(1))
    (path / "extra.pt").write_bytes(b"x")
    reseal(path)
    with pytest.raises(IntegrityError, match="do not belong to a checkpoint"):
        checkpoint.load(path)


def test_the_state_must_be_of_the_step(folder: Path) -> None:
    path = checkpoint.save(folder, snapshot(1))
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "step": 2}))
    reseal(path)
    with pytest.raises(IntegrityError, match="states step 2, but its directory is step_"):
        checkpoint.load(path)


def test_no_checkpoint_is_none(folder: Path) -> None:
    assert checkpoint.latest(folder, no_warning) is None
    (folder / ".step_00000009.abcd.tmp").mkdir()
    (folder / "step_9").mkdir()
    (folder / "step_00000001").write_text("a file")
    assert checkpoint.latest(folder, no_warning) is None
    (folder / "step_00000003").mkdir()
    warnings: list[str] = []
    assert checkpoint.latest(folder, warnings.append) is None
    assert "never completed" in warnings[0]


def test_a_mismatch_says_the_difference() -> None:
    results = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1), "d": torch.zeros(1, dtype=torch.int64)}
    wanted = {"a": torch.zeros(2), "b": torch.zeros(3, 1), "d": torch.zeros(1), "e": torch.zeros(1)}
    with pytest.raises(IntegrityError) as caught:
        checkpoint.require_match("the model", results, wanted)
    assert caught.value.message == (
        "the model does not fit the model: it has no e, c is unknown, "
        "b is float32[3] and should be float32[3, 1], d is int64[1] and should be float32[1]"
    )
    checkpoint.require_match("the model", wanted, wanted)


AUDITED = """
import sys
from pathlib import Path
from specc.runtime.storage import checkpoint

path = Path(sys.argv[1])
checkpoint.load(path)  # imports what it needs
seen = []
watched = "pickle exec compile import subprocess os.system os.exec marshal code. ctypes"
watched = tuple(watched.split())
sys.addaudithook(lambda event, args: seen.append(event) if event.startswith(watched) else None)
for _ in range(20):
    checkpoint.load(path)
    checkpoint.weights(path)
    checkpoint.latest(path.parent, print)
print(seen)
"""


def test_loading_runs_no_code(folder: Path) -> None:
    path = checkpoint.save(folder, snapshot(1))
    command = [sys.executable, "-c", AUDITED, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "[]"
