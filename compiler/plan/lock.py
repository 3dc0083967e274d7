"""The lock beside a spec: which kernel and tile was measured fastest for each node, on which machine."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from specc.compiler import kernels
from specc.compiler.catalog import catalog
from specc.compiler.errors import Diagnostic, SpeccError, SpecError
from specc.compiler.expr import Keep
from specc.compiler.kernels.kernel import Kernel, Site, symbol
from specc.compiler.spec.messages.expected import places
from specc.compiler.spec.messages.pydantic_errors import diagnostics_of
from specc.compiler.strict import One, Positive, PositiveFloat, StrictModel
from specc.compiler.text.source import read

Word = Annotated[str, Field(min_length=1, max_length=200)]
Sites = Sequence[Sequence[Site]]  # the nodes with kernels of one group, in each of its save choices
NodeKey = Annotated[str, Field(min_length=1, max_length=20_000)]


class Entry(StrictModel):
    """The kernel of one node. `key` states the node (`Site.key`): another node does not get its tile.

    `ms` is the kernel's time, a median over `rows` rows; `floor_ms` is what bytes and operations cost at the machine's
    ceilings; `others` are the times of the other kernels, each with its best tile. Locks of earlier versions have
    `site`, a digest of the node, instead of `key`.
    """

    node: Word
    key: NodeKey | None = None
    site: Word | None = None
    kernel: Word
    tile: Mapping[str, Any] | None = None
    rows: Positive
    ms: PositiveFloat
    floor_ms: PositiveFloat
    others: Mapping[Word, PositiveFloat] = {}

    @model_validator(mode="after")
    def _names_its_node(self) -> "Entry":
        return _with_one_of(self, "key", "site")

    def applies_to(self, site: Site) -> bool:
        """Whether this very node was measured."""
        return self.key == site.key if self.key is not None else self.site == site_digest(site)


class GroupEntry(StrictModel):
    """What one group saves for its backward. `key` is a digest of its nodes in all its save choices (`group_key`): what
    was measured for another group says nothing of it. `ms` is the time of all its kernels, forward and backward, by
    choice. Locks of earlier versions have `group`, another digest, instead of `key`."""

    key: Word | None = None
    group: Word | None = None
    keep: Keep
    ms: Mapping[Keep, PositiveFloat]

    @model_validator(mode="after")
    def _names_its_group(self) -> "GroupEntry":
        return _with_one_of(self, "key", "group")

    def applies_to(self, options: Sites) -> bool:
        """Whether this very group was measured."""
        return self.key == group_key(options) if self.key is not None else self.group == group_digest(options)

    @model_validator(mode="after")
    def _has_a_time(self) -> "GroupEntry":
        if self.keep not in self.ms:
            raise ValueError(f"what is saved, {self.keep}, has no time")
        return self


Model = TypeVar("Model", bound=StrictModel)


def _with_one_of(entry: Model, new: str, old: str) -> Model:
    """The entry itself. Raises ValueError unless it has exactly one of two fields."""
    if (getattr(entry, new) is None) == (getattr(entry, old) is None):
        raise ValueError(f"an entry has a {new}, or in locks of earlier versions a {old}")
    return entry


class Machine(StrictModel):
    """Where an entry was measured. `nvcc` and `cutlass`, the headers, are what its CUTLASS kernels were compiled with;
    None where there is neither, and in a lock written before they were noted: that is another machine to every one."""

    gpu: Word
    driver: Word
    torch: Word
    triton: Word
    cuda: Word
    nvcc: Word | None = None
    cutlass: Word | None = None

    @property
    def versions(self) -> tuple[str, ...]:
        """Each with its name, as people are told them."""
        named = {"torch": self.torch, "triton": self.triton, "CUDA": self.cuda, "driver": self.driver}
        named |= {name: value for name, value in (("nvcc", self.nvcc), ("CUTLASS", self.cutlass)) if value is not None}
        return tuple(f"{name} {value}" for name, value in named.items())


class Timing(StrictModel):
    """The time of a node that a library computes, so that there is no tile to choose: `ms` is of one call, over `rows`
    rows."""

    node: Word
    rows: Positive
    ms: PositiveFloat


class StepTiming(StrictModel):
    """A whole training step. `key` is of everything that runs in one (`specc.compiler.report.step`); `tokens` are those
    of the step, `memory` the most bytes that it took, and `classes` the milliseconds of each class of work that is no
    node of the plan."""

    key: Word
    tokens: Positive
    ms: PositiveFloat
    memory: Annotated[int, Field(ge=1)]
    classes: Mapping[Word, PositiveFloat] = {}


class TargetLock(StrictModel):
    """What was measured for one target: kernels by symbol, what groups keep by name and first kernel, nodes that
    libraries compute by key, and a whole step."""

    machine: Machine
    kernels: Mapping[Word, Entry] = {}
    groups: Mapping[Word, GroupEntry] = {}
    timings: Mapping[NodeKey, Timing] = {}
    step: StepTiming | None = None


class Lock(StrictModel):
    """Everything measured for one model, by target."""

    lock_version: One = 1
    targets: Mapping[Word, TargetLock] = {}

    def entry(self, target: str, site: Site) -> Entry | None:
        """What was measured for this very node; None where nothing was."""
        locked = self.targets.get(target)
        found = locked.kernels.get(symbol(site)[1]) if locked else None
        return found if found is not None and found.applies_to(site) else None

    def group(self, target: str, name: str, options: Sites) -> GroupEntry | None:
        """What was measured fastest to keep for this very group; None where nothing was measured."""
        locked = self.targets.get(target)
        entry = locked.groups.get(name) if locked else None
        return entry if entry is not None and entry.applies_to(options) else None

    def with_entry(self, target: str, name: str, entry: Entry, machine: Machine) -> "Lock":
        """The lock with one entry set. What another machine measured for the target is dropped: times of two
        machines say nothing about each other."""
        known = self._measured_on(target, machine)
        return self._with(target, known.model_copy(update={"kernels": {**known.kernels, name: entry}}))

    def with_group(self, target: str, name: str, entry: GroupEntry, machine: Machine) -> "Lock":
        """The lock with what one group keeps, and without what another machine measured."""
        known = self._measured_on(target, machine)
        return self._with(target, known.model_copy(update={"groups": {**known.groups, name: entry}}))

    def with_timing(self, target: str, key: str, timing: Timing, machine: Machine) -> "Lock":
        """The lock with the time of a node that a library computes, and without what another machine measured."""
        known = self._measured_on(target, machine)
        return self._with(target, known.model_copy(update={"timings": {**known.timings, key: timing}}))

    def with_step(self, target: str, step: StepTiming, machine: Machine) -> "Lock":
        """The lock with the time of a whole step, and without what another machine measured."""
        return self._with(target, self._measured_on(target, machine).model_copy(update={"step": step}))

    def _measured_on(self, target: str, machine: Machine) -> TargetLock:
        known = self.targets.get(target)
        return known if known is not None and known.machine == machine else TargetLock(machine=machine)

    def _with(self, target: str, locked: TargetLock) -> "Lock":
        return self.model_copy(update={"targets": {**self.targets, target: locked}})

    def text(self) -> str:
        """The file's text: sorted, a value a line, so that a diff shows what changed."""
        data = self.model_dump(mode="json", exclude_defaults=True) | {"lock_version": self.lock_version}
        return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=True) + "\n"


NO_LOCK = Lock()
# tune starts from the lock, so that it cannot mend an entry by itself
MEASURE_AGAIN = "delete the entry, or the whole lock, and measure again: specc tune"


def lock_path(spec: Path, name: str) -> Path:
    """Where the lock of a spec file stands."""
    return spec.with_name(f"{name}.lock.json")


def read_lock(path: Path) -> Lock:
    """The lock at `path`, an empty one where there is none. Raises SpecError with file and line of what is wrong."""
    if not path.exists() and not path.is_symlink():  # one that leads nowhere is an error of its own
        return NO_LOCK
    try:
        source = read(path)
    except SpecError as error:
        raise SpecError(_as_of_a_lock(error.diagnostics), error.texts) from None
    try:
        return Lock.model_validate(source.data)
    except ValidationError as error:
        diagnostics, _ = diagnostics_of(error, source, dict(places(Lock, source.data)), Lock)
        raise SpecError(_as_of_a_lock(diagnostics), source.texts) from None


def _as_of_a_lock(diagnostics: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
    """What is wrong, without help that is meant for specs: nobody writes a lock by hand."""
    hint = "specc tune writes this file: restore it, or delete it and measure again"
    return (replace(one, hint=hint) for one in diagnostics)


def refuse_fewer_rows(lock: Lock, target: str, machine: Machine, sites: Iterable[Site], rows: int) -> None:
    """Raises SpeccError where `machine` has measured a node on more rows: on few, other tiles are fastest."""
    locked = lock.targets.get(target)
    known = (lock.entry(target, site) for site in sites if locked is not None and locked.machine == machine)
    if larger := next((entry for entry in known if entry is not None and entry.rows > rows), None):
        what = f"{larger.node} was measured on {larger.rows:,} rows, and would now be on {rows:,}"
        raise SpeccError(what, "tune the micro-batch that is trained with; to replace what was measured, --fresh")


def site_digest(site: Site) -> str:
    """The node of an entry in locks of earlier versions: twelve hex digits over `repr` of the op and epilogue."""
    words = (
        site.target.name,
        repr(site.node.op),
        repr(site.epilogue),
        *map(str, site.inputs),
        *map(str, site.node.types),
    )
    return _digest("\n".join(words))


def group_digest(options: Sites) -> str:
    """The group of an entry in locks of earlier versions: twelve hex digits over `site_digest` of its nodes."""
    return _digest("\n".join(" ".join(map(site_digest, sites)) for sites in options))


def group_key(options: Sites) -> str:
    """Twelve hex digits over the keys of a group's nodes, in each of its save choices."""
    return _digest("\n\n".join("\n".join(site.key for site in sites) for sites in options))


def plan_key(kernel: Kernel, site: Site, tile: str) -> str:
    """Twelve hex digits of what was planned: node, target, kernel and tile. All files of a kernel state its plan key.

    Args:
        kernel: the kernel that computes the node.
        site: the node and its target.
        tile: the effective tile as `Rendered.tile` has it: a kernel that was not measured takes one by rule.
    """
    settings = json.dumps(tile_data(kernel), sort_keys=True)
    return _digest("\n".join((site.target.name, site.key, kernel.name, tile, settings)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def tile_data(kernel: Kernel) -> Mapping[str, Any] | None:
    """A kernel's tile as a lock holds it."""
    tile = getattr(kernel, "tile", None)
    return None if tile is None else {k: v for k, v in asdict(tile).items() if v is not None}


def locked_kernel(entry: Entry) -> Kernel:
    """The kernel that an entry names, with its tile. Raises SpeccError for one that this compiler does not have."""
    known_kernels: dict[str, Kernel] = {kernel.name: kernel for kernel in catalog(kernels, Kernel).values()}
    kernel = known_kernels.get(entry.kernel)
    hint = MEASURE_AGAIN
    if kernel is None:
        raise SpeccError(
            f"the lock names kernel {entry.kernel} for {entry.node}, which this compiler does not have", hint
        )
    if entry.tile is None and kernel.TILE is None:
        return kernel
    if entry.tile is None:
        raise SpeccError(f"the lock gives {entry.kernel} no tile for {entry.node}, and it was measured with one", hint)
    if kernel.TILE is None:
        raise SpeccError(f"the lock gives {entry.kernel} a tile for {entry.node}, but it has none", hint)
    known = {field.name for field in fields(kernel.TILE)}
    if unknown := sorted(set(entry.tile) - known):
        raise SpeccError(f"the lock's tile for {entry.node} has {unknown[0]}, which tiles of {entry.kernel} lack", hint)
    try:
        tile: Any = TypeAdapter(kernel.TILE).validate_json(json.dumps(dict(entry.tile)), strict=True)
        settings: dict[str, Any] = {"tile": tile}
        return replace(kernel, **settings)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{word}: " for word in (".".join(map(str, first["loc"])),) if word)
        what = place + first["msg"].removeprefix("Value error, ")
        raise SpeccError(f"the lock's tile for {entry.node} is not one of {entry.kernel}: {what}", hint) from None
