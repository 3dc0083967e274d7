"""The bytes of weights that a decoding step reads in `specc plan`, and its kernels in `specc explain`."""

import json
from pathlib import Path

import pytest

from specc.cli.app import run
from specc.compiler.ops.decoding.packed_codes import lanes_of
from specc.compiler.pipeline import lower
from specc.compiler.report.decoding import decoding_data, decoding_lines, decoding_of
from specc.compiler.spec.check import load

SPECS = Path(__file__).parents[3] / "specs"
GPT2 = SPECS / "gpt2_124m.yaml"


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_bytes_of_a_token_are_those_of_its_weights(bits: int) -> None:
    spec = load(GPT2, (f"quant.default.bits={bits}", f"quant.rules.0.bits={bits}"))[0]
    decoding = decoding_of(spec, spec.targets)
    shapes = [param.shape for param in lower(spec, "sm90").params]
    assert decoding is not None and not decoding.refused
    looked_up = 2 * 768  # the row of the embedding of the token
    assert decoding.packed_bytes == sum(n * (bits * lanes_of(k) + 2) for n, k in shapes) + looked_up
    assert decoding.float_bytes == 2 * sum(n * k for n, k in shapes)
    (line,) = decoding_lines(decoding)
    assert line.startswith(f"decoding     {decoding.packed_bytes:,} bytes of weights per token from an artifact, ")


def test_products_of_floats_are_named_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    rules = (
        "{match: embed.token, scheme: round, bits: 8, correction_rank: 2}, "
        '{match: "blocks.{2,3}.mlp.up", scheme: none, dtype: bf16}'
    )
    spec = load(GPT2, (f"quant.rules=[{rules}]",))[0]
    decoding = decoding_of(spec, spec.targets)
    _, *lines = decoding_lines(decoding)
    assert lines == [
        "  blocks.{2,3}.mlp.up reads bf16: blocks.*.mlp.up: bf16 has no codes",
        "  head.logits reads bf16: embed.token: a kernel cannot decode int8 round, per row, rank 2 correction",
    ]
    assert run(["plan", str(GPT2), "--set", f"quant.rules=[{rules}]", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["decoding"]
    assert data == decoding_data(decoding) and data["artifact_bytes"] < data["float_bytes"]
    assert data["floats"][0]["nodes"] == ["blocks.2.mlp.up", "blocks.3.mlp.up"]
    assert run(["explain", str(GPT2), "blocks.*.mlp.up", "--target", "sm90", "--set", f"quant.rules=[{rules}]"]) == 0
    shown = capsys.readouterr().out
    assert "on sm90/decoding: row_linear_triton (triton)" in shown
    assert "packed_weights: blocks.*.mlp.up: reads codes of 6 bits" in shown
    assert "packed_weights: blocks.2.mlp.up, blocks.3.mlp.up: not applied: blocks.*.mlp.up: bf16 has no codes" in shown


def test_models_whose_steps_read_no_codes_have_no_line() -> None:
    for path, change in ((GPT2, "quant=null"), (GPT2, "targets=[cpu]"), (SPECS / "poly_attn.yaml", "train.seed=1")):
        spec = load(path, (change,))[0]
        decoding = decoding_of(spec, spec.targets)
        assert decoding is None and decoding_data(decoding) is None and not list(decoding_lines(decoding))
