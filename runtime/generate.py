"""Continues a text: cached decoding, sampling, and bytes that come out as whole characters."""

import codecs
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.runtime.data import Tokenizer
from specc.runtime.errors import RunFailure, RuntimeFailure
from specc.runtime.opened import Generated, Opened, Say

REPLACEMENT = "\ufffd".encode()
HELD_TOKENS = 8  # a character takes at most 4 bytes, and a token at least one


class SamplingError(RuntimeFailure):
    """A setting of the sampling that no distribution has."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn.

    `temperature` divides the logits; 0 takes the most probable token, the first of equals. Of what remains
    the `top_k` most probable tokens are kept (None: all), and of these the fewest whose probabilities,
    renormalized, sum to at least `top_p` (nucleus sampling, Holtzman et al. 2020, "The Curious Case of Neural
    Text Degeneration", arXiv 1904.09751). Raises SamplingError for values out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise SamplingError(f"the temperature {self.temperature} is not 0 or more", "0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise SamplingError(f"top-k {self.top_k} keeps no token", "give 1 or more, or leave it out")
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top-p {self.top_p} is not in (0, 1]", "1 keeps every token")

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that is drawn from: f64 [vocabulary] on the CPU, of `logits` [vocabulary].

        Raises RunFailure for NaN and +infinity.
        """
        exact = logits.detach().double().cpu()
        top = float(exact.max())
        if not math.isfinite(top):
            raise RunFailure(f"the largest logit is {top}", "the model is broken: try an earlier checkpoint")
        # By falling logit, the lower token first among equals; then what is kept is a prefix.
        ordered, tokens = exact.sort(descending=True, stable=True)
        keep = 1 if self.temperature == 0 else min(self.top_k or len(ordered), len(ordered))
        kept = ((ordered[:keep] - top) / (self.temperature or 1.0)).softmax(0)
        if self.top_p < 1:
            nucleus = int((kept.cumsum(0) < self.top_p).sum()) + 1
            kept = kept[:nucleus] / kept[:nucleus].sum()
        chances = torch.zeros_like(exact)
        chances[tokens[: len(kept)]] = kept
        return chances

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """One token; takes one number from the CPU `generator`, whatever the settings."""
        uniform = torch.rand((), dtype=torch.float64, generator=generator)
        steps = self.probabilities(logits).cumsum(0)
        # Tokens without a chance add no step, so `right` passes over them; the last sum may fall short of 1.
        token = int(torch.searchsorted(steps, uniform * steps[-1], right=True))
        return min(token, int((steps < steps[-1]).sum()))


class Decoder:
    """The logits after a growing text of one row, with what was computed before kept in a cache.

    When the cache is full, the last half of the context's tokens are computed anew as the start of a text: at
    most `window` tokens are ever seen, at least half as many, and the cost is about two tokens a token.
    """

    def __init__(self, model: Generated, window: int, device: torch.device) -> None:
        self._model, self._window, self._device = model, window, device
        self._cache = model.new_cache(1, window)
        self._seen: list[int] = []

    def prefill(self, tokens: list[int]) -> Tensor:
        """Forgets the text before and begins with 1 to `window` tokens; f32 [vocabulary]."""
        self._seen = list(tokens)
        return self._model.prefill(self._row(tokens), self._position(0), self._cache)[0]

    def append(self, token: int) -> Tensor:
        """The text goes on by one token; f32 [vocabulary]."""
        if len(self._seen) == self._window:
            kept = self._window // 2
            return self.prefill([*self._seen[self._window - kept :], token])
        logits = self._model.decode(self._row([token]), self._position(len(self._seen)), self._cache)[0]
        self._seen.append(token)
        return logits

    def _row(self, tokens: list[int]) -> Tensor:
        return torch.tensor([tokens], dtype=torch.int64, device=self._device)

    def _position(self, start: int) -> Tensor:
        return torch.tensor(start, dtype=torch.int64, device=self._device)


class Detokenizer:
    """Turns tokens into the bytes that they add to a text, as they come.

    A lossy tokenizer's bytes depend on the tokens around them: a first space vanishes, and a character that
    is spelled in bytes is a replacement character until it is complete. So a few earlier tokens are decoded
    with each new one, and what ends in a replacement character waits.
    """

    def __init__(self, tokenizer: Tokenizer, before: list[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = before[-HELD_TOKENS:]
        self._given = len(self._tokens)  # tokens whose bytes have been handed out

    def add(self, token: int) -> bytes:
        """The bytes that are certain now."""
        self._tokens.append(token)
        return self._new(last=False)

    def finish(self) -> bytes:
        """The bytes that were held back."""
        return self._new(last=True)

    def _new(self, last: bool) -> bytes:
        if self._given == len(self._tokens):
            return b""
        before = self._tokenizer.decode(self._tokens[: self._given])
        whole = self._tokenizer.decode(self._tokens)
        held = len(self._tokens) - self._given
        unfinished = not self._tokenizer.lossless and whole.endswith(REPLACEMENT)
        if unfinished and not last and held < HELD_TOKENS:
            return b""
        self._tokens = self._tokens[-HELD_TOKENS:]
        self._given = len(self._tokens)
        return whole[len(before) :]


def generate(
    opened: Opened,
    prompt: bytes,
    max_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    *,
    say: Say | None = None,
    stream: Callable[[str], None] | None = None,
) -> bytes:
    """The bytes that follow `prompt`, at most `max_tokens` tokens, up to the mark between documents.

    The same seed gives the same bytes, on one machine with one number of threads.

    Args:
        prompt: the start of a document; empty to begin with nothing.
        stream: is given the text as it comes, in whole characters; bytes that are no UTF-8 become U+FFFD.
        say: is told when the prompt is longer than the context, and only its end is read.

    Raises SamplingError for a negative `max_tokens`, RunFailure for a model that gives no distribution or a
    tokenizer with no mark to begin with, DataError where the prompt cannot be tokenized.
    """
    if max_tokens < 0:
        raise SamplingError(f"cannot generate {max_tokens} tokens", "give 0 or more")
    text = codecs.getincrementaldecoder("utf-8")("replace")
    told, say = stream or (lambda _: None), say or (lambda _: None)
    pieces: list[bytes] = []
    for piece in stream_bytes(opened, prompt, max_tokens, sampling or Sampling(), seed, say):
        pieces.append(piece)
        if whole := text.decode(piece):
            told(whole)
    if rest := text.decode(b"", final=True):
        told(rest)
    return b"".join(pieces)


def stream_bytes(
    opened: Opened, prompt: bytes, max_tokens: int, sampling: Sampling, seed: int, say: Say
) -> Iterator[bytes]:
    """What `generate` joins, piece by piece; a piece may end inside a character."""
    tokenizer, window = opened.tokenizer, opened.spec.model.window
    tokens = _opening(tokenizer, prompt, window, say)
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(opened.generated, window, opened.device)
    detokenizer = Detokenizer(tokenizer, tokens)
    with torch.no_grad():
        logits: Tensor | None = None
        token = -1
        for _ in range(max_tokens):
            logits = decoder.prefill(tokens) if logits is None else decoder.append(token)
            token = sampling.draw(logits[: tokenizer.vocab], generator)
            if token == tokenizer.bos:
                break
            if piece := detokenizer.add(token):
                yield piece
    if piece := detokenizer.finish():
        yield piece


def _opening(tokenizer: Tokenizer, prompt: bytes, window: int, say: Say) -> list[int]:
    """What the model reads first: the mark and the prompt, or of a long prompt the end."""
    encoded = tokenizer.encode(prompt).tolist() if prompt else []
    tokens = [*([tokenizer.bos] if tokenizer.bos is not None else []), *encoded]
    if not tokens:
        raise RunFailure(f"{tokenizer.name} has no mark to begin a text with", "give a prompt")
    if len(tokens) > window:
        say(f"the prompt has {len(encoded):,} tokens and the context {window:,}: only its end is read")
    return tokens[-window:]
