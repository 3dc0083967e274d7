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
import numpy.typing as npt

from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.tokenizers.tokenizer import Tokenizer
from specc.runtime.data.windows.evaluation import Batch, Ids, Windows, cut, read_batch, share
from specc.runtime.data.windows.stream import TokenStream

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Sums = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BitsPerByte:
    """The result of `evaluate_bits`.

    Attributes:
        nats: sum of the loss over the scored tokens, in nats.
        tokens: how many tokens were scored (separators are among them; they have no bytes).
        document_bytes: bytes of the documents; None if only a part was scored, or the source does not tell.
        piece_bytes: bytes that the scored tokens stand for.
        bpb: bits per byte of the documents; None if they are unknown and the tokenizer is lossy.
        bpb_pieces: bits per byte by pieces.
        lossless: of the tokenizer.
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
        """For the log of a run; `nats` are those of a token."""
        nats = self.nats / self.tokens
        return {"nats": nats, "tokens": self.tokens, "bpb": self.bpb, "bpb_pieces": self.bpb_pieces}

    def line(self) -> str:
        return f"{self.nats / self.tokens:.4f} nats/token, {self.summary()}"

    def summary(self) -> str:
        """Each metric by its name; the one by pieces where it is another number, too."""
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
        """For programs."""
        names = ("nats", "tokens", "document_bytes", "piece_bytes", "bpb", "bpb_pieces", "lossless", "held_out")
        return {name: getattr(self, name) for name in names}

    def audit(self) -> str:
        """One line that says whether the two ways to count bytes agree."""
        pieces = f"audit: sum of token bytes {self.piece_bytes:,}"
        if self.document_bytes is None:
            return f"{pieces}; document bytes unknown (token shards, or only a part was scored)"
        if self.document_bytes == self.piece_bytes:
            return f"{pieces} == document bytes {self.document_bytes:,}"
        gap = self.piece_bytes - self.document_bytes
        kind = "the counts must agree: this is a bug" if self.lossless else "the tokenizer is lossy"
        share = 100 * gap / self.document_bytes
        return f"{pieces} != document bytes {self.document_bytes:,} (gap {gap:+,}, {share:+.2f} %; {kind})"


class Account:
    """Which targets of a stream, or of its first `max_tokens`, are scored in which batch, and what came of it.

    Every token but the first is a target exactly once. The first is BOS, which has no bytes, so nothing is missing
    from either side of the fraction. Separators count in the numerator. Batches do not depend on how many ranks there
    are, and their sums are added up exactly: the total is the same number on any number of ranks, where `score` gives
    the same.

    Attributes:
        windows: of `length` tokens, unless the whole stream is shorter than one.
        chunks: the numbers of the batches, in runs whose windows score about `chunk` targets; one run without it.

    Raises DataError: the stream was made with another tokenizer, is too short, or does not start with BOS.
    """

    def __init__(
        self,
        stream: TokenStream,
        tokenizer: Tokenizer,
        length: int,
        batch: int,
        stride: int | None = None,
        max_tokens: int | None = None,
        chunk: int | None = None,
    ) -> None:
        stride = length if stride is None else stride
        if length < 1 or batch < 1 or not 1 <= stride <= length:
            raise ValueError(f"{length=} and {batch=} must be positive, and {stride=} 1 .. length")
        self._stream, self._tokenizer, self._rows = stream, tokenizer, batch
        self.windows = Windows(_last_target(stream, tokenizer, max_tokens), length, stride)
        parts = cut(self.windows.chunks(chunk), batch)
        self._batches = [one for part in parts for one in part]
        ends = np.cumsum([0, *map(len, parts)]).tolist()
        self.chunks = [range(first, end) for first, end in pairwise(ends)]
        self._pieces = tokenizer.piece_bytes()
        self._sums = np.zeros(len(self._batches) + 2)

    @property
    def tokens(self) -> int:
        """How many targets were added so far."""
        return int(self._sums[-2])

    def span(self, batches: range) -> tuple[int, int]:
        """The positions of the targets that a run of batches scores: behind the first, up to the second."""
        first, end = self._batches[batches[0]][0], self._batches[batches[-1]][-1] + 1
        return self.windows.before(first), self.windows.before(end)

    def read(self, number: int) -> Batch:
        """One batch; it always has as many rows."""
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

    def total(self, reduce: Callable[[Sums], Sums] | None = None) -> BitsPerByte:
        """All that was added; `reduce` sums a float64 array [N] over the ranks.

        Raises DataError where the targets have no bytes, DataIntegrityError where a lossless tokenizer gives other
        bytes than the documents have.
        """
        sums = self._sums if reduce is None else reduce(self._sums)
        tokens, size, last = int(sums[-2]), int(sums[-1]), self.windows.last
        if tokens != last:
            raise RuntimeError(f"scored {tokens} of {last} targets")
        known = self._stream.document_bytes if last == self._stream.tokens - 1 else None
        return _result(math.fsum(sums[:-2]), tokens, size, known, self._tokenizer)


def evaluate_bits(
    score: Callable[[Tensor, Tensor], Tensor],
    stream: TokenStream,
    tokenizer: Tokenizer,
    length: int,
    batch: int,
    device: torch.device | str = "cpu",
    stride: int | None = None,
    max_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    rank: int = 0,
    world: int = 1,
    reduce: Callable[[Sums], Sums] | None = None,
) -> BitsPerByte:
    """Score a stream, or its first `max_tokens` targets, and divide by its bytes, as an Account counts them.

    Args:
        score: (ids, targets), int64 [B, T] on `device` -> nats of each target, float32 or float64 [B, T].
            Runs without autograd. B and T are always `batch` and `length` (the last batch is filled up with
            copies that do not count), unless the whole stream is shorter than one window.
        stride: tokens between windows, 1 .. length; None means `length`, windows that do not overlap. A
            smaller one gives each target at least length - stride tokens of context (sliding evaluation).
        progress: called with targets scored and targets in all, on this rank.
        rank, world, reduce: to share the work among ranks; `reduce` sums a float64 array over them.

    Raises:
        DataError: the stream was made with another tokenizer, is too short, or does not start with BOS.
        DataIntegrityError: a shard is damaged, or a lossless tokenizer gives other bytes than the documents
            have.
    """
    import torch

    if not 0 <= rank < world:
        raise ValueError(f"{world=} must be positive, and {rank=} below it")
    if world > 1 and reduce is None:
        raise ValueError("sharing the work among ranks needs `reduce`")
    account = Account(stream, tokenizer, length, batch, stride, max_tokens)
    (chunk,) = account.chunks
    mine = share(len(chunk), rank, world)
    first, last = account.span(mine) if mine else (0, 0)
    for number in mine:
        one = account.read(number)
        with torch.no_grad():
            scores = score(torch.from_numpy(one.ids.copy()).to(device), torch.from_numpy(one.targets.copy()).to(device))
        account.add(one, scores)
        if progress is not None:
            progress(account.tokens, last - first)
    return account.total(reduce)


def _last_target(stream: TokenStream, tokenizer: Tokenizer, max_tokens: int | None) -> int:
    if stream.tokenizer_digest not in (None, tokenizer.digest()) or stream.vocab != tokenizer.vocab:
        raise DataError(
            f"the stream was not made with the tokenizer {tokenizer.name}",
            "open the stream with the same tokenizer",
        )
    stream.require_scorable(tokenizer)
    last = stream.tokens - 1 if max_tokens is None else min(stream.tokens - 1, max_tokens)
    if last < 1:
        raise DataError(f"nothing to score: the stream has {stream.tokens} tokens, max_tokens is {max_tokens}")
    return last


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
