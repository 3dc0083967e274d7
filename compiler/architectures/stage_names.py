"""What the generated code calls the stages of a side and what belongs to them: no two things by one name."""

import re
from collections.abc import Iterator, Sequence

from specc.compiler.architectures.blocks_stage import BlocksStage, norm_name
from specc.compiler.architectures.time_loop import spans, step_name
from specc.compiler.blocks.parts import Part
from specc.compiler.strict import Problem

LOOP = "a loop over time"


def owner_of(side: str, stage: Part) -> str:
    """What the class of a stage's functions is called after."""
    return f"{side}_{stage.title}".removesuffix("s")


def collisions(side: str, stages: Sequence[Part]) -> Iterator[Problem]:
    """Stages that are called as something else of the side is; paths are relative to the model."""
    titles = {stage.title: i for i, stage in enumerate(stages)}
    for i, what, name in _attributes(stages):
        if name in titles:
            message = f"{name} is also the name of {what} in the generated code"
            related = ((f"{what} belongs to this stage", (side, i)),) if i != titles[name] else ()
            yield Problem((side, titles[name]), "S207", message, "give one of the two another `name:`", related)
    known: dict[str, tuple[int, str, str]] = {}
    for i, what, owner in _classes(side, stages):
        # words are joined, so that a_1 and a1 are one class; blocks of one owner share it, and others get numbers
        first, other, shared = known.setdefault(re.sub(r"_(?=\d)", "", owner), (i, what, owner))
        if first != i and (shared != owner or LOOP in (what, other)):
            message = f"{what} and {other} would be one class in the generated code"
            yield Problem((side, i), "S207", message, "give one of them another `name:`", ((other, (side, first)),))


def _attributes(stages: Sequence[Part]) -> Iterator[tuple[int, str, str]]:
    """The names of a side besides the titles of its stages, each behind the stage that it belongs to and what it is."""
    for number, (first, _) in enumerate(spans(stages)):
        yield first, LOOP, step_name(number)
    for i, stage in enumerate(stages):
        if isinstance(stage, BlocksStage):
            yield i, f"the norm behind {stage.title}", norm_name(stage.title)


def _classes(side: str, stages: Sequence[Part]) -> Iterator[tuple[int, str, str]]:
    """What classes are called after, each behind the first stage of what has it and what that is."""
    for number, (first, _) in enumerate(spans(stages)):
        yield first, LOOP, f"{side}_{step_name(number)}"
    for i, stage in enumerate(stages):
        if isinstance(stage, BlocksStage):
            yield i, stage.title, owner_of(side, stage)
