"""Kernels of decoding steps: linear layers of few rows, and rotation with the write to a cache, against float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_sites import AFFINE, RMS, ROPES, rope_site, row_site
from decoding_sites import ROW_CASES as CASES
from kernel_sites import DTYPES, check_clean, imported, interpret_calls, machine_code
from torch import Tensor

from specc.compiler.expr import parse, torch_value
from specc.compiler.kernels.gemm.row_parts import parts_of
from specc.compiler.kernels.gemm.rows import ROW_LINEAR_TORCH, ROW_LINEAR_TRITON, row_tile, rows_tile
from specc.compiler.kernels.kernel import Site
from specc.compiler.kernels.norm_rope.rope_write import ROPE_WRITE_TORCH, ROPE_WRITE_TRITON
from specc.compiler.targets import TARGETS

ROWS = (1, 2, 17, 67)


def site_of(name: str, target: str = "sm90", dtype: str = "f16", out: str = "") -> Site:
    return row_site(CASES[name], target, dtype, out)


def gpu_target() -> str:
    """sm90 has kernels that begin before those before them end."""
    return "sm90" if torch.cuda.get_device_capability() == (9, 0) else "sm80"


def inputs_of(site: Site, m: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(m)
    values = []
    for i, type in enumerate(site.inputs):
        shape = [dim for dim in type.shape if isinstance(dim, int)]
        shape = shape if type.shape[0] != "B" else [m, *shape]
        value = torch.randn(shape, generator=generator, device=device)
        values.append(
            (value * (shape[-1] ** -0.5 if len(type.shape) == 2 else 1) + 0.1 * (i == 0)).to(DTYPES[type.dtype])
        )
    return values


def expected(site: Site, inputs: list[Tensor]) -> list[Tensor]:
    op, wide = site.node.op, [value.double() for value in inputs]
    products = op.reference(*wide[: op.arity])
    accumulators = products if isinstance(products, tuple) else (products,)
    if site.epilogue is None:
        return list(accumulators)
    values: dict[str, Any] = dict(zip(site.epilogue.variables, (*accumulators, *wide[op.arity :]), strict=True))
    return [torch_value(parse(text), values) for text in site.epilogue.outputs]


def test_interpreted_products_are_the_reference(tmp_path: Path) -> None:
    calls, wanted = [], []
    for i, name in enumerate(CASES):
        site = site_of(name, out="f32" if i % 2 else "")
        module = imported(ROW_LINEAR_TRITON, site, tmp_path / f"rows_{i}").__name__
        for m, tile in (*((m, {}) for m in ROWS), (1, {"ROW": (4, 16, 1, 1)})):  # the last in many pieces
            inputs = inputs_of(site, m)
            outputs = [torch.full((m + 1, int(t.width)), torch.nan, dtype=DTYPES[t.dtype]) for t in site.node.types]
            calls.append((str(tmp_path), module, {"PDL": False, **tile}, "launch", [*inputs, *outputs]))
            wanted.append((name, m, inputs, expected(site, inputs)))
    for arguments, (name, m, inputs, values) in zip(interpret_calls(tmp_path, calls), wanted, strict=True):
        assert all(map(torch.equal, arguments, inputs)), f"{name}: an input was written"
        for got, value in zip(arguments[len(inputs) :], values, strict=True):
            assert got[m:].isnan().all() and not got[:m].isnan().any(), (name, m)
            torch.testing.assert_close(got[:m].double(), value, rtol=2e-3, atol=2e-3)
    check_clean(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_plain_torch_is_the_reference(name: str, tmp_path: Path) -> None:
    site = site_of(name, "cpu", "f32")
    module = imported(ROW_LINEAR_TORCH, site, tmp_path / f"torch_{name.replace(' ', '_')}")
    inputs = inputs_of(site, 5)
    got = vars(module)[ROW_LINEAR_TORCH.render(site).function](*inputs)
    for value, wanted in zip(got if isinstance(got, tuple) else (got,), expected(site, inputs), strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-5)
    check_clean(tmp_path)


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_one_row_loads_whole_vectors_and_several_use_tensor_cores(target: str, tmp_path: Path) -> None:
    site = row_site(((768, 768, 768), 768, RMS, None), target, "bf16")
    module = imported(ROW_LINEAR_TRITON, site, tmp_path / f"compiled_{target}")
    for height, tile in ((1, module.ROW), (16, module.ROWS), (64, module.ROWS)):
        n, k, warps, stages = tile
        sizes = {"BLOCK_M": height, "BLOCK_N": n, "BLOCK_K": k, "WARPS": warps, "STAGES": stages, "M": 1}

        def type_of(name: str, height: int = height) -> str:
            number = name == "M" and height > 1  # Triton compiles a number that is 1 as a constant
            return "*bf16" if name.endswith("_ptr") else "i32" if number else "constexpr"

        code = machine_code(module, site, type_of, sizes)
        ptx = code.asm["ptx"]
        assert code.metadata.shared <= site.target.shared_memory and ".local" not in ptx
        if height == 1:
            assert "ld.global.v4.b32" in ptx and "mma" not in ptx
        else:
            assert "mma" in ptx and "cp.async" in ptx
        assert ptx.count("griddepcontrol.wait") == (3 if target == "sm90" else 0)  # one for each of q, k and v


def test_tiles_fill_a_gpu_and_divide_the_features() -> None:
    for widths, k, tile in (((768,), 768, (4, 256)), ((768,), 3072, (4, 1024)), ((50257,), 768, (16, 256))):
        parts = parts_of(row_site((widths, k, None, None)))
        assert (row_tile(parts).n, row_tile(parts).k) == tile
        for target in ("sm80", "sm86", "sm90"):
            memory = TARGETS[target].shared_memory
            tile_of_rows = rows_tile(parts, memory)
            assert tile_of_rows.n in (16, 32, 64) and tile_of_rows.stages >= 3
            assert tile_of_rows.stages * (64 + tile_of_rows.n) * tile_of_rows.k * 2 <= memory


def test_nodes_that_no_kernel_computes_say_why() -> None:
    assert "computes bf16, f16, f32" in str(ROW_LINEAR_TRITON.rejects(site_of("plain", dtype="f64")))
    assert "separate kernels" in str(ROW_LINEAR_TORCH.rejects(site_of("plain")))
    assert "a dozen kernels" in str(ROPE_WRITE_TORCH.rejects(rope_site()))
    assert "one dtype" in str(ROPE_WRITE_TRITON.rejects(rope_site(cached="f32")))
    assert "up to 1024 channels" in str(ROPE_WRITE_TRITON.rejects(rope_site(c=2048)))


def rope_inputs(site: Site, rows: int, tokens: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    sizes = {"B": rows, "T": tokens, "S": 9}
    values = [
        torch.randn(type.extents(sizes), generator=generator).to(DTYPES.get(type.dtype)) for type in site.inputs[:-1]
    ]
    angles = torch.randn(values[3].shape, generator=generator)
    values[3], values[4] = angles.cos(), angles.sin()
    # The rows of a cache are apart, as those of a part of its positions.
    caches = [torch.cat((value, value), 1)[:, :9] for value in values[5:7]]
    positions = torch.arange(3, 3 + tokens)
    return [value.to(device) for value in (*values[:5], *caches, positions)]


def check_rope(site: Site, inputs: list[Tensor], results: list[Tensor], name: str, tolerance: float) -> None:
    wanted = site.node.op.reference(*(value.double() if value.is_floating_point() else value for value in inputs))
    for got, value in zip(results, wanted, strict=True):
        torch.testing.assert_close(
            got.double(), value.double(), rtol=tolerance, atol=tolerance, msg=lambda t: f"{name}: {t}"
        )


def test_interpreted_rotations_and_writes_are_the_reference(tmp_path: Path) -> None:
    calls, cases = [], []
    for i, (name, settings) in enumerate(ROPES.items()):
        site = rope_site(**settings)
        module = imported(ROPE_WRITE_TRITON, site, tmp_path / f"rope_{i}").__name__
        for rows, tokens in ((1, 1), (3, 1), (2, 4)):
            inputs = rope_inputs(site, rows, tokens)
            arguments = [value.clone() for value in inputs[:5]] + [*inputs[5:7], inputs[7], torch.empty_like(inputs[0])]
            calls.append((str(tmp_path), module, {"PDL": False}, "launch", arguments))
            cases.append((site, [value.clone() for value in inputs], name))
    for arguments, (site, inputs, name) in zip(interpret_calls(tmp_path, calls), cases, strict=True):
        check_rope(site, inputs, [arguments[8], arguments[5], arguments[6]], name, 2e-3)
    check_clean(tmp_path)


@pytest.mark.parametrize("name", ROPES)
def test_rotations_and_writes_of_plain_torch_are_the_reference(name: str, tmp_path: Path) -> None:
    site = rope_site(**ROPES[name], target="cpu", dtype="f32")
    module = imported(ROPE_WRITE_TORCH, site, tmp_path / f"rope_torch_{name.replace(' ', '_')}")
    inputs = rope_inputs(site, 2, 3)
    check_rope(site, [value.clone() for value in inputs], list(module.rope_write(*inputs)), name, 1e-6)
    check_clean(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("name", CASES)
def test_products_on_a_gpu_are_the_reference(name: str, dtype: str, folder: Path) -> None:
    site = site_of(name, gpu_target(), dtype)
    module = imported(ROW_LINEAR_TRITON, site, folder / f"gpu_{name.replace(' ', '_')}_{dtype}")
    function = vars(module)[ROW_LINEAR_TRITON.render(site).function]
    for m in (*ROWS, 4, 64, 130):
        inputs = inputs_of(site, m, "cuda")
        got = function(*inputs)
        for value, wanted in zip(got if isinstance(got, tuple) else (got,), expected(site, inputs), strict=True):
            rounding = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-22}[dtype]
            error = (value.double() - wanted).abs() / (1 + wanted.abs())
            # Rounded once, after sums in f32; a weight of the norm rounds the input a second time.
            assert float(error.max()) < (3 if site.node.op.norm == AFFINE else 1.1) * rounding + 1e-5, (name, m)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROPES)
def test_rotations_and_writes_on_a_gpu_are_the_reference(name: str, folder: Path) -> None:
    site = rope_site(**ROPES[name], target=gpu_target(), dtype="bf16")
    module = imported(ROPE_WRITE_TRITON, site, folder / f"rope_gpu_{name.replace(' ', '_')}")
    for rows, tokens in ((1, 1), (5, 1), (2, 4)):
        inputs = rope_inputs(site, rows, tokens, "cuda")
        given = [value.clone() for value in inputs]
        check_rope(site, [value.cpu() for value in given], [v.cpu() for v in module.rope_write(*inputs)], name, 2.0**-7)
    with pytest.raises(ValueError, match=r"positions is torch.int32"):
        module.rope_write(*inputs[:7], inputs[7].int())


@pytest.mark.parametrize("name", ROPES)
def test_rotations_and_writes_compile(name: str, tmp_path: Path) -> None:
    site = rope_site(**ROPES[name], dtype="bf16")
    module = imported(ROPE_WRITE_TRITON, site, tmp_path / f"rope_compiled_{name.replace(' ', '_')}")
    kinds = {"cos": "*fp32", "sin": "*fp32", "positions": "*i64"}

    def type_of(parameter: str) -> str:
        if parameter.endswith("_ptr"):
            return kinds.get(parameter.removesuffix("_ptr"), "*bf16")
        return "i32" if parameter in ("KEYS_STRIDE", "VALUES_STRIDE") else "constexpr"

    sizes = {"T": 1, "BLOCK_R": 8, "BLOCK_C": 8, "BLOCK_V": 16, "WARPS": 1}
    code = machine_code(module, site, type_of, sizes)
    assert ".local" not in code.asm["ptx"]
