"""A generated folder on disk: written whole, checked without a touch, and never at the cost of a person's edit."""

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from specc.compiler import generated_folder as artifact
from specc.compiler.generated_folder import HandEdited, diff_texts, drift, replace_file, unified, write


def fileset(**texts: str) -> dict[str, str]:
    """Files by name (`__` stands for a slash, `_` before py for the dot) with a manifest of them."""
    files = {name.replace("__", "/").replace("_py", ".py"): text for name, text in texts.items()}
    listed = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    return {**files, "manifest.json": json.dumps({"files": listed})}


A = fileset(sm90__model_py="one\n", sm90__kernel_py="two\n", PLAN="plan\n")
B = fileset(sm90__model_py="one\n", cpu__kernel_py="three\n", PLAN="new plan\n")


def on_disk(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes().decode()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in sorted([folder, *folder.rglob("*")])}


def test_a_first_build_writes_all(tmp_path: Path) -> None:
    changes = write(tmp_path / "g", A)
    assert changes == tuple(("new", name) for name in ("PLAN", "manifest.json", "sm90/kernel.py", "sm90/model.py"))
    assert on_disk(tmp_path / "g") == A
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "g").rglob("*") if path.is_file()} == {0o644}


def test_a_second_build_touches_nothing(tmp_path: Path) -> None:
    write(tmp_path, A)
    before = stamps(tmp_path)
    assert write(tmp_path, A) == ()
    assert stamps(tmp_path) == before


def test_a_build_writes_what_differs_and_removes_what_is_stale(tmp_path: Path) -> None:
    write(tmp_path, A)
    before = stamps(tmp_path)
    assert write(tmp_path, B) == (
        ("changed", "PLAN"),
        ("new", "cpu/kernel.py"),
        ("changed", "manifest.json"),
        ("removed", "sm90/kernel.py"),
    )
    assert on_disk(tmp_path) == B
    model = str(tmp_path / "sm90/model.py")
    assert stamps(tmp_path)[model] == before[model]


def test_a_folder_that_is_empty_goes(tmp_path: Path) -> None:
    write(tmp_path, A)
    write(tmp_path, fileset(PLAN="plan\n"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["PLAN", "manifest.json"]


def test_a_file_that_is_not_ours_stays(tmp_path: Path) -> None:
    write(tmp_path, A)
    (tmp_path / "sm90/notes.txt").write_text("mine\n")
    write(tmp_path, fileset(PLAN="plan\n"))
    assert (tmp_path / "sm90/notes.txt").read_text() == "mine\n"
    assert not (tmp_path / "sm90/model.py").exists()


@pytest.mark.parametrize("name", ["sm90/model.py", "sm90/kernel.py", "PLAN"])  # kept, stale and changed by B
def test_an_edited_file_stops_the_build_before_it_writes(tmp_path: Path, name: str) -> None:
    write(tmp_path, A)
    (tmp_path / name).write_text("an edit\n")
    before = stamps(tmp_path)
    with pytest.raises(HandEdited, match="was edited by hand") as caught:
        write(tmp_path, B)
    assert str(tmp_path / name) in caught.value.message
    assert caught.value.exit_code == 1
    assert stamps(tmp_path) == before
    write(tmp_path, B, force=True)
    assert on_disk(tmp_path) == B


def test_all_edited_files_are_counted(tmp_path: Path) -> None:
    write(tmp_path, A)
    for name in ("PLAN", "sm90/model.py"):
        (tmp_path / name).write_text("an edit\n")
    with pytest.raises(HandEdited, match="and 1 more"):
        write(tmp_path, B)


def test_a_file_of_ours_that_no_build_wrote_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90/model.py").write_text("someone's\n")
    with pytest.raises(HandEdited):
        write(tmp_path, A)
    assert on_disk(tmp_path) == {"sm90/model.py": "someone's\n"}


def test_an_edit_that_is_what_the_build_would_write_is_none(tmp_path: Path) -> None:
    write(tmp_path, A)
    (tmp_path / "PLAN").write_text(B["PLAN"])
    write(tmp_path, B)
    assert on_disk(tmp_path) == B


def test_line_endings_are_mended_and_are_no_edit(tmp_path: Path) -> None:
    write(tmp_path, A)
    (tmp_path / "PLAN").write_bytes(b"plan\r\n")
    assert [(d.path, d.state) for d in drift(tmp_path, A)] == [("PLAN", "line endings")]
    assert write(tmp_path, A) == (("changed", "PLAN"),)
    assert on_disk(tmp_path) == A


def test_drift_names_each_file_and_touches_none(tmp_path: Path) -> None:
    write(tmp_path, A)
    (tmp_path / "PLAN").write_bytes(b"plan\r\n")
    (tmp_path / "sm90/model.py").write_text("an edit\n")
    (tmp_path / "sm90/kernel.py").unlink()
    (tmp_path / "sm90/more.py").write_text("more\n")
    (tmp_path / "sm90/__pycache__").mkdir()
    (tmp_path / "sm90/__pycache__/model.cpython-311.pyc").write_bytes(b"cache")
    before = stamps(tmp_path)
    assert [(result.path, result.state) for result in drift(tmp_path, A)] == [
        ("PLAN", "line endings"),
        ("sm90/kernel.py", "missing"),
        ("sm90/model.py", "changed"),
        ("sm90/more.py", "extra"),
    ]
    assert stamps(tmp_path) == before


def test_drift_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert [result.state for result in drift(tmp_path / "no", A)] == ["missing"] * 4
    assert not (tmp_path / "no").exists()


def test_an_older_last_line_without_an_end_diffs(tmp_path: Path) -> None:
    assert diff_texts({"f": "a\nb"}, {"f": "a\nc\n"}, "x", "y") == "--- x/f\n+++ y/f\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"


def test_unified_shows_new_and_removed_files(tmp_path: Path) -> None:
    write(tmp_path, A)
    text = unified(tmp_path, B, "gpt")
    assert "--- a/gpt/sm90/kernel.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-two\n" in text
    assert "--- /dev/null\n+++ b/gpt/cpu/kernel.py\n@@ -0,0 +1 @@\n+three\n" in text
    assert "sm90/model.py" not in "".join(line for line in text.splitlines() if line.startswith(("---", "+++")))
    assert unified(tmp_path, A, "gpt") == ""


@pytest.mark.parametrize("name", ["../outside.txt", "sub/../../outside.txt", "/tmp/specc-outside-of-all.txt"])
def test_a_manifest_cannot_lead_outside(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "g"
    write(folder, A)
    outside = Path(name) if name.startswith("/") else (folder / name).resolve()
    (folder / "sub").mkdir()
    text = "not ours\n"
    outside.write_text(text)
    try:
        listed = {name: hashlib.sha256(text.encode()).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps({"files": listed}))
        write(folder, B, force=True)
        assert outside.read_text() == text
    finally:
        outside.unlink(missing_ok=True)


def test_a_link_in_the_folder_is_replaced_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text(A["sm90/model.py"])
    folder = tmp_path / "g"
    write(folder, A)
    (folder / "sm90/model.py").unlink()
    (folder / "sm90/model.py").symlink_to(outside)
    changed = fileset(sm90__model_py="changed\n", PLAN="plan\n")
    write(folder, changed)
    assert outside.read_text() == A["sm90/model.py"]
    assert not (folder / "sm90/model.py").is_symlink()
    assert on_disk(folder) == changed


def test_a_linked_folder_is_not_followed_to_remove(tmp_path: Path) -> None:
    """The manifest lists sub/file, and sub has become a link to elsewhere: what is there is not ours."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kernel.py").write_text("two\n")
    folder = tmp_path / "g"
    write(folder, A)
    for name in ("model.py", "kernel.py"):
        (folder / "sm90" / name).unlink()
    (folder / "sm90").rmdir()
    (folder / "sm90").symlink_to(elsewhere, target_is_directory=True)
    write(folder, fileset(PLAN="plan\n"))
    assert (elsewhere / "kernel.py").read_text() == "two\n"
    with pytest.raises(HandEdited, match="sm90 is a symbolic link"):
        write(folder, fileset(PLAN="plan\n", sm90__model_py="one\n"), force=True)
    assert on_disk(elsewhere) == {"kernel.py": "two\n"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": []}', '{"files": {"PLAN": 3}}', '{"files": null}', "\xff"])
def test_a_damaged_manifest_protects_what_it_no_longer_tells(tmp_path: Path, text: str) -> None:
    write(tmp_path, A)
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    write(tmp_path, A)  # equal files are no edits
    assert on_disk(tmp_path) == A
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(HandEdited):
        write(tmp_path, B)


def test_replacing_a_file_leaves_the_old_one_when_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    replace_file(path, "old\n")

    def broken(handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(artifact.os, "fsync", broken)
    with pytest.raises(OSError, match="no space left"):
        replace_file(path, "new\n")
    assert on_disk(tmp_path) == {"f": "old\n"}


def steps_cut(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Lets only so many files be replaced, then behaves as if the process were gone."""
    count = 0
    replace = os.replace

    def counting(source: str, target: Path) -> None:
        nonlocal count
        if count == after:
            raise KeyboardInterrupt
        count += 1
        replace(source, target)

    monkeypatch.setattr(artifact.os, "replace", counting)


@pytest.mark.parametrize("after", range(5))
def test_a_build_that_was_cut_off_is_finished_by_the_next(
    tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, A)
    with monkeypatch.context() as patch:
        steps_cut(patch, after)
        cut = False
        try:
            write(tmp_path, B)
        except KeyboardInterrupt:
            cut = True
    assert cut == (after < 4)  # what is to come, PLAN, cpu/kernel.py and the manifest
    write(tmp_path, B)
    assert on_disk(tmp_path) == B
    assert drift(tmp_path, B) == ()


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "g"
    write(folder, A)
    for path in (folder, folder / "sm90"):
        path.chmod(0o555)
    yield folder
    for path in (folder, folder / "sm90"):
        path.chmod(0o755)


def test_a_folder_that_cannot_be_written_says_so(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.access(sealed, os.W_OK):  # root writes everywhere: let the system refuse instead

        def refused(*args: object, **words: object) -> None:
            raise PermissionError(13, "Permission denied", str(sealed))

        monkeypatch.setattr(artifact.tempfile, "mkstemp", refused)
    with pytest.raises(artifact.EnvironmentProblem, match=r"cannot write .*: Permission denied"):
        write(sealed, B)
    assert on_disk(sealed) == A
