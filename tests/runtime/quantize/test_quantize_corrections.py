"""Corrections of low rank, clips by standard deviation, and embeddings by GPTQ."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from run_samples import make_run, small_spec, write_text
from torch import Tensor

from specc.compiler.build import canonical, spec_of
from specc.compiler.quant import low_rank
from specc.compiler.quant.gptq import Gptq
from specc.compiler.quant.gptq_solver import factorize, solve
from specc.compiler.quant.round import Round
from specc.compiler.quant.rows import PerRow
from specc.compiler.quant.scheme import SchemeError
from specc.compiler.report.storage import choice_of_bits
from specc.runtime.artifact.deployment import Deployment
from specc.runtime.errors import QuantizeError
from specc.runtime.open_model import read_verified
from specc.runtime.quantize.pipeline import QuantizeOptions, QuantizeResult, quantize
from specc.runtime.storage.run_directory import Run

pytestmark = pytest.mark.usefixtures("few_passes")


def example(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, and the Hessian of inputs of which some directions are much stronger."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) ** 3 * 0.02
    mix = torch.randn(columns, columns, generator=generator) * torch.logspace(0, -2, columns)
    x = torch.randn(4 * columns, columns, generator=generator) @ mix
    return weight, (x.T @ x / x.shape[0]).double()


def by_hand(arrays: dict[str, np.ndarray], rank: int) -> np.ndarray:
    """codes * scale + L R from what is stored, in float64 by numpy."""
    exact = {name: array.astype(np.float64) for name, array in arrays.items()}
    columns = exact["right"].shape[1]
    right = exact["right"] * np.repeat(exact["right_scale"], low_rank.GROUP, 1)[:, :columns]
    mended = (exact["left"] * exact["left_scale"]) @ right
    return exact["codes"] * exact["scale"][:, None] + mended


@pytest.mark.parametrize("kind", [Round, Gptq])
@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (40, 64), (96, 200)])
def test_a_corrected_scheme_there_and_back(kind: type[PerRow], shape: tuple[int, int]) -> None:
    weight, hessian = example(*shape)
    for rank in (1, 4):
        scheme = kind(bits=4, correction_rank=rank)
        arrays = scheme.quantize(weight, hessian)
        assert [s.suffix for s in scheme.stored(shape)] == list(arrays)
        for stored in scheme.stored(shape):
            array = arrays[stored.suffix]
            assert (array.shape, array.dtype, array.nbytes) == (stored.shape, stored.numpy_dtype(), stored.bytes)
        back = scheme.dequantize(arrays, shape)
        assert np.allclose(back.numpy(), by_hand(arrays, rank), rtol=1e-6, atol=1e-9)
        assert set(np.unique(arrays["left"])) <= set(range(-2, 2)) and np.abs(arrays["right"]).max() <= 8
        plain = kind(bits=4)
        assert all(np.array_equal(arrays[key], other) for key, other in plain.quantize(weight, hessian).items())
        assert f"rank {rank} correction" in scheme.label() and scheme.with_bits(5).correction_rank == rank
        assert scheme.estimate_bytes(shape) > plain.estimate_bytes(shape)


@pytest.mark.parametrize("kind", [Round, Gptq])
def test_it_lessens_the_error_it_is_for_and_never_adds_to_it(kind: type[PerRow]) -> None:
    """Of GPTQ that of the outputs, tr(E H E^T); of rounding that of the weights."""
    gains = []
    for seed in range(12):
        weight, hessian = example(48, 96, seed)
        metric = torch.eye(96, dtype=torch.float64)
        if kind is Gptq:
            metric = hessian
        errors = []
        for rank in (0, 4, 16):
            scheme = kind(bits=4, correction_rank=rank)
            delta = weight.double() - scheme.dequantize(scheme.quantize(weight, hessian), (48, 96)).double()
            errors.append(float((delta @ metric * delta).sum()))
        assert errors[2] <= errors[0] and errors[1] <= errors[0]
        gains.append(errors[2] / errors[0])
    assert max(gains) < 1 and min(gains) < 0.9


def test_the_best_of_a_rank_is_found() -> None:
    """An error of rank 2 whose factors the codes can hold comes back; and the weighting by the Hessian is the optimum
    of Eckart and Young in its own metric, against the plain singular value decomposition."""
    generator = torch.Generator().manual_seed(2)
    left = torch.randint(-2, 2, (30, 1), generator=generator).double()
    right = torch.randint(-7, 8, (1, 64), generator=generator).double()
    left[0], right[0, 0] = -2, 7
    arrays = low_rank.correction(left @ right * 0.01, 1, None)
    assert float((low_rank.product(arrays) - left @ right * 0.01).norm() / (left @ right * 0.01).norm()) < 0.1
    error, hessian = example(40, 64, 5)
    metric = hessian / hessian.diagonal().mean() + low_rank.DAMPING * torch.eye(64, dtype=torch.float64)
    rests = []
    for given in (hessian, None):
        rest = error.double() - low_rank.product(low_rank.correction(error.double(), 4, given))
        rests.append(float((rest @ metric * rest).sum()))
    assert rests[0] < rests[1]


def test_a_correction_that_does_not_help_leaves_nothing_to_store() -> None:
    """An error that the inputs hardly see: rounding a correction of it would make what they do see."""
    error = torch.randn(48, 130, generator=torch.Generator().manual_seed(7)).double()
    error -= error.mean(1, keepdim=True)
    seen = torch.ones(130, 130, dtype=torch.float64) + 1e-6 * torch.eye(130, dtype=torch.float64)
    arrays = low_rank.correction(error, 3, seen)
    assert {name: len(set(array.tobytes())) for name, array in arrays.items()} == {
        "left": 1,
        "left_scale": 2,
        "right": 1,
        "right_scale": 2,
    }
    assert not low_rank.product(arrays).any()
    assert low_rank.correction(error, 3, None)["right"].any()


def test_what_no_correction_can_have_written_is_refused() -> None:
    weight, hessian = example(8, 70)
    scheme = Gptq(bits=5, correction_rank=2)
    good = scheme.quantize(weight, hessian)
    for name, value, words in (
        ("left", np.int8(2), r"outside \[-2, 1\]"),
        ("right", np.int8(8), r"outside \[-8, 7\]"),
        ("left_scale", np.float16(math.inf), "not a positive number"),
        ("right_scale", np.float16(0), "not a positive number"),
    ):
        bad = {key: array.copy() for key, array in good.items()}
        bad[name].flat[0] = value
        with pytest.raises(SchemeError, match=words):
            scheme.dequantize(bad, (8, 70))


# Clips by standard deviation


def test_sd_clip_is_one_solution_with_scales_by_the_row() -> None:
    """k std / top is the scale, and the codes are those of GPTQ under it, or rounding where that is better."""
    weight, hessian = example(20, 50)
    scheme = Gptq(bits=6, clip_stds=(12.85,))
    arrays = scheme.quantize(weight, hessian)
    std = weight.double().square().mean(1).sqrt()
    wanted = (12.85 * std / 31).numpy()
    got = arrays["scale"].astype(np.float64)
    assert (got >= wanted).all() and (got <= wanted * (1 + 2**-10)).all()
    scale = torch.from_numpy(got)
    solved = solve(weight.double(), scale, factorize(hessian, 0.01, "descending"), 31, 128)
    codes, nearest = torch.from_numpy(arrays["codes"]).double(), scheme.nearest(weight, scale)
    as_solved, as_rounded = (codes == solved).all(1), (codes == nearest).all(1)
    assert bool((as_solved | as_rounded).all()) and int(as_solved.sum()) > 10


def test_rows_of_equal_values_survive_a_clip_by_deviation() -> None:
    weight = torch.tensor([[0.5], [-2.0], [0.0]]).expand(3, 6).contiguous()
    back = Gptq(bits=6, clip_stds=(4.0,)).dequantize(
        Gptq(bits=6, clip_stds=(4.0,)).quantize(weight, torch.eye(6, dtype=torch.float64)), (3, 6)
    )
    torch.testing.assert_close(back, weight, rtol=0.07, atol=0)


def test_the_clip_of_several_is_chosen_by_the_output() -> None:
    weight, hessian = example(20, 50)
    alone = {k: Gptq(bits=4, clip_stds=(k,)) for k in (1.0, 3.0, 5.0)}
    errors = {}
    for k, scheme in alone.items():
        delta = weight.double() - scheme.dequantize(scheme.quantize(weight, hessian), (20, 50)).double()
        errors[k] = (delta @ hessian * delta).sum(1)
    both = Gptq(bits=4, clip_stds=(3.0, 1.0, 5.0))
    delta = weight.double() - both.dequantize(both.quantize(weight, hessian), (20, 50)).double()
    result = (delta @ hessian * delta).sum(1)
    least = torch.stack(list(errors.values())).amin(0)
    assert bool((result <= least * (1 + 1e-9) + 1e-15).all())


def test_a_spec_that_uses_none_of_this_reads_as_before() -> None:
    assert list(Gptq(bits=5).model_dump(mode="json")) == [
        "scheme",
        "bits",
        "clip_floor",
        "damping",
        "order",
        "block",
        "clip_quantiles",
    ]
    spec = small_spec()
    assert spec.quant is not None
    assert set(json.loads(canonical(spec))["quant"]) == {"default", "promote", "rules", "calibrate", "budget_bytes"}
    more = small_spec("quant.correct={rank: 2, count: 1}", "quant.default={scheme: gptq, bits: 5, clip_stds: [12.85]}")
    assert spec_of(canonical(more)) == more != spec


def test_the_plan_says_what_will_be_chosen() -> None:
    wish = "quant.allocate={match: blocks.*, bits: [6, 4]}"
    spec = small_spec("quant.promote=null", wish, "quant.budget_bytes=40000")
    assert choice_of_bits(spec.quant) == "`blocks.*` in 4, 6 bits, chosen per tensor to fit 40,000 bytes"
    assert choice_of_bits(small_spec("quant.promote=null").quant) == ""


# The pipeline


def quantized(folder: Path, *overrides: str) -> tuple[Run, QuantizeResult, list[str]]:
    run = make_run(folder / "run", small_spec(*overrides), str(write_text(folder / "data")))
    said: list[str] = []
    result = quantize(run.directory, QuantizeOptions(cache=folder / "cache", max_tokens=500), said.append)
    return run, result, said


def test_the_largest_errors_are_corrected(tmp_path: Path) -> None:
    plain = quantized(tmp_path / "plain", "quant.promote=null")[1]
    _, result, _ = quantized(tmp_path / "more", "quant.promote=null", "quant.correct={rank: 4, count: 3}")
    corrected = [row.name for row in result.rows if "rank 4 correction" in row.scheme]
    able = [row for row in plain.rows if row.bits <= 8]
    size = {row.name: row.bytes for row in plain.rows}
    norms = sorted(able, key=lambda row: -row.mse * size[row.name])
    assert set(corrected) <= {row.name for row in norms[:6]} and len(corrected) == 3
    before = {row.name: row for row in plain.rows}
    for row in result.rows:
        earlier = before[row.name]
        if row.name in corrected:
            assert row.bytes > earlier.bytes and row.compressed > earlier.compressed
            if row.output_error is not None and earlier.output_error is not None and "gptq" in row.scheme:
                assert row.output_error <= earlier.output_error * (1 + 1e-6)
        else:
            assert row == earlier
    assert result.promoted == ()
    output = read_verified(result.artifact)
    spec, weights = output.spec, output.weights
    assert spec.quant is not None and spec.quant.correct is None
    again = Deployment.of(spec_of(canonical(spec))).schemes
    assert sorted(n for n, s in again.items() if isinstance(s, PerRow) and s.correction_rank == 4) == sorted(corrected)
    assert set(weights) == set(before) and all(bool(tensor.isfinite().all()) for tensor in weights.values())


def test_a_matrix_with_fewer_ranks_is_passed_over(tmp_path: Path) -> None:
    """Of [16, 32], four of them: their errors are larger than that of the embedding, in 8 bits."""
    result = quantized(tmp_path / "some", "quant.promote=null", "quant.correct={rank: 17, count: 9}")[1]
    corrected = [row.name for row in result.rows if "rank 17 correction" in row.scheme]
    assert len(corrected) == 9 and "embed.token" in corrected
    assert not any(name.endswith((".k", ".v")) for name in corrected)


def test_a_tied_embedding_can_be_quantized_by_gptq(tmp_path: Path) -> None:
    """Its Hessian is that of what goes into the head; with it the output is nearer than by rounding."""
    rules = '[{match: embed.token, scheme: %s}, {match: "*.{residual,q_gain}", scheme: none, dtype: f16}]'
    results = {}
    for name, scheme in (("round", "round, bits: 4"), ("gptq", "gptq, bits: 4")):
        result = quantized(tmp_path / name, "quant.promote=null", f"quant.rules={rules % scheme}")[1]
        (row,) = (row for row in result.rows if row.name == "embed.token")
        assert row.output_error is not None and row.scheme.startswith(f"int4 {name}")
        results[name] = row.output_error
    assert results["gptq"] < 0.95 * results["round"]


def test_corrections_are_for_the_largest_errors_at_the_bits_that_are_chosen(tmp_path: Path) -> None:
    """Of equal bits the largest matrix has the largest error; of chosen ones one with few of them has."""
    sets = ("quant.promote=null", "quant.allocate={match: blocks.*}", "quant.budget_bytes=24000")
    alone = quantized(tmp_path / "alone", *sets)[1]
    _, both, said = quantized(tmp_path / "both", *sets, "quant.correct={rank: 2, count: 2, match: blocks.*}")
    size = {name: tensor.numel() for name, tensor in read_verified(alone.artifact).weights.items()}
    error = {r.name: r.mse * size[r.name] for r in alone.rows if r.bits <= 8 and "blocks." in r.name}
    wanted = sorted(error, key=lambda name: -error[name])[:2]
    assert sorted(r.name for r in both.rows if "rank 2 correction" in r.scheme) == sorted(wanted)
    assert f"correct: {', '.join(wanted)}" in said and both.size.total <= 24_000
    base = quantized(tmp_path / "base", "quant.promote=null", "quant.correct={rank: 2, count: 2, match: blocks.*}")[1]
    assert sorted(wanted) != sorted(r.name for r in base.rows if "rank 2 correction" in r.scheme)
    with pytest.raises(QuantizeError, match=r"^with corrections of rank 32, for .*: the artifact takes") as caught:
        quantized(tmp_path / "over", *sets[:2], "quant.budget_bytes=20500", "quant.correct={rank: 32, count: 9}")
    assert "without corrections, the artifact fits" in caught.value.hint
