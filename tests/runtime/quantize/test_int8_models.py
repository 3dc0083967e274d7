"""Models in int8: near their floats, the same step by step, the same from an artifact; what each product is given."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from int8_models import CHARS, LSTM, MODELS, QUANT, WIDE, Int8Models, data_of, lines, quantized_model
from pydantic import ValidationError
from tiny_models import spec_of

from specc.compiler import pipeline
from specc.compiler.build import canonical, compile_loaded
from specc.compiler.int8.products import integer_products
from specc.compiler.ops.int8_lstm import Int8LstmStep
from specc.compiler.programs import reference
from specc.compiler.programs.programs import LoweringError
from specc.compiler.quant.int8 import Int8
from specc.compiler.quant.scheme import Range, Seen
from specc.runtime.artifact.artifact import ArtifactContents, measured_bytes, write_artifact
from specc.runtime.artifact.deployment import Deployment
from specc.runtime.artifact.int8_products import constants
from specc.runtime.artifact.table import described
from specc.runtime.calibration.input_ranges import input_ranges
from specc.runtime.data.tokenizers.characters import CharTokenizer
from specc.runtime.decode.lines import translator
from specc.runtime.errors import IntegrityError, QuantizeError
from specc.runtime.open_model import open_model, read_verified
from specc.runtime.quantize.report import input_report, input_table

HIDDEN = ("hidden", "back_hidden")


@cache
def model(name: str, bits: int = 8) -> Int8Models:
    return quantized_model(spec_of(data_of(MODELS[name], QUANT if bits == 8 else WIDE)))


@pytest.mark.parametrize("name", MODELS)
def test_int8_is_near_the_floats_and_is_not_the_floats(name: str) -> None:
    """The inputs in int8 cost about as much as the weights in int8 do."""
    models = model(name)
    source, target = lines(1, 64)
    with torch.no_grad():
        exact, rounded, whole = (m.score(source, target) for m in (models.floats, models.rounded, models.whole))  # type: ignore[operator]
    mask = target != 0
    assert torch.equal(whole == 0, ~mask)
    weights_cost, cost = ((result - exact)[mask].square().mean().sqrt() for result in (rounded, whole))
    assert 0 < float(cost) < 6 * float(weights_cost) + 1e-3
    assert float(cost) < 0.05 * float(exact[mask].std())
    assert not torch.equal(whole, rounded)


@pytest.mark.parametrize("name", MODELS)
def test_inputs_of_16_bits_cost_next_to_nothing(name: str) -> None:
    """Of what those of 8 do; what is left is clipped, beyond what calibration saw."""
    source, target = lines(1, 64)
    results = []
    for bits in (8, 16):
        models = model(name, bits)
        with torch.no_grad():
            rounded, whole = (m.score(source, target) for m in (models.rounded, models.whole))  # type: ignore[operator]
        results.append(float((whole - rounded)[target != 0].abs().median()))
    assert 0 < 50 * results[1] < results[0]


def test_inputs_of_16_bits_are_chosen_by_rule() -> None:
    """Others keep 8, with the product that writes codes; weights that share an input have to agree."""
    rules = [{"match": match, **WIDE["default"]} for match in ("*.{hidden,back_hidden}", "decoder.cross.{k,v}")]
    quant = {**QUANT, "rules": [*QUANT["rules"], *rules]}
    deployed = pipeline.deployed(spec_of(data_of(LSTM, quant)), "cpu")
    assert deployed is not None
    names = {param.name for param in deployed.params}
    assert {name for name in names if name.endswith("_zeros")} == {f"decoder.cross.{word}_zeros" for word in "kv"}
    nodes = [node for graph in deployed.graphs for node in graph.nodes]
    assert {node.op.bits for node in nodes if isinstance(node.op, Int8LstmStep)} == {16}
    quant = {**QUANT, "rules": [*QUANT["rules"], {**rules[1], "match": "decoder.cross.k"}]}
    with pytest.raises(LoweringError) as raised:
        pipeline.deployed(spec_of(data_of(LSTM, quant)), "cpu")
    (problem,) = raised.value.problems
    wanted = (
        "decoder.cross.k and the weights that share its input or its code must all have 8-bit inputs, or all have "
        "16-bit inputs"
    )
    assert (problem.code, problem.message) == ("S312", wanted) and problem.hint.startswith("give them the same scheme")


def test_bits_that_there_are_not_are_refused() -> None:
    for bits in (4, 12, 32, "16"):
        with pytest.raises(ValidationError, match="Input should be 8 or 16"):
            Int8.model_validate({"activation_bits": bits})
    assert "activation_bits" not in canonical(model("lstm").spec) and "activation_bits" in canonical(
        model("lstm", 16).spec
    )


def test_what_rounding_adds_to_an_input_is_of_the_step_it_has() -> None:
    """GPTQ's damping: with 16 bits next to none, so what the weights' own rounding costs is less."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, generator=generator).double() for size in ((24, 16), (400, 16)))
    x = x * torch.exp(2 * torch.randn(16, generator=generator))
    seen = Range(x.abs().amax(0), x.T @ x / 400)
    given = Seen(seen.products, Int8(activations="per_channel").input_scale(seen, [weight]))
    codes = [Int8(activations="per_channel", activation_bits=bits).quantize_seen(weight, given) for bits in (8, 16)]
    errors = []
    for arrays in codes:
        share = torch.from_numpy(arrays["input_scale"]).double()
        steps = torch.from_numpy(arrays["codes"]).double() * torch.from_numpy(arrays["scale"]).double()[:, None]
        left = weight - steps * (share.max() / share)
        errors.append(float((left @ seen.products * left).sum()))
    assert errors[1] < errors[0]


@pytest.mark.parametrize(("name", "bits"), [*((name, 8) for name in MODELS), ("lstm", 16), ("blocks", 16)])
def test_step_by_step_is_the_whole(name: str, bits: int) -> None:
    models: Any = model(name, bits).whole
    source, target = lines(2, 16)
    with torch.no_grad():
        wanted = models.score(source, target)
        state = models.encode(source)
        fed, result = torch.ones(16, 1, dtype=torch.int64), []
        for t in range(target.shape[1]):
            logits = models.extend(fed, torch.tensor(t), state)
            result.append(-logits.log_softmax(-1).gather(1, target[:, t : t + 1]))
            fed = target[:, t : t + 1]
    difference = (torch.cat(result, 1) - wanted)[target != 0].abs()
    # A float that differs in its last bit can fall to the code beside it; that is one step of one input.
    assert float(difference.median()) < 1e-5 and float(difference.max()) < (0.05 if bits == 8 else 5e-4)


def test_every_product_is_calibrated_and_inputs_are_shared() -> None:
    sources = {source.weight: source for source in model("lstm").sources}
    assert set(sources) == {
        *(f"encoder.lstm.{back}{word}" for back in ("", "back_") for word in ("input", "hidden")),
        *(f"decoder.{part}.{word}" for part in ("attention", "cross") for word in "qkv"),
        *(f"decoder.{part}.out" for part in ("attention", "cross")),
        *("decoder.lstm.input", "decoder.lstm.hidden", "head.logits"),
    }
    assert sources["decoder.attention.v"].leader == "decoder.attention.q"
    assert sources["decoder.cross.v"].leader == "decoder.cross.k" != sources["decoder.cross.q"].leader
    assert sources["encoder.lstm.back_input"].leader == "encoder.lstm.input"
    assert sources["encoder.lstm.back_hidden"].leader == "encoder.lstm.back_hidden"
    assert sources["head.logits"].bias == "head.logits_bias"
    assert sources["decoder.lstm.hidden"].bias == "decoder.lstm.bias" and sources["decoder.lstm.input"].bias == ""


def test_ranges_are_those_of_the_inputs() -> None:
    """The scale of a product's input is the largest magnitude that calibration gave it, divided by 127."""
    models = model("lstm")
    embed = models.weights["encoder.embed.token"]
    seen = torch.cat([lines(100 + i)[0].flatten() for i in range(8)]).unique()
    (scale,) = models.stored.tensors["encoder.lstm.input"]["input_scale"]
    assert scale == np.float32(float(embed[seen].abs().max()) / 127)
    bias, weight = models.stored.tensors["head.logits_bias"], models.stored.tensors["head.logits"]
    step = np.float32(weight["input_scale"][0]) * weight["scale"].astype(np.float32)
    exact = models.weights["head.logits_bias"].double().numpy() / step.astype(np.float64)
    assert np.array_equal(bias["codes"], np.round(exact).astype(np.int32))


def by_feature(name: str, uneven: float = 1.5) -> Int8Models:
    quant = {**QUANT, "default": {"scheme": "int8", "activations": "per_channel"}}
    return quantized_model(spec_of(data_of(MODELS[name], quant)), uneven=uneven)


@pytest.mark.parametrize("name", MODELS)
def test_a_scale_for_each_feature_costs_less_where_features_differ(name: str) -> None:
    shared, per_feature = quantized_model(spec_of(data_of(MODELS[name])), uneven=1.5), by_feature(name)
    source, target = lines(1, 64)
    mask = target != 0
    costs = []
    for models in (shared, per_feature):
        with torch.no_grad():
            exact, whole = (m.score(source, target) for m in (models.floats, models.whole))  # type: ignore[operator]
        costs.append(float((whole - exact)[mask].square().mean()))
    assert 0 < costs[1] < costs[0]
    if name == "lstm":
        assert per_feature.stored.tensors["encoder.lstm.input"]["input_scale"].shape == (12,)
        assert per_feature.stored.tensors["encoder.lstm.back_hidden"]["input_scale"].shape == (8,)
        assert len(np.unique(per_feature.stored.tensors["encoder.lstm.input"]["input_scale"])) > 1


def test_directions_have_ranges_of_their_own() -> None:
    sources = {source.weight: source for source in model("lstm").sources}
    parts = {name: (sources[f"encoder.lstm.{name}"].part, sources[f"encoder.lstm.{name}"].parts) for name in HIDDEN}
    assert parts == {"hidden": (0, 2), "back_hidden": (1, 2)} and sources["decoder.lstm.hidden"].parts == 1
    models = model("lstm")
    programs = pipeline.lower(models.spec, "cpu")
    batch = dict(zip(("source", "target"), lines(3), strict=True))
    seen = input_ranges(programs, models.sources, [batch], models.weights)
    ahead, back = (seen[f"encoder.lstm.{name}"] for name in HIDDEN)
    both: list[torch.Tensor] = []
    reference.run(
        programs,
        "score",
        batch,
        models.weights,
        lambda node, _, outputs: both.append(outputs[0]) if node.op.name == "lstm" else None,
    )
    torch.testing.assert_close(torch.cat((ahead.largest, back.largest)), both[0].abs().amax((0, 1)).double())


def test_what_one_scale_a_feature_stands_for_is_the_weight() -> None:
    models = by_feature("blocks")
    for name, scheme in models.stored.schemes.items():
        if scheme.integer and models.weights[name].dim() == 2:
            share = torch.from_numpy(models.stored.tensors[name]["input_scale"])
            arrays = scheme.quantize_seen(models.weights[name], Seen(None, share))
            result, wanted = scheme.dequantize(arrays, tuple(models.weights[name].shape)), models.weights[name]
            step = torch.from_numpy(arrays["scale"])[:, None] / (share / share.max())
            assert bool(((result - wanted).abs() <= 0.5001 * step).all()), name


def test_weights_are_rounded_for_the_inputs_that_they_meet() -> None:
    """The sums, not each weight, are near: with correlated inputs far nearer than by rounding to nearest, never less
    so; where inputs know nothing of each other the codes are the nearest."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    x = (torch.randn(4096, 8, generator=generator) @ torch.randn(8, 64, generator=generator)).double()
    scheme = Int8(activations="per_channel")
    seen = Range(x.abs().amax(0), x.T @ x / len(x))
    scale = scheme.input_scale(seen, [weight])
    exact = x @ weight.double().T
    errors = []
    for hessian in (None, seen.products):
        arrays = scheme.quantize_seen(weight, Seen(hessian, scale))
        result = x @ scheme.dequantize(arrays, (48, 64)).double().T
        errors.append((result - exact).square().mean(0))
    assert bool((errors[1] <= errors[0] * 1.0001).all()) and float(errors[1].mean()) < 0.25 * float(errors[0].mean())
    apart = [scheme.quantize_seen(weight, Seen(hessian, scale))["codes"] for hessian in (None, torch.eye(64).double())]
    assert np.array_equal(*apart)


def test_an_input_that_is_no_number_is_refused() -> None:
    models = model("blocks")
    programs = pipeline.lower(models.spec, "cpu")
    weights = {**models.weights, "encoder.blocks.1.mlp.norm_bias": torch.full((16,), float("nan"))}
    batch = dict(zip(("source", "target"), lines(3), strict=True))
    with pytest.raises(QuantizeError, match=r"encoder\.blocks\.1\.mlp\.up: the input contains NaN"):
        input_ranges(programs, models.sources, [batch], weights)
    with pytest.raises(QuantizeError, match="no calibration data reached this weight"):
        input_ranges(programs, models.sources, [], models.weights)


@pytest.mark.parametrize(("name", "bits"), [*((name, 8) for name in MODELS), ("lstm", 16), ("blocks", 16)])
def test_an_artifact_is_the_model(name: str, bits: int, tmp_path: Path) -> None:
    """Encoder, decoder and the decode loop run from one file."""
    models = model(name, bits)
    path, deployment = tmp_path / "model.specc", Deployment.of(models.spec)
    write_artifact(
        path,
        ArtifactContents(
            spec=canonical(models.spec).encode(),
            interface=deployment.interface,
            code=deployment.code,
            layout=deployment.layout,
            tensors=models.stored.tensors,
            table=described(models.stored.schemes, models.stored.tensors),
        ),
        quality=5,
    )
    result = read_verified(path)
    assert result.same_code and result.spec == models.spec
    opened = open_model(path, "cpu", "cpu")
    source, target = lines(4)
    with torch.no_grad():
        assert torch.equal(opened.line_model.score(source, target), models.whole.score(source, target))  # type: ignore[operator]
    tokenizer = CharTokenizer(CHARS)
    texts = ["(7-z)", "x*2"]
    answers = [
        translator(m, models.spec, tokenizer, torch.device("cpu"), batch=2).translate(texts)
        for m in (opened.model, models.whole)
    ]
    assert answers[0] == answers[1] and len(answers[0]) == 2


def test_the_deployed_code_multiplies_codes_and_the_plan_tells_its_padding() -> None:
    built = compile_loaded(spec_of(data_of(LSTM, targets=["cpu", "sm90", "sm86"])), None)
    for target in ("cpu", "sm90", "sm86"):
        text = built.files[f"{target}/deployed/model.py"]
        assert "F.linear" not in text and "torch.lstm" not in text and "def forward(self, source" not in text
        assert '"head.logits_codes": ((32, 16), torch.int8)' in text
    assert "head.logits: N 31 is padded to 32" in built.files["PLAN.md"]
    assert "encoder.lstm.input: K 12 is padded to 16" in built.files["PLAN.md"]
    assert "encoder.lstm.*.recurrent.step: K 8 is padded to 16" in built.files["PLAN.md"]
    assert any(name.startswith("sm90/deployed/int8_linear") and name.endswith(".cu") for name in built.files)
    kernels = {choice.kernel.name for choice in built.deployed["sm86"].listed}
    assert kernels == {"gemm_int8_sm80", "int8_lstm_triton"}


def test_a_model_without_int8_has_no_deployed_code() -> None:
    quant = {"default": {"scheme": "round", "bits": 8}, "rules": [{"match": "*bias", "scheme": "none", "dtype": "f32"}]}
    spec = spec_of(data_of(LSTM, quant))
    assert not compile_loaded(spec, None).deployed
    schemes = {param.name: spec.quant.default for param in pipeline.lower(spec, "cpu").params}  # type: ignore[union-attr]
    assert integer_products(pipeline.lower(spec, "cpu"), schemes) == ()


def stored_with(models: Int8Models, name: str, **arrays: Any) -> Any:
    tensors = {**models.stored.tensors, name: {**models.stored.tensors[name], **arrays}}
    return replace(models.stored, tensors=tensors)


@pytest.mark.parametrize("bits", [8, 16])
def test_arrays_that_do_not_fit_are_refused_with_what_was_expected(bits: int) -> None:
    """Each of these was computed with, silently, where pointers carry no shapes."""
    models = model("lstm", bits)
    weight, bias = models.stored.tensors["head.logits"], models.stored.tensors["head.logits_bias"]
    wide = np.zeros((31, 32), np.int8)
    for name, arrays, message in (
        (
            "head.logits",
            {"codes": wide},
            r"head\.logits: the weight has 32 columns, but its input has 16 features \(decoder",
        ),
        ("head.logits", {"codes": weight["codes"][:30]}, "head.logits: the weight has 30 rows, and the model has 31"),
        ("head.logits", {"codes": weight["codes"].T}, "head.logits: the weight has 31 columns"),
        ("head.logits", {"codes": weight["codes"].astype(np.float32)}, "the weight is stored as f32"),
        ("head.logits", {"scale": weight["scale"][:5]}, r"the weight has 31 rows, but its scales have the shape \[5\]"),
        ("head.logits_bias", {"codes": bias["codes"][:30]}, "the weight has 31 rows, but its bias has 30 numbers"),
        ("head.logits_bias", {"codes": bias["codes"].astype(np.float32)}, "the bias is stored as f32"),
        (
            "head.logits_bias",
            {"scale": bias["scale"] * 2},
            "head.logits_bias was quantized with other scales than those of",
        ),
        (
            "decoder.attention.v",
            {"input_scale": weight["input_scale"] * 3},
            "share an input, but have different input scales",
        ),
    ):
        with pytest.raises(IntegrityError, match=message):
            constants(models.sources, stored_with(models, name, **arrays))
    assert constants(models.sources, models.stored)


def test_the_report_tells_of_every_input() -> None:
    models = by_feature("lstm")
    programs = pipeline.lower(models.spec, "cpu")
    batch = dict(zip(("source", "target"), lines(100), strict=True))
    seen = input_ranges(programs, models.sources, [batch], models.weights)
    rows = {row.weights[0]: row for row in input_report(models.sources, seen, models.stored)}
    assert len(rows) == len({source.leader for source in models.sources})
    assert rows["decoder.attention.q"].weights == tuple(f"decoder.attention.{word}" for word in "qkv")
    assert rows["decoder.lstm.hidden"].maker == "decoder.lstm.lstm" and rows["decoder.lstm.hidden"].peak <= 1
    embed = rows["encoder.lstm.input"]
    token = models.weights["encoder.embed.token"][batch["source"]]
    assert embed.maker == "encoder.embed.token" and embed.features == 12
    assert embed.peak == pytest.approx(float(token.abs().max())) and embed.spread > 1
    assert embed.rms == pytest.approx(float(token.square().mean().sqrt()), rel=1e-5)
    scale = torch.from_numpy(models.stored.tensors["encoder.lstm.input"]["input_scale"])
    assert embed.scale == float(scale.max())
    rounded = (token / scale).round() * scale - token
    assert embed.error == pytest.approx(float(rounded.square().mean().sqrt()) / embed.rms, rel=0.15)
    text = input_table(tuple(rows.values())).splitlines()
    assert len(text) == len(rows) + 1 and text[0].split()[-6:] == ["peak", "rms", "scale", "spread", "bits", "error"]
    assert {row.bits for row in rows.values()} == {8}
    models = model("lstm", 16)
    finer = input_report(models.sources, seen, models.stored)
    assert {row.bits for row in finer} == {16} and max(row.error for row in finer) < min(
        row.error for row in rows.values()
    )
    assert input_table(()) == ""


def test_the_estimate_is_near_what_an_artifact_takes() -> None:
    """Of the weights of poly_attn's products, at random: 97 % of the artifact's bytes."""
    scheme, generator = Int8(activations="per_channel"), torch.Generator().manual_seed(0)
    estimate, measured = 0, 0
    for shape in ((256, 64), (128, 128), (512, 256), (512, 128)):
        weight = torch.randn(shape, generator=generator)
        arrays = scheme.quantize_seen(weight, Seen(None, torch.rand(shape[1], generator=generator) + 0.5))
        layout = [("w", stored) for stored in scheme.stored(shape)]
        measured += measured_bytes(ArtifactContents(spec=b"", layout=layout, tensors={"w": arrays}))
        estimate += scheme.estimate_bytes(shape)
    assert 0.95 * measured < estimate < 1.05 * measured
