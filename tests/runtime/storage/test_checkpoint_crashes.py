"""Writing checkpoints while system calls fail, processes die, and power goes: old or new, never between."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint_files import no_warning, same, snapshot

from specc.runtime.errors import EnvironmentFailure
from specc.runtime.storage import checkpoint
from specc.runtime.storage.committed import sweep

CALLS = ("open", "write", "fsync", "rename", "makedirs")
Call = tuple[str, str]


@contextmanager
def system(before: Callable[[int, Call], None]) -> Iterator[list[Call]]:
    """Calls `before` with the number and the (name, path) of each system call that writes, before it."""
    calls: list[Call] = []
    paths: dict[int, str] = {}
    real = {name: getattr(os, name) for name in CALLS}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **named: Any) -> Any:
            if name == "open" and not rest[0] & (os.O_WRONLY | os.O_DIRECTORY):
                return real[name](first, *rest, **named)  # what cleans up
            calls.append((name, paths.get(first, "?") if isinstance(first, int) else Path(first).name))
            before(len(calls), calls[-1])
            result = real[name](first, *rest, **named)
            if name == "open":
                paths[result] = Path(first).name
            return result

        return call

    for name in CALLS:
        setattr(os, name, wrapped(name))
    try:
        yield calls
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def count_of_calls(folder: Path) -> int:
    with system(lambda number, call: None) as calls:
        checkpoint.save(folder, snapshot(3))
    return len(calls)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (1, 2):
        checkpoint.save(folder, snapshot(step))
    return folder


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_each_failing_call_is_a_clean_failure(tmp_path: Path, persistent: bool, code: int) -> None:
    (tmp_path / "counted").mkdir()
    for step in (1, 2):
        checkpoint.save(tmp_path / "counted", snapshot(step))
    total = count_of_calls(tmp_path / "counted")
    assert total > 20
    for failing in range(1, total + 1):
        folder = tmp_path / f"fails_at_{failing}"
        folder.mkdir()
        for step in (1, 2):
            checkpoint.save(folder, snapshot(step))

        def fail(number: int, call: Call, failing: int = failing) -> None:
            if number == failing or (persistent and number > failing):
                raise OSError(code, os.strerror(code))

        with pytest.raises(EnvironmentFailure) as caught, system(fail):
            checkpoint.save(folder, snapshot(3))
        assert caught.value.exit_code == 3 and os.strerror(code) in caught.value.message
        newest = checkpoint.latest(folder, no_warning)
        assert newest is not None
        loaded = checkpoint.load(newest)
        assert loaded.step in (2, 3) and same(loaded, snapshot(loaded.step))
        assert not list(folder.glob(".*"))
        checkpoint.save(folder, snapshot(3))  # the disk works again
        newest = checkpoint.latest(folder, no_warning)
        assert newest is not None and same(checkpoint.load(newest), snapshot(3))


def test_a_kill_at_each_call_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    (tmp_path / "counted").mkdir()
    for step in (1, 2):
        checkpoint.save(tmp_path / "counted", snapshot(step))
    total = count_of_calls(tmp_path / "counted")
    results = []
    for last in range(1, total + 1):
        folder = tmp_path / f"dies_at_{last}"
        folder.mkdir()
        for step in (1, 2):
            checkpoint.save(folder, snapshot(step))
        child = os.fork()
        if child == 0:
            try:
                with system(lambda number, call, last=last: os._exit(9) if number == last else None):  # type: ignore[misc]
                    checkpoint.save(folder, snapshot(3))
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        newest = checkpoint.latest(folder, no_warning)
        assert newest is not None
        loaded = checkpoint.load(newest)
        results.append(loaded.step)
        assert same(loaded, snapshot(loaded.step))
        sweep(folder)
        assert not list(folder.glob(".*"))
    assert results == sorted(results) and set(results) == {2, 3}


def test_everything_is_synced_before_the_rename_and_the_folder_after(folder: Path) -> None:
    with system(lambda number, call: None) as calls:
        checkpoint.save(folder, snapshot(3))
    temporary = next(path for name, path in calls if name == "makedirs")
    renamed = calls.index(("rename", temporary))
    members = {path for name, path in calls[:renamed] if name == "write"}
    assert members == {path.name for path in (folder / "step_00000003").iterdir()}
    for member in members:
        assert calls.index(("fsync", member)) > max(i for i, call in enumerate(calls) if call == ("write", member))
    last_file = max(calls.index(("fsync", member)) for member in members)
    assert last_file == calls.index(("fsync", "COMMIT"))
    assert last_file < calls.index(("fsync", temporary)) < renamed < calls.index(("fsync", "checkpoints"))
    deleted = [i for i, (name, path) in enumerate(calls) if name == "rename" and path == "step_00000001"]
    assert deleted and deleted[0] > calls.index(("fsync", "checkpoints"))
