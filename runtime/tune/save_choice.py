"""For each fused group, selects which tensors the forward pass saves. Selects the choice with the shortest kernel
time.
"""

from specc.compiler.expr import Keep
from specc.compiler.plan.lock import GroupEntry, Lock, group_key
from specc.compiler.plan.plan import SaveChoices


def fastest(choices: SaveChoices, target: str, lock: Lock) -> GroupEntry | None:
    """Returns the save choice with the smallest sum of forward and backward kernel times in `lock`.

    Returns None if a kernel of any save choice is not measured. Library calls are not included, because they take equal
    time in all save choices.
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
