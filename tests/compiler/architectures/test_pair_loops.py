"""Loops over time with several LSTMs, several queries, or several in a decoder, against plain Torch in float64 that is
written here apart; and stages by every name that the code of a loop has itself."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pair_models import BOTH, CROSS, EMBED, MLP, SELF, batch, blocks, pairs_spec
from tiny_models import Pair, float64, pair
from torch import Tensor
from torch.nn import functional as F

from specc.compiler import pipeline
from specc.compiler.errors import SpecError
from specc.compiler.ops.attention import Sdpa
from specc.compiler.ops.region import Call
from specc.compiler.passes.select_kernels import group_pattern
from specc.compiler.pipeline import lower
from specc.runtime.train.sources.feed import shifted
from specc.runtime.verify.verify import verify

Weights = Mapping[str, Tensor]
State = tuple[Tensor, Tensor]
LOW, TOP = ({"kind": "lstm", "name": name, "hidden": hidden} for name, hidden in (("low", 6), ("top", 5)))
ASK_LOW, ASK_TOP = (
    {"kind": "additive", "name": f"ask_{name}", "query": name, "form": "tanh", "width": 3} for name in ("low", "top")
)


def beside(name: str, title: str = "concat") -> dict[str, Any]:
    return {"kind": "concat", "beside": name, "name": title}


def cell(w: Weights, at: str, x: Tensor, state: State) -> State:
    """One step of an LSTM, gate by gate."""
    h, c = state
    i, f, g, o = (x @ w[f"{at}.input"].T + h @ w[f"{at}.hidden"].T + w[f"{at}.bias"]).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def attended(w: Weights, at: str, h: Tensor, memory: Tensor, source: Tensor) -> Tensor:
    """The mean of the source's values, asked with h [B, H]; position by position."""
    keys = memory @ w[f"{at}.key"].T + w[f"{at}.key_bias"]
    query = h @ w[f"{at}.query"].T
    scores = [(torch.tanh(query + keys[:, s]) * w[f"{at}.score"]).sum(-1) for s in range(memory.shape[1])]
    weights = torch.stack(scores, 1).masked_fill(source == 0, float("-inf")).softmax(-1)
    return sum((weights[:, s, None] * memory[:, s] for s in range(memory.shape[1])), torch.zeros(1))


def stacked(w: Weights, memory: Tensor, source: Tensor, embedded: Tensor, low: State, top: State) -> list[Tensor]:
    """embed, ask top, concat, low, top."""
    results = []
    for t in range(embedded.shape[1]):
        asked = attended(w, "decoder.step.ask_top", top[0], memory, source)
        low = cell(w, "decoder.step.low", torch.cat((asked, embedded[:, t]), -1), low)
        top = cell(w, "decoder.step.top", low[0], top)
        results.append(top[0])
    return results


def asked_twice(w: Weights, memory: Tensor, source: Tensor, embedded: Tensor, low: State, top: State) -> list[Tensor]:
    """embed, ask low, ask top, both and embed side by side, low, top."""
    results = []
    for t in range(embedded.shape[1]):
        first = attended(w, "decoder.step.ask_low", low[0], memory, source)
        second = attended(w, "decoder.step.ask_top", top[0], memory, source)
        low = cell(w, "decoder.step.low", torch.cat((second, first, embedded[:, t]), -1), low)
        top = cell(w, "decoder.step.top", low[0], top)
        results.append(top[0])
    return results


def one_after_another(
    w: Weights, memory: Tensor, source: Tensor, embedded: Tensor, low: State, top: State
) -> list[Tensor]:
    """embed, ask low, concat, low, and over its whole line: ask top, beside low, top."""
    lower, results = [], []
    for t in range(embedded.shape[1]):
        asked = attended(w, "decoder.step.ask_low", low[0], memory, source)
        low = cell(w, "decoder.step.low", torch.cat((asked, embedded[:, t]), -1), low)
        lower.append(low[0])
    for below in lower:
        asked = attended(w, "decoder.step2.ask_top", top[0], memory, source)
        top = cell(w, "decoder.step2.top", torch.cat((asked, below), -1), top)
        results.append(top[0])
    return results


def read_behind(w: Weights, memory: Tensor, source: Tensor, embedded: Tensor, low: State, top: State) -> list[Tensor]:
    """As stacked, and behind the loop low's value and what was asked stand beside top's."""
    results = []
    for t in range(embedded.shape[1]):
        asked = attended(w, "decoder.step.ask_top", top[0], memory, source)
        low = cell(w, "decoder.step.low", torch.cat((asked, embedded[:, t]), -1), low)
        top = cell(w, "decoder.step.top", low[0], top)
        results.append(torch.cat((top[0], low[0], asked), -1))
    return results


Plain = Callable[[Weights, Tensor, Tensor, Tensor, State, State], list[Tensor]]
CASES: Mapping[str, tuple[Plain, list[dict[str, Any]]]] = {
    "stacked": (stacked, [EMBED, ASK_TOP, beside("embed"), LOW, TOP]),
    "asked_twice": (
        asked_twice,
        [EMBED, ASK_LOW, ASK_TOP, beside("ask_low"), beside("embed", "both"), LOW, TOP],
    ),
    "one_after_another": (one_after_another, [EMBED, ASK_LOW, beside("embed"), LOW, ASK_TOP, beside("low", "on"), TOP]),
    "read_behind": (
        read_behind,
        [EMBED, ASK_TOP, beside("embed"), LOW, TOP, beside("low", "late"), beside("ask_top", "later")],
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case_models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plain, Pair]:
    plain, decoder = CASES[request.param]
    spec = pairs_spec([EMBED, BOTH], decoder, bridge={"kind": "linear"}, head={"tied": False, "bias": True})
    return plain, pair(spec, tmp_path_factory.mktemp(request.param), seed=2)


def logits(plain: Plain, w: Weights, source: Tensor, inputs: Tensor) -> Tensor:
    """[B, T, V]: the encoder and the bridge, which starts `low` alone, then the loop."""
    embedded = w["encoder.embed.token"][source]
    sides = []
    for back in ("", "back_"):
        direction = {f"at.{name}": w[f"encoder.lstm.{back}{name}"] for name in ("input", "hidden", "bias")}
        state = (embedded.new_zeros(len(source), 4), embedded.new_zeros(len(source), 4))
        values = []
        for t in range(source.shape[1]):
            state = cell(direction, "at", embedded[:, source.shape[1] - 1 - t if back else t], state)
            values.append(state[0])
        sides.append((torch.stack(values[::-1] if back else values, 1), *state))
    memory, h, c = (torch.cat(parts, -1) for parts in zip(*sides, strict=True))
    low = (h @ w["bridge.h"].T + w["bridge.h_bias"], c @ w["bridge.c"].T + w["bridge.c_bias"])
    top = (h.new_zeros(len(h), 5), h.new_zeros(len(h), 5))
    result = torch.stack(plain(w, memory, source, w["decoder.embed.token"][inputs], low, top), 1)
    return result @ w["head.logits"].T + w["head.logits_bias"]


def test_loss_and_every_gradient_equal_plain_torch(case_models: tuple[Plain, Pair]) -> None:
    plain, model = case_models
    source, target = batch(model.spec)
    with float64():
        result = logits(plain, model.params, source, shifted(target))
        want = F.cross_entropy(result.flatten(0, 1), target.flatten(), ignore_index=0)
        gradients = torch.autograd.grad(want, list(model.params.values()))
        model.model.zero_grad()
        loss = model.model(source, shifted(target), target)
        loss.backward()
    torch.testing.assert_close(loss, want, rtol=1e-11, atol=1e-11)
    parameters = dict(model.model.named_parameters())
    for path, gradient in zip(model.params, gradients, strict=True):
        assert gradient.abs().max() > 1e-9, path
        torch.testing.assert_close(parameters[path].grad, gradient, rtol=1e-9, atol=1e-11, msg=path)


def test_decoding_by_state_equals_plain_torch(case_models: tuple[Plain, Pair]) -> None:
    """Every step, and the state of every LSTM is kept; rows that change places, as beams do, go on from theirs."""
    plain, model = case_models
    source, target = batch(model.spec)
    inputs = shifted(target)
    with float64(), torch.no_grad():
        want = logits(plain, model.params, source, inputs)
        state = model.model.encode(source)
        assert {f"decoder.{name}" for name in ("low", "top")} <= state.keys()
        order = torch.arange(len(source))
        for t in range(inputs.shape[1]):
            before = {place: [tensor.clone() for tensor in tensors] for place, tensors in state.items()}
            result = model.model.extend(inputs[order, t : t + 1], torch.tensor(t), state)
            torch.testing.assert_close(result, want[order, t], rtol=1e-10, atol=1e-11)
            for name in ("low", "top"):
                for old, new in zip(before[f"decoder.{name}"], state[f"decoder.{name}"], strict=True):
                    assert (old != new).all(), f"{name} is not kept after step {t}"
            order = order.roll(1)
            for tensors in state.values():
                for tensor in tensors:
                    tensor.copy_(tensor.roll(1, 0))


def test_a_stage_that_nothing_reads_is_held_to_a_gradient_of_zero() -> None:
    """An additive stage takes no value, so what stands before it has to be read by another."""
    spec = pairs_spec([EMBED, BOTH], [EMBED, ASK_LOW, beside("embed"), LOW, ASK_TOP, TOP], head={"tied": False})
    results = {check.name: check for check in verify(spec, ("cpu",))}
    assert all(check.ok for check in results.values()) and "gradients against float64" in results


# What the code of a loop and of the programs calls things, and what it could call things of stages.
NAMES = (
    *("x", "self", "h", "c", "y", "next_h", "torch", "nn", "outputs", "seen", "state", "token", "memory", "ids"),
    *("low_h", "low_y", "low_ys", "ask_keys", "embed_y", "x_t", "attend_additive_tanh", "lstm_cell", "step2", "steps"),
)


def named(place: str = "", name: str = "") -> list[dict[str, Any]]:
    """A decoder with stages before, in and behind a loop, of which the one that is called `place` is called `name`."""
    titles = {title: name if title == place else title for title in ("embed", "mlp", "ask", "join", "low", "top")}
    return [
        {**EMBED, "name": titles["embed"]},
        {**MLP, "name": titles["mlp"]},
        {**ASK_TOP, "query": titles["top"], "name": titles["ask"]},
        beside(titles["embed"], titles["join"]),
        {**LOW, "name": titles["low"]},
        {**TOP, "name": titles["top"]},
        beside(titles["low"], "behind"),
        beside(titles["ask"], "more"),
        beside(titles["embed"], "most"),
        beside(titles["mlp"], "all"),
    ]


@pytest.fixture(scope="module")
def plainly_named(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    return scores_of(named(), tmp_path_factory.mktemp("named"))


def scores_of(decoder: list[dict[str, Any]], folder: Path, **words: Any) -> Tensor:
    """Scores of the one program and of the other, a token at a time, with parameters that are the same by order."""
    model = pair(pairs_spec([EMBED, BOTH], decoder, head={"tied": False}, **words), folder, seed=3)
    source, target = batch(model.spec)
    with float64(), torch.no_grad():
        state, inputs = model.model.encode(source), shifted(target)
        steps = [model.model.extend(inputs[:, t : t + 1], torch.tensor(t), state) for t in range(inputs.shape[1])]
        cached = -torch.stack(steps, 1).log_softmax(-1).gather(-1, target[..., None])[..., 0] * (target != 0)
        scores: Tensor = model.model.score(source, target)
        torch.testing.assert_close(cached, scores, rtol=1e-10, atol=1e-11)
    return scores


@pytest.mark.parametrize("place", ["embed", "mlp", "ask", "join", "low", "top"])
def test_what_stages_are_called_changes_no_number(place: str, plainly_named: Tensor, tmp_path: Path) -> None:
    for name in NAMES:
        scores = scores_of(named(place, name), tmp_path / name)
        torch.testing.assert_close(scores, plainly_named, rtol=1e-12, atol=1e-13, msg=f"{place} called {name}")


def test_stages_whose_node_has_the_name_of_the_stream_have_a_write(tmp_path: Path) -> None:
    """A doubled output is a doubled input of the stage behind it."""
    write, read, first = {"write": "2 * y"}, {"read": "2 * x"}, {**EMBED, "positions": "learned"}
    decoders = {
        "written": [first | write, MLP, beside("mlp") | write, LOW],
        "plain": [first, MLP | read, beside("mlp"), LOW | read],
    }
    scores = [scores_of(stages, tmp_path / name, bridge={"kind": "linear"}) for name, stages in decoders.items()]
    torch.testing.assert_close(*scores, rtol=1e-12, atol=1e-13)


def test_what_blocks_are_called_changes_no_number(tmp_path: Path) -> None:
    """Their state before the first token is a value of its own in the code."""
    results = []
    for name in ("blocks", "self", "h", "c", "seen", "source", "torch", "lstm_one_bias", "attend_seen", "block"):
        decoder = [EMBED, {**blocks(SELF, CROSS, MLP), "name": name}, LOW]
        results.append(scores_of(decoder, tmp_path / name, bridge={"kind": "linear"}))
    for scores in results[1:]:
        torch.testing.assert_close(scores, results[0], rtol=1e-12, atol=1e-13)


def test_names_that_only_clash_with_a_part_that_is_there_are_refused_beside_it() -> None:
    loop = [ASK_TOP, beside("embed"), TOP]
    for stages, message in (
        ([blocks(MLP, name="steps"), *loop], "steps and a loop over time would have the same class name"),
        ([blocks(MLP), *loop, {**LOW, "name": "norm"}], "norm is also the name of the norm after blocks"),
        ([blocks(MLP, name="b"), *loop, {**LOW, "name": "b_norm"}], "b_norm is also the name of the norm after b"),
        ([*loop, ASK_LOW, {**LOW, "name": "step2"}, LOW], "step2 is also the name of a loop over time"),
    ):
        with pytest.raises(SpecError, match=message):
            pairs_spec([EMBED, BOTH], [EMBED, *stages], head={"tied": False})
    pairs_spec([EMBED, BOTH], [EMBED, *loop, {**LOW, "name": "norm"}], head={"tied": False})


def test_two_stages_of_blocks_whose_beginnings_could_have_one_name(tmp_path: Path) -> None:
    """`seen` is a word of the code, so what blocks of that name begin with is called otherwise."""
    results = []
    for names in (("a", "b"), ("seen_begun", "seen"), ("seen", "seen_begun")):
        decoder = [EMBED, *({**blocks(CROSS), "name": name} for name in names), LOW]
        results.append(scores_of(decoder, tmp_path / names[0], bridge={"kind": "linear"}))
    for scores in results[1:]:
        torch.testing.assert_close(scores, results[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("scale", "behind"), [("0.5", True), ("1/sqrt(layers)", True), ("1/sqrt(layer + 1)", False)])
def test_the_norm_behind_blocks_has_a_factor_where_it_hangs_on_no_layer(scale: str, behind: bool) -> None:
    norm = {"kind": "rms", "scale": scale}
    spec = pairs_spec([EMBED, BOTH], [EMBED, blocks(CROSS, norm=norm), LOW], head={"tied": False})
    names = {node.name for node in lower(spec, "cpu").program("score").nodes}
    assert "decoder.norm.y" in names and ("decoder.norm.y.scaled" in names) == behind


def test_layers_in_a_formula_are_the_blocks_of_its_stack() -> None:
    """A stack of 2 blocks and one of 3: in numbers, conditions, indices and initial values. Outside, there are 5."""
    learn = {
        "a": {"init": "1/(layers + layer)"},
        "b": {"of": "h", "shape": 8, "init": {"normal": "1/layers"}},
    }
    last = {"where": "layer == layers - 1", "mlp": {"write": "x + a * b * y - output(layers - 2)"}}
    mlp = {**MLP, "learn": learn, "write": "x + a * b * y / (layers + 2)"}
    blocks = {"kind": "blocks", "norm": {"kind": "rms", "scale": "1/(layers + layer)"}, "changes": [last]}
    scaled = {"kind": "attention", "name": "own", "heads": 2, "scale": "1/(layers + 4)"}
    common = {"shared": {"of": "x0", "init": {"normal": "2/layers"}}}
    spec = pairs_spec(
        encoder=[EMBED, {**blocks, "count": 2, "layers": [mlp]}],
        decoder=[
            EMBED,
            {**blocks, "count": 3, "norm": {"kind": "rms", "scale": "1/layers"}, "common": common}
            | {"layers": [scaled, CROSS, {**mlp, "read": "x + shared"}]},
            {**MLP, "name": "after", "write": "x + y / layers"},
        ],
        output_init={"constant": 0.0},
        init={"normal": "1/layers"},
    )
    programs = pipeline.lower(spec, "cpu")
    calls = [node.op for node in programs.program("train").nodes if isinstance(node.op, Call)]
    assert [dict(op.scalars)["norm_scale"] for op in calls if op.scalars] == [1 / 2, 1 / 3]
    assert {formula for _, _, formula in programs.constants} == {"1 / 3", "2 + 2", "3 + 2", "5"}
    assert {node.op.scale for graph in programs.graphs for node in graph.nodes if isinstance(node.op, Sdpa)} == {1 / 7}
    inits = {param.name: param.init.numbers(param.shape)[1] for param in programs.params}
    assert [inits[f"{side}.mlp.a"] for side in ("encoder.blocks.1", "decoder.blocks.2")] == [1 / 3, 1 / 5]
    assert [inits[f"{side}.mlp.b"] for side in ("encoder.blocks.1", "decoder.blocks.2")] == [1 / 2, 1 / 3]
    assert inits["decoder.blocks_shared"] == 2 / 3
    assert inits["decoder.blocks.0.mlp.up"] == inits["decoder.after.up"] == inits["decoder.embed.token"] == 1 / 5


def test_a_block_and_a_loop_of_one_function_name_have_a_pattern() -> None:
    """Places of different depth: a fusion point may take an encoder's block and a decoder's loop over time at once."""
    mlp = {**MLP, "act": "gelu(x)"}
    spec = pairs_spec(
        encoder=[{"kind": "embed", "dim": 8}, {"kind": "blocks", "count": 2, "layers": [mlp]}],
        decoder=[
            {"kind": "embed", "dim": 8},
            {"kind": "additive", "query": "lstm"},
            mlp,
            {"kind": "lstm", "hidden": 8},
        ],
        fuse=[{"*.mlp": ["up", "act", "down"]}],
    )
    plan = pipeline.plan(spec, "cpu", "specs/pairs.yaml")
    (group, *_) = plan.programs.groups
    assert group_pattern(plan.programs, group, group.scope).endswith("mlp")
