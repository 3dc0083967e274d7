"""The custom op around a kernel, as far as that works without a GPU: fakes, checks, two builds."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_sites import DTYPES, EPILOGUES, check_outputs, empty, imported, make_site, sample_inputs

from specc.compiler.kernels.gemm.evt import GEMM_EVT
from specc.compiler.kernels.gemm.triton import LINEAR_TRITON
from specc.compiler.kernels.kernel import Kernel

WAYS: dict[str, tuple[Kernel, str]] = {
    "tma": (LINEAR_TRITON, "sm90"),
    "pointer": (LINEAR_TRITON, "sm80"),
    "evt": (GEMM_EVT, "sm90"),
}
TAKEN = [(way, name) for way in WAYS for name in EPILOGUES if WAYS[way][0].rejects(make_site(name)) is None]


@pytest.mark.parametrize("rows", [(0,), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize(("way", "name"), TAKEN)
def test_fakes_have_the_shapes_and_dtypes_of_the_node(
    way: str, name: str, rows: tuple[int, ...], tmp_path: Path
) -> None:
    kernel, target = WAYS[way]
    site = make_site(name, 64, 32, target, rows=rows, out="" if way == "evt" else "f32")
    module = imported(kernel, site, tmp_path / f"fake_{way}_{name}_{len(rows)}_{sum(rows)}")
    check_outputs(getattr(module, kernel.render(site).function)(*map(empty, site.inputs)), site)


@pytest.mark.parametrize("way", WAYS)
def test_wrong_inputs_are_refused_with_names_and_numbers(way: str, tmp_path: Path) -> None:
    kernel, target = WAYS[way]
    site = make_site("mul", 64, 32, target)
    op = imported(kernel, site, tmp_path / f"checked_{way}").dgrad_mul
    dy, w, slope = sample_inputs(site, 5, 0)
    node = "blocks.*.mlp.down.dgrad + act"
    with pytest.raises(ValueError) as caught:
        op(dy, w, slope)  # every check passes but the device
    assert str(caught.value) == (
        f"{node}: dy is torch.bfloat16 [5, 32], strides (32, 1), on cpu; "
        "expected contiguous, 16-byte aligned torch.bfloat16 [5, 32] on one GPU"
    )
    with pytest.raises(ValueError, match=r"dy is torch.float32 \[5, 16\].*expected .* torch.bfloat16 \[5, 32\]"):
        op(dy.float()[:, :16], w, slope)


@pytest.mark.parametrize("way", WAYS)
def test_two_builds_of_one_kernel_live_side_by_side(way: str, tmp_path: Path) -> None:
    kernel, target = WAYS[way]
    narrow, wide = (make_site("mul", 64, 32, target, out=out) for out in ("", "f32" if way != "evt" else ""))
    first = imported(kernel, narrow, tmp_path / f"first_{way}")
    second = imported(kernel, wide, tmp_path / f"second_{way}")
    assert first.NAMESPACE != second.NAMESPACE
    inputs = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((5, 32), (32, 64), (5, 64))]
    for module, dtype in ((first, narrow.node.type.dtype), (second, wide.node.type.dtype)):
        assert module.dgrad_mul(*inputs).dtype == DTYPES[dtype]
        registered = getattr(torch.ops, module.NAMESPACE).dgrad_mul__n64_k32
        assert registered(*inputs).dtype == DTYPES[dtype]


def test_the_fake_is_traced_whole(tmp_path: Path) -> None:
    site = make_site("leaky_relu2", 64, 32)
    op = imported(LINEAR_TRITON, site, tmp_path / "traced").linear_leaky_relu2

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y, slope = op(x, w)
        return y + slope

    inputs = sample_inputs(site, 5, 0)
    graph = torch.fx.experimental.proxy_tensor.make_fx(model, tracing_mode="fake")(*inputs).graph
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert names[0] == "traced.linear_leaky_relu2__n64_k32.default" and "aten.add.Tensor" in names


def test_the_library_writes_its_product_before_the_kernel_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher with a library that only takes note of its call."""
    site = make_site("silu_gated_pre", 64, 32)
    module = imported(GEMM_EVT, site, tmp_path / "noted")
    x, w_x, w_gate = inputs = sample_inputs(site, 5, 0)
    y, pre_x, pre_gate = outputs = [torch.full((5, 64), torch.nan, dtype=torch.bfloat16) for _ in range(3)]
    noted: list[tuple[int, ...]] = []

    def call(*args: int) -> int:
        assert torch.equal(pre_x, x @ w_x.T)
        noted.append(args)
        return 0

    code = SimpleNamespace(linear_silu_gated_pre=call, linear_silu_gated_pre_workspace=lambda m: m)
    monkeypatch.setattr(module, "native", lambda: code)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    module.launch(*inputs, *outputs)
    ((m, swizzle, raster, *pointers, _, stream),) = noted
    assert (m, swizzle, raster, stream) == (5, 1, 0, 7)
    assert pointers == [value.data_ptr() for value in (x, w_gate, pre_x, y, pre_gate)]
    assert y.isnan().all() and pre_gate.isnan().all()
