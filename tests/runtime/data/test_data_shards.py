"""Token shards: the format, damage, and shards that are cut while they are in use."""

import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards.shard_file import ShardWriter, TokenShard, find_shards


def write_shard(path: Path, tokens: np.ndarray) -> Path:
    with ShardWriter(path) as writer:
        for part in np.array_split(tokens, 3):
            writer.write(part)
    return path


def random_tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 65536, count)


def test_the_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    tokens = random_tokens(1, 1001)
    data = write_shard(tmp_path / "a.bin", tokens).read_bytes()
    assert data[:1024] == struct.pack("<256i", 20240520, 1, 1001, *[0] * 253)
    assert data[1024:] == struct.pack("<1001H", *tokens)
    assert os.listdir(tmp_path) == ["a.bin"]


def test_any_range_reads_back(tmp_path: Path) -> None:
    tokens = random_tokens(2, 5000)
    shard = TokenShard(write_shard(tmp_path / "a.bin", tokens))
    assert shard.tokens == 5000
    generator = random.Random(3)
    for _ in range(200):
        start = generator.randrange(5001)
        count = generator.randrange(5001 - start)
        result = shard.read(start, count)
        assert result.dtype == np.uint16 and result.flags.writeable
        np.testing.assert_array_equal(result, tokens[start : start + count])
    for start, count in ((-1, 2), (0, 5001), (5000, 1), (3, -1)):
        with pytest.raises(IndexError):
            shard.read(start, count)
    assert TokenShard(write_shard(tmp_path / "empty.bin", tokens[:0])).tokens == 0
    shard.close()
    with pytest.raises(ValueError, match="closed"):
        shard.read(0, 1)


def test_a_failed_write_leaves_no_valid_shard(tmp_path: Path) -> None:
    with pytest.raises(KeyError), ShardWriter(tmp_path / "a.bin") as writer:
        writer.write(np.arange(5))
        raise KeyError
    with pytest.raises(DataIntegrityError, match="not a token shard"):
        TokenShard(tmp_path / "a.bin")


@pytest.mark.parametrize("bad", [[-1], [65536], [5, 70000]])
def test_values_that_do_not_fit_are_refused(tmp_path: Path, bad: list[int]) -> None:
    with pytest.raises(ValueError, match=r"0\.\.65535"), ShardWriter(tmp_path / "a.bin") as writer:
        writer.write(np.array(bad))


def header(magic: int = 20240520, version: int = 1, count: int = 10, rest: tuple[int, ...] = ()) -> bytes:
    return struct.pack("<256i", magic, version, count, *rest, *[0] * (253 - len(rest)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes, but a shard's header alone has 1,024"),
        (header()[:1023], "1,023 bytes, but a shard's header"),
        (
            header(magic=20240521) + bytes(20),
            "not a token shard (magic 20240521, expected 20240520 for 16-bit tokens or 20240801",
        ),
        (struct.pack(">256i", 20240520, 1, 10, *[0] * 253) + bytes(20), "not a token shard"),
        (bytes(1044), "not a token shard (magic 0"),
        (header(version=2) + bytes(20), "shard format version 2, but specc reads version 1 for 16-bit tokens"),
        (header(20240801, 1) + bytes(40), "shard format version 1, but specc reads version 7 for 32-bit tokens"),
        (header(20240801, 7) + bytes(20), "1,044 bytes, but 10 tokens need 1,064"),
        (header(version=0) + bytes(20), "shard format version 0"),
        (header(count=-1), "-1 tokens"),
        (header(count=-512), "-512 tokens"),
        (header(count=2**31 - 1) + bytes(20), "2,147,483,647 tokens need"),
        (header(count=11) + bytes(20), "1,044 bytes, but 11 tokens need 1,046"),
        (header(count=9) + bytes(20), "9 tokens need 1,042"),
        (header() + bytes(19), "1,043 bytes"),
        (header() + bytes(21), "1,045 bytes"),
        (header(rest=(1,)) + bytes(20), "reserved part"),
        (header(rest=(0,) * 252 + (1,)) + bytes(20), "reserved part"),
    ],
)
def test_files_that_are_no_whole_shard(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.bin"
    path.write_bytes(data)
    with pytest.raises(DataIntegrityError) as caught:
        TokenShard(path)
    assert caught.value.message.startswith(f"{path}: ") and message in caught.value.message


def test_every_flipped_bit_of_the_header_is_noticed(tmp_path: Path) -> None:
    good = write_shard(tmp_path / "good.bin", np.arange(10)).read_bytes()
    for bit in range(8 * 1024):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        (tmp_path / "bad.bin").write_bytes(data)
        with pytest.raises(DataIntegrityError):
            TokenShard(tmp_path / "bad.bin")


def test_a_shard_cut_while_open_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    tokens = random_tokens(5, 200_000)
    generator = random.Random(6)
    for size in [0, 1, 1023, 1024, 1025, 1024 + 399_999, *(generator.randrange(401_023) for _ in range(20))]:
        path = write_shard(tmp_path / "cut.bin", tokens)
        shard = TokenShard(path)
        os.truncate(path, size)
        left = max(0, (size - 1024) // 2)
        np.testing.assert_array_equal(shard.read(0, left), tokens[:left])
        with pytest.raises(DataIntegrityError, match=f"truncated while in use: {size:,} of 401,024 bytes"):
            shard.read(left, 1)
        with pytest.raises(DataIntegrityError, match="truncated while in use"):
            shard.read(0, 200_000)
        shard.close()


def test_a_disk_that_cannot_read_is_named_with_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = TokenShard(write_shard(tmp_path / "a.bin", np.arange(100)))

    def failing(descriptor: int, size: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(DataIntegrityError, match=r"a\.bin: unreadable at byte 1,044: Input/output error"):
        shard.read(10, 5)
    (tmp_path / "b.bin").mkdir()
    with pytest.raises(DataError, match=r"b\.bin: "):
        TokenShard(tmp_path / "b.bin")
    with pytest.raises(DataError, match=r"absent\.bin: No such file"):
        TokenShard(tmp_path / "absent.bin")


def test_shards_are_found_by_folder_pattern_and_file(tmp_path: Path) -> None:
    names = ["fineweb_train_000001.bin", "fineweb_train_000000.bin", "fineweb_val_000000.bin", "trainer.bin", "x.bin"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    train = [tmp_path / "fineweb_train_000000.bin", tmp_path / "fineweb_train_000001.bin"]
    assert find_shards(tmp_path, "train") == train
    assert find_shards(f"{tmp_path}/fineweb_*.bin", "train") == train
    assert find_shards(f"{tmp_path}/fineweb_*.bin", "val") == [tmp_path / "fineweb_val_000000.bin"]
    assert find_shards(tmp_path / "fineweb_val_000000.bin", "val") == [tmp_path / "fineweb_val_000000.bin"]
    with pytest.raises(DataError, match="none of 2 shards belongs to the val split"):
        find_shards(f"{tmp_path}/*_train_*.bin", "val")
    with pytest.raises(DataError, match="no such file or folder"):
        find_shards(tmp_path / "absent.bin", "train")
    with pytest.raises(DataError, match="none of 1 shard belongs to the train split"):
        find_shards(tmp_path / "x.bin", "train")
    with pytest.raises(DataError, match="no such file or folder"):
        find_shards(f"{tmp_path}/none*.bin", "train")
    (tmp_path / "text").mkdir()
    assert find_shards(tmp_path / "text", "train") is None
    assert find_shards("stdlib", "train") is None
    for name, split in {
        "train.bin": "train",
        "val.bin": "val",
        "a-validation-3.bin": "val",
        "TRAIN.bin": "train",
    }.items():
        (tmp_path / name).touch()
        assert find_shards(tmp_path / name, split) == [tmp_path / name]


def test_a_named_pipe_is_no_shard_and_holds_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train_000000.bin")
    with pytest.raises(DataIntegrityError, match="not a regular file"):
        TokenShard(tmp_path / "train_000000.bin")
