"""Exact match: the fraction of lines whose decoded text equals the target."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from specc.compiler.spec.spec import Spec
from specc.compiler.spec.train import ExactMatchSpec
from specc.runtime.data.lines.pairs import Pairs, placed
from specc.runtime.data.tokenizers.characters import PAD, CharTokenizer
from specc.runtime.decode.lines import Translator, translator
from specc.runtime.metrics.validation import Score, Scorer


@dataclass(frozen=True, slots=True)
class ExactMatch:
    """The score of a set of pairs (source line, target line).

    Attributes:
        nats: the sum of the teacher-forced loss in nats over all target tokens except padding.
        tokens: the number of target tokens, including stop tokens but not padding.
        lines: the number of scored pairs.
        exact: the number of pairs whose decoded line equals the target.
        matching: the number of target tokens that equal the decoded token at the same position.
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
        shares = {"exact_match": self.exact_match, "token_accuracy": self.token_accuracy}
        return {"nats": self.nats / self.tokens, "tokens": self.tokens, "lines": self.lines, **shares}

    def line(self) -> str:
        accuracy = f"{100 * self.token_accuracy:.3f} % of tokens"
        return f"{self.nats / self.tokens:.5f} nats/token, {self.summary()} of {self.lines:,} lines, {accuracy}"

    def summary(self) -> str:
        return f"{100 * self.exact_match:.3f} % exact"


def exact_match(
    score: Score,
    translates: Translator,
    pairs: Pairs,
    tokenizer: CharTokenizer,
    batch: int,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    hopeless: int | None = None,
) -> ExactMatch:
    """Translates the source line of each pair, and compares the translation with the target line.

    Args:
        score: maps source and target, i64 [B, width], to the loss of each target token in nats, f32 [B, width]. The
            loss of padding is 0. B is always `batch`.
        translates: translates source lines with the model.
        pairs: the pairs to score.
        tokenizer: the tokenizer of the pairs, with one id per character.
        batch: the number of pairs per batch.
        device: the device of source and target.
        progress: a function called as `progress(scored, total)`. Both numbers count pairs.
        hopeless: scoring stops early if none of the first `hopeless` pairs is an exact match. None scores all pairs.

    Returns:
        The score of the pairs that were decoded.
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
        # Decoding may stop at the length of the target, because a longer line is wrong in any case.
        texts = translates.translate(tokenizer.decode_rows(part.source), mask.sum(axis=1).tolist())
        exact += sum(a == b for a, b in zip(texts, tokenizer.decode_rows(part.target), strict=True))
        # A line without a stop token may be longer than all targets.
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
    """The validation pairs that are scored during training, with the settings of the section `eval` of the spec."""

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
        decoder = translator(
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
