"""Fetching from the hub, with a stand-in for the hub's client: what is compared, what is kept, what is said offline."""

import hashlib
import os
import random
import shutil
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_data_pack import model

from specc.cli.app import run
from specc.runtime.data.errors import DataError
from specc.runtime.data.shards.check import check
from specc.runtime.data.shards.fetch import SETS
from specc.runtime.data.shards.record import read_record
from specc.runtime.data.shards.shard_file import ShardWriter
from specc.runtime.data.tokenizers.open import open_tokenizer
from specc.runtime.data.tokenizers.ranks import rank_file, tokenizer_json
from specc.runtime.data.windows.stream import open_stream

assert model  # a fixture
FOLDER = "datasets/datasets/fineweb10B_sp1024"
TOKENIZER = "datasets/tokenizers/fineweb_1024_bpe.model"
COMMIT = "c0ffee" * 6 + "abcd"


@dataclass
class Hub:
    """The three calls of huggingface_hub that are used, over a folder; counts what is downloaded."""

    root: Path
    downloads: list[str] = field(default_factory=list)
    in_git: set[str] = field(default_factory=set)  # small files are not in LFS
    error: Exception | None = None
    spoil: str | None = None
    die_at: int | None = None

    def HfApi(self) -> "Hub":
        if self.error is not None:
            raise self.error
        return self

    def dataset_info(self, repo_id: str, *, revision: str | None = None) -> Any:
        assert repo_id == "willdepueoai/parameter-golf"
        return SimpleNamespace(sha=COMMIT)

    def repo_info(self, repo_id: str, *, repo_type: str, revision: str | None) -> Any:
        assert (repo_id, repo_type) == ("openai-community/gpt2", "model")
        return SimpleNamespace(sha=COMMIT)

    def list_repo_tree(self, repo_id: str, path_in_repo: str, *, repo_type: str, revision: str) -> Any:
        assert repo_type == "dataset" and revision == COMMIT
        paths = sorted((self.root / path_in_repo).iterdir())
        yield SimpleNamespace(path=f"{path_in_repo}/docs", tree_id="0" * 40)
        yield from (self._entry(path.relative_to(self.root).as_posix()) for path in paths)

    def get_paths_info(self, repo_id: str, paths: list[str], *, repo_type: str, revision: str) -> Any:
        assert repo_type in ("model", "dataset") and revision == COMMIT
        return [self._entry(path) for path in paths if (self.root / path).exists()]

    def _entry(self, path: str) -> Any:
        data = (self.root / path).read_bytes()
        lfs = None if path in self.in_git else SimpleNamespace(sha256=hashlib.sha256(data).hexdigest())
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return SimpleNamespace(path=path, size=len(data), lfs=lfs, blob_id=blob)

    def hf_hub_download(self, repo_id: str, filename: str, *, repo_type: str, revision: str, local_dir: Path) -> str:
        assert repo_type in ("model", "dataset") and revision == COMMIT
        if self.die_at == len(self.downloads):
            raise ConnectionResetError(104, "Connection reset by peer")
        self.downloads.append(filename.rpartition("/")[2])
        place = Path(local_dir) / filename
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.root / filename, place)
        if self.spoil is not None and filename.endswith(self.spoil):
            with open(place, "r+b") as file:
                file.seek(1500)
                file.write(b"\xff\x03")
        return str(place)


@pytest.fixture
def hub(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    root = tmp_path / "hub"
    (root / FOLDER).mkdir(parents=True)
    (root / TOKENIZER).parent.mkdir(parents=True)
    shutil.copyfile(model, root / TOKENIZER)
    vocab, generator = open_tokenizer(str(model)).vocab, np.random.default_rng(1)
    for name in ["val_000000", *(f"train_{index:06d}" for index in range(4))]:
        with ShardWriter(root / FOLDER / f"fineweb_{name}.bin") as writer:
            writer.write(np.concatenate([[1], generator.integers(4, vocab, 3000)]))
    stand_in = Hub(root)
    monkeypatch.setitem(sys.modules, "huggingface_hub", stand_in)  # type: ignore[arg-type]
    return stand_in


def fetch(out: Path, shards: int = 2, *more: str) -> int:
    return run(["data", "fetch", "fineweb-sp1024", "--out", str(out), "--shards", str(shards), "--yes", *more])


def test_what_is_fetched_is_whole_and_trains(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert fetch(out) == 0
    names = ["fineweb_1024_bpe.model", "fineweb_val_000000.bin", "fineweb_train_000000.bin", "fineweb_train_000001.bin"]
    assert hub.downloads == names and sorted(os.listdir(out)) == sorted([*names, "shards.json"])
    for name in names:
        (origin,) = hub.root.rglob(name)
        assert (out / name).read_bytes() == origin.read_bytes()
    record = read_record(out)
    assert record is not None and record.source == f"fineweb-sp1024: willdepueoai/parameter-golf at {COMMIT}"
    assert check(out).findings == []
    stream = open_stream(out, "train", open_tokenizer(str(out / names[0])), tmp_path)
    assert stream.tokens == 6002 and stream.documents is None
    stream.close()
    # nothing is fetched twice, and more can be fetched later
    assert fetch(out) == 0 and len(hub.downloads) == 4
    assert fetch(out, 4) == 0 and hub.downloads[4:] == ["fineweb_train_000002.bin", "fineweb_train_000003.bin"]
    assert check(out).findings == [] and check(out).splits["train"].shards == 4
    assert fetch(out, 1) == 0 and check(out).splits["train"].shards == 4  # what is there stays
    assert check(out).findings == [] and len(hub.downloads) == 6


def test_a_fetch_that_was_ended_goes_on(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    hub.die_at = 2
    assert fetch(out) == 3
    assert "ConnectionResetError: [Errno 104] Connection reset by peer" in capsys.readouterr().err
    assert check(out).exit_code == 5  # not complete, and it says so
    with pytest.raises(DataError, match="never completed"):
        open_stream(out, "val", open_tokenizer(str(out / "fineweb_1024_bpe.model")), tmp_path)
    hub.die_at = None
    (out / ".downloads" / "partial").write_bytes(b"left")
    assert fetch(out) == 0 and len(hub.downloads) == 4 == len(set(hub.downloads))
    assert check(out).findings == [] and not (out / ".downloads").exists()


@pytest.mark.parametrize("in_git", [False, True])
@pytest.mark.parametrize("name", ["fineweb_1024_bpe.model", "fineweb_train_000001.bin"])
def test_what_comes_damaged_is_not_kept(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, in_git: bool
) -> None:
    out = tmp_path / "out"
    hub.spoil = name
    hub.in_git = {TOKENIZER, f"{FOLDER}/{name}"} if in_git else set()
    assert fetch(out) == 5
    shown = capsys.readouterr().err
    assert f"{name}: the download is damaged" in shown and ("git id" if in_git else "SHA-256") in shown
    assert not (out / name).exists() and check(out).exit_code == 5
    hub.spoil = None
    assert fetch(out) == 0 and check(out).findings == []


def test_a_file_that_was_damaged_since_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fetch(out) == 0
    os.truncate(out / "fineweb_train_000000.bin", 2000)
    data = bytearray((out / "fineweb_val_000000.bin").read_bytes())
    data[random.Random(1).randrange(1024, len(data))] ^= 1
    (out / "fineweb_val_000000.bin").write_bytes(data)
    assert check(out).exit_code == 5
    assert fetch(out) == 0
    assert sorted(hub.downloads[4:]) == ["fineweb_train_000000.bin", "fineweb_val_000000.bin"]
    assert check(out).findings == []


def test_what_is_whole_stays_whole_until_more_has_come(hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fetch(out) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    hub.die_at = 5  # one of the two that are asked for comes
    assert fetch(out, 4) == 3
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    assert check(out).findings == []
    tokenizer = open_tokenizer(str(out / "fineweb_1024_bpe.model"))
    open_stream(out, "train", tokenizer, tmp_path).close()
    hub.die_at = None
    assert fetch(out, 4) == 0 and check(out).findings == [] and check(out).splits["train"].shards == 4
    # not so where a file that the record lists is not there, or another
    (out / "fineweb_train_000001.bin").unlink()
    hub.die_at = len(hub.downloads)
    assert fetch(out) == 3
    with pytest.raises(DataError, match="never completed"):
        open_stream(out, "train", tokenizer, tmp_path)
    hub.die_at = None
    assert fetch(out) == 0 and check(out).findings == []


def test_a_folder_of_something_else_is_left_alone(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a record that cannot be read, of a pack that was ended, or of an ended fetch of another set."""
    (tmp_path / "v.txt").write_text("other")
    (tmp_path / "a.txt").write_text("text")
    files = [str(tmp_path / "a.txt"), "--validation", str(tmp_path / "v.txt"), "--tokenizer", "bytes"]
    folders = []
    for name, record in (("damaged", None), ("ended", b"")):
        folders.append(tmp_path / name)
        assert run(["data", "pack", *files, "--out", str(folders[-1])]) == 0
        path = folders[-1] / "shards.json"
        path.write_bytes(path.read_bytes() + b"x" if record is None else record)
    folders.append(tmp_path / "other")
    hub.die_at = 2
    monkeypatch.setitem(SETS, "fineweb-other", SETS["fineweb-sp1024"])  # type: ignore[index]
    assert run(["data", "fetch", "fineweb-other", "--out", str(folders[-1]), "--shards", "1", "--yes"]) == 3
    hub.die_at = None
    for folder, words in zip(folders, ("is unknown", "contains other data", "contains other data"), strict=True):
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        capsys.readouterr()
        assert fetch(folder) == 2 and words in capsys.readouterr().err
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert run(["data", "fetch", "fineweb-other", "--out", str(folders[-1]), "--shards", "1", "--yes"]) == 0


def test_mistakes_and_a_hub_that_does_not_answer(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert fetch(out, 5) == 2
    assert "has 4 train shards, not 5" in capsys.readouterr().err and not out.exists()
    assert run(["data", "fetch", "fineweb-sp1024", "--out", str(out)]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "shards from https://huggingface.co/datasets/willdepueoai/parameter-golf to" in shown
    assert "add --yes to download" in shown and not out.exists()
    assert run(["data", "fetch", "fineweb", "--out", str(out)]) == 2
    assert "choose from fineweb-sp1024, fineweb-sp8192" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("x")
    assert fetch(tmp_path / "other") == 2 and fetch(tmp_path / "other" / "mine.txt") == 2
    assert os.listdir(tmp_path / "other") == ["mine.txt"]
    hub.error = ConnectionError("Cannot reach the hub: offline mode is enabled.\nmore")
    capsys.readouterr()
    assert fetch(out) == 3
    shown = capsys.readouterr().err
    assert "cannot fetch from the hub (willdepueoai/parameter-golf): ConnectionError: Cannot reach the hub" in shown
    assert "run the command again" in shown and "more" not in shown and "Traceback" not in shown
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    assert fetch(out) == 3
    assert "pip install 'specc[hub]'" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_tokenizer_is_fetched_compared_and_opened(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: bool
) -> None:
    ranks = [bytes([value]) for value in range(256)] + [b"th", b"the", b" the"]
    content = tokenizer_json(ranks, "gpt2", ["<|endoftext|>"])
    (hub.root / "tokenizer.json").write_text(content)
    fetch_gpt2 = ["data", "fetch", "gpt2.tiktoken", "--out", str(tmp_path / "out"), "--yes"]
    if damaged:
        hub.spoil = "tokenizer.json"
        assert run(fetch_gpt2) == 5 and "the download is damaged" in capsys.readouterr().err
        (hub.root / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
        hub.spoil = None
        assert run(fetch_gpt2) == 2 and "not a byte-level BPE" in capsys.readouterr().err
        (hub.root / "tokenizer.json").unlink()
        assert run(fetch_gpt2) == 2 and "has no tokenizer.json" in capsys.readouterr().err
        assert os.listdir(tmp_path / "out") == []
        return
    assert run(fetch_gpt2) == 0
    shown = capsys.readouterr()
    assert "the tokenizer gpt2.tiktoken from https://huggingface.co/openai-community/gpt2 to" in shown.err
    assert os.listdir(tmp_path / "out") == ["gpt2.tiktoken"]
    assert (tmp_path / "out" / "gpt2.tiktoken").read_bytes() == rank_file(ranks)
    assert run(fetch_gpt2) == 2 and "already exists" in capsys.readouterr().err


def test_a_set_without_its_tokenizer_or_val_is_refused(hub: Hub, tmp_path: Path) -> None:
    (hub.root / FOLDER / "fineweb_val_000000.bin").unlink()
    assert fetch(tmp_path / "out") == 2 and hub.downloads == []
    (hub.root / TOKENIZER).unlink()
    assert fetch(tmp_path / "out") == 2 and not (tmp_path / "out").exists()


def test_no_other_command_reaches_for_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise AssertionError("the network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "v.txt").write_text("other")
    options = ["--validation", str(tmp_path / "v.txt"), "--tokenizer", str(model), "--out", str(tmp_path / "out")]
    assert run(["data", "pack", str(tmp_path / "a.txt"), *options]) == 0
    assert run(["data", "check", str(tmp_path / "out")]) == 0
