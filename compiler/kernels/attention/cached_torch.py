"""Attention over a cache in plain Torch, for any target. Keys and values are gathered first, and all scores are
computed at once."""

from typing import ClassVar

from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.ops.caches.cached_attention import CachedBase
from specc.compiler.ops.decoding.rope_attention import RopeAttention


class TorchCalls(Kernel):
    """Accepts every attention node except nodes that also write to the cache. The generated function is in its own file
    or in model.py."""

    RANK: ClassVar[int] = 9

    def rejects(self, site: Site) -> str | None:
        return "does not write to a cache" if isinstance(site.node.op, RopeAttention) else None

    def render(self, site: Site) -> Rendered:
        return Rendered("", "", {}, "")


CACHED_TORCH = TorchCalls("cached_attention_torch", "torch", computes=CachedBase)
