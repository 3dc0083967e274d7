"""Exact match: the share of lines whose decoded text is the target, character for character."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from specc.compiler.spec.spec import Spec
from specc.compiler.spec.train import ExactMatchSpec
from specc.runtime.data.lines.pairs import Pairs, placed
from specc.runtime.data.tokenizers.characters import PAD, CharTokenizer
from specc.runtime.decode.lines import translator
from specc.runtime.metrics.validation import Score, Scorer


class Translates(Protocol):
    """Decodes lines, greedily or by beam search, each until its stop or its limit of tokens."""

    def translate(self, lines: Sequence[str], limits: Sequence[int]) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class ExactMatch:
    """The score of a set of pairs; all shares are of totals.

    Attributes:
        nats: sum of the teacher-forced loss over all target tokens, stops included and pads left out.
        tokens: number of these tokens.
        lines: pairs that were scored.
        exact: pairs whose decoded line equals the target.
        matching: target tokens, stops included, that the decoded line has in the same place.
    """

    nats: float
    tokens: int
    lines: int
    exact: int
    matching: int

    @property
    def exact_match(self) -> float:
        return self.exact / self.lines

    @property
    def token_accuracy(self) -> float:
        return self.matching / self.tokens

    def record(self) -> dict[str, float]:
        """Fields for the log of a run; `nats` is the mean per token."""
        shares = {"exact_match": self.exact_match, "token_accuracy": self.token_accuracy}
        return {"nats": self.nats / self.tokens, "tokens": self.tokens, "lines": self.lines, **shares}

    def line(self) -> str:
        accuracy = f"{100 * self.token_accuracy:.3f} % of tokens"
        return f"{self.nats / self.tokens:.5f} nats/token, {self.summary()} of {self.lines:,} lines, {accuracy}"

    def summary(self) -> str:
        return f"{100 * self.exact_match:.3f} % exact"


def exact_match(
    score: Score,
    translates: Translates,
    pairs: Pairs,
    tokenizer: CharTokenizer,
    batch: int,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    hopeless: int | None = None,
) -> ExactMatch:
    """Scores pairs by decoding them.

    Args:
        score: nats of each target token, f32 [B, width], 0 at pads, of source and target, i64 [B, width]. B is always
            `batch`: the last batch is filled up with copies that do not count.
        translates: decodes the sources.
        pairs: what to score.
        tokenizer: the characters of the pairs.
        batch: pairs that are scored at once.
        device: device of source and target.
        progress: called with lines scored and lines in all.
        hopeless: stop where none of the first `hopeless` pairs is exact, with the batch that ends them.

    Returns:
        The score of the pairs that were tried.
    """
    nats, exact, matching, scored = 0.0, 0, 0, 0
    for start in range(0, len(pairs), batch):
        part = pairs[start : start + batch]
        rows = np.minimum(np.arange(start, start + batch), len(pairs) - 1)
        filled = pairs[rows]
        with torch.no_grad():
            scores = score(placed(filled.source, device).long(), placed(filled.target, device).long())
        losses = scores.detach().cpu().double().numpy()[: len(part)]
        mask = part.target != PAD
        nats += math.fsum(losses[mask])
        # a line that is longer than its target is wrong however it goes on
        texts = translates.translate(tokenizer.decode_rows(part.source), mask.sum(axis=1).tolist())
        exact += sum(a == b for a, b in zip(texts, tokenizer.decode_rows(part.target), strict=True))
        # a line that never stops is as long as the decoder let it be
        width = max(mask.shape[1], max(map(len, texts)) + 1)
        decoded = tokenizer.encode_rows(texts, width)[:, : mask.shape[1]]
        matching += int((decoded == part.target)[mask].sum())
        scored = start + len(part)
        if hopeless is not None and scored >= hopeless and not exact:
            break
        if progress is not None:
            progress(scored, len(pairs))
    return ExactMatch(nats, int((pairs.target[:scored] != PAD).sum()), scored, exact, matching)


@dataclass(frozen=True, slots=True)
class PairValidation:
    """Pairs that are scored while a model trains, as `eval` of the spec states."""

    pairs: Pairs
    tokenizer: CharTokenizer
    spec: Spec

    @property
    def vocabulary(self) -> int:
        return self.tokenizer.vocab

    def measure(self, scorer: Scorer) -> ExactMatch:
        how, count = self.spec.eval, len(self.pairs)
        assert isinstance(how, ExactMatchSpec)
        part = scorer.share.of(count)
        local = self.pairs[part.start : part.stop]
        decoder: Translates = translator(
            scorer.model,
            self.spec,
            self.tokenizer,
            scorer.device,
            batch=how.batch,
            beam=how.beam or 1,
            compiled=scorer.compiled,
        )
        sums = np.zeros(5)
        if len(local):
            match = exact_match(
                scorer.score, decoder, local, self.tokenizer, min(how.batch, count), scorer.device, scorer.progress
            )
            sums[:] = match.nats, match.tokens, match.lines, match.exact, match.matching
        nats, *counts = scorer.share.total(sums).tolist()  # counts are exact below 2 ** 53
        return ExactMatch(nats, *map(int, counts))
