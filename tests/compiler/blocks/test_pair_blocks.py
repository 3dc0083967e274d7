"""Every kind of stage of a model of pairs, with each option that changes what it computes: generated code against
float64 references, cached against uncached, and what must not be read."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pair_models import BOTH, CROSS, EMBED, LSTM, MLP, SELF, batch, blocks, pairs_spec
from tiny_models import Pair, float64, pair
from torch import Tensor

from specc.compiler import blocks as kinds
from specc.compiler.blocks.parts import Bridge, Stage
from specc.compiler.catalog import models
from specc.compiler.ir.graph import walk
from specc.compiler.ops.dropout import Dropout
from specc.compiler.programs import fx_witness as witness
from specc.compiler.programs.programs import flatten
from specc.compiler.strict import tag_of
from specc.runtime.model.load import instantiate
from specc.runtime.train.sources.feed import shifted

ROOT = Path(__file__).parents[3]
LEARNED = {**EMBED, "positions": "learned"}
WAVES = {**EMBED, "positions": "sinusoidal"}
CONCAT = {"kind": "concat", "beside": "embed"}
ADDITIVE = {"kind": "additive", "query": "lstm"}
LOW, TOP = ({"kind": "lstm", "hidden": hidden, "name": name} for name, hidden in (("low", 6), ("top", 5)))
TANH = {**ADDITIVE, "form": "tanh", "width": 3}  # relu of all positive or all negative sums has no gradient
ASK_LOW, ASK_TOP = ({**TANH, "query": name, "name": f"ask_{name}"} for name in ("low", "top"))
UNTIED = {"tied": False, "bias": True}
ENCODER = [LEARNED, blocks(SELF, MLP)]
RECURRENT = [EMBED, BOTH]
WITH_LAYER_NORM = {"norm": {"kind": "layer"}}


def case(encoder: list[Any], decoder: list[Any], **words: Any) -> dict[str, Any]:
    return {"encoder": encoder, "decoder": decoder, **words}


CASES: Mapping[str, dict[str, Any]] = {
    "transformer": case(ENCODER, [LEARNED, blocks(SELF, CROSS, MLP)]),
    "attention_of_pools": case(
        ENCODER, [LEARNED, {**SELF, "mask": "j <= i and i - j < 4", "pool": {"block": 3, "by": "latent"}}, CROSS]
    ),
    "transformer_of_waves": case([WAVES, blocks(SELF, MLP)], [WAVES, blocks(SELF, CROSS, MLP, **WITH_LAYER_NORM)]),
    "transformer_rope": case(
        [EMBED, blocks({**SELF, "rope": {}}, MLP)], [EMBED, blocks({**SELF, "rope": {"dims": 2}}, CROSS, MLP)]
    ),
    "transformer_biased": case(
        [LEARNED, blocks({**SELF, "bias": True, "qk_norm": {"gain": 1.5}}, MLP)],
        [LEARNED, blocks({**SELF, "bias": True}, {**CROSS, "bias": True, "kv_heads": 1, "qk_norm": {}}, MLP)],
        head={"tied": True, "bias": True},
    ),
    "transformer_window": case([EMBED, blocks(MLP)], [LEARNED, blocks({**SELF, "window": 3}, CROSS)]),
    "transformer_of_two_widths": case(
        [{**EMBED, "dim": 12}, blocks({**SELF, "head_dim": 4}, MLP)], [LEARNED, blocks(SELF, CROSS, MLP)]
    ),
    "transformer_fused": case(
        ENCODER,
        [LEARNED, blocks(SELF, CROSS, MLP)],
        fuse=[{"*.blocks.*.mlp": ["up", "act", "down"]}],
    ),
    "transformer_dropout": case(
        [{**LEARNED, "dropout": 0.2}, blocks({**SELF, "dropout": 0.1}, {**MLP, "dropout": 0.3})],
        [LEARNED, {"kind": "dropout", "p": 0.2}, blocks(SELF, {**CROSS, "dropout": 0.1}, MLP)],
    ),
    "residuals": case(
        [LEARNED, blocks({**SELF, "residual": "learned"}, {**MLP, "residual": "1/(layer + 1)"})],
        [LEARNED, blocks(SELF, CROSS, {**MLP, "residual": 0.5}, skips={"kind": "unet"})],
    ),
    "norms_by_layer": case(
        [LEARNED, blocks(SELF, MLP, norm={"kind": "rms", "scale": "1/sqrt(layer + 1)", "affine": True})],
        [LEARNED, blocks(SELF, CROSS, norm={"kind": "layer", "scale": "0.5 + layer/layers"})],
    ),
    "norms_after_and_weights": case(
        [LEARNED, blocks(SELF, {**MLP, "bias": True}, norm={"kind": "rms", "weight": "1 + w", "places": ["after"]})],
        [
            LEARNED,
            blocks(
                {**SELF, "qk_norm": {"weight": "w"}, "bias": ["v"]},
                {**CROSS, "qk_norm": {"weight": "1 + w", "over": "all"}, "bias": ["q"]},
                norm={"kind": "layer", "bias": False, "places": ["before", "after"]},
            ),
        ],
    ),
    "heads_by_layer": case(
        [LEARNED, blocks(SELF, MLP, changes=[{"where": "layer == 1", "attention": {"head_dim": 2}}])],
        [
            LEARNED,
            blocks(
                {**SELF, "rope": {}},
                CROSS,
                MLP,
                count=3,
                changes=[{"where": "layer == 2", "attention": {"rope": {"base": 30}}, "cross": {"kv_heads": 1}}],
            ),
        ],
    ),
    "mixed": case(
        [LEARNED, blocks({**SELF, "exclude": {"layers": [1]}, "gate": {"features": 4}}, MLP, mix={"kind": "embedded"})],
        [LEARNED, blocks(SELF, {**CROSS, "gate": {}}, MLP, mix={"kind": "embedded"}, parallel=[0])],
    ),
    "lanes": case(
        [LEARNED, blocks(SELF, {**MLP, "dropout": 0.1}, count=3, lanes={"first": 2})],
        [LEARNED, blocks({**SELF, "rope": {}}, CROSS, count=3, lanes={"first": 1}, mix={"kind": "embedded"}), LSTM],
    ),
    "values_and_skips": case(
        [
            LEARNED,
            blocks({**SELF, "rope": {}, "values": {"dim": 3, "layers": [1, 3]}}, count=4, skips={"kind": "unet"}),
        ],
        [
            LEARNED,
            blocks({**SELF, "rope": {}, "values": {"dim": 3, "layers": [1]}}, CROSS, skips={"kind": "unet"}),
            {**blocks({**SELF, "rope": {}, "values": {"dim": 2}}), "name": "late"},
        ],
    ),
    "two_stacks": case(
        [LEARNED, blocks(SELF, MLP), {**blocks(MLP), "name": "late"}],
        [LEARNED, blocks(SELF), {**blocks(SELF, CROSS), "name": "late"}, CONCAT],
        head=UNTIED,
    ),
    "lstms": case(RECURRENT, [EMBED, LSTM], bridge={"kind": "concat"}),
    "lstms_without_a_bridge": case(RECURRENT, [EMBED, {**LSTM, "biases": 2}, CROSS], head=UNTIED),
    "lstms_of_two_layers": case(
        [EMBED, {**LSTM, "hidden": 6}, {**BOTH, "name": "second", "biases": 2}],
        [EMBED, {**LSTM, "hidden": 5}, {**LSTM, "name": "second"}],
        bridge={"kind": "linear"},
    ),
    "lstm_backward": case([EMBED, {**LSTM, "directions": "backward"}], [EMBED, LSTM], bridge={"kind": "concat"}),
    "lstm_dropout": case(
        [EMBED, {**BOTH, "dropout": 0.2}], [EMBED, {**LSTM, "dropout": 0.2}], bridge={"kind": "concat"}
    ),
    "attention_without_residuals": case(
        RECURRENT,
        [EMBED, {**SELF, "bias": True}, {**CROSS, "bias": True}, CONCAT, LSTM],
        bridge={"kind": "concat"},
        head=UNTIED,
    ),
    "attention_with_positions": case(
        [EMBED, {**SELF, "rope": {}, "values": {"dim": 3}}],
        [EMBED, {**SELF, "rope": {}, "values": {"dim": 3}, "exclude": {}}, {**CROSS, "gate": {}}],
    ),
    "wired_stages": case(
        [
            {**EMBED, "learn": {"gain": {"init": 1, "shape": 8}}, "write": "gain * y"},
            {**SELF, "learn": {"share": {"init": 0.5, "shape": 1}}, "write": "x + share * y"},
            {**MLP, "read": "tanh(attention) + embed", "write": "x + y"},
        ],
        [
            EMBED,
            {**SELF, "learn": {"table": {"of": "ids", "shape": "values"}}, "v": "table * v"},
            {**LSTM, "learn": {"open": {"of": "h", "features": 3}}, "write": "attention + sigmoid(open) * y"},
            {**CROSS, "learn": {"open": {"of": "lstm", "shape": 2}}, "y": "sigmoid(open) * y", "write": "lstm + y"},
        ],
        head=UNTIED,
    ),
    "wired_stages_in_a_loop": case(
        RECURRENT,
        [
            EMBED,
            {**MLP, "write": "x + y"},
            {**TANH, "learn": {"gain": {"init": 1, "shape": 8}}, "write": "gain * y"},
            {**CROSS, "head_dim": 3, "read": "embed + mlp * additive", "y": "y / 2", "write": "x + y"},
            {**LSTM, "learn": {"table": {"of": "ids"}, "open": {"of": "x"}}, "write": "y + sigmoid(open) * table"},
            {**MLP, "name": "last", "read": "lstm + additive"},
        ],
        head=UNTIED,
    ),
    "attention_behind_an_lstm": case(RECURRENT, [EMBED, LSTM, CROSS, {**LSTM, "name": "second"}, CONCAT], head=UNTIED),
    "additive_relu": case(RECURRENT, [EMBED, ADDITIVE, CONCAT, LSTM], bridge={"kind": "linear"}),
    "additive_tanh": case(
        RECURRENT,
        [EMBED, {**ADDITIVE, "form": "tanh", "width": 5}, CONCAT, {**LSTM, "hidden": 6, "biases": 2}],
        bridge={"kind": "linear"},
        head=UNTIED,
    ),
    "additive_over_blocks": case(
        ENCODER,
        [LEARNED, blocks(SELF), {**ADDITIVE, "form": "tanh", "width": 3}, {**CONCAT, "beside": "blocks"}, LSTM],
        head=UNTIED,
    ),
    "additive_and_cross_in_a_loop": case(
        RECURRENT, [EMBED, ADDITIVE, CONCAT, {**CROSS, "head_dim": 3}, LSTM, {**CONCAT, "name": "both"}], head=UNTIED
    ),
    "additive_dropout": case(
        [{**EMBED, "dropout": 0.1}, BOTH],
        [{**EMBED, "dropout": 0.1}, ADDITIVE, CONCAT, LSTM],
        bridge={"kind": "concat"},
    ),
    "lstm_dropout_in_a_loop": case(
        RECURRENT, [EMBED, ADDITIVE, CONCAT, {**LSTM, "dropout": 0.5}], bridge={"kind": "linear"}
    ),
    "dropout_in_a_loop": case(
        RECURRENT,
        [
            EMBED,
            ADDITIVE,
            CONCAT,
            {"kind": "dropout", "p": 0.2},
            {**CROSS, "head_dim": 3, "dropout": 0.1},
            {**LSTM, "dropout": 0.3},
        ],
        bridge={"kind": "linear"},
        head=UNTIED,
    ),
    "lstms_in_a_loop": case(RECURRENT, [EMBED, ASK_TOP, CONCAT, LOW, TOP], bridge={"kind": "linear"}, head=UNTIED),
    "two_queries_in_a_loop": case(
        RECURRENT,
        [EMBED, ASK_LOW, CONCAT, {**ASK_TOP, "name": "x"}, {**CONCAT, "beside": "concat", "name": "h"}, LOW, TOP],
        bridge={"kind": "linear"},
        head=UNTIED,
    ),
    "two_loops": case(
        RECURRENT,
        [EMBED, ASK_LOW, CONCAT, LOW, ASK_TOP, {**CONCAT, "beside": "low", "name": "y"}, TOP],
        bridge={"kind": "linear"},
        head=UNTIED,
    ),
    "attention_between_loops": case(
        RECURRENT,
        [
            EMBED,
            ASK_LOW,
            CONCAT,
            {**LOW, "hidden": 8},
            SELF,
            ASK_TOP,
            {**CONCAT, "beside": "attention", "name": "c"},
            TOP,
        ],
        head=UNTIED,
    ),
    "values_of_a_loop_behind_it": case(
        RECURRENT,
        [
            {**EMBED, "name": "self"},
            {"kind": "dropout", "p": 0.2, "name": "torch"},
            ASK_TOP,
            {**CONCAT, "beside": "self"},
            {**LOW, "dropout": 0.3},
            TOP,
            *({**CONCAT, "beside": name, "name": f"late_{name}"} for name in ("low", "ask_top", "torch")),
        ],
        head=UNTIED,
    ),
    "all_in_a_loop": case(RECURRENT, [{"kind": "repeat"}, ADDITIVE, {**CONCAT, "beside": "repeat"}, LSTM], head=UNTIED),
    "dropout_of_layers_without_residuals": case(
        [EMBED, {**SELF, "dropout": 0.5}, MLP], [EMBED, {**SELF, "dropout": 0.3}, {**CROSS, "dropout": 0.2}]
    ),
    "repeat": case(RECURRENT, [{"kind": "repeat"}, LSTM], head=UNTIED),
    "repeat_with_a_start": case([EMBED, LSTM], [{"kind": "repeat"}, LSTM], bridge={"kind": "concat"}, head=UNTIED),
    "repeat_and_blocks": case([EMBED, LSTM], [{"kind": "repeat"}, blocks(SELF, CROSS, MLP)], head=UNTIED),
    "repeat_and_a_loop": case(
        [EMBED, LSTM],
        [{"kind": "repeat"}, {**ADDITIVE, "form": "tanh", "width": 5}, {**CONCAT, "beside": "repeat"}, LSTM],
        bridge={"kind": "concat"},
        head=UNTIED,
    ),
    "mlp_alone": case([EMBED, MLP], [EMBED, MLP, {**CROSS, "heads": 1}]),
    "softcap": case(ENCODER, [LEARNED, blocks(SELF, CROSS)], head={"tied": False, "softcap": 5}),
}
WITHOUT_TOKENS = {name for name, words in CASES.items() if words["decoder"][0]["kind"] == "repeat"}


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def case_models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Pair]:
    """A case and its module."""
    return request.param, pair(pairs_spec(**CASES[request.param]), tmp_path_factory.mktemp(request.param), seed=1)


def test_loss_and_all_gradients_equal_the_reference(case_models: tuple[str, Pair]) -> None:
    _, model = case_models
    source, target = batch(model.spec)
    with float64():
        torch.manual_seed(3)  # dropout draws the same in both
        want = model.reference("train", source=source, inputs=shifted(target), target=target)["loss"]
        gradients = torch.autograd.grad(want, list(model.params.values()))
        torch.manual_seed(3)
        loss = model.model(source, shifted(target), target)
        loss.backward()
    torch.testing.assert_close(loss, want, rtol=1e-11, atol=1e-11)
    parameters = dict(model.model.named_parameters())
    for path, gradient in zip(model.params, gradients, strict=True):
        assert gradient.abs().max() > 0, f"the gradient of {path} tests nothing"
        torch.testing.assert_close(
            parameters[path].grad, gradient, rtol=1e-9, atol=1e-10, msg=lambda text, path=path: f"{path}: {text}"
        )


def test_scores_equal_the_reference_and_are_zero_at_pads(case_models: tuple[str, Pair]) -> None:
    _, model = case_models
    source, target = batch(model.spec)
    with float64(), torch.no_grad():
        scores = model.model.score(source, target)
        want = model.reference("score", source=source, target=target)["loss"]
        torch.testing.assert_close(scores, want, rtol=1e-11, atol=1e-11)
        assert scores[target == 0].abs().max() == 0
        assert scores[target != 0].min() > 0
        if any(isinstance(node.op, Dropout) for graph in model.programs.graphs for node in graph.nodes):
            torch.manual_seed(5)
            dropped = model.model(source, shifted(target), target)
            assert (dropped - scores.sum() / (target != 0).sum()).abs() > 1e-6  # training drops, scoring does not
        else:
            loss = model.model(source, shifted(target), target)
            torch.testing.assert_close(loss, scores.sum() / (target != 0).sum(), rtol=1e-11, atol=1e-11)


def shares(value: object) -> Iterator[float]:
    """Every probability of dropping in the words of a case."""
    if isinstance(value, dict):
        yield from (value[key] for key in ("dropout", "p") if key in value)
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from shares(part)


def test_what_a_spec_drops_is_dropped_in_training_alone(case_models: tuple[str, Pair]) -> None:
    name, model = case_models
    table = {graph.name: graph for graph in model.programs.graphs}
    for program in model.programs.programs:
        nodes = [node for graph in walk(table, program) for node in graph.nodes]
        results = {node.op.p for node in nodes if isinstance(node.op, Dropout)}
        assert results == (set(shares(CASES[name])) if program.name == "train" else set()), program.name


def stepped(model: Any, source: Tensor, inputs: Tensor) -> Tensor:
    """Log-probabilities [B, T, V] after each of `inputs`, a token at a time; the state starts poisoned where nothing is
    kept yet."""
    state = model.encode(source)
    for place, tensors in state.items():
        for tensor in tensors:
            if tensor.dim() == 4 and tensor.shape[1] == 30 and tensor.abs().max() == 0 and place != "encoder":
                tensor.fill_(1e6)
    at = [tensor.data_ptr() for tensors in state.values() for tensor in tensors]
    steps = [model.extend(inputs[:, t : t + 1], torch.tensor(t), state) for t in range(inputs.shape[1])]
    assert at == [tensor.data_ptr() for tensors in state.values() for tensor in tensors]  # the state is kept in place
    return torch.stack(steps, 1).log_softmax(-1)


def test_cached_logits_equal_the_uncached(case_models: tuple[str, Pair]) -> None:
    _, model = case_models
    source, target = batch(model.spec)
    with float64(), torch.no_grad():
        result = stepped(model.model, source, shifted(target))
        for token in range(1, model.spec.model.vocabulary):
            same = torch.full_like(target, token)
            want = model.model.score(source, torch.cat((target[:, :-1], same[:, -1:]), 1))[:, -1]
            torch.testing.assert_close(-result[:, -1, token], want, rtol=1e-9, atol=1e-10)
        nats = -result.gather(-1, target[..., None])[..., 0] * (target != 0)
        torch.testing.assert_close(nats, model.model.score(source, target), rtol=1e-9, atol=1e-10)


def test_the_decoder_reads_no_later_token(case_models: tuple[str, Pair]) -> None:
    name, model = case_models
    source, target = batch(model.spec)
    with float64(), torch.no_grad():
        before = model.model.score(source, target)
        changed = target.clone()
        changed[0, 3] = changed[0, 3] % 20 + 4
        moved = (model.model.score(source, changed) - before).abs()
    assert moved[0, :3].max() == 0
    assert moved[1:].max() == 0  # nor any other row
    assert (moved[0, 4:].max() > 0) == (name not in WITHOUT_TOKENS)


def test_only_tokens_of_the_source_are_read(case_models: tuple[str, Pair]) -> None:
    """Another token changes every later score; pads behind a source change nothing, where the spec says so."""
    _, model = case_models
    source, target = batch(model.spec)
    with float64(), torch.no_grad():
        before = model.model.score(source, target)
        changed = source.clone()
        changed[0, 2] = changed[0, 2] % 20 + 4
        moved = (model.model.score(changed, target) - before).abs()
        longer = model.model.score(torch.nn.functional.pad(source, (0, 5)), target)
    assert moved[0].min() > 0
    assert moved[1:].max() == 0
    if not model.spec.model.reads_pads:
        torch.testing.assert_close(longer, before, rtol=1e-11, atol=1e-11)
    else:
        assert (longer - before).abs().max() > 1e-9


def test_a_source_of_pads_alone_is_as_nothing_seen(case_models: tuple[str, Pair]) -> None:
    """Its scores and all gradients are numbers, those of the reference, and no other row's are touched."""
    _, model = case_models
    source, target = batch(model.spec)
    empty = source.clone()
    empty[1] = 0
    with float64():
        with torch.no_grad():
            result, before = (model.model.score(ids, target) for ids in (empty, source))
            want = model.reference("score", source=empty, target=target)["loss"]
        torch.testing.assert_close(result, want, rtol=1e-11, atol=1e-11)
        assert bool(result.isfinite().all())
        torch.testing.assert_close(result[[0, 2]], before[[0, 2]], rtol=1e-11, atol=1e-11)
        model.model.zero_grad()
        model.model(empty, shifted(target), target).backward()
    gradients = [parameter.grad for parameter in model.model.parameters()]
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in gradients)
    with float64(), torch.no_grad():
        steps = stepped(model.model, empty, shifted(target))
        nats = -steps.gather(-1, target[..., None])[..., 0] * (target != 0)
        torch.testing.assert_close(nats, result, rtol=1e-9, atol=1e-10)


def test_torch_fx_finds_the_plan(case_models: tuple[str, Pair]) -> None:
    _, model = case_models
    source = sys.modules[type(model.model).__module__]
    for program, method in (("train", "forward"), ("score", "score")):
        traced = witness.trace(model.model, source, method)
        nodes = flatten(model.programs, model.programs.program(program), groups=False).nodes
        assert witness.round_trip(model.programs, program, traced) == len(nodes)


def test_generated_code_is_ruff_clean(case_models: tuple[str, Pair], tmp_path: Path) -> None:
    _, model = case_models
    instantiate(model.spec, "cpu", tmp_path)
    settings = ["--config", str(ROOT / "generated/ruff.toml"), "--ignore", "E501"]  # names of stages may be long
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", *settings]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_kind_of_stage_is_in_a_case() -> None:
    wanted = {tag_of(model, "kind") for role in (Stage, Bridge) for model in models(kinds, role, "kind")}
    used: set[object] = set()
    for words in CASES.values():
        used |= {stage["kind"] for side in ("encoder", "decoder") for stage in words[side]}
        used.add(words.get("bridge", {}).get("kind"))
    assert wanted <= used
