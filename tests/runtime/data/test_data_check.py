"""`specc data check` reports no problem of a sound folder, and names each problem of a damaged one."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.cli.app import run
from specc.runtime.data.shards import check as module
from specc.runtime.data.shards.check import check
from specc.runtime.data.shards.duplicates import DIGEST_BYTES, Hashes, shared
from specc.runtime.data.shards.pack import PackOptions, pack
from specc.runtime.data.shards.shard_file import ShardWriter, TokenShard
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of train, one of val; documents of 1 to 2,000 bytes."""
    folder = tmp_path_factory.mktemp("check")
    chooser = random.Random(1)
    for split, count in (("train", 25), ("val", 5)):
        texts = [chooser.randbytes(1000).hex()[: chooser.randrange(1, 2000)] for _ in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pack(
        PackOptions(
            (str(folder / "train.jsonl"), str(folder / "val.jsonl")), folder / "out", "bytes", shard_tokens=9999
        )
    )
    return folder / "out"


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    shutil.copytree(packed, tmp_path / "copy")
    return tmp_path / "copy"


def rewrite(path: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    shard = TokenShard(path)
    tokens = shard.read(0, shard.tokens)
    shard.close()
    with ShardWriter(path) as writer:
        writer.write(change(tokens))


def shards(folder: Path, **splits: list[list[int]]) -> Path:
    folder.mkdir()
    for split, files in splits.items():
        for index, tokens in enumerate(files):
            with ShardWriter(folder / f"x_{split}_{index:06d}.bin") as writer:
                writer.write(np.array(tokens, np.int64))
    return folder


def test_a_sound_folder(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "check", str(packed), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["findings"] == [] and (facts["vocab"], facts["bos"]) == (257, 256)
    for split, count in (("train", 25), ("val", 5)):
        lines = (packed.parent / f"{split}.jsonl").read_text().splitlines()
        lengths = [len(json.loads(line)["text"]) for line in lines]
        result = facts["splits"][split]
        assert result["bos"] == count == len(lengths)
        assert result["tokens"] == sum(lengths) + count and result["longest"] == max(lengths)
        assert sum(documents for _, _, documents in result["lengths"]) == count
        for low, high, documents in result["lengths"]:
            assert documents == sum(low <= length <= high for length in lengths)
    assert run(["data", "check", str(packed)]) == 0
    assert capsys.readouterr().out.endswith("out: no problems\n")


def cut(folder: Path) -> None:
    os.truncate(folder / "tokens_train_000001.bin", 5001)


def grown(folder: Path) -> None:
    with open(folder / "tokens_train_000001.bin", "ab") as file:
        file.write(b"\0\0")


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def magic(folder: Path) -> None:
    flip(folder / "tokens_train_000001.bin", 0)


def flipped(folder: Path) -> None:
    flip(folder / "tokens_train_000001.bin", -2)


def beyond(folder: Path) -> None:
    def change(tokens: np.ndarray) -> np.ndarray:
        tokens[[2000, 3000]] = 300, 257
        return tokens

    rewrite(folder / "tokens_train_000001.bin", change)


def missing(folder: Path) -> None:
    (folder / "tokens_train_000001.bin").unlink()


def added(folder: Path) -> None:
    shutil.copy(folder / "tokens_train_000001.bin", folder / "tokens_train_000009.bin")


def unread(folder: Path) -> None:
    shutil.copy(folder / "tokens_train_000001.bin", folder / "other.bin")


def swapped(folder: Path) -> None:
    os.replace(folder / "tokens_train_000001.bin", folder / "x")
    os.replace(folder / "tokens_train_000000.bin", folder / "tokens_train_000001.bin")
    os.replace(folder / "x", folder / "tokens_train_000000.bin")


def dangling(folder: Path) -> None:
    (folder / "tokens_train_000001.bin").unlink()
    (folder / "tokens_train_000001.bin").symlink_to("nowhere")


def emptied(folder: Path) -> None:
    (folder / "shards.json").write_text("")


def garbled(folder: Path) -> None:
    (folder / "shards.json").write_text('{"format": 1}')


@pytest.mark.parametrize(
    ("harm", "code", "words"),
    [
        (cut, 5, "tokens_train_000001.bin: 5,001 bytes, but 9,999 tokens need 21,022"),
        (grown, 5, "tokens_train_000001.bin: 21,024 bytes, but 9,999 tokens need 21,022"),
        (magic, 5, "tokens_train_000001.bin: not a token shard (magic 20240521"),
        (flipped, 5, "tokens_train_000001.bin: not the file that shards.json describes: its SHA-256 differs"),
        (beyond, 5, "tokens_train_000001.bin: token 300 at byte 5,024; the tokenizer has 257 ids"),
        (beyond, 5, "tokens_train_000001.bin: 2 tokens outside of the vocabulary"),
        (missing, 5, "tokens_train_000001.bin: missing; shards.json lists it"),
        (added, 5, "tokens_train_000009.bin: not in shards.json"),
        (added, 5, "tokens_train_000009.bin: has the same tokens as tokens_train_000001.bin"),
        (unread, 1, "other.bin: this file is not read: its name contains neither train nor val"),
        (swapped, 5, "tokens_train_000000.bin: not the file that shards.json describes"),
        (dangling, 5, "tokens_train_000001.bin: No such file or directory"),
        (emptied, 5, "shards.json: is empty, because the folder was never completed"),
        (garbled, 5, "source is missing"),
    ],
)
def test_what_is_wrong_is_named(
    copy: Path, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], None], code: int, words: str
) -> None:
    harm(copy)
    assert run(["data", "check", str(copy)]) == code
    shown = capsys.readouterr().out
    assert words in shown and "problem" in shown
    assert all(line.count(str(copy)) <= 1 for line in shown.splitlines() if line.startswith("WRONG"))


def test_damage_in_val_does_not_hide_a_wrong_count_of_train(copy: Path) -> None:
    flip(copy / "tokens_val_000000.bin", -2)
    record = json.loads((copy / "shards.json").read_text())
    record["splits"]["train"]["documents"] += 1
    (copy / "shards.json").write_text(json.dumps(record))
    assert [str(finding) for finding in check(copy).findings] == [
        f"{copy}/tokens_val_000000.bin: not the file that shards.json describes: its SHA-256 differs",
        "train: 25 documents; shards.json states 26",
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_no_flipped_bit_of_a_shard_goes_unseen(packed: Path, data: st.DataObject) -> None:
    path = packed / data.draw(st.sampled_from(sorted(path.name for path in packed.glob("*.bin"))))
    before = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(before) - 1))
    damaged = bytearray(before)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        path.write_bytes(damaged)
        result = check(packed)
        assert result.exit_code == 5 and any(finding.where == str(path) for finding in result.findings)
    finally:
        path.write_bytes(before)


def test_shards_of_others_with_and_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shards(tmp_path / "a", train=[[256, 1, 2, 3], [4, 5, 256, 6]], val=[[256, 7, 8]])
    assert run(["data", "check", str(folder)]) == 0
    assert "no problems; token ids and BOS are not checked without --tokenizer" in capsys.readouterr().out
    result = check(folder, ByteTokenizer())
    assert result.findings == [] and result.splits["train"].histogram() == [(1, 1, 1), (2, 3, 0), (4, 7, 1)]
    again = shards(tmp_path / "b", train=[[1, 999]], val=[[7, 256, 8]])
    assert [str(finding) for finding in check(again, ByteTokenizer()).findings] == [
        f"{again}/x_val_000000.bin: begins with token 7, not BOS (256): cannot be scored",
        f"{again}/x_train_000000.bin: token 999 at byte 1,026; the tokenizer has 257 ids",
    ]


def test_documents_that_are_in_both_splits_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    val = [256, 7, 8, 256, 1, 1, 1, 256, 5, 256, 256, 2, 3]
    train = [[9, 256, 7, 8, 256, 1, 1, 1, 1, 256, 2], [3, 256, 5, 5, 256, 7, 8], [256, 256, 5]]  # over the cut: 2 3
    folder = shards(tmp_path / "a", train=train, val=[val])
    for piece in (1, 2, 3, 10**6):
        monkeypatch.setattr(module, "PIECE", piece)
        result = check(folder, ByteTokenizer())
        assert [str(finding) for finding in result.findings] == [
            "train: 1 of its documents equal an earlier document of the split",
            "train: 4 of its documents are also in val",
        ]
        assert result.splits["train"].repeated == 1 and result.facts()["splits"]["val"]["repeated"] == 0  # type: ignore[index]
        assert result.exit_code == 1 and result.splits["train"].bos == 7
        assert result.splits["val"].histogram() == [(0, 0, 1), (1, 1, 1), (2, 3, 3)]


def test_equal_documents_are_counted_in_bounded_memory() -> None:
    """Exactly while all hashes are kept; beyond that a known share of them tells about how many."""
    draw = np.random.default_rng(3)
    documents = [draw.bytes(DIGEST_BYTES) for _ in range(30_000)]
    copies = documents[:9_000]
    for most, slack in ((2**16, 0), (2**11, 0.15)):
        train, val = Hashes(most), Hashes(most)
        for start in range(0, 30_000, 700):
            train.add(documents[start : start + 700])
        train.add(copies)
        val.add([*documents[:6_000], *(draw.bytes(DIGEST_BYTES) for _ in range(100))])
        assert len(train.at(train.level)) <= most and (train.level > 0) == (slack > 0)
        assert train.repeated() == pytest.approx(9_000, rel=slack) and val.repeated() == 0
        both, exact = shared(train, val)
        assert both == pytest.approx(12_000, rel=slack) and exact == (slack == 0)
    assert Hashes().repeated() == 0 and shared(Hashes(), Hashes()) == (0, True)


def test_a_split_without_shards_and_folders_that_hold_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shards(tmp_path / "a", train=[[256, 1]])
    assert run(["data", "check", str(folder), "--tokenizer", "bytes"]) == 1
    assert "no shards of the val split, which training needs" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "gone", folder / "x_train_000000.bin"):
        assert run(["data", "check", str(path)]) == 2
        assert "error:" in capsys.readouterr().err
    empty = shards(tmp_path / "none", train=[[]], val=[[]])
    results = [str(finding) for finding in check(empty, ByteTokenizer()).findings]
    assert results[:1] + results[-1:] == ["val: no tokens in its shards", "train: no tokens in its shards"]


def test_a_record_of_another_tokenizer_is_refused(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Other(ByteTokenizer):
        def digest(self) -> str:
            return "other"

    with pytest.raises(Exception, match="has tokens of bytes"):
        check(packed, Other())
