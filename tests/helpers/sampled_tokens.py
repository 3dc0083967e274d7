"""Samples texts token by token."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from specc.runtime.decode.sampling import Sampling
from specc.runtime.decode.text import Decoder, sample_blocks


def sample_tokens(
    decoder: Decoder, tokens: Tensor, vocab: int, sampling: Sampling, seeds: Sequence[int], count: int
) -> Iterator[Tensor]:
    """Yields the tokens of `sample_blocks` one at a time, i64 [rows] each."""
    for block in sample_blocks(decoder, tokens, vocab, sampling, seeds, count, 1):
        yield block[:, 0]
