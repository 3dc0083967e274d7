"""Attention with a score and a mask on a GPU: against float64 and plain Torch, compiled, and in CUDA graphs."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_sites import relative
from kernel_sites import imported
from scored_sites import CASES, Attention, exact, kernel_of, scored_inputs
from torch import Tensor

from specc.compiler.kernels.kernel import Kernel, Site, symbol
from specc.runtime.verify.judge import Judge

pytestmark = pytest.mark.gpu

HEADS = {"grouped": (4, 2, 64), "one key": (4, 1, 128), "odd": (4, 4, 24), "wide": (4, 2, 256)}
T5 = Attention("s + bias[h, bucket(i - j, 32, 128)]", tables={"bias": (4, 32)})
LARGE = {
    "plain": Attention(),
    "window": Attention(mask="j <= i and i - j < 200"),
    "first keys": Attention(mask="j <= i and (i - j < 100 or j < 4)"),
    "dilated": Attention(mask="j <= i and (i - j) % 4 == 0"),
    "documents": Attention(mask="j <= i and document(i) == document(j)"),
    "alibi": Attention("s - slope(h) * (i - j)"),
    "softcap": Attention("20 * tanh(s / 20)", sinks=True),
    "buckets": T5,
    "distances": Attention("s + bias[h, min(i - j, 299)]", tables={"bias": (4, 300)}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for generated packages."""
    return tmp_path_factory.mktemp("gpu_scored")


COUNT = iter(range(10_000))


def op_of(site: Site, folder: Path, kernel: Kernel | None = None) -> Any:
    module = imported(kernel or kernel_of(site), site, folder / f"scored_{next(COUNT)}")
    return getattr(module, symbol(site)[0])


def ops_of(attention: Attention, shape: tuple[int, int, int], folder: Path) -> tuple[Any, Any]:
    return op_of(attention.site(shape), folder), op_of(attention.site(shape, True), folder)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", LARGE)
def test_a_kernel_is_as_exact_as_plain_torch(name: str, backward: bool, folder: Path) -> None:
    site = LARGE[name].site(HEADS["grouped"], backward)
    op = op_of(site, folder)
    for tokens in (64, 515):
        judge = Judge.of(site, scored_inputs(site, 2, tokens, tokens, "cuda"))
        errors = judge.errors(judge.call(op))
        assert all(error.ok for error in errors), f"{tokens} tokens: {errors}"


@pytest.mark.parametrize(("name", "shape"), list(zip(CASES, itertools.cycle(HEADS), strict=False)))
def test_every_kind_of_score_mask_and_head(name: str, shape: str, folder: Path) -> None:
    attend, gradient = ops_of(CASES[name], HEADS[shape], folder)
    forward, backward = (CASES[name].site(HEADS[shape], way) for way in (False, True))
    for tokens, apart in ((1, 0), (130, 8)):
        inputs = scored_inputs(forward, 3, tokens, tokens, "cuda", apart)
        wanted = exact(forward, inputs)
        y, lse = attend(*inputs)
        dy = torch.randn_like(y)
        results = [y, lse, *gradient(dy, *inputs[:3], y, lse, *inputs[3:])]
        wanted += exact(backward, [dy, *inputs[:3], *wanted, *inputs[3:]])
        for label, got, want in zip(("y", "lse", *backward.node.op.output_labels), results, wanted, strict=True):
            error, scale = (got.double() - want).norm().item(), want.norm().item()
            most = 2e-2 if label != "lse" else 2e-3  # tanh has 2**-11
            assert error <= most * scale + 2e-2 * want.numel() ** 0.5 * (scale < 1e-2), f"{label} of {tokens} tokens"
            assert got.is_contiguous() and not got.isnan().any()


def test_plain_scores_that_are_not_simplified_give_the_same_bits(folder: Path) -> None:
    """`s + 0 * i` as text, which the compiler would simplify, changes no bit."""
    for backward in (False, True):
        site = Attention().site(HEADS["grouped"], backward)
        plain = op_of(site, folder)
        path = folder / f"unsimplified_{backward}"
        module = imported(kernel_of(site), site, path)
        source = Path(module.__file__ or "")
        text = source.read_text()
        assert "x = s\n" in text
        source.with_name("unsimplified.py").write_text(text.replace("x = s\n", "x = s + 0 * i.to(tl.float32)\n"))
        other = getattr(__import__(f"{path.name}.unsimplified", fromlist=["_"]), symbol(site)[0])
        inputs = scored_inputs(site, 2, 700, 5, "cuda")
        assert all(map(torch.equal, plain(*inputs), other(*inputs)))


def test_nothing_of_a_later_token_or_another_document_leaks(folder: Path) -> None:
    attention, shape = LARGE["documents"], HEADS["grouped"]
    attend, gradient = ops_of(attention, shape, folder)
    q, k, v, start = scored_inputs(attention.site(shape), 2, 300, 1, "cuda")
    y, _ = attend(q, k, v, start)
    for j in (1, 130, 299):
        changed = [value.clone() for value in (q, k, v)]
        for value in changed:
            value[:, j:] = 9
        assert torch.equal(attend(*changed, start)[0][:, :j], y[:, :j])
        dy = torch.zeros_like(y)
        dy[:, j - 1] = 1
        for grad in gradient(dy, q, k, v, *attend(q, k, v, start), start):
            assert not grad[:, j:].any()
            assert not any(grad[row, : start[row, j - 1]].any() for row in range(2))


@pytest.mark.parametrize("name", ["documents", "buckets", "softcap"])
def test_every_tile_gives_the_same_to_rounding_and_the_same_bits_again(name: str, folder: Path) -> None:
    for backward in (False, True):
        site = LARGE[name].site(HEADS["grouped"], backward)
        inputs = scored_inputs(site, 9, 515, 3, "cuda")
        first = op_of(site, folder)(*inputs)
        for kernel in kernel_of(site).variants(site):
            op = op_of(site, folder, kernel)
            result = op(*inputs)
            assert all(relative(got, want) < 6e-3 for got, want in zip(result, first, strict=True))
            for _ in range(5):
                assert all(map(torch.equal, op(*inputs), result))


@pytest.mark.parametrize("name", ["documents", "buckets", "distances"])
def test_ops_are_traced_whole_and_captured(name: str, folder: Path) -> None:
    attend, gradient = ops_of(LARGE[name], HEADS["grouped"], folder)

    def step(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *further: Tensor) -> list[Tensor]:
        y, lse = attend(q * 1.5, k, v, *further)
        return [y, lse, *gradient(dy + 0, q * 1.5, k, v, y, lse, *further)]

    site = LARGE[name].site(HEADS["grouped"])
    inputs = scored_inputs(site, 3, 200, 7, "cuda")
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
    others = scored_inputs(site, 3, 200, 8, "cuda")  # other documents too: tiles are listed on the device
    for value, other in zip(values[1:], others, strict=True):
        value.copy_(other)
    for value in captured:
        value.fill_(float("nan"))
    graph.replay()
    for got, want in zip(captured, step(*values), strict=True):
        assert relative(got, want) < 6e-3
