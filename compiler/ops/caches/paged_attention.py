"""The paged key-value cache, for texts of different lengths. A page table lists the pages of each text. This module
has ops that write to the cache, and ops that attend to the cached keys.

A program over pages reads K tokens of each of R texts. All tokens are packed into one row, one text after another.
Values are therefore [B, T, ...] with B = 1 and T = R K. Ops that compute each token separately accept packed tokens
without changes.
"""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.expr.mask import Mask
from specc.compiler.ir.op import Op
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.attention import ScoredBase
from specc.compiler.ops.caches.cached_attention import CachedBase
from specc.compiler.ops.shape import Moves
from specc.compiler.records import record

TABLE = TensorType(("R", "N"), "i64")  # for each of R texts, the page of each block of positions
STARTS = TensorType(("R",), "i64")  # for each of R texts, the number of tokens in its pages


class PackTexts(Moves):
    """Packs the tokens of ids i64[R, K] into one row [B, T]."""

    name: ClassVar[str] = "pack_texts"
    inline: ClassVar[bool] = False

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (inputs[0].with_shape("B", "T"),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall(".reshape", (Input(0), 1, -1))

    def reference(self, *inputs: Tensor) -> Tensors:
        return inputs[0].reshape(1, -1)


class PackedPositions(Moves):
    """The positions i64[T] of the packed tokens of ids i64[R, K]. `starts` i64[R] is the number of earlier tokens of
    each text."""

    name: ClassVar[str] = "packed_positions"
    inline: ClassVar[bool] = False
    arity: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return (TensorType(("T",), "i64"),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        length = TorchCall("[]", (TorchCall(".", (Input(0), "shape")), 1))
        counted = TorchCall("torch.arange", (length,), (("device", TorchCall(".", (Input(0), "device"))),))
        return TorchCall(".flatten", (TorchCall("+", (TorchCall("[]", (Input(1), (slice(None), None))), counted)),))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        ids, starts = inputs
        rows = [start + token for start in starts.tolist() for token in range(ids.shape[1])]
        return torch.tensor(rows, device=ids.device)


class LastOfTexts(Moves):
    """Returns the last packed token of each text, [R, D]. Inputs are x [B, T, D] and the page table of R texts."""

    name: ClassVar[str] = "last_of_texts"
    keeps_features: ClassVar[bool] = True
    arity: ClassVar[int] = 2

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, table = inputs
        return (x.with_shape(table.shape[0], *x.shape[2:]),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        rows = TorchCall("[]", (TorchCall(".", (Input(1), "shape")), 0))
        by_text = TorchCall(".reshape", (Input(0), rows, -1, inputs[0].width))
        return TorchCall("[]", (by_text, (slice(None), -1)))

    def reference(self, *inputs: Tensor) -> Tensors:
        x, table = inputs
        return x[0].reshape(len(table), -1, x.shape[-1]).select(1, x.shape[1] // len(table) - 1)


@record
class PagedWrite(Op):
    """Writes packed x [B, T, G, C] at `positions` i64[T] to pages [P, page, G, C], in place. A page table lists the
    pages of each text."""

    name: ClassVar[str] = "paged_write"
    inline: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    arity: ClassVar[int] = 4
    flops_per_output: ClassVar[int] = 0

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        pages, x, _, table = inputs
        if pages.shape[2:] != x.shape[2:] or table != TABLE:
            raise TypeRuleError(
                f"cannot write {x} to pages {pages} with page table {table}: the shapes do not match", (0, 1, 3)
            )
        return (pages,)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("write_pages", tuple(map(Input, range(4))))

    def reference(self, *inputs: Tensor) -> Tensors:
        pages, x, positions, table = inputs
        written, size, each = pages.clone(), pages.shape[1], len(positions) // len(table)
        for token, position in enumerate(positions.tolist()):
            written[table[token // each, position // size], position % size] = x[0, token]
        return written


class SdpaPaged(CachedBase):
    """Attention of packed q [B, T, H, C] at `positions` i64[T] over pages k, v [P, page, G, C].

    A page table lists the pages of each text. Keys after a query's position are masked. The additional inputs of
    `ScoreFields` follow the page table.
    """

    name: ClassVar[str] = "sdpa_paged"
    template: ClassVar[str] = "torch/ops/attend_paged.py.jinja"
    leading: ClassVar[tuple[str, ...]] = ("q", "k", "v", "positions", "table")
    layout: ClassVar[str] = "paged"

    @property
    def over(self) -> str:
        return "pages"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        types = self.types(inputs)
        q, k, v, table = (types[name] for name in ("q", "k", "v", "table"))
        if table != TABLE or self.documents:
            raise TypeRuleError(
                f"needs a page table {TABLE} and a mask without `document`, not {table} and {self.mask}",
                (self.names.index("table"),),
            )
        types |= {name: x.with_shape(q.shape[0], "S", *x.shape[2:]) for name, x in (("k", k), ("v", v))}
        return ScoredBase.infer(self, [types[name] for name in (*self.leading, *self.further)])

    def _places(self, scored: bool, mask: Mask, tables: str) -> dict[str, object]:
        return {"eager": self._eager(scored, tables)}

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        q, k, v, positions, table, *others = self.plain(*inputs)
        each, results = len(positions) // len(table), []
        for row, pages in enumerate(table):
            tokens = slice(row * each, (row + 1) * each)
            keys, values = (x[pages].flatten(0, 1).unsqueeze(0) for x in (k, v))
            arguments = (q[:, tokens], keys, values, positions[tokens], table, *others)
            results.append(ScoredBase.reference(self, *arguments))
        return torch.cat([result for result in results if isinstance(result, torch.Tensor)], 1)

    def positions(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        return inputs[3].unsqueeze(1), torch.arange(inputs[1].shape[1], device=inputs[1].device)

    def site_sizes(self, sizes: Sizes) -> Sizes:
        texts, pages = sizes["B"], -(-sizes["S"] // 64)
        return {**sizes, "B": 1, "T": texts, "R": texts, "N": pages, "P": texts * pages}

    def placed(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns inputs for texts of different lengths, whose pages are in reverse order."""
        import torch

        (texts, pages), device, room = given["table"].shape, given["q"].device, given["k"].shape[:2].numel()
        each = given["q"].shape[1] // texts
        row, token = torch.arange(texts, device=device), torch.arange(each, device=device)
        begin = (room // texts - each) * (row + 1) // texts
        table = torch.arange(texts * pages - 1, -1, -1, device=device).view(texts, pages)
        return {"positions": (begin[:, None] + token).flatten(), "table": table}
