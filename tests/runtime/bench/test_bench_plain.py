"""Baselines compute the same function as the kernels, and wrong outputs are errors."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MLP, tiny
from torch import Tensor

from specc.compiler import pipeline
from specc.compiler.plan.plan import Choice
from specc.compiler.programs import reference
from specc.compiler.spec.spec import Spec
from specc.runtime.bench import kernels
from specc.runtime.bench.groups import members_of
from specc.runtime.bench.kernels import work_of
from specc.runtime.bench.plain import bare_product, plain_nodes, plain_site
from specc.runtime.errors import RunFailure
from specc.runtime.model.load import instantiate
from specc.runtime.verify.judge import inputs_of, many
from specc.runtime.verify.random_inputs import Operands, sizes_of

CPU = torch.device("cpu")
ACTS = ("relu(x) ** 2", "leaky_relu(x, 0.5) ** 2", "gelu(x)", "silu(gate) * x")


def spec_of(act: str) -> Spec:
    return tiny(layers=({"kind": "attention", "heads": 2}, {**MLP, "act": act}))


@pytest.mark.parametrize("act", ACTS)
def test_plain_sites_are_the_references(act: str) -> None:
    spec = spec_of(act)
    plan = pipeline.plan(spec, "cpu", "")
    assert [choice for choice in plan.choices if choice.rendered.function]
    for choice in plan.choices:
        if not choice.rendered.function:
            continue
        inputs = [abs(value) for value in Operands(spec, CPU).of(choice.site.node.inputs, choice.site.inputs)]
        exact = reference.node_value(choice.site.node, [value.double() for value in inputs])  # type: ignore[union-attr]
        result = plain_site(choice.site)(*inputs)
        for have, want in zip(result if isinstance(result, tuple) else (result,), exact, strict=True):
            assert have.shape == want.shape and (have - want).norm() / want.norm() < 1e-5
        op = choice.site.node.op
        products = op.reference(*(value.double() for value in inputs[: op.arity]))  # type: ignore[union-attr]
        bare = bare_product(choice.site)
        assert bare is not None
        for have, want in zip(bare(*inputs), products if isinstance(products, tuple) else (products,), strict=True):
            assert (have - want).norm() / want.norm() < 1e-5


@pytest.mark.parametrize("act", ACTS)
def test_plain_groups_are_the_unfused_model(act: str, tmp_path: Path) -> None:
    """Against the same nodes run one by one by their references."""
    spec = spec_of(act)
    plan = pipeline.plan(spec, "cpu", "")
    plain = sys.modules[type(instantiate(spec, "cpu", tmp_path, fuse=False).model).__module__]
    (group,) = plan.programs.groups
    assert plan.programs.callers[group.name] == ("block.forward",)
    members = members_of(spec, plan.programs, "cpu", group)
    assert [node.name for node in members.nodes] == list(group.members)
    inputs = Operands(spec, CPU).of(members.inputs, [type for _, type in group.forward.inputs])
    values = dict(zip(members.inputs, (value.double() for value in inputs), strict=True))  # type: ignore[union-attr]
    for node in members.nodes:
        values |= zip(node.outputs, reference.node_value(node, [values[ref] for ref in node.inputs]), strict=True)
    result = plain_nodes(members.nodes, members.graph.types, members.inputs, members.output, plain)(*inputs)
    assert (result - values[members.output]).norm() / values[members.output].norm() < 1e-5


def test_costs_are_the_compilers() -> None:
    spec = spec_of("relu(x) ** 2")
    plan = pipeline.plan(spec, "cpu", "")
    up = next(choice for choice in plan.choices if choice.site.label == "blocks.*.mlp.up + act")
    cost = work_of(up, sizes_of(spec))
    rows = spec.train.micro_batch * spec.model.window
    assert (cost.flops, cost.bytes) == (2 * rows * 8 * 12, 4 * (rows * 8 + 8 * 12 + rows * 12))


def test_operands() -> None:
    from specc.compiler.ir.types import TensorType

    spec = spec_of("relu(x) ** 2")
    make = Operands(spec, CPU)
    rows = TensorType(("B", "T", 8), "f32")
    a, b, again, number = make.of(("x", "@w", "x", "$scale"), (rows, TensorType((12, 8), "bf16"), rows, rows))
    assert isinstance(a, Tensor) and isinstance(b, Tensor) and again is a and number == 0.5
    assert a.shape == (2, 12, 8) and a.std() == pytest.approx(1.0, abs=0.2)
    assert b.dtype == torch.bfloat16 and b.float().std() == pytest.approx(8**-0.5, rel=0.2)
    ids = make.tensor(TensorType(("B", "T"), "i64"))
    assert ids.dtype == torch.int64 and int(ids.min()) >= 0 and int(ids.max()) < spec.model.vocabulary
    assert torch.equal(Operands(spec, CPU).tensor(rows), a)  # the same numbers in every run


@pytest.fixture
def up(tmp_path: Path) -> tuple[Choice, list[Tensor], Callable[..., Tensor]]:
    """A product with what follows it, inputs, and its kernel."""
    spec = spec_of("relu(x) ** 2")
    plan = pipeline.plan(spec, "cpu", "")
    choice = next(choice for choice in plan.choices if choice.site.label == "blocks.*.mlp.up + act")
    module = sys.modules[type(instantiate(spec, "cpu", tmp_path).model).__module__]
    return choice, inputs_of(choice.site, sizes_of(spec), "cpu"), vars(module)[plan.called(choice)]


Changed = Callable[[Tensor], Tensor]


def changed(call: Callable[..., Any], change: Changed) -> Callable[..., Any]:
    """The kernel with its first output changed."""

    def wrong(*inputs: Tensor) -> tuple[Tensor, ...]:
        first, *others = many(call(*inputs))
        return change(first), *others

    return wrong


def unwritten(y: Tensor) -> Tensor:
    poisoned = torch.empty_like(y)
    poisoned[:, :-1] = y[:, :-1]
    return poisoned


def test_correct_outputs_pass(up: tuple[Choice, list[Tensor], Callable[..., Tensor]]) -> None:
    choice, inputs, kernel = up
    seen = kernels._accuracy(choice, inputs, kernel)
    assert 0 < seen.generated < 1e-6 and seen.exact == "float64"
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda y: 1.0001 * y, r"has [0-9.e+]+x the RMS error of plain Torch"),
        (unwritten, "has a wrong shape, NaN or infinity"),
        (lambda y: y[1:], "has a wrong shape, NaN or infinity"),
        (lambda y: torch.where(y == y.amax(), torch.inf, y), "has a wrong shape, NaN or infinity"),
    ],
)
def test_wrong_outputs_are_errors(
    wrong: Changed, words: str, up: tuple[Choice, list[Tensor], Callable[..., Tensor]]
) -> None:
    choice, inputs, kernel = up
    with pytest.raises(RunFailure, match=rf"blocks\.\*\.mlp\.up \+ act\): output 0 {words}"):
        kernels._accuracy(choice, inputs, changed(kernel, wrong))
