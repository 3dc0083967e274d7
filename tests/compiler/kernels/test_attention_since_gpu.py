"""Attention within documents and windows, compiled for a GPU, which computes only blocks that some token sees, against
float64. Rows of one batch differ, lengths are no multiple of a block, documents end with a block."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ATTENTION, MLP, tiny
from torch import Tensor
from torch.nn import functional as F

from specc.compiler.expr.mask import bound_mask
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.attention import Sdpa
from specc.compiler.render.jinja import render
from specc.runtime.model.load import initialize, instantiate

pytestmark = pytest.mark.gpu
SAME = "document(i) == document(j)"

# B, T, H, G, C; the mean length of a document, none where 0; a window
CASES = {
    "documents": (3, 512, 4, 2, 64, 60, None),
    "one document": (2, 384, 4, 4, 32, 100_000, None),
    "documents of one token": (2, 256, 2, 1, 16, 1, None),
    "no multiple of a block": (2, 333, 8, 4, 64, 50, None),
    "less than a block": (4, 77, 2, 2, 128, 20, None),
    "one token": (2, 1, 2, 2, 32, 5, None),
    "window": (2, 640, 8, 2, 64, 0, 200),
    "window of one": (2, 200, 2, 2, 64, 0, 1),
    "documents and window": (3, 700, 4, 1, 64, 150, 130),
    "small heads": (2, 300, 4, 2, 8, 40, None),
}


def attend_of(documents: bool, window: int | None, heads: int, groups: int, size: int) -> tuple[Sdpa, Any]:
    """The op of a mask, and the function that is generated for it."""
    conditions = ["j <= i", *([SAME] if documents else []), *([f"i - j < {window}"] if window else [])]
    op = Sdpa(mask=bound_mask(" and ".join(conditions), heads, 1024))
    q, k = (TensorType(("B", "T", count, size), "f32") for count in (heads, groups))
    call = op.call((q, k, k, *([TensorType(("B", "T"), "i64")] if documents else [])))
    assert call.generated is not None
    names: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "F": F}
    template, context = call.generated
    package = f"{call.function}_{heads}_{groups}_{size}"
    exec(render(template, replace(context, package=package), "", ""), names)  # type: ignore[type-var]
    return op, names[call.function]


def starts_of(b: int, t: int, mean: int, generator: torch.Generator) -> Tensor | None:
    if not mean:
        return None
    marks = torch.rand(b, t, generator=generator) * mean < 1
    marks[:, 128:129] |= t > 128  # one that begins with a block
    return torch.where(marks, torch.arange(t), 0).cummax(1).values.cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", CASES)
def test_compiled_equals_float64(name: str, dtype: torch.dtype) -> None:
    b, t, heads, groups, size, mean, window = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    q, k, v, dy = (
        torch.randn(b, t, n, size, generator=generator).cuda().to(dtype) for n in (heads, groups, groups, heads)
    )
    starts = starts_of(b, t, mean, generator)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    further = [] if starts is None else [starts]
    op, attend = attend_of(starts is not None, window, heads, groups, size)
    exact = op.reference(*wide, *further)
    assert isinstance(exact, Tensor)
    wanted = [exact, *torch.autograd.grad(exact, wide, dy.double())]
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=False)
    results = []
    for function in (compiled, attend):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        y = function(*given, *further)
        results.append([y, *torch.autograd.grad(y, given, dy)])
    for label, compiled_one, eager, want in zip(("y", "dq", "dk", "dv"), *results, wanted, strict=True):
        norm = max(want.norm(), exact.norm())  # alone, a token has no gradient of q and k
        wrong, allowed = ((x.double() - want).norm() / norm for x in (compiled_one, eager))
        assert wrong <= 3 * allowed + 1e-5, (label, float(wrong), float(allowed))


def test_no_token_reads_behind_itself_or_another_document() -> None:
    """A change of one token moves only those behind it in its document."""
    _, attend = attend_of(True, None, 4, 2, 64)
    b, t = 2, 400
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(b, t, n, 64, generator=generator).cuda().bfloat16() for n in (4, 2, 2))
    starts = starts_of(b, t, 90, generator)
    assert starts is not None
    compiled = torch.compile(attend, fullgraph=True, dynamic=False)
    before = compiled(q, k, v, starts)
    for at in (0, 127, 128, 250, 399):
        changed = [x.clone() for x in (k, v)]
        for x in changed:
            x[:, at] += 1
        moved = (compiled(q, *changed, starts) != before).flatten(2).any(2)
        token = torch.arange(t, device="cuda")
        may = (token >= at) & (starts <= at)
        assert not (moved & ~may).any() and moved[:, at].all(), at


def test_rows_and_tokens_may_change_from_call_to_call() -> None:
    """As the last batch of an evaluation is smaller: compiled once more for any number of them."""
    _, attend = attend_of(True, None, 4, 2, 32)
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True)
    generator = torch.Generator().manual_seed(5)
    for b, t in ((2, 256), (3, 256), (5, 256), (5, 333)):
        q, k, v = (torch.randn(b, t, n, 32, generator=generator).cuda() for n in (4, 2, 2))
        starts = starts_of(b, t, 40, generator)
        assert torch.allclose(compiled(q, k, v, starts), attend(q, k, v, starts), atol=1e-5), (b, t)


def test_within_a_compiled_model_rows_have_blocks_of_their_own(tmp_path: Path) -> None:
    """Compiling the surrounding code does not move the tables of the kernel: rows equal those of the eager model."""
    attention = {
        **ATTENTION,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "bos": 1,
        "mask": f"j <= i and {SAME} and i - j < 300",
    }
    spec = tiny((attention, {**MLP, "hidden": 128}), (), ("sm90",), vocab=64, dim=64, context=640)
    loaded = instantiate(spec, "sm90", tmp_path)
    initialize(loaded, 3)
    model = loaded.model.cuda().bfloat16()
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(2, 64, (5, 640), generator=generator)
    ids[torch.rand(5, 640, generator=generator) < 0.01] = 1
    ids, targets = ids.cuda(), ids.roll(-1, 1).cuda()
    torch._dynamo.reset()
    results = []
    for loss, score in (
        (model, model.score),
        [torch.compile(program, fullgraph=True) for program in (model, model.score)],
    ):
        model.zero_grad()
        loss(ids, targets).backward()
        with torch.no_grad():
            nats = score(ids, targets)
        results.append([nats, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for eager, compiled in zip(*results, strict=True):
        assert (compiled.double() - eager.double()).norm() <= 0.03 * eager.double().norm()
