"""Linear layers in f32 that read bf16: the pass, the generated function, and its values."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from run_samples import EXPERTS, small_spec
from torch import Tensor
from torch.nn import functional as F

from specc.compiler import pipeline
from specc.compiler.ops.linear import WideLinear
from specc.compiler.passes.wide_linears import wide_linears
from specc.compiler.programs.programs import Programs
from specc.compiler.spec.spec import Spec
from specc.runtime.model.load import import_file, instantiate


def spec(*overrides: str) -> Spec:
    return small_spec(*EXPERTS, "targets=[cpu, sm90]", *overrides)


def wide(programs: Programs) -> int:
    return sum(isinstance(node.op, WideLinear) for graph in programs.graphs for node in graph.nodes)


def test_routers_read_bf16_where_the_model_computes_in_bf16() -> None:
    assert wide(pipeline.run(spec(), "sm90"))
    assert not wide(pipeline.run(spec(), "cpu")) and not wide(pipeline.run(small_spec("targets=[cpu, sm90]"), "sm90"))


def test_a_layer_whose_converted_input_has_another_reader_is_not_changed() -> None:
    programs = pipeline.run(spec(), "sm90", until="derive_weights")
    twice = []
    for graph in programs.functions:
        router = next((node for node in graph.nodes if node.name.endswith("router")), None)
        outputs = graph.outputs if router is None else (*graph.outputs, ("wide", router.inputs[0]))
        twice.append(replace(graph, outputs=outputs))
    assert wide(wide_linears(programs)) and not wide(wide_linears(replace(programs, functions=tuple(twice))))


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("wide")
    return import_file(instantiate(spec(), "sm90", folder).directory, "wide_linear")


def errors(function: Callable[..., Tensor], device: str, rows: int, n: int, k: int) -> list[float]:
    """The largest errors of y and the gradients of x and the weight, relative to the largest magnitudes."""
    generator = torch.Generator().manual_seed(rows + n)
    x = (3 * torch.randn(2, rows, k, generator=generator)).bfloat16().to(device).requires_grad_()
    w, d = (torch.randn(*shape, generator=generator).to(device) for shape in ((n, k), (2, rows, n)))
    w.requires_grad_()
    y = function(x, w)
    y.backward(d)
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)  # type: ignore[union-attr]
    x64, w64, d64 = x.detach().double(), w.detach().double(), d.double()
    exact = (x64 @ w64.T, d64 @ w64, d64.flatten(0, 1).T @ x64.flatten(0, 1))
    pairs = zip((y.detach(), x.grad, w.grad), exact, strict=True)
    return [((have.double() - want).abs().max() / want.abs().max()).item() for have, want in pairs]  # type: ignore[union-attr]


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.float(), weight)


@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients_are_those_of_f32(code: ModuleType, compiled: bool) -> None:
    function: Any = torch.compile(code.wide_linear, fullgraph=True) if compiled else code.wide_linear
    for rows, n, k in ((1, 2, 8), (37, 8, 96), (64, 60, 40)):
        y, dx, dw = errors(function, "cpu", rows, n, k)
        assert max(y, dw) < 2e-6 and dx < 2**-8, (rows, n, k, y, dx, dw)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients_are_those_of_f32_on_a_gpu(code: ModuleType, compiled: bool) -> None:
    function: Any = torch.compile(code.wide_linear, fullgraph=True) if compiled else code.wide_linear
    for rows, n, k in ((1, 2, 8), (37, 8, 96), (4096, 8, 768), (3000, 60, 1024)):
        y, dx, dw = errors(function, "cuda", rows, n, k)
        reference = errors(plain, "cuda", rows, n, k)
        assert y < 2 * reference[0] + 1e-6 and dw < 2 * reference[2] + 1e-6 and dx < 2**-8, (rows, n, k, y, dx, dw)


def test_the_three_parts_of_a_number_are_exact(code: ModuleType) -> None:
    values = torch.randn(1000) * torch.logspace(-20, 20, 1000)
    parts = code.parts(values, 3)
    assert torch.equal(sum(part.double() for part in parts), values.double())
    assert not code.parts(torch.tensor([torch.nan, torch.inf]), 3)[1].isfinite().any()
