"""Sites of attention with a score and a mask, and random inputs that belong together."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from kernel_sites import DTYPES
from torch import Tensor

from specc.compiler.expr.mask import bound_mask
from specc.compiler.expr.score import bound_score
from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.attention.score_tile import ScoreGradTile, ScoreTile
from specc.compiler.kernels.attention.scored import SCORED, SCORED_GRAD
from specc.compiler.kernels.kernel import Kernel, Site
from specc.compiler.ops.saved_attention import ScoredAttention, ScoredAttentionGrad
from specc.compiler.targets import TARGETS

CONTEXT = 2048
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Attention:
    """Attention as a spec states it, with the shapes of its tables."""

    score: str = "s"
    mask: str = "j <= i"
    tables: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sinks: bool = False
    scale: float | None = None

    def hook_shape(self, shape: Shape, backward: bool) -> Shape:
        """`shape`, with as many heads of keys as of queries where flash-attn-4 takes no others: for the gradient of a
        score that reads positions of queries or heads."""
        heads, groups, channels = shape
        return heads, heads if backward and re.search(r"\b[ih]\b", self.score) else groups, channels

    def site(
        self, shape: Shape, backward: bool = False, dtype: str = "bf16", target: str = "sm90", context: int = CONTEXT
    ) -> Site:
        """A site of heads of queries, heads of keys and channels."""
        heads, groups, channels = shape
        q, k = (TensorType(("B", "T", count, channels), dtype) for count in (heads, groups))
        mask = bound_mask(self.mask, heads, context)
        score = bound_score(self.score, tuple(self.tables.items()), mask, heads, context)
        kind = ScoredAttentionGrad if backward else ScoredAttention
        op = kind(score, mask, self.scale, tuple(self.tables), self.sinks)
        given = (q, q, k, k, q, TensorType(("B", heads, "T"), "f32")) if backward else (q, k, k)
        start = (TensorType(("B", "T"), "i64"),) if op.documents else ()
        sinks = (TensorType((heads,), dtype),) if self.sinks else ()
        inputs = (*given, *start, *sinks, *(TensorType(dims, dtype) for dims in self.tables.values()))
        path = "attention.y.grad" if backward else "attention.y"
        node = Node(path, op, tuple(f"v{i}" for i in range(len(inputs))), op.infer(inputs))
        return Site(node, inputs, TARGETS[target], f"blocks.*.{path}", "sample")


# One of each kind of mask, score and read.
CASES: Mapping[str, Attention] = {
    "window": Attention(mask="j <= i and i - j < 20"),
    "documents": Attention(mask="j <= i and document(i) == document(j)", sinks=True),
    "documents in a window": Attention("s / 2", "j <= i and document(i) == document(j) and i - j < 9", scale=0.3),
    "nothing seen at first": Attention(mask="j < i"),
    "first keys": Attention("5 * tanh(s / 5)", "j <= i and (i - j < 16 or j < 4)"),
    "alibi": Attention("s - slope(h) * (i - j)"),
    "buckets": Attention("s + bias[h, bucket(i - j, 8, 20)]", tables={"bias": (4, 8)}),
    "buckets first": Attention("s + bias[bucket(i - j, 8, 20), h]", "j <= i and i - j < 50", {"bias": (8, 4)}),
    "distances": Attention("s + q[min(i - j, 15)] - (i - j) // 8 * 0.1", tables={"q": (16,)}),
    "per head": Attention("s * w[h] - b[0] * (i - j) / 8", tables={"w": (4,), "b": (2,)}),
    "both positions": Attention("s + p[i // 16 % 4, j // 16 % 4] + 0.5 * (i % 3)", tables={"p": (4, 4)}),
    "one table twice": Attention(
        "s + p[i - j] * tanh(s) + p[j // 16 % 8] + w[h, 2]",
        "j <= i and i - j < 10",
        {"p": (10,), "w": (4, 3)},
        sinks=True,
    ),
    "distances by head": Attention("s + p[(i - j) * (h + 1) // 40]", tables={"p": (256,)}),
}


def kernel_of(site: Site, *tiles: tuple[int, int, int, int]) -> Kernel:
    """The kernel of a site, with its tile or tiles."""
    parts = [ScoreTile(*tile) for tile in tiles]
    if isinstance(site.node.op, ScoredAttentionGrad):
        return replace(SCORED_GRAD, tile=ScoreGradTile(*parts)) if parts else SCORED_GRAD
    return replace(SCORED, tile=parts[0]) if parts else SCORED


def scored_inputs(site: Site, b: int, t: int, seed: int, device: str = "cpu", apart: int = 0) -> list[Tensor]:
    """Random inputs of a forward site, or of a gradient with the y and lse that its inputs give.

    `apart` is the number of elements, NaN, between the tokens of q, k and v.
    """
    generator = torch.Generator().manual_seed(seed)
    values = []
    for place, type in enumerate(site.inputs):
        shape = [{"B": b, "T": t}.get(dim, dim) for dim in type.shape]  # type: ignore[call-overload]
        if type.dtype == "i64":
            marks = torch.rand(shape, generator=generator) * 17 < 1
            values.append(torch.where(marks, torch.arange(t), 0).cummax(1).values)
            continue
        value = torch.randn(shape, generator=generator).to(DTYPES[type.dtype])
        if apart and len(shape) == 4 and place % 4 < 3:
            wide = torch.full((b, t, shape[2] * shape[3] + apart), torch.nan, dtype=value.dtype)
            wide[..., :-apart] = value.flatten(2)
            value = wide[..., :-apart].unflatten(2, tuple(shape[2:]))
        values.append(value)
    values = [value.to(device) for value in values]
    if not isinstance(site.node.op, ScoredAttentionGrad):
        return values
    y, lse = site.node.op.forward.reference(*(wide_of(value) for value in (*values[1:4], *values[6:])))
    return [*values[:4], y.to(values[1].dtype), lse.float(), *values[6:]]


def wide_of(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def exact(site: Site, inputs: list[Tensor]) -> list[Tensor]:
    """The outputs in float64, of the inputs as they are."""
    outputs = site.node.op.reference(*map(wide_of, inputs))
    return list(outputs)
