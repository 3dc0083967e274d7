"""What of a lock applies to a spec, and what was measured for something else."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from specc.compiler.plan.lock import Lock
from specc.compiler.plan.plan import Plan, sites_of

SHOWN = 4  # entries that a note names


@dataclass(frozen=True, slots=True)
class LockUse:
    """How many entries a lock has, and those that apply to no node of a spec, as target and name."""

    entries: int = 0
    idle: tuple[str, ...] = ()

    def note(self, spec: Path) -> str:
        """What to tell people; empty where every entry applies."""
        if not self.idle:
            return ""
        names = ", ".join(self.idle[:SHOWN])
        more = f" and {len(self.idle) - SHOWN} more" if len(self.idle) > SHOWN else ""
        many = f"{len(self.idle)} of {self.entries} lock entries apply to no node"
        return f"note: {many}: {names}{more}; to measure again: specc tune {shlex.quote(str(spec))}"


def lock_use(lock: Lock, plans: Mapping[str, Plan], known: tuple[str, ...]) -> LockUse:
    """What of a lock the plans take. Targets that are `known` to the spec and have no plan here are left out."""
    targets = [target for target in lock.targets if target in plans or target not in known]
    found = [one for target in targets for one in _of(lock, target, plans)]
    return LockUse(len(found), tuple(sorted(name for name, used in found if not used)))


def _of(lock: Lock, target: str, plans: Mapping[str, Plan]) -> Iterator[tuple[str, bool]]:
    """Each entry of one target, and whether it applies."""
    locked, plan = lock.targets[target], plans.get(target)
    choices = plan.every_choice if plan is not None else ()
    taken = [lock.entry(target, choice.site) for choice in choices]
    for name, entry in locked.kernels.items():
        yield f"{target} {name}", any(other is entry for other in taken)
    alternatives = plan.alternatives if plan is not None else ()
    kept = [lock.kept(target, found.name, sites_of(found.ways)) for found in alternatives]
    for name, group in locked.groups.items():
        yield f"{target} group {name}", any(other is group for other in kept)
