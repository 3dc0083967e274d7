"""The document mask: attention only within a document. Mask expressions are in compiler/expr/mask.py.

All layers share the input of the mask, the first position of each token's document.
"""

from collections.abc import Mapping

from specc.compiler.blocks.context import LoweringContext, Shared
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.documents import DocumentStarts, DocumentStartsCached
from specc.compiler.ops.previous import KeepLast
from specc.compiler.records import record


@record
class Documents(Shared):
    """The first position of each token's document, i64[B, T]. `mark` is the id that begins a document."""

    mark: int = 0

    def state(self) -> Mapping[str, TensorType]:
        return {"start": TensorType(("B", 1), "i64")}

    def lower(self, b: Builder, context: LoweringContext) -> tuple[str, ...]:
        if not context.start:
            return (b.add(self.name, DocumentStarts(self.mark), (context.ids,)),)
        cached = context.cache["start"]
        starts = b.add(self.name, DocumentStartsCached(self.mark), (context.ids, cached, context.start))
        return starts, b.add(f"{self.name}.last", KeepLast(), (cached, starts))
