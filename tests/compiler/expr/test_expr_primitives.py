"""The table of functions: every value is Torch's, and one entry is all that a new function needs."""

import math

import pytest
import torch
from torch.nn import functional as F

from specc.compiler.expr import (
    PRIMITIVES,
    ExprError,
    cuda_functions,
    cuda_text,
    derive,
    name_of,
    number,
    parse,
    plan_backward,
    torch_text,
    torch_value,
    triton_text,
)
from specc.compiler.expr.grid import deviations
from specc.compiler.expr.primitives import Primitive

POINTS = (-30.0, -2.0, -0.3, 0.0, 0.7, 3.0, 30.0)


@pytest.mark.parametrize("name", PRIMITIVES)
def test_the_value_is_that_of_torch(name: str) -> None:
    expr = parse(PRIMITIVES[name].example)
    for x in POINTS:
        at = {"x": x, "a": x, "b": 0.5}
        want = torch_value(expr, {key: torch.tensor(value, dtype=torch.float64) for key, value in at.items()})
        if want.isfinite():
            assert number(expr, **at) == pytest.approx(want.item(), rel=1e-12, abs=1e-15)
        else:
            with pytest.raises(ExprError, match="not a finite number"):
                number(expr, **at)


def test_a_function_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    softplus = Primitive(
        "softplus(x)",
        9,
        lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
        "sigmoid(x)",
        "F.softplus",
        torch_keywords={"threshold": 40},
        sign="> 0",
        definition="max(x, 0) + log(1 + exp(-abs(x)))",
        cuda="soft({})",
        cuda_helpers={
            "soft": "__device__ inline float soft(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }"
        },
    )
    monkeypatch.setitem(PRIMITIVES, softplus.name, softplus)
    expr = parse("softplus(2 * x)")
    x = torch.tensor(POINTS, dtype=torch.float64)
    torch.testing.assert_close(torch_value(expr, {"x": x}), F.softplus(2 * x), rtol=0, atol=1e-8)
    assert number(expr, x=0.7) == pytest.approx(F.softplus(torch.tensor(1.4).double()).item())
    assert str(derive(expr, "x")) == "2 * sigmoid(2 * x)"
    assert list(deviations(expr, ("x",))) == [] and plan_backward(expr, ("x",)).strategy == "derivative"
    assert name_of(expr) == "softplus"
    assert torch_text(expr) == "F.softplus(2.0 * x, threshold=40)"
    assert triton_text(expr) == (
        "tl.maximum(2.0 * x, 0.0, propagate_nan=tl.PropagateNan.ALL) + tl.log(1.0 + tl.exp(-tl.abs(2.0 * x)))"
    )
    assert cuda_text(expr) == "soft(2.0f * x)" and cuda_functions([cuda_text(expr)]) == softplus.cuda_helpers["soft"]
    with pytest.raises(ExprError, match=r"softplus takes 1 arguments, not 2; write softplus\(x\)"):
        parse("softplus(x, 1)")
