"""Documents: what a source gives, how it is split, and what bad sources say."""

import gzip
import json
import lzma
import os
import random
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from specc.runtime.data.documents.corpus import documents, split_corpus
from specc.runtime.data.documents.formats import Bounds, read_documents
from specc.runtime.data.documents.text import BLOCK_BYTES, RUNNING_BYTES
from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.stream import open_stream
from specc.runtime.errors import EnvironmentFailure

SEPARATOR = b"<|endoftext|>\n"


def both(source: Path | str) -> tuple[list[bytes], list[bytes]]:
    return list(documents(source, "train")), list(documents(source, "val"))


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_documents_and_separators_make_up_the_file(tmp_path: Path) -> None:
    generator = random.Random(1)
    lines = [
        b"a line\n",
        b"\n",
        b" <|endoftext|>\n",
        b"<|endoftext|> \n",
        b"x<|endoftext|>\n",
        "\xe9😀\r\n".encode(),
        b"\xff\0\n",
    ]
    wanted = [b"".join(generator.choices(lines, k=generator.randrange(9))) for _ in range(500)] + [b"no line end"]
    (tmp_path / "val.txt").write_bytes(SEPARATOR.join(wanted))
    results = list(documents(tmp_path / "val.txt", "val"))
    assert results == [document for document in wanted if document]
    assert sum(map(len, results)) + 500 * len(SEPARATOR) == (tmp_path / "val.txt").stat().st_size


def test_separators_may_end_in_crlf_or_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_bytes(b"<|endoftext|>\r\na\r\n<|endoftext|>\r\n<|endoftext|>\nb\n<|endoftext|>")
    assert list(documents(tmp_path / "val.txt", "val")) == [b"a\r\n", b"b\n"]


def test_text_without_separators_is_cut_at_line_ends(tmp_path: Path) -> None:
    generator = random.Random(2)
    lines = [b"%d " % number + b"w" * generator.randrange(200) + b"\n" for number in range(8000)]
    (tmp_path / "val.txt").write_bytes(b"".join(lines))
    results = list(documents(tmp_path / "val.txt", "val"))
    assert b"".join(results) == b"".join(lines) and len(results) > 20
    assert all(document.endswith(b"\n") and len(document) <= 2 * BLOCK_BYTES for document in results)
    (tmp_path / "book.txt").write_bytes(b"".join(lines))
    train, val = both(tmp_path / "book.txt")
    assert sorted(train + val) == sorted(results) and train and val


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_one_endless_line_is_cut_between_characters(tmp_path: Path, shift: int) -> None:
    text = "." * shift + "😀" * (RUNNING_BYTES // 2)
    (tmp_path / "val.txt").write_text(text, encoding="utf-8")
    results = list(documents(tmp_path / "val.txt", "val"))
    assert "".join(document.decode("utf-8") for document in results) == text
    assert max(map(len, results)) <= 2 * BLOCK_BYTES


def test_a_long_first_document_in_a_separated_file_stays_whole(tmp_path: Path) -> None:
    wanted = [b"short\n", b"long line\n" * (RUNNING_BYTES // 5), b"last\n"]
    (tmp_path / "val.txt").write_bytes(SEPARATOR.join(wanted))
    assert list(documents(tmp_path / "val.txt", "val")) == wanted


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz"])
@pytest.mark.parametrize("bounds", [None, "endoftext"])
def test_a_long_document_is_whole_wherever_it_stands(tmp_path: Path, bounds: Bounds | None, suffix: str) -> None:
    wanted = [b"a line of text\n" * (size // 15) for size in (300_000, 50_000, 60_000, 100)]
    data = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}[suffix]
    path = tmp_path / f"book.txt{suffix}"
    for order in (wanted, wanted[::-1]):
        path.write_bytes(data(SEPARATOR.join(order)))  # type: ignore[operator]
        assert list(read_documents(path, bounds)) == order


@pytest.mark.parametrize("bounds", ["endoftext", "blank-line"])
def test_text_is_cut_only_where_nobody_said_where_documents_end(tmp_path: Path, bounds: Bounds) -> None:
    (tmp_path / "book.txt").write_bytes(b"a line of text\n" * (2 * RUNNING_BYTES // 15))
    assert len(list(read_documents(tmp_path / "book.txt", bounds))) == 1
    assert len(list(read_documents(tmp_path / "book.txt"))) > 20


def test_bounds_are_those_of_text_beside_jsonl(tmp_path: Path) -> None:
    write_folder(
        tmp_path, {"a.txt": b"one\n\ntwo\n", "b.jsonl": b'{"text": "3\\n\\n4"}', "v.jsonl": b'{"text": "5\\n\\n6"}'}
    )
    inputs = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    result = split_corpus(inputs, [tmp_path / "v.jsonl"], bounds="blank-line")
    assert list(result["train"].documents()) == [b"one\n", b"two\n", b"3\n\n4"]
    assert list(result["val"].documents()) == [b"5\n\n6"]
    with pytest.raises(DataError, match="cannot end at `file`"):
        split_corpus(inputs[1:], [tmp_path / "v.jsonl"], bounds="file")


def test_one_document_in_ten_is_val_wherever_it_stands(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(2000)]
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n\n" for text in texts))
    train, val = both(path)
    assert sorted(train + val) == sorted(text.encode() for text in texts)
    assert 150 < len(val) < 250
    random.Random(3).shuffle(texts)
    folder = write_folder(tmp_path / "many", {f"{n % 7}/{n}.md": text.encode() for n, text in enumerate(texts)})
    assert [sorted(split) for split in both(folder)] == [sorted(train), sorted(val)]


def test_names_decide_the_split_of_a_folder(tmp_path: Path) -> None:
    files = {
        "train_1.txt": b"a",
        "train-0.txt": b"b",
        "validation.jsonl": b'{"text": "c"}',
        "val.md": b"d",
        "x.txt": b"e",
    }
    assert both(write_folder(tmp_path / "flat", files)) == ([b"b", b"a"], [b"d", b"c"])
    files = {"train/deep/1.txt": b"a", "val/2.txt": b"b", "val/readme.rst": b"x", ".hidden/val.txt": b"h"}
    assert both(write_folder(tmp_path / "nested", files)) == ([b"a"], [b"b"])
    files = {"val.txt": b"a", "other.txt": b"b", "validators.py": b"c"}
    assert both(write_folder(tmp_path / "rest", files)) == ([b"b", b"c"], [b"a"])
    with pytest.raises(DataError, match="no files for the train split"):
        documents(tmp_path / "rest" / "val.txt", "train")


def test_words_that_only_begin_like_a_split_are_not_one(tmp_path: Path) -> None:
    names = {f"{name}_{n}.py": b"%d" % n for n, name in enumerate(["trainer", "values", "valley", "training"] * 40)}
    train, val = both(write_folder(tmp_path, names))
    assert len(train) + len(val) == 160 and 4 < len(val) < 40


@pytest.mark.parametrize("kind", ["txt", "jsonl", "py", "md"])
def test_compressed_files_give_the_same_documents(tmp_path: Path, kind: str) -> None:
    content = b'{"text": "one"}\n{"text": "two"}\n' * 50
    (tmp_path / f"val.{kind}").write_bytes(content)
    (tmp_path / f"val.{kind}.xz").write_bytes(lzma.compress(content))
    (tmp_path / f"val.{kind}.gz").write_bytes(gzip.compress(content))
    plain, xz, gz = (list(documents(tmp_path / f"val.{kind}{suffix}", "val")) for suffix in ("", ".xz", ".gz"))
    assert plain == xz == gz and len(plain) == (100 if kind == "jsonl" else 1)


@pytest.mark.parametrize("suffix", [".xz", ".gz"])
def test_damaged_compressed_files_are_integrity_errors(tmp_path: Path, suffix: str) -> None:
    text = random.Random(4).randbytes(20_000)
    whole = lzma.compress(text) if suffix == ".xz" else gzip.compress(text)
    path = tmp_path / f"val.txt{suffix}"
    for damaged in (whole[:-20], whole[: len(whole) // 2], b"plain text", whole[:5000] + b"\0" * 99 + whole[5099:]):
        path.write_bytes(damaged)
        with pytest.raises(DataIntegrityError, match=r"val\.txt.*damaged compressed file"):
            list(documents(path, "val"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b'{"text": "a"} x', "not JSON: Extra data"),
        (b"[" * 100_000, "not JSON: RecursionError"),
        (b"1" * 5000, "not JSON: ValueError"),
        (b'{"text": 5}', '"text" of type int'),
        (b'{"text": null}', '"text" of type NoneType'),
        (b'{"content": "a"}', 'an object without "text"'),
        (b'["a"]', "a JSON list"),
        (b'"a"', "a JSON str"),
        (b'{"text": "\xff"}', "not valid UTF-8 at byte 10 of the line"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
    ],
)
def test_bad_json_lines_name_the_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "val.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(DataError) as caught:
        list(documents(path, "val"))
    assert caught.value.message.startswith(f"{path}:3: ") and message in caught.value.message
    assert "each line must be one JSON object" in caught.value.hint and caught.value.hint in str(caught.value)


def test_json_escapes_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "val.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "\\ud83d\\ude00\\u0000\\n"}\n{"text": "\xef\xbb\xbfx"}')
    assert list(documents(path, "val")) == ["😀\0\n".encode(), "\ufeffx".encode()]


def test_sources_without_documents(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        documents(tmp_path / "absent.txt", "train")
    with pytest.raises(DataError, match="no files to read in this folder"):
        documents(write_folder(tmp_path / "other", {"a.zip": b"x"}), "train")
    with pytest.raises(DataError, match=r"cannot read documents from a \.zip file") as caught:
        documents(tmp_path / "other" / "a.zip", "train")
    assert ".jsonl" in caught.value.hint
    empty = write_folder(tmp_path / "empty", {"val.txt": SEPARATOR * 3, "train.txt": b""})
    for split in ("train", "val"):
        with pytest.raises(DataError, match=f"the {split} split has no documents"):
            list(documents(empty, split))


def test_documents_come_before_the_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "val.jsonl"
    path.write_bytes(b'{"text": "first"}\n' * 1000 + b"broken\n")
    reader = documents(path, "val")
    assert next(reader) == b"first"
    with pytest.raises(DataError, match=r"val\.jsonl:1001"):
        list(reader)


def test_the_standard_library_is_a_corpus() -> None:
    train, val = both("stdlib")
    assert 0.05 < len(val) / (len(train) + len(val)) < 0.15
    assert not set(train) & set(val)
    everything = train + val
    assert sum(map(len, everything)) > 4_000_000
    assert Path(json.decoder.__file__).read_bytes() in everything
    assert Path(pytest.__file__).read_bytes() not in everything
    assert all(document.decode("utf-8") for document in everything)
    assert both("stdlib") == (train, val)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Corpus.txt", "did you mean {0}/corpus.txt?"),
        ("corpus", "did you mean {0}/corpus.txt?"),
        ("tokens_train.bin", "did you mean {0}/token_train.bin?"),
        ("no/such/corpus.txt", "there is no {0}/no"),
        ("zzz", "name a text file, a jsonl file, a token shard, a folder of such files, or `stdlib`"),
    ],
)
def test_a_missing_source_names_what_is_near(name: str, hint: str, tmp_path: Path) -> None:
    for there in ("corpus.txt", "token_train.bin"):
        (tmp_path / there).write_text("x")
    with pytest.raises(DataError, match="no such file or folder") as caught:
        open_stream(tmp_path / name, "train", ByteTokenizer(), tmp_path / "cache")
    assert caught.value.hint.startswith(hint.format(tmp_path))


def test_a_symbolic_link_to_nothing_is_not_near_to_itself(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(DataError, match="loop: broken symbolic link") as caught:
        open_stream(loop, "train", ByteTokenizer(), tmp_path / "cache")
    assert caught.value.hint.startswith("name a text file")


def write_parquet(path: Path, **columns: list[object]) -> Path:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def test_rows_of_a_parquet_file_are_documents(tmp_path: Path) -> None:
    texts = ["first", "", "ζ\0\n", "x" * 100_000, "last"]
    path = write_parquet(tmp_path / "val.parquet", id=[*range(5)], text=[*texts])
    assert list(documents(path, "val")) == [text.encode() for text in texts if text]
    with pytest.raises(DataError, match=r"\.parquet files are records"):
        split_corpus([path], bounds="file")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"]}, 'column "text" is missing; the columns are body'),
        ({"text": [1]}, 'column "text" is int64; the columns are text'),
        ({"text": ["a", None]}, 'row 2: "text" is null'),
    ],
)
def test_bad_parquet_files_name_the_column_or_the_row(
    tmp_path: Path, columns: dict[str, list[object]], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        list(documents(write_parquet(tmp_path / "val.parquet", **columns), "val"))
    assert message in caught.value.message


def test_a_damaged_parquet_file_and_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "val.parquet", text=["a" * 100])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataIntegrityError, match=r"damaged \.parquet file"):
        list(documents(path, "val"))
    monkeypatch.setattr("specc.runtime.data.documents.files.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFailure, match=r"specc\[parquet\]"):
        list(documents(path, "val"))


def write_arrow(path: Path, texts: list[str], file_format: bool = False) -> Path:
    table = pyarrow.table({"id": [*range(len(texts))], "text": texts})
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = pyarrow.ipc.new_file if file_format else pyarrow.ipc.new_stream
    with opened(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def test_a_folder_that_datasets_saved_has_the_files_of_its_state(tmp_path: Path) -> None:
    """As `DatasetDict.save_to_disk` lays it out; files named cache-* are results of `map`."""
    texts = {"train": ["one", "two", "", "drei"], "validation": ["vier é"], "test": ["six"]}
    for split, rows in texts.items():
        name = "data-00000-of-00001.arrow"
        write_arrow(tmp_path / split / name, rows, file_format=split == "validation")
        (tmp_path / split / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_split": split}))
        write_arrow(tmp_path / split / "cache-12ab.arrow", ["a cached result"])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    assert list(documents(tmp_path, "train")) == [b"one", b"two", b"drei"]
    assert list(documents(tmp_path, "val")) == ["vier é".encode()]
    path = tmp_path / "train" / "data-00000-of-00001.arrow"
    for size in (path.stat().st_size // 2, 5):
        os.truncate(path, size)
        with pytest.raises(DataIntegrityError, match=r"damaged \.arrow file"):
            list(documents(tmp_path, "train"))
    with pytest.raises(DataError, match='column "text" is missing; the columns are id'):
        table = pyarrow.table({"id": [1]})
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
        list(documents(tmp_path, "train"))


def test_zstandard_is_read_and_damage_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(json.dumps({"text": f"document {index} é\n" * 50}) + "\n" for index in range(500)).encode()
    path = tmp_path / "val.jsonl.zst"
    with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
        file.write(lines)
    assert [json.loads(line)["text"].encode() for line in lines.splitlines()] == list(documents(tmp_path, "val"))
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], data[:30] + b"\0\1\2" + data[33:], b"no zstd"):
        path.write_bytes(damaged)
        with pytest.raises(DataIntegrityError, match="damaged compressed file"):
            list(documents(tmp_path, "val"))
    monkeypatch.setattr("specc.runtime.data.documents.files.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFailure, match=r"a \.zst file needs pyarrow\npip install 'specc\[parquet\]'"):
        list(documents(tmp_path, "val"))
