"""Groups runs for a comparison. By default, the runs of a group differ only in the seed."""

import glob
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from specc.compiler.build import canonical
from specc.runtime.errors import RuntimeFailure
from specc.runtime.storage.run_directory import Run, is_run
from specc.runtime.storage.run_history import RunHistory
from specc.runtime.sweep.folder import SweepRecord

NAMED = re.compile(r"([^/=]+)=(.+)")
NUMBER = re.compile(
    r"-(seed)?\d+$"
)  # a suffix of the name of a run directory, which only distinguishes runs of the same spec


class CompareError(RuntimeFailure):
    """Raised if runs cannot be compared, or if an argument of `specc compare` names no runs."""

    code = "U017"
    exit_code = 2


@dataclass(frozen=True)
class Member:
    """A run in a group of a comparison."""

    run: Run

    @cached_property
    def history(self) -> RunHistory:
        return RunHistory.read(self.run.log)

    @property
    def name(self) -> str:
        return str(self.run.directory)

    @property
    def seed(self) -> int:
        return self.run.spec.train.seed

    @cached_property
    def kind(self) -> str:
        """A digest of the target, of the data, and of the spec without its seed. Runs with the same digest differ at
        most in the seed.
        """
        spec = self.run.spec
        spec = spec.model_copy(update={"train": spec.train.model_copy(update={"seed": 0})})
        digests = self.run.data_digests
        data = digests.model_dump_json() if digests is not None else self.run.data
        return hashlib.sha256("\n".join((canonical(spec), self.run.target, data)).encode()).hexdigest()


@dataclass(frozen=True)
class Group:
    """A group of runs, whose results are treated as samples of one distribution. `named` is True if the user chose the
    name of the group.
    """

    name: str
    members: tuple[Member, ...]
    named: bool = False

    @property
    def first(self) -> Member:
        return self.members[0]


def groups_of(words: Sequence[str]) -> tuple[Group, ...]:
    """Groups the runs that the arguments `words` of `specc compare` name.

    An argument has the form LIST or NAME=LIST. LIST contains entries, separated by commas. An entry is a run directory,
    the folder of a sweep, or a pattern such as `runs/a-*`. The runs of an argument NAME=LIST form one group with the
    name NAME. The runs of all arguments without a NAME are grouped automatically: runs that differ only in the seed
    form one group.

    Raises:
        CompareError: if an argument names no runs, a name is used twice, or a run is named twice.
        IntegrityError: if a run is damaged.
    """
    groups: dict[str, Group] = {}  # keyed by the kind of the runs, or, for a named group, by the index of the group
    for word in words:
        match = None if Path(word).exists() else NAMED.fullmatch(word)
        if match is None:
            for path, label in _runs(word):
                member = Member(Run.open(path))
                group = groups.get(member.kind)
                if group is None:
                    name = label if all(label != other.name for other in groups.values()) else member.name
                    group = Group(name, ())
                groups[member.kind] = replace(group, members=(*group.members, member))
        else:
            members = tuple(Member(Run.open(path)) for path, _ in _runs(match[2]))
            groups[f"{len(groups)}"] = Group(match[1], members, named=True)
    _require_different(tuple(groups.values()))
    return tuple(groups.values())


def _runs(word: str) -> Iterator[tuple[Path, str]]:
    for part in [word] if Path(word).exists() else word.split(","):
        plain = Path(part).exists()
        paths = [Path(part)] if plain else [Path(path) for path in sorted(glob.glob(part))]
        runs = [run for path in paths for run in _runs_at(path, named=plain)]
        if not runs:
            message = f"{part}: no such run" if not paths else f"{part} names no runs"
            raise CompareError(message, "name run directories, the folder of a sweep, or a pattern such as 'runs/a-*'")
        yield from runs


def _runs_at(path: Path, named: bool) -> Iterator[tuple[Path, str]]:
    if (record := SweepRecord.read(path) if path.is_dir() else None) is not None:
        yield from ((path / run.name, run.setting) for run in record.runs if is_run(path / run.name))
    elif is_run(path) or named:
        yield path, NUMBER.sub("", path.name)


def _require_different(groups: Sequence[Group]) -> None:
    names = [group.name for group in groups]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise CompareError(f"two groups have the name {twice}", "choose another name")
    places: dict[Path, str] = {}
    for group in groups:
        for member in group.members:
            path = member.run.directory.resolve()
            if path in places:
                message = f"{member.name} is named twice, in {places[path]} and {group.name}"
                raise CompareError(message, "name each run once")
            places[path] = group.name
