"""Generated Triton kernels in Triton's interpreter, against float64: every element written, no other."""

import pytest
import torch
from kernel_sites import (
    EPILOGUES,
    check_guards,
    expected,
    imported,
    inner,
    interpret,
    make_site,
    poisoned,
    sample_inputs,
)

from specc.compiler.kernels.gemm.triton import LINEAR_TRITON
from specc.compiler.kernels.kernel import Site

pytestmark = pytest.mark.interpret

# Ragged and whole tiles; the interpreter's dot is wrong in bf16.
SHAPES = ((264, 72), (128, 64))
ROWS = {"sm90": (1, 129), "sm80": (0, 129)}
BOTH = ("silu_gated", "gelu_grad", "two_muls", "clashes")  # of other epilogues the lines are those of sm90
Case = tuple[str, str, int, int, str]
CASES: list[Case] = [
    *((name, target, *SHAPES[0], "") for name in EPILOGUES for target in ROWS if target == "sm90" or name in BOTH),
    *(("silu_gated_grad", target, *SHAPES[1], "") for target in ROWS),
    *(("leaky_relu2", target, 40, 24, "f32") for target in ROWS),
]
BROKEN = 128  # a row that is NaN, in the second tile of those with so many


def site_of(case: Case) -> Site:
    name, target, n, k, out = case
    return make_site(name, n, k, target, "f16", out=out)


def with_a_broken_row(site: Site, m: int) -> list[torch.Tensor]:
    inputs = sample_inputs(site, m, m)
    inputs[0][BROKEN] = torch.nan
    return inputs


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Case, int], object]:
    """The contents that the interpreter leaves in the output buffers of each case and number of rows."""
    folder = tmp_path_factory.mktemp("interpreted")
    runs, keys = [], []
    for i, case in enumerate(CASES):
        site, n = site_of(case), case[2]
        module = imported(LINEAR_TRITON, site, folder / f"interpreted_{i}").__name__
        for m in ROWS[case[1]]:
            outputs = poisoned(site, m)
            runs.append((str(folder), module, sample_inputs(site, m, m), outputs, [n] * len(outputs)))
            keys.append((case, m))
            if m > BROKEN:
                broken = with_a_broken_row(site, m)
                outputs = [torch.zeros_like(buffer) for buffer in outputs]
                runs.append((str(folder), module, broken, outputs, [n] * len(outputs)))
                keys.append((case, -m))
    return dict(zip(keys, interpret(folder, runs), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_interpreted_kernels_give_the_reference(case: Case, results: dict[tuple[Case, int], tuple]) -> None:
    site = site_of(case)
    for m in ROWS[case[1]]:
        buffers, unchanged = results[case, m]
        assert unchanged, "an input was written"
        for i, (buffer, wanted) in enumerate(zip(buffers, expected(site, sample_inputs(site, m, m)), strict=True)):
            check_guards(buffer, f"output {i}")
            got = inner(buffer, site).double()
            # Half a unit in the last place for the one rounding, and a few fp32 roundings before it.
            rounding = 2.0**-11 if buffer.dtype == torch.float16 else 2.0**-24
            tolerance = rounding * wanted.abs() * 1.001 + 2.0**-25 + 4e-6 * (1 + wanted.abs())
            excess = (got - wanted).abs() / tolerance
            assert m == 0 or excess.max() <= 1, f"output {i} with {m} rows is off by {excess.max():.3g} tolerances"


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_nan_in_a_row_stays_there_and_stays_nan(case: Case, results: dict[tuple[Case, int], tuple]) -> None:
    site = site_of(case)
    m = max(ROWS[case[1]])
    references = expected(site, with_a_broken_row(site, m))
    result = zip(results[case, -m][0], results[case, m][0], references, strict=True)
    for i, (buffer, whole, reference) in enumerate(result):
        got, wanted = inner(buffer, site), inner(whole, site).clone()
        wanted[reference.isnan()] = torch.nan
        assert torch.equal(got.isnan(), wanted.isnan()), f"output {i}"
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num()), f"output {i}"
    assert references[0].isnan().any()
