"""Master weights and their average against float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy import Toy

from specc.compiler.spec.train import EmaSpec
from specc.runtime.optim.average import Average
from specc.runtime.optim.masters import Masters
from specc.runtime.optim.schedule import Moment

NAMES = ("embed", "blocks.up", "blocks.down", "blocks.gain")
MIXED = {
    "embed": torch.bfloat16,
    "blocks.up": torch.bfloat16,
    "blocks.down": torch.bfloat16,
    "blocks.gain": torch.float32,
}
PLAIN = dict.fromkeys(NAMES, torch.float32)


def batch(seed: int) -> Tensor:
    return torch.randint(257, (2, 3, 8), generator=torch.Generator().manual_seed(seed))


def test_on_f32_the_masters_are_the_parameters() -> None:
    model = Toy()
    parameters = dict(model.named_parameters())
    masters = Masters(model, PLAIN)
    assert all(masters.tensors[name] is parameters[name] for name in NAMES)


def test_bf16_copies_are_rounded_masters() -> None:
    model = Toy()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    masters = Masters(model, MIXED)
    for name, param in model.named_parameters():
        assert param.dtype == MIXED[name]
        assert torch.equal(masters.tensors[name].detach(), before[name])
        assert torch.equal(param.detach(), before[name].to(MIXED[name]))


@pytest.mark.parametrize("dtypes", [PLAIN, MIXED])
def test_gradients_are_the_f32_mean_of_micro_batches(dtypes: dict[str, torch.dtype]) -> None:
    """Five micro-batches: their gradients, as the model gives them, averaged in float64."""
    model = Toy(noise=0.0)
    masters = Masters(model, dtypes)
    expected = {name: torch.zeros(tuple(param.shape), dtype=torch.float64) for name, param in model.named_parameters()}
    for seed in range(5):
        lone = Toy(noise=0.0)
        Masters(lone, dtypes)
        ids, targets = batch(seed)
        lone(ids, targets).backward()
        for name, param in lone.named_parameters():
            assert param.grad is not None
            expected[name] += param.grad.double() / 5
    for master in masters.tensors.values():
        assert master.grad is not None
        master.grad.fill_(float("nan"))  # what a step before has left must not count
    masters.clear()
    for seed in range(5):
        ids, targets = batch(seed)
        model(ids, targets).backward()
        masters.collect()
    norm = masters.finish(5, clip_norm=None)
    for (name, master), grad in zip(masters.tensors.items(), masters.gradients, strict=True):
        assert master.grad is grad and grad.dtype == torch.float32
        torch.testing.assert_close(grad.double(), expected[name], rtol=1e-5, atol=1e-7)
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert float(norm) == pytest.approx(float(total), rel=1e-5)


@pytest.mark.parametrize("dtypes", [PLAIN, MIXED])
def test_a_parameter_without_a_gradient_adds_nothing(dtypes: dict[str, torch.dtype]) -> None:
    """`gain` and `up` take part in every other pass only."""
    model = Toy(noise=0.0)
    masters = Masters(model, dtypes)
    params = dict(model.named_parameters())
    expected = {name: torch.zeros(tuple(param.shape), dtype=torch.float64) for name, param in params.items()}
    masters.clear()
    for number in range(4):
        for name in NAMES if number % 2 else ("embed", "blocks.down"):
            grad = torch.randn(tuple(params[name].shape), generator=torch.Generator().manual_seed(number))
            params[name].grad = grad.to(dtypes[name])
            expected[name] += grad.to(dtypes[name]).double()
        masters.collect()
        assert all(param.grad is None for param in params.values())
    masters.collect()  # a pass that gives no gradient at all
    masters.finish(1, None)
    for name, grad in zip(NAMES, masters.gradients, strict=True):
        torch.testing.assert_close(grad.double(), expected[name], rtol=1e-6, atol=1e-6)


class Counted(TorchDispatchMode):
    """Counts the operators that run, each of which is at least one kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_collecting_takes_few_operators_for_any_number_of_parameters(dtype: torch.dtype, most: int) -> None:
    shapes = [(1 + number % 7, 3) if number % 3 else (number + 1,) for number in range(60)]
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    masters = Masters(model, {name: dtype for name, _ in model.named_parameters()})
    masters.clear()
    for param in model:
        param.grad = torch.ones_like(param)
    with Counted() as counted:
        masters.collect()
    assert 1 <= counted.count <= most
    with Counted() as counted:
        masters.clear()
    assert counted.count == 1
    for param in model:
        param.grad = torch.ones_like(param)
    masters.collect()
    assert all(bool((grad == 1).all()) for grad in masters.gradients)


def test_what_a_step_adds_up_is_one_buffer() -> None:
    """So that processes add theirs in one call; what lies between the gradients stays 0."""
    masters = Masters(Toy(), MIXED)
    sums = masters.sums
    assert all(grad.untyped_storage().data_ptr() == sums.untyped_storage().data_ptr() for grad in masters.gradients)
    assert all(grad.data_ptr() % 256 == sums.data_ptr() % 256 for grad in masters.gradients)
    for grad in masters.gradients:
        grad.fill_(2.0)
    masters.loss.fill_(8.0)
    norm = masters.finish(4, clip_norm=None)
    count = sum(grad.numel() for grad in masters.gradients)
    assert float(masters.loss) == 2.0 and float(norm) == pytest.approx(0.5 * math.sqrt(count))
    assert float(sums.sum()) == pytest.approx(0.5 * count + 2.0)
    assert float(masters.finish(1, clip_norm=1.0)) > 1.0 and float(masters.loss) == 2.0  # clipping spares the loss


@pytest.mark.parametrize(("limit", "factor"), [(1.0, 0.2), (5.0, 1.0), (100.0, 1.0)])
def test_clipping_is_by_the_global_norm(limit: float, factor: float) -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(1, 1))})
    masters = Masters(model, dict.fromkeys(dict(model.named_parameters()), torch.float32))
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    for grad, value in zip(masters.gradients, gradients, strict=True):
        grad.copy_(value)
    assert float(masters.finish(1, limit)) == pytest.approx(5.0)
    for grad, value in zip(masters.gradients, gradients, strict=True):
        torch.testing.assert_close(grad, value * factor, rtol=1e-5, atol=0)


def test_small_updates_are_not_lost_in_bf16() -> None:
    model = Toy()
    masters = Masters(model, MIXED)
    with torch.no_grad():
        masters.tensors["embed"].fill_(1.0)
        for _ in range(256):
            masters.tensors["embed"].add_(2.0**-12)  # 1/16 of what bf16 can tell from 1
            masters.refresh()
    assert torch.equal(model.embed.detach(), torch.full((257, 8), 1.0625, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtypes", [PLAIN, MIXED])
def test_other_weights_are_shown_for_a_while(dtypes: dict[str, torch.dtype]) -> None:
    model = Toy()
    masters = Masters(model, dtypes)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    other = {name: torch.full(tuple(param.shape), 0.75) for name, param in model.named_parameters()}
    with pytest.raises(KeyError, match="stop"), masters.swapped(other):
        assert all(bool((param == 0.75).all()) for param in model.parameters())
        raise KeyError("stop")
    assert all(torch.equal(param.detach(), before[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("dtypes", [PLAIN, MIXED])
def test_restored_weights_reach_the_model(dtypes: dict[str, torch.dtype]) -> None:
    model = Toy()
    masters = Masters(model, dtypes)
    masters.restore({name: torch.full(tuple(param.shape), 0.5) for name, param in model.named_parameters()})
    assert all(bool((param == 0.5).all()) for param in model.parameters())
    assert all(bool((master == 0.5).all()) for master in masters.tensors.values())


def test_what_is_not_finite_is_named() -> None:
    masters = Masters(Toy(), PLAIN)
    assert masters.first_not_finite() is None
    masters.gradients[1][0, 0] = float("nan")
    assert masters.first_not_finite() == "blocks.up"
    assert not math.isfinite(float(masters.finish(1, 1.0)))
    assert masters.first_not_finite() == "blocks.up" and not masters.gradients[0].isnan().any()
    with torch.no_grad():
        masters.tensors["blocks.gain"][3] = float("inf")
    assert masters.first_not_finite() == "blocks.gain"


def test_names_must_be_those_of_the_plan() -> None:
    with pytest.raises(ValueError, match=r"blocks\.gain"):
        Masters(Toy(), dict.fromkeys(NAMES[:3], torch.float32))


def test_the_average_is_the_recurrence() -> None:
    weights = {"w": nn.Parameter(torch.zeros(5))}
    average = Average(EmaSpec(kind="ema", decay=0.9), lambda: weights)
    expected = torch.zeros(5, dtype=torch.float64)
    for step in range(50):
        with torch.no_grad():
            weights["w"].copy_(torch.randn(5, generator=torch.Generator().manual_seed(step)))
        average.update(step + 1, Moment())
        expected = 0.9 * expected + 0.1 * weights["w"].detach().double()
    torch.testing.assert_close(average.tensors["w"].double(), expected, rtol=1e-5, atol=1e-6)
    average.restore({"w": torch.ones(5)}, {})
    assert torch.equal(average.tensors["w"], torch.ones(5))
