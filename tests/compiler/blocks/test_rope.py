"""Rotary positions: the published scalings, directions and pairs, against formulas in float64."""

import math
from typing import Any

import pytest
import torch

from specc.compiler.blocks.context import LoweringContext
from specc.compiler.blocks.rope import RopeSpec
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.positions import Rope
from specc.compiler.programs.reference import node_value

POSITIONS = torch.tensor([0, 1, 7, 1000, 100_003])


def angles(size: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosine and sine that a spec gives heads of `size` channels, in float64."""
    b = Builder("angles")
    positions = b.input("positions", TensorType(("T",), "i64"))
    refs = RopeSpec.model_validate(options).table(size, 4096).lower(b, LoweringContext(positions=positions))
    values = {positions: POSITIONS}
    for node in b.nodes:
        values |= zip(node.outputs, node_value(node, [values[ref] for ref in node.inputs]), strict=True)
    return values[refs[0]], values[refs[1]]


def check_angles(frequencies: list[float], magnitude: float, size: int, **options: Any) -> None:
    """Compares with the angles of `frequencies`, in radians per token, in both directions."""
    angle = POSITIONS.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    for turn, sign in (("forward", -1), ("backward", 1)):  # the ops turn backward
        cos, sin = angles(size, turn=turn, **options)
        torch.testing.assert_close(cos, magnitude * angle.cos(), rtol=0, atol=1e-9)
        torch.testing.assert_close(sin, sign * magnitude * angle.sin(), rtol=0, atol=1e-9)


def plain(size: int, base: float) -> list[float]:
    return [base ** (-2 * i / size) for i in range(size // 2)]


@pytest.mark.parametrize("factor", [32.0, 5.0])
def test_llama3_slows_pairs_by_their_turns(factor: float) -> None:
    wanted, known = [], [0, 0, 0]
    for f in plain(64, 5e5):
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4:
            known[0] += 1
            wanted.append(f)
        elif wavelength > 8192 / 1:
            known[1] += 1
            wanted.append(f / factor)
        else:
            known[2] += 1
            smooth = (8192 / wavelength - 1) / (4 - 1)
            wanted.append((1 - smooth) * f / factor + smooth * f)
    assert min(known) > 2
    check_angles(wanted, 1.0, 64, base=5e5, scaling={"kind": "llama3", "factor": factor, "trained": 8192})


@pytest.mark.parametrize("whole", [True, False])
def test_yarn_slows_pairs_by_their_index(whole: bool) -> None:
    def place(turns: float) -> float:
        return 64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = place(32), place(1)
    if whole:
        low, high = math.floor(low), math.ceil(high)
    wanted = []
    for i, f in enumerate(plain(64, 1e4)):
        slow = min(max((i - low) / (high - low), 0), 1)
        wanted.append(slow * f / 40 + (1 - slow) * f)
    scaling = {"kind": "yarn", "factor": 40, "trained": 4096, "whole": whole}
    check_angles(wanted, 0.1 * math.log(40) + 1, 64, scaling=scaling)
    check_angles(wanted, 1.0, 64, scaling={**scaling, "magnitude": 1})


def test_an_expression_scales_frequencies() -> None:
    check_angles([f / 8 for f in plain(32, 1e6)], 1.0, 32, base=1e6, scaling="f / 8")
    half = [f if i < 4 else 0.0 for i, f in enumerate(plain(16, 1e4))]
    check_angles(half, 1.0, 16, scaling="where(pair < 4, f, 0)")


def test_forward_is_the_textbook_rotation() -> None:
    x = torch.randn(1, len(POSITIONS), 1, 8, dtype=torch.float64)
    cos, sin = angles(8)
    y = Rope().reference(x, cos, sin)
    assert isinstance(y, torch.Tensor)
    angle = POSITIONS.double()[:, None] * torch.tensor(plain(8, 1e4), dtype=torch.float64)
    a, b = x[0, :, 0].chunk(2, -1)
    wanted = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    torch.testing.assert_close(y[0, :, 0], wanted, rtol=0, atol=1e-9)


def test_pairs_are_halves_or_neighbors() -> None:
    torch.manual_seed(1)
    x = torch.randn(2, len(POSITIONS), 3, 10, dtype=torch.float64)
    cos, sin = angles(10, dims=6)
    for neighbors in (False, True):
        y = Rope(neighbors).reference(x, cos, sin)
        assert isinstance(y, torch.Tensor) and torch.equal(y[..., 6:], x[..., 6:])
        for i in range(3):
            a, b = (2 * i, 2 * i + 1) if neighbors else (i, i + 3)
            c, s = cos[:, i, None], sin[:, i, None]
            torch.testing.assert_close(y[..., a], x[..., a] * c + x[..., b] * s)
            torch.testing.assert_close(y[..., b], x[..., b] * c - x[..., a] * s)
