"""A file is the old one or the new one, whatever happens while it is written."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specc.runtime.errors import EnvironmentFailure, IntegrityError, RuntimeFailure
from specc.runtime.storage.atomic import create_folder, write_atomically


def accept(path: Path) -> None:
    """A check that finds nothing."""


def put(path: Path, data: bytes, check: Callable[[Path], None] = accept) -> None:
    write_atomically(path, [data[:3], b"", data[3:]], check)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_writes_and_replaces(tmp_path: Path) -> None:
    for data in (b"first", b"", b"second, longer"):
        put(tmp_path / "m", data)
        assert (tmp_path / "m").read_bytes() == data and names(tmp_path) == ["m"]
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o666 & ~umask


def test_the_check_sees_the_finished_file_and_can_refuse_it(tmp_path: Path) -> None:
    put(tmp_path / "m", b"old")
    seen: list[bytes] = []

    def refuse(path: Path) -> None:
        seen.append(path.read_bytes())
        assert path.parent == tmp_path and (tmp_path / "m").read_bytes() == b"old"
        raise IntegrityError("no")

    with pytest.raises(IntegrityError, match="no"):
        put(tmp_path / "m", b"the new one", refuse)
    assert seen == [b"the new one"]
    assert (tmp_path / "m").read_bytes() == b"old" and names(tmp_path) == ["m"]


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(EnvironmentFailure, match=f"cannot write .*{name}: it exists, and is not a regular file"):
            put(tmp_path / name, b"data")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink() and names(tmp_path) == ["link", "pipe"]


def test_the_order_of_calls_survives_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All writes, then fsync of the file, then the check, then the rename, then fsync of the folder."""
    calls: list[str] = []

    def spy(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            what = name
            if name == "fsync":
                what += " folder" if os.path.isdir(f"/proc/self/fd/{arguments[0]}") else " file"
            calls.append(what)
            return inner(*arguments, **more)

        return call

    for name in ("write", "fsync", "replace"):
        monkeypatch.setattr(os, name, spy(name, getattr(os, name)))
    put(tmp_path / "m", b"contents", lambda _: calls.append("check"))
    assert calls == ["write", "write", "fsync file", "check", "replace", "fsync folder"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: whole(descriptor, bytes(data)[:2]))
    put(tmp_path / "m", b"0123456789")
    assert (tmp_path / "m").read_bytes() == b"0123456789"


@pytest.mark.parametrize("name", ["open", "write", "fsync", "replace", "listdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_error_at_any_call_leaves_the_old_or_the_new_file(
    name: str, code: int, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "m", b"old")
    real, count = getattr(os, name), 0

    def fail(*arguments: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count == nth:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        try:
            put(tmp_path / "m", b"the new one")
            failed = False
        except RuntimeFailure as failure:
            failed = True
            assert os.strerror(code) in failure.message
            assert failure.exit_code == 3 and ("free some space" in failure.hint) == (code == errno.ENOSPC)
    assert failed == (count >= nth)
    # Only a failure after the rename, of the folder's fsync, can leave the new file behind an error.
    late = failed and (name, nth) in {("fsync", 2), ("open", 2), ("open", 3)}
    assert (tmp_path / "m").read_bytes() in ([b"the new one"] if not failed else [b"old"] + [b"the new one"] * late)
    assert names(tmp_path) == ["m"]


def test_a_missing_folder_is_a_failure_to_write(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match="cannot write"):
        put(tmp_path / "no" / "m", b"x")


def test_leftovers_of_dead_writers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    dead, alive = tmp_path / ".m.0123abcd.tmp", tmp_path / ".m.89abcdef.tmp"
    others = [".n.0123abcd.tmp", ".m.tmp", "m.0123abcd.tmp", ".m.0123abcd.bak", ".m.x.0123abcd.tmp"]
    for name in [dead.name, alive.name, *others]:
        (tmp_path / name).write_bytes(b"left")
    (tmp_path / ".m.aaaaaaaa.tmp").mkdir()
    (tmp_path / ".m.bbbbbbbb.tmp").symlink_to(tmp_path / others[0])
    with alive.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        put(tmp_path / "m", b"new")
    remaining = [alive.name, "m", ".m.aaaaaaaa.tmp", ".m.bbbbbbbb.tmp", *others]
    assert names(tmp_path) == sorted(remaining)
    put(tmp_path / "m", b"newer")
    assert alive.name not in names(tmp_path)


def test_writers_at_once_all_succeed_and_one_wins(tmp_path: Path) -> None:
    body = (
        "import sys\nfrom pathlib import Path\nfrom specc.runtime.storage.atomic import write_atomically\n"
        "for i in range(60):\n"
        "    write_atomically(Path(sys.argv[1]), [sys.argv[2].encode() * 1000], lambda path: None)\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", body, str(tmp_path / "m"), letter], stderr=subprocess.PIPE, text=True)
        for letter in "abcd"
    ]
    for writer in writers:
        assert writer.communicate(timeout=120)[1] == "" and writer.returncode == 0
    data = (tmp_path / "m").read_bytes()
    assert len(data) == 1000 and len(set(data)) == 1
    assert names(tmp_path) == ["m"]


def test_the_entries_of_new_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("specc.runtime.storage.atomic.sync_folder", synced.append)
    create_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert sorted(synced) == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    synced.clear()
    create_folder(tmp_path / "a" / "b")
    assert synced == []
