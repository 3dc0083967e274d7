"""The names of the stages of a side in generated code, and the check that no two names collide."""

import re
from collections.abc import Iterator, Sequence

from specc.compiler.architectures.blocks_stage import BlocksStage, norm_name
from specc.compiler.architectures.time_loop import spans, step_name
from specc.compiler.blocks.parts import Part
from specc.compiler.strict import Problem

LOOP = "a loop over time"


def owner_of(side: str, stage: Part) -> str:
    """Returns the base name of the class that holds the functions of a stage."""
    return f"{side}_{stage.title}".removesuffix("s")


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
    """Yields the names of a side other than the titles of its stages. Each entry is the index of the stage that the
    name belongs to, a description, and the name."""
    for number, (first, _) in enumerate(spans(stages)):
        yield first, LOOP, step_name(number)
    for i, stage in enumerate(stages):
        if isinstance(stage, BlocksStage):
            yield i, f"the norm after {stage.title}", norm_name(stage.title)


def _classes(side: str, stages: Sequence[Part]) -> Iterator[tuple[int, str, str]]:
    """Yields the base names of classes. Each entry is the index of the first stage of the class, a description, and the
    name."""
    for number, (first, _) in enumerate(spans(stages)):
        yield first, LOOP, f"{side}_{step_name(number)}"
    for i, stage in enumerate(stages):
        if isinstance(stage, BlocksStage):
            yield i, stage.title, owner_of(side, stage)
