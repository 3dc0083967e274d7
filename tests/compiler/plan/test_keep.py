"""The save choices of a group: which exist, which a plan selects, and that all compute the same values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ATTENTION, MLP, float64, pair, tiny
from tune_samples import MACHINE

from specc.compiler import pipeline
from specc.compiler.build import compile_loaded
from specc.compiler.expr import Keep
from specc.compiler.plan.lock import NO_LOCK, Entry, GroupEntry, Lock, group_key
from specc.compiler.plan.plan import Plan, SaveChoices
from specc.compiler.spec.spec import Spec
from specc.runtime.tune.candidates import all_choices
from specc.runtime.tune.save_choice import fastest, line

GELU, GATED = "gelu(x)", "silu(gate) * x"


def spec_with(act: Any, target: str = "cpu", **words: Any) -> Spec:
    return tiny(layers=(ATTENTION, {**MLP, "hidden": 16, "act": act}), targets=(target,), **words)


def planned(act: Any, target: str, lock: Lock = NO_LOCK) -> Plan:
    return pipeline.plan(spec_with(act, target), target, "specs/tiny.yaml", lock)


def alternatives(act: Any, target: str, lock: Lock = NO_LOCK) -> SaveChoices:
    (result,) = planned(act, target, lock).save_choices
    return result


def locked(act: Any, target: str, keep: Keep, **changed: Any) -> Lock:
    """A lock in which a way is the fastest."""
    result = alternatives(act, target)
    entry = {"key": group_key(result.sites), "keep": keep, "ms": {"derivative": 0.5, "input": 0.25}, **changed}
    return NO_LOCK.with_measured(target, MACHINE, groups={result.name: GroupEntry.model_validate(entry)})


@pytest.mark.parametrize(
    ("act", "target", "keep"),
    [
        (GELU, "cpu", "derivative"),
        (GELU, "sm90", "derivative"),  # as many bytes either way
        (GATED, "cpu", "derivative"),
        (GATED, "sm80", "derivative"),
        (GATED, "sm90", "input"),  # the library writes one of the inputs anyway
        ("leaky_relu(x, 0.5) ** 2", "sm90", "derivative"),
    ],
)
def test_by_rule_a_plan_moves_the_fewest_bytes(act: str, target: str, keep: str) -> None:
    plan = planned(act, target)
    (result,) = plan.save_choices
    assert (result.chosen.group.keep, result.measured, result.label) == (keep, None, "blocks.*.mlp")
    assert [way.group.keep for way in result.options] == ["derivative", "input"]
    assert plan.programs.groups == (result.chosen.group,)
    saved = {"derivative": "slope", "input": "pre_x"}[keep]
    assert any(name.startswith(saved) for name in result.chosen.group.saved)


@pytest.mark.parametrize("act", ["relu(x) ** 2", "exp(x)", "3 * x", "x * gate"])
def test_where_no_derivative_is_saved_there_is_one_way(act: str) -> None:
    plan = planned(act, "sm90")
    assert plan.save_choices == () and plan.programs.groups[0].others == ()


@pytest.mark.parametrize("act", [GELU, GATED, {"expr": "tanh(x) * x", "name": "soft"}])
@pytest.mark.parametrize("target", ["cpu", "sm80", "sm90"])
def test_kernels_of_two_ways_have_names_of_their_own(act: Any, target: str) -> None:
    sites: dict[str, set[str]] = {}
    for way in alternatives(act, target).options:
        for choice in way.kernels:
            sites.setdefault(choice.rendered.module, set()).add(choice.site.key)
    assert all(len(keys) == 1 for keys in sites.values()) and len(sites) >= 4


@pytest.mark.parametrize("act", [GELU, GATED])
@pytest.mark.parametrize("keep", ["derivative", "input"])
def test_every_way_has_the_values_and_gradients_of_the_reference(act: str, keep: Keep, tmp_path: Path) -> None:
    with float64():
        models = pair(spec_with(act), tmp_path, lock=locked(act, "cpu", keep))
        assert models.programs.groups[0].keep == keep
        ids, targets = models.batch()
        want = models.reference("train", ids=ids, targets=targets)["loss"]
        gradients = dict(zip(models.params, torch.autograd.grad(want, list(models.params.values())), strict=True))
        loss = models.model(ids, targets)
        loss.backward()
        torch.testing.assert_close(loss, want, rtol=1e-11, atol=1e-11)
        for name, parameter in models.model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-10)


def test_a_lock_chooses_and_the_page_tells() -> None:
    (usual, other), spec = alternatives(GELU, "sm90").options, spec_with(GELU, "sm90")
    built = compile_loaded(spec, None, ("sm90",), locked(GELU, "sm90", "input"))
    (result,) = built.plans["sm90"].save_choices
    assert result.chosen.group == other.group != usual.group
    line = "- blocks.*.mlp: the input (act, pre_x); measured, 0.25 ms forward and backward; "
    assert f"\n{line}the derivative (act, slope) 0.5\n" in built.files["PLAN.md"]
    assert {name for name in built.files if name.endswith(".cu")} == {
        "sm90/linear_gelu_pre__n16_k8.cu",
        "sm90/dgrad_gelu_pre_grad__n16_k8.cu",
    }
    assert "act, pre_x = linear_gelu_pre(x, up)" in built.files["sm90/model.py"]
    plain = compile_loaded(spec, None, ("sm90",)).files["PLAN.md"]
    assert "\n- blocks.*.mlp: the derivative (act, slope); by rule: fewest bytes, else the derivative\n" in plain


def test_what_was_measured_for_another_group_is_not_taken() -> None:
    lock = locked(GELU, "sm90", "input", key="0" * 12)
    assert alternatives(GELU, "sm90", lock).measured is None
    lock = locked(GELU, "sm90", "input")
    assert alternatives("gelu_tanh(x)", "sm90", lock).measured is None
    assert alternatives(GELU, "sm80", lock).measured is None


def test_variants_of_a_spec_share_a_lock() -> None:
    lock = locked(GELU, "sm90", "input")
    other, times = alternatives("gelu_tanh(x)", "sm90"), {"derivative": 0.25, "input": 0.5}
    entry = GroupEntry(key=group_key(other.sites), keep="derivative", ms=times)
    both = lock.with_measured("sm90", MACHINE, groups={other.name: entry})
    assert set(both.targets["sm90"].groups) == {"fused_mlp linear_gelu__n16_k8", "fused_mlp linear_gelu_tanh__n16_k8"}
    assert alternatives(GELU, "sm90", both).chosen.group.keep == "input"
    assert alternatives("gelu_tanh(x)", "sm90", both).measured is not None


def test_a_lock_has_the_time_of_what_is_kept() -> None:
    with pytest.raises(ValueError, match="keep"):
        locked(GELU, "sm90", "mask")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`keep` is input, but `ms` has no time for this save choice"):
        locked(GELU, "sm90", "input", ms={"derivative": 1.0})
    elsewhere = MACHINE.model_copy(update={"gpu": "NVIDIA H100"})
    entry = GroupEntry(key="0" * 12, keep="input", ms={"input": 1.0})
    moved = locked(GELU, "sm90", "input").with_measured("sm90", elsewhere, groups={"fused_other": entry})
    assert set(moved.targets["sm90"].groups) == {"fused_other"}


def measured(result: SaveChoices, times: dict[str, float]) -> Lock:
    """A lock with times of the kernels whose names contain a word."""
    lock = NO_LOCK
    for way in result.options:
        for choice in way.kernels:
            ms = next((ms for word, ms in times.items() if word in choice.rendered.module), None)
            if ms is not None:
                known = {"node": "n", "key": choice.site.key, "kernel": choice.kernel.name, "rows": 8}
                entry = Entry.model_validate({**known, "ms": ms, "floor_ms": 0.1})
                lock = lock.with_measured("sm90", MACHINE, {choice.rendered.module: entry})
    return lock


def test_the_fastest_way_is_that_of_the_least_sum() -> None:
    result = alternatives(GELU, "sm90")
    times = {"linear_gelu__": 0.75, "dgrad_mul__": 0.45, "linear_gelu_pre__": 0.5, "dgrad_gelu_pre_grad__": 0.6}
    best = fastest(result, "sm90", measured(result, times))
    assert best == GroupEntry(key=group_key(result.sites), keep="input", ms={"derivative": 1.2, "input": 1.1})
    assert line(result, best) == (
        "blocks.*.mlp saves the input: the derivative 1.2000 ms, the input 1.1000 ms, forward and backward"
    )
    best = fastest(result, "sm90", measured(result, {**times, "linear_gelu_pre__": 0.7}))
    assert best is not None and best.keep == "derivative"
    del times["linear_gelu_pre__"]
    assert fastest(result, "sm90", measured(result, times)) is None


def test_all_ways_are_tuned_and_those_of_the_plan_first() -> None:
    plan = planned(GELU, "sm90")
    chosen, every = plan.generated, all_choices(plan)
    assert every[: len(chosen)] == chosen
    assert [choice.rendered.module for choice in every[len(chosen) :]] == [
        "linear_gelu_pre__n16_k8",
        "dgrad_gelu_pre_grad__n16_k8",
    ]
