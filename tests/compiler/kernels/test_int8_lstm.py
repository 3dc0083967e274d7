"""A step of an int8 LSTM: the op and its kernels against float64, in the interpreter and as machine code; what is
refused."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from gpus import gpu_target
from kernel_sites import GUARD, check_clean, check_guards, interpret, machine_code
from step_sites import BITS, ROWS, SIZES, close, exact, imported, operands, step_site

from specc.compiler import kernels
from specc.compiler.catalog import catalog
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import TensorType, TypeRuleError
from specc.compiler.kernels.int8.lstm import INT8_LSTM_TORCH
from specc.compiler.kernels.int8.lstm_triton import INT8_LSTM_TRITON, Int8LstmTriton, step_tile
from specc.compiler.kernels.kernel import Kernel, Site, missing, symbol
from specc.compiler.kernels.tile import Tile
from specc.compiler.ops.int8_lstm import Int8LstmStep
from specc.compiler.ops.quantized import LARGEST_K, padded, two_codes
from specc.compiler.programs import reference
from specc.compiler.quant.int8 import LARGEST_OFFSET
from specc.compiler.targets import TARGETS
from specc.runtime.verify.judge import Judge, inputs_of, sizes_of

KERNELS = [kernel for kernel in catalog(kernels, Kernel).values() if kernel.computes is Int8LstmStep]
POINTERS = {"f32": "*fp32", "bf16": "*bf16", "i8": "*i8", "i32": "*i32"}
GPUS = [name for name, row in TARGETS.items() if row.arch]


# --- the op ---


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", SIZES)
def test_the_reference_is_the_arithmetic(size: int, bits: Literal[8, 16]) -> None:
    given = operands(step_site(size), 7, size)
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in given]
    result = Int8LstmStep(bits).reference(*wide)
    for have, want in zip(result, exact(given, bits), strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-14)


def test_two_codes_are_h_to_half_a_step_of_the_second() -> None:
    """Within the largest code; beyond it they are that code, and NaN is 0."""
    steps = torch.linspace(-127, 127, 100_001, dtype=torch.float64)
    first, second = two_codes(steps)
    assert first.dtype == second.dtype == torch.int8
    assert float((first + second.double() / 254 - steps).abs().max()) <= 0.5 / 254 + 1e-12
    assert int(second.max()) == -int(second.min()) == 127 and int(first.max()) == -int(first.min()) == 127
    first, second = two_codes(torch.tensor([127.4, -1e9, torch.inf, torch.nan]))
    assert first.tolist() == [127, -127, 127, 0] and second.tolist() == [0] * 4


def test_two_codes_see_what_one_does_not() -> None:
    """In float64 the step of 16 bits is 100 times nearer to that of floats than the one of 8."""
    given = [t.double() if t.is_floating_point() else t for t in operands(step_site(64), 33, 1)]
    given[0] = given[0].clamp(-0.5, 0.5)
    h, c, x, w, offset, scale, _ = given
    given[6] = torch.full((64,), 254.0, dtype=torch.float64)
    z = (x + (h * 254 @ w[:, :64].double().T + offset) * scale).chunk(4, -1)
    new = z[1].sigmoid() * c + z[0].sigmoid() * z[2].tanh()
    errors = [float((Int8LstmStep(bits).reference(*given)[1] - new).abs().mean()) for bits in BITS]
    assert 100 * errors[1] < errors[0]


@pytest.mark.parametrize("k", [LARGEST_K, 100_000])
def test_two_codes_stay_within_int32(k: int) -> None:
    """Each has its own sums, so K is bound as for one: the largest and the bias that is stored stay below 2^31."""
    assert (127 * 127 * k + LARGEST_OFFSET < 2**31) is (k == LARGEST_K)
    for bits in BITS:
        if k > LARGEST_K:
            with pytest.raises(TypeRuleError, match="sums at most 66,560 products in int32"):
                step_site(k, bits=bits)
        else:
            step_site(k, bits=bits)


@pytest.mark.parametrize("bits", BITS)
def test_it_is_judged_on_codes_of_both_signs(bits: Literal[8, 16]) -> None:
    site = step_site(20, bits=bits)
    h, _, _, w, _, scale, inverse = inputs_of(site, sizes_of(site, 33), "cpu")
    assert int(w.min()) < -100 and int(w.max()) > 100 and not bool(w[:, 20:].any()) and w.shape == (80, 32)
    assert bool((inverse.log2() % 1 == 0).all()) and len(inverse.unique()) == 3 and bool((scale > 0).all())
    for sample in (False, True):
        judge = Judge.of(site, inputs_of(site, sizes_of(site, 33), "cpu"), sample)
        result = reference.node_value(site.node, list(judge.inputs))
        assert all(error.ok for error in judge.errors(result))
        assert not any(error.ok for error in judge.errors([value * 1.01 for value in result]))
    assert 0.01 < float((h * inverse).abs().gt(127).float().mean()) < 0.5


CHANGES = {
    "c": (TensorType(("B", 12), "f32"), "needs h and c of one float type, not f32[B,8] and f32[B,12]"),
    "x": (TensorType(("B", 24), "f32"), "needs gates of x f32[B,32] for h of 8 features, not f32[B,24]"),
    "w": (TensorType((32, 8), "i8"), "needs weights i8[32,16] for h of 8 features, not i8[32,8]"),
    "offset": (TensorType((31,), "i32"), "needs biases i32[32] for h of 8 features, not i32[31]"),
    "scale": (TensorType((32,), "bf16"), "needs scales f32[32] for h of 8 features, not bf16[32]"),
    "inverse": (TensorType((16,), "f32"), "needs inverses f32[8] for h of 8 features, not f32[16]"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_graph_refuses_what_does_not_fit(name: str) -> None:
    names = ("h", "c", "x", "w", "offset", "scale", "inverse")
    type, message = CHANGES[name]
    b = Builder("g", "decoder")
    types = {**dict(zip(names, step_site(8).inputs, strict=True)), name: type}
    with pytest.raises(TypeRuleError) as raised:
        b.add("step", Int8LstmStep(), [b.input(word, types[word]) for word in names])
    assert raised.value.message == f"decoder.step {message}"


def test_sizes_that_no_product_takes_are_refused() -> None:
    with pytest.raises(TypeRuleError, match="takes a multiple of 4 features, but h is f32"):
        step_site(6)
    with pytest.raises(TypeRuleError, match="sums at most 66,560 products in int32"):
        step_site(70_000)


# --- which kernel, and its files ---


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_one_kernel_for_it(target: str) -> None:
    for size in (4, 128, 1024):
        site = step_site(size, target)
        taking = [kernel for kernel in KERNELS if missing(kernel, site.target) is None and not kernel.rejects(site)]
        assert taking == [INT8_LSTM_TRITON if TARGETS[target].arch else INT8_LSTM_TORCH]
    assert symbol(site) == ("int8_lstm_step", "int8_lstm_step__h1024")
    assert symbol(step_site(1024, bits=16)) == ("int8_lstm_step", "int8_lstm_step__h1024_i16")


def test_refusals_say_why_with_numbers() -> None:
    site = step_site(64, "sm86")
    assert "would compute codes, product and gates in separate kernels" in str(INT8_LSTM_TORCH.rejects(site))
    shallow = replace(INT8_LSTM_TRITON, tile=Tile(32, 16, 16, 4, 1))
    assert "multiplies at least 32 codes at a time" in str(shallow.rejects(site))
    deep = replace(INT8_LSTM_TRITON, tile=Tile(128, 64, 256, 8, 2))
    reason = "needs 393,216 bytes of shared memory for the loads of 128x64x256, 8 warps, 2 stages; sm86 has 101,376"
    assert deep.rejects(site) == reason
    state = TensorType(("B", 64), "f64")
    odd = replace(site, inputs=(state, state, *site.inputs[2:]))
    reason = "keeps h and c in bf16, f16, f32; they are f64[B,64]"
    assert INT8_LSTM_TRITON.rejects(odd) == INT8_LSTM_TORCH.rejects(replace(odd, target=TARGETS["cpu"])) == reason


@pytest.mark.parametrize("target", GPUS)
def test_tiles_to_measure_are_distinct_fit_and_have_the_rules(target: str) -> None:
    for size in (*SIZES, 1024):
        site = step_site(size, target)
        variants = INT8_LSTM_TRITON.variants(site)
        tiles = [kernel.tile for kernel in variants]  # type: ignore[attr-defined]
        assert len(set(tiles)) == len(tiles) > 3 and not any(kernel.rejects(site) for kernel in variants)
        assert str(tiles[0]) == INT8_LSTM_TRITON.render(site).tile
        assert INT8_LSTM_TRITON.padding(site, 33) >= 64 / 33


def test_generated_files_are_clean_python(tmp_path: Path) -> None:
    labels = ("decoder.lstm.step", "a.*.recurrent.step and decoder.lstm.step and decoder.other_lstm.step")
    for i, (kernel, target) in enumerate(((INT8_LSTM_TRITON, "sm90"), (INT8_LSTM_TORCH, "cpu"))):
        for size in SIZES:
            for dtype, bits in product(("f32", "bf16"), BITS):
                for label in labels:
                    site = step_site(size, target, dtype, label, bits)
                    module = imported(kernel, site, tmp_path / f"clean_{i}_{size}_{dtype}_{bits}_{len(label)}")
                    assert len(module.NODES) == label.count(" and ") + 1
    check_clean(tmp_path)


# --- values ---


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_the_plain_kernel_gives_float64_to_rounding(
    size: int, dtype: str, bits: Literal[8, 16], tmp_path: Path
) -> None:
    site = step_site(size, "cpu", dtype, bits=bits)
    function = imported(INT8_LSTM_TORCH, site, tmp_path / f"plain_{size}_{dtype}_{bits}").int8_lstm_step
    for rows, apart in ((1, 0), (17, size), (40, 0)):
        given = operands(site, rows, rows, apart=apart)
        for have, want in zip(function(*given), exact(given, bits), strict=True):
            close(have, want)
    assert [part.shape for part in function(*operands(site, 0, 0))] == [(0, size)] * 2
    given = operands(site, 2, 3)
    given[0][1, 1] = torch.nan
    for have, want in zip(function(*given), exact(given, bits), strict=True):
        close(have, want)


Case = tuple[int, int, int, Literal[8, 16]]
SHAPES = ((1, 0), (17, 320), (40, 4))
INTERPRETED: list[Case] = [
    (size, rows, apart, bits) for size in (4, 64, 100, 320) for rows, apart in SHAPES for bits in BITS
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Any]:
    """The contents that the interpreter leaves in the output buffers of each case."""
    folder = tmp_path_factory.mktemp("interpreted_steps")
    runs = []
    for size, rows, apart, bits in INTERPRETED:
        site = step_site(size, "sm90", bits=bits)
        module = imported(INT8_LSTM_TRITON, site, folder / f"interpreted_step_{size}_{bits}").__name__
        buffers = [torch.full((rows * size + 2 * GUARD,), torch.nan) for _ in range(2)]
        given = operands(site, rows, rows, apart=apart)
        given[0][rows - 1, 2] = torch.nan
        runs.append((str(folder), module, given, buffers, [size] * 2))
    return dict(zip(INTERPRETED, interpret(folder, runs), strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: "-".join(map(str, case)))
def test_the_interpreted_kernel_gives_float64(case: Case, results: dict[Any, Any]) -> None:
    size, rows, apart, bits = case
    given = operands(step_site(size), rows, rows, apart=apart)
    given[0][rows - 1, 2] = torch.nan
    buffers, unchanged = results[case]
    assert unchanged, "an input was written"
    for i, (buffer, want) in enumerate(zip(buffers, exact(given, bits), strict=True)):
        check_guards(buffer, f"output {i}")
        close(buffer[GUARD : buffer.numel() - GUARD].view(rows, size), want)


def compiled(kernel: Int8LstmTriton, site: Site, folder: Path) -> Any:
    """The kernel as machine code of its target."""
    tensors = iter((*site.inputs, *site.node.types))

    def type_of(name: str) -> str:
        if name.endswith("_ptr"):
            return POINTERS[next(tensors).dtype]
        return "i32" if name in ("B", "h_quads", "c_quads") else "constexpr"

    return machine_code(imported(kernel, site, folder), site, type_of)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", ["sm80", "sm86", "sm90", "sm120"])
def test_kernels_multiply_whole_numbers_on_tensor_cores(
    target: str, size: int, bits: Literal[8, 16], tmp_path: Path
) -> None:
    """Of two codes twice as often as of one."""
    site = step_site(size, target, bits=bits)
    code = compiled(INT8_LSTM_TRITON, site, tmp_path / f"compiled_step_{target}_{size}_{bits}")
    ptx = code.asm["ptx"]
    tile, multiply = step_tile(padded(size)), r"mma\.sync\.aligned\.m16n8k32\.row\.col\S*\.s32\.s8\.s8\.s32"
    blocks = tile.m // 16 * (4 * tile.n // 8) * (tile.k // 32) // tile.warps
    assert len(re.findall(multiply, ptx)) == blocks * (bits // 8) and ".f64" not in ptx
    assert code.metadata.shared <= site.target.shared_memory


@pytest.mark.parametrize("bits", BITS)
def test_a_step_waits_for_memory_once(bits: Literal[8, 16], tmp_path: Path) -> None:
    """Where one block is all of K, every load is under way before the first is used; those of tiles are of 16 bytes.
    A second code loads nothing more."""
    site = step_site(128, "sm90", bits=bits)
    ptx = compiled(INT8_LSTM_TRITON, site, tmp_path / f"compiled_step_once_{bits}").asm["ptx"]
    loads = [result.start() for result in re.finditer(r"ld\.global", ptx)]
    first = re.search(r"st\.shared|stmatrix|bar\.sync", ptx)
    assert first is not None and max(loads) < first.start()
    assert ptx.count("ld.global.v4.b32") == 17  # a thread's: of c 1, of x 4, of h 8, of w 4


@pytest.mark.parametrize(("target", "size", "bits"), [("sm80", 128, 8), ("sm86", 320, 16), ("sm90", 320, 8)])
def test_every_tile_compiles_and_fits(target: str, size: int, bits: Literal[8, 16], tmp_path: Path) -> None:
    site = step_site(size, target, "bf16", bits=bits)
    for i, kernel in enumerate(INT8_LSTM_TRITON.variants(site)):
        assert isinstance(kernel, Int8LstmTriton)
        code = compiled(kernel, site, tmp_path / f"compiled_step_{target}_{size}_{bits}_tile_{i}")
        assert code.metadata.shared <= site.target.shared_memory


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", SIZES)
def test_every_tile_gives_float64_and_what_plain_torch_gives(size: int, bits: Literal[8, 16], tmp_path: Path) -> None:
    site = step_site(size, gpu_target(), bits=bits)
    alike = step_site(size, bits=bits)
    plain = imported(INT8_LSTM_TORCH, alike, tmp_path / f"gpu_plain_{size}_{bits}").int8_lstm_step
    for i, kernel in enumerate((INT8_LSTM_TRITON, *INT8_LSTM_TRITON.variants(site))):
        function = imported(kernel, site, tmp_path / f"gpu_step_{size}_{bits}_{i}").int8_lstm_step
        for rows in ROWS:
            for apart in (0, size):
                given = operands(site, rows, rows + i, "cuda", apart)
                result = function(*given)
                torch_found = plain(*(tensor.cpu() for tensor in given))
                for have, want, other in zip(result, exact(given, bits), torch_found, strict=True):
                    assert have.is_contiguous()
                    close(have, want)
                    torch.testing.assert_close(have.cpu(), other, rtol=4e-6, atol=4e-6)
        assert [part.shape for part in function(*operands(site, 0, 1, "cuda"))] == [(0, size)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("bits", BITS)
def test_narrow_states_are_rounded_once(bits: Literal[8, 16], tmp_path: Path) -> None:
    site = step_site(100, gpu_target(), "bf16", bits=bits)
    function = imported(INT8_LSTM_TRITON, site, tmp_path / f"gpu_step_bf16_{bits}").int8_lstm_step
    given = operands(site, 33, 5, "cuda", 100)
    for have, want in zip(function(*given), exact(given, bits), strict=True):
        assert have.dtype == torch.bfloat16
        close(have, want)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", BITS)
def test_every_run_gives_the_same_bits_also_from_a_graph(bits: Literal[8, 16], tmp_path: Path) -> None:
    site = step_site(128, gpu_target(), bits=bits)
    function = imported(INT8_LSTM_TRITON, site, tmp_path / f"gpu_step_again_{bits}").int8_lstm_step
    given = operands(site, 768, 2, "cuda")
    first = function(*given)
    for _ in range(100):
        assert all(map(torch.equal, function(*given), first))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(*given)
    for tensor in result:
        tensor.fill_(torch.nan)
    for _ in range(100):
        graph.replay()
        assert all(map(torch.equal, result, first))


@pytest.mark.gpu
def test_the_compiler_of_torch_keeps_it(tmp_path: Path) -> None:
    site = step_site(64, gpu_target())
    function = imported(INT8_LSTM_TRITON, site, tmp_path / "gpu_step_compiled").int8_lstm_step
    given = operands(site, 48, 4, "cuda")
    twice = torch.compile(lambda h, c, *more: function(*function(h, c, *more), *more), fullgraph=True)
    h, c = function(*given)
    assert all(map(torch.equal, twice(*given), function(h, c, *given[2:])))
