"""Attention with a score and a mask by flash-attn-4 on a GPU: against float64 and plain Torch, compiled, and in CUDA
graphs."""

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_sites import relative
from kernel_sites import imported
from scored_sites import CASES, Attention, exact, scored_inputs
from torch import Tensor

from specc.compiler.kernels.attention.flash_scored import FLASH_SCORED, FLASH_SCORED_GRAD
from specc.compiler.kernels.kernel import Site, symbol
from specc.runtime.verify.judge import Judge


def _ready() -> bool:
    """Whether this machine has flash-attn-4, and a GPU that has its hooks."""
    result = importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute")
    return bool(result) and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _ready(), reason="needs flash-attn-4 (pip install 'specc[flash]') on an H100, H200 or B200"),
]

TARGET = "sm90" if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 else "sm100"
SHAPES = {"grouped": (4, 2, 64), "one key": (4, 1, 128), "equal": (2, 2, 128)}
LARGE = {
    "window": Attention(mask="j <= i and i - j < 200"),
    "documents": Attention(mask="j <= i and document(i) == document(j)", sinks=True),
    "alibi": Attention("s - slope(h) * (i - j)"),
    "softcap": Attention("20 * tanh(s / 20)", "j <= i and (i - j < 100 or j < 4)"),
    "sinks": Attention(sinks=True),
    "buckets": Attention("s + bias[h, bucket(i - j, 32, 128)]", tables={"bias": (4, 32)}),
}
COUNT = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for generated packages."""
    return tmp_path_factory.mktemp("gpu_flash")


def op_of(site: Site, folder: Path) -> Any:
    kernel = FLASH_SCORED_GRAD if site.node.op.name.endswith("_grad") else FLASH_SCORED
    assert kernel.rejects(site) is None
    return getattr(imported(kernel, site, folder / f"flash_{next(COUNT)}"), symbol(site)[0])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", LARGE)
def test_a_kernel_is_as_exact_as_plain_torch(name: str, backward: bool, folder: Path) -> None:
    site = LARGE[name].site(LARGE[name].hook_shape(SHAPES["grouped"], backward), backward, target=TARGET)
    if backward and LARGE[name].tables:
        assert "returns no gradient" in (FLASH_SCORED_GRAD.rejects(site) or "")
        return
    op = op_of(site, folder)
    for tokens in (64, 515, 1025):
        judge = Judge.of(site, scored_inputs(site, 2, tokens, tokens, "cuda"))
        errors = judge.errors(judge.call(op))
        assert all(error.ok for error in errors), f"{tokens} tokens: {errors}"


@pytest.mark.parametrize(("name", "shape"), list(zip(CASES, itertools.cycle(SHAPES), strict=False)))
def test_every_kind_of_score_mask_and_head(name: str, shape: str, folder: Path) -> None:
    sites = [CASES[name].site(SHAPES[shape], backward, target=TARGET) for backward in (False, True)]
    attend = op_of(sites[0], folder)
    gradient = op_of(sites[1], folder) if FLASH_SCORED_GRAD.rejects(sites[1]) is None else None
    for tokens in (1, 130, 300):
        inputs = scored_inputs(sites[0], 3, tokens, tokens, "cuda")
        wanted = exact(sites[0], inputs)
        y, lse = attend(*inputs)
        result, labels = [y, lse], ["y", "lse"]
        if gradient is not None:
            dy = torch.randn_like(y)
            result += gradient(dy, *inputs[:3], y, lse, *inputs[3:])
            wanted += exact(sites[1], [dy, *inputs[:3], *wanted, *inputs[3:]])
            labels += sites[1].node.op.output_labels
        for label, got, want in zip(labels, result, wanted, strict=True):
            error, scale = (got.double() - want).norm().item(), want.norm().item()
            most = 2e-2 if label != "lse" else 2e-3  # tanh has 2**-11
            assert error <= most * scale + 2e-2 * want.numel() ** 0.5 * (scale < 1e-2), f"{label} of {tokens} tokens"
            assert got.is_contiguous() and not got.isnan().any()


def test_ops_are_traced_whole_and_captured(folder: Path) -> None:
    sites = [LARGE["documents"].site(SHAPES["grouped"], backward, target=TARGET) for backward in (False, True)]
    attend, gradient = (op_of(site, folder) for site in sites)

    def step(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *further: Tensor) -> list[Tensor]:
        y, lse = attend(q * 1.5, k, v, *further)
        return [y, lse, *gradient(dy + 0, q * 1.5, k, v, y, lse, *further)]

    inputs = scored_inputs(sites[0], 3, 400, 7, "cuda")
    values = [torch.randn_like(inputs[0]), *inputs]
    wanted = step(*values)
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    for got, want in zip(compiled(*values), wanted, strict=True):
        assert relative(got, want) < 6e-3 and got.stride() == want.stride()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            compiled(*values)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compiled(*values)
    for value, other in zip(values[1:], scored_inputs(sites[0], 3, 400, 8, "cuda"), strict=True):
        value.copy_(other)  # other documents too: blocks are listed on the device
    for value in captured:
        value.fill_(float("nan"))
    graph.replay()
    for got, want in zip(captured, step(*values), strict=True):
        assert relative(got, want) < 6e-3
