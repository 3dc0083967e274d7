"""RMSNorm, rotary embedding and gain of attention heads as one op, and its gradient."""

from collections.abc import Sequence
from dataclasses import field
from typing import ClassVar

from specc.compiler.expr import name_of, reread, torch_value
from specc.compiler.ir.graph import output_ref
from specc.compiler.ir.op import ADDED, Gradients, Op, Tape
from specc.compiler.ir.types import Dim, Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.positions import rotated, rotation_flops
from specc.compiler.records import record

USUAL_EPS = 1e-6  # the default epsilon, which names and plans omit


@record
class HeadRotation(Op):
    """The base class of NormRope and its gradient.

    Attributes:
        eps: The epsilon of the norm. None if there is no norm.
        gain: Whether each head is multiplied by a factor.
        neighbors: Whether channel 2i is paired with channel 2i + 1. Otherwise, channel i is paired with channel R + i.
        weight: The factor of each channel after the norm, as an expression of a learned `w` that all heads share. Empty
            if there is no such factor.
    """

    planned: ClassVar[bool] = True
    work: ClassVar[str] = "norm and rotary"
    eps: float | None = None
    gain: bool = False
    neighbors: bool = field(default=False, metadata=ADDED)
    weight: str = field(default="", metadata=ADDED)

    @property
    def parts(self) -> tuple[str, ...]:
        """Returns the words of a kernel name. Each word stands for one operation on a head."""
        norm = f"norm{'' if self.eps == USUAL_EPS else _letters(self.eps)}" if self.eps is not None else ""
        weight = "_".join(filter(None, ("w", name_of(reread(self.weight))))) if self.weight else ""
        return tuple(filter(None, (norm, weight, self._rotary("rotary"), "gain" if self.gain else "")))

    @property
    def learned(self) -> tuple[str, ...]:
        """Returns the names of the learned inputs, which follow the angles."""
        return (*["weight"] * bool(self.weight), *["gain"] * self.gain)

    def _rotary(self, name: str) -> str:
        return f"{name}_neighbors" if self.neighbors else name

    @property
    def description(self) -> str:
        norm = "rms_norm" if self.eps is not None else ""
        norm += f" of eps {self.eps}" if self.eps not in (None, USUAL_EPS) else ""
        weight = f"weight {self.weight}" if self.weight else ""
        return ", ".join(filter(None, (norm, weight, self._rotary("rope"), "gain" if self.gain else "")))


class NormRope(HeadRotation):
    """Computes rope(rms_norm(x) * weight) * gain.

    The inputs are x [..., T, H, C], the angles cos and sin f32[T, R], w [C] and gain [H, 1].

    The first 2R of C channels are rotated. Kernels compute in f32 or wider and round once. The angles have no
    gradient.
    """

    name: ClassVar[str] = "norm_rope"
    keeps_features: ClassVar[bool] = True
    writes_parts: ClassVar[bool] = True

    @property
    def arity(self) -> int:
        return 3 + len(self.learned)

    @property
    def words(self) -> str:
        return self.description

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        return "_".join(self.parts), _size(inputs[0], inputs[1])

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        _check(self, *inputs)
        return (inputs[0],)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        each = 4 * (self.eps is not None) + len(self.learned)
        return rotation_flops(inputs[0], inputs[1], sizes) + each * inputs[0].count(sizes)

    def reference(self, *inputs: Tensor) -> Tensors:
        """Rounds after the norm, the rotation and the gain, as separate Torch operations do."""
        import torch

        x, cos, sin, *learned = inputs
        parameters = dict(zip(self.learned, learned, strict=True))
        wide = torch.promote_types(x.dtype, torch.float32)
        h = x.to(wide)
        if self.eps is not None:
            h = h / (h.square().mean(-1, keepdim=True) + self.eps).sqrt()
            if self.weight:
                h = h * torch_value(reread(self.weight), {"w": parameters["weight"]})
            h = h.to(x.dtype).to(wide)
        angle = torch.complex(cos.to(wide), -sin.to(wide)).unsqueeze(-2)
        y = torch.cat((rotated(h, angle, self.neighbors), h[..., 2 * cos.shape[-1] :]), -1).to(x.dtype)
        return (y * parameters["gain"]).to(x.dtype) if self.gain else y

    def derivative(self, tape: Tape) -> Gradients | None:
        op = NormRopeGrad(self.eps, self.gain, self.neighbors, self.weight)
        read = range(self.arity) if op.reads_x else range(1, self.arity)
        dx = tape.add("grad", op, (tape.grad(), *map(tape.input, read)))
        return (dx, None, None, *(output_ref(dx, i) for i, _ in enumerate(self.learned, 1)))


class NormRopeGrad(HeadRotation):
    """The gradients of NormRope from dy, x, cos, sin, w and gain: dx, then dweight [C] and dgain [H, 1] for the inputs
    that are learned.

    Let r = 1 / sqrt(mean(x^2) + eps), let dz be dy rotated back, and let s = sum(dz * x * r) over the channels of a
    head. Then dx = r * gain * (dz - x * r * s / C), and dgain is the sum of s over all tokens. Without norm and gain,
    dx = dz, and x is not an input.

    With a weight, dz * weight replaces dz in these formulas. dweight is the sum over all heads and tokens of gain * r *
    x * dz, times the derivative of the weight with respect to `w`.
    """

    name: ClassVar[str] = "norm_rope_grad"
    gradient: ClassVar[bool] = True

    @property
    def reads_x(self) -> bool:
        return self.eps is not None or self.gain

    @property
    def arity(self) -> int:
        return 3 + self.reads_x + len(self.learned)

    @property
    def output_labels(self) -> tuple[str, ...]:
        return ("dx", *(f"d{name}" for name in self.learned)) if self.learned else ()

    @property
    def words(self) -> str:
        return f"gradient of {self.description}"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        return "_".join((*self.parts, "grad")), _size(inputs[0], inputs[1 + self.reads_x])

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        dy, *others = inputs
        x = others.pop(0) if self.reads_x else dy
        if x != dy:
            raise TypeRuleError(f"needs a gradient of type {x}, not {dy}", (0, 1))
        _check(self, x, *others)
        return (x, *others[2:])

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        # The norm needs a sum of squares and a multiple of x. Norm and gain need s and a factor. The weight needs a
        # factor, and the gradient of the weight needs a sum of products.
        each = 4 * (self.eps is not None) + 3 * self.reads_x + 4 * bool(self.weight)
        return rotation_flops(inputs[0], inputs[1 + self.reads_x], sizes) + each * inputs[0].count(sizes)

    def reference(self, *inputs: Tensor) -> Tensors:
        import torch

        dy, *others = (value.detach() for value in inputs)
        x = others.pop(0) if self.reads_x else torch.zeros_like(dy)
        cos, sin, *learned = others
        leaves = [x.requires_grad_(), *(value.requires_grad_() for value in learned)]
        with torch.enable_grad():
            y = NormRope(self.eps, self.gain, self.neighbors, self.weight).reference(x, cos, sin, *learned)
        assert isinstance(y, torch.Tensor)
        gradients = torch.autograd.grad(y, leaves, dy)
        return gradients if learned else gradients[0]

    def into(self, at: int) -> Op | None:
        return NormRopeGradInto(self.eps, self.gain, self.neighbors, self.weight, at)


@record
class NormRopeGradInto(NormRopeGrad):
    """The gradients of NormRope, with dx [..., T, H, C] written into a wider tensor [..., T, D]. This tensor is the
    last input and the first output. dx replaces H C consecutive features of this tensor. The index of the first of
    these features is `at`."""

    name: ClassVar[str] = "norm_rope_grad_into"
    assigned: ClassVar[bool] = True
    written: ClassVar[int | None] = -1
    at: int = 0

    @property
    def arity(self) -> int:
        return 4 + self.reads_x + len(self.learned)

    @property
    def words(self) -> str:
        return f"gradient of {self.description}, into a wider tensor"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        words, size = NormRopeGrad.symbol(self, inputs)
        return f"{words}_into", f"{size}_at{self.at}_of{inputs[-1].width}"

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        *others, whole = inputs
        dx, *learned = NormRopeGrad.infer(self, others)
        (heads, channels), width = dx.shape[-2:], whole.width
        assert isinstance(heads, int) and isinstance(channels, int) and isinstance(width, int)
        if (whole.shape[:-1], whole.dtype) != (dx.shape[:-2], dx.dtype) or self.at + heads * channels > width:
            raise TypeRuleError(
                f"cannot write the gradient {dx} to {whole} from feature {self.at} on: the types do not match", (0, -1)
            )
        return (whole, *learned)

    def moved(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return sum(type.bytes(sizes) for type in (*inputs[:-1], inputs[0], *outputs[1:]))

    def reference(self, *inputs: Tensor) -> Tensors:
        *others, whole = inputs
        results = NormRopeGrad.reference(self, *others)
        dx, *learned = results if isinstance(results, tuple) else (results,)
        written = whole.clone()
        written[..., self.at : self.at + dx.shape[-2:].numel()] = dx.flatten(-2)
        return (written, *learned) if learned else written


def _check(op: HeadRotation, x: TensorType, cos: TensorType, sin: TensorType, *learned: TensorType) -> None:
    if len(x.shape) < 3:
        raise TypeRuleError(f"takes heads [..., T, H, C] but {{input}} gives {x}", (0,))
    (tokens, heads), channels, pairs = x.shape[-3:-1], x.width, cos.width
    if cos != sin or cos.shape != (tokens, pairs):
        raise TypeRuleError(f"needs angles [T, R] for the tokens of {x}, not {cos} and {sin}", (0, 1, 2))
    assert isinstance(channels, int) and isinstance(pairs, int)
    if 2 * pairs > channels:
        raise TypeRuleError(f"cannot rotate {2 * pairs} channels: a head has {channels}", (0, 1))
    shapes: dict[str, tuple[Dim, ...]] = {"weight": (channels,), "gain": (heads, 1)}
    for i, (name, type) in enumerate(zip(op.learned, learned, strict=True), 3):
        if type.shape != shapes[name]:
            raise TypeRuleError(f"needs a {name} {shapes[name]}, not {type}", (0, i))


def _size(x: TensorType, cos: TensorType) -> str:
    sizes: tuple[Dim, ...] = (*x.shape[-2:], cos.width)
    return "_".join(f"{letter}{size}" for letter, size in zip("hcr", sizes, strict=True))


def _letters(number: float) -> str:
    return f"{number:g}".replace("-", "m").replace(".", "p").replace("+", "")
