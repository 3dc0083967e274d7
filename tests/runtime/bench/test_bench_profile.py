"""Classes of kernels, and a profile counted by hand from the events of a trace."""

from pathlib import Path

import pytest

from specc.compiler import pipeline
from specc.compiler.build import kernel_files
from specc.compiler.plan.lock import lock_path, read_lock
from specc.compiler.spec.check import load
from specc.runtime.bench.profile import classify, covered, generated_names, jitted, read
from specc.runtime.bench.report import TOP, _data

SPECS = Path(__file__).parents[3] / "specs"

# Names as torch.profiler gives them on an H200.
NAMES = {
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "GEMM",
    "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>": "GEMM",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_tn_align8>(T1::Params)": "GEMM",
    "void gemv2T_kernel_val<int, int, __nv_bfloat16, 128, 16, 4, 4, false, false>": "GEMM",
    "triton_tem_fused_mm_0": "GEMM",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, float>": "attention",
    "void cudnn::fusion::fmha_reduce_head<cudnn::fusion::FmhaReduceHeadParams>": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64, 4>>": "attention",
    "kernel_cutlass_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__tensor0": "attention",
    "triton_tem_fused_flex_attention_1": "attention",
    "triton_per_fused__fused_rms_norm_add_mul_view_4": "pointwise",
    "triton_poi_fused__scaled_dot_product_cudnn_attention_transpose_7": "pointwise",
    "triton_red_fused_mm_sum_3": "pointwise",
    "void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<float>>": "pointwise",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float>>>": "pointwise",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<float, 4>>": "optimizer",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "Memcpy HtoD (Pinned -> Device)": "copy",
    "Memset (Device)": "copy",
    "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiiiiEEENS1_10collective": "fused",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>": "fused",
    "kernel": "fused",
    "spin_kernel(long)": "other",
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items(), ids=[name[:60] for name in NAMES])
def test_classes(name: str, kind: str) -> None:
    assert classify(name, frozenset({"kernel", "halves"})) == kind


def test_only_the_plans_own_kernels_are_known_by_name() -> None:
    assert classify("kernel") == "other"
    rows = "(anonymous namespace)::softmax_rows(__nv_bfloat16 const*, long const*, float*, __nv_bfloat16*, int)"
    assert classify(rows) == "pointwise" and classify(rows, frozenset({"softmax_rows"})) == "fused"
    torchs = "void at::native::(anonymous namespace)::softmax_rows<float>(float*)"
    assert classify(torchs, frozenset({"softmax_rows"})) == "pointwise"


def test_names_of_generated_cuda_kernels(tmp_path: Path) -> None:
    path = SPECS / "gpt2_124m.yaml"
    spec, _ = load(path)
    plan = pipeline.plan(spec, "sm90", "", read_lock(lock_path(path, spec.name)))
    for name, text in ((n, t) for c in plan.choices for n, t in kernel_files(c.rendered, c.key, "").items()):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert {"softmax_rows", "rotary_kernel"} <= generated_names(plan, tmp_path)


def test_names_of_generated_triton_kernels() -> None:
    source = "@triton.jit\ndef one(x): ...\n\n@triton.jit(noinline=True)\ndef two(x): ...\n\ndef launch(x): ...\n"
    assert list(jitted(source)) == ["one", "two"]


def event(cat: str, name: str, ts: float, dur: float, correlation: int = 0) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


GEMM, FOREACH, POINT = "nvjet_tst", "void at::native::multi_tensor_apply_kernel", "triton_poi_fused_add_0"
TRACE = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    event("cpu_op", "aten::mm", 0, 50),
    event("cuda_driver", "cuLaunchKernelEx", 1, 2, 11),
    event("cuda_runtime", "cudaLaunchKernel", 4, 2, 12),
    event("user_annotation", "Optimizer.step#Muon.step", 100, 50),
    event("gpu_user_annotation", "Optimizer.step#Muon.step", 5000, 900),
    event("cuda_runtime", "cudaLaunchKernel", 110, 2, 13),
    event("cuda_runtime", "cudaLaunchKernel", 160, 2, 14),
    event("cuda_runtime", "cudaMemcpyAsync", 170, 2, 15),
    event("kernel", GEMM, 1000, 400, 11),
    event("kernel", POINT, 1300, 300, 12),  # 100 us of it beside the product
    event("kernel", GEMM, 2000, 500, 13),  # launched by the optimizer
    event("kernel", FOREACH, 2500, 100, 14),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 2900, 100, 15),
]


def test_a_profile_by_hand() -> None:
    seen = read(TRACE, 2, frozenset())
    assert seen.wall_ms == pytest.approx(2.0 / 2)  # from 1000 to 3000 us, in two steps
    assert seen.idle_ms == pytest.approx((2.0 - 1.3) / 2)  # 600 + 500 + 100 + 100 us are covered
    assert {kind: total["ms"] for kind, total in seen.classes.items()} == pytest.approx(
        {"GEMM": 0.2, "pointwise": 0.15, "optimizer": 0.3, "copy": 0.05}
    )
    assert [(kernel.kind, kernel.name) for kernel in seen.kernels[:2]] == [("optimizer", GEMM), ("GEMM", GEMM)]
    assert seen.classes["optimizer"]["calls"] == 1.0 and seen.classes["GEMM"]["calls"] == 0.5


def test_data_have_the_largest_kernels_and_classes_of_all() -> None:
    many = [event("kernel", f"triton_poi_{n}", 3000 + n, 1, 20 + n) for n in range(TOP)]
    seen = read([*TRACE, *many], 1, frozenset())
    data = _data(seen)
    assert len(data["kernels"]) == TOP < len(seen.kernels)
    assert sum(total["ms"] for total in data["classes"].values()) >= data["wall_ms"] - data["idle_ms"]
    assert data["classes"]["pointwise"]["calls"] == TOP + 1


def test_a_trace_without_kernels_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="recorded no kernel"):
        read([entry for entry in TRACE if entry.get("cat") not in ("kernel", "gpu_memcpy")], 1, frozenset())


def test_the_union_of_intervals() -> None:
    assert covered([]) == 0
    assert covered([(5, 6), (0, 2), (1, 4), (1, 2)]) == 5
