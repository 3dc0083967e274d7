"""Norm, rotary embedding and gain on a GPU: against float64 and against plain Torch, at odd numbers of tokens."""

from dataclasses import astuple, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from head_sites import PARTS, SHAPES, buffers, columns, eager, expected, head_inputs, head_site, several, totals
from kernel_sites import check_guards, imported, inside, rms
from torch import Tensor

from specc.compiler.kernels.kernel import Site, symbol
from specc.compiler.kernels.norm_rope.norm_rope import NORM_ROPE_TRITON, HeadTile

pytestmark = pytest.mark.gpu

Case = tuple[str, str, bool]
CASES: list[Case] = [
    *((name, parts, backward) for name in ("golf", "gpt2") for parts in PARTS for backward in (False, True)),
    *((name, "norm_gain", backward) for name in list(SHAPES)[2:] for backward in (False, True)),
]
# Sequences, tokens of each, and elements between the tokens of x: one token, one more than whole tiles, many programs.
ROWS = ((1, 1, 0), (1, 257, 0), (5, 127, 64), (9, 64, 0), (3, 2048, 256), (17, 1, 0))
TILE = {"golf": HeadTile(4, 3, 2), "gpt2": HeadTile(128, 1, 8)}


def name_of(case: Case) -> str:
    return f"{case[0]}-{case[1]}{'-grad' if case[2] else ''}"


def load(case: Case, folder: Path, dtype: str = "bf16", tile: HeadTile | None = None) -> tuple[Site, ModuleType]:
    """The site of a kernel, and its generated module; any GPU runs it."""
    name, parts, backward = case
    site = head_site(parts, SHAPES[name], backward, dtype=dtype)
    words = ("gpu", *map(str, case), dtype, "_".join(map(str, astuple(tile))) if tile else "rule")
    return site, imported(replace(NORM_ROPE_TRITON, tile=tile), site, folder / "_".join(words))


def op_of(site: Site, module: ModuleType) -> Any:
    return getattr(module, symbol(site)[0])


def launched(site: Site, module: ModuleType, inputs: list[Tensor], b: int, t: int) -> list[Tensor]:
    """The outputs of the kernel, from poisoned buffers with checked guards; the gradient of the gain is summed."""
    outputs = buffers(site, module, b, t, "cuda")
    widths = columns(site, module, b, t)
    results = [inside(buffer, width) for buffer, width in zip(outputs, widths, strict=True)]
    module.launch(*inputs, *results)
    for i, buffer in enumerate(outputs):
        check_guards(buffer, f"output {i}")
    first = results[0].view(b, t, module.H, module.C)
    return [first, *(total.to(first.dtype) for total in totals(site, results, inputs)[1:])]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_outputs_are_at_least_as_exact_as_plain_torch(case: Case, folder: Path) -> None:
    for tile in (None, *([TILE[case[0]]] if case[0] in TILE else [])):
        site, module = load(case, folder, tile=tile)
        for k, (b, t, apart) in enumerate(ROWS):
            inputs = head_inputs(site, b, t, k, "cuda", apart)
            before = [value.clone() for value in inputs]
            result = launched(site, module, inputs, b, t)
            assert all(map(torch.equal, before, inputs)), "an input was written"
            references = zip(result, expected(site, inputs), eager(site, inputs), strict=True)
            for i, (got, exact, plain) in enumerate(references):
                error, bar = got.double() - exact, plain.double() - exact
                # where both round once, as in a channel that does not turn, which is nearer is chance
                assert rms(error) <= 1.005 * rms(bar) + 1e-9, f"output {i}, {b} x {t}: {rms(error)}, {rms(bar)}"
                once = 2.0**-8 * exact.abs().max()  # of few numbers, eager's may by chance have no error
                assert error.abs().max() <= max(2 * bar.abs().max(), once), f"output {i}, {b} x {t}"


@pytest.mark.parametrize("backward", [False, True])
def test_more_sequences_than_a_second_axis_has(backward: bool, folder: Path) -> None:
    site, module = load(("golf", "norm_gain", backward), folder, tile=HeadTile(4, 1, 2))
    inputs = head_inputs(site, 70_001, 1, 5, "cuda")
    for got, exact in zip(launched(site, module, inputs, 70_001, 1), expected(site, inputs), strict=True):
        assert ((got.double() - exact).abs() <= 2.0**-7 * (1 + exact.abs().max())).all()


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_outputs_in_fp32_are_exact_to_fp32(case: Case, folder: Path) -> None:
    site, module = load(case, folder, "f32")
    inputs = head_inputs(site, 5, 301, 1, "cuda", 64)
    for i, (got, exact) in enumerate(zip(launched(site, module, inputs, 5, 301), expected(site, inputs), strict=True)):
        scale = 1 if i == 0 else (5 * 301) ** 0.5
        assert ((got.double() - exact).abs() <= 1e-5 * (scale + exact.abs())).all()


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_ops_give_what_launches_give_eager_and_compiled(case: Case, folder: Path, poison: None) -> None:
    site, module = load(case, folder)
    op = op_of(site, module)
    torch.compiler.reset()
    compiled = torch.compile(op, fullgraph=True, dynamic=True)
    for k, (b, t, apart) in enumerate(ROWS[1:4]):
        inputs = head_inputs(site, b, t, k, "cuda", apart)
        wanted = launched(site, module, inputs, b, t)
        for run in (op, compiled):
            assert all(map(torch.equal, several(run(*inputs)), wanted))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_leading_dims_and_no_tokens(case: Case, folder: Path, poison: None) -> None:
    name, parts, backward = case
    site, module = load(case, folder)
    op = op_of(site, module)
    inputs = head_inputs(site, 6, 35, 2, "cuda")
    wanted = launched(site, module, inputs, 6, 35)
    shaped = [value.unflatten(0, (2, 3)) if value.dim() == 4 else value for value in inputs]
    for got, value in zip(several(op(*shaped)), wanted, strict=True):
        assert torch.equal(got, value.view_as(got)) and got.is_contiguous()
    flat = head_site(parts, SHAPES[name], backward, rows=("T",))
    for b, t in ((1, 0), (0, 4)):
        given = head_inputs(flat if b else site, b, t, 2, "cuda")
        for i, got in enumerate(several(op(*given))):
            assert got.numel() == 0 if i == 0 else not got.any()  # no token, no gradient


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_hundred_runs_are_bit_equal(case: Case, folder: Path) -> None:
    site, module = load(case, folder)
    op, inputs = op_of(site, module), head_inputs(site, 7, 431, 3, "cuda")
    first = several(op(*inputs))
    for _ in range(100):
        assert all(map(torch.equal, several(op(*inputs)), first))


@pytest.mark.gpu(gigabytes=20)
@pytest.mark.parametrize("backward", [False, True])
def test_more_than_two_billion_elements(backward: bool, folder: Path) -> None:
    site, module = load(("golf", "norm_gain", backward), folder)
    t = 2048
    b = 2**31 // (t * 512) + 3
    small = head_inputs(site, 1, t, 4, "cuda")
    inputs = [value.expand(b, -1, -1, -1).contiguous() if value.dim() == 4 else value for value in small]
    wanted, result = several(op_of(site, module)(*small))[0], several(op_of(site, module)(*inputs))[0]
    for i in (0, 1, b // 2, b - 2, b - 1):
        assert torch.equal(result[i], wanted[0])
    assert not any(piece.isnan().any() for piece in result.split(64))


def test_wrong_inputs_are_refused_before_the_launch(folder: Path) -> None:
    site, module = load(("golf", "norm_gain", True), folder)
    op, (dy, x, cos, sin, gain) = op_of(site, module), head_inputs(site, 4, 6, 5, "cuda")
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x)
    wrong = {
        r"dy is torch.float16 .* expected contiguous, 16-byte aligned torch.bfloat16": (dy.half(), x, cos, sin, gain),
        r"dy is .*strides .*expected contiguous": (dy.transpose(1, 2).contiguous().transpose(1, 2), x, cos, sin, gain),
        r"x is .*strides .*expected evenly spaced tokens": (
            dy,
            x.transpose(2, 3).contiguous().transpose(2, 3),
            cos,
            sin,
            gain,
        ),
        r"x is .*strides .*evenly spaced": (dy, torch.cat([x, x], 1)[:, :6], cos, sin, gain),
        r"x is .*aligned": (dy, shifted, cos, sin, gain),
        r"cos is torch.bfloat16": (dy, x, cos.bfloat16(), sin, gain),
        r"sin is .*\[5, 8\].*expected .*\[6, 8\]": (dy, x, cos, sin[:5], gain),
        r"gain is torch.bfloat16 \[8\].*expected .*\[8, 1\]": (dy, x, cos, sin, gain.flatten()),
        r"sin is .* on cpu": (dy, x, cos, sin.cpu(), gain),
    }
    for message, inputs in wrong.items():
        with pytest.raises(ValueError, match=message):
            op(*inputs)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", ["golf", "gpt2"])
def test_a_gradient_in_a_part_has_the_bits_of_one_alone(name: str, parts: str, folder: Path) -> None:
    """And nothing else is written."""
    for into in ((0, 64), (512, 0), (16, 1024)):
        alone, within = (head_site(parts, SHAPES[name], True, into=place) for place in (None, into))
        kernels = [
            imported(NORM_ROPE_TRITON, site, folder / f"part_{name}_{parts}_{into[0]}_{i}")
            for i, site in enumerate((alone, within))
        ]
        for k, (b, t, apart) in enumerate(ROWS):
            *inputs, whole = head_inputs(within, b, t, k, "cuda", apart)
            wanted = several(op_of(alone, kernels[0])(*inputs))
            before = whole.clone()
            first, *learned = several(op_of(within, kernels[1])(*inputs, whole))
            assert first is whole
            features = wanted[0].shape[-2:].numel()
            before[..., into[0] : into[0] + features] = wanted[0].flatten(-2)
            assert torch.equal(whole, before)
            assert all(map(torch.equal, learned, wanted[1:]))
