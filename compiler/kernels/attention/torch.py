"""Attention and its gradient on the CPU, by Torch's own attention kernel."""

from dataclasses import dataclass
from typing import ClassVar

from specc.compiler.ir.graph import Op
from specc.compiler.kernels.attention.attention import annotation, formulas, header, heads_of, promise
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, symbol
from specc.compiler.kernels.lines import flowed, listed
from specc.compiler.ops.attention import CausalAttention, CausalAttentionGrad
from specc.compiler.ops.attention_seen import SeenAttention, SeenAttentionGrad, SeenOp

HIDDEN = "hidden = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf)"
ROWS = "hidden = hidden[:, None, None].expand(-1, q.shape[1], q.shape[2], -1)  # [B, H, T, S]"


@dataclass(frozen=True, slots=True)
class PlainContext:
    """The context of templates/torch/attention_cpu_forward.py.jinja and attention_cpu_backward.py.jinja. `mask` are the
    lines that compute the attention mask, and `masked` is the argument that passes it."""

    header: str
    summary: str
    formulas: tuple[str, ...]
    signature: str
    promise: str
    mask: tuple[str, ...]
    masked: str


@dataclass(frozen=True, slots=True)
class AttentionTorch(Kernel):
    """Accepts heads of any size, on the CPU only."""

    portable: ClassVar[bool] = False

    def rejects(self, site: Site) -> str | None:
        if "gpu" in site.target.features:
            return f"is Torch's kernel for the CPU, and not for {site.target.name}"
        return None

    def rank(self, site: Site) -> int:
        return 9

    def render(self, site: Site) -> Rendered:
        function, module = symbol(site)
        backward, inputs, _ = heads_of(site)
        arguments = [f"{name}: Tensor" for name in inputs]
        sees = isinstance(site.node.op, SeenOp)
        context = PlainContext(
            header(site),
            flowed(f'"""{site.label}: {site.node.op.words} by Torch\'s kernel for the CPU.'),
            formulas(site),
            listed(f"def {function}(", arguments, f") -> {annotation(site)}:"),
            promise(site),
            (HIDDEN, ROWS) if sees else (),
            "is_causal=False, attn_mask=hidden" if sees else "is_causal=True",
        )
        template = f"torch/attention_cpu_{'backward' if backward else 'forward'}.py.jinja"
        return Rendered(function, module, {f"{module}.py": (template, context)}, "")


@dataclass(frozen=True, slots=True)
class ForwardTorch(AttentionTorch):
    computes: ClassVar[type[Op]] = CausalAttention


@dataclass(frozen=True, slots=True)
class BackwardTorch(AttentionTorch):
    computes: ClassVar[type[Op]] = CausalAttentionGrad


@dataclass(frozen=True, slots=True)
class SeenForwardTorch(AttentionTorch):
    computes: ClassVar[type[Op]] = SeenAttention


@dataclass(frozen=True, slots=True)
class SeenBackwardTorch(AttentionTorch):
    computes: ClassVar[type[Op]] = SeenAttentionGrad


ATTENTION_TORCH = ForwardTorch("attention_torch", "torch", frozenset())
ATTENTION_GRAD_TORCH = BackwardTorch("attention_grad_torch", "torch", frozenset())
SEEN_TORCH = SeenForwardTorch("seen_attention_torch", "torch", frozenset())
SEEN_GRAD_TORCH = SeenBackwardTorch("seen_attention_grad_torch", "torch", frozenset())
