"""Hash buckets of token pairs."""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.ir.op import SupportCall
from specc.compiler.ir.types import Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.records import record

TOKEN, BEFORE = 36313, 27191  # the multipliers of the token id and of the previous token id


@record
class BigramHash(SupportCall):
    """The hash bucket of each token id and the previous token id, i32[B, T] in [0, `buckets`).

    The bucket is ((36313 id) xor (27191 previous)) mod (buckets - 1) in i32 arithmetic with wraparound. A negative
    `previous` means that there is no previous token. Such a token is in the last bucket. This is the hash of
    parameter-golf's BigramHash embedding.
    """

    name: ClassVar[str] = "bigram_hash"
    arity: ClassVar[int] = 2
    flops_per_output: ClassVar[int] = 0
    buckets: int

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        ids, previous = inputs
        if ids != previous or ids.floating:
            raise TypeRuleError(f"needs previous ids of the same type as the ids, {ids}, not {previous}", (0, 1))
        return (TensorType(ids.shape, "i32"),)

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        ids, previous = inputs
        pairs = zip(ids.flatten().tolist(), previous.flatten().tolist(), strict=True)
        buckets = [self.bucket(token, before) for token, before in pairs]
        return torch.tensor(buckets, dtype=torch.int32, device=ids.device).reshape(ids.shape)

    def bucket(self, token: int, before: int) -> int:
        if before < 0:
            return self.buckets - 1
        return (_wrapped(TOKEN * token) ^ _wrapped(BEFORE * before)) % (self.buckets - 1)


def _wrapped(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31
