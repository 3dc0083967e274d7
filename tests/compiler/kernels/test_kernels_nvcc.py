"""Generated CUTLASS kernels compiled by nvcc, those of one architecture in one file; cached by content."""

import ctypes
from pathlib import Path

import pytest
from int8_sites import int8_site
from kernel_sites import imported, joined, make_site, written

from specc.compiler.kernels.gemm.evt import GEMM_EVT
from specc.compiler.kernels.int8.sm80 import GEMM_INT8_SM80
from specc.compiler.kernels.int8.sm90 import GEMM_INT8_SM90
from specc.compiler.kernels.kernel import Kernel, Site
from specc.runtime.support import native
from specc.runtime.support.native import compile_only, library

pytestmark = pytest.mark.nvcc

# The weight as stored, a tile to read and a long expression; a column, a tile and a transposed weight; three outputs
# of two products.
NAMES = ("gelu_grad", "scaled_residual", "silu_gated")
# Every template, and each type of output and kind of load in one of them.
KERNELS: dict[str, list[tuple[Kernel, Site]]] = {
    "sm86": [
        (GEMM_INT8_SM80, int8_site("codes", 64, 64, "sm86")),
        (GEMM_INT8_SM80, int8_site("residual", 16, 16, "sm86")),
    ],
    "sm90": [(GEMM_EVT, make_site("silu_gated")), (GEMM_INT8_SM90, int8_site("codes", 768, 256, "sm90"))],
    "sm90, others": [
        *((GEMM_EVT, make_site(name)) for name in NAMES[:2]),
        (GEMM_INT8_SM90, int8_site("sum", 256, 64, "sm90")),
    ],
}
OTHERS = pytest.mark.soak  # nvcc takes half a minute for these


def of_all(target: str, folder: Path) -> Path:
    """The library of all kernels of an entry of KERNELS."""
    files = [file for i, rendered in enumerate(KERNELS[target]) for file in written(*rendered, folder / f"{i}")]
    return compile_only(joined([file for file in files if file.suffix == ".cu"], folder))


@pytest.mark.parametrize("target", ["sm86", "sm90", pytest.param("sm90, others", marks=OTHERS)])
def test_generated_gemms_compile_without_spills(target: str, tmp_path: Path) -> None:
    compiled = of_all(target, tmp_path)  # raises where ptxas spills or serializes
    assert compiled.stat().st_size > 50_000
    assert b".nv_fatbin" in compiled.read_bytes()
    assert of_all(target, tmp_path) == compiled


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=OTHERS) for name in NAMES[:2]), NAMES[2]])
def test_launchers_declare_what_the_library_defines(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = of_all("sm90" if name == NAMES[2] else "sm90, others", tmp_path / "all")
    monkeypatch.setattr(native, "compile_only", lambda source: compiled)
    site = make_site(name)
    module = imported(GEMM_EVT, site, tmp_path / f"launcher_{name}")
    code, function = module.native(), GEMM_EVT.render(site).function
    assert len(getattr(code, function).argtypes) == 3 + len(site.inputs) + len(site.node.types) + 2
    assert getattr(code, f"{function}_status")(0) == b"Success"
    assert getattr(code, f"{function}_status")(7) not in (None, b"Success")
    assert getattr(code, f"{function}_workspace").restype is ctypes.c_size_t


def test_a_loaded_library_runs(tmp_path: Path) -> None:
    source = tmp_path / "answer.cu"
    source.write_text('extern "C" int answer(int x) { return 6 * x; }\n')
    assert library(source).answer(7) == 42
