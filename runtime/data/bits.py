"""Bits per byte: the loss of a model over a stream, in a unit that does not depend on the tokenizer.

`bpb` divides by the bytes of the documents as they stand in the source. `bpb_pieces` divides by the bytes
that the scored tokens stand for (PieceBytes). For a lossless tokenizer these are the same number, and that is
checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.stream import TokenStream
from specc.runtime.data.tokenizer import PieceBytes, Tokenizer

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
    """

    nats: float
    tokens: int
    document_bytes: int | None
    piece_bytes: int
    bpb: float | None
    bpb_pieces: float
    lossless: bool

    def record(self) -> dict[str, float | None]:
        """For the log of a run; `nats` are those of a token."""
        nats = self.nats / self.tokens
        return {"nats": nats, "tokens": self.tokens, "bpb": self.bpb, "bpb_pieces": self.bpb_pieces}

    def line(self) -> str:
        bpb = self.bpb if self.bpb is not None else self.bpb_pieces
        return f"{self.nats / self.tokens:.4f} nats/token, {bpb:.4f} bpb"

    def summary(self) -> str:
        return f"{self.bpb_pieces:.4f} bits per byte"

    def report(self) -> list[str]:
        """For people: the loss and both metrics, and the audit."""
        bpb = "unknown" if self.bpb is None else f"{self.bpb:.4f}"
        nats = f"{self.nats / self.tokens:.4f} nats a token, bpb {bpb}, bpb_pieces {self.bpb_pieces:.4f}"
        return [f"{self.tokens:,} tokens: {nats}", self.audit()]

    def facts(self) -> dict[str, float | None]:
        """For programs."""
        names = ("nats", "tokens", "document_bytes", "piece_bytes", "bpb", "bpb_pieces", "lossless")
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


@dataclass(frozen=True, slots=True)
class Window:
    """Inputs [start, start + length) of the stream; of the targets one later, the last `new` are scored."""

    start: int
    length: int
    new: int


@dataclass(frozen=True, slots=True)
class Windows:
    """A sequence of windows that scores each target position 1 .. `last` exactly once.

    The first window scores all its targets, each later one its last `stride`. The final one is moved left to
    keep its shape and scores only what is new, so its targets see more context. Below `length`, one short
    window is all.
    """

    last: int
    length: int
    stride: int

    def __len__(self) -> int:
        return 1 + max(0, -(-(self.last - self.length) // self.stride))

    def __getitem__(self, k: int) -> Window:
        end = min(self.last, self.length + k * self.stride)
        start = max(0, end - self.length)
        scored_before = self.length + (k - 1) * self.stride if k else 0
        return Window(start, end - start, end - scored_before)


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
    """Score a stream, or its first `max_tokens` targets, and divide by its bytes.

    Every token but the first is a target exactly once. The first is BOS, which has no bytes, so nothing is
    missing from either side of the fraction. Separators count in the numerator.

    Args:
        score: (ids, targets), int64 [B, T] on `device` -> nats of each target, float32 or float64 [B, T].
            Runs without autograd. B and T are always `batch` and `length` (the last batch is filled up with
            copies that do not count), unless the whole stream is shorter than one window.
        stride: tokens between windows, 1 .. length; None means `length`, windows that do not overlap. A
            smaller one gives each target at least length - stride tokens of context (sliding evaluation).
        progress: called with targets scored and targets in all, on this rank.
        rank, world, reduce: to share the work among ranks; `reduce` sums a float64 array [3] over them.

    Raises:
        DataError: the stream was made with another tokenizer, is too short, or does not start with BOS.
        DataIntegrityError: a shard is damaged, or a lossless tokenizer gives other bytes than the documents
            have.
    """
    stride = length if stride is None else stride
    if length < 1 or batch < 1 or not 1 <= stride <= length or not 0 <= rank < world:
        raise ValueError(f"{length=} and {batch=} must be positive, {stride=} 1 .. length, and 0 <= {rank=} < {world=}")
    if world > 1 and reduce is None:
        raise ValueError("sharing the work among ranks needs `reduce`")
    last = _last_target(stream, tokenizer, max_tokens)
    pieces = tokenizer.piece_bytes()

    windows = Windows(last, length, stride)
    mine = range(len(windows) * rank // world, len(windows) * (rank + 1) // world)
    todo = sum(windows[k].new for k in mine)
    nats, tokens, size = 0.0, 0, 0
    for first in range(0, len(mine), batch):
        part = [windows[k] for k in mine[first : first + batch]]
        part_nats, part_tokens, part_bytes = _score_batch(score, stream, pieces, part, batch, device)
        nats, tokens, size = nats + part_nats, tokens + part_tokens, size + part_bytes
        if progress is not None:
            progress(tokens, todo)

    if reduce is not None:
        total = reduce(np.array([nats, tokens, size], np.float64))  # counts are exact below 2**53
        nats, tokens, size = float(total[0]), int(total[1]), int(total[2])
    if tokens != last:
        raise RuntimeError(f"scored {tokens} of {last} targets")
    whole = last == stream.tokens - 1
    return _result(nats, tokens, size, stream.document_bytes if whole else None, tokenizer)


def _last_target(stream: TokenStream, tokenizer: Tokenizer, max_tokens: int | None) -> int:
    if stream.tokenizer_digest not in (None, tokenizer.digest()) or stream.vocab != tokenizer.vocab:
        raise DataError(
            f"the stream was not made with the tokenizer {tokenizer.name}",
            "open the stream with the same tokenizer",
        )
    last = stream.tokens - 1 if max_tokens is None else min(stream.tokens - 1, max_tokens)
    if last < 1:
        raise DataError(f"nothing to score: the stream has {stream.tokens} tokens, max_tokens is {max_tokens}")
    opening = int(stream.read(0, 1)[0])
    if opening != tokenizer.bos:
        raise DataError(
            f"the stream starts with token {opening}, not with the separator {tokenizer.bos} of "
            f"{tokenizer.name}, so its first token could not be scored",
            "evaluate shards that have the separator before each document",
        )
    return last


def _score_batch(
    score: Callable[[Tensor, Tensor], Tensor],
    stream: TokenStream,
    pieces: PieceBytes,
    part: list[Window],
    batch: int,
    device: torch.device | str,
) -> tuple[float, int, int]:
    """Nats, tokens and bytes of the new targets of up to `batch` windows of one length."""
    import torch

    length = part[0].length
    rows = np.stack([stream.read(window.start, length + 1).astype(np.int64) for window in part])
    rows = np.concatenate([rows, np.repeat(rows[-1:], batch - len(part), axis=0)])
    ids, targets = rows[:, :-1], rows[:, 1:]
    new = np.array([window.new for window in part] + [0] * (batch - len(part)))
    mask = np.arange(length) >= length - new[:, None]

    with torch.no_grad():
        on_device = torch.from_numpy(rows).to(device)
        scores = score(on_device[:, :-1].contiguous(), on_device[:, 1:].contiguous())
    if tuple(scores.shape) != ids.shape:
        raise ValueError(f"score gave shape {tuple(scores.shape)} for targets of shape {ids.shape}")
    losses = scores.detach().cpu().double().numpy()
    # one mask for both sides of the fraction
    return math.fsum(losses[mask]), int(mask.sum()), int(pieces.count(ids[mask], targets[mask]).sum())


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
