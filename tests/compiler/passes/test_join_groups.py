"""Groups of several results: groups that read parts of a merged product, whose kernels write one gradient."""

import importlib
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from block_checks import NORM_ROPE, check_spec
from tiny_models import FUSE_MLP, float64, pair, spec_data, spec_of
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from specc.compiler import pipeline
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.norm_rope import HeadRotation, NormRopeGradInto
from specc.compiler.ops.shape import JoinFeatures, NewFeatures, SplitFeatures, WriteFeatures
from specc.compiler.programs.programs import Group
from specc.compiler.report.explain import explain
from specc.compiler.spec.spec import Spec
from specc.runtime.model.load import instantiate

VECTOR = {"learn": {"residual": {"init": 1}}, "write": "x + residual * y"}
ATTENTION: dict[str, Any] = {"kind": "attention", "heads": 4, "kv_heads": 2, "rope": {"base": 100}, "qk_norm": {}}
MLP = {"kind": "mlp", "hidden": 24, "act": "relu(x) ** 2", **VECTOR}
GATED = {**MLP, "act": "silu(gate) * x"}
GAIN = {"qk_norm": {"gain": 1.5}}
PLAIN = ({"blocks.*.attention": ["q.norm", "q.rope"]}, NORM_ROPE[1])
WHOLE = ({"blocks.*.attention": ["y"]},)


def spec(
    *layers: Mapping[str, Any],
    fuse: tuple[Mapping[str, Any], ...] = PLAIN,
    merged: bool = True,
    dim: int = 32,
    targets: tuple[str, ...] = ("cpu",),
    **blocks: Any,
) -> Spec:
    data = spec_data(layers, fuse, targets, dim=dim, blocks=blocks)
    return spec_of({**data, "merge": ["*.attention.{q,k,v}"] if merged else []})


def group_of(case: Spec, target: str = "cpu") -> Group:
    """The group of several results."""
    groups = [group for group in pipeline.run(case, target).groups if group.results > 1]
    (group,) = groups
    return group


CASES: dict[str, Spec] = {
    "grouped queries": spec({**ATTENTION, **VECTOR}, MLP),
    "gain": spec({**ATTENTION, **GAIN}, GATED, fuse=(*NORM_ROPE, FUSE_MLP)),
    "a group of attention": spec({**ATTENTION, **GAIN}, MLP, fuse=(*WHOLE, *NORM_ROPE, FUSE_MLP)),
    "norms with a weight": spec({**ATTENTION, "qk_norm": {"weight": "1 + w"}}, MLP),
    "rotation alone": spec(
        {"kind": "attention", "heads": 4, "kv_heads": 2, "rope": {"base": 100, "dims": 4}},
        MLP,
        fuse=({"blocks.*.attention": ["q.rope"]}, {"blocks.*.attention": ["k.rope"]}),
    ),
    "exclusive attention": spec({**ATTENTION, **GAIN, "exclude": {}}, MLP, fuse=(*WHOLE, *NORM_ROPE)),
    "one group": spec({**ATTENTION, **GAIN}, MLP, fuse=NORM_ROPE[:1]),
    "recurrences": spec({**ATTENTION, **VECTOR}, MLP, order="0..1 0..1"),
    "values of another block": spec(
        {**ATTENTION, **GAIN},
        MLP,
        fuse=NORM_ROPE,
        changes=[{"where": "layer == 1", "attention": {"v": "0.5 * v + value(0)"}}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_gradients_causality_caches_and_traces(name: str, tmp_path: Path) -> None:
    assert len([group for group in pipeline.run(CASES[name], "cpu").groups if group.results > 1]) == 1
    check_spec(CASES[name], tmp_path, (True,))


@pytest.mark.parametrize("seed", range(6))
def test_random_specs_have_the_gradients_of_separate_layers(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    heads = draw.choice((2, 4))
    gain = draw.choice((True, False))
    attention = {
        "kind": "attention",
        "heads": heads,
        "kv_heads": draw.choice((1, 2)),
        "head_dim": 8 * draw.randint(1, 2),
        "qk_norm": {"gain": 1.5} if gain else {},
        "rope": {"base": 100, "dims": draw.choice((4, 8))},
        **draw.choice(({}, VECTOR, {"exclude": {}})),
    }
    fuse = (*(NORM_ROPE if gain else PLAIN), *draw.choice(((), WHOLE, (FUSE_MLP,))))
    layers = spec(attention, draw.choice((MLP, GATED)), fuse=fuse, dim=24)
    results = []
    for merged in (True, False):
        case = layers if merged else layers.model_copy(update={"merge": ()})
        assert any(group.results > 1 for group in pipeline.run(case, "cpu").groups) == merged
        with float64():
            sample = pair(case, tmp_path / str(merged))
            loss = sample.model(*sample.batch())
            loss.backward()
        results.append((loss, {name: value.grad for name, value in sample.model.named_parameters()}))
    (loss, gradients), (want, expected) = results
    torch.testing.assert_close(loss, want, rtol=1e-11, atol=1e-11)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-10, msg=name)


def test_kernels_write_and_nothing_is_concatenated() -> None:
    group = group_of(CASES["gain"])
    ops = [node.op for node in group.backward.nodes]
    assert sum(isinstance(op, NormRopeGradInto) for op in ops) == 2
    assert sum(isinstance(op, WriteFeatures) for op in ops) == 1
    assert not any(isinstance(op, JoinFeatures) for op in ops)
    assert [name for name, _ in group.backward.inputs[:3]] == ["d_q", "d_k", "d_v"]
    assert group.saved == ("x", "cos", "sin", "q_gain"), "views of the product are made again"


def test_the_nodes_of_the_forward_are_those_of_separate_groups() -> None:
    """So their measured kernels are found."""
    joined, separate = (
        {
            choice.site.label: (choice.site.node.op, choice.site.inputs, choice.kernel)
            for choice in pipeline.plan(case, "sm90", "tiny").choices
            if isinstance(choice.site.node.op, HeadRotation) and "grad" not in choice.site.label
        }
        for merged in (True, False)
        for case in [spec({**ATTENTION, **GAIN}, MLP, fuse=NORM_ROPE, merged=merged, targets=("sm90",))]
    )
    assert joined == separate and len(joined) == 2


def test_groups_without_callers_are_removed() -> None:
    programs = pipeline.run(CASES["gain"], "cpu")
    assert all(programs.callers[group.name] for group in programs.groups)
    assert not {"fused_q", "fused_k"} & {group.name for group in programs.groups}


def test_a_spec_that_merges_nothing_keeps_its_groups() -> None:
    programs = pipeline.run(CASES["gain"].model_copy(update={"merge": ()}), "cpu")
    assert {"fused_q", "fused_k"} <= {group.name for group in programs.groups}
    assert all(group.results == 1 for group in programs.groups)


@pytest.mark.parametrize("case", [spec(ATTENTION, MLP, fuse=()), spec({**ATTENTION, "bias": True}, MLP)])
def test_gradients_that_no_kernel_can_write_are_concatenated(case: Spec) -> None:
    """There is no group, or a bias is added between the product and the group."""
    programs = pipeline.run(case, "cpu")
    assert not any(group.results > 1 for group in programs.groups)
    assert not any("kernels write" in rewriting.text for rewriting in programs.rewritings)


def test_explain_names_the_product_and_its_gradients() -> None:
    plan = pipeline.plan(CASES["gain"], "cpu", "specs/tiny.yaml")
    rows = [row for row in explain(plan, "blocks.*.attention.k") if row.passes]
    assert any("kernels write the gradients of q, k into one tensor" in text for row in rows for _, text in row.passes)


def test_the_gradient_of_parts_is_their_concatenation() -> None:
    """`derivative` of a split reads the gradients of all its parts."""
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    op = SplitFeatures((2, 6), ("a", "b"))
    parts = op.reference(x)
    gradients = [torch.randn(2, 3, width, dtype=torch.float64) for width in (2, 6)]
    (want,) = torch.autograd.grad(parts, x, gradients)  # type: ignore[arg-type]
    torch.testing.assert_close(JoinFeatures(2).reference(*gradients), want)
    new = NewFeatures(8)
    (type,) = new.infer([TensorType(("B", "T", 2, 4), "bf16")])
    assert type == TensorType(("B", "T", 8), "bf16")
    like = torch.empty(2, 3, 2, 4, dtype=torch.bfloat16)
    value = eval(new.torch(["like"], [type]), {"like": like})
    assert value.shape == (2, 3, 8) and value.dtype == torch.bfloat16


# --- compiled code ---


def compiled_model(case: Spec, folder: Path) -> Any:
    """The model of sm90, whose ops of Triton kernels run the functions of the CPU's files."""
    loaded, plain = (instantiate(case, target, folder / target) for target in ("sm90", "cpu"))
    packages = [sys.modules[type(each.model).__module__].__package__ for each in (loaded, plain)]
    for choice in pipeline.plan(case, "sm90", "tiny").choices:
        if isinstance(choice.site.node.op, HeadRotation):
            names = choice.rendered.module, choice.rendered.function
            kernel, function = (importlib.import_module(f"{package}.{names[0]}") for package in packages)
            compute = getattr(function, names[1])
            if not isinstance(choice.site.node.op, NormRopeGradInto):
                getattr(kernel, names[1]).register_kernel("cpu")(compute)
                continue

            def write(*inputs: Tensor, compute: Any = compute) -> Any:
                """Returns the results but the tensor that it has written to."""
                results = compute(*inputs)
                return results[1] if isinstance(results, tuple) else None

            kernel.write.register_kernel("cpu")(write)
    return loaded.model


@pytest.mark.parametrize("values", ["attention", "a sum"])
def test_compiled_code_writes_one_gradient_without_copies(values: str, tmp_path: Path) -> None:
    """Torch's compiler takes the whole program as one graph. Kernels get parts of the gradient of the product, and its
    own code writes the part of v there."""
    more = {"exclude": {}} if values == "a sum" else {}
    case = spec({**ATTENTION, **GAIN, **more}, MLP, fuse=NORM_ROPE, targets=("sm90", "cpu"), count=1)
    torch.manual_seed(0)
    model = compiled_model(case, tmp_path / f"joined_{len(more)}").float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ids = torch.randint(11, (2, 12))
    gradients = []
    codes: list[str] = []
    for compiled in (False, True):
        torch.compiler.reset()
        model.zero_grad()
        if compiled:
            function = torch.compile(model, fullgraph=True)
            _, codes = run_and_get_code(lambda function=function: function(ids, ids.roll(-1, 1)).backward())
        else:
            model(ids, ids.roll(-1, 1)).backward()
        gradients.append({name: value.grad.clone() for name, value in model.named_parameters()})
    for name, value in gradients[0].items():
        assert value.abs().max() > 0
        torch.testing.assert_close(gradients[1][name], value, rtol=2e-3, atol=1e-5, msg=name)
    backward = codes[-1]
    joined = [line for line in backward.splitlines() if "empty_strided_cpu((2, 12, 64)" in line]
    assert len(joined) == 1, "the gradient of the product is one tensor"
    name = joined[0].split("=")[0].strip()
    writes = [line for line in backward.splitlines() if "grad_into" in line and ".default(" in line]
    assert len(writes) == 2 and all(name in line for line in writes)
