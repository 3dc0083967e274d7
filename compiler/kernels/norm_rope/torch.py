"""Norm, rotary embedding and gain of attention heads as plain Torch functions: a readable reference, and the
implementation for the CPU."""

from dataclasses import dataclass
from typing import ClassVar

from specc.compiler.ir.graph import Op
from specc.compiler.kernels.custom_op import DTYPES
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, symbol
from specc.compiler.kernels.lines import flowed, listed
from specc.compiler.kernels.norm_rope.heads import Heads, about, formulas, header, heads_of, promise
from specc.compiler.ops.norm_rope import HeadRotation


@dataclass(frozen=True, slots=True)
class PlainContext:
    """The context of templates/torch/norm_rope.py.jinja."""

    TEMPLATE: ClassVar[str] = "torch/norm_rope.py.jinja"
    header: str
    summary: str
    formulas: tuple[str, ...]
    signature: str
    promise: str
    lines: tuple[str, ...]
    returns: str
    uses_functional: bool


@dataclass(frozen=True, slots=True)
class NormRopeTorch(Kernel):
    """Accepts heads of any size, on targets without a GPU."""

    computes: ClassVar[type[Op]] = HeadRotation

    def rejects(self, site: Site) -> str | None:
        if "gpu" in site.target.features:
            return f"on {site.target.name} Torch would run each part as a kernel of its own, which is not fused"
        return None

    def rank(self, site: Site) -> int:
        return 9

    def render(self, site: Site) -> Rendered:
        function, module = symbol(site)
        heads = heads_of(site)
        lines, returns = (_backward if heads.backward else _forward)(heads)
        arguments = [f"{name}: Tensor" for name, _ in heads.inputs]
        words = about(site)
        context = PlainContext(
            header(site),
            flowed(f'"""{words[0].upper()}{words[1:]} in plain Torch, for targets without kernels of their own.'),
            formulas(site),
            listed(f"def {function}(", arguments, f") -> {heads.annotation}:"),
            promise(site, '"""'),
            lines,
            returns,
            any("F." in line for line in lines),
        )
        return Rendered(function, module, {f"{module}.py": (context.TEMPLATE, context)}, "")


NORM_ROPE_TORCH = NormRopeTorch("norm_rope_torch", "torch", frozenset())


_BROADCAST = "cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)"  # over heads


def _split(heads: Heads, value: str) -> str:
    """Returns the line that splits the channels of a value into those that are rotated and the rest."""
    if heads.halves:
        return f"a, b = {value}.chunk(2, -1)"
    return f"a, b, rest = {value}.split(({heads.pairs}, {heads.pairs}, {heads.channels - 2 * heads.pairs}), -1)"


def _turned(heads: Heads, first: str, second: str) -> str:
    return f"torch.cat(({first}, {second}{'' if heads.halves else ', rest'}), -1)"


def _forward(heads: Heads) -> tuple[tuple[str, ...], str]:
    """Returns the lines of the forward and the expression it returns. The angles are f32, so the rotation is computed
    in f32."""
    eps = heads.op.eps
    norm = [f"h = F.rms_norm(x, ({heads.channels},), eps={eps})"] * (eps is not None)
    turned = _turned(heads, "a * cos + b * sin", "b * cos - a * sin")
    cast = "" if heads.inputs[0][1].dtype == "f32" else ".type_as(x)"
    lines = (*norm, _split(heads, "h" if norm else "x"), _BROADCAST)
    return lines, f"{turned}{cast}{' * gain' if heads.op.gain else ''}"


def _backward(heads: Heads) -> tuple[tuple[str, ...], str]:
    """Returns the lines of the backward and the expression it returns. Inputs of fewer bits are converted to f32
    first."""
    eps, gain, dtype = heads.op.eps, heads.op.gain, heads.inputs[0][1].dtype
    read = ["dy", "x"] if heads.reads_x else ["dy"]
    cast = "" if dtype == "f32" else f".to({DTYPES[dtype]})"
    lines = [f"{', '.join(read)} = {', '.join(f'{name}.float()' for name in read)}"] if cast else []
    turned = _turned(heads, "a * cos - b * sin", "b * cos + a * sin")
    lines += [_split(heads, "dy"), _BROADCAST]
    if not heads.reads_x:
        return tuple(lines), f"{turned}{cast}"
    lines.append(f"dz = {turned}")
    dx = "gain * dz"
    if eps is not None:
        lines.append(f"r = (x.square().mean(-1, keepdim=True) + {eps}).rsqrt()")
        lines.append("s = r * (dz * x).sum(-1, keepdim=True)")
        dx = f"{'gain * ' if gain else ''}r * (dz - r * s / {heads.channels} * x)"
    else:
        lines.append("s = (dz * x).sum(-1, keepdim=True)")
    dx = f"({dx}){cast}" if cast else dx
    return tuple(lines), f"{dx}, s.flatten(0, -3).sum(0){cast}" if gain else dx
