"""Generated CUTLASS kernels compiled by nvcc for sm90a; cached by content, so later runs are quick."""

import ctypes
from pathlib import Path

import pytest
from kernel_sites import imported, make_site, written

from specc.compiler.kernels.gemm.evt import GEMM_EVT
from specc.runtime.support.native import compile_only, library

pytestmark = pytest.mark.nvcc

# The weight as stored, a tile to read and a long expression; a column, a tile and a transposed weight; three outputs
# of two products. Each takes nvcc a minute.
NAMES = ("gelu_grad", "scaled_residual", "silu_gated")


@pytest.mark.parametrize("name", NAMES)
def test_generated_gemms_compile_without_spills(name: str, tmp_path: Path) -> None:
    source, _ = written(GEMM_EVT, make_site(name), tmp_path)
    compiled = compile_only(source)  # raises where ptxas spills or serializes
    assert compiled.stat().st_size > 50_000
    assert b".nv_fatbin" in compiled.read_bytes()
    assert compile_only(source) == compiled


@pytest.mark.parametrize("name", NAMES)
def test_launchers_declare_what_the_library_defines(name: str, tmp_path: Path) -> None:
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
