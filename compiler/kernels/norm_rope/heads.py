"""The code that all kernels of this folder share: sizes, tensor names, and descriptions in generated files."""

from specc.compiler.expr import derive, number, reread, variables
from specc.compiler.kernels.generated import GeneratedFunction, Tensors, generated_function, number_of
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.norm_rope import HeadRotation, NormRopeGrad, NormRopeGradInto
from specc.compiler.records import record

WHOLE = "whole"  # the name of the tensor that dx is a part of


@record
class Heads:
    """A site of `NormRope` or its gradient. `inputs` and `outputs` map names in generated code to types. If dx is
    written to a part of a wider tensor, `at` is the index of the first feature of this part."""

    op: HeadRotation
    backward: bool
    reads_x: bool
    inputs: Tensors
    outputs: Tensors
    at: int | None = None

    @property
    def width(self) -> int:
        """The number of features of the wider tensor that contains dx."""
        return number_of(self.inputs[WHOLE].width)

    @property
    def count(self) -> int:
        """The number of heads per token."""
        return number_of(next(iter(self.inputs.values())).shape[-2])

    @property
    def channels(self) -> int:
        return number_of(next(iter(self.inputs.values())).width)

    @property
    def pairs(self) -> int:
        """The number of rotated pairs of channels per head."""
        return number_of(self.inputs["cos"].width)

    @property
    def halves(self) -> bool:
        """Whether all channels of a head are rotated, with the two channels of each pair in different halves of the
        head."""
        return 2 * self.pairs == self.channels and not self.op.neighbors

    @property
    def weight_slope(self) -> str:
        """The derivative of the weight expression with respect to `w`, as text. The text is empty if the derivative is
        1."""
        slope = derive(reread(self.op.weight), "w")
        return "" if not variables(slope) and number(slope) == 1 else str(slope)

    @property
    def pair(self) -> tuple[str, str]:
        """A description of the two channels of pair i."""
        return ("2i", "2i + 1") if self.op.neighbors else ("i", f"i + {self.pairs}")

    @property
    def rest(self) -> bool:
        """Whether some channels of a head are not rotated."""
        return 2 * self.pairs < self.channels


def heads_of(site: Site) -> Heads:
    op = site.node.op
    assert isinstance(op, HeadRotation)
    backward = isinstance(op, NormRopeGrad)
    reads_x = not isinstance(op, NormRopeGrad) or op.reads_x
    at = op.at if isinstance(op, NormRopeGradInto) else None
    whole = WHOLE if at is not None else ""
    names = ("dy" if backward else "", "x" if reads_x else "", "cos", "sin", *op.learned, whole)
    results = (whole or "dx", *(f"d{name}" for name in op.learned)) if backward else ("y",)
    inputs = dict(zip(filter(None, names), site.inputs, strict=True))
    return Heads(op, backward, reads_x, inputs, dict(zip(results, site.node.types, strict=True)), at)


def about(site: Site) -> str:
    """Returns a description of the computation, for the beginning of a sentence."""
    heads = heads_of(site)
    words = ["RMSNorm"] * (heads.op.eps is not None) + ["weight"] * bool(heads.op.weight) + ["rotary embedding"]
    words += ["gain"] * heads.op.gain
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"the gradient of {listed}" if heads.backward else listed


def heads_function(site: Site, summary: str, launched: tuple[str, ...] = ()) -> GeneratedFunction:
    heads = heads_of(site)
    shapes = dict.fromkeys(("x", "y", "dy", "dx"), f"[..., T, {heads.count}, {heads.channels}]")
    shapes |= dict.fromkeys(("cos", "sin"), f"[T, {heads.pairs}]")
    shapes |= dict.fromkeys(("gain", "dgain"), f"[{heads.count}, 1]")
    shapes |= dict.fromkeys(("weight", "dweight"), f"[{heads.channels}]")
    formulas = _backward(heads) if heads.backward else _forward(heads)
    if heads.at is not None:
        shapes[WHOLE] = f"[..., T, {heads.width}]"
        features = heads.count * heads.channels
        formulas.append(f"whole[{heads.at} : {heads.at + features}] = dx, of all heads; the other features remain")
    return generated_function(site, heads.inputs, heads.outputs, shapes, summary, formulas, launched=launched)


def _forward(heads: Heads) -> list[str]:
    lines, h, eps = [], "x", heads.op.eps
    if eps is not None:
        weight = f" * ({heads.op.weight})" if heads.op.weight else ""
        of = f", of the {heads.channels} channels of a head{', with w = weight' if weight else ''}"
        lines, h = [f"h = x / sqrt(mean(x ** 2) + {eps}){weight}{of}"], "h"
    gain = "gain * " if heads.op.gain else ""

    def scaled(value: str) -> str:
        return f"{gain}({value})" if gain else value

    r, (a, b) = heads.pairs, heads.pair
    lines.append(f"y[{a}] = {scaled(f'{h}[{a}] * cos[i] + {h}[{b}] * sin[i]')} for i < {r}")
    lines.append(f"y[{b}] = {scaled(f'{h}[{b}] * cos[i] - {h}[{a}] * sin[i]')}")
    return [*lines, f"y[i] = {gain}{h}[i] for i >= {2 * r}"] if heads.rest else lines


def _backward(heads: Heads) -> list[str]:
    r, eps, gain = heads.pairs, heads.op.eps, heads.op.gain
    dz, (a, b) = "dz" if heads.reads_x else "dx", heads.pair
    lines = [f"{dz}[{a}] = dy[{a}] * cos[i] - dy[{b}] * sin[i] for i < {r}"]
    lines.append(f"{dz}[{b}] = dy[{b}] * cos[i] + dy[{a}] * sin[i]")
    lines += [f"{dz}[i] = dy[i] for i >= {2 * r}"] * heads.rest
    if eps is not None:
        lines += [f"r = 1 / sqrt(mean(x ** 2) + {eps}), of the {heads.channels} channels of a head"]
        if heads.op.weight:
            slope = f"{heads.weight_slope} times " if heads.weight_slope else ""
            lines += [f"dweight = {slope}sum of {'gain * ' if gain else ''}r * x * dz over all tokens and heads"]
            lines += [f"dz = dz * ({heads.op.weight}), with w = weight"]
        lines += ["s = r * sum(dz * x)", f"dx = {'gain * ' if gain else ''}r * (dz - r * s / {heads.channels} * x)"]
    elif gain:
        lines += ["s = sum(dz * x), of the channels of a head", "dx = gain * dz"]
    return [*lines, "dgain = sum of s over all tokens"] if gain else lines
