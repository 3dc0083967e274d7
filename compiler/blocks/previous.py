"""The previous token's value, in whole sequences and in decoding."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from specc.compiler.blocks.context import Tokens
from specc.compiler.ir.graph import Builder
from specc.compiler.ops.previous import KeepLast, Previous, PreviousKept, Reset

TokenId = Annotated[int, Field(ge=0, lt=2**24)]


def previous(
    b: Builder, x: str, title: str, tokens: Tokens, bos: int | None, fill: int = 0
) -> tuple[str, Mapping[str, str]]:
    """Adds the previous token's value for each token of `x`.

    Args:
        b: the builder of the program.
        x: one row per token, [B, T, ...].
        title: the prefix of the names of the nodes.
        tokens: the token inputs. If the program extends a sequence, `tokens.cache["previous"]` is the last row of x.
        bos: the id that starts a document; None if documents are not separated.
        fill: the value at a first token, and at each `bos`.

    Returns:
        The previous values, [B, T, ...], and the new value of the state `previous` if the program extends a sequence.
    """
    state: dict[str, str] = {}
    if tokens.start:
        cached = tokens.cache["previous"]
        before = b.add(f"{title}.previous", PreviousKept(fill), (x, cached, tokens.start))
        state["previous"] = b.add(f"{title}.last", KeepLast(), (cached, x))
    else:
        before = b.add(f"{title}.previous", Previous(fill), (x,))
    if bos is not None:
        before = b.add(f"{title}.reset", Reset(bos, fill), (before, tokens.ids))
    return before, state
