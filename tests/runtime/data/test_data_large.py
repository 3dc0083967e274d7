"""Documents that are too large to be held, and what a pack that was killed leaves."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from specc.cli.app import run
from specc.runtime.data.documents import files
from specc.runtime.data.documents.formats import read_documents
from specc.runtime.data.errors import DataError
from specc.runtime.data.shards.check import check
from specc.runtime.data.shards.pack import PackOptions, pack
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.stream import open_stream

LIMIT = 1000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "DOCUMENT_BYTES", LIMIT)


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("name", ["a.md", "a.txt", "a.txt.gz", "a.jsonl"])
def test_a_document_beyond_the_limit_is_refused_and_one_of_it_is_not(tmp_path: Path, name: str, spare: int) -> None:
    text = b"word " * (LIMIT // 5) + b"x" * spare
    if name.endswith(".jsonl"):
        text = b'{"text": "' + text[: LIMIT + spare - 13] + b'"}\n'
        assert len(text) == LIMIT + spare
    if ".txt" in name:
        text = b"short\n<|endoftext|>\n" + text[:-1] + b"\n<|endoftext|>\nlast\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    if spare:
        with pytest.raises(DataError, match=r"a document has more than 1,000 bytes") as caught:
            list(read_documents(path))
        assert str(path) in caught.value.message and "--bounds" in caught.value.hint
        return
    sizes = [len(document) for document in read_documents(path)]
    assert max(sizes) >= LIMIT - 13 and len(sizes) == (3 if ".txt" in name else 1)


def test_a_bomb_is_not_unpacked_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    path = tmp_path / "a.md.gz"
    path.write_bytes(gzip.compress(bytes(10**7)))
    real = gzip.GzipFile.read

    def read(file: gzip.GzipFile, size: int = -1) -> bytes:
        asked.append(size)
        return real(file, size)

    monkeypatch.setattr(gzip.GzipFile, "read", read)
    with pytest.raises(DataError, match="more than 1,000 bytes"):
        list(read_documents(path))
    assert asked == [LIMIT + 1]


def test_packing_refuses_it_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"text": f"text {i} " * 9}) for i in range(30)] + [json.dumps({"text": "y" * LIMIT})]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "val.jsonl").write_text(lines[0])
    command = ["data", "pack", str(tmp_path), "--tokenizer", "bytes", "--out", str(tmp_path / "out")]
    assert run(command) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "train.jsonl:31: a document has more than 1,000 bytes" in message and "--bounds" in message
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.packing").exists()


def test_what_a_killed_pack_left_is_taken_over_or_said_what_to_do_with(tmp_path: Path) -> None:
    text, out, staging = tmp_path / "text", tmp_path / "out", tmp_path / ".out.packing"
    text.mkdir()
    for split in ("train", "val"):
        (text / f"{split}.txt").write_text(f"some {split} text\n")
    (staging / "folder").mkdir(parents=True)
    (staging / "folder" / "x").write_text("")
    (staging / "train_000000.bin").write_text("")
    (staging / "shards.json").write_text("")
    assert "pack again with the same --out" in refused(staging)
    options = PackOptions((str(text),), out, "bytes")
    pack(options)
    assert check(out).findings == [] and not staging.exists()
    staging.mkdir()
    with pytest.raises(DataError, match="already exists") as caught:
        pack(options)
    assert f"{staging}, which an interrupted run left, can be removed" in caught.value.hint
    staging.rmdir()
    staging.write_text("")
    shutil.rmtree(out)
    with pytest.raises(DataError, match="exists and is not a folder"):
        pack(options)


def refused(folder: Path) -> str:
    with pytest.raises(DataError, match="never completed") as caught:
        open_stream(folder, "train", ByteTokenizer(), folder)
    return caught.value.hint
