"""Plans the runs of a sweep file: names, overrides and checked specs.

This module starts no runs and does not import Torch, so that any machine can check a sweep.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from specc.compiler.build import Planned, canonical, plan_loaded
from specc.compiler.errors import Diagnostic, SpeccError, SpecError, quote
from specc.compiler.plan.lock import lock_path, read_lock
from specc.compiler.report.storage import storage_of
from specc.compiler.spec.check import check_as, load
from specc.compiler.spec.spec import Spec
from specc.compiler.strict import Path as DataPath
from specc.compiler.text.overrides import FLAG
from specc.compiler.text.source import Source, read, read_from
from specc.runtime.storage.run_directory import lasting, readable
from specc.runtime.sweep.file import SEED, Quantization, Setting, SweepFile

SHOWN = 3  # the maximum number of settings in a message
MAX_SETTINGS = 10_000


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A training run of a sweep.

    Attributes:
        name: the name of the run directory.
        setting: the name of the setting.
        seed: the seed.
        overrides: all values of `--set` for the run.
        spec_digest: the SHA-256 (hex) of the spec with the overrides.
        estimated_bytes: the estimated size of the artifact; None if the spec has no section `quant`.
    """

    name: str
    setting: str
    seed: int
    overrides: tuple[str, ...]
    spec_digest: str
    estimated_bytes: int | None


@dataclass(frozen=True, slots=True)
class PlannedQuantization:
    """The quantization of a copy of a finished run.

    Attributes:
        name: the name of the directory of the copy.
        setting: the name of the entry of `quantize`.
        of: the name of the original run.
        seed: the seed of the original run.
        overrides: the values of `--set` for `specc quantize`.
    """

    name: str
    setting: str
    of: str
    seed: int
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlannedSweep:
    """A sweep whose file and specs were checked.

    Attributes:
        spec: the path of the spec.
        model: the name in the spec, which is also the name of the lock file.
        targets: the targets of the spec, or only the target that the sweep selects.
        data: the data, in the format of `specc train --data`; None for the default data of the spec.
        target: the target of all runs; None for the best target of the machine.
        runs, quantizations: the runs and quantizations, in the order of the file.
        entries: the name of the entry of `settings`, for each setting. Empty for a grid without entries.
        values: the value of each path of the grid, for each setting.
        metric: the value of `eval.metric` in the spec.
    """

    spec: Path
    model: str
    targets: tuple[str, ...]
    data: str | None
    target: str | None
    runs: tuple[PlannedRun, ...]
    quantizations: tuple[PlannedQuantization, ...]
    entries: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metric: str = ""

    @property
    def work(self) -> tuple[PlannedRun | PlannedQuantization, ...]:
        return (*self.runs, *self.quantizations)

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.setting for run in self.runs))


@dataclass(frozen=True, slots=True)
class _Override:
    """An override, and its position in the sweep file.

    An override is an entry of a list, such as `train.seed=1`, or a key of a grid with one of its values.

    Attributes:
        text: the override, such as `train.seed=1`.
        path: the position of the entry, or of the key.
        value: the position of the value in a grid. None for an entry of a list.
    """

    text: str
    path: DataPath
    value: DataPath | None = None

    @property
    def flag(self) -> str:
        return f"{FLAG} {self.text.partition('=')[0].strip()}" if "=" in self.text else FLAG

    def moved(self, problem: Diagnostic, sweep: Source) -> Diagnostic:
        offset = problem.mark.column - 1
        if self.value is None:
            place = sweep.inside(self.path, offset)
        else:
            place = sweep.key(self.path) if offset < self.text.index("=") else sweep.place(self.value)
        return replace(problem, file=place.file, mark=place.mark, related=())


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    entry: str
    overrides: tuple[_Override, ...]
    seeds: tuple[int, ...] | None
    values: Mapping[str, Any]


def read_sweep(path: Path, data: str | None = None, target: str | None = None) -> PlannedSweep:
    """Reads a sweep file, and checks the spec of every setting as `specc validate` does.

    Args:
        path: the sweep file.
        data, target: replacements for `data` and `target` of the file; None for the values in the file.

    Returns:
        The checked sweep.

    Raises:
        SpeccError: if the file is a spec.
        SpecError: if the sweep file or a spec is not valid. The error lists all problems.
    """
    source = read(path)
    if isinstance(source.data, dict) and "spec_version" in source.data:
        hint = f"write a sweep file with the line `spec: {path}`"
        raise SpeccError(f"{path} is a spec, not a sweep file", hint)
    file = check_as(SweepFile, source)
    spec = _spec_of(path, file)
    target, data = target or file.target, data or file.data
    points = math.prod(map(len, file.grid.values()))
    if points * max(len(file.settings), 1) > MAX_SETTINGS:
        message = f"the sweep has more than {MAX_SETTINGS:,} settings"
        place = source.place(("grid",))
        raise SpecError(
            [Diagnostic("S003", message, "split the sweep into several files", place.file, place.mark)], source.texts
        )
    settings = _with_unique_names(list(_settings(file)))
    plan = _Plan(spec, source, target, len(settings))
    runs: list[PlannedRun] = []
    firsts: dict[str, tuple[Spec, PlannedRun]] = {}
    folders = _folders([setting.name for setting in settings])
    for setting in settings:
        for planned, spec_of_run in plan.runs(setting, folders[setting.name]):
            firsts.setdefault(setting.name, (spec_of_run, planned))
            runs.append(planned)
    quantizations = list(plan.quantizations(file.quantize, firsts, runs, {run.name for run in runs}))
    plan.finish()
    metric, names = next(((s.eval.metric, s.name) for s, _ in firsts.values()), ("", ""))
    entries = {setting.name: setting.entry for setting in settings}
    values = {setting.name: setting.values for setting in settings}
    targets = (target,) if target is not None else next(iter(firsts.values()))[0].targets
    data = None if data is None else lasting(data)
    return PlannedSweep(spec, names, targets, data, target, tuple(runs), tuple(quantizations), entries, values, metric)


def _spec_of(path: Path, file: SweepFile) -> Path:
    spec = Path(file.spec).expanduser()
    beside = path.parent / spec
    return beside if not spec.exists() and beside.exists() else spec


def _settings(file: SweepFile) -> Iterator[_Setting]:
    shared = tuple(_Override(text, ("set", i)) for i, text in enumerate(file.set))
    keys = list(file.grid)
    entries = file.settings or (Setting(name=Path(file.spec).stem if not file.grid else "-"),)
    for number, entry in enumerate(entries):
        stated = tuple(_Override(text, ("settings", number, "set", i)) for i, text in enumerate(entry.set))
        for point in product(*(range(len(file.grid[key])) for key in keys)):
            values = {key: file.grid[key][i] for key, i in zip(keys, point, strict=True)}
            over = tuple(
                _Override(f"{key}={_as_yaml(values[key])}", ("grid", key), ("grid", key, i))
                for key, i in zip(keys, point, strict=True)
            )
            name = entry.name if file.settings or not file.grid else ""
            yield _Setting(
                setting_name(name, values), name, (*shared, *stated, *over), entry.seeds or file.seeds, values
            )


def setting_name(entry: str, values: Mapping[str, Any]) -> str:
    """Returns the name of a setting: the name of the entry, unless empty, and each value of the grid by its path."""
    labels = _labels(values)
    return ", ".join([*filter(None, [entry]), *(f"{labels[key]}={_shown(value)}" for key, value in values.items())])


def _with_unique_names(settings: Sequence[_Setting]) -> list[_Setting]:
    """Appends a digest of the overrides to names that earlier settings with other overrides have. The long values of
    such settings were cut. Settings that are added later change no name."""
    texts = [str([override.text for override in setting.overrides]) for setting in settings]
    first = {setting.name: text for setting, text in reversed([*zip(settings, texts, strict=True)])}
    return [
        s if text == first[s.name] else replace(s, name=f"{s.name} {hashlib.sha256(text.encode()).hexdigest()[:8]}")
        for s, text in zip(settings, texts, strict=True)
    ]


def _labels(keys: Mapping[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
        unique = (end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1)
        labels[key] = next(unique, key)
    return labels


def _as_yaml(value: Any) -> str:
    if isinstance(value, str):
        try:
            bare = read_from(f"x={value}", "", 2).data == value
        except SpecError:
            bare = False
        if bare:
            return value
    return json.dumps(value, ensure_ascii=False)


def _shown(value: Any) -> str:
    text = _as_yaml(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _folders(names: Sequence[str]) -> dict[str, str]:
    plain = {name: re.sub(r"[^A-Za-z0-9.=+]+", "_", name).strip("_.")[:80] or "setting" for name in names}
    counts = Counter(folder.lower() for folder in plain.values())  # case is ignored, as in some file systems
    return {
        name: folder if counts[folder.lower()] == 1 else f"{folder}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        for name, folder in plain.items()
    }


class _Plan:
    """Checks the specs of a sweep, and collects all problems.

    Args:
        spec: the path of the spec.
        sweep: the sweep file.
        target: the target of all runs; None to check all targets of the spec.
        count: the number of settings.
    """

    def __init__(self, spec: Path, sweep: Source, target: str | None, count: int) -> None:
        self._spec, self._sweep, self._target, self._count = spec, sweep, target, count
        self._problems: dict[Diagnostic, list[str]] = {}
        self._texts: dict[str, str] = dict(sweep.texts)
        self._known: dict[str, str] = {}  # maps the digest of a spec, without its seed, to a setting
        self._require_readable()  # once here, instead of once per setting

    def _require_readable(self) -> None:
        try:
            read(self._spec)
        except SpecError as error:
            if error.code != "S001":  # the file exists, and the error is in its text
                raise
            message = f"{quote(str(self._spec), 200)}: {error.diagnostics[0].message}"
            hint = "write a path relative to the working directory, or to the folder of the sweep file"
            raise SpecError([Diagnostic("S001", message, hint, *self._at(("spec",)))], self._texts) from None

    def runs(self, setting: _Setting, folder: str) -> Iterator[tuple[PlannedRun, Spec]]:
        """Yields the runs of a setting with their specs. Yields nothing if the spec of the setting is not valid."""
        texts = tuple(override.text for override in setting.overrides)
        try:
            spec, source = load(self._spec, texts)
            targets = (self._target,) if self._target is not None else ()
            self._require_target(spec)
            planned = plan_loaded(spec, source, targets, read_lock(lock_path(self._spec, spec.name)))
        except SpecError as error:
            self._note(error, setting.name, setting.overrides)
            return
        self._require_new(spec, setting)
        size = estimated_bytes(planned)
        for seed in setting.seeds or (spec.train.seed,):
            over = texts if setting.seeds is None else (*texts, f"{SEED}={seed}")
            seeded = spec if seed == spec.train.seed else load(self._spec, over)[0]
            name = f"{folder}-seed{seed}"
            yield PlannedRun(name, setting.name, seed, over, digest_of(seeded), size), seeded

    def quantizations(
        self,
        entries: Sequence[Quantization],
        firsts: Mapping[str, tuple[Spec, PlannedRun]],
        runs: Sequence[PlannedRun],
        taken: set[str],
    ) -> Iterator[PlannedQuantization]:
        """Yields the planned quantizations.

        Args:
            entries: the entries of `quantize` in the sweep file.
            firsts: the spec and the first run of each setting, by the name of the setting.
            runs: the training runs of the sweep.
            taken: the names of directories that other runs of the sweep already use.
        """
        folders = _folders([entry.name for entry in entries])
        names = tuple(dict.fromkeys(run.setting for run in runs))
        for number, entry in enumerate(entries):
            of = entry.of if entry.of is not None else next(iter(names), "")
            if of not in firsts:
                if entry.of is not None and not self._problems:
                    choices = ", ".join(quote(name) for name in names[:SHOWN])
                    message = f"{quote(entry.name)} quantizes {quote(of)}, which is not a setting"
                    place = self._at(("quantize", number, "of"))
                    self._problems[Diagnostic("S503", message, f"the settings are {choices}", *place)] = []
                continue
            over = tuple(_Override(text, ("quantize", number, "set", i)) for i, text in enumerate(entry.set))
            if not self._quantizes(firsts[of][0], entry.name, over, number):
                continue
            for run in runs:
                if run.setting == of:
                    name = f"quantized_{folders[entry.name]}-seed{run.seed}"
                    yield PlannedQuantization(name, entry.name, run.name, run.seed, tuple(entry.set))

    def _quantizes(self, spec: Spec, name: str, overrides: tuple[_Override, ...], number: int) -> bool:
        place = self._at(("quantize", number))
        if spec.quant is None:
            message = f"{quote(name)}: the spec has no section `quant`"
            self._problems[Diagnostic("S503", message, "add the section, or remove `quantize`", *place)] = []
            return False
        try:
            other, source = load(readable(spec), tuple(override.text for override in overrides))
            if other.model_copy(update={"quant": spec.quant}) != spec:
                message = f"{quote(name)} may change only `quant`, because the run is already trained"
                self._problems[Diagnostic("S503", message, "add a setting instead", *place)] = []
                return False
            plan_loaded(other.at_rest, source, (self._target,) if self._target is not None else ())
        except SpecError as error:
            self._note(error, name, overrides, place)
            return False
        return True

    def finish(self) -> None:
        if not self._problems:
            return
        diagnostics = []
        for problem, settings in self._problems.items():
            more = f" and {len(settings) - SHOWN} more" if len(settings) > SHOWN else ""
            names = ", ".join(quote(name) for name in settings[:SHOWN]) + more
            where = f"the setting{'s' if len(settings) > 1 else ''} {names}"
            where = "every setting" if len(settings) == self._count > 1 else where
            message = f"{problem.message} (in {where})"
            diagnostics.append(replace(problem, message=message) if settings else problem)
        raise SpecError(diagnostics, self._texts)

    def _note(
        self, error: SpecError, setting: str, overrides: Sequence[_Override], instead: tuple[str, Any] | None = None
    ) -> None:
        """Records problems in the spec of a setting.

        If an override causes a problem, the recorded position is the position of the override in the sweep file.
        Otherwise, the recorded position is `instead`. If `instead` is None, the recorded position is the position in
        the spec file.
        """
        self._texts |= error.texts
        for diagnostic in error.diagnostics:
            override = next((over for over in reversed(overrides) if over.flag == diagnostic.file), None)
            placed = diagnostic if override is None else override.moved(diagnostic, self._sweep)
            if override is None and instead is not None:
                placed = replace(diagnostic, file=instead[0], mark=instead[1], related=())
            names = self._problems.setdefault(placed, [])
            if setting not in names:
                names.append(setting)

    def _require_target(self, spec: Spec) -> None:
        if self._target is None or self._target in spec.targets:
            return
        message = f"the spec does not list the target {quote(self._target)}"
        hint = f"its targets are {', '.join(spec.targets)}"
        raise SpecError([Diagnostic("S104", message, hint, *self._at(("target",)))], self._texts)

    def _require_new(self, spec: Spec, setting: _Setting) -> None:
        alike = digest_of(spec.model_copy(update={"train": spec.train.model_copy(update={"seed": 0})}))
        first = self._known.get(alike)
        if first is None:
            self._known[alike] = setting.name
        else:
            message = f"the settings {quote(first)} and {quote(setting.name)} have the same spec"
            unshared = [over for over in setting.overrides if over.path[:1] != ("set",)]
            path = (unshared[-1].value or unshared[-1].path) if unshared else ()
            self._problems[Diagnostic("S501", message, "remove one of them", *self._at(path))] = []

    def _at(self, path: DataPath) -> tuple[str, Any]:
        place = self._sweep.place(path)
        return place.file, place.mark


def digest_of(spec: Spec) -> str:
    """Returns the SHA-256 (hex) of a spec, which is also the digest that a run records."""
    return hashlib.sha256(canonical(spec).encode()).hexdigest()


def estimated_bytes(planned: Planned) -> int | None:
    """Returns the estimated size of the artifact in bytes; None if the spec has no section `quant`."""
    if planned.spec.quant is None:
        return None
    target, plan = next(iter(planned.plans.items()))
    return storage_of(planned.spec, plan.programs, target).bytes
