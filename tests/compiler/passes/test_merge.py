"""Graphs that differ in parts become one: common nodes stand once, others are guarded, and what replaces a value shares
its variable."""

import itertools
import random

import pytest
import torch

from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import Graph
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.norm import RmsNorm
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.passes.merge import merge
from specc.compiler.programs import reference
from specc.compiler.render.body import Body
from specc.compiler.render.conditions import Fact

X = TensorType(("B", "T", 8), "f64")
W = TensorType((8, 8), "f64")


def add() -> Pointwise:
    return Pointwise(("a + b",), ("a", "b"))


def block(skip: bool = False, twice: bool = False, eps: float = 1e-6) -> Graph:
    """A block that may join a skip, and may run its product twice."""
    b = Builder("block")
    x = b.input("x", X)
    if skip:
        x = b.add("skip.x", add(), (x, b.input("skip", X)))
    h = b.add("mlp.h", RmsNorm(eps), (x,))
    h = b.add("mlp.up", Linear(), (h, b.param("w", W, None)))
    if twice:
        h = b.add("mlp.again", Linear(), (h, b.param("w", W, None)))
    return b.build({"x": b.add("mlp.x", add(), (x, h))})


def spelled(graphs: list[Graph], *facts: Fact) -> list[str]:
    merged = merge(graphs)
    body = Body(merged, lambda _, node, args: None, facts=facts)
    return [*body.lines, f"return {body.returned()}"]


def test_equal_graphs_are_one_without_a_guard() -> None:
    assert spelled([block(), block()]) == spelled([block()])


def test_a_part_that_one_has_is_guarded_and_shares_its_variable() -> None:
    lines = spelled([block(), block(skip=True)], Fact("skip", frozenset({1}), optional=True))
    assert lines == [
        "if skip is not None:",
        "    x = x + skip",
        "h = F.rms_norm(x, (8,), eps=1e-06)",
        "return x + F.linear(h, self.w)",
    ] or lines == [
        "if skip is not None:",
        "    x = x + skip",
        "return x + F.linear(F.rms_norm(x, (8,), eps=1e-06), self.w)",
    ]


def test_parts_that_exclude_each_other_are_the_branches_of_one_condition() -> None:
    lines = spelled([block(), block(eps=0.5, twice=True)], Fact("twice", frozenset({1})))
    assert lines[:2] == ["if not twice:", "    h = F.rms_norm(x, (8,), eps=1e-06)"] or "else" in "".join(lines)
    assert sum(line.startswith("if ") for line in lines) + sum(" if " in line for line in lines) >= 1


def test_nothing_that_tells_variants_apart_is_an_error() -> None:
    with pytest.raises(LookupError, match="no facts distinguish"):
        spelled([block(), block(skip=True)])


def test_a_value_that_is_still_read_keeps_its_name() -> None:
    """Where the stream before a skip is read behind it, what follows reads another variable."""
    graphs = []
    for skip in (False, True):
        b = Builder("block")
        x = b.input("x", X)
        y = b.add("skip.x", add(), (x, b.input("skip", X))) if skip else x
        graphs.append(b.build({"y": b.add("mlp.x", Pointwise(("a * b",), ("a", "b")), (x, y))}))
    lines = spelled(graphs, Fact("skip", frozenset({1}), optional=True))
    for i, given in enumerate(({}, {"skip": torch.ones(1)})):
        assert float(run(lines, {"x": torch.full((1,), 3.0), "skip": None, **given})) == (9.0, 12.0)[i]


def test_an_optional_argument_that_decides_a_condition_is_never_assigned() -> None:
    """Two variants read different inputs in one place, and differ in a node that a later condition guards."""
    graphs = []
    for name, eps in (("a", 1e-6), ("b", 0.5)):
        b = Builder("block")
        y = b.add("mlp.x", add(), (b.input("x", X), b.input(name, X)))
        graphs.append(b.build({"y": b.add("mlp.h", RmsNorm(eps), (y,))}))
    facts = [Fact(name, frozenset({i}), optional=True) for i, name in enumerate("ab")]
    lines = spelled(graphs, *facts)
    x, other = torch.tensor([3.0] * 8), torch.tensor([-2.0] * 8)
    for name, graph in zip("ab", graphs, strict=True):
        expected = torch.nn.functional.rms_norm(x + other, (8,), eps=graph.nodes[1].op.eps)  # type: ignore[attr-defined]
        torch.testing.assert_close(run(lines, {"x": x, "a": None, "b": None, name: other}), expected)


def run(lines: list[str], values: dict[str, object]) -> torch.Tensor:
    """The values that a rendered body returns."""
    space: dict[str, object] = {"torch": torch, "F": torch.nn.functional}
    exec("\n".join([f"def f({', '.join(values)}):", *(f"    {line}" for line in lines)]), space)
    return space["f"](**values)  # type: ignore[operator, no-any-return]


@pytest.mark.parametrize("seed", range(200))
def test_random_variants_compute_what_each_computed(seed: int) -> None:
    """Graphs made of one list of steps, of which each variant leaves some out or does them otherwise."""
    rng = random.Random(seed)
    steps = [(f"part{rng.randint(0, 2)}.n{i}", rng.randint(0, 3), rng.random(), rng.random()) for i in range(9)]
    flags = ("first", "second")
    of = {i: rng.choice([None, None, *flags]) for i in range(9)}
    other = {i: rng.random() < 0.4 for i in range(9)}
    variants = list(itertools.product((False, True), repeat=2))
    graphs = [_variant(steps, of, other, dict(zip(flags, on, strict=True))) for on in variants]
    facts = [Fact(flag, frozenset(v for v, on in enumerate(variants) if on[i])) for i, flag in enumerate(flags)]
    merged = merge(graphs)
    body = Body(merged, lambda _, node, args: None, facts=facts, reserved=frozenset(flags))
    lines = [*body.lines, f"return {body.returned()}"]
    generator = torch.Generator().manual_seed(seed)
    x, z = (torch.randn(2, 3, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    for on, graph in zip(variants, graphs, strict=True):
        result = run(lines, {"x": x, "z": z, **dict(zip(flags, on, strict=True))})
        held = {"x": x, "z": z}
        for node in graph.nodes:
            held |= zip(node.outputs, reference.node_value(node, [held[ref] for ref in node.inputs]), strict=True)
        torch.testing.assert_close(result, held[dict(graph.outputs)["y"]], rtol=1e-12, atol=1e-12)


def _variant(
    steps: list[tuple[str, int, float, float]], of: dict[int, str | None], other: dict[int, bool], on: dict[str, bool]
) -> Graph:
    b = Builder("g")
    values = [b.input("x", X), b.input("z", X)]
    for i, (name, kind, first, second) in enumerate(steps):
        flag = of[i]
        if flag is not None and not on[flag] and not other[i]:
            values.append(values[-1])  # left out: what follows reads what was there before
            continue
        a, c = values[int(first * len(values))], values[int(second * len(values))]
        text = "a - 2 * c" if flag is not None and on[flag] else ("a + c", "a * c", "tanh(a) - c", "max(a, c)")[kind]
        values.append(b.add(name, Pointwise((text,), ("a", "c")), (a, c)))
    total = values[-1]
    for i, value in enumerate(values[2:-1]):
        total = b.add(f"total.t{i}", add(), (total, value))
    return b.build({"y": total})
