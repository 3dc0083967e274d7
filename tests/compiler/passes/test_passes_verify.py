"""The verifier finds what a broken pass would leave: each corruption is planted by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tiny_models import ATTENTION, MLP, tiny

from specc.compiler import pipeline
from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.region import Call
from specc.compiler.passes.verify import VerifyError, verify
from specc.compiler.programs.programs import Programs

LAYERS = (ATTENTION, {**MLP, "residual": "1/(layer + 1)"})


def programs() -> Programs:
    return pipeline.run(tiny(LAYERS), "cpu")


def corrupted(sound: Programs, part: str, change: Callable[[Graph], Graph]) -> Programs:
    """Programs with their first function, program or group, by the name of the field, changed."""
    if part == "groups":
        return replace(sound, groups=(replace(sound.groups[0], backward=change(sound.groups[0].backward)),))
    graphs = getattr(sound, part)
    return replace(sound, **{part: (change(graphs[0]), *graphs[1:])})


def with_node(name: str, change: Callable[[Node], Node]) -> Callable[[Graph], Graph]:
    def changed(graph: Graph) -> Graph:
        assert name in graph.by_name
        return replace(graph, nodes=tuple(change(node) if node.name == name else node for node in graph.nodes))

    return changed


def retyped(node: Node) -> Node:
    return replace(node, types=(node.type.with_shape("B", "T", 9),))


def called_with(**changes: object) -> Callable[[Node], Node]:
    def changed(node: Node) -> Node:
        assert isinstance(node.op, Call)
        return replace(node, op=replace(node.op, **changes))

    return changed


TWO = Pointwise(("x", "2 * x"), ("x",), ("y", "twice"))
CORRUPTIONS: dict[str, tuple[str, Callable[[Graph], Graph], str]] = {
    "a value that nothing makes": (
        "functions",
        with_node("attention.q", lambda n: replace(n, inputs=("nowhere", n.inputs[1]))),
        "block.forward: attention.q reads nowhere, which no earlier node computes",
    ),
    "a value that is made later": (
        "functions",
        lambda g: replace(g, nodes=(g.nodes[1], g.nodes[0], *g.nodes[2:])),
        "block.forward: attention.q reads attention.h, which no earlier node computes",
    ),
    "a node with a wrong type": (
        "functions",
        with_node("attention.h", retyped),
        "block.forward: attention.h is typed f32[B,T,9], but its op infers f32[B,T,8]",
    ),
    "a second output with a wrong type": (
        "programs",
        lambda g: replace(g, nodes=(*g.nodes, Node("two", TWO, ("norm",), (g.types["norm"], TensorType((3,), "f32"))))),
        "train: two:1 is typed f32[3], but its op infers f32[B,T,8]",
    ),
    "one name twice": (
        "functions",
        lambda g: replace(g, nodes=(g.nodes[0], *g.nodes)),
        "block.forward: attention.h is computed twice",
    ),
    "an output that nothing makes": (
        "functions",
        lambda g: replace(g, outputs=(("x", "gone"),)),
        "block.forward: it returns gone, which no node computes",
    ),
    "a parameter outside the table": (
        "programs",
        lambda g: replace(g, params=(*g.params, ("lost", TensorType((2,), "f32")))),
        "train: lost is not in the parameter table",
    ),
    "a parameter of another shape": (
        "programs",
        lambda g: replace(g, params=(("embed.token", TensorType((12, 8), "f32")),)),
        "train: parameter embed.token is f32[12,8], but [11, 8] in the table",
    ),
    "a call at a place without parameters": (
        "programs",
        with_node("blocks.1", called_with(at="blocks.7")),
        "train: blocks.1 calls for attention.q, which is not a parameter",
    ),
    "a call that binds no number": (
        "programs",
        with_node("blocks.1", called_with(scalars=())),
        "train: blocks.1 passes other numbers than block.forward reads",
    ),
    "a call with too much": (
        "programs",
        with_node("blocks.1", lambda n: replace(n, inputs=(*n.inputs, "ids"))),
        "train: blocks.1 passes 2 values; 1 are expected",
    ),
    "a call with another type": (
        "programs",
        with_node("blocks.1", lambda n: replace(n, inputs=("ids",))),
        "train: blocks.1 passes i64[B,T]; f32[B,T,8] is expected",
    ),
    "a call that gives back another type": (
        "programs",
        with_node("blocks.1", retyped),
        "train: blocks.1 returns f32[B,T,9]; f32[B,T,8] is expected",
    ),
    "a group with too little": (
        "functions",
        with_node("mlp.down", lambda n: replace(n, inputs=n.inputs[:-1])),
        "block.forward: mlp.down passes 2 values; 3 are expected",
    ),
    "a backward that reads nothing that is": (
        "groups",
        with_node("mlp.up.wgrad", lambda n: replace(n, inputs=("lost", "x"))),
        "fused_mlp.backward: mlp.up.wgrad reads lost, which no earlier node computes",
    ),
    "an epilogue over too few values": (
        "groups",
        with_node("mlp.down.dgrad", lambda n: replace(n, inputs=n.inputs[:2])),
        "fused_mlp.backward: mlp.down.dgrad passes 1 values to an epilogue of 2",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_planted_corruption_is_found(name: str) -> None:
    """Also where all other graphs are those of programs that were verified before."""
    part, change, message = CORRUPTIONS[name]
    sound = programs()
    wrong = corrupted(sound, part, change)
    for before in (None, sound):
        with pytest.raises(VerifyError) as caught:
            verify(wrong, "some pass", before)
        assert str(caught.value) == f"after some pass: {message}"


@pytest.mark.parametrize(("part", "message"), [("functions", "1 values; 2"), ("groups", "3 values; 4")])
def test_callers_of_a_changed_callee_are_checked(part: str, message: str) -> None:
    """The callee is well formed, and takes one more value than its callers pass."""

    def longer(graph: Graph) -> Graph:
        return replace(graph, inputs=(*graph.inputs, ("more", TensorType((3,), "f32"))))

    sound = programs()
    if part == "groups":
        wrong = replace(sound, groups=(replace(sound.groups[0], forward=longer(sound.groups[0].forward)),))
    else:
        wrong = corrupted(sound, part, longer)
    for before in (None, sound):
        with pytest.raises(VerifyError, match=f"passes {message} are expected"):
            verify(wrong, "some pass", before)


def test_programs_that_were_verified_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sound, seen = programs(), []
    monkeypatch.setattr("specc.compiler.passes.verify._problems", lambda _, graph, __: seen.append(graph.name) or ())
    verify(sound, "some pass", sound)
    assert seen == []
    changed = corrupted(sound, "functions", lambda graph: replace(graph, outputs=graph.outputs))
    verify(changed, "some pass", sound)
    callers = [graph.name for graph in sound.programs if any(isinstance(node.op, Call) for node in graph.nodes)]
    assert seen[0] == sound.functions[0].name and 1 < len(seen) <= 1 + len(sound.functions) + len(callers)
    assert len(seen) < len(sound.graphs) + 2 * len(sound.groups)
