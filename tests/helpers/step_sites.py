"""Steps of int8 LSTMs to render, compile and run: sites, operands, and what they have to give."""

from pathlib import Path
from types import ModuleType
from typing import Literal

import kernel_sites
import torch
from torch import Tensor

from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.kernel import Kernel, Site
from specc.compiler.ops.int8_lstm import Int8LstmStep
from specc.compiler.ops.quantized import padded
from specc.compiler.targets import TARGETS

SIZES = (4, 64, 100, 128, 320)  # H: below a tile, ragged, of one block of K and of several
ROWS = (1, 17, 4096)


BITS: tuple[Literal[8], Literal[16]] = (8, 16)


def step_site(
    size: int, target: str = "cpu", dtype: str = "f32", label: str = "decoder.lstm.step", bits: Literal[8, 16] = 8
) -> Site:
    """A step of `size` hidden units, whose h has so many bits."""
    state, k = TensorType(("B", size), dtype), padded(size)
    inputs = (
        state,
        state,
        TensorType(("B", 4 * size), "f32"),
        TensorType((4 * size, k), "i8"),
        TensorType((4 * size,), "i32"),
        TensorType((4 * size,), "f32"),
        TensorType((size,), "f32"),
    )
    op = Int8LstmStep(bits)
    node = Node("lstm.step", op, ("h", "c", "x", "@w", "@offset", "@scale", "@inverse"), op.infer(inputs))
    return Site(node, inputs, TARGETS[target], label, "tiny")


def operands(site: Site, rows: int, seed: int, device: str = "cpu", apart: int = 0) -> list[Tensor]:
    """Random inputs, some of h beyond the largest code and some half-way between two; the rows of h and c lie `apart`
    elements further from each other than they are long."""
    generator = torch.Generator().manual_seed(seed)
    size = site.inputs[0].width
    assert isinstance(size, int)
    k, state = padded(size), getattr(torch, {"f32": "float32", "bf16": "bfloat16"}[site.inputs[0].dtype])
    # Powers of two, and few bits of h, of which 254 times are exact: it is the same codes in every precision.
    inverse = 2.0 ** torch.randint(4, 8, (size,), generator=generator)
    h = (torch.randn(rows, size + apart, generator=generator) * 2**14).round() / 2**14
    h[:, ::3] = (h[:, ::3] * 16).round() / 32
    w = torch.randint(-127, 128, (4 * size, k), generator=generator, dtype=torch.int8)
    w[:, size:] = 0
    results = [
        h.to(state)[:, :size],
        torch.randn(rows, size + apart, generator=generator).to(state)[:, :size],
        torch.randn(rows, 4 * size, generator=generator),
        w,
        torch.randint(-(2**14), 2**14, (4 * size,), generator=generator, dtype=torch.int32),
        (torch.rand(4 * size, generator=generator) + 0.5) / (40 * 73 * size**0.5),
        inverse,
    ]
    if device == "cpu":
        return results
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t) for t in results]


def exact(given: list[Tensor], bits: int = 8) -> list[Tensor]:
    """The next h and c in float64: sums in whole numbers, by numpy, and a gate at a time. Two codes of h are 254 times
    the first and the second, in one sum."""
    h, c, x, w, offset, scale, inverse = (tensor.cpu() for tensor in given)
    size = h.shape[1]
    steps = (h.double() * inverse.double()).clamp(-127, 127).nan_to_num(0.0)
    codes, fine = steps.round().long(), 1
    if bits == 16:
        fine = 254
        codes = fine * codes + (fine * (steps - codes)).round().long()
    sums = torch.from_numpy(codes.numpy() @ w.long().numpy()[:, :size].T) + fine * offset.long()
    z = x.double() + sums.double() / fine * scale.double()
    i, f, g, o = (z[:, n * size : (n + 1) * size] for n in range(4))
    new = c.double() / (1 + (-f).exp()) + g.tanh() / (1 + (-i).exp())
    return [new.tanh() / (1 + (-o).exp()), new]


def imported(kernel: Kernel, site: Site, folder: Path) -> ModuleType:
    """The Python module of a kernel."""
    return kernel_sites.imported(kernel, site, folder)


def close(result: Tensor, wanted: Tensor) -> None:
    """As near as the dtype is."""
    loose = {torch.float32: 4e-6, torch.bfloat16: 4e-3}[result.dtype]
    torch.testing.assert_close(result.cpu().double(), wanted, rtol=loose, atol=loose)
