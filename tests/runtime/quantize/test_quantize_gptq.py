"""GPTQ against a slow reference, on hostile Hessians, and in its choice of scales."""

import math
import random

import numpy as np
import pytest
import torch
from tiers import Trials, tiers
from torch import Tensor

from specc.compiler.quant.gptq import Gptq
from specc.compiler.quant.gptq_solver import factorize, row_groups, solve, weighted_error
from specc.compiler.quant.round import Round
from specc.compiler.quant.scheme import SchemeError, Seen, Solution, Use
from specc.runtime.quantize.report import Row, solution_line


def obq_reference(weight: Tensor, scale: Tensor, hessian: Tensor, order: list[int], top: int) -> Tensor:
    """Optimal Brain Quantization, column by column in `order`, by the explicit inverse.

    The inverse of the Hessian of the columns still open is updated by Gaussian elimination after each column
    (Frantar et al. 2022, equations 2 and 3). Float64, one row and one column at a time; shares nothing with
    the solver under test.
    """
    codes = np.zeros(weight.shape)
    inverse0 = np.linalg.inv(hessian.numpy().astype(np.float64))
    for r in range(weight.shape[0]):
        w = weight[r].numpy().astype(np.float64).copy()
        s = float(scale[r])
        inverse = inverse0.copy()
        for j in order:
            code = min(max(float(np.rint(w[j] / s)), -top), top)
            codes[r, j] = code
            error = (w[j] - code * s) / inverse[j, j]
            w -= error * inverse[:, j]
            inverse -= np.outer(inverse[:, j], inverse[j, :]) / inverse[j, j]
    return torch.from_numpy(codes)


def well_conditioned(columns: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(4 * columns + 4, columns, generator=generator, dtype=torch.float64)
    mix = torch.eye(columns, dtype=torch.float64)
    mix += 0.2 * torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    x = x @ mix
    return x.T @ x / x.shape[0]


@pytest.mark.parametrize("order", ["descending", "natural"])
@pytest.mark.parametrize("bits", [4, 5, 6, 7, 8])
def test_codes_are_those_of_optimal_brain_quantization(bits: int, order: str) -> None:
    generator = torch.Generator().manual_seed(bits)
    rng = random.Random(bits)
    for _ in range(6):
        rows, columns = rng.randint(1, 6), rng.randint(1, 48)
        weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 0.05
        hessian = well_conditioned(columns, generator)
        scheme = Gptq.model_validate(
            {"bits": bits, "order": order, "clip_quantiles": (1.0,), "block": rng.choice((1, 5, 128))}
        )
        scale = scheme.scales(weight.abs().amax(1)).double()
        factor = factorize(hessian, 0.01, scheme.order)
        got = solve(weight, scale, factor, scheme.top, scheme.block)

        damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
        diagonal = hessian.diagonal()
        turns = (
            sorted(range(columns), key=lambda j: -float(diagonal[j])) if order == "descending" else list(range(columns))
        )
        assert torch.equal(got, obq_reference(weight, scale, damped, turns, scheme.top))

        # What is stored is the reference too, for every row where it beats rounding to nearest.
        stored = torch.from_numpy(scheme.quantize(weight, hessian)["codes"]).double()
        nearest = scheme.nearest(weight, scale)
        errors = [weighted_error(weight - codes * scale[:, None], hessian) for codes in (got, nearest)]
        assert torch.equal(stored, torch.where((errors[0] < errors[1])[:, None], got, nearest))


def test_several_uses_are_solved_nearly_as_well_as_by_trying_all_codes() -> None:
    """A head and lookups of rows with frequencies from 1 to 10^-6, against all 15^4 codes of each row, in the exact
    metric of the row: the sum over rows is hardly above the least possible, and below that of the head's metric."""
    generator = torch.Generator().manual_seed(5)
    every = torch.cartesian_prod(*[torch.arange(-7.0, 8.0, dtype=torch.float64)] * 4)
    scheme = Gptq(bits=4, clip_quantiles=(1.0,), damping=1e-6)
    sums = torch.zeros(3, dtype=torch.float64)
    for _ in range(8):
        weight = torch.randn(10, 4, generator=generator, dtype=torch.float64)
        head, lookups = (well_conditioned(4, generator) for _ in range(2))
        mix = torch.randn(4, 4, generator=generator, dtype=torch.float64)
        lookups = mix @ lookups @ mix.T
        uses = (
            Use(torch.rand(10, generator=generator).double() + 0.1, head),
            Use(10 ** -torch.linspace(0, 6, 10).double(), lookups),
        )
        scale = scheme.scales(weight.abs().amax(1)).double()

        def cost(codes: Tensor, row: int) -> Tensor:
            metric = sum(use.rows[row] * use.columns for use in uses)  # noqa: B023
            return weighted_error(weight[row] - codes * scale[row], metric)  # type: ignore[arg-type]  # noqa: B023

        stored = [scheme.quantize_seen(weight, seen)["codes"] for seen in (Seen(uses=uses), Seen(head))]
        for row in range(10):
            sums[0] += cost(every, row).min()
            for i, codes in enumerate(stored, 1):
                sums[i] += cost(torch.from_numpy(codes[row : row + 1]).double(), row)[0]
    assert sums[0] <= sums[1] < 1.1 * sums[0] and sums[1] < 0.8 * sums[2], sums


def test_groups_of_rows_have_the_metric_of_their_rows_up_to_a_factor() -> None:
    """Each row is in one group, and the metric of the group is within a factor of 2 of that of the row, in all
    directions and up to one scale."""
    generator = torch.Generator().manual_seed(6)
    uses = (
        Use(torch.rand(300, generator=generator).double(), 50 * well_conditioned(5, generator)),
        Use(10 ** -(3 * torch.rand(300, generator=generator).double()), well_conditioned(5, generator)),
    )
    groups = row_groups(uses)
    assert sorted(torch.cat([rows for rows, _ in groups]).tolist()) == list(range(300)) and len(groups) > 3
    for rows, metric in groups:
        for row in rows.tolist():
            exact = uses[0].rows[row] * uses[0].columns + uses[1].rows[row] * uses[1].columns
            ratios = torch.linalg.eigvals(torch.linalg.solve(metric, exact)).real
            assert float(ratios.max() / ratios.min()) < 2
    (single,) = row_groups(uses[:1])
    assert single[0].tolist() == list(range(300))
    torch.testing.assert_close(single[1], uses[0].columns / uses[0].columns.diagonal().mean())


def test_one_use_is_a_hessian() -> None:
    generator = torch.Generator().manual_seed(7)
    weight, hessian = torch.randn(9, 40, generator=generator), well_conditioned(40, generator)
    one = Gptq(bits=5).quantize_seen(weight, Seen(uses=(Use(torch.rand(9, generator=generator), hessian),)))
    whole = Gptq(bits=5).quantize(weight, hessian)
    assert all(np.array_equal(whole[key], one[key]) for key in whole)


def test_block_size_does_not_change_the_codes() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, hessian = torch.randn(12, 70, generator=generator), well_conditioned(70, generator)
    codes = [Gptq(bits=5, block=block).quantize(weight, hessian)["codes"] for block in (1, 7, 64, 70, 128)]
    assert all(np.array_equal(codes[0], other) for other in codes)


def test_rows_solved_in_turn_are_those_solved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, hessian = torch.randn(11, 30, generator=generator), well_conditioned(30, generator)
    whole = Gptq(bits=5).quantize(weight, hessian)
    for values in (1, 30 * 6 * 4):
        monkeypatch.setattr("specc.compiler.quant.gptq.CHUNK_VALUES", values)
        parts = Gptq(bits=5).quantize(weight, hessian)
        assert all(np.array_equal(whole[key], parts[key]) for key in whole)


def test_scaling_the_hessian_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, hessian = torch.randn(9, 40, generator=generator), well_conditioned(40, generator)
    whole = Gptq(bits=5).quantize(weight, hessian)
    for power in (-1000, -200, -27, 27, 200, 1000):
        other = Gptq(bits=5).quantize(weight, hessian * 2.0**power)
        assert all(np.array_equal(whole[key], other[key]) for key in whole)


def hostile(kind: str, columns: int, generator: torch.Generator) -> Tensor:
    """X^T X of inputs that calibration really gives, in float64 exact enough to be semidefinite."""
    x = torch.randn(3 * columns + 2, columns, generator=generator, dtype=torch.float64)
    if kind == "dead":
        x[:, torch.rand(columns, generator=generator) < 0.4] = 0.0
    elif kind == "all dead":
        x.zero_()
    elif kind == "rank 1":
        x = x[:1]
    elif kind == "equal columns":
        x = x[:, :1].expand(-1, columns)
    elif kind == "condition 1e12":
        q = torch.linalg.qr(torch.randn(columns, columns, generator=generator, dtype=torch.float64)).Q
        spectrum = torch.logspace(0, -12, columns, dtype=torch.float64)
        return (q * spectrum) @ q.T
    elif kind == "outlier":
        x[:, 0] *= 1e6
    elif kind == "few rows":
        x = x[: max(1, columns // 3)]
    return x.T @ x


KINDS = ("dead", "all dead", "rank 1", "equal columns", "condition 1e12", "outlier", "few rows", "plain")


@tiers("C17", hessians=(400, 1_000))
def test_never_nan_and_never_worse_than_rounding_to_nearest(trials: Trials) -> None:
    for kind in KINDS:
        never_worse(kind, trials["hessians"] // len(KINDS))


def never_worse(kind: str, count: int) -> None:
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    rng = random.Random(KINDS.index(kind))
    won = 0
    for i in range(count):
        rows, columns = rng.randint(1, 12), rng.randint(1, 40)
        weight = torch.randn(rows, columns, generator=generator) ** rng.choice((1, 3)) * 10.0 ** rng.randint(-3, 2)
        hessian = hostile(kind, columns, generator) * 10.0 ** rng.choice((-8, 0, 8))
        # Half of them as float32 sums, which are indefinite by rounding.
        hessian = hessian.float() if i % 2 else hessian
        bits = rng.randint(4, 8)
        gptq, nearest = Gptq(bits=bits), Round(bits=bits)
        arrays = gptq.quantize(weight, hessian)
        back = gptq.dequantize(arrays, (rows, columns))
        assert bool(back.isfinite().all())
        errors = [
            _error(weight, back, hessian),
            _error(weight, nearest.dequantize(nearest.quantize(weight, None), (rows, columns)), hessian),
        ]
        delta = (weight.double() - back.double()).square().sum() * hessian.double().diagonal().sum()
        assert errors[0] <= errors[1] + 1e-14 * float(delta)
        won += errors[0] < 0.9 * errors[1]
    assert won >= (0 if kind == "all dead" else count // 4)


def _error(weight: Tensor, back: Tensor, hessian: Tensor) -> float:
    """tr(dW H dW^T) by numpy in float64; apart from the code under test."""
    delta = weight.double().numpy() - back.double().numpy()
    return max(0.0, float(np.einsum("ri,ij,rj->", delta, hessian.double().numpy(), delta)))


def test_a_hessian_of_zeros_gives_rounding_to_nearest() -> None:
    weight = torch.randn(6, 9, generator=torch.Generator().manual_seed(3))
    got, want = Gptq(bits=5).quantize(weight, torch.zeros(9, 9)), Round(bits=5).quantize(weight, None)
    assert all(np.array_equal(got[key], want[key]) for key in want)


def test_dead_columns_are_rounded_to_nearest_and_move_nothing() -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(8, 20, generator=generator)
    live = torch.arange(20) % 3 != 0
    hessian = torch.zeros(20, 20, dtype=torch.float64)
    small = well_conditioned(int(live.sum()), generator)
    hessian[live.nonzero(), live.nonzero().T] = small
    scheme = Gptq(bits=5)
    scale = scheme.scales(weight.abs().amax(1)).double()
    codes = solve(weight.double(), scale, factorize(hessian, 0.01, "natural"), scheme.top, 128)
    alone = solve(weight[:, live].double(), scale, factorize(small, 0.01, "natural"), scheme.top, 128)
    assert torch.equal(codes[:, live], alone)
    assert torch.equal(codes[:, ~live], scheme.nearest(weight[:, ~live], scale))


def test_the_damping_grows_until_it_works_and_is_told() -> None:
    hessian = torch.eye(8, dtype=torch.float64)
    hessian[0, 1] = hessian[1, 0] = 1.5  # smallest eigenvalue -0.5 at a mean diagonal of 1
    weight = torch.randn(3, 8, generator=torch.Generator().manual_seed(5))
    solutions: list[Solution] = []
    arrays = Gptq(bits=5).quantize_seen(weight, Seen(hessian, solved=solutions.append))
    hessian[0] = hessian[:, 0] = 0.0
    Gptq(bits=5).quantize_seen(weight, Seen(hessian, solved=solutions.append))
    assert [(solution.requested, solution.damping, solution.dead) for solution in solutions] == [
        (0.01, pytest.approx(1.0), 0),
        (0.01, 0.01, 1),
    ]
    assert np.isfinite(arrays["scale"]).all()
    rows = tuple(
        Row(f"w{i}", "int5 gptq", 5, 0.0, 0.0, 0, 0, None, solution) for i, solution in enumerate((*solutions, None))
    )
    assert solution_line(rows) == (
        "2 Hessians damped by 0.01 times their mean diagonals; more where Cholesky failed: w0 by 1; "
        "rounded to nearest, because they had no input: 1 columns of w1"
    )
    assert solution_line(rows[2:]) == ""


@pytest.mark.parametrize(
    ("hessian", "message"),
    [
        (None, "needs the Hessian"),
        (torch.eye(4), r"\[4, 4\], not \[3, 3\]"),
        (torch.full((3, 3), math.nan), "NaN or infinity"),
        (torch.diag(torch.tensor([1.0, math.inf, 1.0])), "NaN or infinity"),
        (torch.diag(torch.tensor([1.0, -1.0, 1.0])), "negative diagonal"),
        (torch.tensor([[1.0, 50.0, 0.0], [50.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), "not positive definite"),
    ],
)
def test_bad_hessians_are_named_errors(hessian: Tensor | None, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        Gptq(bits=5).quantize(torch.ones(2, 3), hessian)


def test_more_clips_to_choose_from_are_never_worse() -> None:
    generator = torch.Generator().manual_seed(6)
    better = 0
    for _ in range(20):
        weight, hessian = torch.randn(6, 64, generator=generator) ** 3, well_conditioned(64, generator)
        few, many = Gptq(bits=4, clip_quantiles=(1.0,)), Gptq(bits=4, clip_quantiles=(0.9, 0.97, 0.99, 1.0))
        errors = [_error(weight, s.dequantize(s.quantize(weight, hessian), (6, 64)), hessian) for s in (few, many)]
        assert errors[1] <= errors[0] * (1 + 1e-12)
        better += errors[1] < 0.95 * errors[0]
    assert better >= 10


def test_gptq_beats_rounding_on_correlated_inputs() -> None:
    """The gain that the paper is about: correlated features, many rows."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(64, 128, generator=generator)
    x = torch.randn(512, 16, generator=generator) @ torch.randn(16, 128, generator=generator)
    x += 0.1 * torch.randn(512, 128, generator=generator)
    hessian = x.T @ x
    gptq, nearest = Gptq(bits=4), Round(bits=4)
    ours = _error(weight, gptq.dequantize(gptq.quantize(weight, hessian), (64, 128)), hessian)
    theirs = _error(weight, nearest.dequantize(nearest.quantize(weight, None), (64, 128)), hessian)
    assert ours < 0.35 * theirs
