"""Vocabularies of more than 65,536 ids: shards of 32-bit tokens, from packing to a trained step."""

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
from run_samples import small_spec
from test_data_tokenizer import write_ranks

from specc.cli.app import run
from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards.check import check
from specc.runtime.data.shards.shard_file import NARROW, WIDE, ShardFormat, ShardWriter, TokenShard
from specc.runtime.data.tokenizers.tiktoken import TiktokenTokenizer
from specc.runtime.data.windows.loader import Loader
from specc.runtime.data.windows.stream import open_stream
from specc.runtime.train.train import TrainOptions, train

TEXT = "zeta zzz \xff\xff and some 中文 text; " * 60


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pairs = [bytes([a, b]) for a in range(256) for b in range(256)]
    path = tmp_path_factory.mktemp("wide") / "large.tiktoken"
    return write_ranks(path, [bytes([value]) for value in range(256)] + pairs)


def write(path: Path, tokens: np.ndarray, form: ShardFormat) -> None:
    with ShardWriter(path, form) as writer:
        writer.write(tokens)


def test_wide_shards_are_packed_checked_and_trained_on(ranks: Path, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "val.txt").write_text(TEXT[::-1], encoding="utf-8")
    out = tmp_path / "out"
    assert run(["data", "pack", str(tmp_path), "--out", str(out), "--tokenizer", str(ranks)]) == 0
    assert check(out).exit_code == 0
    tokenizer = TiktokenTokenizer(ranks)
    expected = np.concatenate([[tokenizer.bos], tokenizer.encode(TEXT.encode())]).astype("<u4")
    assert expected.max() > 0xFFFF
    (shard,) = sorted(out.glob("*train*.bin"))
    assert shard.read_bytes() == struct.pack("<256i", 20240801, 7, len(expected), *[0] * 253) + expected.tobytes()
    text = open_stream(tmp_path, "train", tokenizer, tmp_path / "cache")
    assert text.digest == hashlib.sha256(expected.tobytes()).hexdigest()
    stream = open_stream(out, "train", tokenizer, tmp_path)
    np.testing.assert_array_equal(stream.read(0, stream.tokens), expected)
    with Loader(stream, 2, 16, "sequential", 0) as loader:
        ids, targets = loader.next()
    np.testing.assert_array_equal(ids.flatten(), expected[:32])
    np.testing.assert_array_equal(targets.flatten(), expected[1:33])
    spec = small_spec("train.data={tokenizer: large.tiktoken}", "model.vocab=65793")
    train(
        TrainOptions(spec, "cpu", str(out), tmp_path / "run", search=(ranks.parent,), stop_after_steps=1),
        lambda _: None,
    )
    assert (tmp_path / "run" / "files" / "large.tiktoken").is_file()


def test_shards_of_two_widths_or_too_narrow_ones_are_refused(ranks: Path, tmp_path: Path) -> None:
    tokenizer = TiktokenTokenizer(ranks)
    write(tmp_path / "a_train_0.bin", np.arange(9), NARROW)
    with pytest.raises(DataError, match=r"16-bit tokens have no room for the 65,793 ids of large\.tiktoken") as caught:
        open_stream(tmp_path, "train", tokenizer, tmp_path)
    assert caught.value.exit_code == 2
    write(tmp_path / "a_train_1.bin", np.arange(9), WIDE)
    write(tmp_path / "a_val_0.bin", np.array([65_792, 65_793]), WIDE)
    message = r"a_train_1\.bin: has 32-bit tokens, but a_train_0\.bin has 16-bit"
    with pytest.raises(DataIntegrityError, match=message):
        open_stream(tmp_path, "train", tokenizer, tmp_path)
    findings = [str(finding) for finding in check(tmp_path, tokenizer).findings if finding.damage]
    assert any("a_train_0.bin: has 16-bit tokens, but a_val_0.bin has 32-bit tokens" in text for text in findings)
    assert any("token 65793 at byte 1,028; the tokenizer has 65,793 ids" in text for text in findings)
    val = open_stream(tmp_path, "val", tokenizer, tmp_path)
    with pytest.raises(DataIntegrityError, match="has token 65793"):
        val.read(0, 2)
    with pytest.raises(ValueError, match=r"0\.\.2147483647"):
        write(tmp_path / "b.bin", np.array([2**31]), WIDE)
    np.testing.assert_array_equal(TokenShard(tmp_path / "a_val_0.bin").read(1, 1), [65_793])
