"""Attention to pooled blocks of tokens, and to single tokens, over a whole sequence or a cache."""

from collections.abc import Sequence
from typing import ClassVar

from specc.compiler.expr import torch_text, torch_value
from specc.compiler.expr.mask import Mask
from specc.compiler.ir.op import Op
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.attention import AttendContext, ScoredBase
from specc.compiler.ops.caches.cached_attention import cached_places, cached_positions
from specc.compiler.ops.pooled.pooling import POOLINGS, PoolContext
from specc.compiler.records import record


@record
class PooledContext(AttendContext):
    """The context of templates/torch/ops/attend_pooled.py.jinja.

    Attributes:
        pool: the settings of the pooling.
        helper: the template of the function `pool`.
    """

    pool: PoolContext | None = None
    helper: str = ""


@record
class PoolFields(ScoredBase):
    """The settings of attention over pooled blocks and single tokens. Pooled keys precede the keys of single tokens.

    Attributes:
        block: the number P of tokens of a block.
        by: the name of the pooling method, a key of `POOLINGS`.
        tokens: the number M of pooled keys per block.
        seed: the seed of a sample.
        pooled: the mask of pooled keys, as canonical text. In this mask and in the score, j is the first position of a
            pooled key's block.
    """

    block: int = 64
    by: str = "mean"
    tokens: int = 1
    seed: int = 0
    pooled: str = ""


class PooledBase(PoolFields):
    """The base class of attention over pooled blocks."""

    template: ClassVar[str] = "torch/ops/attend_pooled.py.jinja"
    context: ClassVar[type[AttendContext]] = PooledContext

    @property
    def title(self) -> str:
        of = self.by if self.tokens == 1 else f"{self.by}{self.tokens}"
        return "_".join(filter(None, (super().title, "pooled", f"{of}{self.block}")))

    @property
    def description(self) -> str:
        keys = "one key" if self.tokens == 1 else f"{self.tokens} keys"
        return f"{super().description}, and {keys} per block of {self.block} tokens by {self.by} where {self.pooled}"

    @property
    def documents(self) -> bool:
        return "document" in self.mask + self.pooled

    @property
    def visible_reads(self) -> tuple[str, ...]:
        return ("pooled", *super().visible_reads)

    def visible_text(self, mask: Mask) -> str:
        blocks = torch_text(Mask.of(self.pooled, mask.heads).condition, whole=True)
        return f"torch.where(pooled, {blocks}, {torch_text(mask.condition, whole=True)})"

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return self.attend_call(inputs)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        q, k = inputs[:2]
        heads, tokens = q.shape[-2], q.with_shape(q.shape[1]).count(sizes)
        channels = (q.count(sizes) + outputs[0].count(sizes)) // tokens
        assert isinstance(heads, int)
        keys = k.with_shape(k.shape[1]).count(sizes)
        pairs = self.parsed(heads)[1].pairs(keys)
        pairs += Mask.of(self.pooled, int(heads)).block_pairs(self.block, keys) * self.tokens
        return 2 * channels * (pairs * tokens // max(keys, 1))  # in the first step, the cache is empty

    def pool_call(self, x: str) -> str:
        """Returns the call of the generated function `pool` with the blocks `x`."""
        return f"pool({', '.join((x, *POOLINGS[self.by].reads))})"

    def pooled_lines(self) -> tuple[str, ...]:
        """Returns lines that put the positions of pooled keys before the positions in `j`. The lines also compute
        `pooled`, which is True for pooled keys."""
        many = f".repeat_interleave({self.tokens})" if self.tokens > 1 else ""
        return (
            f"pooled = torch.arange(k.shape[2], device=k.device) < {self.tokens} * len(number)",
            f"j = torch.cat((number{many} * {self.block}, j))",
        )

    def pool_fields(self) -> dict[str, object]:
        return {"pool": PoolContext(self.tokens, self.block, self.seed), "helper": POOLINGS[self.by].template}

    def pooled_keys(self, *inputs: Tensor) -> int:
        """Returns the number of pooled keys for the inputs of the op."""
        raise TypeRuleError(f"{self.name} does not define `pooled_keys`, the number of pooled keys")

    def allowed(self, *inputs: Tensor) -> Tensor:
        import torch

        heads, count, values = inputs[0].shape[-2], self.pooled_keys(*inputs), self._values(*inputs)
        j, shape = values["j"], (len(inputs[0]), heads, inputs[0].shape[1])
        assert isinstance(j, torch.Tensor)
        seen = []
        for text, part in ((self.pooled, j[:count]), (self.mask, j[count:])):
            seen.append(torch_value(Mask.of(text, heads).condition, values | {"j": part}).expand(*shape, len(part)))
        return torch.cat(seen, -1)

    def first_positions(self, count: int) -> list[int]:
        """Returns the positions of the first `count` pooled keys."""
        return [key // self.tokens * self.block for key in range(count)]


class SdpaPooled(PooledBase):
    """Causal attention to the tokens and to the complete blocks of a whole sequence. Inputs are q, k, v and the
    additional inputs."""

    name: ClassVar[str] = "sdpa_pooled"
    unexportable: ClassVar[str] = "attention to pooled blocks: an exported program would have a fixed number of blocks"

    @property
    def further(self) -> tuple[str, ...]:
        return (*super().further, "latents") if "latents" in POOLINGS[self.by].reads else super().further

    def _places(self, scored: bool, mask: Mask, tables: str) -> dict[str, object]:
        cut = f"x[:, :, : {self.block} * len(number)].unflatten(2, (len(number), {self.block}))"
        return {
            "eager": ("i = torch.arange(q.shape[2], device=q.device)[:, None]", *self._eager(scored, tables)),
            "keys": "k and v are those of single tokens.",
            "places": (
                "j = torch.arange(k.shape[2], device=k.device)",
                f"number = torch.arange(len(j) // {self.block}, device=k.device)  # the indices of whole blocks",
                f"keys, values = ({cut} for x in (k, v))",
                f"k, v = torch.cat(({self.pool_call('keys')}, k), 2), torch.cat(({self.pool_call('values')}, v), 2)",
                *self.pooled_lines(),
            ),
            **self.pool_fields(),
        }

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        q, k, v, *others = inputs
        count = k.shape[1] // self.block
        latents = self.named(inputs).get("latents")
        cut = (x[:, : count * self.block].reshape(len(x), count, self.block, *x.shape[2:]) for x in (k, v))
        keys, values = (x.permute(0, 3, 1, 2, 4) for x in cut)
        pooled = (
            POOLINGS[self.by].reference(x, torch.arange(count), keys, latents, self.tokens, self.seed)
            for x in (keys, values)
        )
        k, v = (torch.cat((part.transpose(1, 2), x), 1) for part, x in zip(pooled, (k, v), strict=True))
        return ScoredBase.reference(self, q, k, v, *others)

    def pooled_keys(self, *inputs: Tensor) -> int:
        return inputs[1].shape[1] - inputs[0].shape[1]

    def positions(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        row, first = torch.arange(inputs[0].shape[1]), torch.tensor(self.first_positions(self.pooled_keys(*inputs)))
        return row.unsqueeze(1).to(inputs[0].device), torch.cat((first.long(), row)).to(inputs[0].device)


@record
class SdpaPooledCached(PooledBase):
    """Attention of q [B, T, H, C] at `positions` (i64[T]) over two caches: pooled keys and values [B, N M, G, C], and
    single tokens as in `SdpaCached`.

    Attributes:
        ring: The sizes of the ring buffer of single tokens. None if the cache of single tokens stores all positions.
    """

    name: ClassVar[str] = "sdpa_pooled_cached"
    leading: ClassVar[tuple[str, ...]] = ("q", "k", "v", "positions", "pooled_k", "pooled_v")
    ring: tuple[int, int] | None = None

    def _places(self, scored: bool, mask: Mask, tables: str) -> dict[str, object]:
        keys, places = cached_places(self.ring)
        return {
            "eager": ("i = positions[:, None]", *self._eager(scored, tables)),
            "keys": keys,
            "places": (
                *places,
                f"number = torch.arange(pooled_k.shape[1] // {self.tokens}, device=k.device)  # the indices of blocks",
                "k, v = torch.cat((pooled_k.transpose(1, 2), k), 2), torch.cat((pooled_v.transpose(1, 2), v), 2)",
                *self.pooled_lines(),
            ),
            **self.pool_fields(),
        }

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        q, k, v, positions, pooled_k, pooled_v, *others = inputs
        k, v = torch.cat((pooled_k, k), 1), torch.cat((pooled_v, v), 1)
        return ScoredBase.reference(self, q, k, v, positions, pooled_k, pooled_v, *others)

    def pooled_keys(self, *inputs: Tensor) -> int:
        return inputs[4].shape[1]

    def positions(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        _, k, _, positions = inputs[:4]
        count = self.pooled_keys(*inputs)
        first = torch.tensor(self.first_positions(count), device=positions.device)
        return positions.unsqueeze(1), torch.cat((first, cached_positions(self.ring, k.shape[1] - count, positions)))


@record
class WriteContext:
    """The context of templates/torch/ops/write_pooled.py.jinja.

    Attributes:
        function: the name of the function.
        parameters: the parameters of the function after the cache, the rows and the positions.
        pool: the settings of the pooling.
        helper: the template of the function `pool`.
        rows: the lines that compute, for each position in `at` i64[N, P], the index of its row in the cache of single
            tokens.
        call: the call of the function `pool`.
        package: the package of the model.
    """

    function: str
    parameters: str
    pool: PoolContext
    helper: str
    rows: tuple[str, ...]
    call: str
    package: str = ""


@record
class PoolWrite(Op):
    """Pools the blocks that contain the tokens at `positions` (i64[T]). The results replace the rows of these blocks in
    a cache [B, N M, G, C] with M rows per block, in place.

    The second input is the cache of single tokens, as in `SdpaPooledCached`. Pooling by latent tokens also reads the
    keys and the latents. The op also writes rows for an incomplete block, and the mask of attention hides these rows.
    The write that completes the block replaces these rows.
    """

    name: ClassVar[str] = "pool_write"
    inline: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    flops_per_output: ClassVar[int] = 0
    block: int = 64
    by: str = "mean"
    tokens: int = 1
    seed: int = 0
    ring: tuple[int, int] | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the inputs after the positions."""
        return tuple(name for name in POOLINGS[self.by].reads if name != "number")

    @property
    def arity(self) -> int:
        return 3 + len(self.reads)

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        cache, x = inputs[:2]
        if cache.shape[2:] != x.shape[2:]:
            raise TypeRuleError(f"cannot write blocks of {x} to a cache {cache}: the shapes do not match", (0, 1))
        return (cache,)

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        parameters = "".join(f", {name}: Tensor" for name in self.reads)
        many = f"{self.by}{self.tokens if self.tokens > 1 else ''}"
        seeded = f"_{self.seed}" if "number" in POOLINGS[self.by].reads else ""
        function = f"write_pooled_{many}_{self.block}{seeded}"
        rows: tuple[str, ...] = ("row = at",)
        if self.ring is not None:
            first, window = self.ring
            function += f"_ring{first}_{window}"
            held = f"{first} + (at - {first}) % {window}" if first else f"at % {window}"
            held = f"torch.where(at < {first}, at, {held})" if first else held
            rows = (f"row = torch.where(at < positions[0], {held}, {first + window} + at - positions[0])",)
        pool = PoolContext(self.tokens, self.block, self.seed)
        call = f"pool({', '.join(('taken(x)', *POOLINGS[self.by].reads))})".replace("keys", "taken(keys)")
        template = POOLINGS[self.by].template
        context = WriteContext(function, parameters, pool, template, rows, call)
        generated = ("torch/ops/write_pooled.py.jinja", context)
        return TorchCall(function, tuple(map(Input, range(self.arity))), generated=generated)

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        cache, x, positions, *others = inputs
        named = dict(zip(self.reads, others, strict=True))
        held = cached_positions(self.ring, x.shape[1], positions).tolist()
        written, last = cache.clone(), int(positions[-1])
        for number in sorted({int(position) // self.block for position in positions}):
            at = range(number * self.block, (number + 1) * self.block)
            if at[-1] > last:  # an incomplete block
                continue
            rows = [held.index(position) for position in at]
            values, keys = (part[:, rows].transpose(1, 2).unsqueeze(2) for part in (x, named.get("keys", x)))
            pooled = POOLINGS[self.by].reference(
                values, torch.tensor([number]), keys, named.get("latents"), self.tokens, self.seed
            )
            written[:, number * self.tokens : (number + 1) * self.tokens] = pooled.transpose(1, 2)
        return written
