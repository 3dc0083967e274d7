"""Every kind of kernel on a GPU, at odd numbers of rows: against float64 and against plain Torch."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernel_sites import (
    EPILOGUES,
    check_guards,
    eager,
    expected,
    imported,
    inner,
    make_site,
    poisoned,
    rms,
    sample_inputs,
    written,
)
from torch import Tensor

from specc.compiler.kernels.gemm.evt import GEMM_EVT
from specc.compiler.kernels.gemm.triton import LINEAR_TRITON
from specc.compiler.kernels.kernel import Kernel, Site
from specc.runtime.support.native import compile_only

pytestmark = pytest.mark.gpu

WAYS: dict[str, tuple[Kernel, str]] = {
    "tma": (LINEAR_TRITON, "sm90"),
    "pointer": (LINEAR_TRITON, "sm80"),
    "evt": (GEMM_EVT, "sm90"),
}
# The golf MLP; sizes that leave ragged tiles in N and K.
SIZES = {"golf": (1792, 512), "ragged": (328, 200)}
# By nvcc, a minute each.
COMPILED = (
    "mul", "gelu_grad", "scaled_residual", "leaky_relu2", "gelu_pre", "silu_gated", "silu_gated_pre", "silu_gated_grad",
    "relu2", "relu6",
)  # fmt: skip
Way = tuple[str, str, str]


def ways() -> Iterator[Way]:
    """Kernel, epilogue and size of everything that this machine's GPU runs."""
    hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9
    for way in WAYS if hopper else ("pointer",):
        for name in COMPILED if way == "evt" else EPILOGUES:
            yield from ((way, name, size) for size in SIZES)


ALL = list(ways())
# Of the last every multiprocessor of an H200 gets three tiles of 128 x 256 at least, of either size.
MANY = 3 * 132 // 2 * 128 + 77
ROWS = (1, 127, 128, 129, 1009, MANY)


def site_of(way: Way, out: str = "") -> Site:
    kind, name, size = way
    return make_site(name, *SIZES[size], WAYS[kind][1], out=out)


@cache
def compile_all(folder: Path) -> None:
    """Compiles all that nvcc has to, side by side."""
    waiting = [way for way in ALL if way[0] == "evt"]
    sources = [written(GEMM_EVT, site_of(way), folder / f"nvcc_{i}")[0] for i, way in enumerate(waiting)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_only, sources))


def load(way: Way, folder: Path, out: str = "") -> tuple[Site, ModuleType]:
    """The site of a kernel, and its generated module."""
    if way[0] == "evt":
        compile_all(folder)
    site = site_of(way, out)
    return site, imported(WAYS[way[0]][0], site, folder / "_".join(("gpu", *way, out)))


def op_of(way: Way, module: ModuleType) -> object:
    return getattr(module, WAYS[way[0]][0].render(site_of(way)).function)


def launched(module: ModuleType, site: Site, inputs: list[Tensor], m: int) -> list[Tensor]:
    """The outputs, taken from poisoned buffers whose guards are checked."""
    buffers = poisoned(site, m, "cuda")
    module.launch(*inputs, *(inner(buffer, site) for buffer in buffers))
    for i, buffer in enumerate(buffers):
        check_guards(buffer, f"output {i}")
    return [inner(buffer, site) for buffer in buffers]


@pytest.mark.parametrize("way", ALL, ids="-".join)
def test_outputs_are_at_least_as_exact_as_plain_torch(way: Way, folder: Path) -> None:
    site, module = load(way, folder)
    for m in ROWS:
        inputs = sample_inputs(site, m, m, "cuda")
        before = [value.clone() for value in inputs]
        result = launched(module, site, inputs, m)
        assert all(map(torch.equal, before, inputs)), "an input was written"
        references = zip(result, expected(site, inputs), eager(site, inputs), strict=True)
        for i, (got, exact, plain) in enumerate(references):
            error, bar = got.double() - exact, plain.double() - exact
            # A slope that is a multiple of a product is rounded once by both, so which is nearer is chance.
            assert rms(error) <= 1.001 * rms(bar) + 1e-9, f"output {i}, {m} rows: RMS {rms(error)}, {rms(bar)}"
            assert error.abs().max() <= 2 * bar.abs().max() + 1e-9, f"output {i}, {m} rows"


@pytest.mark.parametrize("way", ALL, ids="-".join)
def test_nan_in_a_row_stays_there_and_stays_nan(way: Way, folder: Path) -> None:
    site, module = load(way, folder)
    inputs = sample_inputs(site, 301, 2, "cuda")
    whole = launched(module, site, inputs, 301)
    inputs[0][129] = torch.nan
    results = [torch.empty_like(value) for value in whole]
    module.launch(*inputs, *results)
    for got, wanted, exact in zip(results, whole, expected(site, inputs), strict=True):
        wanted[exact.isnan()] = torch.nan
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", [way for way in ALL if way[0] != "evt"], ids="-".join)
def test_outputs_in_fp32_are_exact_to_fp32(way: Way, folder: Path) -> None:
    site, module = load(way, folder, "f32")
    inputs = sample_inputs(site, 301, 1, "cuda")
    result = launched(module, site, inputs, 301)
    for got, exact in zip(result, expected(site, inputs), strict=True):
        assert ((got.double() - exact).abs() <= 1e-4 * (1 + exact.abs())).all()


@pytest.mark.parametrize("way", ALL, ids="-".join)
def test_ops_give_what_launches_give_eager_and_compiled(way: Way, folder: Path, poison: None) -> None:
    site, module = load(way, folder)
    op = op_of(way, module)
    torch.compiler.reset()
    compiled = torch.compile(op, fullgraph=True, dynamic=True)  # type: ignore[call-overload]
    for m in ROWS[1:4]:
        inputs = sample_inputs(site, m, m, "cuda")
        wanted = launched(module, site, inputs, m)
        for run in (op, compiled):
            outputs = run(*inputs)  # type: ignore[operator]
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            assert all(map(torch.equal, outputs, wanted))


@pytest.mark.parametrize("way", ALL, ids="-".join)
def test_leading_dims_and_no_rows(way: Way, folder: Path, poison: None) -> None:
    site, module = load(way, folder)
    op = op_of(way, module)
    inputs = sample_inputs(site, 6 * 35, 2, "cuda")
    wanted = launched(module, site, inputs, 6 * 35)
    for leading in ((6, 35), (2, 3, 35)):
        shaped = [
            value.view(*leading, -1) if type.shape[0] == "T" else value
            for value, type in zip(inputs, site.inputs, strict=True)
        ]
        outputs = op(*shaped)  # type: ignore[operator]
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert all(torch.equal(got, value.view_as(got)) for got, value in zip(outputs, wanted, strict=True))
        assert all(got.shape[:-1] == leading for got in outputs)
    outputs = op(*sample_inputs(site, 0, 2, "cuda"))  # type: ignore[operator]
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert all(got.shape == (0, site.node.type.width) for got in outputs)


@pytest.mark.parametrize("way", ALL, ids="-".join)
def test_a_hundred_runs_are_bit_equal(way: Way, folder: Path) -> None:
    site, module = load(way, folder)
    m = MANY
    inputs = sample_inputs(site, m, 3, "cuda")
    first = launched(module, site, inputs, m)
    outputs = [torch.empty_like(value) for value in first]
    for _ in range(100):
        for value in outputs:
            value.fill_(torch.nan)
        module.launch(*inputs, *outputs)
        assert all(map(torch.equal, outputs, first))


@pytest.mark.parametrize("way", [way for way in ALL if way[1:] == ("gelu", "golf")], ids="-".join)
@pytest.mark.gpu(gigabytes=20)
def test_outputs_of_more_than_two_billion_elements(way: Way, folder: Path) -> None:
    site, module = load(way, folder)
    m = 2**31 // 1792 + 333
    x, w = sample_inputs(site, m, 4, "cuda")
    y = torch.full((m, 1792), torch.nan, dtype=torch.bfloat16, device="cuda")
    module.launch(x, w, y)
    for part in (slice(0, 500), slice(m // 2, m // 2 + 500), slice(m - 500, m)):
        (exact,) = expected(site, [x[part], w])
        assert ((y[part].double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()
    assert not any(piece.isnan().any() for piece in y.split(1 << 18))


@pytest.mark.parametrize("way", sorted({(way[0], "mul", "golf") for way in ALL}), ids="-".join)
def test_wrong_inputs_are_refused_before_the_launch(way: Way, folder: Path) -> None:
    site, module = load(way, folder)
    op, (dy, w, slope) = op_of(way, module), sample_inputs(site, 64, 5, "cuda")
    wrong = {
        r"dy is torch.float16 .* expected contiguous, 16-byte aligned torch.bfloat16": (dy.half(), w, slope),
        r"w is torch.bfloat16 \[1792, 512\]": (dy, w.T, slope),
        r"slope is torch.bfloat16 \[63, 1792\].*expected .*\[64, 1792\]": (dy, w, slope[:63]),
        r"slope is .*strides \(1, 64\)": (dy, w, slope.T.contiguous().T),
        r"slope is .* on cpu": (dy, w, slope.cpu()),
        r"dy is ": (torch.empty(64 * 512 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(64, 512), w, slope),
    }
    for message, inputs in wrong.items():
        with pytest.raises(ValueError, match=message):
            op(*inputs)  # type: ignore[operator]
