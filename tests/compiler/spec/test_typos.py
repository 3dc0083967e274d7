"""No key is ignored: each key of the committed specs, misspelled in three ways, is an error at its line with a hint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specc.compiler.errors import Diagnostic, SpecError
from specc.compiler.spec.check import check
from specc.compiler.text.source import Source, read

SPECS = sorted((Path(__file__).parents[3] / "specs").glob("*.yaml"))
NAMES = ("learn", "read", "write", "changes")  # mappings whose keys are names that a spec chooses


def keys(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each key that is a field."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, tuple) else ()
    for key, value in items:
        if isinstance(key, str):
            yield (*path, key)
        if key not in NAMES and key != "fuse":
            yield from keys(value, (*path, key))


def renamed(data: Any, path: tuple[Any, ...], new: str) -> Any:
    key, *rest = path
    if isinstance(data, tuple):
        return tuple(renamed(item, tuple(rest), new) if i == key else item for i, item in enumerate(data))
    if not rest:
        return {new if its == key else its: value for its, value in data.items()}
    return {its: renamed(value, tuple(rest), new) if its == key else value for its, value in data.items()}


def typos(key: str) -> tuple[str, str, str]:
    """A letter dropped, two letters swapped, a letter replaced."""
    middle = len(key) // 2
    return (
        key[:middle] + key[middle + 1 :],
        key[: middle - 1] + key[middle] + key[middle - 1] + key[middle + 1 :],
        (key[:middle] + ("q" if key[middle] != "q" else "z") + key[middle + 1 :]),
    )


def cases() -> Iterator[tuple[Source, tuple[Any, ...]]]:
    """One place of each field of each kind of part that the committed specs have."""
    seen = set()
    for path in SPECS:
        source = read(path)
        for place in keys(source.data):
            shape = tuple("#" if isinstance(part, int) else part for part in place)
            if len(place[-1]) > 2 and shape not in seen:
                seen.add(shape)
                yield source, place


CASES = list(cases())


def test_there_are_many_fields() -> None:
    assert len(CASES) > 70


def test_every_misspelled_key_is_refused_and_most_are_suggested() -> None:
    suggested = total = 0
    missed = []
    for source, place in CASES:
        for typo in dict.fromkeys(typos(place[-1])):
            if typo in (place[-1], ""):
                continue
            with pytest.raises(SpecError) as caught:
                check(Source(source.file, source.text, renamed(source.data, place, typo)))
            unknown = [d for d in caught.value.diagnostics if names(d, typo, place[-1])]
            assert unknown, (place, typo, caught.value)
            total += 1
            if any(f"`{place[-1]}`" in f"{d.message} {d.hint}" for d in unknown):
                suggested += 1
            else:
                missed.append((place[-1], typo, unknown[0].hint))
    assert suggested >= 0.95 * total, missed


def names(diagnostic: Diagnostic, typo: str, key: str) -> bool:
    """Whether a diagnostic states the misspelled key, or that the part lacks the key that states its kind."""
    text = f"{diagnostic.message} {diagnostic.hint}"
    return f"`{typo}`" in text or (diagnostic.code == "S102" and f"`{key}`" in diagnostic.message)
