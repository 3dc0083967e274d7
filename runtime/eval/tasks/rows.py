"""Encodes texts as rows of tokens, and computes the losses of the last tokens of each row."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.tokenizer import Tokenizer
from specc.runtime.errors import RunFailure
from specc.runtime.metrics.expert_load import expert_loads
from specc.runtime.metrics.share import Share
from specc.runtime.open_model import OpenedModel

SURE = math.log(2)  # a token with a smaller loss has a probability above 1/2, and is therefore the most probable token
MULTIPLE = 64  # lengths are padded to multiples of this number, so that torch.compile sees few lengths
LOAD_ROWS = 8  # the number of rows on which the load of experts is measured


@dataclass(frozen=True, slots=True)
class Row:
    """A row of tokens, of which only the last `scored` tokens are scored.

    Attributes:
        tokens: the tokens. All tokens except the last are inputs of the model.
        scored: the number of scored tokens.
        size: the bytes of text that the scored tokens represent.
        truncated: whether tokens were removed from the left, so that the row fits into the context of the model.
    """

    tokens: tuple[int, ...]
    scored: int
    size: int
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class RowScore:
    """The scores of a row.

    Attributes:
        nats: the sum of the losses of the scored tokens, in nats.
        greedy: True if every scored token is the most probable token at its position. False otherwise, and also if this
            property was not computed.
    """

    nats: float
    greedy: bool


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes texts as rows for a model.

    Attributes:
        tokenizer: the tokenizer of the model.
        window: the maximum number of input tokens of a row.
        stride: the distance in tokens between the windows into which a longer text is cut.
        unscored: the number of positions at the start of a window that are not scored. If the model has a prefix mask,
            these positions attend to their own targets.
    """

    tokenizer: Tokenizer
    window: int
    stride: int
    unscored: int = 0

    def continuation(self, context: str, text: str, where: str) -> Row:
        """Returns the row that scores `text` after `context`.

        White space at the end of the context is moved to the start of the text, as in lm-evaluation-harness. Context
        and text are tokenized together. If the context alone has n tokens, the first n tokens of the row belong to the
        context, and all later tokens belong to the text. BOS precedes the context. If the row is longer than the
        window, its first tokens are removed.

        Raises DataError if the text cannot be scored. The message begins with `where`.
        """
        bos = [] if self.tokenizer.bos is None else [self.tokenizer.bos]
        head = context.rstrip()
        before, whole = (self.encoded(part, where) for part in (head, head + context[len(head) :] + text))
        tokens, scored = [*bos, *whole], len(whole) - len(before)
        if scored < 1:
            raise DataError(f"{where}: {text!r} adds no token to its context", "correct the line or remove it")
        if scored == len(tokens):
            message = f"{where}: the context is empty, and {self.tokenizer.name} has no BOS token"
            raise DataError(message, "give the line a context")
        if scored > self.window:
            message = f"{where}: {text[:40]!r} ... has {scored} tokens, but the context of the model has {self.window}"
            raise DataError(message, "shorten the line or remove it")
        inputs = min(len(tokens) - 1, self.window)
        if inputs - scored < self.unscored:
            message = f"{where}: the context is shorter than the prefix of the model, {self.unscored + 1} tokens"
            raise DataError(message, "give the line a longer context or remove it")
        size = len((context + text).encode()) - len(head.encode())
        return Row(tuple(tokens[-inputs - 1 :]), scored, size, inputs < len(tokens) - 1)

    def encoded(self, text: str, where: str) -> list[int]:
        try:
            tokens: list[int] = self.tokenizer.encode(text.encode()).tolist() if text else []
        except UnicodeEncodeError:
            message = f"{where}: the text has half a surrogate pair, which is not a character"
            raise DataError(message, "correct the line or remove it") from None
        except DataError as error:
            raise DataError(f"{where}: {error.message}", error.hint) from None
        return tokens


def score_rows(
    opened: OpenedModel,
    rows: Sequence[Row],
    batch: int,
    greedy: bool,
    share: Share,
    score: Callable[[Tensor, Tensor], Tensor],
    fixed_length: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[RowScore]:
    """Scores rows in batches. The rows of a batch have similar lengths.

    Shorter rows are padded on the right. In a causal model, padding changes scores only by rounding.

    Args:
        opened: the model.
        rows: the rows.
        batch: the number of rows per batch.
        greedy: whether to compute `RowScore.greedy`.
        share: selects the rows that this process scores, and sums the results of all processes.
        score: a function that maps ids and targets, i64 [B, T], to the loss of each target in nats, [B, T].
        fixed_length: whether all batches are padded to the same length, so that `score` is compiled only once.
        progress: is called as `progress(scored, total)`. `scored` is the number of rows that this process has scored.
            `total` is the number of rows that this process must score.

    Returns:
        One score for each row, in the order of `rows`. The result includes the rows that other processes scored.

    Raises:
        RunFailure: a loss is not finite.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    local = [batches[i] for i in share.of(len(batches))]
    longest = len(rows[order[0]].tokens) - 1
    sums, done = np.zeros((len(rows), 2)), 0
    unsure: dict[int, list[int]] = {}  # for each row, the positions whose target may not be the most probable token
    for chosen in local:
        width = -(-longest // MULTIPLE) * MULTIPLE if fixed_length else len(rows[chosen[0]].tokens) - 1
        width = max(min(width, opened.spec.model.window), opened.spec.model.unscored + 1)
        table = np.zeros((batch if fixed_length else len(chosen), width + 1), np.int64)
        for place, i in enumerate(chosen):
            table[place, : len(rows[i].tokens)] = rows[i].tokens
        ids = torch.from_numpy(table).to(opened.device)
        with torch.no_grad():
            losses = score(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).double().cpu().numpy()
        for place, i in enumerate(chosen):
            end = len(rows[i].tokens) - 1
            targets = losses[place, end - rows[i].scored : end]
            sums[i] = math.fsum(targets), 1
            if places := np.flatnonzero(targets >= SURE).tolist():
                unsure[i] = [end - rows[i].scored + 1 + k for k in places]
        done += len(chosen)
        if progress is not None:
            progress(done, sum(map(len, local)))
    if greedy:
        for i in _not_greedy(opened, rows, unsure, batch):
            sums[i, 1] = 0
    totals = share.total(sums.reshape(-1)).reshape(-1, 2)
    if not np.isfinite(totals[:, 0]).all():
        hint = "the model is broken: evaluate an earlier checkpoint"
        raise RunFailure(f"the loss is {totals[:, 0].sum()}", hint)
    return [RowScore(nats, greedy and first == 1) for nats, first in totals.tolist()]


def _not_greedy(opened: OpenedModel, rows: Sequence[Row], unsure: dict[int, list[int]], batch: int) -> Iterator[int]:
    """Yields the index of each row in which a scored token is not the most probable token at its position.

    `unsure` maps the index of a row to the positions that must be checked.
    """
    by_length: dict[int, list[int]] = {}
    for i, places in unsure.items():
        for place in places:
            by_length.setdefault(place, []).append(i)
    for length, members in by_length.items():
        for start in range(0, len(members), batch):
            chosen = members[start : start + batch]
            ids = torch.tensor([rows[i].tokens[:length] for i in chosen], device=opened.device)
            model = opened.text_model
            with torch.no_grad():
                zero = torch.zeros((), dtype=torch.int64, device=opened.device)
                logits = model.prefill(ids, zero, model.new_cache(len(chosen), length))
            best = logits.argmax(-1).tolist()
            yield from (i for i, token in zip(chosen, best, strict=True) if token != rows[i].tokens[length])


def loads_of(opened: OpenedModel, rows: Sequence[Row]) -> dict[str, list[float]]:
    """Returns the fraction of tokens that each expert receives, by the name of the layer with experts. The fractions
    are measured on the longest rows.
    """
    if not any(parameter.dim() == 3 for parameter in opened.model.parameters()):
        return {}
    longest = sorted(rows, key=lambda row: -len(row.tokens))[:LOAD_ROWS]
    width = min(len(row.tokens) for row in longest)
    ids = torch.tensor([row.tokens[:width] for row in longest], device=opened.device)
    return expert_loads(opened.model, opened.text_model.score, ids[:, :-1], ids[:, 1:])
