"""Decoding of lines: greedy and beam search against search without a cache, rows that leave, and what training is
fed."""

import itertools
from typing import Any

import pytest
import torch
from pair_models import BOTH, CHARS, CROSS, EMBED, LSTM, MLP, SELF, blocks, pairs_spec
from torch import Tensor
from torch.nn import functional as F

from specc.compiler.characters import PAD, START, STOP
from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.characters import CharTokenizer
from specc.runtime.decode.lines import Translator, decoder_inputs, translator
from specc.runtime.decode.step_graphs import Eager
from specc.runtime.errors import RunFailure
from specc.runtime.model.load import Loaded, initialize, instantiate
from specc.runtime.train.sources.feed import shifted

LEARNED = {**EMBED, "positions": "learned"}
ADDITIVE = {"kind": "additive", "query": "lstm"}
MODELS: dict[str, dict[str, Any]] = {
    "transformer": {"encoder": [LEARNED, blocks(SELF, MLP)], "decoder": [LEARNED, blocks(SELF, CROSS, MLP)]},
    "lstm": {
        "encoder": [EMBED, BOTH],
        "decoder": [EMBED, ADDITIVE, {"kind": "concat", "beside": "embed"}, LSTM],
        "bridge": {"kind": "linear"},
    },
    "loops": {
        "encoder": [EMBED, BOTH],
        "decoder": [
            EMBED,
            {**ADDITIVE, "query": "low", "name": "ask_low"},
            ADDITIVE,
            {"kind": "concat", "beside": "ask_low"},
            {"kind": "concat", "beside": "embed", "name": "both"},
            {**LSTM, "name": "low"},
            LSTM,
            {**ADDITIVE, "query": "last", "name": "again"},
            {"kind": "concat", "beside": "low", "name": "late"},
            {**LSTM, "name": "last"},
        ],
        "bridge": {"kind": "linear"},
    },
}
LINES = ["(7-3*z)*(-5*z-9)", "x**2", "4*(3*sin(k)-17)*sin(k)", "", "z", "(2-2*n)*(n-1)", "x**2", "n*(n-11)"]
TOKENIZER = CharTokenizer(CHARS)


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A small model whose greedy lines end after different numbers of tokens, and some never."""
    spec = pairs_spec(**MODELS[request.param], init={"normal": 1.2})
    result = instantiate(spec, "cpu", tmp_path_factory.mktemp(request.param))
    initialize(result, 28 if request.param == "loops" else 11)
    return result


def of(loaded: Loaded, **words: Any) -> Translator:
    return translator(loaded.model, loaded.spec, TOKENIZER, torch.device("cpu"), **words)


def whole(model: Any, source: Tensor, line: Tensor) -> Tensor:
    """Log-probabilities [V] of the token after `line` (without its start), from `score` alone: no state at all."""
    lines = torch.cat((line.expand(30, -1), torch.arange(1, 31)[:, None]), 1)
    nats = model.score(source.expand(30, -1), lines)[:, -1]
    return -torch.cat((torch.tensor([float("inf")]), nats))


def naive(loaded: Loaded, text: str) -> str:
    source = torch.from_numpy(TOKENIZER.encode_rows([text], loaded.spec.model.window)[0]).long()
    line = torch.zeros(0, dtype=torch.int64)
    for _ in range(loaded.spec.model.window):
        scores = whole(loaded.model, source, line)
        scores[START] = float("-inf")
        best = int(scores.argmax())
        if best == STOP:
            break
        line = torch.cat((line, torch.tensor([best])))
    return TOKENIZER.decode(line.numpy())


def test_greedy_lines_are_those_without_a_cache(loaded: Loaded) -> None:
    with torch.no_grad():
        want = [naive(loaded, text) for text in LINES[:4]]
    assert of(loaded).translate(LINES[:4]) == want
    assert len({len(line) for line in of(loaded).translate(LINES)}) > 1  # rows end at different steps


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("batch", [3, 100])
def test_a_line_does_not_depend_on_its_batch(loaded: Loaded, batch: int, beam: int) -> None:
    alone = [of(loaded, beam=beam).translate([text])[0] for text in LINES]
    assert of(loaded, batch=batch, beam=beam).translate(LINES) == alone
    assert of(loaded, batch=batch, beam=beam).translate(LINES[::-1]) == alone[::-1]


@pytest.mark.parametrize("batch", [2, 100])
def test_what_is_wanted_of_a_line_is_what_all_of_it_begins_with(loaded: Loaded, batch: int) -> None:
    """And what has its stop by then is all there; a beam search goes to the end."""
    limits = [1, 7, 30, 4, 12, 5, 1, 9]
    whole, some = of(loaded, batch=batch).translate(LINES), of(loaded, batch=batch).translate(LINES, limits)
    for translation, other, limit in zip(whole, some, limits, strict=True):
        assert other[:limit] == translation[:limit] and (len(translation) >= limit or other == translation)
    assert some != whole
    beams = of(loaded, batch=batch, beam=3)
    assert beams.translate(LINES, limits) == beams.translate(LINES)


def test_no_lines_give_no_lines(loaded: Loaded) -> None:
    assert of(loaded).translate([]) == []


class Chain:
    """A model of a Markov chain over few tokens, whose best lines can be found by trying all."""

    def __init__(self, seed: int, tokens: int = 3, window: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens, self.window = tokens, window
        self.steps = (2 * torch.randn(31, 31, generator=generator)).log_softmax(-1)
        unused = [v for v in range(31) if v not in (STOP, *range(3, 3 + tokens))]
        self.steps[:, unused] = -1e4
        self.steps = self.steps.log_softmax(-1)
        self.rows: list[int] = []

    def encode(self, source: Tensor) -> dict[str, tuple[Tensor, ...]]:
        return {"decoder.count": (torch.zeros(len(source), 1), source.float())}

    def extend(self, ids: Tensor, start: Tensor, state: dict[str, tuple[Tensor, ...]]) -> Tensor:
        count, source = state["decoder.count"]
        assert bool((count == start).all())  # every row has been extended as often as was said
        assert len(source) == len(ids)
        self.rows.append(len(ids))
        count += 1
        return self.steps[ids[:, 0]] + 0.3 * source[:, :1] * torch.linspace(-1, 1, 31)

    def chance(self, source: Tensor, line: tuple[int, ...]) -> float:
        total, last = 0.0, START
        for token in line:
            logits = self.steps[last] + 0.3 * source[0].float() * torch.linspace(-1, 1, 31)
            total, last = total + float(logits.log_softmax(-1)[token]), token
        return total

    def best(self, source: Tensor) -> tuple[int, ...]:
        """The most probable line of all, of at most `window` tokens, the stop included."""
        tokens = range(3, 3 + self.tokens)
        lines = [(*line, STOP) for n in range(self.window) for line in itertools.product(tokens, repeat=n)]
        lines += list(itertools.product(tokens, repeat=self.window))
        return max(lines, key=lambda line: self.chance(source, line))


@pytest.mark.parametrize("seed", range(6))
def test_a_beam_as_wide_as_the_lines_finds_the_best_of_all(seed: int) -> None:
    chain = Chain(seed)
    search = Translator(Eager(chain), TOKENIZER, chain.window, True, torch.device("cpu"), beam=300)
    source = torch.arange(3, 9)[:, None] % 7
    result = search.tokens(source)
    for row, line in zip(source, result.tolist(), strict=True):
        assert tuple(token for token in line if token != PAD) == chain.best(row)


@pytest.mark.parametrize("seed", range(4))
def test_a_wider_beam_is_no_worse_and_greedy_is_a_beam_of_one(seed: int) -> None:
    chain = Chain(seed, tokens=6, window=8)
    source = torch.arange(12)[:, None]
    chances = []
    for beam in (1, 20):
        search = Translator(Eager(chain), TOKENIZER, chain.window, True, torch.device("cpu"), beam=beam)
        lines = [tuple(t for t in line if t != PAD) for line in search.tokens(source).tolist()]
        chances.append([chain.chance(row, line) for row, line in zip(source, lines, strict=True)])
    assert all(wide >= greedy - 1e-5 for greedy, wide in zip(*chances, strict=True))
    assert any(wide > greedy + 1e-3 for greedy, wide in zip(*chances, strict=True)) or seed


class Countdown(Chain):
    """Each line has as many tokens 3 as its source says, and token 4 in front of the stop."""

    def extend(self, ids: Tensor, start: Tensor, state: dict[str, tuple[Tensor, ...]]) -> Tensor:
        super().extend(ids, start, state)
        left = state["decoder.count"][1][:, 0].long() - start
        return F.one_hot(torch.where(left > 0, 3, torch.where(left == 0, 4, STOP)), 31) * 20.0


@pytest.mark.parametrize("beam", [1, 2])
def test_rows_that_are_done_leave_the_batch(beam: int) -> None:
    chain = Countdown(1, window=24)
    search = Translator(Eager(chain), TOKENIZER, chain.window, True, torch.device("cpu"), beam=beam)
    sources = torch.arange(200)[:, None] * 7 % 20
    result = search.tokens(sources)
    for (count,), line in zip(sources.tolist(), result.tolist(), strict=True):
        assert line == [3] * count + [4, STOP] + [PAD] * (24 - count - 2)
    assert chain.rows[0] == 200 * beam
    assert chain.rows == sorted(chain.rows, reverse=True)
    assert sum(chain.rows) < 0.8 * 200 * beam * len(chain.rows)


def test_a_model_that_gives_no_numbers_is_refused() -> None:
    chain = Chain(0)
    chain.steps[4] = float("nan")
    chain.steps[START, 4] = 50.0
    with pytest.raises(RunFailure, match="the largest logit is not finite"):
        Translator(Eager(chain), TOKENIZER, 5, True, torch.device("cpu")).tokens(torch.ones(2, 1, dtype=torch.int64))


@pytest.mark.parametrize("beam", [1, 2])
def test_a_row_without_numbers_is_refused_though_the_others_go_on(beam: int) -> None:
    """Of all NaN the stop's is the maximum: the row ends at once, and leaves the batch long before the others."""

    class Part(Countdown):
        def extend(self, ids: Tensor, start: Tensor, state: dict[str, tuple[Tensor, ...]]) -> Tensor:
            logits = super().extend(ids, start, state)
            return logits.masked_fill(state["decoder.count"][1] == 19, float("nan"))

    search = Translator(Eager(Part(1, window=24)), TOKENIZER, 24, True, torch.device("cpu"), beam=beam)
    with pytest.raises(RunFailure, match="the largest logit is not finite"):
        search.tokens(torch.arange(200)[:, None] * 7 % 20)


def test_a_line_that_is_too_long_or_has_another_character_is_refused(loaded: Loaded) -> None:
    with pytest.raises(DataError, match="has room for 29 characters and a stop token"):
        of(loaded).translate(["x", "x" * 30])
    with pytest.raises(DataError, match="not in the vocabulary"):
        of(loaded).translate(["x+y=1"])


def test_what_is_fed_is_the_truth_or_the_models_own(loaded: Loaded) -> None:
    model: Any = loaded.model
    source = torch.from_numpy(TOKENIZER.encode_rows(LINES[:3], 30)).long()
    target = torch.from_numpy(TOKENIZER.encode_rows(LINES[3:6], 14)).long()
    generator = torch.Generator().manual_seed(0)
    forcing = torch.rand(target.shape, generator=generator) < 0.5
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    inputs = decoder_inputs(model, source, target, forcing)
    truth = shifted(target)
    assert torch.equal(inputs[:, 0], truth[:, 0])
    assert torch.equal(inputs[:, 1:][forcing[:, 1:]], truth[:, 1:][forcing[:, 1:]])
    with torch.no_grad():
        state = model.encode(source)
        for t in range(target.shape[1] - 1):  # along what was fed, each own token is the one that would be written
            logits = model.extend(inputs[:, t : t + 1], torch.tensor(t), state)
            choice = logits.index_fill(1, torch.tensor([PAD, START]), float("-inf")).argmax(-1)
            assert torch.equal(inputs[:, t + 1][~forcing[:, t + 1]], choice[~forcing[:, t + 1]])
    assert not torch.equal(inputs, truth)
    assert torch.equal(decoder_inputs(model, source, target, torch.ones(14, dtype=torch.bool)), truth)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_one_text_is_no_list_of_lines(loaded: Loaded) -> None:
    with pytest.raises(TypeError, match="a list of lines"):
        translator(loaded.model, loaded.spec, TOKENIZER, torch.device("cpu")).translate("x+1")
    for odd in (None, 1, b"x"):
        with pytest.raises(TypeError, match="line 1 is"):
            of(loaded).translate(["x+1", odd])  # type: ignore[list-item]
    assert of(loaded).translate(iter(LINES)) == of(loaded).translate(LINES)


def test_there_is_one_limit_a_line(loaded: Loaded) -> None:
    for limits in ([], [3], [3, 3, 3]):
        with pytest.raises(ValueError, match=f"a limit for each line, not {len(limits)} limits for 2 lines"):
            of(loaded).translate(["x+1", "x"], limits)
    assert len(of(loaded).translate(["x+1", "x"], [3, 4])) == 2
    assert of(loaded).translate([], []) == []


def test_a_batch_has_fewer_sources_where_each_has_beams(loaded: Loaded) -> None:
    assert [of(loaded, batch=12, beam=beam).batch for beam in (1, 4, 5, 100)] == [12, 3, 2, 1]


def test_what_is_fed_where_nothing_is_forced_is_what_is_decoded() -> None:
    """Pads and starts are most probable here, and neither writes them."""
    chain: Any = Chain(3)
    chain.steps[:, PAD] = 60.0
    chain.steps[:, START] = 50.0
    source = torch.ones(9, 1, dtype=torch.int64)
    written = Translator(Eager(chain), TOKENIZER, 8, True, torch.device("cpu")).tokens(source)
    fed = decoder_inputs(chain, source, torch.zeros(9, 8, dtype=torch.int64), torch.zeros(8, dtype=torch.bool))
    for row, line in zip(fed[:, 1:].tolist(), written[:, :-1].tolist(), strict=True):
        ended = line.index(STOP) + 1 if STOP in line else len(line)
        assert row[:ended] == line[:ended]
    assert not bool((fed[:, 1:] < STOP).any())
