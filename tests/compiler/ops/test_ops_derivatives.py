"""Derivatives of ops, against autograd through their references."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from random_sites import DRAWS
from tiers import Trials, tiers
from torch import Tensor

from specc.compiler import ops
from specc.compiler.catalog import classes
from specc.compiler.ir.graph import output_ref
from specc.compiler.ir.op import Op, Scaled, Tape
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.dropout import Dropout
from specc.compiler.ops.fp8_codes import Fp8Codes, Fp8Product
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.loss import SoftmaxLoss
from specc.compiler.ops.norm_rope import HeadRotation, NormRope
from specc.compiler.ops.saved_attention import CausalAttention, ScoredAttention, SeenAttention
from specc.compiler.ops.shape import PadRows, PartHeads, SplitFeatures
from specc.runtime.verify.judge import inputs_of, many, upcast


class Computed(Tape):
    """A tape that computes what a rule adds, by the references."""

    def __init__(self, op: Op, inputs: Sequence[Tensor], grad: Tensor) -> None:
        self.types = [TensorType(tuple(value.shape), "f64") for value in inputs]
        self.held = {f"in{i}": value for i, value in enumerate(inputs)} | {"grad0": grad}
        self.held |= {f"out{i}": value for i, value in enumerate(many(op.reference(*inputs)))}

    def type(self, index: int) -> TensorType:
        return self.types[index]

    def input(self, index: int) -> str:
        return f"in{index}"

    def output(self, index: int) -> str:
        return f"out{index}"

    def grad(self, index: int = 0) -> str:
        return f"grad{index}"

    def add(self, suffix: str, op: Op, inputs: Sequence[str]) -> str:
        outputs = many(op.reference(*(self.held[ref] for ref in inputs)))
        self.held |= {output_ref(suffix, i): value for i, value in enumerate(outputs)}
        return output_ref(suffix, 0)

    def value(self, gradient: str | Scaled | None) -> Tensor | None:
        if isinstance(gradient, Scaled):
            return self.held[gradient.value] * self.held[gradient.by]
        return None if gradient is None else self.held[gradient]


def ruled(rng: random.Random) -> list[tuple[Op, tuple[tuple[int, ...], ...]]]:
    """Every op that states a rule, with shapes of its floating inputs."""
    rows, n, k = (rng.randint(1, 4), rng.randint(1, 5)), rng.randint(1, 6), rng.randint(1, 7)
    capped = SoftmaxLoss(n, "mean", "3 * tanh(z / 3)")
    return [
        (Linear(), ((*rows, k), (n, k))),
        (PadRows(n + rng.randint(0, 3)), ((n, k),)),
        (PartHeads(n), ((*rows, n * k),)),
        (SoftmaxLoss(n, "mean"), ((*rows, n),)),
        (capped, ((*rows, n + rng.randint(0, 3)),)),
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("which", range(5))
def test_derivatives_equal_autograd(which: int, seed: int) -> None:
    rng = random.Random(seed)
    op, shapes = ruled(rng)[which]
    generator = torch.Generator().manual_seed(seed)

    def random_value(size: Sequence[int]) -> Tensor:
        return torch.randn(tuple(size), generator=generator, dtype=torch.float64)

    inputs = [random_value(size).requires_grad_() for size in shapes]
    ids = []
    if isinstance(op, SoftmaxLoss):
        ids = [torch.randint(op.vocab, shapes[0][:-1], generator=generator)]
    output = many(op.reference(*inputs, *ids))[0]
    grad = random_value(output.shape)
    wanted = torch.autograd.grad(output, inputs, grad)
    tape = Computed(op, [value.detach() for value in (*inputs, *ids)], grad)
    gradients = op.derivative(tape)
    assert gradients is not None and len(gradients) == len(inputs) + len(ids)
    for gradient, want in zip(gradients, wanted, strict=False):
        torch.testing.assert_close(tape.value(gradient), want, rtol=1e-12, atol=1e-12)
    assert all(gradient is None for gradient in gradients[len(inputs) :])  # whole numbers have none


class ByRule(torch.autograd.Function):
    """The first output of the reference of an op, whose gradient is computed by the rule of the op."""

    @staticmethod
    def forward(ctx: Any, op: Op, *inputs: Tensor) -> Tensor:
        ctx.op = op
        ctx.save_for_backward(*inputs)
        return many(op.reference(*inputs))[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tape = Computed(ctx.op, ctx.saved_tensors, grad)
        gradients = ctx.op.derivative(tape)
        return (None, *(tape.value(gradient) for gradient in gradients))


DRAWN = (CausalAttention, SeenAttention, ScoredAttention, HeadRotation, SoftmaxLoss)


@tiers("C12", shapes_of_each_op=(3, 50))
def test_rules_equal_differences_of_the_reference(trials: Trials) -> None:
    """By gradcheck, along random directions."""
    rng = random.Random(12)
    for kind in DRAWN:
        done = 0
        while done < trials["shapes_of_each_op"]:
            site = DRAWS[kind](rng, "cpu", "f32")
            op, sizes = site.node.op, {name: rng.randint(1, 6) for name in ("B", "T", "S")}
            values = [upcast(value, torch.float64) for value in inputs_of(site, sizes, "cpu", done)]
            first = many(op.reference(*values))[0]
            gradients = op.derivative(Computed(op, values, torch.ones_like(first)))  # type: ignore[arg-type]
            if gradients is None:  # a gradient, or the loss of each token
                continue
            pairs = zip(values, gradients, strict=True)
            inputs = [value if slope is None else value.detach().requires_grad_() for value, slope in pairs]  # type: ignore[union-attr]
            torch.autograd.gradcheck(lambda *x, op=op: ByRule.apply(op, *x), inputs, fast_mode=True)  # type: ignore[no-untyped-call]
            done += 1


def test_ops_without_a_rule_say_so() -> None:
    stated = {
        name
        for name, kind in classes(ops, Op).items()
        if kind.derivative is not Op.derivative  # the pointwise language derives its own
    }
    # test_join_groups.py, test_norm_rope.py, test_attention.py, test_attention_seen.py, test_attention_scored.py,
    # test_counted_dropout.py, test_fp8_training.py
    elsewhere = {SplitFeatures.name, NormRope.name, CausalAttention.name, SeenAttention.name, ScoredAttention.name}
    elsewhere |= {Dropout.name, Fp8Codes.name, Fp8Product.name}
    assert stated == {op.name for op, _ in ruled(random.Random(0))} | elsewhere
