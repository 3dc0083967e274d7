"""The rules for the position of a stage in a side of an encoder-decoder."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from specc.compiler.architectures.stages import loops
from specc.compiler.blocks.parts import Part, Trait
from specc.compiler.strict import Path, Problem


@dataclass(frozen=True)
class Position:
    """A stage at its position among the stages of a side."""

    side: str
    stages: Sequence[Part]
    index: int

    @property
    def stage(self) -> Part:
        return self.stages[self.index]

    def has(self, trait: Trait) -> bool:
        return trait in self.stage.traits

    @property
    def reads_encoder(self) -> bool:
        return self.has("reads_source") or self.has("reads_final") or self.stage.query_stage is not None

    @property
    def lacks_value(self) -> bool:
        """Whether the stage reads the output of a stage that is not an earlier one."""
        reads = self.stage.reads
        return reads is not None and all(other.title != reads for other in self.stages[: self.index])

    @property
    def lacks_query(self) -> bool:
        """Whether the stage attends with the state of a stage that is not a later recurrent one."""
        query = self.stage.query_stage
        later = [other.title for other in self.stages[self.index + 1 :] if "recurrent" in other.traits]
        return query is not None and query not in later

    @cached_property
    def looped(self) -> bool:
        """Whether the stage is in a loop over time, and not its first."""
        return any(first < self.index <= last for _, first, last in loops(self.stages))


class Rule(NamedTuple):
    """A rule: the code of the error, the positions that break it, the message about a stage of a side, the hint, and
    the field at fault."""

    code: str
    broken: Callable[[Position], bool]
    message: str
    hint: str
    path: Path = ()


FIRST = "put `embed` (or, in a decoder, `repeat`) first, and only there"
BEFORE_THE_LOOP = "put it before the stage that attends with the state of a later stage"
RULES = (
    Rule("S233", lambda at: not at.index and not at.has("starts"), "the {side} starts with {title}", FIRST),
    Rule("S233", lambda at: at.index > 0 and at.has("starts"), "{title} is not the first stage of the {side}", FIRST),
    Rule(
        "S234",
        lambda at: at.side == "encoder" and at.reads_encoder,
        "{title} reads an encoder, but is a stage of the encoder",
        "move it to the decoder",
    ),
    Rule(
        "S235",
        lambda at: at.side == "decoder" and at.has("reads_future"),
        "{title} reads later tokens, which the decoder has not generated yet",
        "use `directions: forward`",
    ),
    Rule(
        "S236",
        lambda at: at.lacks_value,
        "{title} reads {reads}, which is not an earlier stage",
        "name an earlier stage",
    ),
    Rule(
        "S236",
        lambda at: at.lacks_query,
        "{title} attends with the state of {query}, which is not a later recurrent stage",
        "name an lstm that follows it",
    ),
    Rule(
        "S246",
        lambda at: isinstance(at.stage.wirings.get("write"), dict),
        "{title} writes several streams, but a stage has one output",
        "write one expression",
        ("write",),
    ),
    Rule(
        "S237",
        lambda at: at.looped and at.has("in_place") and not at.has("recurrent"),
        "{title} writes its cache in place, which is not possible in a loop over time",
        BEFORE_THE_LOOP,
    ),
    Rule(
        "S237",
        lambda at: at.looped and at.has("functions") and not at.has("in_place"),
        "{title} consists of several functions, which is not possible in a loop over time",
        BEFORE_THE_LOOP,
    ),
)


def stage_problems(side: str, stages: Sequence[Part]) -> Iterator[Problem]:
    """Yields the problems of the positions of stages. Paths are relative to the model."""
    for index, stage in enumerate(stages):
        position = Position(side, stages, index)
        for rule in RULES:
            if rule.broken(position):
                names = {"title": stage.title, "reads": stage.reads, "query": stage.query_stage}
                message = rule.message.format(side=side, **names)
                yield Problem((side, index, *rule.path), rule.code, message, rule.hint)
