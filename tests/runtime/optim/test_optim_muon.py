"""Muon against float64 references and against torch's own."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.compiler.spec.optimizers.muon import MuonSpec
from specc.runtime.distributed.world import World
from specc.runtime.optim.muon import Muon
from specc.runtime.optim.schedule import Moment
from specc.runtime.optim.update_rule import UPDATE

A, B, C = 3.4445, -4.7750, 2.0315
SHAPES = [(8, 8), (16, 8), (8, 16), (31, 7), (7, 31), (1, 5), (64, 48)]


def reference(matrix: Tensor, steps: int) -> Tensor:
    """The iteration in float64, on singular values, where it is one polynomial of a number."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (matrix.double().norm() + 1e-7)
    for _ in range(steps):
        s = A * s + B * s**3 + C * s**5
    return u @ torch.diag(s) @ v


def muon(params: list[torch.nn.Parameter], **settings: Any) -> Muon:
    spec = MuonSpec.model_validate({"kind": "muon", "match": "*", "lr": 0.1, "weight_decay": 0.1, **settings})
    return Muon(spec, {str(i): param for i, param in enumerate(params)}, World.alone())


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("nesterov", [True, False])
def test_updates_are_the_rule(nesterov: bool) -> None:
    """Matrices of several shapes at once, changing momentum and rate, against one at a time in float64."""
    params = [torch.nn.Parameter(random(*shape, seed=i)) for i, shape in enumerate([*SHAPES, *SHAPES])]
    expected = [param.detach().double() for param in params]
    buffers = [torch.zeros_like(value) for value in expected]
    optimizer = muon(params, nesterov=nesterov)
    for step in range(4):
        momentum, lr = 0.8 + 0.05 * step, 0.1 / (step + 1)
        for i, param in enumerate(params):
            param.grad = random(*param.shape, seed=100 * step + i)
            grad = param.grad.double()
            buffers[i] = momentum * buffers[i] + grad
            update = grad + momentum * buffers[i] if nesterov else buffers[i]
            rows, columns = param.shape
            scale = math.sqrt(max(1, rows / columns))
            expected[i] = expected[i] * (1 - lr * 0.3) - lr * scale * reference(update, 5)
        optimizer.step(UPDATE, torch.tensor([lr, 0.3, momentum]).unbind())
    for param, want in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach().double(), want, rtol=0, atol=2e-4)
    momenta = optimizer.state()["momentum"]
    for i, buffer in enumerate(buffers):
        torch.testing.assert_close(momenta[str(i)].double(), buffer, rtol=0, atol=1e-5)


@pytest.mark.parametrize("second_moment", [None, 0.9])
def test_each_expert_is_updated_as_its_matrix_alone(second_moment: float | None) -> None:
    """Tall and wide matrices, whose gradients differ in size by orders of magnitude."""
    for rows, columns in ((24, 16), (16, 24)):
        start = random(3, rows, columns)
        together = torch.nn.Parameter(start.clone())
        alone = [torch.nn.Parameter(matrix.clone()) for matrix in start]
        settings = {"second_moment": second_moment, "equalize_rows": True}
        bank, single = muon([together], **settings), [muon([matrix], **settings) for matrix in alone]
        for step in range(3):
            together.grad = random(3, rows, columns, seed=step + 1) * torch.tensor([1e-3, 1.0, 1e3]).view(3, 1, 1)
            numbers = torch.tensor([0.1, 0.2, 0.9]).unbind()
            bank.step(UPDATE, numbers)
            for matrix, gradient, optimizer in zip(alone, together.grad, single, strict=True):
                matrix.grad = gradient.clone()
                optimizer.step(UPDATE, numbers)
        torch.testing.assert_close(together.detach(), torch.stack([matrix.detach() for matrix in alone]))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(32, 16), (16, 32), (24, 24)])
def test_agrees_with_torch(shape: tuple[int, int], nesterov: bool) -> None:
    """Torch scales momentum and gradient by 1 - momentum, which orthogonalizing cancels; it works in bf16."""
    ours, theirs = (torch.nn.Parameter(random(*shape)) for _ in range(2))
    start = ours.detach().clone()
    settings = {"lr": 0.05, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    update = muon([ours], **settings)
    oracle = torch.optim.Muon([theirs], ns_steps=5, adjust_lr_fn="original", **settings)  # type: ignore[arg-type]
    for step in range(6):
        ours.grad = random(*shape, seed=step + 1)
        theirs.grad = ours.grad.clone()
        update.step(UPDATE, [torch.tensor(number) for number in update.numbers(Moment(step=step))])
        oracle.step()
    moved = (theirs.detach() - start).norm()
    assert (ours.detach() - theirs.detach()).norm() < 0.02 * moved


def test_a_parameter_without_gradient_is_an_error() -> None:
    still, moves = torch.nn.Parameter(random(4, 4)), torch.nn.Parameter(random(4, 4))
    moves.grad = random(4, 4, seed=1)
    with pytest.raises(ValueError, match="gradient of every parameter"):
        muon([still, moves]).step(UPDATE, torch.zeros(3).unbind())


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4, 5)])
def test_only_matrices(shape: tuple[int, ...]) -> None:
    spec = muon([torch.nn.Parameter(random(4, 4))]).spec
    assert spec.refuses(shape) and not spec.refuses((4, 4))
