"""Generated Triton kernels compiled to machine code of GPUs that this machine need not have."""

from pathlib import Path
from typing import Any

import pytest
from kernel_sites import EPILOGUES, imported, machine_code, make_site, parameters

from specc.compiler.kernels.gemm.triton import LINEAR_TRITON
from specc.compiler.kernels.kernel import Site

POINTERS = {"bf16": "*bf16", "f16": "*fp16", "f32": "*fp32"}
# The blocks of the descriptors that launch() makes: of x, of each weight, and half a tile of anything else.
BLOCKS = {"x": "BLOCK_M, BLOCK_K", "nk": "BLOCK_N, BLOCK_K", "kn": "BLOCK_K, BLOCK_N", "half": "BLOCK_M, HALF_N"}


def compiled(site: Site, folder: Path) -> Any:
    module = imported(LINEAR_TRITON, site, folder)
    tensors = dict(zip(parameters(module, site), (*site.inputs, *site.node.types), strict=True))
    first, *weights = list(tensors)[: site.node.op.arity]
    sizes = {**vars(module), "HALF_N": module.BLOCK_N // 2}

    def type_of(name: str) -> str:
        tensor, _, kind = name.rpartition("_")
        if kind == "ptr":
            return POINTERS[tensors[tensor].dtype]
        if kind == "desc":
            role = "x" if tensor == first else site.node.op.layout if tensor in weights else "half"
            block = [sizes[word] for word in BLOCKS[role].split(", ")]
            return f"tensordesc<{POINTERS[tensors[tensor].dtype][1:]}{block}>"
        return "i32" if name == "M" else "constexpr"

    return machine_code(module, site, type_of, {"PROGRAMS": 132})


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
