"""Dropout in the epilogue of a product: kernels against float64, and masks that are equal in both passes."""

from pathlib import Path

import pytest
import torch
from epilogue_sites import dropout_site
from kernel_sites import (
    DTYPES,
    check_guards,
    compiled,
    imported,
    inner,
    interpret,
    poisoned,
    sample_inputs,
)
from torch import Tensor

from specc.compiler.kernels.gemm.evt import GEMM_EVT
from specc.compiler.kernels.gemm.torch import EPILOGUE_PRODUCT
from specc.compiler.kernels.gemm.triton import LINEAR_TRITON
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.dropout import DRAW
from specc.compiler.programs import reference
from specc.compiler.targets import TARGETS

DRAWS = (
    [0x7F0F0E0D0C0B0A09, 3, 2, 7],
    [5, 2**40 + 1, 3, 13],  # rows that wrap at 32 bits
)
SHAPES = ((264, 72), (128, 64))
CASES = [(form, target, *shape) for form in ("added", "twice") for target in ("sm90", "sm80") for shape in SHAPES]


def inputs_of(site: Site, m: int, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Random inputs of m rows, with another buffer of numbers for each mask."""
    DTYPES.setdefault("i64", torch.int64)
    draws = iter(DRAWS)
    values = sample_inputs(site, m, m)
    drawn = [
        torch.tensor(next(draws)) if type == DRAW else value for type, value in zip(site.inputs, values, strict=True)
    ]
    return [value.to(dtype) if dtype and value.is_floating_point() else value for value in drawn]


def expected(site: Site, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    wide = [value.double() if value.is_floating_point() else value for value in inputs]
    return reference.node_value(site.node, wide)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, tuple]:
    folder = tmp_path_factory.mktemp("dropout_kernels")
    runs, keys = [], []
    for i, case in enumerate(CASES):
        site = dropout_site(*case)
        module = imported(LINEAR_TRITON, site, folder / f"dropout_{i}").__name__
        for m in (1, 129):
            outputs = poisoned(site, m)
            runs.append((str(folder), module, inputs_of(site, m), outputs, [case[2]] * len(outputs)))
            keys.append((case, m))
    return dict(zip(keys, interpret(folder, runs), strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_interpreted_kernels_give_the_reference(case: tuple, results: dict[tuple, tuple]) -> None:
    site = dropout_site(*case)
    for m in (1, 129):
        buffers, unchanged = results[case, m]
        assert unchanged, "an input was written"
        wanted = expected(site, inputs_of(site, m))
        for i, (buffer, want) in enumerate(zip(buffers, wanted, strict=True)):
            check_guards(buffer, f"output {i}")
            torch.testing.assert_close(inner(buffer, site).double(), want, rtol=2**-10, atol=1e-4)
        masks = inner(buffers[1], site)
        if case[0] == "added":
            assert torch.equal(masks == 0, wanted[1] == 0)  # the same elements, and not only close values
        else:
            assert torch.equal(masks.double(), wanted[1]) and {-1, 0, 1} >= set(masks.unique().tolist())


@pytest.mark.parametrize("form", ["added", "twice"])
def test_plain_torch_on_the_cpu_gives_the_reference(form: str, tmp_path: Path) -> None:
    site = dropout_site(form, "cpu", 40, 24, "f32")
    module = imported(EPILOGUE_PRODUCT, site, tmp_path / f"plain_{form}")
    inputs = inputs_of(site, 51, torch.float64)
    function = getattr(module, EPILOGUE_PRODUCT.render(site).function)
    for have, want in zip(function(*inputs), expected(site, inputs), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("form", ["added", "twice"])
def test_kernels_compile_to_machine_code(form: str, target: str, tmp_path: Path) -> None:
    code = compiled(dropout_site(form, target, 1792, 512, "bf16"), tmp_path / f"compiled_{target}_{form}")
    ptx = code.asm["ptx"]
    assert ("wgmma.mma_async" if target == "sm90" else "mma.sync") in ptx
    assert "0xd256d193" in ptx.lower() or "-766062189" in ptx  # a factor of Philox
    assert code.metadata.shared <= TARGETS[target].shared_memory


def test_the_cutlass_kernel_states_why_it_draws_no_numbers() -> None:
    reason = GEMM_EVT.rejects(dropout_site("added", "sm90", 1792, 512, "bf16"))
    assert reason is not None and "dropout" in reason


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["added", "twice"])
@pytest.mark.parametrize("n", [264, 1792])
def test_kernels_on_a_gpu_give_the_reference(form: str, n: int, tmp_path: Path) -> None:
    target = "sm90" if torch.cuda.get_device_capability() >= (9, 0) else "sm80"
    site = dropout_site(form, target, n, 512, "bf16")
    module = imported(LINEAR_TRITON, site, tmp_path / f"gpu_dropout_{form}_{n}")
    for m in (1, 129, 1009):
        inputs = [value.cuda() for value in inputs_of(site, m)]
        have = getattr(module, LINEAR_TRITON.render(site).function)(*inputs)
        want = expected(site, [value.cpu() for value in inputs])
        for got, exact in zip(have, want, strict=True):
            torch.testing.assert_close(got.cpu().double(), exact, rtol=2**-7, atol=2e-2)
        assert torch.equal(have[1].cpu() == 0, want[1] == 0)
