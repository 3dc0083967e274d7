"""Hessians, quantizing a whole model, and the report about it."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from specc.compiler.quant.gptq import Gptq
from specc.compiler.quant.none import Unquantized
from specc.compiler.quant.round import Round
from specc.compiler.quant.scheme import Scheme
from specc.runtime.artifact.quantized_model import QuantizedModel, dequantized, entropy_bytes, quantize_tensors
from specc.runtime.calibration.hessian import CHUNK_ROWS, Hessians, traces
from specc.runtime.errors import IntegrityError, QuantizeError
from specc.runtime.quantize.quantizer import Quantizer, Statistics
from specc.runtime.quantize.report import Row, report, table


def model() -> tuple[dict[str, Tensor], dict[str, Scheme], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    params = {
        "embed.table": torch.randn(50, 16, generator=generator),
        "blocks.0.up": torch.randn(40, 16, generator=generator) * 0.1,
        "blocks.0.down": torch.randn(16, 40, generator=generator) * 0.1,
        "blocks.0.gain": torch.randn(16, generator=generator),
        "scalar": torch.tensor(0.25),
    }
    schemes: dict[str, Scheme] = {
        "embed.table": Round(bits=8),
        "blocks.0.up": Gptq(bits=5),
        "blocks.0.down": Gptq(bits=6),
        "blocks.0.gain": Unquantized(dtype="f16"),
        "scalar": Unquantized(dtype="f32"),
    }
    hessians = {}
    for name in ("blocks.0.up", "blocks.0.down"):
        x = torch.randn(200, params[name].shape[1], generator=generator)
        hessians[name] = x.T @ x / 200
    return params, schemes, hessians


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_hessians_are_sums_of_outer_products_a_token(dtype: torch.dtype, device: str | None) -> None:
    generator = torch.Generator().manual_seed(1)
    sums, rows = np.zeros((7, 7)), 0
    hessians = Hessians(dtype, device)
    for shape in ((3, 5, 7), (2, 7), (1, 1, 1, 7), (CHUNK_ROWS + 3, 7), (7,)):
        x = torch.randn(shape, generator=generator).to(torch.bfloat16)
        exact = x.double().reshape(-1, 7).numpy()
        sums += exact.T @ exact
        rows += exact.shape[0]
        hessians.add("a", x)
    got = hessians.per_token(rows)["a"]
    assert got.dtype == dtype
    assert np.allclose(got.double().numpy(), sums / rows, rtol=1e-12 if dtype == torch.float64 else 2e-5, atol=1e-6)


def test_float64_sums_do_not_lose_small_batches() -> None:
    hessians = Hessians()
    hessians.add("a", torch.full((1, 2), 3e4))
    for _ in range(100):
        hessians.add("a", torch.full((1, 2), 0.1))
    want = (9e8 + 100 * float(np.float32(0.1)) ** 2) / 101
    assert abs(float(hessians.per_token(101)["a"][0, 1]) - want) < 1e-6


def test_hessians_leave_no_graph_and_do_not_keep_the_input() -> None:
    hessians = Hessians()
    x = torch.ones(4, 3, requires_grad=True)
    hessians.add("a", x * 2)
    assert not hessians.per_token(4)["a"].requires_grad
    with torch.no_grad():
        x.fill_(math.nan)
    assert bool(hessians.per_token(4)["a"].eq(4.0).all())
    assert bool(hessians.per_token(2)["a"].eq(8.0).all())  # each token twice


def test_bad_inputs_to_hessians_are_named() -> None:
    hessians = Hessians()
    hessians.add("a.b", torch.ones(2, 3))
    with pytest.raises(QuantizeError, match=r"a\.b: the input has 4 features, but had 3"):
        hessians.add("a.b", torch.ones(2, 4))
    hessians.add("a.b", torch.tensor([[1.0, math.nan, 1.0]]))
    with pytest.raises(QuantizeError, match=r"a\.b: the input contains NaN"):
        hessians.per_token(3)
    empty = Hessians()
    empty.add("c", torch.ones(0, 3))
    with pytest.raises(QuantizeError, match="c: no calibration text reached this parameter"):
        empty.per_token(3)


def test_traces_are_sums_of_the_diagonal() -> None:
    assert traces({"a": torch.diag(torch.tensor([1.0, 2.0, 4.0])) + 8, "b": torch.ones(2, 2)}) == {"a": 31.0, "b": 2.0}


def test_a_model_there_and_back() -> None:
    params, schemes, hessians = model()
    quantized = quantize_tensors(params, schemes, hessians)
    assert [(name, s.suffix, s.dtype) for name, s in quantized.layout()] == [
        ("embed.table", "codes", "i8"),
        ("embed.table", "scale", "f16"),
        ("blocks.0.up", "codes", "i8"),
        ("blocks.0.up", "scale", "f16"),
        ("blocks.0.down", "codes", "i8"),
        ("blocks.0.down", "scale", "f16"),
        ("blocks.0.gain", "value", "f16"),
        ("scalar", "value", "f32"),
    ]
    back = dequantized(quantized)
    assert list(back) == list(schemes)
    for name, tensor in back.items():
        assert tensor.shape == params[name].shape and tensor.dtype == torch.float32
        relative = (tensor - params[name]).norm() / params[name].norm()
        assert float(relative) < {"blocks.0.up": 0.1, "blocks.0.down": 0.05}.get(name, 0.01)
        alone = schemes[name].dequantize(schemes[name].quantize(params[name], hessians.get(name)), tuple(tensor.shape))
        assert torch.equal(tensor, alone)
    assert torch.equal(back["scalar"], params["scalar"])


def test_failures_name_the_parameter() -> None:
    params, schemes, hessians = model()
    with pytest.raises(QuantizeError, match=r"blocks\.0\.down: gptq needs the Hessian"):
        quantize_tensors(params, schemes, {"blocks.0.up": hessians["blocks.0.up"]})
    with pytest.raises(QuantizeError, match=r"blocks\.0\.gain: `scheme: round` needs rows"):
        quantize_tensors(params, {**schemes, "blocks.0.gain": Round(bits=5)}, hessians)
    with pytest.raises(QuantizeError, match="1 names have no parameter or no scheme: scalar"):
        quantize_tensors({k: v for k, v in params.items() if k != "scalar"}, schemes, hessians)


def test_arrays_that_do_not_fit_are_integrity_errors() -> None:
    params, schemes, hessians = model()
    good = quantize_tensors(params, schemes, hessians)
    bad = {**good.tensors, "blocks.0.up": good.tensors["blocks.0.down"]}
    with pytest.raises(IntegrityError, match=r"blocks\.0\.up: codes is"):
        dequantized(QuantizedModel(good.schemes, good.shapes, bad))
    without = {name: arrays for name, arrays in good.tensors.items() if name != "scalar"}
    with pytest.raises(IntegrityError, match="scalar"):
        dequantized(QuantizedModel(good.schemes, good.shapes, without))
    over = {**good.tensors["blocks.0.up"], "codes": np.full((40, 16), 16, np.int8)}  # int5 ends at 15
    with pytest.raises(IntegrityError, match=r"blocks\.0\.up: a code is outside \[-15, 15\]"):
        dequantized(QuantizedModel(good.schemes, good.shapes, {**good.tensors, "blocks.0.up": over}))


def test_report_rows_against_the_inputs_themselves() -> None:
    params, schemes, _ = model()
    generator = torch.Generator().manual_seed(2)
    inputs = {
        name: torch.randn(300, params[name].shape[1], generator=generator).double()
        for name in params
        if "." in name and params[name].dim() == 2
    }
    hessians = {name: x.T @ x / 300 for name, x in inputs.items() if name != "embed.table"}
    quantized = quantize_tensors(params, schemes, hessians)
    back = dequantized(quantized)
    rows = report(Quantizer(params, Statistics(hessians)), schemes)
    assert [row.name for row in rows] == list(schemes)
    for row in rows:
        weight = params[row.name].double()
        delta = weight - back[row.name].double()
        assert math.isclose(row.mse, float((delta**2).mean()), rel_tol=1e-12, abs_tol=0)
        assert row.scheme == schemes[row.name].label() and row.bits == schemes[row.name].bits_per_value()
        assert row.bytes == sum(array.nbytes for array in quantized.tensors[row.name].values())
        if row.name in hessians:
            x = inputs[row.name]
            want = float((x @ delta.T).norm() / (x @ weight.T).norm())
            assert row.output_error is not None and math.isclose(row.output_error, want, rel_tol=1e-9)
        else:
            assert row.output_error is None
    text = table(rows).splitlines()
    assert len(text) == 7 and len({len(line) for line in text}) == 1
    assert text[2].split()[:2] == ["blocks.0.up", "5"] and text[2].endswith(f"{rows[1].bytes:,}")
    sums = [sum(row.compressed for row in rows), sum(row.bytes for row in rows)]
    assert text[-1].split() == ["total", *(f"{size:,}" for size in sums)]
    for row in rows:
        alone = quantize_tensors({row.name: params[row.name]}, {row.name: schemes[row.name]}, hessians)
        assert row.compressed == entropy_bytes(alone) and row.added_nats is None


def rows_of(layers: int, nats: float | None = 0.25) -> list[Row]:
    """Six a layer, one with no Hessian; the last layers have fewer bits and larger errors."""
    names = ("attention.q", "attention.k", "attention.out", "mlp.up", "mlp.down", "mlp." + "very_long_" * 8 + "name")
    return [
        Row(
            f"blocks.{layer}.{name}",
            "int5 gptq, per row",
            6.0 if layer < 2 else 5.0,
            1e-6 * (1 + layer),
            None if name == "mlp.up" else 0.01 * (1 + layer),
            2_000_000,
            1_500_000,
            nats,
        )
        for layer in range(layers)
        for name in names
    ]


def test_a_table_of_a_few_parameters_has_a_line_each() -> None:
    text = table(rows_of(6)).splitlines()
    assert len(text) == 38 and max(map(len, text)) == 100
    assert text[1].split() == ["blocks.0.attention.q", "6", "1.00e-06", "1.000%", "2.50e-01", "1,500,000", "2,000,000"]
    assert text[4].split()[3] == "-" and text[6].startswith("blocks.0.") and "…" in text[6]
    assert text[-1].split() == ["total", "9.00e+00", "54,000,000", "72,000,000"]
    assert "nats" not in table(rows_of(6, None))


def test_a_table_of_many_has_a_line_for_those_that_differ_in_the_layer_alone() -> None:
    text = table([Row("embed.token", "int8", 8.0, 2e-9, 0.002, 70, 60, None), *rows_of(11)]).splitlines()
    assert len(text) == 9 and max(map(len, text)) <= 100
    assert text[1].split() == ["embed.token", "8", "2.00e-09", "0.200%", "-", "60", "70"]
    numbers = ["5", "to", "6", "1.10e-05", "11.000%", "2.75e+00", "16,500,000", "22,000,000"]
    assert text[2].split() == ["blocks.*.attention.q", "x", "11", *numbers]
    assert text[-1].split() == ["total", "1.65e+01", "99,000,060", "132,000,070"]


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e8, 1e30])
def test_output_error_does_not_depend_on_the_scale_of_the_hessian(scale: float) -> None:
    params, schemes, hessians = model()
    unscaled = report(Quantizer(params, Statistics(hessians)), schemes)
    scaled = Statistics({name: h.double() * scale for name, h in hessians.items()})
    other = report(Quantizer(params, scaled), schemes)
    for a, b in zip(unscaled, other, strict=True):
        assert (a.output_error is None) == (b.output_error is None)
        assert a.output_error is None or math.isclose(a.output_error, b.output_error or 0.0, rel_tol=1e-9)


def test_output_error_without_any_input() -> None:
    params, schemes, hessians = model()
    row = report(Quantizer(params, Statistics({**hessians, "blocks.0.up": torch.zeros(16, 16)})), schemes)[1]
    assert row.output_error == 0.0


def test_entropy_is_shannons() -> None:
    codes = np.array([[0, 0, 0, 0], [1, 1, -1, -3]], np.int8)
    # Shares 4/8, 2/8, 1/8, 1/8: 1.75 bits each, 14 bits in all; and two float16 scales.
    quantized = QuantizedModel(
        {"a": Round(bits=4)}, {"a": (2, 4)}, {"a": {"codes": codes, "scale": np.ones(2, np.float16)}}
    )
    assert entropy_bytes(quantized) == math.ceil(14 / 8 * 1.005) + 4
