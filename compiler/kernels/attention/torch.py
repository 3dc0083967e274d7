"""Attention and its gradient on the CPU, by Torch's own attention kernel."""

from dataclasses import dataclass
from typing import ClassVar

from specc.compiler.kernels.attention.attention import attention_function, is_gradient
from specc.compiler.kernels.generated import GeneratedFunction, python_file
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.ops.attention import CausalAttention, CausalAttentionGrad, SeenAttention, SeenAttentionGrad, SeenOp


@dataclass(frozen=True, slots=True)
class PlainContext:
    """The context of templates/torch/attention_cpu.py.jinja. `sees` states whether it reads the mask `seen`."""

    op: GeneratedFunction
    backward: bool
    sees: bool


@dataclass(frozen=True, slots=True)
class AttentionTorch(Kernel):
    """Accepts heads of any size, on the CPU only."""

    RANK: ClassVar[int] = 9
    portable: ClassVar[bool] = False

    def rejects(self, site: Site) -> str | None:
        if "gpu" in site.target.features:
            return f"is Torch's kernel for the CPU, and not for {site.target.name}"
        return None

    def render(self, site: Site) -> Rendered:
        op = attention_function(site, f"{site.node.op.words} by Torch's kernel for the CPU")
        context = PlainContext(op, is_gradient(site), isinstance(site.node.op, SeenOp))
        return python_file(op, "torch/attention_cpu.py.jinja", context)


ATTENTION_TORCH = AttentionTorch("attention_torch", "torch", computes=CausalAttention)
ATTENTION_GRAD_TORCH = AttentionTorch("attention_grad_torch", "torch", computes=CausalAttentionGrad)
SEEN_TORCH = AttentionTorch("seen_attention_torch", "torch", computes=SeenAttention)
SEEN_GRAD_TORCH = AttentionTorch("seen_attention_grad_torch", "torch", computes=SeenAttentionGrad)
