"""Packing: what is in the shards, that the bytes are always the same, and that a killed one leaves nothing to take for
a whole one; from a packed folder to a trained model."""

import gzip
import json
import lzma
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_samples import SMALL, SPEC, write_text

from specc.cli.app import run
from specc.runtime.data.documents.corpus import documents
from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards import digests as recorded
from specc.runtime.data.shards import tokenize
from specc.runtime.data.shards.check import check
from specc.runtime.data.shards.digests import sha256_of
from specc.runtime.data.shards.pack import PackOptions, pack
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.stream import open_stream
from specc.runtime.errors import EnvironmentFailure


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model, lossy as they are."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("tokenizer")
    lines = [
        line for split in ("train", "val") for line in (write_text(folder) / f"{split}.txt").read_text().split("\n")
    ]
    path = folder / "small.model"
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            vocab_size=300,
            model_type="bpe",
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
            required_chars="\u2581",
        )
    return path


def tokens_of(folder: Path, split: str, tokenizer: ByteTokenizer | None = None) -> list[int]:
    stream = open_stream(folder, split, tokenizer or ByteTokenizer(), folder / "cache")  # type: ignore[arg-type]
    try:
        return stream.read(0, stream.tokens).tolist()
    finally:
        stream.close()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_tokens_are_those_of_the_text_and_are_cut_anywhere(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    record = pack(PackOptions((str(text),), tmp_path / "out", "bytes", shard_tokens=1000))
    for split in ("train", "val"):
        wanted = [token for document in documents(text, split) for token in (256, *document)]  # type: ignore[arg-type]
        assert tokens_of(tmp_path / "out", split) == wanted
        entry = record.splits[split]  # type: ignore[index]
        full, last = divmod(len(wanted), 1000)
        assert [shard.tokens for shard in entry.shards] == [1000] * full + [last] * (last > 0)
        assert entry.documents == wanted.count(256) and entry.document_bytes == len(wanted) - wanted.count(256)
    whole = open_stream(tmp_path / "out", "train", ByteTokenizer(), tmp_path)
    assert (whole.documents, whole.tokenizer_digest) == (30, ByteTokenizer().digest())
    part = open_stream(tmp_path / "out" / "tokens_train_000000.bin", "train", ByteTokenizer(), tmp_path)
    assert (part.documents, part.document_bytes) == (None, None) and part.digest != whole.digest


def test_a_changed_shard_is_refused_and_an_unchanged_one_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    pack(PackOptions((str(write_text(tmp_path / "text")),), out, "bytes"))
    digests = []
    monkeypatch.setattr(recorded, "sha256_of", lambda path: digests.append(path) or sha256_of(path))
    for _ in range(2):
        open_stream(out, "val", ByteTokenizer(), cache).close()
    shard = out / "tokens_val_000000.bin"
    assert digests == [shard]
    (note,) = (cache / "digests").iterdir()
    note.write_bytes(b"\xff\xfe")  # a damaged note is not believed
    open_stream(out, "val", ByteTokenizer(), cache).close()
    open_stream(out, "val", ByteTokenizer(), None).close()
    assert digests == [shard] * 3
    status, data = shard.stat(), bytearray(shard.read_bytes())
    data[-2] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(DataIntegrityError, match=r"not the file that shards.json describes"):
            open_stream(out, "val", ByteTokenizer(), cache)
    changes = [word for change in SMALL for word in ("--set", change)]
    assert run(["train", str(SPEC), *changes, "--data", str(out), "--run", str(tmp_path / "run")]) == 5


def test_the_same_text_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    folders = []
    for name, batch in (("a", 200), ("b", 10**6)):
        monkeypatch.setattr(tokenize, "BATCH_BYTES", batch)
        text = write_text(tmp_path / name / "text")
        pack(PackOptions((str(text),), tmp_path / name / "out", str(model), shard_tokens=700))
        folders.append(content(tmp_path / name / "out"))
    assert folders[0] == folders[1] and {"shards.json", "small.model", "tokens_train_000001.bin"} <= set(folders[0])


def test_without_marks_only_the_start_of_a_split_has_one(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    pack(PackOptions((str(text),), tmp_path / "out", "bytes", marks="none"))
    for split in ("train", "val"):
        wanted = [256, *b"".join(documents(text, split))]  # type: ignore[arg-type]
        assert tokens_of(tmp_path / "out", split) == wanted
    result = check(tmp_path / "out")
    assert result.findings == [] and result.splits["train"].bos == 1 and result.splits["train"].histogram() == []


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz"])
@pytest.mark.parametrize(
    ("name", "text", "bounds", "wanted"),
    [
        ("a.txt", "one\n\ntwo\n<|endoftext|>\nthree\n", None, ["one\n\ntwo\n", "three\n"]),
        ("a.txt", "one\nmore\n\n \t\n\ntwo\n<|endoftext|>\n", "blank-line", ["one\nmore\n", "two\n<|endoftext|>\n"]),
        ("a.txt", "one\n\ntwo\n<|endoftext|>\nthree\n", "file", ["one\n\ntwo\n<|endoftext|>\nthree\n"]),
        ("a.md", "# one\n\ntwo\n", None, ["# one\n\ntwo\n"]),
        ("a.md", "# one\n\ntwo\n", "blank-line", ["# one\n", "two\n"]),
        ("a.jsonl", '{"text": "one\\n\\ntwo"}\n\n{"text": "3"}\n', None, ["one\n\ntwo", "3"]),
        ("a.txt", '{"text": "one"}\n{"text": "<|endoftext|>"}\n', "record", ["one", "<|endoftext|>"]),
    ],
)
def test_documents_end_where_the_option_says(
    tmp_path: Path, name: str, text: str, bounds: str | None, wanted: list[str], suffix: str
) -> None:
    data = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}[suffix](text.encode())  # type: ignore[operator]
    (tmp_path / f"{name}{suffix}").write_bytes(data)
    (tmp_path / "held.txt").write_text("held")
    inputs = ["data", "pack", str(tmp_path / f"{name}{suffix}"), "--validation", str(tmp_path / "held.txt")]
    if bounds == "record":
        (tmp_path / "held.txt").write_text('{"text": "held"}')
    options = ["--tokenizer", "bytes", "--out", str(tmp_path / "out"), *(["--bounds", bounds] if bounds else [])]
    assert run([*inputs, *options]) == 0
    result = bytes(255 if token == 256 else token for token in tokens_of(tmp_path / "out", "train")).split(b"\xff")[1:]
    assert [document.decode() for document in result] == wanted
    assert tokens_of(tmp_path / "out", "val") == [256, *b"held"]


def test_files_that_are_in_no_split_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_text(tmp_path / "text")
    for number in range(5):
        (text / f"t{number}.txt").write_text("more")
    options = ["--tokenizer", "bytes", "--out"]
    assert run(["data", "pack", str(text), *options, str(tmp_path / "a")]) == 0
    assert "with neither train nor val: t0.txt, t1.txt, t2.txt and 2 more\n" in capsys.readouterr().err
    (text / "train.txt").unlink()
    assert run(["data", "pack", str(text), *options, str(tmp_path / "b")]) == 0
    assert "left out" not in capsys.readouterr().err


def test_a_fraction_is_held_out_by_content(tmp_path: Path) -> None:
    chooser = random.Random(1)
    texts = [chooser.randbytes(20).hex() for _ in range(2000)]
    texts += texts[:500]  # twice the same document is on one side
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:1500]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[1500:]))
    inputs = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    record = pack(PackOptions(inputs, tmp_path / "out", "bytes", share=0.25))
    val, train = record.splits["val"].documents, record.splits["train"].documents
    assert val is not None and train is not None and val + train == 2500 and 525 < val < 725
    result = check(tmp_path / "out")
    assert sum(facts.repeated for facts in result.splits.values()) == 500
    assert all("equal an earlier document" in finding.what for finding in result.findings)  # and none is in both


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["a.txt", "--validation", "a.txt"], 2, "is in both splits"),
        (["a.txt", "--validation", "none.txt"], 2, "no such file"),
        (["a.txt", "--validation", "v.txt", "--validation-fraction", "0.1"], 2, "exclude each other"),
        (["a.txt", "--validation-fraction", "1"], 2, "0<x<1"),
        (["a.txt", "--validation-fraction", "0.000001"], 2, "the val split has no documents"),
        (["a.jsonl", "--validation-fraction", "0.5", "--bounds", "blank-line"], 2, "are records and cannot end at"),
        (["a.txt", "--validation", "v.txt", "--bounds", "record"], 2, "v.txt:1: not JSON"),
        (["empty.txt", "--validation", "v.txt"], 2, "the train split has no documents"),
        (["a.txt", "--validation", "empty.txt"], 2, "empty.txt: the val split has no documents"),
        (["bad.txt.xz", "--validation", "v.txt"], 5, "damaged compressed file"),
        (["latin.txt", "--validation", "v.txt", "--tokenizer", "{model}"], 2, "not valid UTF-8"),
        (["a.txt", "--validation", "v.txt", "--tokenizer", "gone.model"], 2, "no tokenizer 'gone.model'"),
        (["a.txt", "--validation", "v.txt", "--out", "full"], 2, "already exists"),
        (["a.txt", "--validation", "v.txt", "--out", "v.txt"], 2, "already exists"),
        (["a.bin", "--validation", "v.txt"], 2, "cannot read documents from a .bin file"),
    ],
)
def test_mistakes_leave_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    files = {"a.txt": b"text\n", "v.txt": b"other\n", "a.jsonl": b'{"text": "x"}\n', "empty.txt": b"", "a.bin": b"x"}
    files |= {"bad.txt.xz": lzma.compress(random.Random(1).randbytes(9999))[:5000], "latin.txt": b"caf\xe9 \xff\n"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    before = sorted(os.listdir(tmp_path))
    monkeypatch.chdir(tmp_path)
    given = [word.replace("{model}", str(model)) for word in arguments]
    usual = [
        *([] if "--tokenizer" in given else ["--tokenizer", "bytes"]),
        *([] if "--out" in given else ["--out", "out"]),
    ]
    assert run(["data", "pack", *given, *usual]) == code
    shown = " ".join(capsys.readouterr().err.split())
    assert words in shown and "Traceback" not in shown
    assert sorted(os.listdir(tmp_path)) == before


# Packs, and kills itself at the n-th call of something.
CHILD = """
import os, signal, sys
from pathlib import Path
from specc.runtime.data.shards import tokenize
from specc.runtime.data.shards.pack import PackOptions, pack
text, out, what, count = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
tokenize.BATCH_BYTES = 3000
function, seen = getattr(os, what), [0]
def call(*args, **named):
    seen[0] += 1
    if seen[0] == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*args, **named)
setattr(os, what, call)
pack(PackOptions((text,), out, "bytes", shard_tokens=4000))
print(seen[0])
"""


def test_a_killed_pack_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    pack(PackOptions((str(text),), tmp_path / "whole", "bytes", shard_tokens=4000))
    wanted = content(tmp_path / "whole")
    out, staging = tmp_path / "out", tmp_path / ".out.packing"

    def child(what: str, count: int, into: Path) -> tuple[int, str]:
        command = [sys.executable, "-c", CHILD, str(text), str(into), what, str(count)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        return done.returncode, done.stdout

    syncs = int(child("fsync", 10**9, tmp_path / "counted")[1])
    # the last three sync the record, the folder with it under its name, and the folder above
    moments = [("fsync", count) for count in random.Random(3).sample(range(1, syncs - 2), 4)]
    moments += [("fsync", syncs - 2), ("replace", 1), ("rename", 1)]
    for what, count in moments:
        assert child(what, count, out)[0] == -signal.SIGKILL, (what, count)
        assert staging.is_dir() and not out.exists(), (what, count)
        assert run(["data", "check", str(out)]) == 2  # not there
        if what != "rename":  # before that, every byte is in place
            shards = any(staging.glob("*.bin"))
            assert run(["data", "check", str(staging)]) == (2 if what == "replace" else 5), (what, count)
            with pytest.raises(DataError, match="never completed" if shards else "no files"):
                open_stream(staging, "val", ByteTokenizer(), tmp_path)
    assert child("fsync", 10**9, out)[0] == 0
    assert content(out) == wanted and not staging.exists() and check(out).findings == []


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, real = write_text(tmp_path / "text"), os.fsync
    (tmp_path / "out").mkdir()  # an empty one may be there
    command = ["data", "pack", str(text), "--tokenizer", "bytes", "--out", str(tmp_path / "out")]
    for fails_at in (1, 3, 5):
        calls = 0

        def full(descriptor: int, fails_at: int = fails_at) -> None:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise OSError(28, "No space left on device")
            real(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            assert run(command) == 3
        message = capsys.readouterr().err
        assert (
            f"cannot write {tmp_path / 'out'}: No space left on device" in message
            and "= help: free some space" in message
        )
        assert sorted(os.listdir(tmp_path)) == ["out", "text"] and not os.listdir(tmp_path / "out")
    assert run(command) == 0 and check(tmp_path / "out").findings == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    options = PackOptions((str(write_text(tmp_path / "text")),), tmp_path / "file" / "out", "bytes")
    with pytest.raises(EnvironmentFailure, match=r"cannot write .*: Not a directory") as caught:
        pack(options)
    assert caught.value.hint == "name another --out"


def test_one_process_at_a_time_packs_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write_text(tmp_path / "text")
    options = PackOptions((str(text),), tmp_path / "out", "bytes")

    def second(split: str, done: int) -> None:
        with pytest.raises(DataError, match="another process packs into"):
            pack(options)

    pack(options, second)
    with pytest.raises(DataError, match="already exists"):
        pack(options)
    assert check(tmp_path / "out").findings == []


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    text, options = write_text(tmp_path / "text"), ("--tokenizer", "bytes")
    (tmp_path / "disk" / "empty").mkdir(parents=True)
    for name in ("empty", "new"):
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
        assert run(["data", "pack", str(text), *options, "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name).is_symlink() and check(tmp_path / "disk" / name).findings == []
    assert sorted(os.listdir(tmp_path / "disk")) == ["empty", "new"]


def test_a_folder_that_is_mounted_is_refused_before_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel refuses it: neither can its name be taken away, nor another folder be given it."""
    text, out, packed = write_text(tmp_path / "text"), tmp_path / "volume", []
    out.mkdir()

    def refusing(function: Any) -> Any:
        def call(*paths: Any, **named: Any) -> Any:
            if str(out) in map(str, paths):
                raise OSError(16, "Device or resource busy")
            return function(*paths, **named)

        return call

    for name in ("rmdir", "rename", "replace"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    with pytest.raises(DataError, match="Device or resource busy") as caught:
        pack(PackOptions((str(text),), out, "bytes"), lambda split, done: packed.append(split))
    assert caught.value.hint == f"name a folder in it: --out {out}/packed" and not packed
    assert sorted(os.listdir(tmp_path)) == ["text", "volume"]
    pack(PackOptions((str(text),), out / "packed", "bytes"))
    assert check(out / "packed").findings == []


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")

    def meddle(split: str, done: int) -> None:
        os.utime(text / "train.txt", ns=(1, 1))

    with pytest.raises(DataError, match="changed during packing"):
        pack(PackOptions((str(text),), tmp_path / "out", "bytes"), meddle)
    assert sorted(os.listdir(tmp_path)) == ["text"]


def test_from_packing_to_an_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    """The tokenizer is found in the packed folder, and its record tells the bytes of the documents."""
    monkeypatch.chdir(tmp_path)
    text = write_text(tmp_path / "text")
    options = ["--tokenizer", str(model), "--out", "packed", "--shard-tokens", "500"]
    assert run(["data", "pack", str(text), *options]) == 0
    assert run(["data", "check", "packed"]) == 0
    assert capsys.readouterr().out.strip().endswith("packed: no problems")
    vocab = json.loads((tmp_path / "packed" / "shards.json").read_text())["vocab"]
    changes = (*SMALL, f"model.vocab={vocab}", "train.data={tokenizer: small.model}")
    sets = [word for text in changes for word in ("--set", text)]
    assert run(["train", str(SPEC), "--data", "packed", "--run", "run", *sets]) == 0
    assert run(["quantize", "run", "--data", "packed"]) == 0
    capsys.readouterr()
    assert run(["eval", "run/quantized/model.specc", "--data", "packed", "--json"]) == 0
    packed = json.loads(capsys.readouterr().out)
    assert run(["eval", "run", "--quantized", "--data", str(text), "--tokenizers", str(model.parent), "--json"]) == 0
    # the digest of shards is of their files: whether text is what they were packed from is not known
    assert json.loads(capsys.readouterr().out) == {**packed, "held_out": None} and packed["held_out"] is True
    assert packed["document_bytes"] == sum(map(len, documents(text, "val"))) and not packed["lossless"]
    # another tokenizer, and shards that are not those of the record, are refused before anything is written
    plain = [word for text in SMALL for word in ("--set", text)]
    assert run(["train", str(SPEC), "--data", "packed", "--run", "other", *plain]) == 2
    assert "set train.data.tokenizer to small.model" in capsys.readouterr().err
    (tmp_path / "packed" / "tokens_train_000001.bin").unlink()
    assert run(["train", str(SPEC), "--data", "packed", "--run", "other", *sets]) == 5
    assert "has no tokens_train_000001.bin" in capsys.readouterr().err
    assert not (tmp_path / "other" / "run.json").exists()


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """Shards are written as tokens come: what is held is a batch and a document."""
    line = b"x" * 99 + b"\n"
    with open(tmp_path / "big.txt", "wb") as file:
        for _ in range(400):
            file.write(line * 999 + b"<|endoftext|>\n")  # 40 MB
    (tmp_path / "v.txt").write_text("held")
    script = """
import resource, sys
from pathlib import Path
from specc.runtime.data.shards import tokenize
from specc.runtime.data.shards.pack import PackOptions, pack
tokenize.BATCH_BYTES = 1 << 20
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pack(PackOptions((sys.argv[1],), Path(sys.argv[3]), "bytes", (sys.argv[2],)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    command = [sys.executable, "-c", script, *(str(tmp_path / name) for name in ("big.txt", "v.txt", "out"))]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < 24_000  # KiB; the text has 39,000, its tokens twice that
    assert np.sum([path.stat().st_size for path in (tmp_path / "out").glob("*_train*")]) > 79_000_000
