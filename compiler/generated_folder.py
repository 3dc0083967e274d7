"""Compares a folder of generated files with a build, and writes the folder without losing manual edits."""

import difflib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from specc.compiler.errors import FULL, EnvironmentProblem, SpeccError

MANIFEST = "manifest.json"
NEXT = ".manifest.next.json"  # the manifest of a build in progress, which identifies the files of an interrupted build
TEMPORARY = ".specc-tmp"
Files = Mapping[str, str]
State = Literal["changed", "missing", "extra", "line endings", "executable"]


class OtherSource(SpeccError):
    """Raised if a generated folder was built from a spec file other than the given spec file. Exit code 2."""

    code = "G001"


class StaleCode(SpeccError):
    """Raised if a committed generated file differs from the text that a build of its spec writes. Exit code 2."""

    code = "G002"


class HandEdited(SpeccError):
    """Raised if a generated file has content that no build wrote. Exit code 1."""

    code = "F009"
    exit_code = 1


class Drift(NamedTuple):
    """A file that differs from the text that a build would write. `path` is relative to the generated folder, and
    `state` is the kind of difference."""

    path: str
    state: State


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def drift(folder: Path, files: Files) -> tuple[Drift, ...]:
    return tuple(_drift(folder, files))


def _drift(folder: Path, files: Files) -> Iterator[Drift]:
    present = _present(folder)
    executable = {name for name in present if (folder / name).stat().st_mode & 0o100}
    if executable == present:  # a file system without modes reports the same mode for all files
        executable = set()
    for name in sorted({*files, *present}):
        if name not in files:
            yield Drift(name, "extra")
        elif name not in present:
            yield Drift(name, "missing")
        elif (content := (folder / name).read_bytes()) != files[name].encode():
            same = content.replace(b"\r\n", b"\n") == files[name].encode()
            yield Drift(name, "line endings" if same else "changed")
        elif name in executable:
            yield Drift(name, "executable")


def changes(folder: Path, files: Files) -> tuple[tuple[str, str], ...]:
    """Returns a pair (state, name) for each file that a build would change, sorted by name. Writes nothing.

    The state is `new`, `changed` or `removed`. A file is `removed` if an earlier build wrote it, but this build does
    not.
    """
    states = {"missing": "new", "extra": "removed"}
    owned = _owned(folder)
    moved = [(states.get(entry.state, "changed"), entry.path) for entry in drift(folder, files)]
    return tuple((state, name) for state, name in moved if state != "removed" or name in owned)


def require_current(folder: Path, files: Files, within: str, build: str) -> None:
    """Raises StaleCode if a build would change the files of a folder on disk.

    Args:
        folder: the generated folder of a spec.
        files: the texts that a build would write to `folder`, by file name.
        within: the subfolder to compare, such as `cpu`.
        build: the command that builds the spec.
    """
    stale = [(state, name) for state, name in changes(folder, files) if name.startswith(f"{within}/")]
    if stale:
        (state, name), more = stale[0], len(stale) - 1
        words = {
            "new": "is missing",
            "changed": "is not what its spec builds",
            "removed": "is left over from an earlier build",
        }
        message = f"{folder / name} {words[state]}" + (f", and {more} more files differ" if more else "")
        hint = (
            f"run `{build}` and review the changes; "
            "the code that runs is generated from the spec, not read from this folder"
        )
        raise StaleCode(message, hint)


def unified(folder: Path, files: Files, root: str) -> str:
    present = _present(folder) & {*files, *_owned(folder)}
    old = {name: (folder / name).read_text(encoding="utf-8", errors="replace") for name in present}
    return diff_texts(old, files, f"a/{root}", f"b/{root}")


def diff_texts(old: Files, new: Files, before: str, after: str) -> str:
    """Returns a unified diff of two sets of files, sorted by name.

    Args:
        old: the old texts, by file name.
        new: the new texts, by file name.
        before: the path prefix of old files in the headers of the diff, such as `a/generated`.
        after: the path prefix of new files in the headers.

    Returns:
        The diff, or "" if there is no difference. A file in only one of the sets is compared with /dev/null.
    """
    parts: list[str] = []
    for name in sorted({*old, *new}):
        left, right = old.get(name, "").splitlines(keepends=True), new.get(name, "").splitlines(keepends=True)
        source = f"{before}/{name}" if name in old else "/dev/null"
        target = f"{after}/{name}" if name in new else "/dev/null"
        parts += difflib.unified_diff(left, right, source, target)
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in parts)


def write(folder: Path, files: Files, force: bool = False) -> tuple[tuple[str, str], ...]:
    """Writes `files` to `folder`. Each changed file is replaced atomically. Stale files of earlier builds are removed.

    Args:
        folder: the generated folder. A missing folder is created.
        files: the texts, by file name, including the manifest.
        force: whether to overwrite manual edits and files built from another spec file.

    Returns:
        A pair (state, name) for each changed file, sorted by name. The state is `new`, `changed` or `removed`.

    Raises:
        HandEdited: if a file was edited manually and `force` is False, or if a subfolder is a link. Nothing is written.
        OtherSource: if the last build of `folder` was from another spec file and `force` is False. Nothing is written.
        EnvironmentProblem: if the disk is full or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            return _write(folder, files, force)
    except OSError as error:
        reason = error.strerror or str(error)
        refused = (errno.EACCES, errno.EPERM, errno.EROFS)
        hint = (
            "free some space" if error.errno in FULL else "make it writable" if error.errno in refused else "fix this"
        )
        again = f"{hint}, and build again, which writes the remaining files"
        raise EnvironmentProblem(f"cannot write {error.filename or folder}: {reason}", again) from error


def _write(folder: Path, files: Files, force: bool) -> tuple[tuple[str, str], ...]:
    if not force:
        _require_same_source(folder, files)
    owned = _owned(folder)
    folders = sorted({parent for name in files for parent in (folder / name).parents if parent.is_relative_to(folder)})
    if links := [inner for inner in folders if inner != folder and inner.is_symlink()]:
        raise HandEdited(f"{links[0]} is a symbolic link; a build does not write through links", "remove the link")
    edited = [] if force else sorted(_edited(folder, files, owned))
    if edited:
        raise HandEdited(
            f"{folder / edited[0]} was edited by hand" + (f", and {len(edited) - 1} more" if len(edited) > 1 else ""),
            "move the edit into the spec or a template, delete the file, or build with --force to discard the edit",
        )
    done = changes(folder, files)
    if done:
        replace_file(folder / NEXT, files[MANIFEST])
    for state, name in done:
        if name != MANIFEST and state != "removed":
            replace_file(folder / name, files[name])
    for state, name in done:
        if state == "removed":
            (folder / name).unlink()
            _prune(folder, (folder / name).parent)
    if any(state != "removed" for state, _ in done):
        # written last, because until then the old manifest lists the other files of earlier builds
        replace_file(folder / MANIFEST, files[MANIFEST])
    for path in [path for path in folder.rglob(".*") if _temporary(path)]:
        path.unlink()
    return done


def _require_same_source(folder: Path, files: Files) -> None:
    try:
        previous = _source(folder.name, (folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, AttributeError):  # there is no valid manifest, so the check for manual edits decides
        return
    if (source := _source(folder.name, files[MANIFEST])) != previous:
        hint = f"give {source} another `name`, or build with --force to replace the files"
        raise OtherSource(f"{folder} was built from {previous}, and {source} has the same `name`", hint)


def _source(name: str, manifest: str) -> str:
    return str(json.loads(manifest).get("source", f"specs/{name}.yaml"))


def _present(folder: Path) -> set[str]:
    if not folder.is_dir():
        return set()
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in paths if not _temporary(path)}


def _temporary(path: Path) -> bool:
    return path.name == NEXT or (path.name.startswith(".") and path.name.endswith(TEMPORARY))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds an exclusive lock on a folder, so that only one build at a time writes there. Does nothing on Windows."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _owned(folder: Path) -> dict[str, set[str]]:
    owned: dict[str, set[str]] = {}
    for name in (MANIFEST, NEXT):
        try:
            listed = json.loads((folder / name).read_text(encoding="utf-8"))["files"]
            for file, sha in listed.items():
                owned.setdefault(str(file), set()).add(str(sha))
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            continue
    inside = {name for name in owned if not name.startswith("/") and ".." not in name.split("/")}
    return {name: owned[name] for name in inside}


def _edited(folder: Path, files: Files, owned: Mapping[str, set[str]]) -> Iterator[str]:
    for name in sorted({*files, *owned} & _present(folder) - {MANIFEST}):
        content = (folder / name).read_bytes()
        known = {*owned.get(name, ()), digest(files.get(name, ""))}
        if hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest() not in known:
            yield name


def replace_file(path: Path, text: str, mode: int = 0o644) -> None:
    """Replaces a file atomically through a temporary file in the same folder. Readers see the old or the new text.

    `mode` contains the permissions of the new file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _prune(root: Path, folder: Path) -> None:
    while folder != root and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
