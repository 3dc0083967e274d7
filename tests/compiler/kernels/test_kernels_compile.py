"""Generated Triton kernels compiled to machine code of GPUs that this machine need not have."""

from pathlib import Path

import pytest
from kernel_sites import EPILOGUES, compiled, make_site


@pytest.mark.parametrize("name", EPILOGUES)
def test_sm90_kernels_load_by_tma_and_multiply_by_wgmma(name: str, tmp_path: Path) -> None:
    site = make_site(name)
    code = compiled(site, tmp_path / f"compiled_sm90_{name}")
    ptx = code.asm["ptx"]
    tiles = sum(len(type.shape) == 2 for type in site.inputs)
    assert ptx.count("cp.async.bulk.tensor.2d.shared") >= tiles
    assert ptx.count("cp.async.bulk.tensor.2d.global") == 2 * len(site.node.types)  # a store for each half
    assert "wgmma.mma_async" in ptx and ".f64" not in ptx
    assert code.metadata.shared <= site.target.shared_memory
    assert len(code.asm["cubin"]) > 10_000


@pytest.mark.parametrize(("name", "target"), [*((name, "sm80") for name in EPILOGUES), ("gelu", "sm86")])
def test_ampere_kernels_copy_asynchronously_and_use_tensor_cores(name: str, target: str, tmp_path: Path) -> None:
    site = make_site(name, target=target)
    code = compiled(site, tmp_path / f"compiled_{target}_{name}")
    ptx = code.asm["ptx"]
    assert "cp.async.cg.shared.global" in ptx and "mma.sync" in ptx
    assert "cp.async.bulk" not in ptx and ".f64" not in ptx
    assert code.metadata.shared <= site.target.shared_memory


@pytest.mark.parametrize(
    ("n", "k", "target"), [(8, 8, "sm80"), (40, 24, "sm90"), (1000, 1000, "sm90"), (96, 4096, "sm120")]
)
def test_odd_shapes_compile(n: int, k: int, target: str, tmp_path: Path) -> None:
    for name in ("scaled_residual", "silu_gated", "two_muls"):
        site = make_site(name, n, k, target, out="f32")
        code = compiled(site, tmp_path / f"compiled_{target}_{n}_{k}_{name}")
        assert code.metadata.shared <= site.target.shared_memory
