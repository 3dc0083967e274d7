"""The lock file of a spec: each node's fastest measured kernel and tile, and the machine of the measurement."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from specc.compiler import kernels
from specc.compiler.catalog import catalog
from specc.compiler.errors import Diagnostic, SpeccError, SpecError
from specc.compiler.expr import Keep
from specc.compiler.ir.op import ADDED, Op
from specc.compiler.kernels.kernel import Kernel, Site, symbol
from specc.compiler.strict import One, Positive, PositiveFloat, StrictModel
from specc.compiler.text.source import name_of, read, read_text

Word = Annotated[str, Field(min_length=1, max_length=200)]
Sites = Sequence[Sequence[Site]]  # for each save choice of a group, the nodes that have kernels
NodeKey = Annotated[str, Field(min_length=1, max_length=20_000)]


NOTHING: Mapping[str, Any] = {}


class LockError(SpeccError):
    """Raised if an entry of a lock cannot be used, or if a measurement must not replace an entry."""

    code = "U015"


class Entry(StrictModel):
    """The measured kernel of one node.

    Attributes:
        node: The path of the node.
        key: The text of the node (`Site.key`). The entry does not apply to a changed node.
        site: In locks of earlier versions, a digest of the node in place of `key`.
        kernel: The name of the fastest kernel.
        tile: The tile of this kernel.
        rows: The number of rows that the kernel processed in the measurement.
        length: The number of tokens per sequence in the measurement. None in locks of earlier versions.
        ms: The median time of the kernel.
        floor_ms: A lower bound of the time: the time that the node's bytes and operations take at the peak rates of the
            machine.
        others: The times in ms of the other kernels, each measured with its fastest tile.
    """

    node: Word
    key: NodeKey | None = None
    site: Word | None = None
    kernel: Word
    tile: Mapping[str, Any] | None = None
    rows: Positive
    length: Positive | None = None
    ms: PositiveFloat
    floor_ms: PositiveFloat
    others: Mapping[Word, PositiveFloat] = {}

    @model_validator(mode="after")
    def _names_its_node(self) -> "Entry":
        return _with_one_of(self, "key", "site")

    def applies_to(self, site: Site) -> bool:
        return self.key == site.key if self.key is not None else self.site == site_digest(site)


class GroupEntry(StrictModel):
    """The measured save choice of one group. A save choice is a choice of the values that the group's forward pass
    saves for its backward pass.

    Attributes:
        key: A digest of the nodes in all save choices (`group_key`). The entry does not apply to a changed group.
        group: In locks of earlier versions, the result of `group_digest` in place of `key`.
        keep: The fastest save choice.
        ms: The time of the group's kernels, forward and backward, for each save choice.
    """

    key: Word | None = None
    group: Word | None = None
    keep: Keep
    ms: Mapping[Keep, PositiveFloat]

    @model_validator(mode="after")
    def _names_its_group(self) -> "GroupEntry":
        return _with_one_of(self, "key", "group")

    def applies_to(self, options: Sites) -> bool:
        return self.key == group_key(options) if self.key is not None else self.group == group_digest(options)

    @model_validator(mode="after")
    def _has_a_time(self) -> "GroupEntry":
        if self.keep not in self.ms:
            raise ValueError(f"`keep` is {self.keep}, but `ms` has no time for this save choice")
        return self


Model = TypeVar("Model", bound=StrictModel)


def _with_one_of(entry: Model, new: str, old: str) -> Model:
    if (getattr(entry, new) is None) == (getattr(entry, old) is None):
        raise ValueError(f"an entry must have exactly one of `{new}` and `{old}`")
    return entry


class Machine(StrictModel):
    """The machine and software versions of an entry.

    The CUTLASS kernels were compiled by version `nvcc` of the compiler, with version `cutlass` of the headers. A
    version is None if the software was not installed, or if its version was not recorded. An entry with such a version
    does not match a machine that has the software.
    """

    gpu: Word
    driver: Word
    torch: Word
    triton: Word
    cuda: Word
    nvcc: Word | None = None
    cutlass: Word | None = None

    @property
    def versions(self) -> tuple[str, ...]:
        named = {"torch": self.torch, "triton": self.triton, "CUDA": self.cuda, "driver": self.driver}
        named |= {name: value for name, value in (("nvcc", self.nvcc), ("CUTLASS", self.cutlass)) if value is not None}
        return tuple(f"{name} {value}" for name, value in named.items())


class Timing(StrictModel):
    """The time of a node that a library computes. `ms` is the time of one call over `rows` rows in milliseconds."""

    node: Word
    rows: Positive
    ms: PositiveFloat


class StepTiming(StrictModel):
    """The time of a whole training step.

    Attributes:
        key: A digest of everything that runs in the step (`specc.compiler.report.step`).
        tokens: The number of tokens of the step.
        ms: The time in milliseconds.
        memory: The peak memory in bytes.
        classes: The time in milliseconds of each class of work that does not belong to a node of the plan.
    """

    key: Word
    tokens: Positive
    ms: PositiveFloat
    memory: Annotated[int, Field(ge=1)]
    classes: Mapping[Word, PositiveFloat] = {}


class TargetLock(StrictModel):
    """The measurements of one target.

    Attributes:
        machine: The machine of the measurements.
        kernels: The entries of kernels, by the symbol of the kernel.
        groups: The entries of groups, by the names of the group and of its first kernel.
        timings: The times of nodes that a library computes, by key (`Site.key`).
        step: The time of a whole training step.
    """

    machine: Machine
    kernels: Mapping[Word, Entry] = {}
    groups: Mapping[Word, GroupEntry] = {}
    timings: Mapping[NodeKey, Timing] = {}
    step: StepTiming | None = None


class Lock(StrictModel):
    """The measurements of one model, by target."""

    lock_version: One = 1
    targets: Mapping[Word, TargetLock] = {}

    def entry(self, target: str, site: Site) -> Entry | None:
        locked = self.targets.get(target)
        entry = locked.kernels.get(symbol(site)[1]) if locked else None
        return entry if entry is not None and entry.applies_to(site) else None

    def group(self, target: str, name: str, options: Sites) -> GroupEntry | None:
        locked = self.targets.get(target)
        entry = locked.groups.get(name) if locked else None
        return entry if entry is not None and entry.applies_to(options) else None

    def with_measured(
        self,
        target: str,
        machine: Machine,
        kernels: Mapping[str, Entry] = NOTHING,
        groups: Mapping[str, GroupEntry] = NOTHING,
        timings: Mapping[str, Timing] = NOTHING,
        step: StepTiming | None = None,
    ) -> "Lock":
        """Returns the lock with additional measurements of one target.

        Measurements of the target from another machine are dropped, because times of two machines cannot be compared.

        Args:
            target: the name of the target.
            machine: the machine of the measurements.
            kernels: entries of kernels, by the symbol of the kernel.
            groups: entries of groups, by name.
            timings: times of nodes that a library computes, by the key of the node (`Site.key`).
            step: the time of a whole step. None leaves the old time unchanged.
        """
        known = self.targets.get(target)
        if known is None or known.machine != machine:
            known = TargetLock(machine=machine)
        locked = TargetLock(
            machine=machine,
            kernels={**known.kernels, **kernels},
            groups={**known.groups, **groups},
            timings={**known.timings, **timings},
            step=step or known.step,
        )
        return self.model_copy(update={"targets": {**self.targets, target: locked}})

    def text(self) -> str:
        data = self.model_dump(mode="json", exclude_defaults=True) | {"lock_version": self.lock_version}
        return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=True) + "\n"


NO_LOCK = Lock.model_construct()
# `specc tune` reads the existing lock first, so it cannot repair an invalid entry
MEASURE_AGAIN = "delete the entry, or the whole lock, and measure again: specc tune"


def lock_path(spec: Path, name: str) -> Path:
    return spec.with_name(f"{name}.lock.json")


def read_lock(path: Path) -> Lock:
    """Returns the lock at `path`, or an empty lock if there is no file. Raises SpecError if the lock is invalid. The
    error states the file and line of each problem."""
    if not path.exists() and not path.is_symlink():  # a broken symbolic link must be an error, and not an empty lock
        return NO_LOCK
    try:
        text = read_text(path)
        with suppress(ValueError, RecursionError):  # the reader of specs is slower, but it locates the error
            return Lock.model_validate(json.loads(text, object_pairs_hook=_json_object))
        source = read(text, name_of(path))
    except SpecError as error:
        raise SpecError(_as_of_a_lock(error.diagnostics), error.texts) from None
    try:
        return Lock.model_validate(source.data)
    except ValidationError as error:
        from specc.compiler.spec.messages.expected import places
        from specc.compiler.spec.messages.pydantic_errors import diagnostics_of

        diagnostics, _ = diagnostics_of(error, source, dict(places(Lock, source.data)), Lock)
        raise SpecError(_as_of_a_lock(diagnostics), source.texts) from None


def _json_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns a JSON object with its lists as tuples. Raises ValueError for a repeated key, which a merge of two
    branches may cause."""
    data = {key: tuple(value) if isinstance(value, list) else value for key, value in pairs}
    if len(data) < len(pairs):
        raise ValueError("a key is repeated")
    return data


def _as_of_a_lock(diagnostics: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
    """Yields the diagnostics with a hint for lock files. The hint replaces the original hints, which tell users how to
    edit a spec."""
    hint = "specc tune writes this file: restore it, or delete it and measure again"
    return (replace(diagnostic, hint=hint) for diagnostic in diagnostics)


def refuse_fewer_rows(lock: Lock, target: str, machine: Machine, sites: Iterable[Site], rows: int) -> None:
    """Raises LockError if `machine` has already measured one of the nodes on more than `rows` rows.

    The fastest tile depends on the number of rows. A measurement on fewer rows must therefore not replace the entry of
    a node.

    Args:
        lock: The lock with earlier measurements.
        target: The name of the target.
        machine: The machine of the planned measurement.
        sites: The nodes to measure.
        rows: The number of rows of the planned measurement.
    """
    locked = lock.targets.get(target)
    known = (lock.entry(target, site) for site in sites if locked is not None and locked.machine == machine)
    if larger := next((entry for entry in known if entry is not None and entry.rows > rows), None):
        what = f"{larger.node} was measured on {larger.rows:,} rows, but this search has only {rows:,}"
        raise LockError(what, "use the micro-batch of training, or replace the measurement with --fresh")


def site_digest(site: Site) -> str:
    """Returns the key of a node in locks of earlier versions. The key is a digest of the target, the types of the node,
    and the `repr` of the node's op and epilogue. The key has twelve hex digits."""
    types, node = map(str, (*site.inputs, *site.node.types)), (site.node.op, site.epilogue)
    return _digest("\n".join((site.target.name, *map(_earlier_repr, node), *types)))


def _earlier_repr(op: Op | None) -> str:
    text = repr(op)
    for field in fields(op) if op is not None else ():
        if field.metadata == ADDED:
            text = text.replace(f", {field.name}={field.default!r}", "", 1)
    return text


def group_digest(options: Sites) -> str:
    """Returns the key of a group in locks of earlier versions. The key is a digest of the `site_digest` of the group's
    nodes, and has twelve hex digits. `options` lists the nodes that have kernels, for each save choice."""
    return _digest("\n".join(" ".join(map(site_digest, sites)) for sites in options))


def group_key(options: Sites) -> str:
    """Returns the key of a group. The key is a digest of the keys of the group's nodes, and has twelve hex digits.
    `options` lists the nodes that have kernels, for each save choice."""
    return _digest("\n\n".join("\n".join(site.key for site in sites) for sites in options))


def plan_key(kernel: Kernel, site: Site, tile: str) -> str:
    """Returns the plan key, a digest of node, target, kernel and tile with twelve hex digits. Every generated file of a
    kernel states the plan key.

    Args:
        kernel: The kernel that computes the node.
        site: The node and its target.
        tile: The tile of the kernel, as text (`Rendered.tile`). `kernel.tile` is None if a rule chooses the tile.
    """
    settings = json.dumps(tile_data(kernel), sort_keys=True)
    return _digest("\n".join((site.target.name, site.key, kernel.name, tile, settings)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def tile_data(kernel: Kernel) -> Mapping[str, Any] | None:
    """Returns the tile of a kernel in the form in which locks store it, or None if the kernel has no tile."""
    tile = getattr(kernel, "tile", None)
    return None if tile is None else {k: v for k, v in asdict(tile).items() if v is not None}


_tiles: Callable[[type], TypeAdapter[Any]] = cache(TypeAdapter)  # the validator of a class of tiles


def locked_kernel(entry: Entry) -> Kernel:
    """Returns the kernel that a lock entry names, with the tile of the entry.

    Raises LockError if this compiler does not have the kernel, or if the tile is invalid.
    """
    known_kernels: dict[str, Kernel] = {kernel.name: kernel for kernel in catalog(kernels, Kernel).values()}
    kernel, node = known_kernels.get(entry.kernel), entry.node
    if kernel is None:
        raise LockError(f"{node}: {entry.kernel} is not a kernel of this compiler", MEASURE_AGAIN)
    if entry.tile is None and kernel.TILE is None:
        return kernel
    if entry.tile is None:
        raise LockError(f"{node}: the entry has no tile; {entry.kernel} needs one", MEASURE_AGAIN)
    if kernel.TILE is None:
        raise LockError(f"{node}: the entry has a tile; {entry.kernel} takes none", MEASURE_AGAIN)
    if unknown := sorted(set(entry.tile) - {field.name for field in fields(kernel.TILE)}):
        raise LockError(f"{node}: {unknown[0]} is not a valid key of a tile of {entry.kernel}", MEASURE_AGAIN)
    try:
        tile = _tiles(kernel.TILE).validate_json(json.dumps(dict(entry.tile)), strict=True)
        return replace(kernel, tile=tile)  # type: ignore[call-arg]  # all kernels with tiles have it
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{key}: " for key in first["loc"])
        what = place + first["msg"].removeprefix("Value error, ")
        raise LockError(f"{node}: the tile is not valid for {entry.kernel}: {what}", MEASURE_AGAIN) from None
