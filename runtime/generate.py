"""Continues a text: cached decoding, sampling, and bytes that come out as whole characters."""

import codecs
from collections.abc import Callable, Iterator, Sequence

import torch

from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.tokenizer import Tokenizer
from specc.runtime.decode.text import Decoder, Sampling, SamplingError, sample_tokens
from specc.runtime.errors import RunFailure
from specc.runtime.open_model import OpenedModel, Say

REPLACEMENT = "\ufffd".encode()
HELD_TOKENS = 8  # a character takes at most 4 bytes, and a token at least one


class Detokenizer:
    """Turns tokens into the bytes that they add to a text, as they come.

    A lossy tokenizer's bytes depend on the tokens around them: a first space vanishes, and a character that
    is spelled in bytes is a replacement character until it is complete. So a few earlier tokens are decoded
    with each new one, and text that ends in a replacement character waits.
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
    opened: OpenedModel,
    prompt: str | bytes,
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
        prompt: the start of a document; empty to begin with nothing. Of a `str`, bytes that the command line could not
            decode (surrogate escapes) are themselves.
        stream: called with the text as it comes, in whole characters; bytes that are not UTF-8 become U+FFFD.
        say: called with a line where the prompt is longer than the context, and only its end is read.

    Raises SamplingError for a negative `max_tokens`, RunFailure for a model that gives no distribution or a
    tokenizer with no mark to begin with, DataError where the prompt cannot be tokenized.
    """
    if max_tokens < 0:
        raise SamplingError(f"cannot generate {max_tokens} tokens", "give 0 or more")
    text = codecs.getincrementaldecoder("utf-8")("replace")
    emit, say = stream or (lambda _: None), say or (lambda _: None)
    pieces: list[bytes] = []
    for piece in stream_bytes(opened, prompt, max_tokens, sampling or Sampling(), seed, say):
        pieces.append(piece)
        if whole := text.decode(piece):
            emit(whole)
    if rest := text.decode(b"", final=True):
        emit(rest)
    return b"".join(pieces)


def stream_bytes(
    opened: OpenedModel, prompt: str | bytes, max_tokens: int, sampling: Sampling, seed: int, say: Say
) -> Iterator[bytes]:
    """The bytes of `generate` in pieces; a piece may end inside a character."""
    tokens = _first_tokens(opened.tokenizer, prompt, opened.spec.model.window, say)
    detokenizer = Detokenizer(opened.tokenizer, tokens)
    for (token,) in _drawn(opened, tokens, max_tokens, sampling, (seed,)):
        if token == opened.tokenizer.bos:
            break
        if piece := detokenizer.add(token):
            yield piece
    if piece := detokenizer.finish():
        yield piece


def generate_several(
    opened: OpenedModel,
    prompt: str | bytes,
    max_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
    *,
    say: Say | None = None,
) -> list[bytes]:
    """One text per seed, decoded side by side. Matrix products have other sizes than those of `generate`, so a draw may
    differ where two tokens are almost equally probable. Raises as `generate` does."""
    if max_tokens < 0:
        raise SamplingError(f"cannot generate {max_tokens} tokens", "give 0 or more")
    tokenizer = opened.tokenizer
    tokens = _first_tokens(tokenizer, prompt, opened.spec.model.window, say or (lambda _: None))
    texts = [(Detokenizer(tokenizer, tokens), list[bytes]()) for _ in seeds]
    going = set(range(len(seeds)))
    for step in _drawn(opened, tokens, max_tokens, sampling, seeds):
        going -= {row for row in going if step[row] == tokenizer.bos}
        for row in going:
            detokenizer, pieces = texts[row]
            pieces.append(detokenizer.add(step[row]))
        if not going:
            break
    return [b"".join((*pieces, detokenizer.finish())) for detokenizer, pieces in texts]


def _drawn(
    opened: OpenedModel, tokens: list[int], count: int, sampling: Sampling, seeds: Sequence[int]
) -> Iterator[list[int]]:
    """Steps of token ids, one per seed, behind the same `tokens`. Raises RunFailure for logits that are not finite."""
    rows = torch.tensor([tokens] * len(seeds), device=opened.device)
    try:
        decoder = Decoder(opened.text_model, opened.spec.model.window, opened.device, len(seeds))
        for step in sample_tokens(decoder, rows, opened.tokenizer.vocab, sampling, seeds, count):
            tokens_of_step: list[int] = step.tolist()
            if min(tokens_of_step) < 0:
                raise RunFailure("the logits hold NaN or infinity", "the model is broken: try an earlier checkpoint")
            yield tokens_of_step
    except torch.OutOfMemoryError as error:
        raise RunFailure(f"out of GPU memory for {len(seeds)} texts at once", "ask for fewer samples") from error


def _first_tokens(tokenizer: Tokenizer, prompt: str | bytes, window: int, say: Say) -> list[int]:
    """The mark of a document and the prompt, cut to the last `window` tokens."""
    if isinstance(prompt, str):
        try:
            prompt = prompt.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            message = f"the prompt has half a surrogate pair at character {error.start}, which is no character"
            raise DataError(message, "give it as UTF-8") from None
    encoded = tokenizer.encode(prompt).tolist() if prompt else []
    tokens = [*([tokenizer.bos] if tokenizer.bos is not None else []), *encoded]
    if not tokens:
        raise RunFailure(f"{tokenizer.name} has no mark to begin a text with", "give a prompt")
    if len(tokens) > window:
        say(f"the prompt has {len(encoded):,} tokens and the context {window:,}: only its end is read")
    return tokens[-window:]
