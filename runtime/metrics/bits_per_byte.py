"""Bits per byte: the loss of a model on a text, in a unit that does not depend on the tokenizer.

The measurement `bpb` divides the loss by the number of bytes of the documents, or by byte counts that are stored with
the tokens. The measurement `bpb_pieces` divides the loss by the number of bytes that the scored tokens represent (see
`PieceBytes`). For a lossless tokenizer, these two numbers of bytes are equal.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
        nats: the sum of the loss over the scored tokens, in nats.
        tokens: the number of scored tokens, including document separators.
        document_bytes: the number of bytes of the documents; None if unknown.
        piece_bytes: the number of bytes that the scored tokens represent.
        bpb: the loss in bits, divided by the number of bytes of the documents. None if this number is unknown and the
            tokenizer is lossy.
        bpb_pieces: the loss in bits, divided by `piece_bytes`.
        lossless: whether the tokenizer is lossless.
        held_out: True if the text is the validation split of the training data. False if the text is the training
            split. None if unknown.
        digest: the SHA-256 (hex) of the split of which the text is the start; None if unknown.
    """

    nats: float
    tokens: int
    document_bytes: int | None
    piece_bytes: int
    bpb: float | None
    bpb_pieces: float
    lossless: bool
    held_out: bool | None = None
    digest: str | None = None

    def record(self) -> dict[str, float | None]:
        """Returns the result as fields for the log of a run. The field `nats` is the mean loss per token."""
        sizes = {"document_bytes": self.document_bytes, "piece_bytes": self.piece_bytes}
        nats = self.nats / self.tokens
        return {"nats": nats, "tokens": self.tokens, "bpb": self.bpb, "bpb_pieces": self.bpb_pieces, **sizes}

    def line(self) -> str:
        return f"{self.nats / self.tokens:.4f} nats/token, {self.summary()}"

    def summary(self) -> str:
        bpb = "" if self.bpb is None else f"{self.bpb:.4f} bpb"
        pieces = "" if self.bpb == self.bpb_pieces else f"{self.bpb_pieces:.4f} bpb_pieces"
        return ", ".join(filter(None, (bpb, pieces)))

    def report(self) -> list[str]:
        bpb = "unknown" if self.bpb is None else f"{self.bpb:.4f}"
        nats = f"{self.nats / self.tokens:.4f} nats per token, bpb {bpb}, bpb_pieces {self.bpb_pieces:.4f}"
        trained = {
            True: "the validation split of the training data",
            False: "the training split: the model was trained on all of it",
            None: "whether the model was trained on this text is not known",
        }
        return [f"{self.tokens:,} tokens: {nats}", self.audit(), f"data: {trained[self.held_out]}"]

    def measures(self) -> dict[str, float | None]:
        pieces = {} if self.bpb == self.bpb_pieces else {"bpb_pieces": self.bpb_pieces}
        return {"bpb": self.bpb, **pieces, "nats_per_token": self.nats / self.tokens}

    def facts(self) -> dict[str, float | None]:
        return {name: value for name, value in asdict(self).items() if name != "digest"}

    def audit(self) -> str:
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
    """A text to score.

    Attributes:
        stream: the tokens of the text.
        tokenizer: the tokenizer of the tokens.
        max_tokens: the maximum number of targets to score, from the start of the text; None for all.
    """

    stream: TokenStream
    tokenizer: Tokenizer
    max_tokens: int | None = None

    def last_target(self) -> int:
        """Returns the position of the last target.

        Raises DataError if another tokenizer created the stream, or the stream is too short or does not start with BOS.
        """
        stream, tokenizer = self.stream, self.tokenizer
        if stream.tokenizer_digest not in (None, tokenizer.digest()) or stream.vocab != tokenizer.vocab:
            raise DataError(
                f"the stream was not tokenized with {tokenizer.name}", "open the stream with the same tokenizer"
            )
        stream.require_scorable(tokenizer)
        last = stream.tokens - 1 if self.max_tokens is None else min(stream.tokens - 1, self.max_tokens)
        if last < 1:
            message = f"nothing to score: the stream has {stream.tokens} tokens, max_tokens is {self.max_tokens}"
            raise DataError(message, "score at least one token")
        return last


class Account:
    """Accumulates the loss and the bytes of scored targets, batch by batch.

    Every token except the first is a target exactly once. BOS and document separators have no bytes. Sums are exact, so
    that the result does not depend on the number of processes.

    Args:
        text: the text to score.
        plan: the plan that divides the text into windows.
        chunk: the approximate number of targets per chunk. A caller may adapt the model between two chunks. None for
            a single chunk.

    Attributes:
        windows: all windows of the text.
        chunks: the chunks, as ranges of batch indices.

    Raises:
        DataError: if another tokenizer created the stream, or the stream is too short or does not start with BOS.
    """

    def __init__(self, text: ScoredText, plan: WindowPlan, chunk: int | None = None) -> None:
        self._stream, self._tokenizer, self._rows = text.stream, text.tokenizer, plan.batch
        self._unscored = plan.unscored
        self.windows = Windows(text.last_target(), plan.length, plan.step)
        parts = cut(self.windows.chunks(chunk), plan.batch)
        self._batches = [batch for part in parts for batch in part]
        ends = np.cumsum([0, *map(len, parts)]).tolist()
        self.chunks = [range(first, end) for first, end in pairwise(ends)]
        self._counted = bool(text.stream.byte_counts)
        self._pieces = None if self._counted and not _spells(text.tokenizer) else text.tokenizer.piece_bytes()
        self._sums = np.zeros(len(self._batches) + 3)

    @property
    def tokens(self) -> int:
        return int(self._sums[-3])

    def span(self, batches: range) -> tuple[int, int]:
        """Returns (after, end) for consecutive batches.

        The batches score the targets at the positions `after` + 1 to `end` of the text.
        """
        first, end = self._batches[batches[0]][0], self._batches[batches[-1]][-1] + 1
        return self.windows.before(first), self.windows.before(end)

    def read(self, number: int) -> Batch:
        return read_batch(self._stream, self.windows, number, self._batches[number], self._rows, self._unscored)

    def tokens_at(self, start: int, count: int) -> Ids:
        return self._stream.read(start, count).astype(np.int64)

    def add(self, batch: Batch, scores: "Tensor") -> None:
        """Adds the losses of a batch.

        Args:
            batch: the batch. The method ignores targets that are not in the mask `batch.new`.
            scores: the loss of each target in nats, f32 or f64 [B, T].

        Raises:
            ValueError: if `scores` and the targets have different shapes.
        """
        if tuple(scores.shape) != batch.ids.shape:
            raise ValueError(
                f"the losses have the shape {tuple(scores.shape)}, but the targets have the shape {batch.ids.shape}"
            )
        losses, mask = scores.detach().cpu().double().numpy(), batch.new  # one mask selects both losses and bytes
        self._sums[batch.number] += math.fsum(losses[mask])
        counted = self._bytes_at(batch.at[mask]) if self._counted else 0
        pieces = self._pieces
        size = counted if pieces is None else int(pieces.count(batch.ids[mask], batch.targets[mask]).sum())
        self._sums[-3:] += int(mask.sum()), size, counted  # exact below 2**53

    def _bytes_at(self, places: Ids) -> int:
        if not len(places):
            return 0
        first = int(places.min())
        return int(self._stream.read_bytes(first, int(places.max()) - first + 1)[places - first].sum())

    def total(self, share: Share = WHOLE) -> BitsPerByte:
        """Returns the result over all processes. `share` is the part of the targets that this process has scored.

        Raises:
            DataError: if the scored tokens represent no bytes of text.
            DataIntegrityError: if the byte counts that are stored with the tokens do not sum to the number of bytes of
                the documents. Also if the tokenizer is lossless, but the scored tokens and the documents have different
                numbers of bytes.
        """
        sums = share.total(self._sums)
        tokens, size, byte_count = (int(value) for value in sums[-3:])
        last = self.windows.last
        counted = last
        if self._unscored:
            windows = (self.windows[k] for k in range(len(self.windows)))
            counted = sum(max(0, min(window.new, window.length - self._unscored)) for window in windows)
        if tokens != counted:
            raise RuntimeError(f"scored {tokens} of {counted} targets")
        known = self._stream.document_bytes if counted == self._stream.tokens - 1 else None
        if self._counted:
            if known not in (None, byte_count):
                message = f"the byte counts of the tokens sum to {byte_count:,}, but the documents have {known:,} bytes"
                raise DataIntegrityError(message, "pack the text again, or remove the files of byte counts")
            known = byte_count
        return _result(math.fsum(sums[:-3]), tokens, size, known, self._tokenizer)


def _spells(tokenizer: Tokenizer) -> bool:
    try:
        tokenizer.piece_bytes()
    except DataError:
        return False
    return True


def evaluate_bits(
    score: Callable[["Tensor", "Tensor"], "Tensor"],
    text: ScoredText,
    plan: WindowPlan,
    device: "torch.device | str" = "cpu",
    share: Share = WHOLE,
    progress: Callable[[int, int], None] | None = None,
) -> BitsPerByte:
    """Computes the bits per byte of a text.

    Args:
        score: maps ids and targets, i64 [B, T] on `device`, to the loss of each target in nats, f32 or f64 [B, T]. The
            function runs without autograd. B is `plan.batch`. T is `plan.length`, or less for a short text.
        text: the text.
        plan: the plan that divides the text into windows.
        device: the device of ids and targets.
        share: the part of the targets that this process scores.
        progress: a function called as `progress(scored, total)`. Both numbers count the targets of this process.

    Returns:
        The result over all processes.

    Raises:
        DataError: if another tokenizer created the stream, or the stream is too short or does not start with BOS. Also
            if the scored tokens represent no bytes of text.
        DataIntegrityError: if a shard is damaged, or a number of bytes is wrong (see `Account.total`).
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
        raise DataError(f"the {tokens:,} scored tokens represent no bytes of text", "score more tokens")
    bits = nats / math.log(2)
    if tokenizer.lossless and document_bytes not in (None, piece_bytes):
        raise DataIntegrityError(
            f"{tokenizer.name} is lossless, but the tokens represent {piece_bytes:,} bytes "
            f"and the documents have {document_bytes:,}",
            "delete the damaged token cache; specc creates it again from the source",
        )
    known = piece_bytes if tokenizer.lossless else document_bytes
    bpb = None if known is None else bits / known
    return BitsPerByte(nats, tokens, document_bytes, piece_bytes, bpb, bits / piece_bytes, tokenizer.lossless)
