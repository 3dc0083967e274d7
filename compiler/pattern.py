"""Name patterns of rules and fusion points.

`*` matches any characters, including dots. `{a,b.*}` matches any of the listed alternatives, which may contain `*`.
"""

import re
from functools import cache, lru_cache

CHOICES = re.compile(r"(\{[^{}]*\})")


@cache
def _parts(pattern: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Splits a pattern into consecutive parts. A part is a tuple of alternatives. An alternative is a tuple of the
    literal texts between its `*`."""
    return tuple(
        tuple(tuple(choice.strip().split("*")) for choice in part[1:-1].split(","))
        if CHOICES.fullmatch(part)
        else (tuple(part.split("*")),)
        for part in CHOICES.split(pattern)
        if part
    )


def _ends(name: str, starts: set[int], texts: tuple[str, ...]) -> set[int]:
    """Returns the end positions of all matches in `name` that begin at a position of `starts`. A match consists of all
    `texts` in order, with any characters between two consecutive texts."""
    for i, text in enumerate(texts):
        if text not in name:
            return set()
        if i and starts:
            starts = set(range(min(starts), len(name) + 1))
        if text:
            starts = {start + len(text) for start in starts if name.startswith(text, start)}
    return starts


def of_all_blocks(pattern: str) -> str:
    """Returns `pattern` with `*` in place of the indices of blocks: `blocks.*.mlp` for `blocks.0.mlp`."""
    words = pattern.split(".")
    return ".".join("*" if re.search(r"\d", word) and not re.search(r"[a-z]", word) else word for word in words)


@lru_cache(maxsize=2**16)  # cached, because the same patterns and names are matched for each target and pass
def matches(pattern: str, name: str) -> bool:
    """Returns whether `pattern` matches the whole of `name`: `blocks.*.{up,down}` matches `blocks.3.mlp.up`.

    The run time is bounded by the product of the lengths of `pattern` and `name`.
    """
    ends = {0}
    for choices in _parts(pattern):
        ends = set().union(*[_ends(name, ends, texts) for texts in choices]) if ends else ends
    return len(name) in ends
