"""Text that a model writes itself, to be calibrated on: it needs no data, and looks like what the model has learnt."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.compiler.spec.spec import Calibrate
from specc.runtime.decode.text import Decoder, Sampling, sample_tokens
from specc.runtime.errors import QuantizeError, RunFailure
from specc.runtime.open_model import OpenedModel

TOLD = 64  # tokens of each row from one word on progress to the next


@dataclass(frozen=True, slots=True)
class OwnText:
    """What a model wrote.

    Attributes:
        tokens: i64 [sequences, length + 1] on the CPU; the first of each row was given to it.
        starts: how many of the others are the mark between documents.
        seconds, preparing: what it took, and how much of that went into capturing steps as CUDA graphs.
    """

    tokens: Tensor
    starts: int
    seconds: float
    preparing: float

    def windows(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, targets) of all rows in turn, i64 [at most `batch`, length] each."""
        for at in range(0, len(self.tokens), batch):
            rows = self.tokens[at : at + batch]
            yield rows[:, :-1], rows[:, 1:]


def write_text(
    opened: OpenedModel, wanted: Calibrate, seed: int, progress: Callable[[int, int], None] | None = None
) -> OwnText:
    """`wanted.sequences` rows of `wanted.length` tokens, all decoded at once.

    They depend on the weights, on `wanted` and on `seed` alone, on one machine with one number of threads; row r has
    the seed `seed * sequences + r`. `progress` is told of tokens a row, and of how many there will be.

    Raises QuantizeError for a tokenizer without the mark that a text should begin with, RunFailure where the model
    gives no distribution or the GPU's memory does not suffice.
    """
    tokenizer, rows = opened.tokenizer, wanted.sequences
    length = wanted.length or opened.spec.model.window
    began = time.monotonic()
    if wanted.begin == "uniform":
        first = torch.randint(tokenizer.vocab, (rows,), generator=torch.Generator().manual_seed(seed))
    elif tokenizer.bos is None:
        hint = "calibrate with `begin: uniform`, or on the training text"
        raise QuantizeError(f"{tokenizer.name} has no mark to begin a text with", hint)
    else:
        first = torch.full((rows,), tokenizer.bos)
    seeds = [(seed * rows + row) % 2**63 for row in range(rows)]
    sampling = Sampling(wanted.temperature)
    written = torch.empty(rows, length + 1, dtype=torch.int64, device=opened.device)
    written[:, 0] = first.to(opened.device)
    start = written[:, :1].clone()
    try:
        decoder = Decoder(opened.text_model, length, opened.device, rows)  # never full: it ends there
        steps = sample_tokens(decoder, start, tokenizer.vocab, sampling, seeds, length)
        for done, step in enumerate(steps, 1):
            written[:, done] = step
            if progress is not None and (done % TOLD == 0 or done == length):
                progress(done, length)
        tokens = written.cpu()
    except torch.OutOfMemoryError as error:
        hint = "lower quant.calibrate.sequences or its length"
        raise RunFailure("out of GPU memory while writing text to calibrate on", hint) from error
    if int(tokens.min()) < 0:
        raise RunFailure("the logits hold NaN or infinity", "the model is broken: calibrate an earlier checkpoint")
    starts = 0 if tokenizer.bos is None else int((tokens[:, 1:] == tokenizer.bos).sum())
    return OwnText(tokens, starts, time.monotonic() - began, decoder.preparing)
