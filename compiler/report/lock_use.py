"""Determines which entries of a lock, the file with measured kernels and tiles, apply to a spec."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from specc.compiler.plan.lock import Lock
from specc.compiler.plan.plan import Plan
from specc.compiler.report.step import step_of, without_storage
from specc.compiler.spec.spec import Spec
from specc.compiler.text.shell import shell_path

SHOWN = 4  # the most entries that a note names


class LockUse(NamedTuple):
    """The number of entries of a lock, and the names of the entries that no plan uses."""

    entries: int = 0
    idle: tuple[str, ...] = ()

    def note(self, spec: Path) -> str:
        if not self.idle:
            return ""
        names = ", ".join(self.idle[:SHOWN])
        more = f" and {len(self.idle) - SHOWN} more" if len(self.idle) > SHOWN else ""
        many = f"{len(self.idle)} of {self.entries} lock entries apply to no node"
        return f"note: {many}: {names}{more}; to measure again: specc tune {shell_path(spec)}"


def lock_use(lock: Lock, plans: Mapping[str, Plan], spec: Spec) -> LockUse:
    """Returns which entries of a lock no plan uses. If a target of the spec has no plan in `plans`, its entries are
    ignored."""
    targets = [target for target in lock.targets if target in plans or target not in spec.targets]
    entries = [entry for target in targets for entry in _of(lock, target, plans, spec)]
    return LockUse(len(entries), tuple(sorted(name for name, used in entries if not used)))


def _of(lock: Lock, target: str, plans: Mapping[str, Plan], spec: Spec) -> Iterator[tuple[str, bool]]:
    locked, plan = lock.targets[target], plans.get(target)
    choices = plan.every_choice if plan is not None else ()
    taken = [lock.entry(target, choice.site) for choice in choices]
    for name, entry in locked.kernels.items():
        yield f"{target} {name}", any(other is entry for other in taken)
    save_choices = plan.save_choices if plan is not None else ()
    entries = [lock.group(target, choices.name, choices.sites) for choices in save_choices]
    for name, group in locked.groups.items():
        yield f"{target} group {name}", any(other is group for other in entries)
    if locked.timings or locked.step is not None:
        step = step_of(spec, plan) if plan is not None else None
        keys = {row.site.key for row in step.rows if row.site is not None} if step is not None else set()
        timings = locked.timings.items()
        yield from ((f"{target} {timing.node}", without_storage(key) in keys) for key, timing in timings)
        if locked.step is not None:
            yield f"{target} step", step is not None and step.timing is not None
