"""Kernels for few rows that decode packed codes, against float64 products with the dequantized weights."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_sites import AFFINE, RMS, row_site
from decoding_sites import ROW_CASES as CASES
from gpus import gpu_target
from kernel_sites import DTYPES, check_clean, imported, interpret_calls, machine_code
from test_decoding_kernels import expected
from torch import Tensor

from specc.compiler.kernels.gemm.row_parts import parts_of
from specc.compiler.kernels.gemm.rows import ROW_LINEAR_TRITON, row_tile
from specc.compiler.kernels.gemm.rows_torch import ROW_LINEAR_TORCH
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.decoding.packed_codes import dequantized, lanes_of, pack, unpack

BITS = (2, 3, 4, 5, 6, 7, 8)


def inputs_of(site: Site, m: int, bits: tuple[int, ...], device: str = "cpu") -> list[Tensor]:
    """Random inputs; weight i has codes of `bits[i % len(bits)]` bits."""
    generator = torch.Generator().manual_seed(m)
    values, k, weights = [], int(site.inputs[0].width), 0
    for i, type in enumerate(site.inputs):
        shape = [dim for dim in type.shape if isinstance(dim, int)]
        if type.dtype == "u8":
            width, weights = bits[weights % len(bits)], weights + 1
            half = 1 << (width - 1)
            codes = torch.randint(-half, half, (shape[0], k), generator=generator).to(torch.int8)
            value = pack(codes, width)
        elif i and site.inputs[i - 1].dtype == "u8":  # scales
            value = ((0.2 + torch.rand(shape, generator=generator)) * 0.5 * k**-0.5 / half).half()
        else:
            shape = shape if type.shape[0] != "B" else [m, *shape]
            value = (torch.randn(shape, generator=generator) + 0.1 * (i == 0)).to(DTYPES[type.dtype])
        values.append(value.to(device))
    return values


def wanted_of(site: Site, inputs: list[Tensor]) -> list[Tensor]:
    """The outputs in float64."""
    wide = [value if value.dtype == torch.uint8 else value.double() for value in inputs]
    return expected(site, wide)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("features", [1, 12, 127, 128, 300, 1000])
def test_codes_are_unpacked_from_aligned_rows(bits: int, features: int) -> None:
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (5, features), generator=torch.Generator().manual_seed(bits)).to(torch.int8)
    packed = pack(codes, bits)
    assert packed.shape == (5, bits * lanes_of(features)) and packed.shape[1] % 16 == 0
    assert torch.equal(unpack(packed, features), codes)
    scale = torch.rand(5, generator=torch.Generator().manual_seed(features)).half()
    assert torch.equal(dequantized(packed, scale, features), codes.float() * scale.float()[:, None])
    with pytest.raises(ValueError, match="2 to 8 bits"):
        pack(codes.clamp(min=half - 1) + 1 if bits < 8 else codes, bits if bits < 8 else 9)


def test_lanes_have_their_codes_at_the_stated_bits() -> None:
    codes = torch.arange(-16, 16).repeat(4).to(torch.int8)[None]  # of 5 bits: a part of 4 and a part of 1
    row = pack(codes, 5)[0].tolist()
    for lane in range(16):
        word = int.from_bytes(bytes(row[4 * lane : 4 * lane + 4]), "little")
        got = [(word >> 4 * j & 15) + (row[64 + lane] >> j & 1) * 16 - 16 for j in range(8)]
        assert got == codes[0, lane::16].tolist()


def test_interpreted_kernels_decode_codes_of_all_widths(tmp_path: Path) -> None:
    rng, calls, cases = random.Random(0), [], []
    sites = [(name, row_site(case, dtype="f16", packed=True)) for name, case in CASES.items()]
    for k in (1, 129, 300, 515):
        case = (rng.randint(1, 40),), k, RMS if k > 129 else None, None
        sites.append((f"odd {k}", row_site(case, dtype="f16", packed=True)))
    for i, (name, site) in enumerate(sites):
        module = imported(ROW_LINEAR_TRITON, site, tmp_path / f"packed_rows_{i}").__name__
        for m in (1, rng.randint(2, 16)):
            for bits in ((BITS[i % 7],), (BITS[(i + 3) % 7],), tuple(rng.sample(BITS, 3))):
                inputs = inputs_of(site, m, bits)
                tile = {"ROW": (4, 16, 1)} if m == 1 and len(bits) == 3 else {}  # many pieces
                outputs = [torch.full((m + 1, int(t.width)), torch.nan, dtype=DTYPES[t.dtype]) for t in site.node.types]
                calls.append((str(tmp_path), module, {"PDL": False, **tile}, "launch", [*inputs, *outputs]))
                cases.append((f"{name}, {m} x {bits}", m, inputs, wanted_of(site, inputs)))
    for arguments, (name, m, inputs, values) in zip(interpret_calls(tmp_path, calls), cases, strict=True):
        assert all(map(torch.equal, arguments, inputs)), f"{name}: an input was written"
        for got, value in zip(arguments[len(inputs) :], values, strict=True):
            assert got[m:].isnan().all() and not got[:m].isnan().any(), name
            torch.testing.assert_close(got[:m].double(), value, rtol=2e-3, atol=2e-3, msg=lambda t, n=name: f"{n}: {t}")
    check_clean(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_plain_torch_is_the_reference(name: str, tmp_path: Path) -> None:
    site = row_site(CASES[name], "cpu", "f32", packed=True)
    module = imported(ROW_LINEAR_TORCH, site, tmp_path / f"packed_torch_{name.replace(' ', '_')}")
    inputs = inputs_of(site, 5, (5, 8, 4))
    got = vars(module)[ROW_LINEAR_TORCH.render(site).function](*inputs)
    for value, wanted in zip(got if isinstance(got, tuple) else (got,), wanted_of(site, inputs), strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-5)
    check_clean(tmp_path)


@pytest.mark.parametrize(("bits", "target"), [((8, 5, 2), "sm80"), ((7, 4, 3), "sm90")])
def test_codes_are_loaded_as_vectors_and_converted_without_calls(
    bits: tuple[int, ...], target: str, tmp_path: Path
) -> None:
    site = row_site(((768, 768, 768), 768, RMS, None), target, "bf16", packed=True)
    module = imported(ROW_LINEAR_TRITON, site, tmp_path / f"packed_{target}")
    for m in (1, 2, 64):
        height, n, k, slices, _, stages = module.rows_tile(m) if m > 1 else (1, *module.ROW[:2], 1, 1, 1)
        sizes = {"BLOCK_M": height, "BLOCK_N": n, "BLOCK_K": k, "STAGES": stages, "M": 1}
        sizes["WARPS"] = module.ROW[2] if m == 1 else module.ROWS_WARPS
        assert slices == 1
        sizes |= {f"BITS{i}": each for i, each in enumerate(bits)}

        def type_of(name: str, height: int = height) -> str:
            if name.endswith("_ptr"):
                return {"w": "*u8", "s": "*fp16"}.get(name[0], "*bf16")
            return "i32" if name == "M" and height > 1 else "constexpr"

        code = machine_code(module, site, type_of, sizes)
        ptx = code.asm["ptx"]
        assert code.metadata.shared <= site.target.shared_memory and ".local" not in ptx
        # The bits of a code become those of a float: no conversion of integers.
        assert "cvt.rn.f32.s" not in ptx and "cvt.rn.f32.u" not in ptx
        assert ("mma" in ptx) == (height > 1)
        assert ptx.count("griddepcontrol.wait") == (3 if target == "sm90" else 0)
        if height == 1:
            assert ptx.count("bar.sync") < 8 * 3  # features of x go from memory to the threads of their codes
            # 16 bytes at once, of each weight with codes of 8 bits or a part of 4
            assert ptx.count("ld.global.v2.b64") >= 6 * bits.count(8)
            assert ptx.count("ld.global.v4.b32") >= 3 * sum(4 <= width < 8 for width in bits) > 0


def test_tiles_divide_the_lanes_and_fit_into_shared_memory(tmp_path: Path) -> None:
    for widths, k, tile in (((768,), 768, (4, 32)), ((768,), 3072, (4, 128)), ((50257,), 768, (16, 32))):
        parts = parts_of(row_site((widths, k, None, None), packed=True))
        assert (row_tile(parts).n, row_tile(parts).k) == tile
        for target in ("sm80", "sm86", "sm90"):
            site = row_site((widths, k, None, None), target, "bf16", packed=True)
            module = imported(ROW_LINEAR_TRITON, site, tmp_path / f"tiles_{target}_{k}_{len(widths)}_{widths[0]}")
            assert lanes_of(k) % module.ROWS_K == 0 and module.ROWS_K >= 16
            for m in (2, 16, 64):
                height, n, *_, stages = module.rows_tile(m)
                piece = module.ROWS_K * 8 * (height * 2 + n)
                assert height >= min(m, 16) and stages >= 2 and stages * piece <= site.target.shared_memory


def test_nodes_that_no_kernel_computes_say_why() -> None:
    huge = row_site(((300_000,), 8192, None, None), packed=True)
    assert "32-bit offsets" in str(ROW_LINEAR_TRITON.rejects(huge))
    assert "separate kernels" in str(ROW_LINEAR_TORCH.rejects(row_site(CASES["plain"], packed=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("name", CASES)
def test_decoded_products_on_a_gpu_are_the_reference(name: str, dtype: str, folder: Path) -> None:
    site = row_site(CASES[name], gpu_target(), dtype, packed=True)
    module = imported(ROW_LINEAR_TRITON, site, folder / f"packed_gpu_{name.replace(' ', '_')}_{dtype}")
    function: Any = vars(module)[ROW_LINEAR_TRITON.render(site).function]
    for m in (1, 2, 5, 16, 17, 64, 130):
        for bits in ((2,), (3,), (4,), (5,), (6,), (7,), (8,), (4, 8, 5)):
            inputs = inputs_of(site, m, bits, "cuda")
            got = function(*inputs)
            for value, wanted in zip(got if isinstance(got, tuple) else (got,), wanted_of(site, inputs), strict=True):
                rounding = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-22}[dtype]
                error = (value.double() - wanted).abs() / (1 + wanted.abs())
                # Rounded once, after sums in f32; a weight of the norm rounds the input a second time.
                limit = (3 if site.node.op.norm == AFFINE else 1.1) * rounding + 1e-5
                assert float(error.max()) < limit, (name, m, bits)
