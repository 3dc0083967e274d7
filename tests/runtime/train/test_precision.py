"""Products of f32 numbers: strict, or in TF32 where a training asks for it."""

import pytest
import torch

from specc.runtime.train.precision import products_in_tf32


@pytest.mark.parametrize("before", ["highest", "high"])
def test_what_was_set_before_is_set_again(before: str) -> None:
    torch.set_float32_matmul_precision(before)
    try:
        for wanted, inside in ((True, "high"), (False, "highest")):
            with pytest.raises(ZeroDivisionError), products_in_tf32(wanted):
                assert torch.get_float32_matmul_precision() == inside
                raise ZeroDivisionError
            assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
def test_a_captured_product_keeps_what_it_was_captured_with() -> None:
    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
    exact, errors = a.double() @ b.double(), {}
    for wanted in (True, False):
        out, graph = torch.empty_like(a), torch.cuda.CUDAGraph()
        with products_in_tf32(wanted):
            torch.mm(a, b, out=out)
            with torch.cuda.graph(graph):
                torch.mm(a, b, out=out)
        graph.replay()
        errors[wanted] = (out.double() - exact).norm().item() / exact.norm().item()
    assert errors[False] < 1e-6 < 1e-4 < errors[True] < 1e-2
