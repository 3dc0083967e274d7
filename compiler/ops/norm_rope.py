"""RMSNorm, rotary embedding and gain of attention heads as one op, and its gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from specc.compiler.ir.graph import ADDED, Dim, Gradients, Op, Sizes, Tape, TensorType, TypeRuleError, output_ref
from specc.compiler.ops.positions import rotated

if TYPE_CHECKING:
    from torch import Tensor

USUAL_EPS = 1e-6  # the default, which names and plans omit


@dataclass(frozen=True, slots=True)
class HeadRotation(Op):
    """Base of NormRope and its gradient. With `eps` None nothing is normalized. With `gain` each head has a factor.

    With `neighbors`, channel 2i is paired with channel 2i + 1, else channel i with channel R + i.
    """

    planned: ClassVar[bool] = True
    work: ClassVar[str] = "norm and rotary"
    eps: float | None = None
    gain: bool = False
    neighbors: bool = field(default=False, metadata=ADDED)

    @property
    def parts(self) -> tuple[str, ...]:
        """Returns one word per operation on a head, in order, for kernel names."""
        norm = f"norm{'' if self.eps == USUAL_EPS else _letters(self.eps)}" if self.eps is not None else ""
        return tuple(filter(None, (norm, self._rotary("rotary"), "gain" if self.gain else "")))

    def _rotary(self, name: str) -> str:
        return f"{name}_neighbors" if self.neighbors else name

    @property
    def description(self) -> str:
        """Returns the operations on a head as text for people."""
        norm = "rms_norm" if self.eps is not None else ""
        norm += f" of eps {self.eps}" if self.eps not in (None, USUAL_EPS) else ""
        return ", ".join(filter(None, (norm, self._rotary("rope"), "gain" if self.gain else "")))


@dataclass(frozen=True, slots=True)
class NormRope(HeadRotation):
    """Computes rope(rms_norm(x)) * gain for x [..., T, H, C], angles cos and sin f32[T, R] and gain [H, 1].

    The first 2R of C channels are rotated. Kernels compute in f32 or wider and
    round once. The angles have no gradient.
    """

    name: ClassVar[str] = "norm_rope"
    keeps_features: ClassVar[bool] = True

    @property
    def arity(self) -> int:
        return 4 if self.gain else 3

    @property
    def words(self) -> str:
        return self.description

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        return "_".join(self.parts), _size(inputs[0], inputs[1])

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        x, cos, sin, *gain = inputs
        _check(x, cos, sin, gain)
        return (x,)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return _turns(inputs[0], inputs[1], sizes) + (4 * (self.eps is not None) + self.gain) * inputs[0].count(sizes)

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        """Rounds after the norm, the rotation and the gain, as separate Torch operations do."""
        import torch

        x, cos, sin, *gain = inputs
        wide = torch.promote_types(x.dtype, torch.float32)
        h = x.to(wide)
        if self.eps is not None:
            h = h / (h.square().mean(-1, keepdim=True) + self.eps).sqrt()
            h = h.to(x.dtype).to(wide)
        angle = torch.complex(cos.to(wide), -sin.to(wide)).unsqueeze(-2)
        y = torch.cat((rotated(h, angle, self.neighbors), h[..., 2 * cos.shape[-1] :]), -1).to(x.dtype)
        return (y * gain[0]).to(x.dtype) if gain else y

    def derivative(self, tape: Tape) -> Gradients | None:
        op = NormRopeGrad(self.eps, self.gain, self.neighbors)
        read = range(self.arity) if op.reads_x else range(1, self.arity)
        dx = tape.add("grad", op, (tape.grad(), *map(tape.input, read)))
        return (dx, None, None, output_ref(dx, 1)) if self.gain else (dx, None, None)


@dataclass(frozen=True, slots=True)
class NormRopeGrad(HeadRotation):
    """The gradients of NormRope from dy, x, cos, sin and gain: dx and, with a gain, dgain [H, 1].

    With r = 1 / sqrt(mean(x^2) + eps), dz = dy rotated back and s = sum(dz * x * r) over the channels of a head: dx = r
    * gain * (dz - x * r * s / C), and dgain is the sum of s over all tokens. With neither norm nor gain, dx = dz, and x
    is not an input.
    """

    name: ClassVar[str] = "norm_rope_grad"
    gradient: ClassVar[bool] = True

    @property
    def reads_x(self) -> bool:
        return self.eps is not None or self.gain

    @property
    def arity(self) -> int:
        return 3 + self.reads_x + self.gain

    @property
    def output_labels(self) -> tuple[str, ...]:
        return ("dx", "dgain") if self.gain else ()

    @property
    def words(self) -> str:
        return f"gradient of {self.description}"

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        return "_".join((*self.parts, "grad")), _size(inputs[0], inputs[1 + self.reads_x])

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        dy, *others = inputs
        x = others.pop(0) if self.reads_x else dy
        if x != dy:
            raise TypeRuleError(f"needs a gradient of the type of {x}, not {dy}", (0, 1))
        cos, sin, *gain = others
        _check(x, cos, sin, gain)
        return (x, *gain)

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        # the norm needs a sum of squares and a multiple of x; norm and gain need s and a factor
        each = 4 * (self.eps is not None) + 3 * self.reads_x
        return _turns(inputs[0], inputs[1 + self.reads_x], sizes) + each * inputs[0].count(sizes)

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        """Differentiates the reference of NormRope by autograd."""
        import torch

        dy, *others = (value.detach() for value in inputs)
        x = others.pop(0) if self.reads_x else torch.zeros_like(dy)
        cos, sin, *gain = others
        leaves = [x.requires_grad_(), *(value.requires_grad_() for value in gain)]
        with torch.enable_grad():
            y = NormRope(self.eps, self.gain, self.neighbors).reference(x, cos, sin, *gain)
        assert isinstance(y, torch.Tensor)
        gradients = torch.autograd.grad(y, leaves, dy)
        return gradients if self.gain else gradients[0]


def _check(x: TensorType, cos: TensorType, sin: TensorType, gain: Sequence[TensorType]) -> None:
    """Raises TypeRuleError if the shapes of heads, angles and gain do not match."""
    if len(x.shape) < 3:
        raise TypeRuleError(f"takes heads [..., T, H, C] but {{input}} gives {x}", (0,))
    (tokens, heads), channels, pairs = x.shape[-3:-1], x.width, cos.width
    if cos != sin or cos.shape != (tokens, pairs):
        raise TypeRuleError(f"needs angles [T, R] for the tokens of {x}, not {cos} and {sin}", (0, 1, 2))
    assert isinstance(channels, int) and isinstance(pairs, int)
    if 2 * pairs > channels:
        raise TypeRuleError(f"cannot rotate {2 * pairs} dims of heads of {channels}", (0, 1))
    if gain and gain[0].shape != (heads, 1):
        raise TypeRuleError(f"needs a gain ({heads}, 1), not {gain[0]}", (0, 3))


def _turns(x: TensorType, cos: TensorType, sizes: Sizes) -> int:
    """Returns the operations of the rotation: four products and two sums per pair of channels."""
    assert isinstance(cos.width, int)
    return 3 * x.with_shape(*x.shape[:-1], 2 * cos.width).count(sizes)


def _size(x: TensorType, cos: TensorType) -> str:
    sizes: tuple[Dim, ...] = (*x.shape[-2:], cos.width)
    return "_".join(f"{letter}{size}" for letter, size in zip("hcr", sizes, strict=True))


def _letters(number: float) -> str:
    """Formats a number as part of a name: 1e-05 becomes 1em05."""
    return f"{number:g}".replace("-", "m").replace(".", "p").replace("+", "")
