"""The int8 products of deployed plans in `specc plan` and `specc explain`."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import ATTENTION, MLP, spec_data

from specc.cli.app import run
from specc.compiler.build import compile_spec
from specc.compiler.quant.int8 import Int8
from specc.compiler.report.int8_products import product_lines, products

SPECS = Path(__file__).parents[3] / "specs"


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text model of width 8, whose products are all padded."""
    data = spec_data((ATTENTION, {**MLP, "hidden": 16}), fuse=())
    data["quant"] = {
        "default": {"scheme": "int8"},
        "rules": [{"match": "embed.token", "scheme": "none", "dtype": "f32"}],
    }
    path = tmp_path_factory.mktemp("spec") / "tiny.yaml"
    path.write_text(json.dumps(data))
    return path


def test_every_product_has_a_row_with_its_extents_and_what_is_padded() -> None:
    built = compile_spec(SPECS / "poly_attn.yaml")
    for target, plan in built.deployed.items():
        rows = {(row.node, row.m): row for row in products(plan)}
        head = rows["head.logits", "B x T"]
        assert (head.n, head.k, head.model_n, head.model_k) == (32, 128, 31, 128)
        assert head.extents == "N 31 -> 32, K 128" and head.data()["padded"] == {"n": [31, 32]}
        assert rows["decoder.lstm.step", "B"].extents == "N 512, K 128" and rows["head.logits", "B"].n == 32
        assert rows["encoder.lstm.forward_x", "S x B"].module == "int8_linear_i16_add_f32__n256_k64"
        assert rows["encoder.lstm.forward_x.second", "S x B"].module == "int8_linear_f32__n256_k64"
        assert rows["decoder.lstm.step", "B"].module == "int8_lstm_step__h128_i16"
        assert {row.language for row in rows.values()} == ({"torch"} if target == "cpu" else {"cutlass", "triton"})
        assert {row.module for row in rows.values()} == {
            choice.rendered.module for choice in plan.choices if choice.listed
        }


def test_the_summary_lists_each_kernel_once_with_its_padding(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(SPECS / "poly_attn.yaml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25
    at = next(i for i, line in enumerate(lines) if line.startswith("deployed"))
    assert "cpu (torch), sm90 (cutlass/triton), sm86 (cutlass/triton)" in lines[at]
    assert sum("int8_linear_f32__n32_k128 " in line for line in lines) == 1
    assert any("N 31 -> 32, K 128, M B x T or B: head.logits" in line for line in lines)


def test_k_is_told_too_and_data_has_all(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(spec), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["deployed"]["cpu"]
    padded = {row["node"]: row["padded"] for row in rows}
    assert padded["blocks.*.attention.q"] == {"n": [8, 16], "k": [8, 16]}
    assert padded["blocks.*.mlp.up"] == {"k": [8, 16]}
    assert product_lines({}) == []


def test_explain_answers_for_the_nodes_that_are_deployed(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(SPECS / "poly_attn.yaml")
    assert run(["explain", path, "head.logits", "--target", "sm90"]) == 0
    text = capsys.readouterr().out
    assert "on sm90/deployed: gemm_int8_sm80 (cutlass)" in text
    assert "not gemm_int8_sm90: gemm_int8_sm80 has the lower rank" in text
    assert "file: sm90/deployed/int8_linear_f32__n32_k128.cu" in text
    assert run(["explain", path, "decoder.lstm.step", "--target", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.count("int8_lstm_torch (torch)") == 1 and "no fused group" not in text


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "int8 products, per channel"),
        ({"activation_bits": 16}, "int8 products, per channel, inputs in 16 bits"),
        ({"activations": "per_channel"}, "int8 products, per channel, inputs per channel"),
        (
            {"activations": "per_channel", "activation_bits": 16},
            "int8 products, per channel, inputs per channel in 16 bits",
        ),
    ],
)
def test_what_a_scheme_is_called_tells_of_its_inputs(inputs: dict[str, Any], words: str) -> None:
    assert Int8.model_validate(inputs).label() == words
