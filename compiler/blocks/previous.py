"""The previous token's value, in whole sequences and in decoding."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from specc.compiler.blocks.context import LoweringContext
from specc.compiler.ir.builder import Builder
from specc.compiler.ops.previous import KeepLast, Previous, PreviousCached, Reset

TokenId = Annotated[int, Field(ge=0, lt=2**24)]


def previous(
    b: Builder, x: str, title: str, context: LoweringContext, bos: int | None, fill: int = 0
) -> tuple[str, Mapping[str, str]]:
    """Adds a node that selects, for each token, the row of `x` that belongs to the previous token.

    Args:
        b: the builder of the program.
        x: one row per token, [B, T, ...].
        title: the prefix of the names of the nodes.
        context: the token inputs. If the program extends a sequence, `context.cache["previous"]` is the last row of x.
        bos: the id that starts a document; None if documents are not separated.
        fill: the value for tokens without a previous token: the first token, and each `bos`.

    Returns:
        The rows of the previous tokens, [B, T, ...], and the new state `previous` if the program extends a sequence.
    """
    state: dict[str, str] = {}
    if context.start:
        cached = context.cache["previous"]
        before = b.add(f"{title}.previous", PreviousCached(fill), (x, cached, context.start))
        state["previous"] = b.add(f"{title}.last", KeepLast(), (cached, x))
    else:
        before = b.add(f"{title}.previous", Previous(fill), (x,))
    if bos is not None:
        before = b.add(f"{title}.reset", Reset(bos, fill), (before, context.ids))
    return before, state
