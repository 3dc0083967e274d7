"""Every quantization scheme of the catalog: a new one is tested by being there."""

import math
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from specc.compiler import quant
from specc.compiler.catalog import models
from specc.compiler.quant.gptq import Gptq
from specc.compiler.quant.none import Unquantized
from specc.compiler.quant.round import Round
from specc.compiler.quant.rows import PerRow, row_quantile
from specc.compiler.quant.scheme import Scheme, SchemeError, Seen
from specc.compiler.strict import tag_of

CATALOG = models(quant, Scheme, "scheme")


def settings() -> Iterator[Scheme]:
    """Every scheme at every value of its `bits` or `dtype`, the only required settings."""
    for kind in CATALOG:
        for extra in ({}, *({"bits": b} for b in range(1, 17)), *({"dtype": d} for d in ("f16", "bf16", "f32"))):
            try:
                yield kind.model_validate(extra)
            except ValidationError:
                continue


SCHEMES = list(dict.fromkeys(settings()))


def shapes(seed: int, count: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    edge = [(1, 1), (1, 7), (7, 1), (3, 129), (2, 128)]
    return edge + [(rng.randint(1, 40), rng.randint(1, 200)) for _ in range(count)]


def example(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A heavy-tailed weight and a positive definite Hessian for it."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) ** 3 * 0.02
    x = torch.randn(2 * shape[-1] + 3, shape[-1], generator=generator)
    return weight, x.T @ x / x.shape[0]


def quantized(scheme: Scheme, weight: torch.Tensor, hessian: torch.Tensor | None) -> dict[str, Any]:
    """The arrays of a parameter, with all that a scheme may ask of calibration; a vector is the bias of a weight."""
    seen = Seen(hessian, torch.tensor([2.5 / 127]))
    if scheme.integer and weight.dim() == 1:
        seen = Seen(weight=quantized(scheme, torch.eye(len(weight)), None))
    return scheme.quantize_seen(weight, seen)


def test_the_catalog_is_what_the_docs_name() -> None:
    assert sorted(tag_of(kind, "scheme") or "" for kind in CATALOG) == ["gptq", "int8", "none", "round"]
    assert {type(scheme) for scheme in SCHEMES} == set(CATALOG)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label())
class TestEveryScheme:
    def test_label_is_unique_and_short(self, scheme: Scheme) -> None:
        assert [other.label() for other in SCHEMES].count(scheme.label()) == 1
        assert 0 < len(scheme.label()) <= 32
        assert 2 <= scheme.bits_per_value() <= 32

    def test_settings_survive_the_resolved_spec(self, scheme: Scheme) -> None:
        assert type(scheme).model_validate_json(scheme.model_dump_json()) == scheme

    def test_arrays_are_those_of_the_layout(self, scheme: Scheme) -> None:
        for i, shape in enumerate(shapes(1, 8)):
            weight, hessian = example(shape, i)
            arrays = quantized(scheme, weight, hessian)
            stored = scheme.stored(shape)
            assert list(arrays) == [s.suffix for s in stored]
            for s in stored:
                array = arrays[s.suffix]
                assert (array.shape, array.dtype, array.nbytes) == (s.shape, s.numpy_dtype(), s.bytes)

    def test_quantizing_what_came_back_changes_nothing(self, scheme: Scheme) -> None:
        for i, shape in enumerate(shapes(2, 4)):
            weight, hessian = example(shape, i)
            arrays = quantized(scheme, weight, hessian)
            back = scheme.dequantize(arrays, shape)
            assert back.dtype == torch.float32
            again = scheme.dequantize(quantized(scheme, back, hessian), shape)
            # A row clipped below its maximum, or without its largest code, gets another grid.
            step = back.abs().amax(1) / (2 ** (scheme.bits_per_value() - 1) - 1)
            assert bool(((again - back).abs() <= step[:, None] * 1.01).all())

    def test_same_bits_twice_and_whatever_the_layout_in_memory(self, scheme: Scheme) -> None:
        weight, hessian = example((33, 65), 3)
        first = quantized(scheme, weight, hessian)
        other = quantized(scheme, weight.T.contiguous().T, hessian.double())
        assert all(np.array_equal(first[key], other[key]) for key in first)

    def test_its_grid_is_what_it_would_store_without_data(self, scheme: Scheme) -> None:
        if not scheme.has_grid:
            with pytest.raises(SchemeError, match="cannot round weights for training"):
                scheme.on_grid(torch.ones(1, 2, 3))
            return
        for i, shape in enumerate(shapes(3, 8)):
            weight, _ = example(shape, i)
            plain = Round(bits=int(scheme.bits_per_value()))
            wanted = plain.dequantize(plain.quantize(weight, None), shape)
            assert torch.equal(scheme.on_grid(weight[None])[0], wanted)
            both = scheme.on_grid(torch.stack((weight, 3 * weight)))
            assert torch.equal(both[0], wanted)  # each for itself

    def test_the_estimate_is_right_for_normal_rows_and_enough_for_trained_ones(self, scheme: Scheme) -> None:
        generator = torch.Generator().manual_seed(4)
        normal, wide = torch.randn(2, 64, 512, generator=generator)
        results = [
            sum(_entropy_bytes(array) for array in quantized(scheme, weight, torch.eye(512)).values())
            for weight in (normal, normal * torch.exp(0.4 * wide))  # tails about as heavy as those of trained matrices
        ]
        estimate = scheme.estimate_bytes((64, 512))
        if scheme.bits_per_value() <= 8:
            assert (
                estimate == pytest.approx(results[0], rel=0.03 if scheme.bits_per_value() > 2 else 0.07)
                and results[1] < estimate
            )
        else:  # floats, of which the exponents have little entropy
            assert results[0] < 1.01 * estimate < 2.5 * results[0]

    def test_nan_and_infinity_are_refused(self, scheme: Scheme) -> None:
        for bad in (math.nan, math.inf, -math.inf):
            weight, hessian = example((4, 5), 5)
            weight[2, 3] = bad
            with pytest.raises(SchemeError, match="NaN or infinity"):
                quantized(scheme, weight, hessian)

    def test_weights_out_of_range_are_refused(self, scheme: Scheme) -> None:
        if scheme == Unquantized(dtype="f32"):
            weight = torch.full((2, 3), 1e300, dtype=torch.float64)
        else:
            weight = torch.full((2, 3), torch.finfo(torch.float32).max)
        with pytest.raises(SchemeError, match="reaches"):
            quantized(scheme, weight, torch.eye(3))

    def test_arrays_of_another_kind_are_refused(self, scheme: Scheme) -> None:
        weight, hessian = example((4, 6), 6)
        good = quantized(scheme, weight, hessian)
        for suffix, array in good.items():
            for wrong in (array[:-1], array.astype(np.float64), array[None]):
                with pytest.raises(SchemeError):
                    scheme.dequantize({**good, suffix: wrong}, (4, 6))
            with pytest.raises(SchemeError):
                scheme.dequantize({k: v for k, v in good.items() if k != suffix}, (4, 6))
        with pytest.raises(SchemeError):
            scheme.dequantize({**good, "more": np.zeros(3)}, (4, 6))

    def test_a_refused_shape_is_refused_by_quantize(self, scheme: Scheme) -> None:
        for shape in ((), (8,), (0, 4), (4, 0), (2, 3, 4)):
            reason = scheme.rejects(shape)
            if reason is None:
                hessian = torch.eye(shape[-1]).expand(*shape[:-2], -1, -1) if len(shape) > 2 else None
                back = scheme.dequantize(quantized(scheme, torch.ones(shape), hessian), shape)
                assert back.shape == shape and torch.allclose(back, torch.ones(shape), rtol=2e-3)
            else:
                with pytest.raises(SchemeError) as raised:
                    quantized(scheme, torch.ones(shape), None)
                assert str(raised.value) == reason

    def test_each_expert_is_quantized_as_its_matrix_alone(self, scheme: Scheme) -> None:
        """Experts of different sizes and inputs; the last one saw no rows."""
        if scheme.rejects((3, 7, 24)) is not None:
            return
        pairs = [example((7, 24), seed) for seed in range(3)]
        weights = torch.stack([weight * 10**i for i, (weight, _) in enumerate(pairs)])
        hessians = torch.stack([pairs[0][1], 100 * pairs[1][1], torch.zeros(24, 24)])
        together = scheme.dequantize(quantized(scheme, weights, hessians), (3, 7, 24))
        for i in range(3):
            alone = scheme.dequantize(quantized(scheme, weights[i], hessians[i]), (7, 24))
            assert torch.equal(together[i], alone)
        if scheme.has_grid:
            on_grid = scheme.on_grid(weights.unsqueeze(0))[0]
            assert torch.equal(on_grid, torch.cat([scheme.on_grid(weight.unsqueeze(0)) for weight in weights]))


def _entropy_bytes(array: np.ndarray[Any, Any]) -> float:
    data = np.frombuffer(array.tobytes(), np.uint8)
    counts = np.bincount(data)
    share = counts[counts > 0] / data.size
    return float(-(share * np.log2(share)).sum()) * data.size / 8


PER_ROW = [scheme for scheme in SCHEMES if isinstance(scheme, PerRow)]


@pytest.mark.parametrize("scheme", PER_ROW, ids=lambda scheme: scheme.label())
class TestPerRow:
    def test_codes_use_the_symmetric_range_and_scales_are_positive(self, scheme: PerRow) -> None:
        top = 2 ** (scheme.bits - 1) - 1
        seen: set[int] = set()
        for i, shape in enumerate(shapes(7, 8)):
            arrays = quantized(scheme, *example(shape, i))
            seen.update(np.unique(arrays["codes"]).tolist())
            assert np.isfinite(arrays["scale"]).all() and (arrays["scale"] > 0).all()
        assert max(seen) == top and min(seen) == -top

    def test_rows_of_zeros_and_of_tiny_values(self, scheme: PerRow) -> None:
        weight = torch.zeros(3, 8)
        weight[1] = 1e-12
        weight[2, 0] = 3e-7
        back = scheme.dequantize(quantized(scheme, weight, torch.eye(8)), (3, 8))
        assert bool((back[:2] == 0).all()) and bool(back.isfinite().all())
        assert abs(float(back[2, 0]) - 3e-7) <= 2.0**-24

    def test_the_largest_representable_row(self, scheme: PerRow) -> None:
        weight = torch.full((1, 4), 65504.0 * scheme.top)
        assert torch.equal(scheme.dequantize(quantized(scheme, weight, torch.eye(4)), (1, 4)), weight)
        with pytest.raises(SchemeError, match="float16 scale"):
            quantized(scheme, weight * 1.001, torch.eye(4))

    def test_codes_and_scales_that_no_scheme_writes_are_refused(self, scheme: PerRow) -> None:
        good = quantized(scheme, *example((4, 6), 8))
        for code in {scheme.top + 1, -scheme.top - 1, -128} & set(range(-128, 128)):
            codes = good["codes"].copy()
            codes[1, 2] = code
            with pytest.raises(SchemeError, match="outside"):
                scheme.dequantize({**good, "codes": codes}, (4, 6))
        for bad in (0.0, -1.0, math.nan, math.inf):
            scale = good["scale"].copy()
            scale[3] = bad
            with pytest.raises(SchemeError, match="row scale"):
                scheme.dequantize({**good, "scale": scale}, (4, 6))

    def test_dequantize_is_code_times_scale(self, scheme: PerRow) -> None:
        arrays = quantized(scheme, *example((9, 31), 9))
        exact = arrays["codes"].astype(np.float64) * arrays["scale"].astype(np.float64)[:, None]
        assert np.array_equal(scheme.dequantize(arrays, (9, 31)).numpy(), exact.astype(np.float32))

    def test_with_bits(self, scheme: PerRow) -> None:
        if scheme.integer:  # the kernels read one byte
            with pytest.raises(SchemeError, match="cannot store"):
                scheme.with_bits(7)
            return
        other = scheme.with_bits(7)
        assert type(other) is type(scheme) and other.bits == 7
        assert other.model_copy(update={"bits": scheme.bits}) == scheme
        for bits in (1, 9):
            with pytest.raises(SchemeError, match="cannot store"):
                scheme.with_bits(bits)

    def test_clip_floor_shares_one_step_among_small_rows(self, scheme: PerRow) -> None:
        weight, hessian = example((16, 64), 10)
        weight = weight / weight.abs().max()
        floored = type(scheme)(bits=scheme.bits, clip_floor=1.0)  # type: ignore[call-arg]
        scale = quantized(floored, weight, hessian)["scale"]
        assert np.unique(scale).size == 1
        assert 1.0 / scheme.top <= float(scale[0]) <= 1.0 / scheme.top * (1 + 2**-10)


def test_round_is_the_nearest_code() -> None:
    """Against float64, value by value: no code of the grid is nearer."""
    for i, shape in enumerate(shapes(11, 60)):
        weight, _ = example(shape, i)
        for bits in (2, 4, 5, 8):
            arrays = Round(bits=bits).quantize(weight, None)
            scale = arrays["scale"].astype(np.float64)[:, None]
            exact = weight.numpy().astype(np.float64)
            top = 2 ** (bits - 1) - 1
            grid = np.arange(-top, top + 1)[None, None, :] * scale[..., None]
            nearest = np.abs(grid - exact[..., None]).min(-1)
            error = np.abs(arrays["codes"] * scale - exact)
            assert np.array_equal(error, nearest) or np.allclose(error, nearest, rtol=1e-12, atol=1e-18)
            # Nothing is clipped, so the error is at most half a step; and no smaller float16 would do.
            assert (error <= scale / 2 * (1 + 1e-12)).all()
            least = np.abs(exact).max(1) / top
            assert (scale[:, 0] >= least).all() and (
                scale[:, 0] <= np.maximum(least * (1 + 2**-10), least + 2**-24)
            ).all()


def test_round_takes_any_number_of_axes() -> None:
    weight = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    scheme = Round(bits=6)
    flat = scheme.quantize(weight.reshape(15, 4), None)
    deep = scheme.quantize(weight, None)
    assert np.array_equal(flat["codes"], deep["codes"].reshape(15, 4))
    back = scheme.dequantize(deep, (5, 3, 4))
    assert torch.equal(back.reshape(15, 4), scheme.dequantize(flat, (15, 4)))


def test_round_clips_at_the_quantile() -> None:
    weight, _ = example((20, 301), 12)
    for clip in (0.5, 0.9, 0.999, 0.9999984, 1.0):
        scale = Round(bits=8, clip=clip).quantize(weight, None)["scale"].astype(np.float64)
        want = np.quantile(weight.abs().double().numpy(), clip, axis=1) / 127
        assert (scale >= want * (1 - 1e-12)).all() and (scale <= np.maximum(want * (1 + 2**-10), want + 2**-24)).all()


def test_row_quantile_is_numpys() -> None:
    rng = np.random.default_rng(0)
    for columns in (1, 2, 3, 100, 257):
        data = np.sort(rng.standard_normal((4, columns)), axis=1)
        for q in (0.001, 0.5, 0.999, 0.99999, 1.0):
            got = row_quantile(torch.from_numpy(data), q).numpy()
            assert np.allclose(got, np.quantile(data, q, axis=1), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_none_is_exact_for_values_of_its_dtype(dtype: str) -> None:
    scheme = Unquantized.model_validate({"dtype": dtype})
    if dtype == "f32":
        bits = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint32)
        value = torch.from_numpy(bits.view(np.float32).copy())
    else:
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        value = every.view(torch.float16 if dtype == "f16" else torch.bfloat16).float()
    value = value[value.isfinite()]
    assert value.numel() > 19000
    back = scheme.dequantize(scheme.quantize(value, None), tuple(value.shape))
    assert torch.equal(back.view(torch.int32), value.view(torch.int32))


def test_bf16_rounds_to_nearest_even_as_integers_say() -> None:
    bits = np.random.default_rng(1).integers(0, 0x7F000000, 5000, dtype=np.uint32)
    value = torch.from_numpy(bits.view(np.float32).copy())
    got = Unquantized(dtype="bf16").quantize(value, None)["value"]
    wide = bits.astype(np.uint64)
    want = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    assert got.dtype == np.uint16 and np.array_equal(got, want)


def test_a_scheme_without_a_width_has_none_to_change() -> None:
    with pytest.raises(SchemeError, match="has no setting `bits`"):
        Unquantized(dtype="bf16").with_bits(6)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Round, {"bits": 1}),
        (Round, {"bits": 9}),
        (Round, {"bits": 5.0}),
        (Round, {"bits": 5, "clip": 0.0}),
        (Round, {"bits": 5, "clip": 1.5}),
        (Round, {"bits": 5, "clip_floor": -1.0}),
        (Round, {"bits": 5, "damping": 0.1}),
        (Gptq, {"bits": 3}),
        (Gptq, {"bits": 5, "damping": 0.0}),
        (Gptq, {"bits": 5, "order": "random"}),
        (Gptq, {"bits": 5, "block": 0}),
        (Gptq, {"bits": 5, "clip_quantiles": ()}),
        (Gptq, {"bits": 5, "clip_quantiles": (0.0,)}),
        (Gptq, {"bits": 5, "clip_stds": (0.0,)}),
        (Gptq, {"bits": 5, "correction_rank": -1}),
        (Round, {"bits": 5, "clip_stds": (4.0,)}),
        (Unquantized, {"dtype": "f64"}),
        (Unquantized, {}),
    ],
)
def test_bad_settings_are_errors(kind: type[Scheme], settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(settings)


def test_the_catalog_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from specc.compiler import quant\n"
        "from specc.compiler.catalog import models\n"
        "from specc.compiler.quant.scheme import Scheme\n"
        "assert len(models(quant, Scheme, 'scheme')) >= 3\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_a_wider_clip_takes_fewer_bytes_as_the_estimate_says() -> None:
    """SDClip: entropy falls by log2 of the clip, whatever the width says; of other clips of one width too."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(5))
    sizes = []
    for clip in (6.0, 12.85, 20.0):
        scheme = Gptq(bits=6, clip_stds=(clip,))
        arrays = quantized(scheme, weight, torch.eye(1024))
        sizes.append(scheme.estimate_bytes((64, 1024)))
        assert sizes[-1] == pytest.approx(sum(_entropy_bytes(array) for array in arrays.values()), rel=0.02)
        assert scheme.with_clip(2 * clip).clip_stds == (2 * clip,)
    assert sizes[1] - sizes[2] == pytest.approx(64 * 1024 * math.log2(20.0 / 12.85) / 8, rel=0.03)
    cut = Round(bits=4, clip=0.9)
    arrays = quantized(cut, weight, None)
    assert cut.estimate_bytes((64, 1024)) == pytest.approx(sum(map(_entropy_bytes, arrays.values())), rel=0.02)
    with pytest.raises(SchemeError, match="no setting `clip_stds`"):
        cut.with_clip(3.0)
