"""Dropout in fused groups: it joins the epilogues of products, and draws the same mask in both passes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import Graph
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.dropout import DRAW, Dropout, mask
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import pointwise
from specc.compiler.passes.group import build_group
from specc.compiler.programs import reference
from specc.compiler.programs.programs import Group

ACTS = ("relu(x) ** 2", "gelu(x)", "silu(gate) * x")
DRAWN = torch.tensor([0x1234567890ABCDE, 5, 3, 4])
P = 0.4


def grouped(act: str, last: bool) -> Group:
    """A group of an MLP whose activation is dropped, and with `last` its output too, before a residual sum."""
    b = Builder("block.forward")
    x = b.input("x", TensorType(("B", "T", 12), "f64"))
    stream = b.input("stream", TensorType(("B", "T", 12), "f64"))
    params = {name: TensorType((20, 12), "f64") for name in ("up", "gate")} | {"down": TensorType((12, 20), "f64")}
    params |= {"dropped_draw": DRAW, "out_draw": DRAW}
    b.types |= {f"@{name}": type for name, type in params.items()}
    values = {"x": b.add("mlp.up", Linear(), (x, "@up"))}
    if "gate" in act:
        values["gate"] = b.add("mlp.gate", Linear(), (x, "@gate"))
    dropped = b.add("mlp.dropped", Dropout(P, True), (pointwise(b, "mlp.act", act, **values), "@dropped_draw"))
    down = b.add("mlp.down", Linear(), (dropped, "@down"))
    if last:
        out = b.add("mlp.out", Dropout(P, True), (down, "@out_draw"))
        down = pointwise(b, "mlp.x", "x + branch", x=stream, branch=out)
    graph = replace(b.build({"y": down}), params=tuple(params.items()))
    return build_group(graph, "mlp", graph.nodes)


def run(graph: Graph, values: dict[str, Tensor]) -> dict[str, Tensor]:
    known = dict(values)
    for node in graph.nodes:
        results = reference.node_value(node, [known[ref] for ref in node.inputs])
        known |= zip(node.outputs, results, strict=True)
    return {label: known[ref] for label, ref in graph.outputs}


def plainly(act: str, last: bool, given: Sequence[Tensor]) -> Tensor:
    x, stream, up, gate, down = given
    a, g = x @ up.T, x @ gate.T
    values = {ACTS[0]: a.relu() ** 2, ACTS[1]: torch.nn.functional.gelu(a), ACTS[2]: torch.nn.functional.silu(g) * a}
    y = (values[act] * mask(a.shape, DRAWN, P) / (1 - P)) @ down.T
    return stream + y * mask(y.shape, DRAWN + 1, P) / (1 - P) if last else y


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_groups_give_the_reference_and_its_gradients(act: str, last: bool) -> None:
    generator = torch.Generator().manual_seed(len(act) + last)
    shapes = ((2, 5, 12), (2, 5, 12), (20, 12), (20, 12), (12, 20))
    given = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    d = torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)
    wanted = plainly(act, last, given)
    gradients = torch.autograd.grad(wanted, given, d, allow_unused=True)
    names = dict(zip(("x", "stream", "up", "gate", "down"), given, strict=True))
    group = grouped(act, last)
    for choice in (group, *group.others):
        values = {name: value.detach() for name, value in names.items()}
        values |= {"dropped_draw": DRAWN, "out_draw": DRAWN + 1}
        forward = run(choice.forward, values)
        torch.testing.assert_close(forward["y"], wanted.detach(), rtol=1e-12, atol=1e-12)
        saved = {name: values[name] if name in values else forward[name] for name in choice.saved}
        backward = run(choice.backward, {"d": d, **saved})
        for name, want in zip(names, gradients, strict=True):
            if want is not None and f"d_{name}" in backward:
                torch.testing.assert_close(backward[f"d_{name}"], want, rtol=1e-10, atol=1e-10)
        learned = {"x", "up", "down"} | ({"gate"} if "gate" in act else set()) | ({"stream"} if last else set())
        assert set(backward) == {f"d_{name}" for name in learned}
        left = [node for node in choice.forward.nodes if isinstance(node.op, Dropout)]
        assert not left  # every mask is in the epilogue of a product
        again = [node.name for node in choice.backward.nodes if isinstance(node.op, Dropout)]
        assert again == (["mlp.out.grad"] if last else [])  # two products read that gradient
        assert all(types.dtype not in ("bool", "u8") for _, types in choice.backward.inputs)
