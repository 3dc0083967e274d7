"""Three operations as one op: the rotary embedding of one new token per text, the write to a cache, and attention."""

from collections.abc import Sequence
from typing import Any, ClassVar

from specc.compiler.ir.torch_call import TorchCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType
from specc.compiler.ops.caches.cached_attention import CachedBase, SdpaCached
from specc.compiler.ops.caches.paged_attention import SdpaPaged
from specc.compiler.ops.decoding.rope_write import RopeWrite
from specc.compiler.records import record


@record
class RopeAttention(CachedBase):
    """`RopeWrite` of one token per text, then attention of the rotated queries over the cache.

    `names` lists the inputs: q, the new key and value before the rotation, the angles, the cache tensors k and v, the
    positions, and the additional inputs of `ScoreFields`. Caches of codes also have scales, and paged caches have a
    page table. The outputs are y and the cache tensors, which are written in place.

    Attributes:
        neighbors: Whether channels 2i and 2i + 1 form a pair, as in `Rope`.
        paged: Whether the cache is paged.
    """

    name: ClassVar[str] = "rope_attention"
    inline: ClassVar[bool] = False
    neighbors: bool = False
    paged: bool = False

    @property
    def write(self) -> RopeWrite:
        """The op that rotates the new queries and keys, and writes the new rows. The inputs of `write` are the first
        inputs of this op."""
        return RopeWrite(self.neighbors, False, self.coded, self.ring, self.paged)

    @property
    def attend(self) -> CachedBase:
        """The attention op, which reads the cache after the write."""
        return (SdpaPaged if self.paged else SdpaCached)(*self.of_scores, self.values, self.coded, self.ring)

    @property
    def names(self) -> tuple[str, ...]:
        scales = ("k_scale", "v_scale") if self.coded else ()
        table = ("table",) if self.paged else ()
        return "q", "new_k", "new_v", "cos", "sin", "k", "v", *scales, "positions", *table, *self.further

    @property
    def output_labels(self) -> tuple[str, ...]:
        return "y", *self.write.stored

    @property
    def over(self) -> str:
        return f"{self.attend.over}, with the rotation and the write of one token per text"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        given = dict(zip(self.names, inputs, strict=True))
        word, size = self.attend.symbol([given["q"], given["k"], given["v"]])
        pairs = f"r{given['cos'].width}{'_neighbors' * self.neighbors}"
        return f"rope_{word}", f"{size}_{pairs}"

    def site_type(self, type: TensorType) -> TensorType:
        return type

    def site_sizes(self, sizes: Sizes) -> Sizes:
        return self.attend.site_sizes(sizes)

    def placed(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.attend.placed(given)

    def attended(self, inputs: Sequence[Any], written: Sequence[Any]) -> list[Any]:
        """Returns the inputs of the op `attend`: tensors, or types if the arguments are types. `inputs` are the inputs
        of this op. `written` are the outputs of the op `write`."""
        given, op = dict(zip(self.names, inputs, strict=True)), self.write
        new = dict(zip(op.new, written[1 + len(op.stored) :], strict=True))
        given |= {"q": written[0], "k_scale": None, "v_scale": None}
        given |= dict(zip(("k", "v", "k_scale", "v_scale"), written[1 : 1 + len(op.stored)], strict=False))
        given |= {"new_k": new.get("keys"), "new_v": new.get("values", given["new_v"])}
        given |= {"new_k_scale": new.get("keys_scale"), "new_v_scale": new.get("values_scale")}
        return [given[name] for name in self.attend.names]

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        written = self.write.infer(inputs[: self.write.arity])
        outputs = self.attend.infer(self.attended(inputs, written))
        return (*outputs, *written[1 : 1 + len(self.write.stored)])

    def reference(self, *inputs: Tensor) -> Tensors:
        written: Any = self.write.reference(*inputs[: self.write.arity])
        y: Any = self.attend.reference(*self.attended(inputs, written))
        return (y, *written[1 : 1 + len(self.write.stored)])

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        written = self.write.infer(inputs[: self.write.arity])
        return self.attend.flops(self.attended(inputs, written), outputs[:1], sizes)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall | None:  # type: ignore[override]
        return None
