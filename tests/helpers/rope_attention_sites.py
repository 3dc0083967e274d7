"""Sites of attention of one new token per text that is rotated and written to the cache, and random inputs."""

from dataclasses import replace

import torch
from cached_sites import CASES, Cached, cached_inputs
from torch import Tensor

from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.caches.cached_attention import CachedBase
from specc.compiler.ops.decoding.rope_attention import RopeAttention

# pairs of channels, whether they are neighbors
STEPS: dict[str, tuple[Cached, int, bool]] = {
    name: (case, case.shape[2] // (4 if place % 3 else 2), place % 2 == 1)
    for place, (name, case) in enumerate(CASES.items())
    if not case.shared and case.attention.mask != "j <= i or j < prefix"
}


def rope_attention_site(
    case: Cached, pairs: int, neighbors: bool, dtype: str = "bf16", target: str = "sm90", context: int | None = 2048
) -> Site:
    """A site of the attention of a case, for one new token per text."""
    site = case.site(dtype, target, context)
    attend = site.node.op
    assert isinstance(attend, CachedBase)
    op = RopeAttention(*attend.of_scores, None, attend.coded, attend.ring, neighbors, case.page > 0)
    given = dict(zip(attend.names, site.inputs, strict=True))
    q, heads = given["q"], case.shape[1]
    given |= {"new_k": q.with_shape("B", "T", heads, case.shape[2]), "cos": TensorType(("T", pairs), "f32")}
    given |= {"new_v": q.with_shape("B", "T", heads, case.values or case.shape[2]), "sin": given["cos"]}
    inputs = tuple(given[name] for name in op.names)
    node = Node("attention.y", op, tuple(f"v{i}" for i in range(len(inputs))), op.infer(inputs))
    return replace(site, node=node, inputs=inputs)


def rope_attention_inputs(
    case: Cached, site: Site, lengths: tuple[int, ...], seed: int, apart: int = 0
) -> list[Tensor]:
    """Random inputs for texts of `lengths` tokens, of which the last is new. Its row in the cache has NaN, or codes of
    large numbers, which must not be read."""
    op, generator = site.node.op, torch.Generator().manual_seed(seed + 1000)
    assert isinstance(op, RopeAttention)
    plain = case.site(site.inputs[0].dtype, site.target.name)
    given = dict(zip(op.attend.names, cached_inputs(case, plain, lengths, 1, seed, apart), strict=True))
    types = dict(zip(op.names, site.inputs, strict=True))
    leading = given["q"].shape[:2]
    for name in ("new_k", "new_v"):
        shape = *leading, *(int(size) for size in types[name].shape[2:])
        given[name] = torch.randn(shape, generator=generator).to(given["q"].dtype)
    angles = torch.rand(len(given["positions"]), int(types["cos"].width), generator=generator) * 7
    given |= {"cos": angles.cos(), "sin": angles.sin()}
    for name in op.names[5:7] if op.ring is None else ():
        row = torch.tensor(0x7E if op.coded else torch.nan).to(given[name].dtype)
        if case.page:
            for text, position in enumerate(given["positions"].tolist()):
                given[name][given["table"][text, position // case.page], position % case.page] = row
        else:
            given[name][:, given["positions"]] = row
    return [given[name] for name in op.names]
