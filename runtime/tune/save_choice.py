"""Selects the tensors that the forward pass of each fused group saves for the backward pass.

A save choice is a set of such tensors. The selected save choice has the shortest total kernel time.
"""

from specc.compiler.expr import Keep
from specc.compiler.plan.lock import GroupEntry, Lock, group_key
from specc.compiler.plan.plan import SaveChoices


def fastest(choices: SaveChoices, target: str, lock: Lock) -> GroupEntry | None:
    """Returns the save choice with the smallest sum of forward and backward kernel times in `lock`.

    Returns None unless the kernels of all save choices are measured. The sums do not include library calls, because
    these calls take the same time in all save choices.
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
    """Returns a line of text that states the selected save choice `entry`, and the times of all save choices."""
    times = ", ".join(f"the {keep} {ms:.4f} ms" for keep, ms in entry.ms.items())
    return f"{choices.label} saves the {entry.keep}: {times}, forward and backward"
