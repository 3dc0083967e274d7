"""The folder of a sweep: its record, its copy of the spec, and its run directories.

runs/widths/
    sweep.json        the settings, seeds and overrides, and the digest of each spec
    spec/             a copy of the spec and its lock at the start of the sweep; all runs use it
    output/           the output of each run
    dim_64-seed1/     an ordinary run
    results.json      the table of results, as `specc sweep --json` prints it
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from specc.compiler.errors import quote
from specc.compiler.plan.lock import lock_path
from specc.compiler.strict import Positive, StrictModel
from specc.runtime.errors import IntegrityError, RuntimeFailure, cannot_write
from specc.runtime.storage.atomic import write_atomically
from specc.runtime.storage.committed import in_words
from specc.runtime.storage.run_directory import Run, is_run
from specc.runtime.storage.run_history import RunHistory
from specc.runtime.sweep.plan import PlannedQuantization, PlannedRun, PlannedSweep

RECORD = "sweep.json"
RESULTS = "results.json"
SHOWN = 6  # the maximum number of differences in a message


class SweepError(RuntimeFailure):
    """Raised if a folder does not match its sweep file, or is not the folder of a sweep."""

    code = "U016"
    exit_code = 2


class RecordedWork(StrictModel):
    """A run or a quantization in sweep.json. PlannedRun and PlannedQuantization document the fields."""

    name: str
    setting: str
    seed: int
    overrides: tuple[str, ...]

    def change(self, other: "RecordedWork | None") -> str | None:
        """Returns a description of the differences between this record and `other`. None if both records are equal.

        `other` is the record with the same name for the edited sweep file. It is None if the edited file has no such
        entry.
        """
        if other is None:
            return "no entry has the settings and seed"
        if other.overrides != self.overrides:
            return _changed(self.overrides, other.overrides)
        return None if other == self else "the same overrides give another spec"


class RecordedRun(RecordedWork):
    """A run in sweep.json."""

    spec_digest: str


class RecordedQuantization(RecordedWork):
    """A quantization in sweep.json."""

    of: str


class SweepRecord(StrictModel):
    """The content of sweep.json.

    Attributes:
        format: the version of the format.
        data, target: the values of the options `--data` and `--target` of `specc train`; None for the defaults.
        threads: the number of CPU threads of each run. It never changes, because the order of sums depends on it.
        runs, quantizations: the runs and quantizations of the sweep.
    """

    format: Literal[1] = 1
    data: str | None
    target: str | None
    threads: Positive
    runs: tuple[RecordedRun, ...]
    quantizations: tuple[RecordedQuantization, ...]

    @classmethod
    def of(cls, sweep: PlannedSweep, threads: int) -> "SweepRecord":
        runs = tuple(
            RecordedRun(**{name: getattr(run, name) for name in RecordedRun.model_fields}) for run in sweep.runs
        )
        quantizations = tuple(
            RecordedQuantization(**{name: getattr(entry, name) for name in RecordedQuantization.model_fields})
            for entry in sweep.quantizations
        )
        return cls(data=sweep.data, target=sweep.target, threads=threads, runs=runs, quantizations=quantizations)

    @classmethod
    def read(cls, directory: Path) -> "SweepRecord | None":
        try:
            return cls.model_validate_json((directory / RECORD).read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise IntegrityError(f"{directory / RECORD}: cannot be read: {error.strerror}") from None
        except ValidationError as error:
            raise IntegrityError(f"{directory / RECORD}: is damaged: {in_words(error)}") from None

    def changes(self, new: "SweepRecord") -> Iterator[str]:
        """Yields one sentence per difference between this record and `new`, the record of the edited sweep file.

        Additional runs in `new` are not differences.
        """
        for name in ("data", "target"):
            if getattr(self, name) != getattr(new, name):
                yield f"{name} is {getattr(new, name)}, but was {getattr(self, name)}"
        others = {item.name: item for item in (*new.runs, *new.quantizations)}
        places: dict[str, list[str]] = {}
        for item in (*self.runs, *self.quantizations):
            if (change := item.change(others.get(item.name))) is not None:
                places.setdefault(change, []).append(item.name)
        for change, names in places.items():
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            yield f"{change} in {', '.join(names[:2])}{more}"

    def added(self, new: "SweepRecord") -> list[str]:
        known = {item.name for item in (*self.runs, *self.quantizations)}
        return [item.name for item in (*new.runs, *new.quantizations) if item.name not in known]


def _changed(before: tuple[str, ...], after: tuple[str, ...]) -> str:
    new = [text for text in after if text not in before]
    old = [text for text in before if text not in after]
    words = [f"{quote(text)} instead of {quote(was)}" for text, was in zip(new, old, strict=False)]
    words += [f"{quote(text)} in addition" for text in new[len(old) :]]
    words += [f"no {quote(text)}" for text in old[len(new) :]]
    return ", ".join(words) or "its overrides in another order"


@dataclass(frozen=True)
class SweepFolder:
    """The folder of a sweep. Its record matches the sweep file."""

    directory: Path
    sweep: PlannedSweep
    record: SweepRecord

    @classmethod
    def open(cls, directory: Path, sweep: PlannedSweep, threads: int, extend: bool = False) -> "SweepFolder":
        """Opens or begins the folder of a sweep. The caller must hold the lock of the folder.

        Args:
            directory: the path of the folder.
            sweep: the checked sweep file.
            threads: the number of CPU threads of each run, for a new sweep.
            extend: whether to accept a sweep file with more runs than the folder has.

        Returns:
            The folder.

        Raises:
            SweepError: if the folder belongs to another sweep, or the sweep file has changed since the sweep began.
            IntegrityError: if the record is damaged.
            EnvironmentFailure: if the folder cannot be written.
        """
        known = SweepRecord.read(directory)
        new = SweepRecord.of(sweep, known.threads if known is not None else threads)
        if known is not None:
            _require_unchanged(directory, known, new, extend)
        folder = cls(directory, sweep, new)
        if known != new:
            folder._begin(sweep)
        return folder

    @classmethod
    def existing(cls, directory: Path, sweep: PlannedSweep) -> "SweepFolder":
        """Opens the folder of a sweep to read the results.

        Raises SweepError if the folder does not exist, or belongs to another sweep. Raises IntegrityError if the record
        is damaged.
        """
        known = SweepRecord.read(directory)
        if known is None:
            raise SweepError(
                f"{directory} is not the folder of a sweep", "name the folder with --out, or run the sweep first"
            )
        new = SweepRecord.of(sweep, known.threads)
        _require_unchanged(directory, known, new, extend=True)
        return cls(directory, sweep, new)

    def _begin(self, sweep: PlannedSweep) -> None:
        try:
            for name in ("spec", "output"):
                (self.directory / name).mkdir(exist_ok=True)
            shutil.copyfile(sweep.spec, self.spec)
            lock = lock_path(sweep.spec, sweep.model)
            if lock.exists() and not (self.directory / "spec" / lock.name).exists():
                shutil.copyfile(lock, self.directory / "spec" / lock.name)
        except OSError as error:
            raise cannot_write(self.directory, error) from error
        write_atomically(self.directory / RECORD, [self.record.model_dump_json(indent=1).encode()])

    @property
    def spec(self) -> Path:
        return self.directory / "spec" / f"{self.sweep.model}.yaml"

    def run(self, name: str) -> Path:
        return self.directory / name

    def output(self, name: str) -> Path:
        return self.directory / "output" / f"{name}.txt"

    def history(self, run: PlannedRun) -> RunHistory:
        """Returns the history of a run, from its log.

        Raises SweepError if the directory contains another run. Raises IntegrityError if the run is damaged.
        """
        directory = self.run(run.name)
        if not is_run(directory):
            return RunHistory()
        if Run.open(directory).spec_digest != run.spec_digest:
            message = f"{directory} is a run of another spec"
            raise SweepError(message, "move this run away, and start the sweep again")
        return RunHistory.read(directory / "log.jsonl")

    def is_finished(self, run: PlannedRun) -> bool:
        return self.history(run).complete

    def quantized(self, work: PlannedRun | PlannedQuantization) -> Path:
        return self.run(work.name) / "quantized"

    def copy_run(self, entry: PlannedQuantization) -> None:
        """Copies the run that `entry` quantizes, unless the copy exists. The checkpoints of the copy are hard links."""
        target, partial = self.run(entry.name), self.directory / f".{entry.name}"
        if target.exists():
            return
        shutil.rmtree(partial, ignore_errors=True)

        def copy(source: str, copied: str) -> object:
            if "checkpoints" in Path(source).parts:
                try:
                    os.link(source, copied)
                    return copied
                except OSError:  # the copy is on another file system, or the file system has no hard links
                    pass
            return shutil.copy2(source, copied)

        try:
            skipped = shutil.ignore_patterns(".lock", "quantized", ".quantizing")
            shutil.copytree(self.run(entry.of), partial, copy_function=copy, ignore=skipped)
            partial.rename(target)
        except OSError as error:
            raise cannot_write(target, error) from error

    def write_results(self, results: object) -> None:
        write_atomically(self.directory / RESULTS, [json.dumps(results, indent=1, allow_nan=False).encode()])


def require_free_or_begun(directory: Path) -> None:
    """Raises SweepError if the directory contains files that do not belong to a sweep.

    Call this function before locking the directory, because the lock adds a file.
    """
    if not directory.exists() or (directory / RECORD).is_file():
        return
    if not directory.is_dir() or any(entry.name[0] != "." for entry in directory.iterdir()):
        raise SweepError(f"{directory} is neither empty nor the folder of a sweep", "name another folder with --out")


def _require_unchanged(directory: Path, known: SweepRecord, new: SweepRecord, extend: bool) -> None:
    changes, added = list(known.changes(new)), known.added(new)
    if changes:
        more = f"; and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
        message = f"the sweep file has changed since the start of {directory}: {'; '.join(changes[:SHOWN])}{more}"
        raise SweepError(message, "restore the file, or start a new sweep with another --out")
    if added and not extend:
        more = f" and {len(added) - SHOWN} more" if len(added) > SHOWN else ""
        message = f"{directory} was started without {', '.join(added[:SHOWN])}{more}"
        raise SweepError(message, "add --extend to run them in the same folder, or name another folder with --out")
