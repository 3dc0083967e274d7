"""Pooled keys and values: plain attention inside the window, no later token, and a cache smaller than the text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from block_checks import attention, check_block
from tiny_models import ATTENTION, MLP, float64, pair, random_params, tiny

from specc.compiler import pipeline
from specc.compiler.expr.mask import bound_blocks
from specc.compiler.expr.values import ExprError
from specc.compiler.ops.pooled.attention import SdpaPooled
from specc.compiler.ops.pooled.pooling import POOLINGS
from specc.compiler.programs.cost import cached_numbers
from specc.runtime.model.load import instantiate
from specc.runtime.verify import verify as checks

CASES: Mapping[str, dict[str, Any]] = {
    "pool_mean": attention(mask="j <= i and i - j < 3", pool={"block": 4}, rope={}),
    "pool_max_of_aligned_blocks": attention(
        mask="j <= i and i // 3 - j // 3 < 2", pool={"block": 3, "by": "max"}, kv_heads=1
    ),
    "pool_reservoir": attention(
        mask="j <= i and (i - j < 2 or j < 1)", pool={"block": 4, "by": "reservoir", "tokens": 2, "seed": 3}, scale=0.7
    ),
    "pool_latent": attention(
        mask="j <= i and i - j < 10",
        pool={"block": 3, "by": "latent", "tokens": 2, "mask": "j + block <= i and h < 1"},
        score="s - slope(h) * (i - j)",
        sinks=True,
        exclude={},
    ),
    "pool_of_documents": attention(
        mask="j <= i and document(i) == document(j) and i - j < 2", bos=2, pool={"block": 2, "by": "latent"}
    ),
}
NEAR = "j <= i and i - j < 256"


def model_of(folder: Path, pool: dict[str, Any] | None, mask: str = "j <= i", **model: Any) -> Any:
    """A pair of 64 tokens of context with one attention layer."""
    layer = {**ATTENTION, "mask": mask, **({"pool": pool} if pool else {})}
    return pair(tiny(layers=(layer, MLP), fuse=(), **{"context": 64, "count": 1, **model}), folder)


@pytest.mark.parametrize("name", CASES)
def test_a_case_equals_its_reference(name: str, tmp_path: Path) -> None:
    check_block(CASES[name], tmp_path)


@pytest.mark.parametrize("by", sorted(POOLINGS))
def test_blocks_inside_the_window_change_nothing(by: str, tmp_path: Path) -> None:
    with float64(), torch.no_grad():
        pooled = model_of(tmp_path / "pooled", {"block": 8, "by": by}, "j <= i and i - j < 64")
        plain = model_of(tmp_path / "plain", None)
        pooled.model.load_state_dict(plain.model.state_dict(), strict=False)
        ids, targets = pooled.batch()
        torch.testing.assert_close(
            pooled.model.score(ids, targets), plain.model.score(ids, targets), rtol=1e-13, atol=1e-13
        )


@pytest.mark.parametrize(
    ("text", "i", "j"),
    [
        ("j <= i", 0, 1),  # blocks that start after the query are hidden: the published form
        ("j + block <= i + 2", 62, 63),
        ("j // 64 <= i // 64", 0, 1),
        ("j + block <= i + 1 or h < 1 and document(i) == document(j)", 0, 1),
    ],
)
def test_masks_of_blocks_with_later_tokens_are_refused_with_a_pair(text: str, i: int, j: int) -> None:
    with pytest.raises(ExprError, match=f"the query at i = {i} attends to the block of token {j}"):
        bound_blocks(text, NEAR, 64, 4, 1024)


@pytest.mark.parametrize(
    ("text", "mask", "bound"),
    [
        (None, NEAR, "j + 63 <= i and i - j >= 256"),
        (None, "j <= i and i // 64 - j // 64 < 4", "j + 63 <= i and i // 64 - j // 64 >= 4"),
        (None, f"{NEAR} and document(i) == document(j)", "j + 63 <= i and i - j >= 256 and document(i) == document(j)"),
        ("i // 64 > j // 64", NEAR, "i // 64 > j // 64"),
    ],
)
def test_masks_of_whole_blocks_are_proved(text: str | None, mask: str, bound: str) -> None:
    assert bound_blocks(text, mask, 64, 4, 1024) == bound


def test_the_published_mask_leaks_and_ours_does_not() -> None:
    """Of the published form, blocks that start at or before the query, a query sees up to `block` - 1 later tokens."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 64, 2, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    changed = k.clone()
    changed[:, 31] += 1
    moved = {}
    for name, mask in (("published", "j <= i"), ("whole", bound_blocks(None, "j <= i and i - j < 8", 16, 2, 64))):
        op = SdpaPooled(mask="j <= i and i - j < 8", block=16, pooled=mask)
        before, after = (op.reference(q, keys, v) for keys in (k, changed))
        assert isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
        moved[name] = (after - before).abs().amax((0, 2, 3)).nonzero()[0].item()
    assert moved == {"published": 16, "whole": 31}


def test_cache_holds_the_window_and_one_row_per_block(tmp_path: Path) -> None:
    with float64(), torch.no_grad():
        tested = model_of(tmp_path, {"block": 8, "by": "latent", "tokens": 2}, "j <= i and i // 8 - j // 8 < 2")
        (cache,) = tested.model.new_cache(3, 64)
        assert [tensor.shape[:2] for tensor in cache] == [(3, 16), (3, 16), (3, 16), (3, 16)]
        plan = pipeline.lower(tested.spec, "cpu")
        assert cached_numbers(plan, 64) == 4 * 16 * 8
        loaded = instantiate(tested.spec, "cpu", tmp_path / "checked")
        state = dict(loaded.model.named_parameters())
        for name, value in random_params(plan, 1).items():
            state[name].copy_(value)
    results = (*checks._attention(loaded, 0), *checks._cache(tested.spec, loaded))
    assert len(results) == 2 and all(check.ok for check in results), results
