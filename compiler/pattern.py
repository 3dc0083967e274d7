"""Name patterns of rules and fusion points: `*` stands for any characters, dots included; `{a,b.*}` for one of
several, which may have a `*` too."""

import re
from functools import cache, lru_cache

CHOICES = re.compile(r"(\{[^{}]*\})")


@cache
def _parts(pattern: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """The parts that follow each other, each as its choices, each of these as the texts between its stars."""
    return tuple(
        tuple(tuple(choice.strip().split("*")) for choice in part[1:-1].split(","))
        if CHOICES.fullmatch(part)
        else (tuple(part.split("*")),)
        for part in CHOICES.split(pattern)
    )


def _ends(name: str, starts: set[int], texts: tuple[str, ...]) -> set[int]:
    """Where in `name` the texts, with any characters between them, may end that begin at one of `starts`."""
    for i, text in enumerate(texts):
        if i and starts:
            starts = set(range(min(starts), len(name) + 1))
        starts = {start + len(text) for start in starts if name.startswith(text, start)}
    return starts


@lru_cache(maxsize=2**16)  # rules ask again for each target and pass
def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` covers the whole of `name`, e.g. `blocks.*.{up,down}` covers `blocks.3.mlp.up`.

    The time grows with the product of the two lengths, whatever the pattern.
    """
    ends = {0}
    for choices in _parts(pattern):
        ends = set().union(*(_ends(name, ends, texts) for texts in choices))
    return len(name) in ends
