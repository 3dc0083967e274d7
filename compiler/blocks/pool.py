"""Pooled keys and values: a query attends to a whole block of earlier tokens through a few keys."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.blocks.context import LoweringContext, Shape
from specc.compiler.expr.mask import BLOCKS, bound_blocks
from specc.compiler.expr.parse import parse
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.attention import ScoreFields
from specc.compiler.ops.pooled.attention import PoolWrite, SdpaPooled, SdpaPooledCached
from specc.compiler.ops.pooled.pooling import POOLINGS
from specc.compiler.strict import ExprText, Problem, StrictModel, accepted_by

MaskText = Annotated[ExprText, accepted_by(lambda text: parse(text, BLOCKS.whole, BLOCKS))]


class Pool(StrictModel):
    """Pooled keys and values, which represent whole blocks of tokens. A query attends to pooled keys, and to the single
    tokens that the attention mask admits.

    Attributes:
        block: the number of tokens per block.
        by: how the keys and the values of a block are pooled. `mean` or `max`: over the block, for each channel.
            `reservoir`: the keys and values of random tokens of the block. `latent`: weighted means, where learned
            latent tokens attend to the keys of the block.
        tokens: the number of random or latent tokens per block.
        seed: the seed that selects the random tokens.
        mask: the condition under which a query attends to a block. The condition reads the position `i` of the query,
            the first position `j` of the block, the head `h` and the number of tokens `block`. By default, a query
            attends to each complete block whose first token is hidden by the attention mask. In a mask that calls
            `document`, all tokens of the block must be in the document of the query.
    """

    block: Annotated[int, Field(ge=2, le=4096)] = 64
    by: Literal["mean", "max", "reservoir", "latent"] = "mean"
    tokens: Annotated[int, Field(ge=1, le=64)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    mask: MaskText | None = None

    def problems_in(self, context: int, masks: tuple[str, ...]) -> Iterator[Problem]:
        """Yields the problems in a model of `context` tokens. This method does not check causality, because `bound`
        checks causality. `masks` are the attention masks. Paths are relative to `pool`."""
        if self.mask is not None and "document" in self.mask and not all("document" in mask for mask in masks):
            message = "`pool.mask` calls `document`, but the `mask` of the attention does not"
            yield Problem(
                ("mask",),
                "S289",
                message,
                "add the condition on `document` to `mask` too, or remove it from `pool.mask`",
            )
        if self.block > context:
            message = f"`block` is {self.block} tokens, but the context has only {context}"
            yield Problem(("block",), "S289", message, f"use at most {context}")
        if self.tokens > 1 and not POOLINGS[self.by].several:
            message = f"`by: {self.by}` gives one pooled key per block, not {self.tokens}"
            yield Problem(("tokens",), "S289", message, "remove `tokens`, or use `by: reservoir` or `by: latent`")
        elif self.tokens >= self.block:
            message = f"`tokens` is {self.tokens} and `block` is {self.block}, so nothing is pooled"
            yield Problem(("tokens",), "S289", message, f"use fewer than {self.block}")
        if self.seed and "number" not in POOLINGS[self.by].reads:
            message = f"`seed` applies to random tokens, but `by: {self.by}` chooses none"
            yield Problem(("seed",), "S289", message, "remove `seed`, or use `by: reservoir`")

    def bound(self, mask: str, heads: int, shape: Shape) -> str:
        """Returns the mask of blocks as canonical text. `mask` is the mask of single tokens. Raises ExprError if the
        mask of blocks is invalid, is not causal, or admits no block."""
        return bound_blocks(self.mask, mask, self.block, heads, shape.context, shape.prefix)

    def rows(self, context: int) -> int:
        return -(-context // self.block) * self.tokens

    def latents(self, b: Builder, groups: int, channels: int, shape: Shape) -> tuple[str, ...]:
        """Declares the parameter of the latent tokens, if the pooling has latent tokens.

        Args:
            b: The builder of the function.
            groups: The number of key heads.
            channels: The number of channels per key head.
            shape: The sizes of the model.

        Returns:
            The reference of the parameter [tokens, groups * channels], which is an additional input of the pooling's
            ops. An empty tuple if the pooling has no latent tokens.
        """
        if "latents" not in POOLINGS[self.by].reads:
            return ()
        return (b.param("latents", shape.activation(self.tokens, groups * channels), shape.matrix_init),)

    def op(self, fields: ScoreFields, pooled: str) -> SdpaPooled:
        """Returns the attention op for a whole sequence. `pooled` is the mask of blocks. The inputs of the op are q,
        k, v, the additional inputs of `fields`, and the latents."""
        return SdpaPooled(*fields.of_scores, *self._settings, pooled)

    def cached_op(self, fields: ScoreFields, pooled: str, ring: tuple[int, int] | None) -> SdpaPooledCached:
        """Returns the attention op for a cache. `pooled` is the mask of blocks. The inputs of this op are the inputs of
        `op`, with the positions and the state inserted after v. `ring` has the sizes of the ring buffer of single
        tokens, or is None without a ring buffer."""
        return SdpaPooledCached(*fields.of_scores, *self._settings, pooled, ring)

    def write(
        self,
        b: Builder,
        rows: Mapping[str, str],
        latents: tuple[str, ...],
        context: LoweringContext,
        ring: tuple[int, int] | None,
    ) -> Mapping[str, str]:
        """Adds the op that pools the blocks of the input tokens. Returns the new state.

        Args:
            b: The builder of the function.
            rows: The keys `k` and values `v` to attend to, [B, S, G, C], including the rows of the input tokens.
            latents: The latent tokens, if the pooling reads latent tokens.
            context: The positions of the input tokens and the state of the layer.
            ring: The sizes of the ring buffer of single tokens. None without a ring buffer.
        """
        op, state = PoolWrite(*self._settings, ring), {}
        values = {"keys": (rows["k"],), "latents": latents}
        for name, row in rows.items():
            inputs = (context.cache[f"pooled_{name}"], row, context.positions)
            others = (value for read in op.reads for value in values[read])
            state[f"pooled_{name}"] = b.add(f"{name}.pooled", op, (*inputs, *others))
        return state

    @property
    def _settings(self) -> tuple[int, str, int, int]:
        return self.block, self.by, self.tokens, self.seed

    def state(self, rows: TensorType, context: int) -> Mapping[str, TensorType]:
        pooled = rows.with_shape("B", self.rows(context), *rows.shape[2:])
        return {"pooled_k": pooled, "pooled_v": pooled}
