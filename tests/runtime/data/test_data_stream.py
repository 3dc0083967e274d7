"""Token streams: what is cached, when it is made, and what is left when its maker is killed."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from specc.runtime.data.documents.corpus import documents
from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards import tokenize
from specc.runtime.data.shards.shard_file import ShardWriter
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.tokenizers.tokenizer import TokenArray
from specc.runtime.data.windows.stream import TokenStream, open_stream
from specc.runtime.errors import EnvironmentFailure


class CountingTokenizer(ByteTokenizer):
    """Bytes, and a note of how many documents were encoded."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, text: bytes) -> TokenArray:
        self.encoded += 1
        return super().encode(text)


def write_corpus(folder: Path, seed: int = 1, count: int = 200) -> Path:
    generator = random.Random(seed)
    folder.mkdir(exist_ok=True)
    for split in ("train", "val"):
        texts = [generator.randbytes(generator.randrange(1, 300)).hex() + "é" for _ in range(count)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{split}.jsonl").write_text(lines)
    return folder


def expected_tokens(source: Path) -> np.ndarray:
    return np.array([token for document in documents(source, "train") for token in (256, *document)], np.uint16)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


def test_each_document_is_bos_and_its_tokens(source: Path, tmp_path: Path) -> None:
    result = open_stream(source, "train", ByteTokenizer(), tmp_path / "cache")
    expected = expected_tokens(source)
    np.testing.assert_array_equal(result.read(0, result.tokens), expected)
    assert result.tokens == len(expected) and result.documents == 200
    assert result.document_bytes == len(expected) - 200
    assert result.digest == hashlib.sha256(expected.astype("<u2").tobytes()).hexdigest()
    record = json.loads(next((tmp_path / "cache").glob("train-*/stream.json")).read_text())
    assert (record["documents"], record["tokens"]) == (200, len(expected))


def test_a_stream_of_many_shards_reads_as_one(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specc.runtime.data.shards.token_cache.SHARD_TOKENS", 5000)
    monkeypatch.setattr(tokenize, "BATCH_BYTES", 900)
    result = open_stream(source, "train", ByteTokenizer(), tmp_path / "cache")
    expected = expected_tokens(source)
    assert len(result.shards) > 5 and all(shard.tokens <= 5000 for shard in result.shards)
    generator = random.Random(2)
    for _ in range(300):
        start = generator.randrange(result.tokens + 1)
        count = generator.randrange(result.tokens + 1 - start)
        np.testing.assert_array_equal(result.read(start, count), expected[start : start + count])
    for start, count in ((-1, 1), (0, result.tokens + 1), (result.tokens, 1), (5, -1)):
        with pytest.raises(IndexError):
            result.read(start, count)


def test_text_is_tokenized_once_until_it_changes(source: Path, tmp_path: Path) -> None:
    tokenizer = CountingTokenizer()
    first = open_stream(source, "train", tokenizer, tmp_path / "cache")
    again = open_stream(source, "train", tokenizer, tmp_path / "cache")
    assert tokenizer.encoded == 200 and again.digest == first.digest
    assert again.document_bytes == first.document_bytes
    open_stream(source, "val", tokenizer, tmp_path / "cache")
    assert tokenizer.encoded == 400
    text = (source / "train.jsonl").read_text()
    (source / "train.jsonl").write_text(text.replace("0", "1"))
    os.utime(source / "train.jsonl", ns=(1, 1))
    changed = open_stream(source, "train", tokenizer, tmp_path / "cache")
    assert tokenizer.encoded == 600 and changed.digest != first.digest
    np.testing.assert_array_equal(changed.read(0, changed.tokens), expected_tokens(source))


def test_another_tokenizer_gets_another_entry(source: Path, tmp_path: Path) -> None:
    class Shifted(ByteTokenizer):
        def encode(self, text: bytes) -> TokenArray:
            return super().encode(text) ^ 1

        def digest(self) -> str:
            return "shifted"

    plain = open_stream(source, "train", ByteTokenizer(), tmp_path / "cache")
    shifted = open_stream(source, "train", Shifted(), tmp_path / "cache")
    assert (plain.read(1, 9) == shifted.read(1, 9) ^ 1).all() and plain.digest != shifted.digest


def test_a_source_that_changes_under_the_tokenizer_is_refused(source: Path, tmp_path: Path) -> None:
    class Meddling(ByteTokenizer):
        def encode(self, text: bytes) -> TokenArray:
            os.utime(source / "train.jsonl", ns=(1, 1))
            return super().encode(text)

    with pytest.raises(DataError, match="changed during tokenization"):
        open_stream(source, "train", Meddling(), tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


def entries(cache: Path) -> list[str]:
    return sorted(name for name in os.listdir(cache) if not name.endswith(".lock"))


def test_tokenizers_without_a_separator_are_refused(source: Path, tmp_path: Path) -> None:
    class Unseparated(ByteTokenizer):
        bos = None

    with pytest.raises(DataError, match="neither BOS nor EOS"):
        open_stream(source, "train", Unseparated(), tmp_path / "cache")


def test_a_document_that_the_tokenizer_refuses_names_its_place(source: Path, tmp_path: Path) -> None:
    class Picky(ByteTokenizer):
        def encode_batch(self, texts: object) -> list[TokenArray]:
            raise DataError("bad text", "mend it")

    with pytest.raises(DataError, match="corpus, train documents from number 1 on: bad text") as caught:
        open_stream(source, "train", Picky(), tmp_path / "cache")
    assert caught.value.hint == "mend it" and entries(tmp_path / "cache") == []


@pytest.mark.parametrize("what", ["cut", "gone", "swapped", "record", "other"])
def test_a_damaged_entry_says_what_to_delete(source: Path, tmp_path: Path, what: str) -> None:
    open_stream(source, "train", ByteTokenizer(), tmp_path / "cache")
    (entry,) = (tmp_path / "cache").glob("train-*/")
    shard = entry / "000000.bin"
    if what == "cut":
        os.truncate(shard, 5000)
    elif what == "gone":
        shard.unlink()
    elif what == "swapped":
        with ShardWriter(shard) as writer:
            writer.write(np.arange(5))
    elif what == "record":
        (entry / "stream.json").write_text('{"shards": [')
    else:
        record = json.loads((entry / "stream.json").read_text())
        (entry / "stream.json").write_text(json.dumps(record | {"tokenizer_digest": "other"}))
    with pytest.raises(DataIntegrityError) as caught:
        open_stream(source, "train", ByteTokenizer(), tmp_path / "cache")
    assert caught.value.hint == f"delete {entry}; it is created again from the source"
    for path in entry.iterdir():
        path.unlink()
    entry.rmdir()
    assert open_stream(source, "train", ByteTokenizer(), tmp_path / "cache").tokens > 0


def test_a_cache_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnvironmentFailure, match=r"cannot write .*: Not a directory"):
        open_stream(source, "train", ByteTokenizer(), tmp_path / "file" / "cache")


def test_a_full_disk_leaves_no_entry(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, real_fsync = tmp_path / "cache", os.fsync
    for fails_at in range(1, 4):
        calls = 0

        def full(descriptor: int, fails_at: int = fails_at) -> None:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise OSError(28, "No space left on device")
            real_fsync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(EnvironmentFailure, match="No space left on device") as caught:
                open_stream(source, "train", ByteTokenizer(), cache)
            assert caught.value.hint.startswith("free some space, or set XDG_CACHE_HOME")
        assert calls == fails_at and entries(cache) == []
    result = open_stream(source, "train", ByteTokenizer(), cache)
    np.testing.assert_array_equal(result.read(0, result.tokens), expected_tokens(source))


def test_shards_of_others_are_opened_where_they_are(tmp_path: Path) -> None:
    for index, name in enumerate(["x_train_000000.bin", "x_train_000001.bin", "x_val_000000.bin"]):
        with ShardWriter(tmp_path / name) as writer:
            writer.write(np.arange(100 * index, 100 * index + 100) % 257 if "train" in name else np.full(100, 256))
    result = open_stream(tmp_path, "train", ByteTokenizer(), tmp_path / "cache")
    np.testing.assert_array_equal(result.read(0, 200), np.arange(200))
    assert (result.documents, result.document_bytes, result.tokenizer_digest) == (None, None, None)
    assert not (tmp_path / "cache").exists()
    same = open_stream(f"{tmp_path}/*.bin", "train", ByteTokenizer(), tmp_path / "cache")
    val = open_stream(tmp_path, "val", ByteTokenizer(), tmp_path / "cache")
    assert same.digest == result.digest != val.digest
    with ShardWriter(tmp_path / "x_train_000001.bin") as writer:
        writer.write(np.full(100, 257))
    foreign = open_stream(tmp_path, "train", ByteTokenizer(), tmp_path / "cache")
    assert foreign.digest != result.digest
    with pytest.raises(DataIntegrityError, match="has token 257, but the tokenizer has 257"):
        foreign.read(99, 2)


# A process that tokenizes slowly, or kills itself at its n-th call of something, as argv says.
CHILD = """
import os, shutil, signal, sys, time
from pathlib import Path
from specc.runtime.data.shards import tokenize
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.stream import open_stream
source, cache, what = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
count, pause = int(sys.argv[4]), float(sys.argv[5])
tokenize.BATCH_BYTES = 3000
calls = {"encode": 0}

class Slow(ByteTokenizer):
    def encode_batch(self, texts):
        calls["encode"] += 1
        if what == "encode" and calls["encode"] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(pause)
        return super().encode_batch(texts)

def deadly(module, name):
    function, seen = getattr(module, name), [0]
    def call(*args, **named):
        seen[0] += 1
        if seen[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **named)
    setattr(module, name, call)

if what in ("fsync", "replace", "rename"):
    deadly(os, what)
opened = open_stream(source, "train", Slow(), cache)
print(opened.digest, calls["encode"])
"""


def child(source: Path, cache: Path, what: str, count: int, pause: float = 0.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(source), str(cache), what, str(count), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("what", "count"),
    [("encode", 1), ("encode", 5), ("replace", 1), ("rename", 1), *(("fsync", call) for call in range(1, 5))],
)
def test_a_killed_build_leaves_nothing_half_valid(source: Path, tmp_path: Path, what: str, count: int) -> None:
    cache = tmp_path / "cache"
    process = child(source, cache, what, count)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    tokenizer = CountingTokenizer()
    result = open_stream(source, "train", tokenizer, cache)
    np.testing.assert_array_equal(result.read(0, result.tokens), expected_tokens(source))
    # only the last sync, of the folder that holds the entry, comes after the entry is complete
    assert tokenizer.encoded == (0 if (what, count) == ("fsync", 4) else 200)
    assert len(entries(cache)) == 1


def test_the_next_build_removes_what_a_killed_one_of_another_entry_left(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    child(source, cache, "encode", 3).communicate()
    assert len(entries(cache)) == 1 and entries(cache)[0].startswith(".train-")
    open_stream(source, "val", ByteTokenizer(), cache)
    (entry,) = entries(cache)
    assert entry.startswith("val-")


def test_processes_that_ask_at_once_share_one_build(source: Path, tmp_path: Path) -> None:
    processes = [child(source, tmp_path / "cache", "none", 0, pause=0.01) for _ in range(3)]
    results = [process.communicate()[0].split() for process in processes]
    digest = hashlib.sha256(expected_tokens(source).astype("<u2").tobytes()).hexdigest()
    assert [result[0] for result in results] == [digest] * 3
    assert sorted(int(result[1]) > 0 for result in results) == [False, False, True]
    assert len(entries(tmp_path / "cache")) == 1


def test_a_running_build_is_not_taken_for_a_stray(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    slow = child(source, cache, "none", 0, pause=0.03)
    while not list(cache.glob(".train-*.tmp")):
        assert slow.poll() is None
        time.sleep(0.002)
    open_stream(source, "val", ByteTokenizer(), cache)
    output = slow.communicate()[0]
    assert slow.returncode == 0 and int(output.split()[1]) > 0
    assert [name.split("-")[0] for name in entries(cache)] == ["train", "val"]


def test_streams_close(source: Path, tmp_path: Path) -> None:
    result: TokenStream = open_stream(source, "train", ByteTokenizer(), tmp_path / "cache")
    result.close()
    with pytest.raises(ValueError, match="closed"):
        result.read(0, 1)
