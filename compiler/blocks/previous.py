"""Selects the value of the previous token, in whole sequences and in decoding."""

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
    """Adds a node that selects the previous token's row of `x` for each token.

    Args:
        b: The builder of the program.
        x: One row per token, [B, T, ...].
        title: The prefix of the names of the nodes.
        context: The token inputs. If the program continues a sequence, `context.cache["previous"]` is the last row of
            x.
        bos: The id that begins a document. None if documents are not separated.
        fill: The value for tokens without a previous token: the first token, and each `bos`.

    Returns:
        The rows of the previous tokens, [B, T, ...], and the new state `previous` if the program continues a sequence.
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
