"""Norm, rotary embedding and gain of attention heads as plain Torch functions: a readable reference, and the kernels
of the CPU."""

from typing import ClassVar, NamedTuple

from specc.compiler.expr import reread, torch_text
from specc.compiler.expr.python_lines import operand
from specc.compiler.ir.types import DTYPES
from specc.compiler.kernels.generated import GeneratedFunction, python_file
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, unless_cpu
from specc.compiler.kernels.norm_rope.heads import WHOLE, Heads, about, heads_function, heads_of
from specc.compiler.ops.norm_rope import HeadRotation


class PlainContext(NamedTuple):
    """The context of templates/torch/norm_rope.py.jinja."""

    op: GeneratedFunction
    lines: tuple[str, ...]
    returns: str
    uses_functional: bool


class NormRopeTorch(Kernel):
    """Accepts heads of any size, on targets without a GPU."""

    RANK: ClassVar[int] = 9

    def rejects(self, site: Site) -> str | None:
        return unless_cpu(site, "would run each part as a separate kernel, not fused")

    def render(self, site: Site) -> Rendered:
        heads, words = heads_of(site), about(site)
        lines, returns = (_backward if heads.backward else _forward)(heads)
        summary = f"{words[0].upper()}{words[1:]} in plain Torch, for targets without kernels of their own."
        op = heads_function(site, summary)
        context = PlainContext(op, lines, returns, any("F." in line for line in lines))
        return python_file(op, "torch/norm_rope.py.jinja", context)


NORM_ROPE_TORCH = NormRopeTorch("norm_rope_torch", "torch", computes=HeadRotation)


_BROADCAST = "cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)"  # over heads


def _split(heads: Heads, value: str) -> str:
    if heads.op.neighbors and heads.rest:
        turned = f"{value}[..., :{2 * heads.pairs}]"
        return f"(a, b), rest = {turned}.unflatten(-1, (-1, 2)).unbind(-1), {value}[..., {2 * heads.pairs}:]"
    if heads.op.neighbors:
        return f"a, b = {value}.unflatten(-1, (-1, 2)).unbind(-1)"
    if heads.halves:
        return f"a, b = {value}.chunk(2, -1)"
    return f"a, b, rest = {value}.split(({heads.pairs}, {heads.pairs}, {heads.channels - 2 * heads.pairs}), -1)"


def _turned(heads: Heads, first: str, second: str) -> tuple[list[str], str]:
    if heads.op.neighbors:
        turned = f"torch.stack(({first}, {second}), -1).flatten(-2)"
        return ([f"turned = {turned}"], "torch.cat((turned, rest), -1)") if heads.rest else ([], turned)
    return [], f"torch.cat(({first}, {second}{', rest' * heads.rest}), -1)"


def _forward(heads: Heads) -> tuple[tuple[str, ...], str]:
    eps = heads.op.eps
    weight = f", {_weight(heads)}" if heads.op.weight else ""
    norm = [f"h = F.rms_norm(x, ({heads.channels},){weight}, eps={eps})"] * (eps is not None)
    rotation, turned = _turned(heads, "a * cos + b * sin", "b * cos - a * sin")
    cast = "" if next(iter(heads.inputs.values())).dtype == "f32" else ".type_as(x)"
    lines = (*norm, _split(heads, "h" if norm else "x"), _BROADCAST, *rotation)
    return lines, f"{turned}{cast}{' * gain' if heads.op.gain else ''}"


def _backward(heads: Heads) -> tuple[tuple[str, ...], str]:
    eps, gain, dtype = heads.op.eps, heads.op.gain, next(iter(heads.inputs.values())).dtype
    read = ["dy", "x"] if heads.reads_x else ["dy"]
    cast = "" if dtype == "f32" else f".to({DTYPES[dtype]})"
    lines = [f"{', '.join(read)} = {', '.join(f'{name}.float()' for name in read)}"] if cast else []
    rotation, turned = _turned(heads, "a * cos - b * sin", "b * cos + a * sin")
    lines += [_split(heads, "dy"), _BROADCAST, *rotation]
    if not heads.reads_x:
        return _written(heads, lines, f"{turned}{cast}"), _first(heads, f"{turned}{cast}")
    lines.append(f"dz = {turned}")
    dx = "gain * dz"
    if eps is not None:
        lines.append(f"r = (x.square().mean(-1, keepdim=True) + {eps}).rsqrt()")
        if heads.op.weight:
            slope = heads.weight_slope
            times = f" * {operand(torch_text(reread(slope), {'w': 'weight'}))}" if slope else ""
            total = f"({'gain * ' if gain else ''}r * x * dz).flatten(0, -2).sum(0)"
            lines.append(f"dweight = {f'({total}{times})' if times and cast else total + times}{cast}")
            lines.append(f"dz = dz * {operand(_weight(heads))}")
        lines.append("s = r * (dz * x).sum(-1, keepdim=True)")
        dx = f"{'gain * ' if gain else ''}r * (dz - r * s / {heads.channels} * x)"
    else:
        lines.append("s = (dz * x).sum(-1, keepdim=True)")
    dx = f"({dx}){cast}" if cast else dx
    dgain = f"s.flatten(0, -3).sum(0){cast}"
    if heads.op.weight:
        lines += [f"dgain = {dgain}"] * gain
        return _written(heads, lines, dx), f"{_first(heads, dx)}, dweight{', dgain' if gain else ''}"
    return _written(heads, lines, dx), f"{_first(heads, dx)}, {dgain}" if gain else _first(heads, dx)


def _first(heads: Heads, dx: str) -> str:
    return dx if heads.at is None else WHOLE


def _written(heads: Heads, lines: list[str], dx: str) -> tuple[str, ...]:
    if heads.at is None:
        return tuple(lines)
    features = heads.count * heads.channels
    return (*lines, f"{WHOLE}[..., {heads.at}:{heads.at + features}] = {operand(dx)}.flatten(-2)")


def _weight(heads: Heads) -> str:
    return torch_text(reread(heads.op.weight), {"w": "weight"})
