"""Bits per byte: the loss of a model over a stream, in a unit that does not depend on the tokenizer.

`bpb` divides by the bytes of the documents as they stand in the source. `bpb_pieces` divides by the bytes
that the scored tokens stand for (PieceBytes). For a lossless tokenizer these are the same number, and that is
checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.tokenizers.tokenizer import Tokenizer
from specc.runtime.data.windows.evaluation import Batch, Ids, WindowPlan, Windows, cut, read_batch
from specc.runtime.data.windows.stream import TokenStream
from specc.runtime.metrics.share import WHOLE, Share

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class BitsPerByte:
    """The result of `evaluate_bits`.

    Attributes:
        nats: sum of the loss over the scored tokens, in nats.
        tokens: tokens that were scored, separators included, which have no bytes.
        document_bytes: bytes of the documents; None if only a part was scored, or the source does not state them.
        piece_bytes: bytes that the scored tokens stand for.
        bpb: bits per byte of the documents; None if their bytes are unknown and the tokenizer is lossy.
        bpb_pieces: bits per byte by pieces.
        lossless: whether the tokenizer is lossless.
        held_out: True where the text is the validation split of the model's training data, False where it is their
            training split; None where that is not known.
    """

    nats: float
    tokens: int
    document_bytes: int | None
    piece_bytes: int
    bpb: float | None
    bpb_pieces: float
    lossless: bool
    held_out: bool | None = None

    def record(self) -> dict[str, float | None]:
        """Fields for the log of a run; `nats` is the mean per token."""
        nats = self.nats / self.tokens
        return {"nats": nats, "tokens": self.tokens, "bpb": self.bpb, "bpb_pieces": self.bpb_pieces}

    def line(self) -> str:
        return f"{self.nats / self.tokens:.4f} nats/token, {self.summary()}"

    def summary(self) -> str:
        """Each metric with its name; `bpb_pieces` only where it is another number."""
        bpb = "" if self.bpb is None else f"{self.bpb:.4f} bpb"
        pieces = "" if self.bpb == self.bpb_pieces else f"{self.bpb_pieces:.4f} bpb_pieces"
        return ", ".join(filter(None, (bpb, pieces)))

    def report(self) -> list[str]:
        """For people: the loss and both metrics, the audit, and whether the model was trained on the text."""
        bpb = "unknown" if self.bpb is None else f"{self.bpb:.4f}"
        nats = f"{self.nats / self.tokens:.4f} nats a token, bpb {bpb}, bpb_pieces {self.bpb_pieces:.4f}"
        trained = {
            True: "the validation split of the training data",
            False: "the training split: the model was trained on all of it",
            None: "whether the model was trained on this text is not known",
        }
        return [f"{self.tokens:,} tokens: {nats}", self.audit(), f"data: {trained[self.held_out]}"]

    def facts(self) -> dict[str, float | None]:
        """Fields for programs."""
        names = ("nats", "tokens", "document_bytes", "piece_bytes", "bpb", "bpb_pieces", "lossless", "held_out")
        return {name: getattr(self, name) for name in names}

    def audit(self) -> str:
        """One line that compares the two ways to count bytes."""
        pieces = f"audit: sum of token bytes {self.piece_bytes:,}"
        if self.document_bytes is None:
            return f"{pieces}; document bytes unknown (token shards, or only a part was scored)"
        if self.document_bytes == self.piece_bytes:
            return f"{pieces} == document bytes {self.document_bytes:,}"
        gap = self.piece_bytes - self.document_bytes
        kind = "the counts must agree: this is a bug" if self.lossless else "the tokenizer is lossy"
        share = 100 * gap / self.document_bytes
        return f"{pieces} != document bytes {self.document_bytes:,} (gap {gap:+,}, {share:+.2f} %; {kind})"


@dataclass(frozen=True, slots=True)
class ScoredText:
    """The text that is scored.

    Attributes:
        stream: its tokens.
        tokenizer: the tokenizer that made them.
        max_tokens: score the first `max_tokens` targets only; None scores all.
    """

    stream: TokenStream
    tokenizer: Tokenizer
    max_tokens: int | None = None

    def last_target(self) -> int:
        """The position of the last target. Raises DataError where the stream was made with another tokenizer, is too
        short, or does not start with BOS."""
        stream, tokenizer = self.stream, self.tokenizer
        if stream.tokenizer_digest not in (None, tokenizer.digest()) or stream.vocab != tokenizer.vocab:
            raise DataError(
                f"the stream was not made with the tokenizer {tokenizer.name}",
                "open the stream with the same tokenizer",
            )
        stream.require_scorable(tokenizer)
        last = stream.tokens - 1 if self.max_tokens is None else min(stream.tokens - 1, self.max_tokens)
        if last < 1:
            message = f"nothing to score: the stream has {stream.tokens} tokens, max_tokens is {self.max_tokens}"
            raise DataError(message, "score at least one token")
        return last


class Account:
    """The targets that each batch of windows scores, and the nats that are counted so far.

    Every token but the first is a target exactly once. The first is BOS, which has no bytes, so nothing is missing
    from either side of the fraction. Separators count in the numerator. Batches do not depend on the number of
    processes, and their sums are added up exactly: the total is the same number on any number of processes, where the
    model gives the same nats.

    Args:
        text: the text that is scored.
        plan: the windows.
        chunk: about as many targets are scored before the model may change; None for all.

    Attributes:
        windows: of `plan.length` tokens, unless the whole stream is shorter than one.
        chunks: indices of batches, in runs whose windows score about `chunk` targets; one run without it.

    Raises:
        DataError: as `ScoredText.last_target`.
    """

    def __init__(self, text: ScoredText, plan: WindowPlan, chunk: int | None = None) -> None:
        self._stream, self._tokenizer, self._rows = text.stream, text.tokenizer, plan.batch
        self.windows = Windows(text.last_target(), plan.length, plan.step)
        parts = cut(self.windows.chunks(chunk), plan.batch)
        self._batches = [batch for part in parts for batch in part]
        ends = np.cumsum([0, *map(len, parts)]).tolist()
        self.chunks = [range(first, end) for first, end in pairwise(ends)]
        self._pieces = text.tokenizer.piece_bytes()
        self._sums = np.zeros(len(self._batches) + 2)

    @property
    def tokens(self) -> int:
        """The number of targets that were added so far."""
        return int(self._sums[-2])

    def span(self, batches: range) -> tuple[int, int]:
        """The positions of the targets that a run of batches scores: behind the first one, up to the second."""
        first, end = self._batches[batches[0]][0], self._batches[batches[-1]][-1] + 1
        return self.windows.before(first), self.windows.before(end)

    def read(self, number: int) -> Batch:
        """One batch; every batch has the same number of rows."""
        return read_batch(self._stream, self.windows, number, self._batches[number], self._rows)

    def tokens_at(self, start: int, count: int) -> Ids:
        """Tokens of the stream, i64 [count]."""
        return self._stream.read(start, count).astype(np.int64)

    def add(self, batch: Batch, scores: Tensor) -> None:
        """Counts the nats of a batch's targets, float32 or float64 [B, T], as far as the batch scores them."""
        if tuple(scores.shape) != batch.ids.shape:
            raise ValueError(f"score gave shape {tuple(scores.shape)} for targets of shape {batch.ids.shape}")
        losses, mask = scores.detach().cpu().double().numpy(), batch.new  # one mask for both sides of the fraction
        self._sums[batch.number] += math.fsum(losses[mask])
        size = self._pieces.count(batch.ids[mask], batch.targets[mask]).sum()
        self._sums[-2:] += int(mask.sum()), int(size)  # exact below 2**53

    def total(self, share: Share = WHOLE) -> BitsPerByte:
        """The result over all processes.

        Raises DataError where the targets have no bytes, DataIntegrityError where a lossless tokenizer gives other
        bytes than the documents have.
        """
        sums = share.total(self._sums)
        tokens, size, last = int(sums[-2]), int(sums[-1]), self.windows.last
        if tokens != last:
            raise RuntimeError(f"scored {tokens} of {last} targets")
        known = self._stream.document_bytes if last == self._stream.tokens - 1 else None
        return _result(math.fsum(sums[:-2]), tokens, size, known, self._tokenizer)


def evaluate_bits(
    score: Callable[[Tensor, Tensor], Tensor],
    text: ScoredText,
    plan: WindowPlan,
    device: torch.device | str = "cpu",
    share: Share = WHOLE,
    progress: Callable[[int, int], None] | None = None,
) -> BitsPerByte:
    """Scores a text and divides the loss by its bytes, as an Account counts them.

    Args:
        score: nats of each target, f32 or f64 [B, T], of ids and targets, i64 [B, T] on `device`; runs without
            autograd. B and T are always `plan.batch` and `plan.length` (the last batch is filled up with copies that do
            not count), unless the whole stream is shorter than one window.
        text: the text.
        plan: the windows.
        device: device of ids and targets.
        share: the part of this process.
        progress: called with targets scored and targets in all, on this process.

    Returns:
        The result of all processes together.

    Raises:
        DataError: the stream was made with another tokenizer, is too short, or does not start with BOS.
        DataIntegrityError: a shard is damaged, or a lossless tokenizer gives other bytes than the documents have.
    """
    import torch

    account = Account(text, plan)
    (chunk,) = account.chunks
    local = share.of(len(chunk))
    first, last = account.span(local) if local else (0, 0)
    for number in local:
        batch = account.read(number)
        ids, targets = (torch.from_numpy(array.copy()).to(device) for array in (batch.ids, batch.targets))
        with torch.no_grad():
            scores = score(ids, targets)
        account.add(batch, scores)
        if progress is not None:
            progress(account.tokens, last - first)
    return account.total(share)


def _result(
    nats: float, tokens: int, piece_bytes: int, document_bytes: int | None, tokenizer: Tokenizer
) -> BitsPerByte:
    if piece_bytes < 1:
        raise DataError(f"the {tokens:,} scored tokens stand for no bytes of text", "score more tokens")
    bits = nats / math.log(2)
    if tokenizer.lossless and document_bytes not in (None, piece_bytes):
        raise DataIntegrityError(
            f"{tokenizer.name} is lossless, but the tokens stand for {piece_bytes:,} bytes "
            f"and the documents have {document_bytes:,}",
            "the token cache is damaged: delete it; it is made again from the source",
        )
    known = piece_bytes if tokenizer.lossless else document_bytes
    bpb = None if known is None else bits / known
    return BitsPerByte(nats, tokens, document_bytes, piece_bytes, bpb, bits / piece_bytes, tokenizer.lossless)
