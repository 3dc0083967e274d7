"""Attention over a cache on a GPU: against float64, from graphs that are replayed for other lengths, and in models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_sites import CASES, Cached, cached_inputs, codes_site, exact
from gpus import gpu_target, skip_without_e4m3
from kernel_sites import imported
from test_attention_cached import REAL, kernel_of
from tiny_models import MLP, tiny
from torch import Tensor

from specc.compiler.kernels.attention.cached_context import CachedTile
from specc.compiler.kernels.attention.to_codes import CODES_TRITON
from specc.compiler.kernels.kernel import symbol
from specc.compiler.ops.caches.key_value_cache import ToCodes
from specc.runtime.model.cuda_graph import captured
from specc.runtime.verify.judge import Judge, inputs_of, sizes_of
from specc.runtime.verify.verify import verify

pytestmark = pytest.mark.gpu

TEXTS = (((1,), 1), ((61,), 1), ((1500, 3, 700, 64), 2), ((2000,) * 70, 1), ((300, 300), 300))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for generated packages."""
    return tmp_path_factory.mktemp("gpu_cached")


def op_of(name: str, case: Cached, folder: Path, tile: CachedTile | None = None) -> Any:
    site = case.site()
    module = imported(kernel_of(tile), site, folder / f"cached_{abs(hash((name, tile)))}")
    return getattr(module, symbol(site)[0])


def on_gpu(values: list[Tensor]) -> list[Tensor]:
    return [value.cuda() for value in values]


def near(y: Tensor, want: Tensor) -> None:
    error = (y.double() - want).abs()
    assert bool(y.isfinite().all())
    assert bool((error <= 2.0**-8 * (want.abs() + 2 * want.abs().max())).all()), error.max()


@pytest.mark.parametrize("name", [*CASES, *REAL])
def test_all_layouts_scores_and_lengths(name: str, folder: Path) -> None:
    case = {**CASES, **REAL}[name]
    if case.coded:
        skip_without_e4m3(gpu_target())
    op, site = op_of(name, case, folder), case.site()
    for seed, (lengths, each) in enumerate(TEXTS):
        if lengths[0] < case.prefix:  # the reference would read keys of the prefix that the cache does not have yet
            continue
        given = on_gpu(cached_inputs(case, site, lengths, each, seed, apart=5))
        y = op(*given)
        near(y, exact(site, given))
        assert torch.equal(y, op(*given)), "other bits when called again"


@pytest.mark.parametrize("name", ["gpt2", "pages", "codes in pages", "latent", "latent codes"])
def test_a_kernel_is_as_exact_as_plain_torch(name: str, folder: Path) -> None:
    site = REAL[name].site()
    op = op_of(name, REAL[name], folder)
    for rows in (16, 129, 1000):
        judge = Judge.of(site, inputs_of(site, sizes_of(site, rows), "cuda", seed=rows))
        errors = judge.errors(judge.call(op))
        assert all(error.ok for error in errors), f"{rows} positions: {errors}"
    judge = Judge.many(site, "cuda")
    assert judge is not None and all(error.ok for error in judge.errors(judge.call(op)))


@pytest.mark.parametrize("name", ["gpt2", "pages", "latent codes"])
def test_tiles_to_measure_give_the_reference(name: str, folder: Path) -> None:
    case = REAL[name]
    site = case.site()
    given = on_gpu(cached_inputs(case, site, (700, 700, 700), 1, 3))
    want = exact(site, given)
    for kernel in kernel_of().variants(site):
        near(op_of(name, case, folder, kernel.tile)(*given), want)


def test_a_graph_is_valid_for_texts_of_other_lengths(folder: Path) -> None:
    for name in ("plain", "pages", "ring, codes"):
        case = replace(CASES[name], shape=(8, 2, 64))
        op, site = op_of(f"graph {name}", case, folder), case.site()
        names = site.node.op.names  # type: ignore[attr-defined]
        long, short = (
            dict(zip(names, on_gpu(cached_inputs(case, site, lengths, 1, 4)), strict=True))
            for lengths in ((400, 390, 400), (400, 7, 50))
        )
        if not case.page:  # all texts have one length, so only it changes
            short = dict(long) | {"positions": torch.full_like(long["positions"], 31)}
        graph, y = captured(lambda op=op, long=long: op(*long.values()))
        for n, value in short.items():
            long[n].copy_(value)
        graph.replay()
        near(y, exact(site, list(long.values())))


@pytest.mark.parametrize("name", ["gpt2", "pages", "codes in pages", "latent", "documents"])
def test_the_last_program_joins_parts_with_the_same_bits(name: str, folder: Path) -> None:
    """Programs end in any order, in calls and in a graph that is replayed, beside another kernel that changes it."""
    case = REAL[name]
    if case.coded:
        skip_without_e4m3(gpu_target())
    op, site = op_of(f"joined {name}", case, folder), case.site()
    for texts in (1, 3, 9):
        given = on_gpu(cached_inputs(case, site, (1900,) * texts, 1, texts))
        y = op(*given)
        near(y, exact(site, given))
        assert all(torch.equal(op(*given), y) for _ in range(100)), texts
        graph, (first, second) = captured(lambda given=given: (op(*given), op(*given)))
        for _ in range(100):
            first.fill_(torch.nan)
            second.fill_(torch.nan)
            graph.replay()
            torch.rand(1 << 22, device="cuda")
        assert torch.equal(first, y) and torch.equal(second, y), texts


def test_parts_are_joined_by_a_second_kernel_if_they_are_many(folder: Path) -> None:
    case = REAL["gpt2"]
    site = case.site()
    module = imported(kernel_of(), site, folder / "joined_apart")
    given = on_gpu(cached_inputs(case, site, (1900,), 1, 1))
    for most in (module.JOINED_BYTES, 0):
        module.JOINED_BYTES = most
        y = module.cached_attention(*given)
        near(y, exact(site, given))
        assert all(torch.equal(module.cached_attention(*given), y) for _ in range(100))


def test_the_first_call_is_not_captured(folder: Path) -> None:
    site = REAL["gpt2"].site()
    module = imported(kernel_of(), site, folder / "joined_captured")
    given = on_gpu(cached_inputs(REAL["gpt2"], site, (1900,), 1, 1))
    y = module.cached_attention(*given)
    module.COUNTS.clear()
    with pytest.raises(RuntimeError, match="call it once before a CUDA graph of it is captured"):
        captured(lambda: module.cached_attention(*given), warm_up=0)
    assert torch.equal(module.cached_attention(*given), y)


@pytest.mark.parametrize("channels", [24, 64, 576])
def test_rows_are_rounded_to_the_codes_of_the_reference(channels: int, folder: Path) -> None:
    skip_without_e4m3(gpu_target())
    site = codes_site(channels, "bf16", "sm89")
    to_codes = imported(CODES_TRITON, site, folder / f"codes_{channels}").to_codes
    x = torch.randn(3, 701, 2, channels, device="cuda").bfloat16() * torch.rand(3, 701, 2, 1, device="cuda").bfloat16()
    x[0, 3] = 0
    for value in (x, x[:, ::7], 1e-30 * x):
        codes, scale = to_codes(value)
        want_codes, want_scale = ToCodes().reference(value)
        assert torch.equal(codes, want_codes) and torch.equal(scale, want_scale)


LAYERS = {
    "heads": {"kind": "attention", "heads": 8, "kv_heads": 2, "head_dim": 64, "rope": {}},
    "window": {"kind": "attention", "heads": 4, "head_dim": 64, "rope": {}, "mask": "j <= i and i - j < 100"},
    "latent": {"kind": "latent", "heads": 8, "kv_rank": 128, "rope_dim": 32, "head_dim": 32},
}


@pytest.mark.parametrize("page", [None, 64], ids=["rows", "pages"])
@pytest.mark.parametrize("dtype", [None, "e4m3"])
@pytest.mark.parametrize("name", LAYERS)
def test_models_decode_as_they_score(name: str, dtype: str | None, page: int | None) -> None:
    target = gpu_target()
    if dtype is not None:
        skip_without_e4m3(target)
    cache = {"page": page, **({"dtype": dtype} if dtype else {})}
    mlp = {**MLP, "hidden": 512}
    spec = tiny(layers=(LAYERS[name], mlp), dim=256, context=256, vocab=64, fuse=(), targets=(target,), cache=cache)
    checks = {check.name: check for check in verify(spec, (target,))}
    kernels = [check for name, check in checks.items() if "cached_attention" in name or "paged_attention" in name]
    assert kernels and not [check for check in (*kernels, checks["cached equals uncached"]) if check.ok is not True]
