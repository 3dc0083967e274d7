"""The rules for the positions and the names of the stages of an encoder or a decoder."""

import re
from collections.abc import Iterator, Sequence

from specc.compiler.architectures.side import groups, owner_of
from specc.compiler.blocks.parts import Part
from specc.compiler.strict import Problem

LOOP = "a loop over time"
FIRST = "put `embed` (or, in a decoder, `repeat`) first, and only there"
PER_TOKEN = "cannot stand between an additive stage and its `query`, because these stages run token by token"


def position_problems(side: str, stages: Sequence[Part]) -> Iterator[Problem]:
    """Yields the problems of stages in invalid positions. `side` is `encoder` or `decoder`. Paths are relative to the
    model."""
    looped = {first + i for _, first, group in groups(stages) for i in range(1, len(group))}
    for i, stage in enumerate(stages):
        earlier, later = [other.title for other in stages[:i]], stages[i + 1 :]

        def problem(code: str, message: str, hint: str, *field: str, at: int = i) -> Problem:
            return Problem((side, at, *field), code, message, hint)

        title, traits, query = stage.title, stage.traits, stage.query_stage
        if i == 0 and "starts" not in traits:
            yield problem("S233", f"{title} cannot be the first stage of the {side}", FIRST)
        if i > 0 and "starts" in traits:
            yield problem("S233", f"{title} can only be the first stage of the {side}", FIRST)
        if side == "encoder" and (traits & {"reads_source", "reads_final"} or query is not None):
            yield problem(
                "S234", f"{title} reads the encoder, but is itself a stage of the encoder", "move it to the decoder"
            )
        if side == "decoder" and "reads_future" in traits:
            message = f"{title} reads later tokens, which the decoder has not generated yet"
            yield problem("S235", message, "use `directions: forward`")
        if stage.reads is not None and stage.reads not in earlier:
            message = f"{title} reads `{stage.reads}`, but no earlier stage has this name"
            yield problem("S236", message, "name an earlier stage")
        if query is not None and query not in [other.title for other in later if "recurrent" in other.traits]:
            message = f"{title} attends with the state of `{query}`, but no later lstm has this name"
            yield problem("S236", message, "name a later lstm")
        if isinstance(stage.wirings.get("write"), dict):
            message = f"{title} writes several streams, but a stage has one output"
            yield problem("S246", message, "write one expression instead of a mapping", "write")
        whole = "recurrent" not in traits if "in_place" in traits else "functions" in traits
        if i in looped and whole:
            yield problem("S237", f"{title} {PER_TOKEN}", "put it before the additive stage")


def name_problems(side: str, stages: Sequence[Part]) -> Iterator[Problem]:
    """Yields a problem for each stage whose name in generated code collides with another name of the side. Paths begin
    at the model."""
    titles = {stage.title: i for i, stage in enumerate(stages)}
    modules = [(first, LOOP, name) for name, first, _ in groups(stages) if name]
    classes = [(first, LOOP, f"{side}_{name}") for first, _, name in modules]
    for i, stage in enumerate(stages):
        modules += [(i, what, name) for name, what in stage.further_modules.items()]
        classes += [(i, stage.title, owner_of(side, stage))] if "functions" in stage.traits else []
    for i, what, name in modules:
        if name in titles:
            message = f"{name} is also the name of {what} in the generated code"
            related = ((f"{what} belongs to this stage", (side, i)),) if i != titles[name] else ()
            yield Problem((side, titles[name]), "S207", message, "give one of the two another `name:`", related)
    known: dict[str, tuple[int, str, str]] = {}
    for i, what, owner in classes:
        # Class names drop `_`, so a_1 and a1 collide. Stages of blocks with the same owner may share the owner's
        # classes.
        first, other, shared = known.setdefault(re.sub(r"_(?=\d)", "", owner), (i, what, owner))
        if first != i and (shared != owner or LOOP in (what, other)):
            message = f"{what} and {other} would have the same class name in the generated code"
            yield Problem((side, i), "S207", message, "give one of them another `name:`", ((other, (side, first)),))
