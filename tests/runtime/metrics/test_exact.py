"""Exact match: strings compared after the stop, tokens without pads, nats without pads, and all of totals."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pair_toy import CPU, TOKENS, WIDTH, pairs
from torch import Tensor

from specc.compiler.spec.train import ExactMatchSpec
from specc.runtime.data.lines.pairs import Pairs
from specc.runtime.metrics.exact_match import ExactMatch, PairValidation, exact_match
from specc.runtime.metrics.share import Share, Sums
from specc.runtime.metrics.validation import Scorer


class Answers:
    """Translates by a table; what is not in it becomes the target with its last character gone."""

    def __init__(self, given: dict[str, str], of: Pairs) -> None:
        sides = (TOKENS.decode_rows(side) for side in (of.source, of.target))
        self.table = {a: b[:-1] for a, b in zip(*sides, strict=True)} | given
        self.sizes: list[int] = []

    def translate(self, lines: Sequence[str], limits: Sequence[int]) -> list[str]:
        assert len(limits) == len(lines) and min(limits) > 0
        self.sizes.append(len(lines))
        return [self.table[line] for line in lines]


def nats(source: Tensor, target: Tensor) -> Tensor:
    """A number that depends on both sides, and is not 0 at pads, which must not count."""
    return (source.float() + 2 * target.float()) / 100 + 1


def test_lines_and_tokens_that_match() -> None:
    two = Pairs(
        TOKENS.encode_rows(["x**2", "x*(x+1)", "3*x**2"], 12), TOKENS.encode_rows(["x**2", "x**2+x", "3*x**2"], 12)
    )
    given = {"x**2": "x**2", "x*(x+1)": "x**2-x", "3*x**2": "3"}
    result = exact_match(nats, Answers(given, two), two, TOKENS, 2, CPU)
    # 5 of 5 with the stop; all but the sign of 7; of `3*x**2` and a stop only the 3
    assert (result.lines, result.exact, result.tokens, result.matching) == (3, 1, 5 + 7 + 7, 5 + 6 + 1)
    assert result.exact_match == 1 / 3
    assert result.token_accuracy == 12 / 19
    assert result.summary() == "33.333 % exact"
    assert result.line().endswith("33.333 % exact of 3 lines, 63.158 % of tokens")
    assert result.record()["nats"] == result.nats / 19


def test_a_line_that_never_stops_is_wrong_and_no_error() -> None:
    line = Pairs(TOKENS.encode_rows(["x"], 4), TOKENS.encode_rows(["xyz"], 4))
    result = exact_match(nats, Answers({"x": "xyzx"}, line), line, TOKENS, 2, CPU)
    assert (result.exact, result.matching, result.tokens) == (0, 3, 4)
    result = exact_match(nats, Answers({"x": "xyz" * 5}, line), line, TOKENS, 2, CPU)
    assert (result.exact, result.matching) == (0, 3)


@pytest.mark.parametrize("batch", [1, 7, 64, 500])
def test_batches_do_not_matter(batch: int) -> None:
    some = pairs(64)
    right = dict(zip(*(TOKENS.decode_rows(side[::3]) for side in (some.source, some.target)), strict=True))
    answers = Answers(right, some)
    shapes, seen = [], []

    def score(source: Tensor, target: Tensor) -> Tensor:
        shapes.append(source.shape)
        return nats(source, target)

    result = exact_match(score, answers, some, TOKENS, batch, CPU, lambda done, todo: seen.append((done, todo)))
    real = some.target != 0
    expected = nats(torch.from_numpy(some.source), torch.from_numpy(some.target)).double().numpy()[real].sum()
    assert result.nats == pytest.approx(expected, rel=1e-6)
    assert (result.lines, result.exact, result.tokens) == (64, len(range(0, 64, 3)), int(real.sum()))
    assert set(shapes) == {(batch, WIDTH)}  # one shape for what is compiled
    assert sum(answers.sizes) == 64 and seen[-1] == (64, 64)


def test_where_nothing_is_exact_it_ends() -> None:
    """With the batch in which that is known; one exact line is enough to go on."""
    some = pairs(64)
    seen: list[tuple[int, int]] = []
    ended = exact_match(nats, Answers({}, some), some, TOKENS, 10, CPU, hopeless=25)
    whole = exact_match(nats, Answers({}, some[:30]), some[:30], TOKENS, 10, CPU)
    assert ended == whole and ended.lines == 30
    right = {TOKENS.decode_rows(some.source)[24]: TOKENS.decode_rows(some.target)[24]}
    given = Answers(right, some)
    assert (
        exact_match(nats, given, some, TOKENS, 10, CPU, lambda *progress: seen.append(progress), hopeless=25).lines
        == 64
    )
    assert seen[-1] == (64, 64)


@pytest.mark.parametrize("world", [1, 3, 5])
def test_ranks_share_the_lines(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    some = pairs(4 if world == 5 else 64)
    answers = Answers({}, some)
    asked: list[dict[str, Any]] = []

    def translator(*given: Any, **how: Any) -> Answers:
        asked.append(how)
        return answers

    monkeypatch.setattr("specc.runtime.metrics.exact_match.translator", translator)
    spec: Any = SimpleNamespace(eval=ExactMatchSpec(metric="exact_match", batch=10))
    sums: list[Sums] = []

    def reduce(part: Sums) -> Sums:
        sums.append(part.copy())
        return np.sum(sums, axis=0)  # what the last rank sees

    for rank in range(world):
        scorer = Scorer(torch.nn.Identity(), nats, WIDTH, CPU, Share(rank, world, reduce), None, False)
        result = PairValidation(some, TOKENS, spec).measure(scorer)
    alone = exact_match(nats, answers, some, TOKENS, 10, CPU)
    assert isinstance(result, ExactMatch)
    assert result.nats == pytest.approx(alone.nats, rel=1e-12)
    assert (result.tokens, result.lines, result.exact, result.matching) == (
        alone.tokens,
        alone.lines,
        alone.exact,
        alone.matching,
    )
    assert asked[0] == {"batch": 10, "beam": 1, "compiled": False}
