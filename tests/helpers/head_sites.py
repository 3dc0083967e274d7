"""Samples for the tests of norm, rotary embedding and gain: sites, inputs, float64 references, guarded buffers."""

import math
from collections.abc import Sequence
from types import ModuleType

import torch
from kernel_sites import DTYPES, GUARD
from torch import Tensor

from specc.compiler.expr import reread, torch_value
from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import Dim, TensorType
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.norm_rope import HeadRotation, NormRope, NormRopeGrad, NormRopeGradInto
from specc.compiler.targets import TARGETS

# eps, gain, whether neighbors are pairs, and the weight
PARTS = {
    "norm_gain": (1e-6, True, False, ""),
    "norm": (1e-6, False, False, ""),
    "gain": (None, True, False, ""),
    "bare": (None, False, False, ""),
    "norm_neighbors_gain": (1e-6, True, True, ""),
    "neighbors": (None, False, True, ""),
    "weight": (1e-6, False, False, "w"),
    "weight_add_gain": (1e-6, True, False, "1 + w"),
    "weight_exp_neighbors": (1e-6, False, True, "exp(w)"),
}
# Heads, channels and pairs that turn: a part or all of them, one of them, sizes that no tile has.
SHAPES = {
    "golf": (8, 64, 8),
    "gpt2": (12, 64, 32),
    "one_pair": (1, 32, 1),
    "odd_part": (4, 96, 11),
    "odd_whole": (3, 80, 40),
    "most": (5, 128, 63),
}


def head_site(
    parts: str = "norm_gain",
    sizes: tuple[int, int, int] = SHAPES["golf"],
    backward: bool = False,
    target: str = "sm90",
    dtype: str = "bf16",
    rows: tuple[Dim, ...] = ("B", "T"),
    eps: float | None = None,
    into: tuple[int, int] | None = None,
) -> Site:
    """A site of NormRope, or of its gradient; the last of `rows` is T. With `into`, dx is written to a tensor that has
    so many features before and after it."""
    heads, channels, pairs = sizes
    usual, gain, neighbors, weight = PARTS[parts]
    op = (NormRopeGrad if backward else NormRope)(eps or usual, gain, neighbors, weight)
    x, angle = TensorType((*rows, heads, channels), dtype), TensorType((rows[-1], pairs), "f32")
    types = [x, angle, angle, *([TensorType((channels,), dtype)] if weight else [])]
    types += [TensorType((heads, 1), dtype)] if gain else []
    if isinstance(op, NormRopeGrad):
        types = [x, *(types if op.reads_x else types[1:])]
        if into is not None:
            op = NormRopeGradInto(eps or usual, gain, neighbors, weight, into[0])
            types.append(TensorType((*rows, heads * channels + sum(into)), dtype))
    path = "attention.q.rope.grad" if backward else "attention.q.rope"
    node = Node(path, op, tuple(f"v{i}" for i in range(len(types))), op.infer(types))
    return Site(node, tuple(types), TARGETS[target], f"blocks.*.{path}", "sample")


def op_of(site: Site) -> HeadRotation:
    assert isinstance(site.node.op, HeadRotation)
    return site.node.op


def sized(type: TensorType, b: int, t: int) -> tuple[int, ...]:
    return tuple({"B": b, "T": t}.get(dim, 0) if isinstance(dim, str) else dim for dim in type.shape)


def head_inputs(site: Site, b: int, t: int, seed: int, device: str = "cpu", apart: int = 0) -> list[Tensor]:
    """Random inputs; the angles are real ones. With `apart`, x is a part of a tensor whose tokens have that many
    more elements."""
    generator = torch.Generator(device).manual_seed(seed)
    op, tensors = op_of(site), []
    backward = isinstance(op, NormRopeGrad)
    x_at = 1 if isinstance(op, NormRopeGrad) and op.reads_x else None if backward else 0
    into = isinstance(op, NormRopeGradInto)
    angle_at = site.node.op.arity - len(op.learned) - 2 - into
    for i, type in enumerate(site.inputs):
        shape = sized(type, b, t)
        if i in (angle_at, angle_at + 1):
            place = torch.arange(t, device=device)[:, None] * 0.7 ** torch.arange(shape[-1], device=device)
            tensors.append(place.cos() if i == angle_at else place.sin())
            continue
        if i == x_at and apart:
            h, c = shape[-2:]
            wide = torch.randn(*shape[:-2], h * c + apart, generator=generator, device=device).to(DTYPES[type.dtype])
            tensors.append(wide[..., : h * c].unflatten(-1, (h, c)))
            continue
        tensors.append(torch.randn(shape, generator=generator, device=device).to(DTYPES[type.dtype]))
    return tensors


def several(value: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def expected(site: Site, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs in float64, of the inputs as they are."""
    return several(site.node.op.reference(*(value.double() for value in inputs)))


def eager(site: Site, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs as plain Torch computes them, rounding after every part."""
    return several(site.node.op.reference(*inputs))


def columns(site: Site, module: ModuleType, b: int, t: int) -> list[int]:
    """The width of what the kernel itself writes: heads, and what each program has of the gradients of weight and
    gain."""
    width, channels = site.node.type.width, site.inputs[0].width
    assert isinstance(width, int) and isinstance(channels, int)
    widths = {"weight": channels, "gain": math.prod(module.grid_of(b * t, t))}
    return [width, *(widths[name] for name in op_of(site).learned if len(site.node.types) > 1)]


def totals(site: Site, results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, from what the kernel itself writes, as matrices of the widths above."""
    first, *parts = results
    learned = op_of(site).learned
    outputs = [first]
    for name, part, value in zip(learned[: len(parts)], parts, inputs[len(inputs) - len(learned) :], strict=False):
        if name == "gain":
            outputs.append(part.sum(1, keepdim=True))
            continue
        w = value.detach().to(part.dtype).requires_grad_()
        (slope,) = torch.autograd.grad(torch_value(reread(op_of(site).weight), {"w": w}).sum(), w)
        outputs.append(part.sum(0) * slope)
    return outputs


def buffers(site: Site, module: ModuleType, b: int, t: int, device: str = "cpu") -> list[Tensor]:
    """Memory full of NaN for what the kernel writes, with a guard on either side."""
    counts = [math.prod(sized(site.node.type, b, t))]
    programs = math.prod(module.grid_of(b * t, t))
    rows = {"weight": programs, "gain": module.H}
    widths = columns(site, module, b, t)[1:]
    counts += [rows[name] * width for name, width in zip(op_of(site).learned, widths, strict=False)]
    dtypes = [DTYPES[site.node.type.dtype], torch.float32, torch.float32]
    return [
        torch.full((count + 2 * GUARD,), torch.nan, dtype=dtype, device=device)
        for count, dtype in zip(counts, dtypes, strict=False)
    ]
