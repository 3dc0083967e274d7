"""The names of the stages of a side in generated code, and the check that no two names collide."""

import re
from collections.abc import Iterator, Sequence

from specc.compiler.architectures.stages import loops, owner_of
from specc.compiler.blocks.parts import Part
from specc.compiler.strict import Problem

LOOP = "a loop over time"


def collisions(side: str, stages: Sequence[Part]) -> Iterator[Problem]:
    """Yields a problem for each stage whose name in generated code collides with another name of the side.

    Paths are relative to the model.
    """
    titles = {stage.title: i for i, stage in enumerate(stages)}
    for i, what, name in _attributes(stages):
        if name in titles:
            message = f"{name} is also the name of {what} in the generated code"
            related = ((f"{what} belongs to this stage", (side, i)),) if i != titles[name] else ()
            yield Problem((side, titles[name]), "S207", message, "give one of the two another `name:`", related)
    known: dict[str, tuple[int, str, str]] = {}
    for i, what, owner in _classes(side, stages):
        # class names drop `_`, so a_1 and a1 collide; stages of blocks with one owner may share its classes
        first, other, shared = known.setdefault(re.sub(r"_(?=\d)", "", owner), (i, what, owner))
        if first != i and (shared != owner or LOOP in (what, other)):
            message = f"{what} and {other} would have the same class name in the generated code"
            yield Problem((side, i), "S207", message, "give one of them another `name:`", ((other, (side, first)),))


def _attributes(stages: Sequence[Part]) -> Iterator[tuple[int, str, str]]:
    """Yields the names in a side that are not titles of stages. Each entry is the index of a stage, a description, and
    a name."""
    for name, first, _ in loops(stages):
        yield first, LOOP, name
    for i, stage in enumerate(stages):
        yield from ((i, description, name) for name, description in stage.further_modules.items())


def _classes(side: str, stages: Sequence[Part]) -> Iterator[tuple[int, str, str]]:
    """Yields the base names of classes. Each entry is the index of the first stage of the class, a description, and the
    name."""
    for name, first, _ in loops(stages):
        yield first, LOOP, f"{side}_{name}"
    for i, stage in enumerate(stages):
        if "functions" in stage.traits:
            yield i, stage.title, owner_of(side, stage)
