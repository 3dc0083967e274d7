"""Bits as an optimization: the knapsack against trying everything, and what an error is said to cost against what it
does cost."""

import itertools
import random
from collections.abc import Callable, Mapping

import pytest
import torch
from run_samples import model_of, small_spec
from torch import Tensor, nn

from specc.compiler.quant.gptq import Gptq
from specc.compiler.quant.none import Unquantized
from specc.compiler.quant.round import Round
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.spec import Allocate, Calibrate
from specc.runtime.calibration.calibrate import calibration_windows, capture_gradients, capture_hessians
from specc.runtime.calibration.gradients import Gradients
from specc.runtime.data.windows.stream import TokenStream
from specc.runtime.errors import QuantizeError
from specc.runtime.quantize.bit_allocation import CELLS, Option, added_nats, allocate_bits, knapsack


def best_by_trying(options: list[list[Option]], budget: int) -> float | None:
    fitting = [picks for picks in itertools.product(*options) if sum(size for size, _ in picks) <= budget]
    return min((sum(cost for _, cost in picks) for picks in fitting), default=None)


def test_the_knapsack_is_the_best_of_all() -> None:
    """Budgets below the number of cells: then it is exact to the byte."""
    draw = random.Random(4)
    some = 0
    for _ in range(300):
        options = [
            [(draw.randint(0, 90), draw.choice([0.0, 1.0, draw.random(), draw.random() ** 8])) for _ in range(n)]
            for n in (draw.randint(1, 4) for _ in range(draw.randint(1, 5)))
        ]
        budget = draw.randint(0, 400)
        result, wanted = knapsack(options, budget), best_by_trying(options, budget)
        if wanted is None:
            assert result is None
            continue
        assert result is not None
        assert sum(item[i][0] for item, i in zip(options, result, strict=True)) <= budget
        assert sum(item[i][1] for item, i in zip(options, result, strict=True)) == pytest.approx(wanted, abs=1e-12)
        some += 1
    assert some > 200


def test_large_budgets_are_kept_and_nearly_used() -> None:
    draw = random.Random(5)
    options = [[(n * draw.randint(9000, 40000), 4.0**-n * draw.random()) for n in range(4, 9)] for _ in range(66)]
    budget = int(1.3 * sum(item[0][0] for item in options))
    result = knapsack(options, budget)
    assert result is not None
    used = sum(item[i][0] for item, i in zip(options, result, strict=True))
    assert budget - 66 * (budget // CELLS + 1) - 40000 < used <= budget
    # No exchange of one width for another is better and still fits.
    for item, i in zip(options, result, strict=True):
        for size, cost in item:
            assert used - item[i][0] + size > budget - 66 * (budget // CELLS + 1) or cost >= item[i][1]


BASE: dict[str, Scheme] = {"a": Gptq(bits=5), "b": Gptq(bits=5), "c": Gptq(bits=5), "gain": Unquantized(dtype="f16")}
WEIGHTS = {"a": 64.0, "b": 1.0, "c": 8.0}


def cost(name: str, scheme: Scheme) -> float | None:
    return WEIGHTS[name] * 4.0 ** -scheme.bits_per_value() if name in WEIGHTS else None


def size(name: str, scheme: Scheme) -> int:
    return int(1000 * scheme.bits_per_value())


@pytest.mark.parametrize("off", [-700, 0, 900])
@pytest.mark.parametrize("budget", [14_000, 15_100, 17_050, 24_000, 90_000])
def test_the_exact_size_decides(budget: int, off: int) -> None:
    """The estimate may be off, by a number and by a share; the result fits and no better one does."""
    wish = Allocate(bits=(4, 5, 6, 7, 8))

    def exact(schemes: Mapping[str, Scheme]) -> int:
        return off + int(1.02 * sum(size(name, schemes[name]) for name in WEIGHTS))

    chosen = allocate_bits(wish, budget, BASE, cost, size, exact, lambda _: None)
    assert list(chosen) == list(BASE) and chosen["gain"] == BASE["gain"] and exact(chosen) <= budget
    every = [
        dict(zip(WEIGHTS, map(BASE["a"].with_bits, bits), strict=True))
        for bits in itertools.product(range(4, 9), repeat=3)
    ]
    fitting = [sum(cost(n, s) or 0 for n, s in allotment.items()) for allotment in every if exact(allotment) <= budget]
    assert sum(cost(name, chosen[name]) or 0 for name in WEIGHTS) == pytest.approx(min(fitting))


def test_what_cannot_be_done_is_said() -> None:
    wish = Allocate(bits=(4, 5))
    with pytest.raises(QuantizeError, match=r"takes 13,000 bytes with the fewest bits, and the budget is 12,999"):
        allocate_bits(wish, 12_999, BASE, cost, size, lambda s: 13_000, lambda _: None)
    with pytest.raises(QuantizeError, match=r"no parameter of 'gain' supports several of the bits \[4, 5\]"):
        allocate_bits(Allocate(bits=(4, 5), match="gain"), 1, BASE, cost, size, lambda s: 0, lambda _: None)
    narrow = allocate_bits(
        Allocate(bits=(2, 3, 4)), 99_999, {"t": Round(bits=8)}, lambda n, s: 1.0, size, lambda s: 0, lambda _: None
    )
    assert narrow["t"].bits_per_value() == 2  # of equal costs the fewest bytes


def trained(stream: TokenStream, *changes: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A small model after some steps, in float64, and the windows that it is looked at with."""
    model = model_of(small_spec(*changes), fuse=False).model.double()
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
            param.copy_(noise * (param.shape[1] ** -0.5 if param.dim() == 2 else 0.0) + (param.dim() != 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    for ids, targets in calibration_windows(stream, Calibrate(sequences=600, batch=8), 32, seed=2):
        optimizer.zero_grad()
        loss = model.score(ids, targets).mean()  # type: ignore[operator]
        loss.backward()
        optimizer.step()
    return model, list(calibration_windows(stream, Calibrate(sequences=32, batch=16), 32, seed=1))


def test_gradients_are_those_of_each_output(stream: TokenStream) -> None:
    """Against the definition, by a bias of 0 added to one linear's output: d loss / d bias, row by row."""
    model, batches = trained(stream)
    result = capture_gradients(model, iter(batches), torch.device("cpu"))
    linear, names = nn.functional.linear, {id(param): name for name, param in model.named_parameters()}
    biases: list[Tensor] = []

    def biased(wanted: str) -> Callable[..., Tensor]:
        def call(value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            out = linear(value, weight, bias)
            if names.get(id(weight)) != wanted:
                return out
            biases.append(torch.zeros_like(out).requires_grad_())
            return out + biases[-1]

        return call

    for wanted in ("blocks.0.mlp.down", "blocks.1.attention.q", "embed.token"):
        total, rows = torch.zeros(dict(model.named_parameters())[wanted].shape[0], dtype=torch.float64), 0
        for ids, targets in batches:
            biases.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(nn.functional, "linear", biased(wanted))
                nats = model.score(ids, targets)  # type: ignore[operator]
            (gradient,) = torch.autograd.grad(nats.sum(), biases)
            total += gradient.flatten(0, -2).square().sum(0)
            rows += gradient.flatten(0, -2).shape[0]
        torch.testing.assert_close(result[wanted].products, total / rows, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("passes", [1, 3])
def test_a_weight_that_runs_again_costs_what_all_its_calls_do(stream: TokenStream, passes: int) -> None:
    """Against the definition: 1/2 (sum over the calls of a weight of dl/dy . dW x)^2, a token; of weights behind a
    norm, whose inputs are of one size and so as good as independent of the gradients. What calls have in common is half
    of it."""
    loop = f"model.blocks.order=0{' 1' * passes}"
    model, batches = trained(stream, *[loop] * (passes > 1))
    device = torch.device("cpu")
    hessians = capture_hessians(model, iter(batches), device)
    gradients = capture_gradients(model, iter(batches), device)
    linear, params = nn.functional.linear, dict(model.named_parameters())
    names = {id(param): name for name, param in params.items()}
    calls: list[tuple[str, Tensor, Tensor]] = []

    def watch(value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = linear(value, weight, bias)
        calls.append((names[id(weight)], value.detach().flatten(0, -2), out))
        return out

    wanted = ("blocks.0.mlp.up", "blocks.1.mlp.up", "blocks.1.attention.q")
    generator = torch.Generator().manual_seed(0)
    noises = {name: torch.randn(50, *params[name].shape, generator=generator).double() for name in wanted}
    sums, apart, tokens = dict.fromkeys(wanted, 0.0), dict.fromkeys(wanted, 0.0), 0
    for ids, targets in batches:
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.functional, "linear", watch)
            nats = model.score(ids, targets)  # type: ignore[operator]
        result = torch.autograd.grad(nats.sum(), [out for _, _, out in calls])
        tokens += nats.numel()
        for name in wanted:
            moved = [
                torch.einsum("rn,snk,rk->sr", gradient.flatten(0, -2), noises[name], value)
                for (term, value, _), gradient in zip(calls, result, strict=True)
                if term == name
            ]
            sums[name] += 0.5 * float(sum(moved).square().sum()) / len(noises[name])  # type: ignore[union-attr]
            apart[name] += 0.5 * float(sum(term.square().sum() for term in moved)) / len(noises[name])
    assert [name for name, _, _ in calls].count("blocks.1.mlp.up") == passes
    for name in wanted:
        estimate = sum(added_nats(noise, hessians[name], gradients[name]) for noise in noises[name]) / len(noises[name])
        assert estimate == pytest.approx(sums[name] / tokens, rel=0.2), name
    assert (sums["blocks.1.mlp.up"] > 1.8 * apart["blocks.1.mlp.up"]) == (passes > 1)


def test_the_estimate_ranks_errors_as_the_loss_does(stream: TokenStream) -> None:
    """Noise on one matrix after the other: what it does to the loss (the mean of both signs, which leaves the second
    order) against the estimate. They are to agree in order, and within a small factor."""
    model, batches = trained(stream)
    device = torch.device("cpu")
    hessians = capture_hessians(model, iter(batches), device)
    gradients = capture_gradients(model, iter(batches), device)

    def loss() -> float:
        with torch.no_grad():
            return float(torch.stack([model.score(*batch).mean() for batch in batches]).mean())  # type: ignore[operator]

    start = loss()
    estimate, real = [], []
    for i, (name, param) in enumerate(model.named_parameters()):
        if name not in gradients:
            continue
        noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        noise *= 0.02 * param.detach().norm() / noise.norm()
        changes = []
        for sign in (1, -1):
            with torch.no_grad():
                param.add_(noise, alpha=sign)
                changes.append(loss() - start)
                param.sub_(noise, alpha=sign)
        real.append(sum(changes) / 2)
        estimate.append(added_nats(noise, hessians[name], gradients[name]))
    assert len(real) >= 8
    ratios = torch.tensor(estimate) / torch.tensor(real).clamp_min(1e-12)
    order = torch.corrcoef(torch.stack([torch.tensor(v).argsort().argsort().double() for v in (estimate, real)]))[0, 1]
    assert float(order) > 0.7
    assert 0.1 < float(ratios.median()) < 10


def test_the_estimate_is_the_expectation_in_small() -> None:
    generator = torch.Generator().manual_seed(3)
    delta = torch.randn(5, 7, generator=generator)
    inputs, gradients = torch.randn(400, 7, generator=generator).double(), torch.rand(5, generator=generator)
    outputs = inputs @ delta.double().T
    wanted = 0.5 * float((outputs.square().mean(0) * gradients).sum())
    assert added_nats(delta, inputs.T @ inputs / 400, Gradients(gradients)) == pytest.approx(wanted, rel=1e-9)
