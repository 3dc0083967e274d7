"""Attention over a cache by Torch, on any target: all scores at once, from keys and values that are gathered first."""

from typing import ClassVar

from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.ops.caches.cached_attention import CachedBase


class TorchCalls(Kernel):
    """Accepts every node. The function is that of the op, in a file of its own or in model.py."""

    RANK: ClassVar[int] = 9

    def rejects(self, site: Site) -> str | None:
        return None

    def render(self, site: Site) -> Rendered:
        return Rendered("", "", {}, "")


CACHED_TORCH = TorchCalls("cached_attention_torch", "torch", computes=CachedBase)
