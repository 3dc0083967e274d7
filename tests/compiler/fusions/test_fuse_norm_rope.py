"""The fusion of norm, rotary embedding and gain: graphs word for word, names, what is refused and why."""

from typing import Any

import pytest
import torch
from tiny_models import ATTENTION, MLP, tiny

from specc.compiler import pipeline
from specc.compiler.build import model_files
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import Graph
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.norm import RmsNorm
from specc.compiler.ops.norm_rope import NormRope
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.positions import Rope
from specc.compiler.passes.group import Unfusable, build_group
from specc.compiler.programs.programs import LoweringError, Programs
from specc.compiler.spec.spec import Spec

Q = {"blocks.*.attention": ["q.norm", "q.rope", "q.gain"]}
K = {"blocks.*.attention": ["k.norm", "k.rope"]}
FULL = {**ATTENTION, "qk_norm": {"gain": 1.5}, "rope": {"dims": 2}}


def spec(*points: dict[str, list[str]], layers: Any = (FULL, MLP), **words: Any) -> Spec:
    return tiny(layers=layers, fuse=points, **words)


def block(programs: Programs) -> list[str]:
    return [str(node) for node in programs.function("block.forward").nodes if node.name.startswith("attention.")]


def test_a_norm_a_rope_and_a_gain_become_one_node() -> None:
    before = block(pipeline.run(spec(Q, K), "cpu", "lower"))
    assert [line for line in before if ".norm =" in line or ".rope =" in line or ".gain =" in line] == [
        "attention.q.norm = rms_norm(attention.q.heads) : f32[B,T,2,4]",
        "attention.q.rope = rope(attention.q.norm, cos, sin) : f32[B,T,2,4]",
        "attention.k.norm = rms_norm(attention.k.heads) : f32[B,T,2,4]",
        "attention.k.rope = rope(attention.k.norm, cos, sin) : f32[B,T,2,4]",
        "attention.q.gain = pointwise(attention.q.rope, @attention.q_gain)"
        "{outputs=('q * gain',), variables=('q', 'gain')} : f32[B,T,2,4]",
    ]
    after = pipeline.run(spec(Q, K), "cpu")
    assert [line.partition("{")[0] for line in block(after) if "fused" in line] == [
        "attention.k.rope = fused(attention.k.heads, cos, sin)",
        "attention.q.gain = fused(attention.q.heads, cos, sin, @attention.q_gain)",
    ]
    q, k = after.groups
    assert (q.name, q.scope, q.saved) == ("fused_q", "attention.q", ("x", "cos", "sin", "q_gain"))
    assert str(q.forward) == (
        "graph fused_q.forward(x: f32[B,T,2,4], cos: f32[T,1], sin: f32[T,1], q_gain: f32[2,1]) {\n"
        "  attention.q.rope = norm_rope(x, cos, sin, q_gain){eps=1e-06, gain=True} "
        "of (attention.q.rope, attention.q.norm, attention.q.gain) : f32[B,T,2,4]\n"
        "  return y=attention.q.rope\n"
        "}"
    )
    assert str(q.backward) == (
        "graph fused_q.backward(d: f32[B,T,2,4], x: f32[B,T,2,4], cos: f32[T,1], sin: f32[T,1], q_gain: f32[2,1]) {\n"
        "  attention.q.rope.grad = norm_rope_grad(d, x, cos, sin, q_gain){eps=1e-06, gain=True} "
        ": f32[B,T,2,4], f32[2,1]\n"
        "  return d_x=attention.q.rope.grad, d_q_gain=attention.q.rope.grad:1\n"
        "}"
    )
    assert (k.name, k.saved) == ("fused_k", ("x", "cos", "sin"))
    assert str(k.backward) == (
        "graph fused_k.backward(d: f32[B,T,2,4], x: f32[B,T,2,4], cos: f32[T,1], sin: f32[T,1]) {\n"
        "  attention.k.rope.grad = norm_rope_grad(d, x, cos, sin){eps=1e-06} : f32[B,T,2,4]\n"
        "  return d_x=attention.k.rope.grad\n"
        "}"
    )


def test_a_rope_alone_keeps_nothing_of_the_heads() -> None:
    plain = {**ATTENTION, "rope": {}}
    (group,) = pipeline.run(spec({"blocks.*.attention": ["q.rope"]}, layers=(plain, MLP)), "cpu").groups
    assert group.saved == ("cos", "sin")
    assert [str(node) for graph in (group.forward, group.backward) for node in graph.nodes] == [
        "attention.q.rope = norm_rope(x, cos, sin) : f32[B,T,2,4]",
        "attention.q.rope.grad = norm_rope_grad(d, cos, sin) : f32[B,T,2,4]",
    ]


@pytest.mark.parametrize(
    ("point", "op"),
    [
        (["q.norm", "q.rope", "q.gain"], "norm_rope{eps=1e-06, gain=True}"),
        (["q.norm", "q.rope"], "norm_rope{eps=1e-06}"),
        (["q.rope", "q.gain"], "norm_rope{gain=True}"),
        (["q.rope"], "norm_rope"),
    ],
)
def test_every_part_around_a_rope_may_be_missing(point: list[str], op: str) -> None:
    (group,) = pipeline.run(spec({"blocks.*.attention": point}), "cpu").groups
    (node,) = group.forward.nodes
    assert node.op.name + node.op.settings() == op
    (other,) = pipeline.run(spec({"blocks.*.attention.q": [name[2:] for name in point]}), "cpu").groups
    assert other == group  # the part may also be named by the pattern


def test_groups_are_named_after_the_part_that_holds_them() -> None:
    layers = ({**FULL, "name": "near"}, {**FULL, "name": "far", "kv_heads": 1}, MLP)
    programs = pipeline.run(spec({"blocks.*.*.{q,k}": ["norm", "rope"]}, layers=layers), "cpu")
    assert [(group.name, group.scope) for group in programs.groups] == [
        ("fused_q", "near.q"),
        ("fused_k", "near.k"),
        ("fused_far_q", "far.q"),
        ("fused_far_k", "far.k"),
    ]


def test_blocks_of_two_kinds_share_a_group() -> None:
    programs = pipeline.run(spec(Q, K, blocks={"skips": {"kind": "unet"}}, count=3), "cpu")
    assert [group.name for group in programs.groups] == ["fused_q", "fused_k"]


def test_nodes_that_share_a_kernel_are_told_together() -> None:
    plan = pipeline.plan(spec({"blocks.*.attention.{q,k}": ["norm", "rope"]}), "cpu", "specs/tiny.yaml")
    assert [(choice.site.label, choice.rendered.module) for choice in plan.listed] == [
        ("blocks.*.attention.q.rope + norm", "norm_rotary__h2_c4_r1"),
        ("blocks.*.attention.q.rope.grad", "norm_rotary_grad__h2_c4_r1"),
        ("blocks.*.attention.k.rope + norm", "norm_rotary__h2_c4_r1"),
        ("blocks.*.attention.k.rope.grad", "norm_rotary_grad__h2_c4_r1"),
    ]
    assert plan.choices[0].rendered == plan.choices[2].rendered
    text = model_files(plan)["norm_rotary__h2_c4_r1.py"]
    assert "# blocks.*.attention.{q,k}.rope + norm    x f32[B,T,2,4]" in text


def test_the_group_takes_its_inputs_as_they_are() -> None:
    text = model_files(pipeline.plan(spec(Q), "cpu", "specs/tiny.yaml"))["model.py"]
    assert "FusedQ.apply(" in text and "flatten(" not in text.partition("FusedQ.apply(")[2].partition("\n")[0]
    assert "        return d_x, None, None, d_q_gain\n" in text


MORE = "cannot be fused: the fusion norm_rope takes only a norm, a rope and a gain"
ALONE = "which no kernel computes together with these nodes"
ONE = "cannot be fused: the fusion norm_rope needs one rope, not 2"
REFUSED = [
    (["q.norm"], f"attention.q.norm cannot be fused: it computes rms_norm, {ALONE}"),
    (["q.heads", "q.norm", "q.rope", "q.gain"], f"attention.q.rope {MORE}; attention.q.heads is a member too"),
    (["q.gain", "k.rope", "y"], f"attention.k.rope {MORE}; attention.q.gain is a member too"),
    (["q.gain", "q.rope", "k.rope", "y"], f"attention.q.rope {ONE}"),
    (["q.gain"], "attention.q.gain is the only node, so there is nothing to fuse"),
]  # fmt: skip


@pytest.mark.parametrize(("point", "message"), REFUSED, ids=[" ".join(point) for point, _ in REFUSED])
def test_what_else_is_named_is_refused_with_a_reason(point: list[str], message: str) -> None:
    with pytest.raises(LoweringError) as caught:
        pipeline.run(spec({"blocks.*.attention": point}), "cpu")
    (problem,) = caught.value.problems
    assert (problem.code, problem.message) == ("S304", f"blocks.*.attention: {message}")


# --- chains that no block makes today ---

HEADS, ANGLE = TensorType(("B", "T", 4, 6), "bf16"), TensorType(("T", 3), "f32")


def chain(norm: tuple[Op, tuple[str, ...]] | None, gain: tuple[Op, tuple[str, ...]] | None) -> Graph:
    """A graph of a rope with something before it and something behind it; `w`, `g`, `h` and `d` are more inputs."""
    b = Builder("block.forward", "a")
    kinds = {"w": TensorType((6,), "bf16"), "g": TensorType((4, 1), "bf16"), "h": TensorType((6,), "bf16"), "d": HEADS}
    for name, type in {"x": HEADS, "cos": ANGLE, "sin": ANGLE, **kinds}.items():
        b.input(name, type)
    value = b.add("norm", norm[0], norm[1]) if norm else "x"
    value = b.add("rope", Rope(), (value, "cos", "sin"))
    value = b.add("gain", gain[0], tuple(value if ref == "rope" else ref for ref in gain[1])) if gain else value
    return b.build({"x": value})


def product(text: str, *inputs: str, dtype: str = "") -> tuple[Op, tuple[str, ...]]:
    return Pointwise((text,), ("q", "g")[: len(inputs)], dtype=dtype), inputs


def test_the_weight_of_a_norm_is_fused() -> None:
    graph = chain((RmsNorm(affine=True), ("x", "w")), product("q * g", "rope", "g"))
    (node,) = build_group(graph, "a", graph.nodes).forward.nodes
    assert node.inputs == ("x", "cos", "sin", "w", "g")
    assert node.op == NormRope(1e-6, True, weight="w")


def test_a_function_of_the_weight_is_fused_and_its_gradient_is_that_of_the_parameter() -> None:
    layers = ({**ATTENTION, "qk_norm": {"weight": "1 + w"}, "rope": {}}, MLP)
    (group,) = pipeline.run(spec({"blocks.*.attention": ["k.norm", "k.rope"]}, layers=layers), "cpu").groups
    assert [str(node).partition(" of ")[0] for graph in (group.forward, group.backward) for node in graph.nodes] == [
        "attention.k.rope = norm_rope(x, cos, sin, k_norm_weight){eps=1e-06, weight='1 + w'}",
        "attention.k.rope.grad = norm_rope_grad(d, x, cos, sin, k_norm_weight){eps=1e-06, weight='1 + w'} "
        ": f32[B,T,2,4], f32[4]",
    ]
    assert dict(group.backward.outputs) == {
        "d_k_norm_weight": "attention.k.rope.grad:1",
        "d_x": "attention.k.rope.grad",
    }


@pytest.mark.parametrize("gain", [None, product("q * g", "norm", "g")])
def test_a_norm_without_weights_may_follow_the_rope(gain: Any) -> None:
    b = Builder("block.forward", "a")
    for name, type in {"x": HEADS, "cos": ANGLE, "sin": ANGLE, "g": TensorType((4, 1), "bf16")}.items():
        b.input(name, type)
    value = b.add("norm", RmsNorm(0.5), (b.add("rope", Rope(), ("x", "cos", "sin")),))
    value = b.add("gain", gain[0], (value, "g")) if gain else value
    graph = b.build({"x": value})
    (node,) = build_group(graph, "a", graph.nodes).forward.nodes
    assert node.op == NormRope(0.5, gain is not None) and node.inputs == ("x", "cos", "sin", *["g"] * bool(gain))
    sample = [torch.randn(2, 5, 4, 6, dtype=torch.float64), *torch.randn(2, 5, 3, dtype=torch.float64)]
    sample[1:] = [sample[1].cos(), sample[1].sin()]
    learned = [torch.randn(4, 1, dtype=torch.float64)] if gain else []
    wanted = RmsNorm(0.5).reference(Rope().reference(*sample))
    wanted = wanted * learned[0] if learned else wanted
    torch.testing.assert_close(node.op.reference(*sample, *learned), wanted, rtol=1e-13, atol=1e-13)


def test_a_norm_does_not_follow_a_rope_that_scales() -> None:
    """With a magnitude, as YaRN has it, the mean square after the rope is not that of the channels before it."""
    b = Builder("block.forward", "a")
    for name, type in {"x": HEADS, "cos": ANGLE, "sin": ANGLE}.items():
        b.input(name, type)
    b.add("norm", RmsNorm(0.5), (b.add("rope", Rope(scales=True), ("x", "cos", "sin")),))
    graph = b.build({"x": "a.norm"})
    with pytest.raises(Unfusable, match="only before a rope that changes lengths"):
        build_group(graph, "a", graph.nodes)


def test_a_weight_of_two_parameters_is_refused() -> None:
    b = Builder("block.forward", "a")
    kinds = {"v": TensorType((6,), "bf16"), "w": TensorType((6,), "bf16")}
    for name, type in {"x": HEADS, "cos": ANGLE, "sin": ANGLE, **kinds}.items():
        b.input(name, type)
    weight = b.add("norm.weight", Pointwise(("v * w",), ("v", "w")), ("v", "w"))
    b.add("rope", Rope(), (b.add("norm", RmsNorm(affine=True), ("x", weight)), "cos", "sin"))
    graph = b.build({"x": "a.rope"})
    with pytest.raises(Unfusable) as caught:
        build_group(graph, "a", graph.nodes)
    reason = "takes a weight that is a function of one parameter; a.norm.weight is not such a function"
    assert str(caught.value) == f"a.rope cannot be fused: the fusion norm_rope {reason}"


GOOD = [(None, product("q * g", "rope", "g")), ((RmsNorm(0.5), ("x",)), product("g * q", "rope", "g")),
        (None, product("q * g", "g", "rope"))]  # fmt: skip


@pytest.mark.parametrize("parts", GOOD)
def test_a_product_may_be_written_either_way(parts: Any) -> None:
    graph = chain(*parts)
    group = build_group(graph, "a", graph.nodes)
    (node,) = group.forward.nodes
    assert node.op.name == "norm_rope"
    assert node.inputs == ("x", "cos", "sin", "g")


BEFORE = "the fusion norm_rope takes only an rms_norm before the rope; a.norm is a pointwise"
NUMBER = "the fusion norm_rope takes a gain of shape (4, 1), one number per head"
BEHIND = "the fusion norm_rope takes only a product after the rope; a.gain is not a product"
AFTER = "the fusion norm_rope takes a norm with a weight only before the rope; a.gain is after the rope"
BAD = [
    (None, (RmsNorm(affine=True), ("rope", "w")), AFTER),
    (product("q * g", "x", "g"), None, BEFORE),
    (None, product("q + g", "rope", "g"), BEHIND),
    (None, product("q * g * g", "rope", "g"), BEHIND),
    (None, product("2 * q", "rope"), BEHIND),
    (None, product("q * q", "rope"), BEHIND),
    (None, product("q * g", "rope", "g", dtype="f32"), BEHIND),
    (None, product("q * g", "rope", "h"), f"{NUMBER}; h is bf16[6]"),
    (None, product("q * g", "rope", "d"), f"{NUMBER}; d is bf16[B,T,4,6]"),
]  # fmt: skip


@pytest.mark.parametrize(("norm", "gain", "reason"), BAD, ids=[reason for *_, reason in BAD])
def test_chains_of_another_kind_are_refused(norm: Any, gain: Any, reason: str) -> None:
    graph = chain(norm, gain)
    with pytest.raises(Unfusable) as caught:
        build_group(graph, "a", graph.nodes)
    assert str(caught.value) == f"a.rope cannot be fused: {reason}"
