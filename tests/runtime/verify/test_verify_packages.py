"""`verify` where a lock names a package that is not installed: the other targets are checked all the same."""

import sys
from pathlib import Path

import pytest
from tune_samples import MACHINE

from specc.compiler.build import compile_spec
from specc.compiler.plan.lock import NO_LOCK, Entry
from specc.compiler.spec.check import load
from specc.runtime.verify.verify import verify

SPEC = Path(__file__).parents[3] / "specs/gpt_mini.yaml"
WIDE = ("model.dim=256", "model.blocks.count=2", 'fuse=[{"blocks.*.attention": [y]}]')  # heads that flash-attn-4 takes


@pytest.mark.parametrize(("there", "ok"), [(False, None), (True, False)], ids=["another machine", "its machine"])
def test_a_missing_package_is_told_and_the_next_target_checked(
    there: bool, ok: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, None)
    choice = compile_spec(SPEC, WIDE, ("sm90",)).plans["sm90"].choices[0]
    site = choice.site
    words = {"kernel": "flash_attention_4", "rows": 24, "ms": 0.25, "floor_ms": 0.125}
    entry = Entry.model_validate({"node": site.label, "key": site.key, **words})
    lock = NO_LOCK.with_measured("sm90", MACHINE, {choice.rendered.module: entry})
    monkeypatch.setattr(
        "specc.runtime.verify.verify.unavailable", lambda target: None if there or not target.arch else "no GPU"
    )
    spec, _ = load(SPEC, WIDE)
    seen = []
    for check in verify(spec, ("sm90", "cpu"), lock=lock):
        seen.append(check)
        if check.target == "cpu":
            break
    first, *others, last = seen
    assert (first.target, first.ok) == ("sm90", ok)
    assert "flash-attn-4" in first.detail and "specc[flash]" in first.detail
    assert [(check.name, check.ok) for check in others] == [("fx train, fuse: []", True), ("fx score, fuse: []", True)]
    assert (last.target, last.name, last.ok) == ("cpu", "fx train, fused", True)
