"""Selects the save choice of a group with the shortest total kernel time."""

from specc.compiler.expr import Keep
from specc.compiler.plan.lock import GroupEntry, Lock, group_key
from specc.compiler.plan.plan import SaveChoices


def fastest(choices: SaveChoices, target: str, lock: Lock) -> GroupEntry | None:
    """Returns the save choice whose kernels, forward and backward, have the smallest sum of times in `lock`.

    The times of library calls are not included, because they are equal for all save choices. Returns None until all
    kernels of all save choices are measured.
    """
    times: dict[Keep, float] = {}
    for option in choices.options:
        entries = [lock.entry(target, choice.site) for choice in option.kernels]
        known = [entry.ms for entry in entries if entry is not None]
        if len(known) < len(entries):
            return None
        times[option.group.keep] = float(f"{sum(known):.4g}")
    return GroupEntry(key=group_key(choices.sites), keep=min(times, key=lambda keep: times[keep]), ms=times)


def line(choices: SaveChoices, entry: GroupEntry) -> str:
    """Returns the result as one line of text."""
    times = ", ".join(f"the {keep} {ms:.4f} ms" for keep, ms in entry.ms.items())
    return f"{choices.label} saves the {entry.keep}: {times}, forward and backward"
