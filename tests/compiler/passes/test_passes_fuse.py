"""Fusion: the graphs of groups, forward and backward, word for word; what stays in the function; what is refused.

`SPECC_GOLDEN=1 pytest tests/compiler/passes/test_passes_fuse.py` writes graphs/*.txt anew; read the diff. That the
graphs compute the right thing is tested by value in tests/compiler/blocks.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from block_checks import check_spec
from tiny_models import ATTENTION, FUSE_MLP, MLP, tiny

from specc.compiler import pipeline
from specc.compiler.ops.region import Call, Fused
from specc.compiler.programs.programs import LoweringError, Programs
from specc.compiler.strict import Problem

HERE = Path(__file__).parent / "graphs"
RESIDUAL = {"blocks.*.mlp": ["up", "act", "down", "x"]}
HEAD = {"head": ["logits", "softcap"]}
LOSS = {"head": ["logits", "softcap", "loss"]}


def acts(act: Any, **options: Any) -> dict[str, Any]:
    return {"layers": (ATTENTION, {**MLP, "act": act, **options})}


CASES: dict[str, dict[str, Any]] = {
    "leaky_relu2": acts("leaky_relu(x, 0.5) ** 2"),
    "relu2": acts("relu(x) ** 2"),
    "gelu": acts("gelu(x)"),
    "gated": acts("silu(gate) * x"),
    "biased": {
        **acts("silu(gate) * x", bias=True, residual="learned"),
        "fuse": ({"blocks.*.mlp": ["up", "act", "down", "down.biased", "x"]},),
    },
    "named": acts({"expr": "tanh(x) * x", "name": "soft"}),
    "residual": {**acts("relu(x) ** 2", residual="learned"), "fuse": (RESIDUAL,)},
    "head": {"head": {"softcap": 30}, "fuse": (HEAD,)},
    "head_bf16": {"head": {"softcap": 30}, "fuse": (HEAD,), "vocab": 16, "targets": ("sm90",)},
    "loss": {"head": {"softcap": 30}, "fuse": (LOSS,)},
    "loss_bf16": {"fuse": ({"head": ["logits", "loss"]},), "vocab": 16, "targets": ("sm90",)},
}


@pytest.mark.parametrize("name", CASES)
def test_a_group_reads_exactly_so(name: str) -> None:
    target = CASES[name].get("targets", ("cpu",))[0]
    text = ""
    for group in pipeline.run(tiny(**CASES[name]), target).groups:
        backward = f"{group.backward}\n" if group.backward.outputs else ""
        text += f"saved: {', '.join(group.saved) or 'nothing'}\n{group.forward}\n{backward}"
    if os.environ.get("SPECC_GOLDEN") == "1":
        (HERE / f"{name}.txt").write_text(text)
    assert text == (HERE / f"{name}.txt").read_text()


def test_no_graph_text_is_left_over() -> None:
    assert sorted(path.stem for path in HERE.glob("*.txt")) == sorted(CASES)


@pytest.mark.parametrize(
    ("act", "saved"),
    [
        ("relu(x)", ("act",)),  # the sign of the output tells all
        ("relu(x) ** 2", ("act",)),  # 2 sqrt(output)
        ("exp(x)", ("act",)),
        ("3 * x", ("act",)),  # linear: the output is kept for down's weight gradient alone
        ("leaky_relu(x, 0.5) ** 2", ("act", "slope")),
        ("gelu(x)", ("act", "slope")),
        ("silu(gate) * x", ("act", "slope_x", "slope_gate")),
    ],
)
def test_the_backward_keeps_no_more_than_it_reads(act: str, saved: tuple[str, ...]) -> None:
    (group,) = pipeline.run(tiny(**acts(act)), "cpu").groups
    inputs = {name for name, _ in group.forward.inputs}
    assert tuple(name for name in group.saved if name not in inputs) == saved


def nodes(programs: Programs, graph: str) -> list[str]:
    return [node.name for node in next(g for g in programs.graphs if g.name == graph).nodes]


def test_the_function_keeps_the_last_members_name() -> None:
    programs = pipeline.run(tiny(**acts("silu(gate) * x")), "cpu")
    before = pipeline.run(tiny(**acts("silu(gate) * x")), "cpu", "lower")
    gone = [name for name in nodes(before, "block.forward") if name not in nodes(programs, "block.forward")]
    assert gone == ["mlp.up", "mlp.gate", "mlp.act"]  # the gate was not named; only act reads it
    (fused,) = [node for node in programs.function("block.forward").nodes if isinstance(node.op, Fused)]
    assert fused.name == "mlp.down"
    assert fused.inputs == ("mlp.h", "@mlp.up", "@mlp.gate", "@mlp.down")
    assert fused.type == before.function("block.forward").by_name["mlp.down"].type


def test_decoding_stays_unfused() -> None:
    programs = pipeline.run(tiny(head={"softcap": 3}, fuse=(FUSE_MLP, HEAD)), "cpu")
    plain = pipeline.run(tiny(head={"softcap": 3}, fuse=()), "cpu")
    for name in ("prefill", "decode", "block.extend"):
        assert nodes(programs, name) == nodes(plain, name)
    assert [group.name for group in programs.groups] == ["fused_mlp", "fused_head"]
    for name in ("train", "score"):
        assert "head.logits" not in nodes(programs, name)


def test_no_fusion_points_change_nothing() -> None:
    spec = tiny(fuse=())
    assert pipeline.run(spec, "cpu").graphs == pipeline.run(spec, "cpu", "lower").graphs


def test_functions_with_equal_parts_share_a_group() -> None:
    programs = pipeline.run(tiny(count=3, blocks={"skips": {"kind": "unet"}}), "cpu")
    assert [graph.name for graph in programs.functions if graph.name.endswith(".forward")] == [
        "block.forward",
        "skip_block.forward",
    ]
    assert [group.name for group in programs.groups] == ["fused_mlp"]


def test_two_groups_of_one_part_have_names_of_their_own() -> None:
    points = ({"blocks.*.mlp": ["up", "act"]}, {"blocks.*.mlp": ["down", "x"]})
    programs = pipeline.run(tiny(fuse=points), "cpu")
    names = [(group.name, group.forward.name, group.backward.name) for group in programs.groups]
    assert names == [(n, f"{n}.forward", f"{n}.backward") for n in ("fused_mlp", "fused_mlp_x")]


def problems(**words: Any) -> tuple[Problem, ...]:
    spec = tiny(**words)
    with pytest.raises(LoweringError) as caught:
        pipeline.plan(spec, spec.targets[0], "specs/tiny.yaml")
    return caught.value.problems


ERRORS: list[tuple[dict[str, list[str]], str, str]] = [
    ({"blocks.*.nope": ["up", "act"]}, "S302", "the fusion point `blocks.*.nope` matches no part of the model"),
    (
        {"blocks.0.mlp": ["up", "act"]},
        "S303",
        "the fusion point `blocks.0.mlp` leaves out blocks with the same code: blocks.1",
    ),
    ({"blocks.*.mlp": ["up", "nope"]}, "S302", "`blocks.*.mlp` has no node `nope`"),
    ({"blocks.*.mlp": ["up", "up"]}, "S304", "blocks.*.mlp: mlp.up is named twice"),
    (
        {"blocks.*.mlp": ["h", "up"]},
        "S304",
        "blocks.*.mlp: mlp.h cannot be fused: it computes rms_norm, which no kernel computes together with these nodes",
    ),
    (
        {"blocks.*.attention": ["q", "out"]},
        "S304",
        "blocks.*.attention: attention.q is also read by attention.q.heads, which is outside of the fusion point",
    ),
    (
        {"blocks.*.mlp": ["up", "x"]},
        "S304",
        "blocks.*.mlp: mlp.up is also read by mlp.act, which is outside of the fusion point",
    ),
    ({"head": ["logits", "cap", "loss"]}, "S302", "`head` has no node `cap`"),
    (
        {"head": ["logits", "loss"]},
        "S304",
        "head: head.logits is also read by head.softcap, which is outside of the fusion point",
    ),
    ({"head": ["logits", "softcap", "loss", "loss"]}, "S304", "head: head.loss is named twice"),
]


@pytest.mark.parametrize(("point", "code", "message"), ERRORS, ids=[message for *_, message in ERRORS])
def test_what_cannot_be_fused_says_why(point: dict[str, list[str]], code: str, message: str) -> None:
    (problem,) = problems(head={"softcap": 30}, fuse=(point,))
    assert (problem.code, problem.message, problem.path) == (code, message, ("fuse", 0, next(iter(point))))
    assert problem.hint


def test_a_loss_is_fused_in_training_and_in_scoring() -> None:
    """Two groups of one fusion point: only what is learned from comes with a gradient."""
    spec = tiny(fuse=({"head": ["logits", "loss"]},))
    before, after = pipeline.run(spec, "cpu", "lower"), pipeline.run(spec, "cpu")
    assert [(group.name, bool(group.backward.outputs)) for group in after.groups] == [
        ("fused_head", True),
        ("fused_head_score", False),
    ]
    for name, group in (("train", "fused_head"), ("score", "fused_head_score")):
        gone = [node for node in nodes(before, name) if node not in nodes(after, name)]
        assert gone == ["head.logits", "head.logits.f32"]  # the cast was not named; it is a part of the logits
        last = after.program(name).nodes[-1]
        assert isinstance(last.op, Fused) and last.op.group == group
        assert last.types == before.program(name).by_name["head.loss"].types
        assert last.inputs == ("norm", "@embed.token", "targets")
    for name in ("prefill", "decode"):
        assert nodes(before, name) == nodes(after, name)


def test_the_linear_layer_of_a_loss_joins_unnamed() -> None:
    spelled, short = (tiny(head={"softcap": 3}, fuse=(point,)) for point in (LOSS, {"head": ["softcap", "loss"]}))
    assert pipeline.run(spelled, "cpu").groups == pipeline.run(short, "cpu").groups


def test_all_bad_points_are_told_at_once() -> None:
    result = problems(fuse=({"blocks.*.mlp": ["h", "up"]}, {"nothing": ["a", "b"]}, FUSE_MLP))
    assert [(problem.code, problem.path[1]) for problem in result] == [("S304", 0), ("S302", 1)]


def test_a_node_is_in_one_group() -> None:
    (problem,) = problems(fuse=(FUSE_MLP, {"blocks.*.mlp": ["up", "act"]}))
    assert problem.message == "up of blocks.*.mlp is already in another fusion point"
    (problem,) = problems(fuse=(FUSE_MLP, {"blocks.*.mlp": ["upper", "act"]}))
    assert problem.message == "`blocks.*.mlp` has no node `upper`"
    once = {"blocks.*.attention": ["y"]}
    (problem,) = problems(fuse=(once, once))
    assert problem.message == "y of blocks.*.attention is already in another fusion point"


def test_a_number_that_differs_by_layer_is_no_tensor() -> None:
    layers = (ATTENTION, {**MLP, "residual": "1/(layer + 1)"})
    (problem,) = problems(layers=layers, fuse=(RESIDUAL,))
    assert problem.message == ("blocks.*.mlp: mlp.x reads the number mlp_residual, which differs between layers")


def test_epilogues_of_one_name_have_numbers() -> None:
    def layers(a: Any, b: Any) -> dict[str, Any]:
        both = ({**MLP, "name": "a", "act": a}, {**MLP, "name": "b", "act": b})
        return {"layers": (ATTENTION, *both), "fuse": ({"blocks.*.{a,b}": ["up", "act", "down"]},)}

    for a, b, expected in (
        ("relu(x)", "relu(2 * x)", "relu where relu_2 relu_2_grad"),
        ("relu(x)", {"expr": "relu(2 * x)", "name": "double"}, "relu where double double_grad"),
        # Gradients have other names if only their names are equal. Equal gradients have one name.
        ("exp(x)", "silu(x)", "exp mul silu silu_grad"),
        ("silu(x)", "exp(x)", "silu mul exp exp_grad"),
        ("silu(x)", "gelu(x)", "silu mul gelu mul"),
    ):
        choices = pipeline.plan(tiny(**layers(a, b)), "cpu", "s").choices
        names = [choice.rendered.function for choice in choices if choice.rendered.function]
        assert names == [f"{op}_{word}" for op, word in zip(("linear", "dgrad") * 2, expected.split(), strict=True)]


def test_kernels_of_several_shapes_keep_their_own_files() -> None:
    layers = (ATTENTION, *({**MLP, "name": name, "hidden": n} for name, n in (("a", 16), ("b", 24))))
    plan = pipeline.plan(tiny(layers=layers, fuse=({"blocks.*.{a,b}": ["up", "act", "down"]},)), "cpu", "s")
    called = [plan.called(choice) for choice in plan.choices if choice.rendered.function]
    assert called == [
        "linear_relu2__n16_k8",
        "dgrad_mul_sqrt__n16_k8",
        "linear_relu2__n24_k8",
        "dgrad_mul_sqrt__n24_k8",
    ]


def test_calls_are_as_before() -> None:
    before = pipeline.run(tiny(), "cpu", "lower").program("train")
    after = pipeline.run(tiny(), "cpu").program("train")
    assert [n for n in before.nodes if isinstance(n.op, Call)] == [n for n in after.nodes if isinstance(n.op, Call)]


LEARNED = {"a": {"of": "x", "shape": 8}, "b": {"of": "a", "shape": 8}}
LINEAR_OF_LINEAR: dict[str, tuple[dict[str, Any], list[str], tuple[str, ...]]] = {
    "alone": ({**MLP, "learn": LEARNED, "write": "x + y * b"}, ["b"], ("a", "b")),
    "before a product": ({**MLP, "learn": LEARNED, "read": "b"}, ["up", "act", "down"], ("b", "up", "act", "down")),
    "two before a product": (
        {**MLP, "learn": LEARNED, "read": "b"},
        ["b", "up", "act", "down"],
        ("a", "b", "up", "act", "down"),
    ),
}


@pytest.mark.parametrize("name", LINEAR_OF_LINEAR)
def test_a_linear_layer_that_only_feeds_another_joins_its_group(name: str, tmp_path: Path) -> None:
    """The result of such a layer, which the backward reads, and its weight have different names."""
    layer, point, members = LINEAR_OF_LINEAR[name]
    norm = {"kind": "rms", "places": ["after"]}
    spec = tiny((ATTENTION, layer), ({"blocks.*.mlp": point},), blocks={"norm": norm})
    (group,) = pipeline.run(spec, "cpu").groups
    assert group.members == tuple(f"mlp.{member}" for member in members)
    check_spec(spec, tmp_path, (True,))
