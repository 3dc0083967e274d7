"""The attention nodes that tests run on, random values that belong together, and files of kernels as packages."""

from typing import Any

import torch
from torch import Tensor

from specc.compiler.ir.graph import Node
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.saved_attention import CausalAttention, CausalAttentionGrad, SeenAttention, SeenAttentionGrad
from specc.compiler.targets import TARGETS

# heads of queries, heads of keys and values, channels of each
SHAPES = {"golf": (8, 4, 64), "gpt2": (12, 12, 64), "one key": (4, 1, 128), "narrow": (3, 3, 8)}
Shape = tuple[int, int, int]


def attention_site(
    shape: Shape = SHAPES["golf"],
    backward: bool = False,
    target: str = "sm90",
    dtype: str = "bf16",
    kind: str = "causal",
    context: int | None = None,
) -> Site:
    """A site of attention over heads of `shape`, or of its gradient: `causal`, to what is `seen` of the sequence
    itself, or of another (`cross`)."""
    heads, groups, channels = shape
    keys = "S" if kind == "cross" else "T"
    q, k = (TensorType(("B", t, count, channels), dtype) for t, count in (("T", heads), (keys, groups)))
    lse = TensorType(("B", heads, "T"), "f32")
    inputs = (q, q, k, k, q, lse) if backward else (q, k, k)
    op: Op = CausalAttentionGrad() if backward else CausalAttention()
    if kind != "causal":
        inputs = (*inputs, TensorType(("B", keys), "bool"))
        op = SeenAttentionGrad() if backward else SeenAttention()
    path = "attention.y.grad" if backward else "attention.y"
    node = Node(path, op, tuple(f"v{i}" for i in range(len(inputs))), op.infer(inputs))
    return Site(node, inputs, TARGETS[target], f"blocks.*.{path}", "sample", context)


def several(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def relative(result: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact| in the Frobenius norm; infinite where `found` holds NaN."""
    error = ((result.double() - exact.double()).norm() / exact.double().norm()).item()
    return error if error == error else float("inf")


def by_formula(dy: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """y, lse, dq, dk, dv of one sequence of one head, [T, C] each, written out token by token."""
    y, lse = torch.zeros_like(q), q.new_zeros(len(q))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    root = q.shape[-1] ** 0.5
    for t in range(len(q)):
        s = k[: t + 1] @ q[t] / root
        lse[t] = s.exp().sum().log()
        p = (s - lse[t]).exp()
        y[t] = p @ v[: t + 1]
        ds = p * (v[: t + 1] @ dy[t] - dy[t] @ y[t])
        dq[t] = ds @ k[: t + 1] / root
        dk[: t + 1] += torch.outer(ds, q[t]) / root
        dv[: t + 1] += torch.outer(p, dy[t])
    return y, lse, dq, dk, dv
