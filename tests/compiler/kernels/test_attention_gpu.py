"""Attention by the libraries' kernels on a GPU: against float64, one's forward with another's gradient, compiled, and
in CUDA graphs."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_sites import SHAPES, Shape, attention_site, relative, several
from kernel_sites import imported
from tiny_models import ATTENTION, MLP, tiny
from torch import Tensor

from specc.compiler import kernels
from specc.compiler.catalog import catalog
from specc.compiler.kernels.attention.attention import AttentionKernel
from specc.compiler.kernels.kernel import Kernel, symbol
from specc.compiler.ops.saved_attention import CausalAttention, CausalAttentionGrad
from specc.compiler.targets import TARGETS
from specc.runtime.bench.plain import plain_site
from specc.runtime.model.load import instantiate, runs_on
from specc.runtime.verify.judge import Judge, inputs_of, sizes_of
from specc.runtime.verify.verify import verify

pytestmark = pytest.mark.gpu

ATTENTIONS = {k.name: k for k in catalog(kernels, Kernel).values() if isinstance(k, AttentionKernel)}
FORWARD = [name for name, kernel in ATTENTIONS.items() if kernel.computes is CausalAttention]
BACKWARD = [name for name, kernel in ATTENTIONS.items() if kernel.computes is CausalAttentionGrad]


def installed(name: str) -> bool:
    """Whether this machine has what a kernel calls: its package, and a GPU of those that the package is for."""
    if not name.startswith("flash_attention_4"):
        return True
    result = importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute")
    return bool(result) and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def given(names: Sequence[str]) -> list[Any]:
    """The kernels as parameters; those whose package is missing are skipped by name."""
    reason = "flash-attn-4 is an extra: pip install 'specc[flash]'"
    return [pytest.param(name, marks=pytest.mark.skipif(not installed(name), reason=reason)) for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for generated packages."""
    return tmp_path_factory.mktemp("gpu_attention")


def op_of(name: str, shape: Shape, folder: Path) -> Any:
    """The op of a kernel; any GPU that has it runs it."""
    site = attention_site(shape, name in BACKWARD)
    words = ("gpu", name, *map(str, shape))
    return getattr(imported(ATTENTIONS[name], site, folder / "_".join(words)), symbol(site)[0])


def random_inputs(shape: Shape, b: int, t: int, seed: int = 0) -> list[Tensor]:
    """dy, q, k, v."""
    dy, q, k, v, *_ = inputs_of(attention_site(shape, True), {"B": b, "T": t}, "cuda", seed)
    return [dy, q, k, v]


def exact(dy: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """y, lse, dq, dk, dv in float64."""
    dy, q, k, v = (value.double() for value in (dy, q, k, v))
    y, lse = CausalAttention().reference(q, k, v)
    return [y, lse, *CausalAttentionGrad().reference(dy, q, k, v, y, lse)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", given([*FORWARD, *BACKWARD]))
def test_a_kernel_is_as_exact_as_plain_torch(name: str, shape: str, folder: Path) -> None:
    site = attention_site(SHAPES[shape], name in BACKWARD)
    if reason := ATTENTIONS[name].rejects(site):
        assert (name.startswith("flash_attention_4"), shape) == (True, "narrow") and "multiple of 64" in reason
        return
    op = op_of(name, SHAPES[shape], folder)
    for rows in (16, 64, 129, 343, 700):
        judge = Judge.of(site, inputs_of(site, sizes_of(site, rows), "cuda", seed=rows))
        errors = judge.errors(judge.call(op))
        assert all(error.ok for error in errors), f"{rows} tokens: {errors}"


@pytest.mark.parametrize("backward", given(BACKWARD))
@pytest.mark.parametrize("forward", given(FORWARD))
def test_any_forward_serves_any_gradient(forward: str, backward: str, folder: Path) -> None:
    for shape in (SHAPES["golf"], SHAPES["gpt2"]):
        attend, gradient = op_of(forward, shape, folder), op_of(backward, shape, folder)
        dy, q, k, v = random_inputs(shape, 3, 515)
        y, lse = attend(q, k, v)
        results = [y, lse, *gradient(dy, q, k, v, y, lse)]
        for got, want, most in zip(results, exact(dy, q, k, v), (4e-3, 1e-6, 6e-3, 6e-3, 6e-3), strict=True):
            assert relative(got, want) < most and got.is_contiguous()


@pytest.mark.parametrize("name", given(FORWARD))
@pytest.mark.parametrize("tokens", [1, 2, 5, 63, 65])
def test_short_sequences(name: str, tokens: int, folder: Path) -> None:
    shape = SHAPES["golf"]
    attend, gradient = op_of(name, shape, folder), op_of(f"{name}_grad", shape, folder)
    dy, q, k, v = random_inputs(shape, 4, tokens)
    y, lse = attend(q, k, v)
    want = exact(dy, q, k, v)
    assert relative(y, want[0]) < 4e-3 and relative(lse, want[1]) < 1e-5
    for got, gradient_of in zip(gradient(dy, q, k, v, y, lse), want[2:], strict=True):
        assert (got.double() - gradient_of).abs().max() < 0.1 and not got.isnan().any()


@pytest.mark.parametrize("name", given(FORWARD))
def test_inputs_may_be_slices_and_gradients_may_lie_in_any_order(name: str, folder: Path) -> None:
    shape = SHAPES["golf"]
    attend, gradient = op_of(name, shape, folder), op_of(f"{name}_grad", shape, folder)
    dy, q, k, v = random_inputs(shape, 3, 257)
    y, lse = attend(q, k, v)
    wanted = [y, lse, *gradient(dy, q, k, v, y, lse)]
    row = torch.cat([value.flatten(2) for value in (q, k, v)], -1)
    parts = row.split([value.shape[2] * value.shape[3] for value in (q, k, v)], -1)
    q, k, v = (part.unflatten(-1, value.shape[2:]) for part, value in zip(parts, (q, k, v), strict=True))
    turned = dy.transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous() and not k.is_contiguous()
    y, lse = attend(q, k, v)
    results = [y, lse, *gradient(turned, q, k, v, y, lse)]
    for got, want in zip(results, wanted, strict=True):
        assert relative(got, want) < 4e-3 and got.is_contiguous()


@pytest.mark.parametrize("name", given([name for name in (*FORWARD, *BACKWARD) if ATTENTIONS[name].deterministic]))
def test_a_hundred_runs_are_bit_equal_where_that_is_promised(name: str, folder: Path) -> None:
    for shape in (SHAPES["golf"], SHAPES["gpt2"]):
        op, site = op_of(name, shape, folder), attention_site(shape, name in BACKWARD)
        inputs = inputs_of(site, {"B": 8, "T": 1024}, "cuda")
        first = several(op(*inputs))
        for _ in range(100):
            assert all(map(torch.equal, several(op(*inputs)), first))


@pytest.mark.parametrize("backward", given(BACKWARD))
@pytest.mark.parametrize("forward", given(FORWARD))
def test_ops_are_traced_whole_and_captured(forward: str, backward: str, folder: Path) -> None:
    shape = SHAPES["golf"]
    attend, gradient = op_of(forward, shape, folder), op_of(backward, shape, folder)

    def step(dy: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        y, lse = attend(q * 1.5, k, v)
        return [y, lse, *gradient(dy + 0, q * 1.5, k, v, y, lse)]

    inputs = random_inputs(shape, 2, 384)
    wanted = step(*inputs)
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    for got, want in zip(compiled(*inputs), wanted, strict=True):
        assert relative(got, want) < 4e-3 and got.stride() == want.stride()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            compiled(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compiled(*inputs)
    for value, fresh in zip(inputs, random_inputs(shape, 2, 384, seed=9), strict=True):
        value.copy_(fresh)
    for value in captured:
        value.fill_(float("nan"))
    graph.replay()
    for got, want in zip(captured, step(*inputs), strict=True):
        assert relative(got, want) < 4e-3


@pytest.mark.parametrize("backward", [False, True])
def test_the_baseline_of_a_benchmark_runs(backward: bool) -> None:
    site = attention_site(SHAPES["gpt2"], backward)
    judge = Judge.of(site, inputs_of(site, {"B": 2, "T": 200}, "cuda"))
    assert all(error.ok for error in judge.errors(judge.call(plain_site(site))))


def test_a_model_trains_through_it_and_does_not_look_ahead(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    fitting = [row for row in TARGETS.values() if row.arch and runs_on(row, major * 10 + minor)]
    target = max(fitting, key=lambda row: row.arch).name
    layers = ({**ATTENTION, "heads": 4, "kv_heads": 2, "qk_norm": {}, "rope": {"dims": 16}}, MLP)
    fuse = ({"blocks.*.attention": ["y"]},)
    spec = tiny(layers=layers, fuse=fuse, targets=(target,), dim=128, context=96)
    checks = list(verify(spec, (target,)))
    assert all(check.ok for check in checks), [check for check in checks if not check.ok]
    loaded = instantiate(spec, target, tmp_path)
    model = loaded.model.to(device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    ids = torch.randint(11, (2, 97), device="cuda")
    eager = model(ids[:, :-1], ids[:, 1:])
    gradients = torch.autograd.grad(eager, list(model.parameters()))
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    loss = compiled(ids[:, :-1], ids[:, 1:])
    for got, want in zip(torch.autograd.grad(loss, list(model.parameters())), gradients, strict=True):
        assert relative(got, want) < 0.05
    assert abs(loss.item() - eager.item()) < 0.01
