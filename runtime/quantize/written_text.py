"""Calibration text that the model generates.

The generated text resembles the training text, so calibration needs no data.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specc.compiler.spec.spec import Calibrate
from specc.runtime.data.tokenizers.tokenizer import Tokenizer
from specc.runtime.decode.pages import decoder_of
from specc.runtime.decode.sampling import Sampling
from specc.runtime.decode.text import StepFunction, sample_blocks
from specc.runtime.errors import QuantizeError, RunFailure
from specc.runtime.model.protocols import GeneratedText

REPORT_EVERY = 64  # the number of tokens per row between two calls of `progress`


class TextModel(Protocol):
    """A language model on `device`, with its tokenizer."""

    @property
    def text_model(self) -> GeneratedText: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True, slots=True)
class WrittenText:
    """Text that a model generated.

    Attributes:
        tokens: the tokens, i64 [sequences, length + 1], on the CPU. The first token of each row is the prompt.
        separators: the number of document separators among the sampled tokens.
        seconds: the total duration.
        capture_seconds: the part of `seconds` for capturing CUDA graphs.
    """

    tokens: Tensor
    separators: int
    seconds: float
    capture_seconds: float

    def windows(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (ids, targets) of all rows in order, i64 [at most `batch`, length] each."""
        for at in range(0, len(self.tokens), batch):
            rows = self.tokens[at : at + batch]
            yield rows[:, :-1], rows[:, 1:]


def write_text(
    model: TextModel,
    calibrate: Calibrate,
    window: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
    step: Callable[[int], StepFunction] | None = None,
) -> WrittenText:
    """Samples `calibrate.sequences` rows of `calibrate.length` tokens in one batch. The default length is `window`.

    The result is reproducible: on the same machine with the same number of threads, equal weights, settings and seeds
    give equal rows.

    Args:
        model: the model that generates the text.
        calibrate: the number and the length of the rows, the temperature, and the first token.
        window: the context length of the model in tokens.
        seed: the seed of the run.
        progress: a function called as `progress(done, total)`, where both numbers count tokens per row.
        step: maps a number of rows to the function that runs a decoding step. None for the decoding program of the
            model.

    Returns:
        The sampled tokens, i64 [sequences, length + 1], with durations.

    Raises:
        QuantizeError: if `calibrate.begin` is "bos", but the tokenizer has no document separator.
        RunFailure: if the logits are not finite, or GPU memory is full.
    """
    tokenizer, rows = model.tokenizer, calibrate.sequences
    length = calibrate.length or window
    start_time = time.monotonic()
    if calibrate.begin == "uniform":
        first = torch.randint(tokenizer.vocab, (rows,), generator=torch.Generator().manual_seed(seed))
    elif tokenizer.bos is None:
        hint = "calibrate with `begin: uniform`, or on the training text"
        raise QuantizeError(f"{tokenizer.name} has no document separator, which is needed as the first token", hint)
    else:
        first = torch.full((rows,), tokenizer.bos)
    seeds = [(seed * rows + row) % 2**63 for row in range(rows)]
    written = torch.empty(rows, length + 1, dtype=torch.int64, device=model.device)
    written[:, 0] = first.to(model.device)
    start = written[:, :1].clone()
    try:
        # The rows end before the cache is full, so the decoder never prefills a text again
        decoder = decoder_of(model.text_model, length, model.device, rows, None if step is None else step(rows))
        done = 0
        for block in sample_blocks(decoder, start, tokenizer.vocab, Sampling(calibrate.temperature), seeds, length):
            written[:, done + 1 : done + 1 + block.shape[1]] = block
            done += block.shape[1]
            if progress is not None and (done % REPORT_EVERY == 0 or done == length):
                progress(done, length)
        tokens = written.cpu()
    except torch.OutOfMemoryError as error:
        hint = "lower quant.calibrate.sequences or quant.calibrate.length"
        raise RunFailure("out of GPU memory while generating calibration text", hint) from error
    if int(tokens.min()) < 0:
        raise RunFailure("the logits contain NaN or infinity", "the model is broken: calibrate an earlier checkpoint")
    separators = 0 if tokenizer.bos is None else int((tokens[:, 1:] == tokenizer.bos).sum())
    return WrittenText(tokens, separators, time.monotonic() - start_time, decoder.preparing)
