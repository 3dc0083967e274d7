"""The run directory: the inputs, the settings and all results of a training run.

runs/gpt_mini-001/
    spec.json        the spec with all defaults and overrides; every command that reads a spec accepts it
    run.json         target, data and overrides, as given, and the source of the initial weights
    lock.json        the kernels that `specc tune` measured as the fastest, if the spec has a lock file
    files/           other files that the run needs, such as its tokenizer
    generated/       the generated code
    log.jsonl        one line per step, and one per event between steps
    checkpoints/     see checkpoint.py
    quantized/       the output of `specc quantize`
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import ValidationError

from specc.compiler.build import canonical, compile_loaded
from specc.compiler.errors import SpecError
from specc.compiler.plan.lock import NO_LOCK, Lock, read_lock
from specc.compiler.spec import check
from specc.compiler.spec.spec import Spec
from specc.compiler.spec.train import generated_data
from specc.compiler.strict import StrictModel, later
from specc.compiler.text.shell import shell_path
from specc.runtime.errors import IntegrityError, RuntimeFailure, cannot_write
from specc.runtime.storage.atomic import create_folder, write_atomically
from specc.runtime.storage.committed import COMMIT, in_words
from specc.runtime.storage.data_digests import DataDigests
from specc.runtime.storage.records import Records
from specc.runtime.storage.start_record import StartRecord

SPEC = "spec.json"
LOCK = "lock.json"
FILES = "files"
RESTORE = "restore the file from a copy of the run, or train again"


class RunDirectoryError(RuntimeFailure):
    """Raised if a run directory does not exist, is in use, or belongs to another run."""

    code = "U003"
    exit_code = 2


def require_path(path: Path) -> None:
    """Raises RunDirectoryError if `path`, which should be a run or an artifact, does not exist or is a spec."""
    if not path.exists():
        raise RunDirectoryError(f"{path}: no such run or artifact", "name a run directory or a .specc file")
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        hint = f"train it with `specc train {shell_path(path)}`, then name the run directory"
        raise RunDirectoryError(f"{path}: this file is a spec, which has no weights", hint)


class _Record(StrictModel):
    format: Literal[1]
    target: str
    data: str
    overrides: tuple[str, ...]
    data_digests: DataDigests | None = None
    start: StartRecord | None = later(None)


def _digest_of(path: Path) -> str:
    text = json.dumps(json.loads(path.read_bytes()), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Run:
    """A run directory, and the settings in its files.

    Attributes:
        directory: the run directory.
        spec: the resolved spec.
        target: the target on which the run trains.
        data: the training data, in the format of `specc train --data`.
        overrides: the values of `--set`, which `spec` already contains.
        lock: the kernels that `specc tune` measured as the fastest.
        data_digests: the digests of the training data at the start of the run. None for runs of old versions of specc.
        trained_digest: the digest of the spec in the checkpoints. None if it equals the digest of `spec`. The two
            digests differ if the run is from an old version of specc, or if the section `quant` has changed since
            training.
        start: the weights from which the run started; None for random weights.
    """

    directory: Path
    spec: Spec
    target: str
    data: str
    overrides: tuple[str, ...] = ()
    lock: Lock = NO_LOCK
    data_digests: DataDigests | None = None
    trained_digest: str | None = None
    start: StartRecord | None = None

    @property
    def generated(self) -> Path:
        return self.directory / "generated"

    @property
    def files(self) -> Path:
        return self.directory / FILES

    @property
    def log(self) -> Path:
        return self.directory / "log.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def quantized(self) -> Path:
        return self.directory / "quantized"

    @property
    def staged(self) -> Path:
        """The folder in which `specc quantize` prepares the next folder `quantized`.

        A separate lock protects the parent of this folder, so that a run can be quantized while it trains.
        """
        return self.directory / ".quantizing" / "quantized"

    @property
    def resume_command(self) -> str:
        """The shell command that continues the run. The command omits options of the first command, such as time
        limits.
        """
        return f"specc train --run {shell_path(self.directory)} --resume auto"

    @property
    def spec_digest(self) -> str:
        return self.trained_digest or hashlib.sha256(canonical(self.spec).encode()).hexdigest()

    def logged_loss(self, step: int) -> float | None:
        """Returns the validation loss at `step`, in nats per token; None if there was no validation at `step`.

        Validations of averaged weights are ignored.
        """
        loss: float | None = Records.read(self.log).last("validation", step=step, weights="raw").get("nats")
        return loss

    def create(self, files: Sequence[Path] = ()) -> "Run":
        """Creates the run directory with copies of `files`, and returns the run.

        Raises RunDirectoryError if the directory is not empty. Raises EnvironmentFailure if the directory cannot be
        written.
        """
        require_free(self.directory)
        try:
            for folder in (*([self.files] if files else []), self.generated, self.checkpoints, self.quantized):
                create_folder(folder)
            for file in files:
                write_atomically(self.files / file.name, [file.read_bytes()])
        except OSError as error:
            raise cannot_write(self.directory, error) from error
        if self.lock.targets:
            _write_text(self.directory / LOCK, self.lock.text())
        self.record()
        _write_text(
            self.directory / SPEC, readable(self.spec)
        )  # written last, because a directory counts as a run once it has spec.json
        return self

    @classmethod
    def open(cls, directory: Path) -> "Run":
        """Reads a run directory. Raises RunDirectoryError if the directory is not a run. Raises IntegrityError if the
        run is damaged.
        """
        if not is_run(directory):
            if directory.exists() and (whole := next(filter(is_run, directory.absolute().parents), None)):
                raise RunDirectoryError(f"{directory}: is a part of a run", f"name the run, {whole}")
            what = "is not a run: it has no spec.json" if directory.exists() else "no such run"
            raise RunDirectoryError(f"{directory}: {what}", "name a directory that `specc train` made")
        try:
            spec, _, old = check.load_recorded(directory / SPEC)
            digest = _digest_of(directory / SPEC) if old else None
            lock = read_lock(directory / LOCK)
            record = _Record.model_validate_json((directory / "run.json").read_bytes())
        except SpecError as error:
            reason = error.diagnostics[0].message
            raise IntegrityError(f"{directory}: its spec.json or lock.json is damaged: {reason}", RESTORE) from None
        except OSError as error:
            raise IntegrityError(f"{directory}: its run.json cannot be read: {error.strerror}", RESTORE) from None
        except ValidationError as error:
            raise IntegrityError(f"{directory}: its run.json is damaged: {in_words(error)}", RESTORE) from None
        digests = record.data_digests
        return cls(directory, spec, record.target, record.data, record.overrides, lock, digests, digest, record.start)

    def record(self) -> None:
        """Writes run.json. Raises EnvironmentFailure if the file cannot be written."""
        record = _Record(
            format=1,
            target=self.target,
            data=self.data,
            overrides=self.overrides,
            data_digests=self.data_digests,
            start=self.start,
        )
        _write_text(self.directory / "run.json", record.model_dump_json(indent=1))

    def requantized(self, overrides: Sequence[str]) -> "Run":
        """Returns the run with `overrides` applied to the section `quant` of its spec.

        Raises:
            SpecError: if the resulting spec cannot be built for the target of the run.
            RunDirectoryError: if the overrides change more than `quant`.
        """
        if not overrides:
            return self
        spec, source, _ = check.load_recorded(self.directory / SPEC, tuple(overrides))
        if spec.model_copy(update={"quant": self.spec.quant}) != self.spec:
            message = f"{self.directory} is already trained: only `quant` of its spec can be changed"
            raise RunDirectoryError(message, "remove the other --set options")
        compile_loaded(spec.at_rest, source, (self.target,))
        return replace(self, spec=spec, trained_digest=self.spec_digest)

    def require_same(self, spec: Spec, target: str) -> None:
        here, there = self.spec.model_dump(mode="json"), spec.model_dump(mode="json")
        changed = [f"{path}: {old} in the run, {new} now" for path, old, new in differences(here, there)]
        changed += [f"the target: {self.target} in the run, {target} now"] if target != self.target else []
        if changed:
            hint = "resume with the settings of the run, or start a new run; to stop earlier, give only --steps"
            raise RunDirectoryError(f"{self.directory} has other settings: {'; '.join(changed[:6])}", hint)

    def require_data(self, digests: DataDigests) -> None:
        """Raises RunDirectoryError if `digests` differ from the digests of the data at the start of the run."""
        known = self.data_digests
        if known is None or known == digests:
            return
        split = "training" if known.train != digests.train else "validation"
        message = (
            f"{self.directory}: the {split} split of {self.data} is not the {split} split with which the run began"
        )
        raise RunDirectoryError(message, f"resume with the data of the run: {self.resume_command} --data PATH")

    def with_data(self, data: str) -> "Run":
        """Returns the run with its training data at the location `data`, which is a result of the function `lasting`.

        The method does not check that the data are unchanged. Raises RunDirectoryError if `data` is the recorded
        location, but does not exist.
        """
        built_in = data in ("stdlib", *generated_data())
        if data == lasting(self.data) and not built_in and not Path(data).expanduser().exists():
            hint = f"state the new location: {self.resume_command} --data PATH"
            raise RunDirectoryError(f"{self.directory}: the data of the run, {data}, do not exist", hint)
        return replace(self, data=data)


def lasting(data: str) -> str:
    """Returns the absolute path of `data` if `data` is an existing path. Otherwise, returns `data` unchanged."""
    path = Path(data).expanduser()
    return data if data in ("stdlib", *generated_data()) or not path.exists() else str(path.absolute())


def is_run(directory: Path) -> bool:
    """Returns whether a directory is a run, valid or damaged.

    A run has a file spec.json and no file COMMIT. The folder `quantized` of a run has both files.
    """
    return (directory / SPEC).is_file() and not (directory / COMMIT).is_file()


def require_free(directory: Path) -> None:
    """Raises RunDirectoryError if the directory contains files, so that a new run cannot use it.

    Files that a run left when it was interrupted during its start are allowed.
    """
    left = {"run.json", LOCK, FILES, "generated", "checkpoints", "quantized"}
    if directory.exists() and not directory.is_dir():
        raise RunDirectoryError(f"{directory} is not a directory", "name another directory")
    if directory.exists() and any(e.name not in left and e.name[0] != "." for e in directory.iterdir()):
        if not is_run(directory):
            raise RunDirectoryError(f"{directory} is not empty, and is not a run", "name another directory")
        hint = f"continue that run with --run {shell_path(directory)} --resume auto, or name another directory"
        raise RunDirectoryError(f"{directory} is not empty", hint)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """A context manager that creates a directory, and locks it against other processes.

    Raises RunDirectoryError if another process has the lock. Raises EnvironmentFailure if the directory cannot be
    created.
    """
    try:
        create_folder(directory)
        lock = FileLock(directory / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        message = f"{directory} is in use by another process"
        raise RunDirectoryError(message, "wait until it ends, or train in another directory") from None
    except OSError as error:
        raise cannot_write(directory, error) from error
    try:
        yield
    finally:
        lock.release()


def readable(spec: Spec) -> str:
    """Returns the text of spec.json: the spec as indented JSON, with all defaults and sorted keys."""
    data = spec.model_dump(mode="json", by_alias=True)
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def default_run(name: str, root: Path = Path("runs")) -> Path:
    """Returns the path of the default directory of a new run: the next free `runs/NAME-NNN`."""
    number = max((int(path.name.rpartition("-")[2]) for path in _numbered(name, root)), default=0)
    return root / f"{name}-{number + 1:03d}"


def newest_run(name: str, root: Path = Path("runs")) -> Path | None:
    """Returns the run with the highest number among `runs/NAME-NNN`; None if none of these directories is a run."""
    return next(filter(is_run, reversed(_numbered(name, root))), None)


def _numbered(name: str, root: Path) -> list[Path]:
    pattern = re.compile(re.escape(name) + r"-\d{3,9}")
    names = os.listdir(root) if root.is_dir() else []
    return [root / n for n in sorted(filter(pattern.fullmatch, names), key=lambda n: int(n.rpartition("-")[2]))]


def _write_text(path: Path, text: str) -> None:
    write_atomically(path, [text.encode()])


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (path, old value, new value) for each difference between two JSON values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (item, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(item, other, f"{path}.{i}")
    elif old != new:
        yield path, old, new
