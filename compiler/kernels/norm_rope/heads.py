"""The common part of the kernels of attention heads: sizes, names of tensors, and descriptions in generated files."""

from dataclasses import dataclass

from specc.compiler.ir.graph import TensorType
from specc.compiler.kernels.kernel import Site
from specc.compiler.kernels.lines import flowed, unbroken
from specc.compiler.ops.norm_rope import HeadRotation, NormRopeGrad

Named = tuple[str, TensorType]


@dataclass(frozen=True, slots=True)
class Heads:
    """A site of `NormRope` or its gradient. `inputs` and `outputs` are pairs of the name in generated code and the
    type."""

    op: HeadRotation
    backward: bool
    reads_x: bool
    inputs: tuple[Named, ...]
    outputs: tuple[Named, ...]

    @property
    def count(self) -> int:
        """The number of heads per token."""
        return _number(self.inputs[0][1].shape[-2])

    @property
    def channels(self) -> int:
        return _number(self.inputs[0][1].width)

    @property
    def pairs(self) -> int:
        """The number of pairs of channels that are rotated, per head."""
        return _number(dict(self.inputs)["cos"].width)

    @property
    def halves(self) -> bool:
        """Whether all channels of a head are rotated. Pairs then consist of a channel of the first half and a channel
        of the second half."""
        return 2 * self.pairs == self.channels

    @property
    def annotation(self) -> str:
        return "tuple[Tensor, Tensor]" if len(self.outputs) > 1 else "Tensor"


def heads_of(site: Site) -> Heads:
    op = site.node.op
    assert isinstance(op, HeadRotation)
    backward = isinstance(op, NormRopeGrad)
    reads_x = not isinstance(op, NormRopeGrad) or op.reads_x
    names = ("dy" if backward else "", "x" if reads_x else "", "cos", "sin", "gain" if op.gain else "")
    results = ("dx", "dgain") if backward else ("y",)
    inputs = tuple(zip(filter(None, names), site.inputs, strict=True))
    return Heads(op, backward, reads_x, inputs, tuple(zip(results, site.node.types, strict=False)))


def _number(dim: object) -> int:
    assert isinstance(dim, int)
    return dim


def header(site: Site) -> str:
    """Returns label and types as comment lines that leave room for the plan key after the last one."""
    heads = heads_of(site)
    given, outputs = (
        ", ".join(unbroken(f"{name} {type}") for name, type in values) for values in (heads.inputs, heads.outputs)
    )
    return flowed(f"{unbroken(f'{site.label}    ')}{given} -> {outputs}", "# ", "    ", 88)


def about(site: Site) -> str:
    """Returns a description of the computation, to begin a sentence with."""
    heads = heads_of(site)
    words = ["RMSNorm"] * (heads.op.eps is not None) + ["rotary embedding"] + ["gain"] * heads.op.gain
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"the gradient of {listed}" if heads.backward else listed


def promise(site: Site, end: str = "") -> str:
    """Returns the first sentence of the function's docstring, with opening quotes, followed by `end`."""
    heads = heads_of(site)
    shapes = {
        "cos": f"[T, {heads.pairs}]",
        "sin": f"[T, {heads.pairs}]",
        "gain": f"[{heads.count}, 1]",
        "dgain": f"[{heads.count}, 1]",
    }
    whole = f"[..., T, {heads.count}, {heads.channels}]"
    given, outputs = (
        ", ".join(f"{name} {shapes.get(name, whole)} {type.dtype}" for name, type in values)
        for values in (heads.inputs, heads.outputs)
    )
    return flowed(f'"""{given} -> {outputs}.{end}', "    ")


def formulas(site: Site) -> tuple[str, ...]:
    """Returns the formulas, one line per value, as lines of a docstring."""
    heads = heads_of(site)
    lines = _backward(heads) if heads.backward else _forward(heads)
    return tuple(flowed(line, "    ", "    ") for line in lines)


def _forward(heads: Heads) -> list[str]:
    lines, h, eps = [], "x", heads.op.eps
    if eps is not None:
        lines, h = [f"h = x / sqrt(mean(x ** 2) + {eps}), of the {heads.channels} channels of a head"], "h"
    gain = "gain * " if heads.op.gain else ""

    def scaled(value: str) -> str:
        return f"{gain}({value})" if gain else value

    r = heads.pairs
    lines.append(f"y[i] = {scaled(f'{h}[i] * cos[i] + {h}[i + {r}] * sin[i]')} for i < {r}")
    lines.append(f"y[i + {r}] = {scaled(f'{h}[i + {r}] * cos[i] - {h}[i] * sin[i]')}")
    return lines if heads.halves else [*lines, f"y[i] = {gain}{h}[i] for i >= {2 * r}"]


def _backward(heads: Heads) -> list[str]:
    r, eps, gain = heads.pairs, heads.op.eps, heads.op.gain
    dz = "dz" if heads.reads_x else "dx"
    lines = [f"{dz}[i] = dy[i] * cos[i] - dy[i + {r}] * sin[i] for i < {r}"]
    lines.append(f"{dz}[i + {r}] = dy[i + {r}] * cos[i] + dy[i] * sin[i]")
    lines += [] if heads.halves else [f"{dz}[i] = dy[i] for i >= {2 * r}"]
    if eps is not None:
        lines += [f"r = 1 / sqrt(mean(x ** 2) + {eps}), of the {heads.channels} channels of a head"]
        lines += ["s = r * sum(dz * x)", f"dx = {'gain * ' if gain else ''}r * (dz - r * s / {heads.channels} * x)"]
    elif gain:
        lines += ["s = sum(dz * x), of the channels of a head", "dx = gain * dz"]
    return [*lines, "dgain = sum of s over all tokens"] if gain else lines
