"""`train.recompute`: functions of parts, their place in the plan, and what they cannot contain."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from partitioned import partition, saved_bytes, small_gpt, tag_as_in_torch_2_11
from run_samples import SPEC, VARIANTS, gpt_mini, small_spec

from specc.compiler import pipeline
from specc.compiler.build import canonical, plan_loaded
from specc.compiler.programs.fx_witness import round_trip, trace
from specc.compiler.programs.programs import LoweringError, flatten
from specc.compiler.report.explain import explain, text_of
from specc.compiler.report.plan_page import plan_page
from specc.compiler.report.saved import Pass
from specc.compiler.report.summary import Summary
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec
from specc.runtime.model.load import import_model, instantiate

PARTS = ("[mlp]", "[attention, mlp]", "[block]")
SavedByTorch = Callable[[str, str, str], int]


def shortened(name: str, *overrides: str) -> Spec:
    """A `small_gpt`. All blocks of gpt2_124m are equal: two of them have all that a partition divides."""
    return small_gpt(name, *(("model.blocks.count=2",) if name == "gpt2_124m" else ()), *overrides)


@pytest.fixture(scope="module")
def saved_by_torch(tmp_path_factory: pytest.TempPathFactory) -> SavedByTorch:
    """A function that returns what Torch's compiler saves of a spec with changes and recomputed parts."""

    @cache
    def saved_by_torch(name: str, change: str, part: str) -> int:
        spec = shortened(name, *change.split(), f"train.recompute={part}")
        return saved_bytes(partition(spec, "sm90", tmp_path_factory.mktemp("partition"))[0])

    return saved_by_torch


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_module_computes_the_nodes_of_the_plan(variant: str, part: str, tmp_path: Path) -> None:
    spec = small_spec(*VARIANTS[variant], f"train.recompute={part}")
    loaded = instantiate(spec, "cpu", tmp_path)
    source = import_model(loaded.directory)
    for program in ("train", "score"):
        method = "forward" if program == "train" else program
        traced = trace(source.Model(), source, method)
        assert round_trip(loaded.programs, program, traced) > 10
    regions = {node.region for node in flatten(loaded.programs, loaded.programs.program("train")).nodes}
    assert len(regions - {""}) == len(part.split(",")) * spec.model.blocks.count  # type: ignore[attr-defined]


def test_without_the_key_nothing_changes() -> None:
    spec, plain = gpt_mini("train.recompute=[]"), gpt_mini()
    assert canonical(spec) == canonical(plain) and "recompute" not in canonical(plain)
    assert pipeline.run(spec, "cpu") == pipeline.run(plain, "cpu")


def test_equal_parts_of_different_blocks_are_one_function() -> None:
    programs = pipeline.run(load(SPEC.with_name("gpt_mlp35.yaml"), ("train.recompute=[attention, mlp]",))[0], "sm90")
    attention, mlp = ([name for name in programs.recomputed if part in name] for part in ("attention", "mlp"))
    assert len(attention) == 2 and len(mlp) == 1  # the last blocks add value embeddings


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("gpt_mlp35", "", "[mlp]"),
        ("gpt_mlp35", "", "[block]"),
        ("gpt_mlp35", "", "[attention, mlp]"),
        ("gpt_mlp35", "merge=[] fold=[]", "[mlp]"),
        ("gpt_mlp35", "merge=[] fold=[]", "[block]"),
        ("gpt_mlp35", "fuse=[]", "[attention]"),
        ("gpt2_124m", "", "[mlp]"),
        ("gpt2_124m", "", "[attention]"),
        ("gpt2_124m", "fuse=[]", "[mlp]"),
        ("gpt2_124m", "fuse=[]", "[block]"),
    ],
)
def test_the_forecast_saves_what_the_compiler_saves(
    name: str, change: str, part: str, saved_by_torch: SavedByTorch
) -> None:
    """Within 2 % of what is saved without recomputation."""
    spec, plain = (shortened(name, *change.split(), f"train.recompute={recompute}") for recompute in (part, "[]"))
    saves = saved_by_torch(name, change, part)
    assert saved(spec) == pytest.approx(saves, rel=0.02, abs=0.02 * saved(plain))


@pytest.mark.parametrize("part", ["[mlp]", "[block]"])
@pytest.mark.parametrize("name", ["gpt_mlp35", "gpt2_124m"])
def test_torch_2_11_recomputes_fused_groups(
    name: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_by_torch: SavedByTorch
) -> None:
    """Fused groups are autograd functions, whose values its compiler keeps unless a context says otherwise."""
    newer = saved_by_torch(name, "", part)
    tag_as_in_torch_2_11(monkeypatch)
    older, _ = partition(shortened(name, "name=older", f"train.recompute={part}"), "sm90", tmp_path)
    assert saved_bytes(older) == newer


def saved(spec: Spec) -> int:
    plan = pipeline.plan(spec, "sm90", "")
    graph = flatten(plan.programs, plan.programs.program("train"), groups=False)
    return sum(Pass(graph, plan.programs, {"B": 16, "T": 256, "S": 256}, compiled=True).saved.values())


def test_the_plan_states_the_parts_and_counts_their_products_twice() -> None:
    spec, plain = gpt_mini("train.recompute=[mlp]"), gpt_mini()
    summaries = [Summary(s, plan_loaded(s, None, ("sm90",)).plans, {}) for s in (spec, plain)]
    assert "Recomputed in the backward: blocks.*.mlp, whose values" in plan_page(summaries[0])
    assert "Recomputed" not in plan_page(summaries[1])
    calls = [{row.node: row.calls for row in summary.step.rows} for summary in summaries]
    differing = {node for node in calls[1] if calls[0][node] != calls[1][node]}
    assert differing == {"blocks.*.mlp.up + act", "blocks.*.mlp.down"}
    assert all(calls[0][node] == 2 * calls[1][node] for node in differing)
    up, *_ = explain(summaries[0].main, "blocks.*.mlp.up")
    assert "  the backward pass computes it again: train.recompute" in text_of(up).splitlines()
    assert not any(row.recomputed for row in explain(summaries[0].main, "blocks.*.attention.q.rope"))


def test_delayed_scales_are_refused() -> None:
    fp8 = "train.precision={compute: bf16, fp8: [{match: blocks.*.mlp.*, scaling: delayed}]}"
    spec = gpt_mini("targets=[sm90]", "fuse=[]", fp8, "train.recompute=[mlp]")
    with pytest.raises(LoweringError, match=r"mlp\.up would record the largest magnitudes of its inputs twice"):
        pipeline.run(spec, "sm90")
    pipeline.run(gpt_mini("targets=[sm90]", "fuse=[]", fp8, "train.recompute=[attention]"), "sm90")
    fused = gpt_mini("targets=[sm90]", 'fuse=[{"blocks.*.mlp": [up, act, down]}]', fp8, "train.recompute=[mlp]")
    with pytest.raises(LoweringError, match="would record the largest magnitudes"):
        pipeline.run(fused, "sm90")


def test_a_part_around_other_nodes_is_refused() -> None:
    """The MLP of this block reads a value of the attention, and the attention writes after the MLP."""
    parallel = "model.blocks.layers.1.read=x"
    spec = small_spec("fuse=[]", parallel, "train.recompute=[attention, mlp]")
    assert len(pipeline.run(spec, "cpu").recomputed) == 2
