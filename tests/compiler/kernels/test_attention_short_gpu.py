"""Attention over short sequences on a GPU: against float64, with the libraries' kernels, compiled, and in CUDA
graphs."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_sites import attention_site, relative, several
from kernel_sites import imported
from pair_models import CROSS, MLP, SELF, batch, blocks, pairs_data
from test_attention_short import KINDS, WAYS, kernel_of, short_inputs
from tiny_models import spec_of
from torch import Tensor

from specc.compiler.kernels.attention.attention import CUDNN_BACKWARD, CUDNN_FORWARD, FLASH_BACKWARD, FLASH_FORWARD
from specc.compiler.kernels.attention.short import PairTile
from specc.compiler.kernels.kernel import symbol
from specc.compiler.targets import TARGETS
from specc.runtime.model.load import instantiate, runs_on
from specc.runtime.verify.judge import Judge, inputs_of, sizes_of
from specc.runtime.verify.verify import verify

pytestmark = pytest.mark.gpu

SHAPES = {"poly": (8, 8, 32), "grouped": (8, 2, 16), "one key": (4, 1, 64), "odd": (3, 3, 24), "wide": (2, 2, 128)}
LENGTHS = (1, 2, 7, 30, 31, 64, 100, 128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for generated packages."""
    return tmp_path_factory.mktemp("gpu_short")


def op_of(
    kind: str, backward: bool, shape: tuple[int, int, int], context: int, folder: Path, tile: PairTile | None = None
) -> Any:
    site = attention_site(shape, backward, kind=kind, context=context)
    labels = (kind, backward, *shape, context, *(() if tile is None else (tile.pairs, tile.warps, tile.stages)))
    module = imported(kernel_of(site, tile), site, folder / "_".join(("short", *map(str, labels))))
    return getattr(module, symbol(site)[0])


def given(kind: str, shape: tuple[int, int, int], b: int, t: int, s: int, seed: int = 0, apart: int = 0) -> Any:
    """dy, then q, k, v and what is seen, with a sequence of nothing seen."""
    site = attention_site(shape, True, kind=kind)
    dy, q, k, v, _, _, *seen = short_inputs(site, b, t, s, seed, apart)
    return dy.cuda(), tuple(value.cuda() for value in (q, k, v, *seen))


def exact(kind: str, shape: tuple[int, int, int], dy: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """y, lse, dq, dk, dv in float64."""
    q, k, v, *seen = inputs
    wide = [value.double() for value in (q, k, v)]
    forward, backward = (attention_site(shape, way, kind=kind).node.op for way in (False, True))
    y, lse = several(forward.reference(*wide, *seen))
    return [y, lse, *several(backward.reference(dy.double(), *wide, y, lse, *seen))]


def run(attend: Any, gradient: Any, dy: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    q, k, v, *seen = inputs
    y, lse = attend(q, k, v, *seen)
    return [y, lse, *gradient(dy, q, k, v, y, lse, *seen)]


def near(results: list[Tensor], wanted: list[Tensor]) -> None:
    for name, got, want in zip(("y", "lse", "dq", "dk", "dv"), results, wanted, strict=True):
        most = 1e-5 if name == "lse" else 1.5e-2
        error = (got.double() - want).norm().item()
        assert error <= most * want.norm().item() + 2e-2 * want.numel() ** 0.5 * (want.norm() < 1e-2), name
        assert got.is_contiguous() and not got.isnan().any()


@pytest.mark.parametrize(("kind", "backward"), WAYS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("context", [30, 64, 128])
def test_a_kernel_is_as_exact_as_plain_torch(context: int, shape: str, kind: str, backward: bool, folder: Path) -> None:
    site = attention_site(SHAPES[shape], backward, kind=kind, context=context)
    if reason := kernel_of(site).rejects(site):
        pytest.fail(f"refused: {reason}")
    op = op_of(kind, backward, SHAPES[shape], context, folder)
    for rows in (16, 29, 64, 128):
        judge = Judge.of(site, inputs_of(site, sizes_of(site, rows), "cuda", seed=rows))
        errors = judge.errors(judge.call(op))
        assert all(error.ok for error in errors), f"{rows} tokens: {errors}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["poly", "grouped", "one key"])
def test_all_lengths(shape: str, kind: str, folder: Path) -> None:
    heads = SHAPES[shape]
    attend, gradient = (op_of(kind, way, heads, 128, folder) for way in (False, True))
    pairs = itertools.product(LENGTHS, LENGTHS) if kind == "cross" else zip(LENGTHS, LENGTHS, strict=True)
    for i, (t, s) in enumerate(pairs):
        dy, inputs = given(kind, heads, 3, t, s, i, apart=8 * (i % 2))
        near(run(attend, gradient, dy, inputs), exact(kind, heads, dy, inputs))


def test_what_sees_nothing_is_zero_and_has_no_gradient(folder: Path) -> None:
    attend, gradient = (op_of("cross", way, SHAPES["poly"], 30, folder) for way in (False, True))
    dy, (q, k, v, seen) = given("cross", SHAPES["poly"], 4, 30, 17)
    assert not seen[-1].any()
    result = run(attend, gradient, dy, (q, k, v, seen))
    assert not any(value[-1].any() for value in result)
    hidden = ~seen[:, :, None, None].expand_as(k)
    assert not result[3][hidden].any() and not result[4][hidden].any()
    other = k.masked_fill(hidden, 9.0), v.masked_fill(hidden, -9.0)
    assert all(map(torch.equal, run(attend, gradient, dy, (q, *other, seen)), result))  # no bit of it leaks


def test_nothing_of_a_later_token_leaks(folder: Path) -> None:
    attend, gradient = (op_of("causal", way, SHAPES["poly"], 30, folder) for way in (False, True))
    dy, (q, k, v) = given("causal", SHAPES["poly"], 2, 30, 30)
    y, _ = attend(q, k, v)
    for j in (1, 13, 29):
        changed = [value.clone() for value in (q, k, v)]
        for value in changed:
            value[:, j:] += 1
        assert torch.equal(attend(*changed)[0][:, :j], y[:, :j])
        alone = torch.zeros_like(dy)
        alone[:, j - 1] = dy[:, j - 1]
        grads = gradient(alone, q, k, v, *attend(q, k, v))
        assert not any(grad[:, j:].any() for grad in grads)


@pytest.mark.parametrize(("forward", "backward"), [(CUDNN_FORWARD, CUDNN_BACKWARD), (FLASH_FORWARD, FLASH_BACKWARD)])
def test_it_serves_the_libraries_and_they_serve_it(forward: Any, backward: Any, folder: Path) -> None:
    shape = SHAPES["poly"]
    theirs = []
    for way, kernel in ((False, forward), (True, backward)):
        site = attention_site(shape, way)
        theirs.append(getattr(imported(kernel, site, folder / f"beside_{kernel.name}"), symbol(site)[0]))
    ours = [op_of("causal", way, shape, 64, folder) for way in (False, True)]
    dy, inputs = given("causal", shape, 5, 61, 61)
    dy, inputs = dy.bfloat16(), tuple(value.bfloat16() for value in inputs)
    wanted = exact("causal", shape, dy, inputs)
    for attend, gradient in ((ours[0], theirs[1]), (theirs[0], ours[1])):
        near(run(attend, gradient, dy, inputs), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_gives_the_same_to_rounding_and_the_same_bits_again(kind: str, folder: Path) -> None:
    for backward in (False, True):
        site = attention_site(SHAPES["poly"], backward, kind=kind, context=30)
        inputs = inputs_of(site, {"B": 257, "T": 30, "S": 30}, "cuda")
        first = several(op_of(kind, backward, SHAPES["poly"], 30, folder)(*inputs))
        for kernel in kernel_of(site).variants(site):
            op = op_of(kind, backward, SHAPES["poly"], 30, folder, kernel.tile)  # type: ignore[attr-defined]
            result = several(op(*inputs))
            assert all(relative(got, want) < 4e-3 for got, want in zip(result, first, strict=True))
            for _ in range(20):
                assert all(map(torch.equal, several(op(*inputs)), result))


@pytest.mark.parametrize("kind", KINDS)
def test_ops_are_traced_whole_and_captured(kind: str, folder: Path) -> None:
    shape = SHAPES["poly"]
    attend, gradient = (op_of(kind, way, shape, 30, folder) for way in (False, True))

    def step(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *seen: Tensor) -> list[Tensor]:
        y, lse = attend(q * 1.5, k, v, *seen)
        return [y, lse, *gradient(dy + 0, q * 1.5, k, v, y, lse, *seen)]

    dy, inputs = given(kind, shape, 9, 30, 30)
    values = [dy.bfloat16(), *(value.bfloat16() if value.is_floating_point() else value for value in inputs)]
    wanted = step(*values)
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    for got, want in zip(compiled(*values), wanted, strict=True):
        assert relative(got, want) < 4e-3 and got.stride() == want.stride()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            compiled(*values)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compiled(*values)
    for value in values[:4]:
        value.copy_(torch.randn_like(value))
    for value in captured:
        value.fill_(float("nan"))
    graph.replay()
    for got, want in zip(captured, step(*values), strict=True):
        assert relative(got, want) < 4e-3


def test_other_inputs_are_refused_with_numbers(folder: Path) -> None:
    attend = op_of("cross", False, SHAPES["poly"], 30, folder)
    _, (q, k, v, seen) = given("cross", SHAPES["poly"], 2, 33, 30)
    q, k, v = (value.bfloat16() for value in (q, k, v))
    with pytest.raises(ValueError, match="33 queries to 30 keys; takes at most 32 to 32"):
        attend(q, k, v, seen)
    with pytest.raises(ValueError, match=r"seen is torch.uint8 .*expected torch.bool \[2, 30\]"):
        attend(q[:, :30], k, v, seen.to(torch.uint8))
    with pytest.raises(ValueError, match=r"v is .*expected torch.bfloat16 \[2, 30, 8, 32\]"):
        attend(q[:, :30], k, v[:, :29], seen)


def test_a_model_of_pairs_trains_through_it(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    fitting = [row for row in TARGETS.values() if row.arch and runs_on(row, major * 10 + minor)]
    target = max(fitting, key=lambda row: row.arch).name
    embed = {"kind": "embed", "dim": 64, "positions": "learned"}
    points = [{f"{part}": ["y"]} for part in ("encoder.blocks.*.attention", "decoder.blocks.*.{attention,cross}")]
    parts = ([embed, blocks(SELF, MLP)], [embed, blocks(SELF, CROSS, MLP)])
    spec = spec_of({**pairs_data(*parts, fuse=points), "targets": [target]})
    checks = list(verify(spec, (target,)))
    assert all(check.ok for check in checks), [check for check in checks if not check.ok]
    loaded = instantiate(spec, target, tmp_path)
    model = loaded.model.to(device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    source, truth = (side.cuda() for side in batch(spec, 30, 29, rows=8))
    inputs = torch.nn.functional.pad(truth[:, :-1], (1, 0), value=1)
    eager = model(source, inputs, truth)
    gradients = torch.autograd.grad(eager, list(model.parameters()))
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    loss = compiled(source, inputs, truth)
    for got, want in zip(torch.autograd.grad(loss, list(model.parameters())), gradients, strict=True):
        assert relative(got, want) < 0.05
    assert abs(loss.item() - eager.item()) < 0.01
