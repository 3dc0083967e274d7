"""The smallest specs that random specs have shown to fail: each compiles, and runs where only running failed."""

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pair_models import CROSS, EMBED, LSTM, SELF, blocks, pairs_data
from pair_models import MLP as PAIR_MLP
from run_samples import make_run, small_spec, write_text
from tiny_models import ATTENTION, MLP, spec_data, spec_of

from specc.cli.app import run as specc
from specc.compiler.build import compiled
from specc.compiler.pipeline import lower
from specc.compiler.programs.cost import decode_cost
from specc.runtime.eval.evaluate import evaluate
from specc.runtime.eval.options import EvaluateOptions
from specc.runtime.eval.text import Adapted
from specc.runtime.verify.deployed import verify_deployed
from specc.runtime.verify.verify import verify

POST = {"kind": "rms", "places": ["stream"]}
POOLED = {**ATTENTION, "mask": "j <= i and i // 8 - j // 8 < 2", "pool": {"block": 8}}
AHEAD = {"kind": "module_ahead", "form": "sequential", "weight": 0.3}


def text(train: Mapping[str, Any] | None = None, **words: Any) -> dict[str, Any]:
    """Returns the data of a small decoder; `train` are more keys of its training, and others are those of a spec."""
    top = {key: words.pop(key) for key in ("quant", "eval", "merge", "fold") if key in words}
    data = {**spec_data(fuse=words.pop("fuse", ()), **words), **top}
    return {**data, "train": {**data["train"], **(train or {})}}


def pairs(encoder: Any, decoder: Any, train: Mapping[str, Any] | None = None) -> dict[str, Any]:
    data = pairs_data([EMBED, *encoder], [EMBED, *decoder])
    return {**data, "train": {**data["train"], **(train or {})}}


DECODER = blocks(SELF, CROSS, PAIR_MLP)
COMPILED: dict[str, dict[str, Any]] = {
    "an encoder that normalizes its stream": pairs([blocks(SELF, PAIR_MLP, norm=POST)], [DECODER]),
    "two stages that normalize their streams": pairs(
        [blocks(SELF, norm=POST), {**blocks(PAIR_MLP, norm=POST), "name": "more"}], [DECODER]
    ),
    "a bias on one of three merged products": text(
        layers=({**ATTENTION, "rope": {}, "bias": ["v"]}, MLP), fuse=({"blocks.*.attention": ["q.rope"]},), merge="auto"
    ),
    "a mask that changes when the loop begins": text(
        layers=({**ATTENTION, "mask": {"at": [[0, "j <= i and i - j < 6"], [0.5, "j <= i"]]}}, MLP),
        blocks={"order": {"at": [[0, "0..1"], [0.5, "0..1 1"]]}},
    ),
    "dropout beside rounded products in a loop": text(
        {"qat": {"below": 1.0}, "schedule": {"warmdown_fraction": 1.0}},
        layers=({**ATTENTION, "v": "v + table", "learn": {"table": {"of": "ids"}}}, {**MLP, "dropout": 0.1}),
        blocks={"order": {"at": [[0, "0..1"], [0.5, "0..1 1"]]}},
        quant={
            "default": {"scheme": "none", "dtype": "f16"},
            "rules": [{"match": "blocks.*.{q,k,v,out}", "scheme": "int8"}],
        },
    ),
    "rounded products beside modules ahead": text(
        {
            "losses": [{"kind": "next_token"}, AHEAD],
            "qat": {"below": 1.0},
            "schedule": {"warmdown_fraction": 1.0},
        },
        quant={
            "default": {"scheme": "none", "dtype": "f16"},
            "rules": [{"match": "blocks.*.{up,down}", "scheme": "int8"}],
        },
    ),
}
VERIFIED: dict[str, dict[str, Any]] = {
    "features beside modules ahead": text(
        {"losses": [{"kind": "next_token"}, AHEAD]}, eval={"window": 12, "stride": 6, "adapt": {"kind": "slot_causal"}}
    ),
    "features of a paged model": text(
        cache={"page": 4}, eval={"window": 12, "stride": 6, "adapt": {"kind": "slot_causal"}}
    ),
    "later tokens of lines": pairs(
        [blocks(SELF)],
        [DECODER],
        {"losses": [{"kind": "next_token"}, {"kind": "later_token", "ahead": 2, "weight": 0.1}]},
    ),
    "attention over positions in one block of two": pairs(
        [blocks(SELF, PAIR_MLP)],
        [
            blocks(
                {**SELF, "rope": {}},
                CROSS,
                PAIR_MLP,
                changes=[{"where": "layer == layers - 1", "attention": None}],
            )
        ],
    ),
    "scores in bf16 on a CPU": text(
        {"precision": {"compute": "bf16"}},
        layers=({**ATTENTION, "head_dim": 16, "mask": "j <= i and (i - j < 6 or j < 3)"}, MLP),
        fuse=({"blocks.*.attention": ["y"]},),
        context=32,
    ),
    "a folded matrix and a product of one name": text(
        {"precision": {"fp8": [{"match": "*", "scale": "row"}]}},
        layers=(
            {"kind": "latent", "heads": 2, "kv_rank": 8, "q_rank": 8, "rope_dim": 4},
            {**MLP, "write": "x + y * share", "learn": {"share": {"of": "h", "shape": 1}}},
            {**MLP, "act": "gelu_tanh(gate) * x", "write": "x + 0.5 * y", "name": "mlp2"},
        ),
        merge="auto",
        fold=["blocks.*"],
        dim=32,
    ),
    "a product of 8-bit floats for one number": text(
        {"precision": {"fp8": [{"match": "*.open"}]}},
        layers=({**ATTENTION, "y": "y * sigmoid(open)", "learn": {"open": {"of": "h", "shape": 1}}}, MLP),
        dim=32,
    ),
}


@pytest.mark.parametrize("name", [*COMPILED, *VERIFIED])
def test_it_compiles(name: str) -> None:
    spec = spec_of((COMPILED | VERIFIED)[name])
    for file, content in compiled(spec, ("cpu",)).files.items():
        if file.endswith(".py"):
            compile(content, file, "exec")


@pytest.mark.parametrize("name", VERIFIED)
def test_it_is_verified(name: str) -> None:
    wrong = [check for check in verify(spec_of(VERIFIED[name]), ("cpu",)) if not check.ok]
    assert not wrong


def test_int8_products_beside_modules_ahead_are_verified() -> None:
    rules = [{"match": "*.{up,down}", "scheme": "int8"}]
    quant = {"default": {"scheme": "none", "dtype": "f16"}, "rules": rules}
    spec = spec_of(text({"losses": [{"kind": "next_token"}, AHEAD]}, quant=quant))
    checks = [*verify_deployed(spec, ("cpu",))]
    assert checks and all(check.ok for check in checks)


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_int8_products_before_a_layer_that_nothing_reads_are_verified(compute: str) -> None:
    """The decoder reads only the last state of the encoder."""
    lstm = {**LSTM, "directions": "forward"}
    data = pairs([lstm, PAIR_MLP], [lstm], {"precision": {"compute": compute}})
    data["model"]["bridge"] = {"kind": "concat"}
    rules = [{"match": "*.lstm.*", "scheme": "int8"}]
    spec = spec_of({**data, "quant": {"default": {"scheme": "none", "dtype": "f16"}, "rules": rules}})
    assert [check for check in verify_deployed(spec, ("cpu",)) if not check.ok] == []


@pytest.mark.parametrize(
    "words", [{"layers": (POOLED, MLP), "context": 32}, {"cache": {"page": 4}}], ids=["pooled", "pages"]
)
@pytest.mark.parametrize("tokens", [0, 9])
def test_decoding_has_a_cost(words: dict[str, Any], tokens: int) -> None:
    programs = lower(spec_of(text(**words)), "cpu")
    read = sum(param.count for param in programs.params if "attention" in param.name) * 4
    cost, more = (decode_cost(programs, 2, count) for count in (tokens, tokens + 8))
    assert cost.weights > read and cost.flops > 0
    assert more.weights == cost.weights and more.cache >= cost.cache and more.flops >= cost.flops


def test_a_model_with_dropout_adapts(tmp_path: Path) -> None:
    """Its buffers are the draws of the dropout, and not codes."""
    spec = small_spec("model.blocks.layers.1.dropout=0.1")
    run = make_run(tmp_path / "run", spec, str(write_text(tmp_path / "text")))
    assert isinstance(evaluate(run.directory, EvaluateOptions(cache=tmp_path, max_tokens=64, adapt="slot")), Adapted)


def command(*words: object) -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = specc([str(word) for word in words])
    assert code == 0, output.getvalue()


def test_terms_of_the_loss_of_lines_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "lines.yaml"
    path.write_text(json.dumps(VERIFIED["later tokens of lines"]))
    command("train", path, "--target", "cpu", "--run", tmp_path / "run", "--set", "train.validate_tokens=64")
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    (terms,) = (record["terms"] for record in records if record["event"] == "losses")
    assert len(terms) == 2 and min(terms.values()) > 1


@pytest.mark.parametrize("change", ["train.losses=[{kind: next_token}, {kind: module_ahead, form: heads, weight: 0.1}]",
                                    "train.precision.compute=bf16"])  # fmt: skip
def test_a_graph_is_exported(change: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", small_spec("train.precision={}", change), str(write_text(tmp_path / "text")))
    command("export", run.directory, "--format", "pt2", "--out", tmp_path / "model.pt2")
