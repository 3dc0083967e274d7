"""Key-value caches: rounding to 8-bit codes, writing of tokens, and the positions in a ring buffer."""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.ir.op import Op
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.records import record


def ring_positions(first: int, window: int, start: int) -> Tensor:
    """Returns the position in each row of a ring buffer, i64[first + window], before token `start` is written.

    The buffer holds all positions below `first`, and the last `window` positions from `first` on. An empty row gets a
    position after all tokens, so every mask excludes it.
    """
    import torch

    rows = [1 << 40] * (first + window)
    for position in range(start):
        rows[position if position < first else first + (position - first) % window] = position
    return torch.tensor(rows)


LARGEST = 448.0  # of e4m3
CODES = 0x7F  # codes below this number are 0, or positive and finite


def coded_types(type: TensorType) -> tuple[TensorType, TensorType]:
    """Returns the types of the codes and the scales for values [..., C]."""
    return TensorType(type.shape, "u8"), TensorType((*type.shape[:-1], 1), "f32")


def decoded(codes: Tensor, scale: Tensor) -> Tensor:
    """Returns codes [..., C] times scales [..., 1], in the dtype of the scales."""
    import torch

    return codes.view(torch.float8_e4m3fn).to(scale.dtype) * scale


class ToCodes(Op):
    """Rounds x [..., C] to e4m3, 8-bit floats. The outputs are codes u8 [..., C] and scales f32 [..., 1].

    A scale maps the largest magnitude of a row to 448, the largest number of e4m3. The magnitude is multiplied by 1/448
    and not divided by 448, because Torch's division by a constant differs between GPU and CPU. The scale is rounded to
    bf16. A kernel may therefore multiply a softmax weight by the scale without additional rounding.
    """

    name: ClassVar[str] = "to_codes"
    words: ClassVar[str] = "rounding to e4m3"
    everywhere: ClassVar[bool] = True
    rowwise: ClassVar[bool] = True
    arity: ClassVar[int] = 1
    output_labels: ClassVar[tuple[str, ...]] = ("codes", "scale")

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        return self.name, f"c{inputs[0].width}"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return coded_types(inputs[0])

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("to_codes", (Input(0),))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        x = inputs[0].to(torch.promote_types(inputs[0].dtype, torch.float32))
        largest = x.abs().amax(-1, keepdim=True)
        scale = torch.where(largest > 0, largest * (1 / LARGEST), 1.0).to(torch.bfloat16).to(x.dtype)
        return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8), scale


@record
class CacheWrite(Op):
    """Replaces the rows `positions` (i64[T]) of a cache [B, S, G, C] by x [B, T, G, C], in place.

    With `ring` (first, window), the cache is a ring buffer of first + window rows. Position p is in row p if p < first.
    Otherwise, position p is in row first + (p - first) % window, where it replaces position p - window.
    """

    name: ClassVar[str] = "cache_write"
    inline: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    arity: ClassVar[int] = 3
    flops_per_output: ClassVar[int] = 0
    ring: tuple[int, int] | None = None

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        cache, x, _ = inputs
        if cache.shape[2:] != x.shape[2:] or (self.ring is not None and cache.shape[1] != sum(self.ring)):
            raise TypeRuleError(f"cannot write {x} to the cache {cache}: the shapes do not match", (0, 1))
        return (cache,)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        if self.ring is not None:
            return TorchCall("write_ring", (Input(0), Input(1), Input(2), *self.ring))
        return TorchCall(".index_copy_", (Input(0), 1, Input(2), Input(1)))

    def reference(self, *inputs: Tensor) -> Tensors:
        cache, x, positions = inputs
        first, window = self.ring or (cache.shape[1], 1)
        written = cache.clone()
        for row, position in enumerate(positions.tolist()):
            written[:, position if position < first else first + (position - first) % window] = x[:, row]
        return written


class RingKeys(Op):
    """Concatenates the rows of a ring buffer [B, R, G, C] and of x [B, T, G, C] to [B, S, G, C]."""

    name: ClassVar[str] = "ring_keys"
    inline: ClassVar[bool] = False  # the cache is overwritten after this node
    arity: ClassVar[int] = 2
    flops_per_output: ClassVar[int] = 0

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        cache, x = inputs
        if cache.shape[2:] != x.shape[2:]:
            raise TypeRuleError(f"cannot join the cache {cache} and {x}: heads or channels do not match", (0, 1))
        return (cache.with_shape(cache.shape[0], "S", *cache.shape[2:]),)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("torch.cat", ((Input(0), Input(1)), 1))

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        return torch.cat(inputs, 1)
