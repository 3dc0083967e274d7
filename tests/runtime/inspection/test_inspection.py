"""What `specc inspect` says of models whose weights are planted, and of small runs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from run_samples import EXPERTS, make_run, small_spec, write_text
from tiny_models import spec_of, tiny
from torch import Tensor

from specc.compiler.pipeline import lower
from specc.compiler.programs import reference
from specc.compiler.programs.programs import flatten
from specc.compiler.quant.round import Round
from specc.runtime.calibration.calibrate import Capture
from specc.runtime.inspection.heads import CONTENT, FIRST, INDUCTION, MIXED, PREVIOUS, HeadPatterns, repeated_tokens
from specc.runtime.inspection.inspect import Inspection, InspectOptions, inspect
from specc.runtime.inspection.norms import ResidualNorms
from specc.runtime.inspection.ranks import rank_uses
from specc.runtime.inspection.table import tables
from specc.runtime.inspection.units import UnitActivity
from specc.runtime.storage.run_directory import Run

pytestmark = pytest.mark.usefixtures("few_passes")

VOCAB, PLACES, HEADS, WIDTH = 64, 32, 4, 64
DIM = 2 * VOCAB + PLACES  # a token, its position, and the token before it, each as one of many features
TOKEN, PLACE, BEFORE = (slice(0, VOCAB), slice(VOCAB, VOCAB + PLACES), slice(VOCAB + PLACES, DIM))


def planted() -> tuple[Any, dict[str, Tensor]]:
    """A model of two blocks: in the first, a head each that looks at the previous token, at the first token, at the
    token with the largest id, and everywhere; in the second, an induction head. Of the first MLP's 12 units, 3 are dead
    and 2 are weak."""
    spec = tiny(
        layers=(
            {"kind": "attention", "heads": HEADS, "head_dim": WIDTH},
            {"kind": "mlp", "hidden": 12, "act": "relu(x)"},
        ),
        fuse=(),
        vocab=VOCAB,
        dim=DIM,
        context=PLACES,
        embed=[{"kind": "token"}, {"kind": "positions"}],
    )
    weights = {param.name: torch.zeros(param.shape) for param in lower(spec, "cpu").params}
    (places,) = [name for name in weights if name.startswith("embed.") and name != "embed.token"]
    weights["embed.token"][:, TOKEN] = torch.eye(VOCAB)
    weights[places][:, PLACE] = torch.eye(PLACES)
    q, k, v, out = (weights[f"blocks.0.attention.{name}"] for name in ("q", "k", "v", "out"))
    sharp = 2.0  # the norm makes features of sqrt(DIM / 2), so that logits are about 40
    q[0:PLACES, PLACE] = sharp * torch.eye(PLACES).roll(-1, 0)  # position i asks for i - 1
    q[PLACES - 1, PLACE] = 0.0
    k[0:PLACES, PLACE] = sharp * torch.eye(PLACES)
    v[0:WIDTH, TOKEN] = torch.eye(VOCAB) / math.sqrt(DIM / 2)
    out[BEFORE, 0:WIDTH] = torch.eye(VOCAB)
    q[WIDTH, PLACE] = sharp
    k[WIDTH, VOCAB] = sharp  # position 0
    q[2 * WIDTH, PLACE] = sharp
    k[2 * WIDTH, TOKEN] = sharp * torch.arange(VOCAB) / VOCAB
    weights["blocks.1.attention.q"][0:WIDTH, TOKEN] = 1.2 * sharp * torch.eye(VOCAB)
    weights["blocks.1.attention.k"][0:WIDTH, BEFORE] = 1.2 * sharp * torch.eye(VOCAB)
    up = weights["blocks.0.mlp.up"]
    up[3:, PLACE] = 1.0
    up[3:5] *= 1e-4
    weights["blocks.1.mlp.up"][:, PLACE] = -1.0  # all units are dead
    return spec, weights


def run_planted(ids: Tensor, *observers: Any, spec: Any, weights: dict[str, Tensor]) -> None:
    def observe(*seen: Any) -> None:
        for observer in observers:
            observer(*seen)

    inputs = {"ids": ids, "targets": ids.roll(-1, 1)}
    reference.run(lower(spec, "cpu"), "score", inputs, weights, observe)


def test_planted_heads_units_and_norms_are_found() -> None:
    spec, weights = planted()
    programs = lower(spec, "cpu")
    graph = flatten(programs, programs.program("score"))
    heads, units, norms = HeadPatterns(graph), UnitActivity(graph), ResidualNorms(graph)
    text = torch.randint(VOCAB, (4, PLACES), generator=torch.Generator().manual_seed(3))
    run_planted(text, heads.observe, units.observe, norms.observe, spec=spec, weights=weights)
    repeated = repeated_tokens(2, PLACES // 2, VOCAB)
    run_planted(repeated, heads.observe_repeated, spec=spec, weights=weights)
    found = {(head.layer.split(".")[1], head.head): head for head in heads.heads()}
    types = {place: head.type for place, head in found.items()}
    others = {("1", i): MIXED for i in (1, 2, 3)}
    assert types == {
        ("0", 0): PREVIOUS, ("0", 1): FIRST, ("0", 2): CONTENT, ("0", 3): MIXED, ("1", 0): INDUCTION, **others
    }  # fmt: skip
    assert found["0", 0].previous > 0.99 and found["0", 0].content < 0.01
    assert found["0", 1].first > 0.99
    # the first token takes itself for the token before it, so that the query at its repetition sees two of them
    assert found["1", 0].induction == pytest.approx(1 - 0.5 / (PLACES / 2), abs=1e-3)
    # uniform attention over t + 1 tokens, for the queries from 2 on
    uniform = sum(1 / (t + 1) for t in range(2, PLACES)) / (PLACES - 2)
    assert found["0", 3].previous == pytest.approx(uniform) and found["0", 3].first == pytest.approx(uniform)
    assert found["0", 3].content == 0.0
    assert [(u.units, u.dead, u.weak, u.tokens) for u in units.layers()] == [(12, 3, 5, 128), (12, 12, 12, 128)]
    assert [u.active for u in units.layers()] == [pytest.approx(9 / 12), 0.0]
    first, second = norms.blocks()
    assert first.before == pytest.approx(math.sqrt(2 / DIM))  # a token and a position
    assert first.after == pytest.approx(math.sqrt(3 / DIM), rel=0.02)  # and the token before
    assert first.growth == pytest.approx(math.sqrt(1.5), rel=0.02) and first.change == pytest.approx(0.707, rel=0.02)
    assert (second.growth, second.change) == (1.0, 0.0)


def test_a_head_is_not_found_where_it_was_removed() -> None:
    spec, weights = planted()
    weights["blocks.0.attention.v"].zero_()  # the induction head has nothing to match with
    weights["blocks.0.attention.k"][:WIDTH].zero_()
    programs = lower(spec, "cpu")
    heads = HeadPatterns(flatten(programs, programs.program("score")))
    text = torch.randint(VOCAB, (4, PLACES), generator=torch.Generator().manual_seed(3))
    run_planted(text, heads.observe, spec=spec, weights=weights)
    run_planted(repeated_tokens(2, PLACES // 2, VOCAB), heads.observe_repeated, spec=spec, weights=weights)
    types = [head.type for head in heads.heads()]
    assert PREVIOUS not in types and INDUCTION not in types and types.count(FIRST) == 1


def test_repeated_tokens_repeat_and_do_not_separate() -> None:
    ids = repeated_tokens(3, 20, 21)
    assert torch.equal(ids[:, :20], ids[:, 20:]) and ids.max() == 19
    assert all(len(set(row[:20].tolist())) == 20 for row in ids)
    assert repeated_tokens(1, 30, 5).max() <= 3


def test_the_rank_use_of_known_singular_values() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 4, generator=generator, dtype=torch.float64))[0] for n in (9, 6))
    values = torch.tensor([8.0, 4.0, 2.0, 2.0], dtype=torch.float64)
    (use,) = rank_uses("w", left @ values.diag() @ right.T, top=2)
    total = 64 + 16 + 4 + 4
    assert use.stable_rank == pytest.approx(total / 64) and use.energy == pytest.approx(80 / total)
    shares = [8 / 16, 4 / 16, 2 / 16, 2 / 16]
    assert use.effective_rank == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)))
    assert use.spectrum[:4] == pytest.approx([8, 4, 2, 2]) and (use.full, use.top) == (6, 2)
    (identity,) = rank_uses("w", torch.eye(10))
    assert (identity.stable_rank, identity.effective_rank, identity.energy) == pytest.approx((10, 10, 0.1))
    (zero,) = rank_uses("w", torch.zeros(3, 5))
    assert (zero.stable_rank, zero.effective_rank, zero.energy) == (0, 0, 0)
    experts = list(rank_uses("w", torch.stack([torch.eye(4), torch.ones(4, 4)])))
    assert [(use.name, use.stable_rank) for use in experts] == [("w[0]", 4.0), ("w[1]", pytest.approx(1.0))]


def test_a_bias_and_a_low_rank_product_are_no_activations() -> None:
    mlp = {"kind": "mlp", "hidden": 12, "act": "gelu(x)", "bias": True}
    attention = {"kind": "attention", "heads": 2, "bias": True}
    programs = lower(tiny(layers=(attention, mlp), fuse=()), "cpu")
    units = UnitActivity(flatten(programs, programs.program("score")))
    assert sorted(units._read_by.values()) == ["blocks.0.mlp.act", "blocks.1.mlp.act"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "data")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Run:
    return make_run(tmp_path_factory.mktemp("inspect") / "run", small_spec(), str(data))


def inspected(run: Run, cache: Path, **options: Any) -> Inspection:
    settings = {"sequences": 4, "max_tokens": 300, **options}
    return inspect(run.directory, InspectOptions(**settings, cache=cache), lambda line: None)


def test_the_sensitivity_is_the_loss_with_one_matrix_quantized(run: Run, tmp_path: Path) -> None:
    from specc.runtime.eval.evaluate import evaluate
    from specc.runtime.eval.options import EvaluateOptions
    from specc.runtime.open_model import final_weights
    from specc.runtime.storage import checkpoint

    result = inspected(run, tmp_path, parts=("sensitivity",), bits=(8, 4))
    assert result.scored is not None and result.scored["tokens"] == 300
    rows = {(row.name, row.bits): row for row in result.sensitivity}
    name = "embed.token"
    weights, _ = final_weights(run, lambda line: None)
    scheme = Round(scheme="round", bits=4)
    rounded = scheme.dequantize(scheme.quantize(weights[name], None), tuple(weights[name].shape))
    assert rows[name, 4].mse == pytest.approx(float((rounded - weights[name]).square().mean()), rel=1e-6)
    changed = Run(tmp_path / "changed", run.spec, "cpu", run.data).create()
    newest = checkpoint.load(checkpoint.all_in(run.checkpoints)[-1])
    from dataclasses import replace

    checkpoint.save(changed.checkpoints, replace(newest, average={**weights, name: rounded}))
    scores = [evaluate(one.directory, EvaluateOptions(max_tokens=300, cache=tmp_path)) for one in (run, changed)]
    rise = scores[1].bpb_pieces - scores[0].bpb_pieces  # type: ignore[union-attr]
    assert rows[name, 4].rise == pytest.approx(rise, abs=1e-9) and abs(rise) > 1e-5
    assert rows[name, 8].mse < rows[name, 4].mse / 100
    matrices = {n for n, w in weights.items() if w.dim() == 2 and min(w.shape) > 1}
    assert {n for n, _ in rows} == matrices and all(row.estimate is not None for row in rows.values())
    again = inspected(run, tmp_path, parts=("sensitivity",), bits=(8, 4))
    assert again.sensitivity == result.sensitivity  # the weights were put back


def test_the_estimate_is_that_of_bit_allocation(run: Run, tmp_path: Path) -> None:
    from specc.runtime.quantize.pipeline import QuantizeOptions, quantize

    overrides = ("quant.promote=null", "quant.allocate={bits: [5, 6]}", "quant.budget_bytes=100000")
    report = quantize(
        run.directory, QuantizeOptions(max_tokens=300, cache=tmp_path, overrides=overrides), lambda line: None
    )
    estimates = {(row.name, row.scheme): row.added_nats for row in report.rows if row.added_nats is not None}
    result = inspected(run, tmp_path, parts=("sensitivity",), bits=(5, 6, 8))
    assert result.scored is not None
    scale = result.scored["tokens"] / result.scored["bytes"] / math.log(2)
    compared = [row for row in result.sensitivity if (row.name, row.scheme) in estimates]
    assert {row.name for row in compared} == {name for name, _ in estimates}
    for row in compared:
        assert row.estimate == pytest.approx(estimates[row.name, row.scheme] * scale, rel=1e-6), row.name


def test_experts_have_units_and_matrices_of_their_own(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "run", small_spec(*EXPERTS), str(data))
    result = inspected(run, tmp_path, parts=("ranks", "heads", "units", "norms"))
    names = [unit.layer for unit in result.units]
    assert [name for name in names if name.startswith("blocks.0")] == [
        *(f"blocks.0.mlp.act[{i}]" for i in range(4)),
        "blocks.0.mlp.shared.act",
    ]
    tokens = [unit.tokens for unit in result.units if "[" in unit.layer and "blocks.0" in unit.layer]
    assert sum(tokens) == 4 * 32 * 2  # each token has two experts
    assert sum(use.name.startswith("blocks.0.mlp.up[") for use in result.ranks) == 4
    assert len(result.norms) == 2 and len(result.heads) == 8


def test_the_json_states_every_number_and_is_the_same_again(run: Run, tmp_path: Path) -> None:
    result = inspected(run, tmp_path, bits=(4,))
    facts = json.loads(json.dumps(result.facts(), allow_nan=False))
    assert facts["heads"][0]["type"] == result.heads[0].type
    assert facts["norms"][0]["growth"] == pytest.approx(result.norms[0].after / result.norms[0].before)
    assert facts["rows"] == [4, 32] and facts["step"] == 3
    text = "\n".join(tables(result))
    for use in result.ranks:
        assert f"{use.stable_rank:.1f}" in text and use.name in text
    for row in result.sensitivity:
        assert f"{row.rise:+.6f}" in text
    assert inspected(run, tmp_path, bits=(4,)).facts() == result.facts()


def test_bits_that_no_scheme_has_are_noted(run: Run, tmp_path: Path) -> None:
    result = inspected(run, tmp_path, parts=("sensitivity",), bits=(16,))
    assert result.sensitivity == () and "no scheme has these bits" in result.notes["embed.token"]


def test_a_model_of_lines_says_what_cannot_be_said(tmp_path: Path) -> None:
    from pair_models import CROSS, EMBED, LSTM, MLP, SELF, blocks, pairs_data

    data = pairs_data((EMBED, blocks(SELF, MLP)), (EMBED, blocks(SELF, CROSS, MLP)))
    run = make_run(tmp_path / "run", spec_of(data), "polynomial")
    result = inspected(run, tmp_path)
    assert {head.layer for head in result.heads} == {
        f"{side}.blocks.{i}.attention.y" for side in ("encoder", "decoder") for i in (0, 1)
    }
    assert all(head.induction is None for head in result.heads)
    assert "attends to another sequence" in result.notes["decoder.blocks.0.cross.y"]
    assert "random tokens" in result.notes["induction"] and "bits per byte" in result.notes["sensitivity"]
    assert [norm.block for norm in result.norms] == [f"{s}.blocks.{i}" for s in ("encoder", "decoder") for i in (0, 1)]
    assert len(result.units) == 4 and result.ranks
    lstm = make_run(tmp_path / "lstm", spec_of(pairs_data((EMBED, LSTM), (EMBED, LSTM, CROSS))), "polynomial")
    notes = inspected(lstm, tmp_path).notes
    assert {"heads", "units", "norms"} <= notes.keys()


def test_pictures_are_drawn_of_what_was_measured(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from specc.runtime.inspection.pictures import draw, role_of

    result = inspected(run, tmp_path, bits=(4,))
    paths = list(draw(result, tmp_path / "pictures"))
    assert [path.stem for path in paths] == ["ranks", "heads", "units", "norms", "sensitivity"]
    before = [path.read_bytes() for path in paths]
    assert all(data.startswith(b"\x89PNG") and len(data) > 10_000 for data in before)
    assert [path.read_bytes() for path in draw(result, tmp_path / "pictures")] == before
    assert role_of("encoder.blocks.3.mlp.up") == ("encoder.blocks.*.mlp.up", 3)
    assert role_of("embed.token") == ("embed.token", None)


def test_the_observed_products_are_those_that_calibration_observes(run: Run) -> None:
    """The program that `inspect` runs is the one that calibration traces."""
    from run_samples import model_of

    programs = lower(run.spec.at_rest, "cpu")
    ours = {
        ref[1:] for node in flatten(programs, programs.program("score")).nodes for ref in node.inputs if ref[0] == "@"
    }
    assert set(Capture(model_of(run.spec, fuse=False).model, lambda *seen: None).names) <= ours


# Published decoders and parameter-golf models: (heads, layers of units with a row per expert, blocks with norms)
FAMILIES = {
    "gemma2": (16, 4, 4),  # soft caps, norms before and after, windows
    "gpt_oss": (16, 16, 4),  # sinks, experts with biases
    "deepseek_v3": (16, 28, 4),  # latent attention, experts
    "nemotron": (16, 4, 4),
}
GOLF = {"full": (20, 5, 5), "loop": (28, 7, 7), "lanes": (20, 5, 3), "documents": (20, 5, 5)}


@pytest.mark.parametrize("name", [*FAMILIES, *GOLF])
def test_each_kind_of_model_is_inspected(name: str) -> None:
    import textwrap

    import golf_models
    from published_decoders import DECODERS
    from tiny_models import random_params

    from specc.compiler.spec.check import load

    if name in GOLF:
        spec = golf_models.spec_of(golf_models.OPTIONS[name])
    else:
        sizes = "spec_version: 2\nname: x\ntargets: [cpu]\nmodel:\n  kind: decoder\n  vocab: 50\n  context: 32\n"
        train = "train: {micro_batch: 2, tokens_per_step: 64, steps: 2, data: {tokenizer: x.model}, "
        train += "optimizers: [{kind: adamw, match: '*', lr: 0.01}]}\n"
        spec = load(f"{sizes}{textwrap.indent(DECODERS[name].model.strip(), '  ')}\n{train}")[0]
    programs = lower(spec.at_rest, "cpu")
    graph = flatten(programs, programs.program("score"))
    heads, units, norms = HeadPatterns(graph), UnitActivity(graph), ResidualNorms(graph)
    ids = torch.randint(spec.model.vocabulary, (2, 16), generator=torch.Generator().manual_seed(1))

    def observe(*seen: Any) -> None:
        for observer in (heads.observe, units.observe, norms.observe):
            observer(*seen)

    weights = random_params(programs, 0)
    reference.run(programs, "score", {"ids": ids, "targets": ids}, weights, observe)
    counts = (len(heads.heads()), len(list(units.layers())), len(list(norms.blocks())))
    assert counts == {**FAMILIES, **GOLF}[name]
    assert not heads.refused and all(0 <= head.previous <= 1 for head in heads.heads())
    assert len(norms.refused) == (2 if name == "lanes" else 0)
    assert all(norm.growth is not None and norm.growth > 0 for norm in norms.blocks())
