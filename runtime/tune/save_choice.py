"""What a group saves for its backward: the choice whose kernels take the least time together."""

from specc.compiler.expr import Keep
from specc.compiler.plan.lock import GroupEntry, Lock, group_key
from specc.compiler.plan.plan import SaveChoices


def fastest(choices: SaveChoices, target: str, lock: Lock) -> GroupEntry | None:
    """The save choice to take by the times in `lock`: the sum over its kernels, forward and backward. What the library
    computes is alike in all of them and does not count. None while a kernel of one option is not measured."""
    times: dict[Keep, float] = {}
    for option in choices.options:
        entries = [lock.entry(target, choice.site) for choice in option.kernels]
        known = [entry.ms for entry in entries if entry is not None]
        if len(known) < len(entries):
            return None
        times[option.group.keep] = float(f"{sum(known):.4g}")
    return GroupEntry(key=group_key(choices.sites), keep=min(times, key=lambda keep: times[keep]), ms=times)


def line(choices: SaveChoices, entry: GroupEntry) -> str:
    """The result in a line."""
    times = ", ".join(f"the {keep} {ms:.4f} ms" for keep, ms in entry.ms.items())
    return f"{choices.label} saves the {entry.keep}: {times}, forward and backward"
