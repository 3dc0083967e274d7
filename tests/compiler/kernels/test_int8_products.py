"""Int8 products: exact sums for any number of rows, epilogues against float64, what kernels refuse."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpus import gpu_target
from int8_sites import CASES, close, exact, imported, int8_site, operands, written

from specc.compiler import kernels
from specc.compiler.catalog import catalog
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.types import TensorType, TypeRuleError
from specc.compiler.kernels.int8.gemm import GEMM_INT8_TORCH
from specc.compiler.kernels.int8.sm80 import GEMM_INT8_SM80
from specc.compiler.kernels.int8.sm90 import GEMM_INT8_SM90
from specc.compiler.kernels.kernel import Kernel, missing
from specc.compiler.ops.quantized import Int8Linear, QuantizeRows, padded
from specc.compiler.targets import TARGETS
from specc.runtime.support import int8_sums as sums
from specc.runtime.support.int8_sums import int8_sums
from specc.runtime.support.native import flags

KERNELS = [k for k in catalog(kernels, Kernel).values() if issubclass(Int8Linear, k.computes)]
ROWS = (1, 6, 16, 33)  # torch._int_mm takes no 16 rows, nor fewer


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "k"), [(16, 16), (32, 128), (48, 1040)])
def test_sums_are_exact(n: int, k: int, rows: int, tmp_path: Path) -> None:
    """Bit for bit what whole numbers give, up to the one rounding of a sum to f32."""
    site = int8_site("plain", n, k)
    x, w, offset, _ = operands(site, (rows,), n + k + rows)
    x[0], w[0], offset[0] = 127, 127, 2**30 - 127 * 127 * k  # the largest sum there can be
    function = vars(imported(GEMM_INT8_TORCH, site, tmp_path))["int8_linear_f32"]
    result = function(x, w, offset, torch.ones(n))
    sums = torch.from_numpy(x.long().numpy() @ w.long().numpy().T) + offset.long()
    assert int(sums.abs().max()) == 2**30
    assert torch.equal(result, sums.float())
    assert torch.equal(sums.int(), Int8Linear().reference(x, w, offset))


def test_a_cpu_whose_library_clips_sums_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, *_ = operands(int8_site("plain", 48, 1040), (3, 5), 1)
    x[0], w[0] = 127, 127
    result = int8_sums(x, w)
    assert result.dtype == torch.int32 and int(result[0, 0, 0]) == 1040 * 127**2
    assert int8_sums(x[:0], w).shape == (0, 5, 48)
    monkeypatch.setattr(torch, "_int_mm", lambda x, w: (x.double() @ w.double()).clamp(-32768, 32767).to(torch.int32))
    assert not sums.exact()
    monkeypatch.setattr(sums, "EXACT", False)
    assert torch.equal(int8_sums(x, w), result)


@pytest.mark.parametrize("name", CASES)
def test_epilogues_equal_float64(name: str, tmp_path: Path) -> None:
    site = int8_site(name, 64, 48)
    function = vars(imported(GEMM_INT8_TORCH, site, tmp_path))[GEMM_INT8_TORCH.render(site).function]
    for seed, rows in enumerate(((5,), (2, 3), (1, 1))):
        given = operands(site, rows, seed)
        result = function(*given)
        assert result.shape == (*rows, 64)
        close(result, exact(site, given))


def test_codes_are_rounded_to_even_and_symmetric(tmp_path: Path) -> None:
    halves = torch.tensor([[0.5, 1.5, -0.5, -2.5, 200.0, -200.0, float("nan"), 127.4]])
    result = QuantizeRows(16).reference(halves, torch.ones(8))
    assert isinstance(result, torch.Tensor)
    assert result.tolist() == [[0, 2, 0, -2, 127, -127, 0, 127] + [0] * 8]
    second = QuantizeRows(16, second=True).reference(halves, torch.ones(8))
    assert isinstance(second, torch.Tensor)
    assert second.tolist() == [[127, -127, -127, -127, 0, 0, 0, 0] + [0] * 8]


def test_extents_are_padded_to_what_a_load_takes() -> None:
    assert [padded(n) for n in (1, 16, 17, 31, 32)] == [16, 16, 32, 32, 32]


@pytest.mark.parametrize(("n", "k"), [(64, 64), (512, 256), (512, 272)])
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_a_kernel_and_the_right_one(target: str, n: int, k: int) -> None:
    site = int8_site("residual", n, k, target)
    taking = [k for k in KERNELS if missing(k, site.target) is None and k.rejects(site) is None]
    best = min(taking, key=lambda kernel: kernel.rank(site)).name
    large = "gemm_int8_sm90" if (n, k) == (512, 272) else "gemm_int8_sm80"
    wanted = {"cpu": "gemm_int8_torch", "sm90": large}.get(target, "gemm_int8_sm80")
    assert best == wanted


@pytest.mark.parametrize("target", [name for name, row in TARGETS.items() if row.arch])
def test_sources_name_their_architecture(target: str, tmp_path: Path) -> None:
    site = int8_site("codes", 64, 64, target)
    text = written(GEMM_INT8_SM80, site, tmp_path).read_bytes()
    arch = TARGETS[target].nvcc.removeprefix("sm_")
    assert f"-gencode=arch=compute_{arch},code=sm_{arch}" in flags(text)
    assert sum(flag.startswith("-gencode") for flag in flags(text)) == 1


def test_a_kernel_rejects_what_it_cannot_load() -> None:
    site = int8_site("plain", 64, 64, "sm90")
    for n, k in ((31, 128), (32, 72)):
        types = (TensorType(("B", "T", k), "i8"), TensorType((n, k), "i8"), TensorType((n,), "i32"))
        odd = replace(site, inputs=(*types, TensorType((n,), "f32")))
        for kernel in (GEMM_INT8_SM80, GEMM_INT8_SM90):
            assert kernel.rejects(odd) == f"needs N and K that are multiples of 16; N is {n} and K is {k}"
    bare = replace(site, node=replace(site.node, epilogue=None))
    assert "needs an epilogue" in str(GEMM_INT8_SM80.rejects(bare))
    assert "Torch has no int8 product for few rows" in str(GEMM_INT8_TORCH.rejects(site))


@pytest.mark.parametrize(
    ("x", "w", "offset", "message"),
    [
        (64, (32, 128), 32, "decoder.proj has a weight of 128 columns, but its input has 64 features (embed)"),
        (128, (32, 128), 31, "decoder.proj has a weight of 32 rows, but the bias is i32[31]"),
        (128, (31, 128), 31, "decoder.proj takes weights whose sizes are multiples of 16, not [31, 128]"),
    ],
)
def test_a_graph_refuses_what_does_not_fit(x: int, w: tuple[int, int], offset: int, message: str) -> None:
    b = Builder("g", "decoder")
    codes = b.input("embed", TensorType(("B", "T", x), "i8"))
    weight = b.param("w", TensorType(w, "i8"), None)
    bias = b.param("b", TensorType((offset,), "i32"), None)
    with pytest.raises(TypeRuleError) as raised:
        b.add("proj", Int8Linear(), (codes, weight, bias))
    assert raised.value.message == message


@pytest.mark.gpu
@pytest.mark.nvcc
@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_any_number_of_rows(name: str, tmp_path: Path) -> None:
    """Every kernel that this GPU has."""
    target = gpu_target()
    kernels = [kernel for kernel in (GEMM_INT8_SM80, GEMM_INT8_SM90) if not missing(kernel, TARGETS[target])]
    assert kernels
    for kernel in kernels:
        computes_any_number_of_rows(kernel, target, name, tmp_path / kernel.name)


def computes_any_number_of_rows(kernel: Kernel, target: str, name: str, tmp_path: Path) -> None:
    n, k = {"codes": (768, 256), "sum": (256, 64), "plain": (32, 128)}.get(name, (256, 256))
    site = int8_site(name, n, k, target)
    function = vars(imported(kernel, site, tmp_path))[kernel.render(site).function]
    for seed, rows in enumerate((1, 6, 16, 17, 64, 129, 1000)):
        given = operands(site, (rows,), seed, "cuda")
        result = function(*given)
        close(result, exact(site, given))
        if name == "plain":
            ones = torch.ones(n, device="cuda")
            sums = torch.from_numpy(given[0].long().cpu().numpy() @ given[1].long().cpu().numpy().T)
            assert torch.equal(function(*given[:3], ones).cpu(), (sums + given[2].long().cpu()).float())
    assert function(*operands(site, (0,), 1, "cuda")).shape == (0, n)
    with pytest.raises(ValueError, match=r"part\.up"):
        function(*[tensor.cpu() if i == 1 else tensor for i, tensor in enumerate(operands(site, (4,), 2, "cuda"))])


@pytest.mark.gpu
@pytest.mark.nvcc
def test_weights_of_one_stream_are_used_on_another(tmp_path: Path) -> None:
    """The current stream is where a kernel runs; an event orders it behind the copy; memory that is freed while the
    kernel waits is not handed out again before, as the caching allocator keeps it to its stream."""
    site = int8_site("plain", 64, 64, gpu_target())
    function = vars(imported(GEMM_INT8_SM80, site, tmp_path))["int8_linear_f32"]
    host = [tensor.pin_memory() for tensor in operands(site, (512,), 3)]
    loading, running = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(loading):
            torch.cuda._sleep(2_000_000)
            given = [tensor.to("cuda", non_blocking=True) for tensor in host]
            ready = loading.record_event()
        with torch.cuda.stream(running):
            running.wait_event(ready)
            result = function(*given)
            for tensor in given:
                tensor.record_stream(running)
            del given
            torch.full((512 * 64,), 7, dtype=torch.int8, device="cuda")  # would land in what was freed
        torch.cuda.synchronize()
        close(result, exact(site, host))
