"""Merged linear layers and folded factors: values, gradients and names as without them, choices, and refusals."""

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from block_checks import (
    NORM_ROPE,
    check_spec,
    scores_are_causal_and_equal_the_reference,
    torch_fx_finds_the_plan,
)
from tiny_models import FUSE_MLP, float64, pair, spec_data, spec_of

from specc.compiler import pipeline
from specc.compiler.build import canonical, compile_loaded
from specc.compiler.build import spec_of as read_canonical
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.region import Call
from specc.compiler.ops.shape import ConcatRows
from specc.compiler.programs.programs import LoweringError, Rewriting
from specc.compiler.report.explain import explain
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec

ROOT = Path(__file__).parents[3]
ALL = ("*",)
VECTOR = {"learn": {"residual": {"init": 1}}, "write": "x + residual * y"}
NUMBER = {"learn": {"residual": {"init": 1, "shape": 1}}, "write": "x + residual * y"}
ATTENTION = {"kind": "attention", "heads": 2, "kv_heads": 1}
MLP = {"kind": "mlp", "hidden": 24, "act": "relu(x) ** 2"}
GATED = {**MLP, "act": "silu(gate) * x"}
HEAD = {"head": ["logits", "loss"]}
FOLDED = {"attention.out", "mlp.down"}


def spec(
    *layers: Mapping[str, Any],
    fuse: Sequence[Mapping[str, Any]] = (FUSE_MLP,),
    keys: Mapping[str, Any] | None = None,
    dim: int = 16,
    **blocks: Any,
) -> Spec:
    """A spec of two blocks whose layers are all merged and folded, unless `keys` of the spec say otherwise."""
    data = spec_data(layers, fuse, dim=dim, blocks=blocks)
    return spec_of({**data, **({"merge": list(ALL), "fold": list(ALL)} if keys is None else keys)})


CASES: dict[str, Spec] = {
    "vectors": spec({**ATTENTION, **VECTOR}, {**MLP, **VECTOR}),
    "numbers": spec({**ATTENTION, **NUMBER}, {**MLP, "write": "x + 0.3 * y"}),
    "numbers by layer": spec({**ATTENTION, "write": "x + 1/sqrt(layer + 1) * y"}, {**MLP, "write": "x - y / layers"}),
    "several factors": spec(
        {
            **ATTENTION,
            "learn": {"w": {"init": 1}, "other": {"init": 1, "shape": 1}},
            "write": "0.5 * x - sigmoid(w) * y * other + x0",
        },
        {**MLP, "learn": {"carry": {"init": 1}, "post": {"init": 1}}, "write": "carry * x + post * (y + x0) / 2"},
    ),
    "products alone": spec(
        {**ATTENTION, "learn": {"r": {"init": 1}}, "write": "r * y"}, {**MLP, "write": "0.5 * y + x0"}
    ),
    "dropped products alone": spec(
        {**ATTENTION, "learn": {"r": {"init": 1}}, "write": "r * y", "dropout": 0.25},
        {**MLP, "write": "0.5 * y + x0", "dropout": 0.125},
    ),
    "dropout in a group": spec(
        {**ATTENTION, **VECTOR, "dropout": 0.25},
        {**MLP, **VECTOR, "dropout": 0.125},
        fuse=({"blocks.*.mlp": ["up", "act", "down", "dropped"]},),
    ),
    "a gated mlp outside of groups": spec({**ATTENTION, **VECTOR}, {**GATED, **VECTOR}, fuse=(HEAD,)),
    "a gated mlp in a group": spec({**ATTENTION, **VECTOR}, {**GATED, **VECTOR}),
    "groups that read parts": spec(
        {**ATTENTION, **VECTOR, "heads": 4, "kv_heads": 2, "rope": {"base": 100}, "qk_norm": {"gain": 1.5}},
        {**MLP, **VECTOR},
        fuse=({"blocks.*.attention": ["y"]}, *NORM_ROPE, FUSE_MLP, HEAD),
        dim=32,
    ),
    "exclusive attention": spec(
        {**ATTENTION, **VECTOR, "exclude": {}}, MLP, fuse=({"blocks.*.attention": ["y"]}, FUSE_MLP)
    ),
    "parallel layers": spec(ATTENTION, GATED, fuse=(HEAD,), write="x + 0.5 * attention + mlp / layers"),
    "biases": spec({**ATTENTION, **VECTOR, "bias": True}, {**MLP, "write": "x + 0.5 * y"}, keys={"merge": ["*"]}),
    "a bias in a group": spec(
        {**ATTENTION, **VECTOR},
        {**MLP, "bias": True, "write": "x + 0.5 * y", "dropout": 0.25},
        fuse=({"blocks.*.mlp": ["up", "act", "down", "down.biased", "dropped"]},),
    ),
    "latent attention": spec(
        {
            "kind": "latent",
            "heads": 2,
            "head_dim": 8,
            "rope_dim": 8,
            "kv_rank": 8,
            "q_rank": 8,
            "rope": {"base": 100},
            **VECTOR,
        },
        {**MLP, **VECTOR},
    ),
    "several runs of a block": spec({**ATTENTION, **VECTOR}, {**MLP, **NUMBER}, order="0..1 0..1"),
    "blocks that differ": spec(
        {**ATTENTION, **VECTOR},
        {**MLP, **VECTOR},
        changes=[{"where": "layer == 1", "attention": {"v": "v + value(0)"}, "mlp": {"write": "x + residual * y / 2"}}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_gradients_causality_caches_and_traces(name: str, tmp_path: Path) -> None:
    rewritings = pipeline.run(CASES[name], "cpu").rewritings
    assert rewritings and not any(rewriting.refusal for rewriting in rewritings)
    check_spec(CASES[name], tmp_path)


def golf(attention: float, mlp: float, parallel: bool, looped: bool, keys: Mapping[str, Any]) -> Spec:
    """A spec of four blocks after specs/gpt_golf_sp8192.yaml.

    Args:
        attention: The dropout of attention layers.
        mlp: The dropout of MLPs.
        parallel: Whether the layers of the last two blocks are parallel.
        looped: Whether the blocks 1 and 2 run twice from a part of the run on.
        keys: `merge` and `fold`.
    """
    gained = {"heads": 4, "kv_heads": 2, "rope": {"dims": 4, "base": 100}, "qk_norm": {"gain": 5.25}, "exclude": {}}
    layers = {**ATTENTION, **VECTOR, **gained, "dropout": attention}, {**MLP, **VECTOR, "dropout": mlp}
    blocks: dict[str, Any] = {"count": 4, "norm": {"kind": "rms", "scale": "1/sqrt(layer + 1)"}}
    blocks |= {"learn": {"mix.stream": {"init": 1}, "mix.embedded": {"init": 0}}}
    blocks |= {"read": "mix.stream * x + mix.embedded * x0"}
    if parallel:
        write = "x + attention.residual * attention + mlp.residual * mlp"
        blocks["changes"] = [
            {"where": "layer >= 2", "write": write, "attention": {"write": None}, "mlp": {"write": None}}
        ]
    if looped:
        blocks["order"] = {"at": [[0, "0..3"], [0.35, "0..2 1..3"]]}
    return spec(*layers, fuse=(*NORM_ROPE, FUSE_MLP, HEAD), keys=keys, dim=32, **blocks)


@pytest.mark.parametrize(
    "keys", [{"merge": "auto", "fold": "auto"}, {"merge": [], "fold": "auto"}, {"merge": "auto", "fold": []}], ids=str
)
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(("attention", "mlp"), [(0.25, 0), (0, 0.125), (0.25, 0.125)])
def test_dropout_between_a_layer_and_its_factor(
    attention: float, mlp: float, parallel: bool, looped: bool, keys: Mapping[str, Any], tmp_path: Path
) -> None:
    """Training and scoring multiply with the same matrices. Loss and gradients are those of the reference, which
    multiplies the dropped value by the factor."""
    case = golf(attention, mlp, parallel, looped, keys)
    programs = pipeline.run(case, "cpu")
    assert not any(rewriting.refusal for rewriting in programs.rewritings)
    matrices = [
        {
            (call.op.at, inner.op.callee)
            for call in programs.program(name).nodes
            if isinstance(call.op, Call)
            for inner in programs.function(call.op.callee).nodes
            if isinstance(inner.op, Call)
        }
        for name in programs.whole
    ]
    assert len(matrices) == (4 if looped else 2) and all(each == matrices[0] for each in matrices)
    folded = {name for name in programs.derived if name.endswith("scaled")}
    assert folded == ({"block.attention_out_scaled", "block.mlp_down_scaled"} if keys["fold"] else set())
    check_spec(case, tmp_path, (True,))


@pytest.mark.parametrize("seed", range(12))
def test_random_specs(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    heads = draw.choice((1, 2, 4))
    kv_heads = draw.choice([n for n in (1, 2, 4) if heads % n == 0])
    scaled = draw.choice((VECTOR, NUMBER, {"write": f"x + {draw.uniform(0.1, 2):.3f} * y"}))
    attention = {"kind": "attention", "heads": heads, "kv_heads": kv_heads, **scaled}
    mlp = {"kind": "mlp", "hidden": 8 * draw.randint(1, 5), "act": draw.choice((MLP["act"], GATED["act"])), **scaled}
    dropped = [{**layer, "dropout": draw.choice((0, 0.1, 0.5))} for layer in (attention, mlp)]
    changes = [
        {
            "where": "layer == 1",
            "write": "x - attention + mlp / 2",
            "attention": {"write": None},
            "mlp": {"write": None},
        },
        {"where": "layer == 1", "mlp": {"dropout": 0.2}},
        {"where": "layer == 0", "attention": {"dropout": 0}},
        {"where": "layer == 1", "mlp": {"act": "gelu(x)"}},
    ]
    some = draw.sample(changes if "learn" not in scaled else changes[1:], draw.randint(0, 2))
    fuse = draw.choice(((FUSE_MLP,), (HEAD,)))
    check_spec(spec(*dropped, fuse=fuse, dim=8 * heads * draw.randint(1, 3), changes=some), tmp_path)


def test_nothing_differs_but_rounding(tmp_path: Path) -> None:
    """The loss and each gradient equal those of the same spec without merged layers and folded factors."""
    changed = CASES["groups that read parts"]
    plain = changed.model_copy(update={"merge": (), "fold": ()})
    results = []
    with float64():
        for number, each in enumerate((changed, plain)):
            sample = pair(each, tmp_path / str(number))
            loss = sample.model(*sample.batch())
            loss.backward()
            gradients = {name: parameter.grad for name, parameter in sample.model.named_parameters()}
            results.append((loss, gradients, list(sample.model.state_dict()), sample.programs.params))
    (loss, gradients, names, params), (want, expected, names_before, params_before) = results
    assert names == names_before and params == params_before
    torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-10)
    for name, gradient in gradients.items():
        assert expected[name].abs().max() > 0
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-10, msg=name)


def test_the_gradient_of_a_factor_follows_from_that_of_its_matrix(tmp_path: Path) -> None:
    """d residual is the sum of d(residual * w) * w over each row, and d w is residual * d(residual * w)."""
    with float64():
        sample = pair(CASES["vectors"], tmp_path)
        sample.model(*sample.batch()).backward()
        mlp = sample.model.blocks[1].mlp
        of_scaled = mlp.down.grad / mlp.residual.unsqueeze(1)
        torch.testing.assert_close(mlp.residual.grad, (of_scaled * mlp.down).sum(1), rtol=1e-9, atol=1e-10)


def test_one_product_forward_and_in_each_gradient(tmp_path: Path) -> None:
    """Torch runs three products for the layers of one value: one forward, and one for each gradient."""
    case = {"keys": {"fold": []}, "fuse": (HEAD,), "count": 1}
    counts = []
    for merge in (list(ALL), []):
        layers = ({**ATTENTION, "exclude": {}}, MLP)
        each = spec(*layers, fuse=case["fuse"], keys={"fold": [], "merge": merge})
        sample = pair(each, tmp_path / str(len(merge)))
        with float64(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            sample.model(*sample.batch()).backward()
        counts.append(sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm")))
    merged, separate = counts
    assert separate - merged == 2 * 3 * 2  # in each of two blocks, one in place of three, three times


def test_programs_that_decode_are_unchanged() -> None:
    for case in CASES.values():
        changed, plain = pipeline.run(case, "cpu"), pipeline.run(case.plain, "cpu")
        for name in ("prefill", "decode"):
            assert changed.program(name) == plain.program(name)
            callees = {node.op.callee for node in changed.program(name).nodes if hasattr(node.op, "callee")}
            assert all(changed.function(callee) == plain.function(callee) for callee in callees)
        assert changed.params == plain.params


def test_a_spec_without_fusion_points_is_as_the_model_states_it() -> None:
    layers = {**ATTENTION, **VECTOR}, {**MLP, **VECTOR}
    default = spec(*layers, fuse=(), keys={})
    assert not (default.fuse or default.merge or default.fold or pipeline.run(default, "cpu").rewritings)
    explicit = spec(*layers, fuse=(), keys={"merge": [], "fold": []})
    files = compile_loaded(default, None, ("cpu",)).files
    assert files["cpu/model.py"] == compile_loaded(default.plain, None, ("cpu",)).files["cpu/model.py"]
    assert files["cpu/model.py"] == compile_loaded(explicit, None, ("cpu",)).files["cpu/model.py"]
    both = CASES["vectors"]
    model = compile_loaded(both, None, ("cpu",)).files["cpu/model.py"]
    assert "torch.cat((self.attention.q, self.attention.k, self.attention.v))" in model
    assert "self.mlp.residual.unsqueeze(1) * self.mlp.down" in model
    assert compile_loaded(both.plain, None, ("cpu",)).files["cpu/model.py"] == files["cpu/model.py"]


def test_a_spec_without_the_keys_keeps_its_text() -> None:
    layers = {**ATTENTION, **VECTOR}, {**MLP, **VECTOR}
    default, auto = spec(*layers, keys={}), spec(*layers, keys={"merge": "auto", "fold": []})
    assert not re.search('"(merge|fold)"', canonical(default)) and not pipeline.run(default, "cpu").rewritings
    assert '"merge":"auto"' in canonical(auto).replace(" ", "")
    assert read_canonical(canonical(auto)) == auto


def test_each_key_is_of_one_pass() -> None:
    layers = {**ATTENTION, **VECTOR, "exclude": {}}, {**MLP, **VECTOR}
    steps = {
        key: {rewriting.step for rewriting in pipeline.run(spec(*layers, keys={key: "auto"}), "cpu").rewritings}
        for key in ("merge", "fold")
    }
    assert steps == {"merge": {"merge_linears"}, "fold": {"fold_scales"}}


def test_patterns_choose_nodes() -> None:
    layers = {**ATTENTION, **VECTOR}, {**MLP, **VECTOR}
    keys = {"merge": ["blocks.*.attention.{k,v}"], "fold": ["blocks.*.mlp"]}
    programs = pipeline.run(spec(*layers, keys=keys), "cpu")
    assert [(rewriting.step, rewriting.nodes) for rewriting in programs.rewritings] == [
        ("fold_scales", ("blocks.*.mlp.down",)),
        ("merge_linears", ("blocks.*.attention.k", "blocks.*.attention.v")),
    ]
    assert programs.derived == ("block.attention_k_v_weight", "block.mlp_down_scaled")
    (function,) = [graph for graph in programs.functions if graph.name == "block.forward"]
    assert "attention.q" in function.by_name and "attention.k_v" in function.by_name


@pytest.mark.parametrize(
    ("layers", "keys", "code", "message"),
    [
        (
            ({**ATTENTION, "kv_heads": 2}, MLP),
            {"merge": ["blocks.*.mlp"]},
            "S302",
            "matches nothing that `merge` can change",
        ),
        ((ATTENTION, MLP), {"fold": ["blocks.*"]}, "S302", "`blocks.*` matches nothing that `fold` can change"),
        (
            (ATTENTION, MLP),
            {"merge": ["blocks.0.attention"]},
            "S303",
            "but not blocks.1.attention.q; both run the same generated code",
        ),
        (({**ATTENTION, **VECTOR}, MLP), {"fold": ["blocks.1.*"]}, "S303", "but not blocks.0.attention.out"),
        (({"kind": "attention", "heads": 2, "head_dim": 2}, MLP), {"merge": ["*"]}, "S304", "multiples of 8 features"),
    ],
)
def test_a_pattern_without_effect_says_why(
    layers: Sequence[Mapping[str, Any]], keys: Mapping[str, Any], code: str, message: str
) -> None:
    with pytest.raises(LoweringError) as error:
        pipeline.run(spec(*layers, keys=keys), "cpu")
    (problem,) = error.value.problems
    ((key, patterns),) = keys.items()
    assert problem.code == code and problem.path == (key, 0) and message in problem.message
    assert patterns[0] in problem.message or code == "S304"


def test_parts_that_kernels_read_by_rows_are_refused() -> None:
    """The MLP's group reads a linear layer of the stream directly, and its kernels need contiguous rows."""
    shared = {"learn": {"a": {"of": "x", "shape": 16}, "b": {"of": "x", "shape": 16}}, "read": "a"}
    norm = {"kind": "rms", "places": ["after"]}
    case = spec(ATTENTION, {**MLP, **shared, "write": "x + y * b + a"}, keys={"merge": ["*.mlp.*"]}, norm=norm)
    with pytest.raises(LoweringError, match="kernels read contiguous rows"):
        pipeline.run(case, "cpu")


def test_copies_of_gradients_decide_for_all_blocks_alike() -> None:
    """Results of kernels would be copied: layers that attention reads stay apart. Kernels of norms and rotations write
    into one tensor: those of gpt2_124m and gpt_mlp35 are one product."""
    small = spec({**ATTENTION, "kv_heads": 2}, MLP, fuse=({"blocks.*.attention": ["y"]},), keys={"merge": "auto"})
    (refused,) = [r for r in pipeline.run(small, "cpu").rewritings if r.step == "merge_linears"]
    assert refused.refusal == (
        "kernels compute the gradients of q, k, v: one product would copy 192 numbers per token in all blocks, and save"
        " only 128 in the gradient of the input"
    )
    apart, merged = (load(ROOT / f"specs/{name}.yaml", ["merge=auto"])[0] for name in ("gpt2_124m", "gpt_mlp35"))
    nodes = tuple(f"blocks.*.attention.{name}" for name in "qkv")
    text = "over whole sequences, one product of 1,024 features, as is each gradient"
    text += "; its matrix is concatenated once per step; kernels write the gradients of q, k into one tensor"
    assert Rewriting("merge_linears", nodes, text) in pipeline.run(merged, "sm90").rewritings
    (merge,) = [r for r in pipeline.run(apart, "sm90").rewritings if r.step == "merge_linears"]
    assert not merge.refusal and merge.text.endswith("; gradients of v are copied into it")
    asked = small.model_copy(update={"merge": ALL})
    assert any(isinstance(n.op, ConcatRows) for graph in pipeline.run(asked, "cpu").functions for n in graph.nodes)


def test_layers_of_one_kernel_of_a_group_say_why() -> None:
    case = spec({**ATTENTION, **VECTOR}, {**GATED, **VECTOR}, keys={"merge": "auto"})
    refused = [rewriting for rewriting in pipeline.run(case, "cpu").rewritings if rewriting.refusal]
    nodes = "blocks.*.mlp.gate", "blocks.*.mlp.up"
    assert [tuple(sorted(rewriting.nodes)) for rewriting in refused] == [nodes]
    assert "one kernel of a fused group" in refused[0].refusal


def test_a_product_of_8_bits_is_not_folded() -> None:
    data = spec_data(({**ATTENTION, **VECTOR}, {**MLP, **VECTOR}), (HEAD,), dim=16)
    data["train"]["precision"] = {"fp8": [{"match": "blocks.*.attention.*"}]}
    data["fold"] = "auto"
    programs = pipeline.run(spec_of(data), "cpu")
    nodes = {node for rewriting in programs.rewritings for node in rewriting.nodes if not rewriting.refusal}
    train = {node.op.callee for node in programs.program("train").nodes if hasattr(node.op, "callee")}
    (function,) = [graph for graph in programs.functions if graph.name in train]
    assert "attention.out.scaled" not in function.by_name and "mlp.down.scaled" in function.by_name
    assert "blocks.*.mlp.down" in nodes


def test_products_of_8_bits_and_dropout_in_some_blocks(tmp_path: Path) -> None:
    """Training and scoring call one function of a block without 8-bit products, but two functions of the other."""
    changes = [{"where": "layer == 1", "attention": {"write": "x - residual * y"}, "mlp": {"dropout": 0}}]
    layers = {**ATTENTION, **VECTOR}, {**MLP, **VECTOR, "dropout": 0.1}
    for match in ("blocks.*.attention.*", "blocks.*.mlp.*", "blocks.0.*"):
        data = spec_data(layers, (), dim=16, blocks={"changes": changes})
        data["train"]["precision"] = {"fp8": [{"match": match}]}
        sample = pair(spec_of({**data, "merge": "auto", "fold": "auto"}), tmp_path / match)
        with float64(), torch.no_grad():
            scores_are_causal_and_equal_the_reference(sample)
        torch_fx_finds_the_plan(sample)


def test_weights_of_layers_stay_parameters() -> None:
    """Optimizers, quantization and checkpoints see the matrices of the spec."""
    quant = {
        "default": {"scheme": "round", "bits": 5},
        "rules": [{"match": "*.{token,residual}", "scheme": "none", "dtype": "f16"}],
    }
    data = spec_data(({**ATTENTION, **VECTOR}, {**MLP, **VECTOR}), dim=16)
    case = spec_of({**data, "merge": ["*"], "fold": ["*"], "quant": quant})
    programs = pipeline.run(case, "cpu")
    assert programs.params == pipeline.run(case.plain, "cpu").params
    read = {ref for graph in programs.functions for node in graph.nodes for ref in node.inputs if ref[0] == "@"}
    assert {f"@{name}" for name in (*FOLDED, *(f"attention.{part}" for part in "qkv"))} <= read


def test_explain_names_the_passes() -> None:
    plan = pipeline.plan(CASES["vectors"], "cpu", "specs/tiny.yaml")
    (q,) = [row for row in explain(plan, "blocks.*.attention.q") if "extend" not in str(row.rejected)]
    assert q.passes[0][0] == "merge_linears" and "one product of 32 features" in q.passes[0][1]
    rows = [row for row in explain(plan, "blocks.*.mlp.down") if row.passes]
    assert {step for row in rows for step, _ in row.passes} == {"fold_scales"}
    assert rows[0].data()["passes"][0]["pass"] == "fold_scales"


def test_a_layer_of_one_reader_is_one_product() -> None:
    graph = next(g for g in pipeline.run(CASES["parallel layers"], "cpu").functions if g.name == "block.forward")
    products = [node for node in graph.nodes if isinstance(node.op, Linear)]
    assert [product.members for product in products if product.members]
