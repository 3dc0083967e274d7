"""Two operations as one op: the rotary embedding of new queries and keys, and the write of new rows to a cache."""

from collections.abc import Sequence
from typing import Any, ClassVar

from specc.compiler.ir.op import Op
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.caches.key_value_cache import CacheWrite, ToCodes
from specc.compiler.ops.caches.paged_attention import PagedWrite
from specc.compiler.ops.positions import Rope
from specc.compiler.ops.sequence import Concat
from specc.compiler.records import record


@record
class RopeWrite(Op):
    """Rotates q [B, T, H, C] and k [B, T, G, C] by angles cos, sin f32[T, R], as `Rope` does. Writes the rotated k and
    v [B, T, G, V] to the cache rows `positions` (i64[T]), in place.

    `names` lists the inputs. The outputs are the rotated q and the cache tensors. With a ring buffer, attention reads
    the new rows from separate tensors. New rows that are not inputs of this op, such as rotated keys, are therefore
    additional outputs. The ring buffer is written before attention reads the buffer. This order is valid because each
    text has a single new token. This token replaces a position that the query and all later queries mask.

    Attributes:
        neighbors: Whether channels 2i and 2i + 1 form a pair, as in `Rope`.
        joined: Whether the cache has one tensor, `keys`, whose rows are v followed by the rotated k.
        coded: Whether the cache holds e4m3 codes and scales, as from `ToCodes`.
        ring: The sizes (first, window) of a ring buffer, as in `CacheWrite`.
        paged: Whether the cache is paged, with a page table as in `PagedWrite`.
    """

    name: ClassVar[str] = "rope_write"
    inline: ClassVar[bool] = False
    everywhere: ClassVar[bool] = True
    neighbors: bool = False
    joined: bool = False
    coded: bool = False
    ring: tuple[int, int] | None = None
    paged: bool = False

    @property
    def rows(self) -> tuple[str, ...]:
        """The names of the cache tensors, excluding tensors of scales."""
        return ("keys",) if self.joined else ("keys", "values")

    @property
    def stored(self) -> tuple[str, ...]:
        """The names of the cache tensors, including tensors of scales."""
        return (*self.rows, *(f"{name}_scale" for name in self.rows if self.coded))

    @property
    def new(self) -> tuple[str, ...]:
        """The names of the cache tensors whose new rows are additional outputs of this op."""
        if self.ring is None:
            return ()
        return tuple(name for name in self.stored if self.coded or name != "values")

    @property
    def write(self) -> CacheWrite | PagedWrite:
        """The op that writes to one tensor of the cache."""
        return PagedWrite() if self.paged else CacheWrite(self.ring)

    @property
    def names(self) -> tuple[str, ...]:
        return "q", "k", "v", "cos", "sin", *self.stored, "positions", *(["table"] if self.paged else [])

    @property
    def arity(self) -> int:
        return len(self.names)

    @property
    def output_labels(self) -> tuple[str, ...]:
        return ("q", *self.stored, *(f"new_{name}" for name in self.new))

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        q, k, v, cos, _, keys, *_ = inputs
        layout = "paged" if self.paged else "ring" if self.ring is not None else ""
        words = (self.name, layout, "joined" if self.joined else "", "e4m3" if self.coded else "")
        heads, width, wide = (q.shape[-2], q.width, "" if k.width == v.width else f"_v{v.width}")
        place = f"_p{keys.shape[1]}" if self.paged else ""
        if self.ring is not None:
            place = f"{f'_s{self.ring[0]}' if self.ring[0] else ''}_w{self.ring[1]}"
        pairs = f"r{cos.width}{'_neighbors' * self.neighbors}"
        return "_".join(filter(None, words)), f"h{heads}_g{k.shape[-2]}_c{width}{wide}_{pairs}{place}"

    def site_type(self, type: TensorType) -> TensorType:
        return type

    def site_sizes(self, sizes: Sizes) -> Sizes:
        if self.paged:
            texts, pages = sizes["B"], -(-sizes["S"] // 64)
            return {**sizes, "B": 1, "T": texts, "R": texts, "N": pages, "P": texts * pages}
        return sizes if self.ring is None else {**sizes, "T": 1}

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return 1  # `belonging` replaces positions and page tables; the codes in a cache are not read

    def belonging(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        import torch

        given = dict(zip(self.names, inputs, strict=True))
        keys, tokens, device = given["keys"], len(given["positions"]), given["positions"].device
        if self.paged:
            texts, pages = given["table"].shape
            each, page = tokens // texts, keys.shape[1]
            given["table"] = torch.arange(texts * pages - 1, -1, -1, device=device).view(texts, pages)
            begin = (pages * page - each) * torch.arange(1, texts + 1, device=device) // texts
            given["positions"] = (begin[:, None] + torch.arange(each, device=device)).flatten()
        else:
            last = keys.shape[1] if self.ring is None else 2 * keys.shape[1]
            given["positions"] = torch.arange(last - tokens, last, device=device)
        return list(given.values())

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        given = dict(zip(self.names, inputs, strict=True))
        q, k, v, cos, sin = inputs[:5]
        rope, where = Rope(self.neighbors), inputs[5 + len(self.stored) :]
        if v.shape[:-1] != k.shape[:-1]:
            raise TypeRuleError(f"needs keys and values of the same tokens and heads, not {k} and {v}", (1, 2))
        turned = rope.infer((k, cos, sin))[0]
        rows = {"keys": Concat().infer((v, turned))[0] if self.joined else turned, "values": v}
        coded = {name: ToCodes().infer((rows[name],)) for name in self.rows if self.coded}
        rows |= {name: codes for name, (codes, _) in coded.items()}
        rows |= {f"{name}_scale": scale for name, (_, scale) in coded.items()}
        written = [self.write.infer((given[name], rows[name], *where))[0] for name in self.stored]
        return (*rope.infer((q, cos, sin)), *written, *(rows[name] for name in self.new))

    def reference(self, *inputs: Tensor) -> Tensors:
        given: dict[str, Any] = dict(zip(self.names, inputs, strict=True))
        q, k, v, cos, sin = inputs[:5]
        rope, where = Rope(self.neighbors), inputs[5 + len(self.stored) :]
        turned: Any = rope.reference(k, cos, sin)
        rows: dict[str, Any] = {"keys": Concat().reference(v, turned) if self.joined else turned, "values": v}
        for name in self.rows if self.coded else ():
            rows[name], rows[f"{name}_scale"] = ToCodes().reference(rows[name])
        written: list[Any] = [self.write.reference(given[name], rows[name], *where) for name in self.stored]
        queries: Any = rope.reference(q, cos, sin)
        return (queries, *written, *(rows[name] for name in self.new))
