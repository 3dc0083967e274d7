"""Samples many texts of different lengths from a paged cache. When a text ends, another text takes its place."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specc.runtime.decode.pages import PagedDecoder
from specc.runtime.decode.sampling import Sampling, generator_of
from specc.runtime.decode.text import BLOCK, PAGE, on_the_host


@dataclass
class _Writing:
    """The state of a text that is not complete. The host may not have read all of its sampled tokens yet.

    `sampled` is the number of sampled tokens. `numbers` has random numbers that are not used yet. `drawn` is the number
    of random numbers that `generator` has produced.
    """

    generator: torch.Generator
    sampled: int = 0
    numbers: deque[float] = field(default_factory=deque)
    drawn: int = 0

    def next_numbers(self, steps: int, count: int) -> list[float]:
        """Returns the random numbers for the next `steps` tokens of the text. `count` is the maximum number of tokens
        of the text.

        The first `count` numbers are the numbers that `sample_blocks` uses for the same seed. All later numbers are 0,
        because the tokens after `count` are discarded.
        """
        while len(self.numbers) < steps and self.drawn < count:
            many = min(PAGE, count - self.drawn)
            self.numbers.extend(torch.rand(many, dtype=torch.float64, generator=self.generator).tolist())
            self.drawn += many
        return [self.numbers.popleft() if self.numbers else 0.0 for _ in range(steps)]


def sample_texts(
    decoder: PagedDecoder,
    prompts: Sequence[Sequence[int]],
    vocab: int,
    sampling: Sampling,
    seeds: Sequence[int],
    count: int,
    batch: int,
    last: int | None = None,
    block: int = BLOCK,
) -> Iterator[tuple[int, int, bool]]:
    """Samples one text after each prompt. When a text ends, the next prompt takes its place in the batch (continuous
    batching; Yu et al., 2022, "Orca").

    Tokens are sampled in blocks. While the host reads a block, a GPU computes the next block. Texts join and leave the
    batch between blocks. A text ends after `count` tokens, or with the token `last`. If the GPU has already sampled
    tokens after `last`, they are discarded.

    Args:
        decoder: the decoder of the model.
        prompts: the tokens of each prompt.
        vocab: the number of logits to use, from id 0.
        sampling: the sampling settings.
        seeds: one seed per prompt. The random numbers of a text depend only on its seed.
        count: the maximum number of tokens to sample for a text.
        batch: the maximum number of texts in the batch.
        last: the token that ends a text. The token itself is also yielded. None ends every text after `count` tokens.
        block: the maximum number of tokens per block, at most BLOCK.

    Yields:
        The index of a prompt, a sampled token of its text, and whether this token is the last token of the text. The
        token is -1 if the largest logit is not finite.

    Raises:
        SamplingError: if a seed has more than 64 bits.
        RunFailure: if a text needs more pages than the decoder has.
    """
    waiting = deque(range(len(prompts) if count else 0))
    writing: dict[int, _Writing] = {}
    unread: deque[list[int]] = deque()  # for each block that the host has not read yet, the texts of the block

    def blocks() -> Iterator[Tensor]:
        while waiting or writing:
            while waiting and len(writing) < batch:
                most = len(prompts[waiting[0]]) + count
                if not decoder.fits(most) and writing:
                    break  # the text waits until another text leaves
                index = waiting.popleft()
                decoder.join(index, prompts[index], most)
                writing[index] = _Writing(generator_of(seeds[index]))
            beginning = [index for index in writing if decoder.begins(index)]
            texts = beginning or list(writing)
            left = max(count - writing[index].sampled for index in texts)
            steps = 1 if beginning else min(block, left, decoder.room(texts))
            uniform = torch.tensor([writing[index].next_numbers(steps, count) for index in texts], dtype=torch.float64)
            if beginning:
                tokens = decoder.begin(texts, sampling, vocab, uniform[:, 0])
            else:
                tokens = decoder.write(texts, sampling, vocab, uniform.T)
            for index in texts:
                writing[index].sampled += steps
                if writing[index].sampled >= count:
                    leave(index)
            unread.append(texts)
            yield tokens

    def leave(index: int) -> None:
        del writing[index]
        decoder.leave(index)

    written: dict[int, int] = dict.fromkeys(range(len(prompts)), 0)  # the number of tokens of each unfinished text
    for rows in on_the_host(blocks()):
        texts = unread.popleft()
        for step in zip(*rows, strict=True):
            for index, token in zip(texts, step, strict=True):
                if index not in written:
                    continue
                written[index] += 1
                ends = token in (-1, last) or written[index] == count
                yield index, token, ends
                if ends:
                    del written[index]
                    if index in writing:
                        leave(index)
