"""Fusions on graphs built by hand: what they refuse and why, and that groups with them have autograd's gradients."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields

import pytest
import torch
from torch import Tensor

from specc.compiler import fusions
from specc.compiler.catalog import catalog
from specc.compiler.fusions.fusion import Fusion
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.loss import CrossEntropy, SoftmaxLoss
from specc.compiler.ops.norm import RmsNorm
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.shape import PadRows
from specc.compiler.passes.group import Unfusable, build_group
from specc.compiler.passes.join_epilogues import join_epilogues
from specc.compiler.programs import reference
from specc.compiler.programs.programs import Group
from specc.compiler.records import record

X, IDS, WIDE = TensorType(("B", "T", 6), "f32"), TensorType(("B", "T"), "i64"), TensorType(("B", "T", 11), "f32")


def cap(f: str = "3 * tanh(z / 3)") -> Pointwise:
    return Pointwise((f,), ("z",), dtype="f32")


class Head:
    """A graph under construction: a hidden layer that feeds a head of 11 tokens."""

    def __init__(self, vocab: int = 11) -> None:
        self.b = Builder("train", scope="head")
        self.x, self.targets = self.b.input("x", X), self.b.input("targets", IDS)
        self.w = self.b.param("w", TensorType((vocab, 6), "f32"), None)
        self.logits = self.b.add("logits", Linear(), (self.x, self.w))

    def loss(self, value: str, reduction: str = "mean", name: str = "loss") -> str:
        return self.b.add(name, CrossEntropy(reduction), (value, self.targets))  # type: ignore[arg-type]

    def graph(self, *outputs: str) -> Graph:
        return self.b.build({f"y{i}": ref for i, ref in enumerate(outputs)})


def group_of(graph: Graph, *names: str) -> Group:
    """The group of some nodes of `head`, by default all."""
    return build_group(graph, "head", [n for n in graph.nodes if not names or n.name.removeprefix("head.") in names])


def loss_of_two() -> Graph:
    h = Head()
    scale = h.b.input("scale", WIDE)
    both = h.b.add("softcap", Pointwise(("z * scale",), ("z", "scale"), dtype="f32"), (h.logits, scale))
    return h.graph(h.loss(both))


def shared_softcap() -> Graph:
    h = Head()
    capped = h.b.add("softcap", cap(), (h.logits,))
    return h.graph(h.loss(capped), h.b.add("entropy", RmsNorm(), (capped,)))


def returned_softcap() -> Graph:
    h = Head()
    capped = h.b.add("softcap", cap(), (h.logits,))
    return h.graph(h.loss(capped), capped)


def loss_then_more() -> Graph:
    h = Head()
    return h.graph(h.b.add("weighted", Pointwise(("2 * x",), ("x",)), (h.loss(h.logits),)))


def two_losses() -> Graph:
    h = Head()
    a = h.loss(h.logits)
    other = h.b.add("other", Linear(), (h.x, h.b.param("v", TensorType((9, 6), "f32"), None)))
    b = h.loss(other, name="loss2")
    return h.graph(h.b.add("sum", Pointwise(("a + b",), ("a", "b")), (a, b)))


def normed_logits() -> Graph:
    h = Head()
    return h.graph(h.loss(h.b.add("normed", RmsNorm(), (h.logits,))))


def flat() -> Graph:
    h = Head()
    return h.graph(h.loss(h.b.add("softcap", cap("0 * z + 2"), (h.logits,))))


def twice_capped() -> Graph:
    h = Head()
    return h.graph(h.loss(h.b.add("again", cap("z / 2"), (h.b.add("softcap", cap(), (h.logits,)),))))


LOSS = "head.loss cannot be fused: the fusion softmax_loss"
LINEAR = "the fusion softmax_loss takes the linear layer that computes the logits"
REFUSED: Mapping[str, tuple[Callable[[], Graph], tuple[str, ...], str]] = {
    "operands": (
        loss_of_two,
        (),
        f"{LOSS} takes a function of the logits alone; head.softcap reads z, scale",
    ),
    "softcap read twice": (
        shared_softcap,
        ("logits", "softcap", "loss"),
        "head.softcap is also read by head.entropy, which is outside of the fusion point",
    ),
    "softcap returned": (
        returned_softcap,
        (),
        "head.softcap is also read by a part of the model outside of the fusion point",
    ),
    "loss read on": (
        loss_then_more,
        (),
        f"{LOSS} takes head.loss as the last member, not head.weighted",
    ),
    "two losses": (two_losses, (), f"{LOSS} takes one cross_entropy, not 2"),
    "no linear layer": (
        twice_capped,
        ("again", "loss"),
        f"head.loss cannot be fused: {LINEAR}; head.again reads head.softcap, which is not a member",
    ),
    "two pointwise nodes": (
        twice_capped,
        (),
        f"{LOSS} takes logits from a linear layer; head.softcap is a pointwise",
    ),
    "loss alone": (
        normed_logits,
        ("loss",),
        f"head.loss cannot be fused: {LINEAR}; head.loss reads head.normed, which is not a member",
    ),
    "a norm between": (
        normed_logits,
        (),
        f"{LOSS} takes logits from a linear layer; head.normed is a rms_norm",
    ),
    "nothing to learn": (
        flat,
        (),
        f"{LOSS} cannot train: 0 * z + 2 has gradient 0 everywhere",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    make, members, message = REFUSED[name]
    with pytest.raises(Unfusable) as caught:
        group_of(make(), *members)
    assert str(caught.value) == message


def simple(vocab: int, f: str | None, reduction: str = "mean") -> Graph:
    h = Head(vocab)
    value = h.logits if f is None else h.b.add("softcap", cap(f), (h.logits,))
    return h.graph(h.loss(value, reduction))


@pytest.mark.parametrize(("vocab", "width"), [(8, 8), (11, 64), (64, 64), (65, 128), (1000, 1000), (50257, 50304)])
def test_rows_are_padded_to_lines_where_they_are_no_vectors(vocab: int, width: int) -> None:
    group = group_of(simple(vocab, None))
    assert group.forward.types["head.logits"].shape == ("B", "T", width)
    padded = [node for node in group.forward.nodes if isinstance(node.op, PadRows)]
    assert [node.type.shape for node in padded] == ([] if width == vocab else [(width, 6)])
    (loss,) = [node for node in group.forward.nodes if isinstance(node.op, SoftmaxLoss)]
    assert loss.op == SoftmaxLoss(vocab, "mean")
    weights = dict(group.backward.outputs)["d_w"]
    assert group.backward.types[weights].shape == (vocab, 6)


def test_scoring_has_no_backward_and_keeps_nothing() -> None:
    group = group_of(simple(11, "3 * tanh(z / 3)", "none"))
    assert (group.backward.nodes, group.backward.outputs, group.saved) == ((), (), ())
    assert [str(type) for type in group.forward.nodes[-1].types] == ["f32[B,T]"]
    assert group.name == "fused_head_train"  # after the program that it is in


def run(graph: Graph, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a graph by label, by the references of its ops."""
    held = dict(values)
    for node in graph.nodes:
        held |= zip(node.outputs, reference.node_value(node, [held[ref] for ref in node.inputs]), strict=True)
    return {label: held[ref] for label, ref in graph.outputs}


def deep() -> Graph:
    """The loss of a gated layer: the number that its gradient waits for passes through every kind of node."""
    h = Head()
    gate = h.b.add("gate", Linear(), (h.x, h.b.param("g", TensorType((6, 6), "f32"), None)))
    up = h.b.add("up", Linear(), (h.x, h.b.param("u", TensorType((6, 6), "f32"), None)))
    act = h.b.add("act", Pointwise(("silu(gate) * x",), ("x", "gate")), (up, gate))
    logits = h.b.add("deep", Linear(), (act, h.w))
    graph = h.graph(h.loss(h.b.add("softcap", cap(), (logits,))))
    return Graph(graph.name, graph.inputs, graph.params, graph.nodes[1:], graph.outputs)  # without the head's own


GRAPHS: Mapping[str, Callable[[], Graph]] = {
    "plain": lambda: simple(11, None),
    "capped": lambda: simple(11, "3 * tanh(z / 3)"),
    "without padding": lambda: simple(16, "0.5 * z"),
    "deep": deep,
}


@pytest.mark.parametrize("name", GRAPHS)
def test_groups_have_the_gradients_of_autograd(name: str) -> None:
    graph = GRAPHS[name]()
    group = group_of(graph)
    generator = torch.Generator().manual_seed(4)
    values: dict[str, Tensor] = {}
    for ref, type in (*graph.inputs, *((f"@{name}", type) for name, type in graph.params)):
        shape = [{"B": 2, "T": 3}.get(dim, dim) for dim in type.shape]  # type: ignore[call-overload]
        values[ref] = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    values["targets"] = torch.randint(8, (2, 3), generator=generator)
    d = torch.tensor(1.75, dtype=torch.float64)
    (wanted,) = run(graph, values).values()
    read = [ref for ref in values if ref != "targets"]
    gradients = dict(zip(read, torch.autograd.grad(wanted, [values[ref] for ref in read], d), strict=True))
    inside = {node.name for node in graph.nodes}
    external = list(dict.fromkeys(ref for node in graph.nodes for ref in node.inputs if ref not in inside))
    names = dict(zip((name for name, _ in group.forward.inputs), external, strict=True))
    with torch.no_grad():
        given = {short: values[ref].detach() for short, ref in names.items()}
        forward = run(group.forward, given)
        torch.testing.assert_close(next(iter(forward.values())), wanted, rtol=1e-12, atol=1e-12)
        backward = run(group.backward, {**given, **forward, "d": d})
    assert set(backward) == {f"d_{short}" for short in names if short != "targets"}
    for label, value in backward.items():
        torch.testing.assert_close(value, gradients[names[label.removeprefix("d_")]], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_gradient_of_the_loss_is_multiplied_into_what_leaves_the_group(name: str) -> None:
    """Not into the gradient of the logits, which is as large as they are."""
    backward = group_of(GRAPHS[name]()).backward
    readers = [node for node in backward.nodes if "d" in node.inputs]
    assert readers == [node for node in backward.nodes if node.name in dict(backward.outputs).values()]
    assert all("11" not in str(node.type) or node.type.shape == (11, 6) for node in readers)


def test_a_tail_that_reads_one_number_stays_apart() -> None:
    b = Builder("g")
    x, w, d = (b.input(*entry) for entry in (("x", X), ("w", TensorType((6, 6), "f32")), ("d", TensorType((), "f32"))))
    y = b.add("y", Linear(), (x, w))
    graph = b.build({"y": b.add("scaled", Pointwise(("d * y",), ("y", "d")), (y, d))})
    assert join_epilogues(graph) == graph
    column = b.input("c", TensorType((6,), "f32"))
    b.nodes.pop()
    del b.types["scaled"]
    joined = join_epilogues(b.build({"y": b.add("scaled", Pointwise(("c * y",), ("y", "c")), (y, column))}))
    assert [node.name for node in joined.nodes] == ["y"] and isinstance(joined.nodes[0], Node)


OPS = [(fusion, op) for fusion in catalog(fusions, Fusion).values() for op in fusion.reads]


@pytest.mark.parametrize(("fusion", "op"), OPS, ids=lambda value: value.__name__ if isinstance(value, type) else "")
def test_a_field_that_a_fusion_does_not_know_is_refused(fusion: Fusion, op: type[Op]) -> None:
    """An op gains a field: at its default the fusion goes on as before, with another value it refuses."""
    assert {f.name for f in fields(op)} >= fusion.reads[op]
    body = {"__annotations__": {"added": bool}, "added": False, "name": op.name}
    further = record(type("Further", (op,), body))
    needed = {f.name: () for f in fields(op) if f.default is MISSING}
    plain, changed = (Node("a.y", further(**needed, added=added), (), ()) for added in (False, True))
    assert fusion._unknown_field(plain) is None
    graph = Builder("train").build({})
    assert fusion.refusal(graph, (changed,)) == f"does not know the added of {op.name}; a.y has True"
