"""Printed Triton, run in Triton's interpreter and compiled for GPUs that this machine need not have."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from expr_samples import NAMES, POINTS, check_nan, check_single, expressions, values, with_nan
from fork_server import run_script

from specc.compiler.expr import PRIMITIVES, Expr, derive, parse, plan_backward, triton_text

CALLS = {
    "leaky_relu": "leaky_relu(x, 0.3)",
    "where": "where(x > gate, x, 0.5)",
    "min": "min(x, gate)",
    "max": "max(1, x)",
}
EVERY_FUNCTION = [parse(CALLS.get(name, f"{name}(x)")) for name in PRIMITIVES]
MODEL = [
    parse(text)
    for text in (
        "leaky_relu(x, 0.5) ** 2", "silu(gate) * x", "30 * tanh(x / 30)", "gelu(gate) * x + scale",
        "x ** 20", "x ** -3",
        "abs(x) ** 17", "abs(x) ** 0.3", "where(x != 0, 1, 0.5)", "0.5", "min(max(x, 0), 6)", "1 / 3",
        "x ** 3 * relu(-x)",
    )
]  # fmt: skip
DERIVATIVES = [derive(expr, "x") for expr in EVERY_FUNCTION + MODEL]

HEAD = f"""\
import torch
import triton
import triton.language as tl


@triton.jit
def kernel({"".join(f"{name}_at, " for name in NAMES)}out, P: tl.constexpr):
    at = tl.arange(0, P)
    zero = tl.zeros((P,), tl.float32)
"""
RUN = """

if __name__ == "__main__":
    import sys

    inputs = torch.load(sys.argv[1])
    out = torch.full((COUNT, inputs[0].numel()), float("nan"))
    kernel[(1,)](*inputs, out, out.shape[1])
    torch.save(out, sys.argv[2])
"""


def write_module(path: Path, exprs: list[Expr]) -> Path:
    loads = [f"    {name} = tl.load({name}_at + at)\n" for name in NAMES]
    stores = [f"    tl.store(out + {i} * P + at, zero + ({triton_text(e)}))\n" for i, e in enumerate(exprs)]
    path.write_text(HEAD + "".join(loads + stores) + RUN.replace("COUNT", str(len(exprs))))
    return path


@pytest.mark.interpret
def test_interpreted_values_are_those_of_the_reference(tmp_path: Path) -> None:
    exprs = EVERY_FUNCTION + MODEL + DERIVATIVES + expressions(150, 50)
    at, broken = values(7), with_nan(8)
    torch.save([torch.cat((at[name], broken[name])).float() for name in NAMES], tmp_path / "inputs.pt")
    module = write_module(tmp_path / "module.py", exprs)
    run_script(module, str(tmp_path / "inputs.pt"), str(tmp_path / "out.pt"), folder=tmp_path, interpret=True)
    compared = nan = 0
    for expr, got in zip(exprs, torch.load(tmp_path / "out.pt").double(), strict=True):
        compared += check_single(expr, at, got[:POINTS], triton_text(expr))
        nan += check_nan(expr, broken, got[POINTS:], triton_text(expr))
    assert compared > 0.6 * len(exprs) * POINTS and nan > 0.2 * len(exprs) * POINTS


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_for_gpus(capability: int, tmp_path: Path) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    plan = plan_backward(parse("leaky_relu(x, 0.5) ** 2"), ("x",))
    exprs = EVERY_FUNCTION + MODEL + [save for _, save in plan.saves] + DERIVATIVES[:6]
    module = load(write_module(tmp_path / f"module_{capability}.py", exprs))
    signature = {**{f"{name}_at": "*fp32" for name in NAMES}, "out": "*fp32", "P": "constexpr"}
    source = ASTSource(module.kernel, signature, constexprs={"P": 128})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    ptx = compiled.asm["ptx"]
    assert f".target sm_{capability}" in ptx
    assert ptx.count("st.global") >= len(exprs)
    assert "call.uni" not in ptx  # every function is inline
    # and in single precision; the library reduces large arguments of sin and cos in double precision
    exprs = [expr for expr in exprs if not re.search(r"\b(sin|cos)\(", str(expr))]
    module = load(write_module(tmp_path / f"single_{capability}.py", exprs))
    source = ASTSource(module.kernel, signature, constexprs={"P": 128})
    assert ".f64" not in triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
