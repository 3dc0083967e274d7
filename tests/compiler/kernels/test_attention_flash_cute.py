"""Hooks of flash-attn-4 in the CuTe DSL: their values, computed on the CPU, and the kernels that they are compiled
into, as machine code for sm_90a. Neither needs a GPU."""

import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_sites import check_outputs, empty, imported
from scored_sites import CASES, Attention, scored_inputs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specc.compiler.expr import torch_value
from specc.compiler.expr.values import Read
from specc.compiler.kernels.attention.flash_scored import FLASH_SCORED, FLASH_SCORED_GRAD
from specc.compiler.kernels.kernel import Site, symbol

pytestmark = pytest.mark.cute

SHAPE = (4, 2, 64)
COUNT = itertools.count()
FURTHER = {
    "functions": Attention(
        "2 * silu(s) + max(s, 1 - i % 3) + min(0.5, s) + abs(s) + sqrt(s * s + 1) + exp(s / 9) + log(s * s + 2)"
    ),
    "not": Attention(mask="j <= i and not (i - j > 20 and j > 4)"),
}
ALL = {**CASES, **FURTHER}
H100 = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}


@pytest.fixture(scope="module", autouse=True)
def without_gpu() -> None:
    """flash-attn-4 selects its kernels by these variables if there is no GPU."""
    os.environ.update(H100)


def module_of(site: Site, folder: Path) -> ModuleType:
    kernel = FLASH_SCORED_GRAD if "grad" in site.node.op.name else FLASH_SCORED
    assert kernel.rejects(site) is None
    return imported(kernel, site, folder / f"cute_{next(COUNT)}")


def on_host(hook: Callable[..., Any], aux: list[Tensor], points: Tensor, s: Tensor | None) -> Tensor:
    """Calls a hook on the CPU with vectors of one element, as flash-attn-4 does.

    Args:
        hook: the function of the generated file.
        aux: the tensors that it reads.
        points: b, h, i and j of each element, i32 [N, 4].
        s: the scaled product and its factor of each element, f32 [N, 2]; None for a mask.

    Returns:
        f32 [N].
    """
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    def vector(value: Any, dtype: Any) -> Any:
        memory = cute.make_rmem_tensor(1, dtype)
        memory[0] = value
        return memory.load()

    def block(at: cute.Tensor, values: cute.Tensor, out: cute.Tensor, n: int, tensors: tuple[cute.Tensor, ...]) -> None:
        place = [vector(at[n, k], cutlass.Int32) for k in range(4)]
        if s is None:
            seen = hook(*place, None, tensors)
            out[n] = cute.where(seen, cute.full_like(place[0], 1.0, cutlass.Float32), 0.0)[0]
            return
        given = [vector(values[n, k], cutlass.Float32) for k in range(2)]
        given = [given[1], given[0]] if "grad" in hook.__name__ else given[:1]
        out[n] = hook(*given, *place[:2], q_idx=place[2], kv_idx=place[3], seqlen_info=None, aux_tensors=tensors)[0]

    @cute.jit
    def run(at: cute.Tensor, values: cute.Tensor, out: cute.Tensor, tensors: tuple[cute.Tensor, ...]) -> None:
        for n in cutlass.range_constexpr(len(points)):
            block(at, values, out, n, tensors)

    result = torch.full((len(points),), torch.nan)
    values = torch.zeros(len(points), 2) if s is None else s
    run(*map(from_dlpack, (points, values, result)), tuple(map(from_dlpack, aux or [result])))
    return result


@pytest.mark.parametrize("name", ALL)
def test_hooks_give_the_values_of_the_expressions(name: str, tmp_path: Path) -> None:
    backward = not ALL[name].tables
    shape = ALL[name].hook_shape(SHAPE, backward)
    site = ALL[name].site(shape, backward)
    op = site.node.op.forward.plain if backward else site.node.op.plain
    tokens, inputs = 300, scored_inputs(ALL[name].site(shape), 2, 300, 3)
    generator = torch.Generator().manual_seed(1)
    count = 24
    points = torch.stack([torch.randint(n, (count,), generator=generator) for n in (2, 4, tokens, 40)], 1).int()
    points[:, 3] = (points[:, 2] - points[:, 3]).clamp(min=0)  # keys near their queries
    s = 2 * torch.randn(count, 2, generator=generator)
    module = module_of(site, tmp_path)
    start = [inputs[3].int()] if op.documents else []
    tables = [value.flatten() for value in inputs[len(inputs) - len(op.tables) :]] if op.tables else []
    b, h, i, j = points.long().unbind(1)
    # the values of the expressions, of one query and one key each
    leaf = s[:, 0].double().requires_grad_()
    score, mask = op.parsed(4)
    further = op.named(inputs)
    known = {"i": i, "j": j, "h": h, **({"start": inputs[3][b, i]} if start else {})}
    if not mask.plain:
        seen = on_host(module.mask, [*start, *tables], points, None)
        assert torch.equal(seen.bool(), torch_value(mask.condition, known).expand(count))
    if score.plain:
        return
    visible = torch_value(mask.condition, known).expand(count)
    wide = {name: value.double() for name, value in (known | further).items()}
    wide["s"] = leaf
    wide |= {read.variable: torch_value(Read(read.table, read.indices), wide) for read in score.reads}
    value = torch_value(score.value, wide)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    result = on_host(module.score, [*start, *tables], points, s)
    torch.testing.assert_close(result[visible].double(), value.detach()[visible], rtol=1e-5, atol=1e-5)
    if backward:
        result = on_host(module.score_grad, [*start, *tables], points, s)
        torch.testing.assert_close(result[visible].double(), (slope * s[:, 1])[visible], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "channels", "backward"),
    [
        ("documents", 64, False),
        ("documents", 128, True),
        ("alibi", 128, False),
        ("first keys", 64, True),
        ("one table twice", 64, False),
        ("gelu", 64, True),
    ],
)
def test_kernels_compile_for_sm_90a(
    name: str, channels: int, backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_attn.cute import interface

    site = {**ALL, "gelu": Attention("gelu(s)")}[name].site((4, 2, channels), backward)
    module = module_of(site, tmp_path)
    compiled: list[str] = []
    compile_kernel = interface.cute.compile

    def recorded(kernel: Any, *args: Any, **words: Any) -> Any:
        compiled.append(type(kernel).__name__)
        return compile_kernel(kernel, *args, **words)

    monkeypatch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
    monkeypatch.setattr(module, "list_blocks", fake_blocks, raising=False)
    monkeypatch.setattr(interface.cute, "compile", recorded)
    for call in (interface._flash_attn_fwd, interface._flash_attn_bwd):
        monkeypatch.setattr(call, "compile_cache", {})
    with FakeTensorMode():
        inputs = [empty(type, "cuda", B=2, T=300) for type in site.inputs]
        outputs = getattr(module, symbol(site)[0])._init_fn(*inputs)
    check_outputs(outputs, site, B=2, T=300)
    assert ("FlashAttentionBackwardSm90" if backward else "FlashAttentionForwardSm90") in compiled


def fake_blocks(q: Tensor, *further: Any) -> list[Tensor]:
    """The lists of blocks without their values."""
    rows = len(further[0]) if len(further) > 1 else 1
    count = -(-q.shape[1] // 128)
    return [q.new_empty(rows, 1, *shape, dtype=torch.int32) for shape in ((count,), (count, count)) * 2]
