"""`verify` of scores and masks: every mechanism holds, and code that is wrong is found."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ATTENTION, MLP, tiny

from specc.runtime.model.load import instantiate
from specc.runtime.verify import verify as checks

HEADS = {**ATTENTION, "heads": 4, "kv_heads": 2}
SAME = "document(i) == document(j)"
POINT = ({"blocks.*.attention": ["y"]},)
CASES: dict[str, dict[str, Any]] = {
    "alibi": {"score": "s - slope(h) * (i - j)"},
    "window": {"mask": "j <= i and i - j < 5"},
    "first keys": {"mask": "j <= i and (i - j < 5 or j < 2)", "sinks": True},
    "dilated": {"mask": "j <= i and (i - j) % 4 == 0"},
    "documents": {"mask": f"j <= i and i - j < 9 and {SAME}", "bos": 1},
    "buckets": {"score": "s + bias[h, bucket(i - j, 8, 16)]", "learn": {"bias": {"shape": ["heads", 8], "init": 0.1}}},
    "logarithm of the distance": {"score": "s - log(i - j + 1)"},
    "softcap, scaled by layer": {"score": "5 * tanh(s / 5)", "scale": "1/sqrt(head_dim)/(layer + 1)"},
}


def checked(layer: dict[str, Any], fuse: Any = ()) -> dict[str, checks.Check]:
    spec = tiny(layers=({**HEADS, **layer}, MLP), dim=32, fuse=fuse, context=40)
    return {check.name: check for check in checks.verify(spec, ("cpu",))}


@pytest.mark.parametrize("fuse", [(), POINT], ids=["plain", "fused"])
@pytest.mark.parametrize("name", CASES)
def test_every_check_holds(name: str, fuse: Any) -> None:
    result = checked(CASES[name], fuse)
    assert [check for check in result.values() if not check.ok] == []
    assert any(title.startswith("attend_") for title in result)
    assert ("packed documents equal single documents" in result) == (name == "documents")
    assert any(title.startswith("kernel scored_attention") for title in result) == bool(fuse)


def test_documents_that_are_read_across_have_no_check() -> None:
    assert "packed documents equal single documents" not in checked({"mask": f"j <= i and ({SAME} or j < 3)", "bos": 1})


def test_a_wrong_mask_and_a_wrong_ring_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny(layers=({**HEADS, "mask": "j <= i and i - j < 5"}, MLP), dim=32, fuse=(), context=40)
    loaded = instantiate(spec, "cpu", tmp_path)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.normal_(std=0.5)
    module = sys.modules[type(loaded.model).__module__]
    assert all(check.ok for check in (*checks._attention(loaded, 0), *checks._cache(spec, loaded)))
    written = module.write_ring  # type: ignore[attr-defined]
    monkeypatch.setattr(
        module, "write_ring", lambda cache, x, positions, *ring: written(cache, x, positions + 1, *ring)
    )
    assert [check.ok for check in checks._cache(spec, loaded)] == [False]
    attend = module.attend_d_lt_5  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "attend_d_lt_5", lambda q, k, v: attend(q, k.roll(1, 1), v))
    assert [check.ok for check in checks._attention(loaded, 0)] == [False]


def test_a_cache_keeps_a_window_and_its_first_keys(tmp_path: Path) -> None:
    for mask, rows in (("j <= i and i - j < 5", 5), ("j <= i and (i - j < 5 or j < 2)", 7), ("j <= i", 33)):
        spec = tiny(layers=({**HEADS, "mask": mask}, MLP), dim=32, fuse=(), context=40)
        model: Any = instantiate(spec, "cpu", tmp_path / str(rows)).model
        assert {tensor.shape[1] for block in model.new_cache(2, 33) for tensor in block} == {rows}
