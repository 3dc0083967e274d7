"""The document mask: the position at which the document of each token starts, shared by all layers that read it."""

from collections.abc import Mapping
from dataclasses import dataclass

from specc.compiler.blocks.context import Shared, Tokens
from specc.compiler.ir.graph import Builder, TensorType
from specc.compiler.ops.documents import DocumentStarts, DocumentStartsKept
from specc.compiler.ops.previous import KeepLast


@dataclass(frozen=True, slots=True)
class Documents(Shared):
    """The position at which the document of each token starts, i64[B, T]. `mark` is the id that starts a document."""

    mark: int = 0

    def state(self) -> Mapping[str, TensorType]:
        return {"start": TensorType(("B", 1), "i64")}

    def lower(self, b: Builder, tokens: Tokens) -> tuple[str, ...]:
        if not tokens.start:
            return (b.add(self.name, DocumentStarts(self.mark), (tokens.ids,)),)
        cached = tokens.cache["start"]
        starts = b.add(self.name, DocumentStartsKept(self.mark), (tokens.ids, cached, tokens.start))
        return starts, b.add(f"{self.name}.last", KeepLast(), (cached, starts))
