"""What a group keeps for its backward: the way whose kernels take the least time together."""

from specc.compiler.expr import Keep
from specc.compiler.plan.lock import Kept, Lock, group_key
from specc.compiler.plan.plan import Alternatives, sites_of


def fastest(found: Alternatives, target: str, lock: Lock) -> Kept | None:
    """The way to take by the times in `lock`: the sum over its kernels, forward and backward. What the library computes
    is alike in all ways and does not count. None while a kernel of one way is not measured."""
    times: dict[Keep, float] = {}
    for way in found.ways:
        entries = [lock.entry(target, choice.site) for choice in way.own]
        known = [entry.ms for entry in entries if entry is not None]
        if len(known) < len(entries):
            return None
        times[way.group.keep] = float(f"{sum(known):.4g}")
    return Kept(key=group_key(sites_of(found.ways)), keep=min(times, key=lambda keep: times[keep]), ms=times)


def told(found: Alternatives, kept: Kept) -> str:
    """What was found, in a line."""
    times = ", ".join(f"the {keep} {ms:.4f} ms" for keep, ms in kept.ms.items())
    return f"{found.label} keeps the {kept.keep}: {times}, forward and backward"
