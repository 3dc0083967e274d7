"""Rotary embedding of the queries and keys of new tokens, and the write of keys and values to a cache, as one op."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from specc.compiler.ir.op import Op
from specc.compiler.ir.types import Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.caches.key_value_cache import CacheWrite
from specc.compiler.ops.positions import Rope


@dataclass(frozen=True, slots=True)
class RopeWrite(Op):
    """Rotates q [B, T, H, C] and k [B, T, G, C] by angles cos, sin f32[T, R] as `Rope` does, and replaces rows
    `positions` (i64[T]) of the caches of keys and values, [B, S, G, C], by the rotated k and by v.

    The inputs are q, k, v, cos, sin, the caches and the positions; the outputs are the rotated q and the caches, which
    are written in place.
    """

    name: ClassVar[str] = "rope_write"
    inline: ClassVar[bool] = False
    everywhere: ClassVar[bool] = True
    arity: ClassVar[int] = 8
    output_labels: ClassVar[tuple[str, ...]] = ("q", "keys", "values")
    neighbors: bool = False

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        q, k, v, cos, *_ = inputs
        heads, width, wide = (q.shape[-2], q.width, "" if k.width == v.width else f"_v{v.width}")
        pairs = f"r{cos.width}{'_neighbors' * self.neighbors}"
        return self.name, f"h{heads}_g{k.shape[-2]}_c{width}{wide}_{pairs}"

    def site_type(self, type: TensorType) -> TensorType:
        return type

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return 1  # `belonging` replaces the positions

    def belonging(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Places the tokens at the end of the caches."""
        import torch

        rows, tokens = inputs[5].shape[1], len(inputs[7])
        return (*inputs[:7], torch.arange(rows - tokens, rows, device=inputs[7].device))

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        q, k, v, cos, sin, keys, values, positions = inputs
        rope, write = Rope(self.neighbors), CacheWrite()
        if v.shape[:-1] != k.shape[:-1]:
            raise TypeRuleError(f"writes keys {k} with values {v}", (1, 2))
        written = (write.infer((keys, rope.infer((k, cos, sin))[0], positions)), write.infer((values, v, positions)))
        return (*rope.infer((q, cos, sin)), *written[0], *written[1])

    def reference(self, *inputs: Tensor) -> Tensors:
        q, k, v, cos, sin, keys, values, positions = inputs
        rope, write = Rope(self.neighbors), CacheWrite()
        turned: list[Any] = [rope.reference(x, cos, sin) for x in (q, k)]
        written: list[Any] = [write.reference(keys, turned[1], positions), write.reference(values, v, positions)]
        return (turned[0], *written)
