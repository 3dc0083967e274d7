"""Decodes a batch of texts from a KV cache. On a GPU, each step is one CUDA graph, which includes sampling."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specc.runtime.decode.sampling import Sampling, generator_of
from specc.runtime.model.cuda_graph import WARM_UP, Captured
from specc.runtime.model.protocols import Cache

STRIDES = (
    # The number of cache lengths for which steps are captured. A step reads the smallest of these lengths that
    # suffices.
    8
)
SHORTEST = 256  # in positions; smaller cache lengths save no time
PAGE = 1024  # the number of random numbers per row that are generated at once
BLOCK = 16  # the number of tokens that a GPU samples before the host reads them

# Maps ids i64 [B, 1], start i64 [] and the cache to logits, like `decode` of a model
StepFunction = Callable[..., Tensor]


class CachedModel(Protocol):
    """The programs of a text model with a contiguous cache that a `Decoder` calls."""

    def prefill(self, ids: Tensor, start: Tensor, cache: Cache) -> Tensor:
        """Appends `ids`, i64 [B, T], to a cache that has `start` tokens, i64 []. Returns the logits after the last
        id.
        """

    def decode(self, ids: Tensor, start: Tensor, cache: Cache) -> Tensor:
        """Appends one id per row, i64 [B, 1], to a cache that has `start` tokens, i64 []. Returns the logits after the
        appended ids.
        """

    def new_cache(self, rows: int, positions: int) -> Cache:
        """Returns an empty cache for `rows` texts of up to `positions` tokens."""


class Decoder:
    """Computes the logits of the next tokens for a batch of growing texts of equal length. The KV cache has the dtype
    of the model.

    A step reads only the first positions of the cache. The number of these positions is the length of the texts,
    rounded up to one of a few fixed lengths. On a GPU, each fixed length has its own CUDA graph. When the cache is
    full, the decoder prefills the last `window // 2` tokens again, as the start of a text. From then on, the model
    attends to between `window // 2` and `window` tokens.

    The method `write` runs entirely on the device: a step reads, from device memory, the token that the previous step
    sampled.

    Args:
        model: the model, on `device`.
        window: the number of tokens that the cache holds.
        device: the device of the model.
        rows: the number of texts.
        step: the function that computes the logits of a step. None selects `model.decode`.
    """

    def __init__(
        self, model: CachedModel, window: int, device: torch.device, rows: int = 1, step: StepFunction | None = None
    ) -> None:
        self._model, self._window, self._decode = model, window, step or model.decode
        self._cache = model.new_cache(rows, window)
        self._tokens = torch.zeros(
            rows, window + 1, dtype=torch.int64, device=device
        )  # the tokens of the text, followed by the next token
        self._next = torch.zeros(rows, dtype=torch.int64, device=device)
        self._uniform = torch.zeros(PAGE, rows, dtype=torch.float64, device=device)
        self._counters = torch.zeros(
            2, dtype=torch.int64, device=device
        )  # the position of the last token, and the row of `_uniform`; see `Sampling.choose`
        self._length = 0
        self._logits: Tensor | None = None  # the logits after the last token; None once a token was sampled from them
        self._stride = max(SHORTEST, -(-window // STRIDES))
        self._steps: dict[int, Step] = {}
        self._sampled: dict[tuple[int, Sampling, int], Replayed] = {}

    @property
    def preparing(self) -> float:
        """The total duration in seconds of the steps that ran before CUDA graphs were captured, and of the captures."""
        steps: list[Step | Replayed] = [*self._steps.values(), *self._sampled.values()]
        return sum(step.preparing for step in steps)

    @torch.no_grad()
    def prefill(self, tokens: Tensor) -> Tensor:
        """Starts new texts with the given tokens, i64 [rows, T], with 1 <= T <= `window`. Returns the logits of the
        next tokens, f32 [rows, vocabulary].
        """
        self._length = tokens.shape[1]
        self._tokens[:, : self._length] = tokens
        self._counters.zero_()
        self._logits = self._model.prefill(tokens, self._counters[0], self._up_to(self._positions()))
        return self._logits

    @torch.no_grad()
    def append(self, tokens: Tensor) -> Tensor:
        """Appends one token to each text, i64 [rows]. Returns the logits of the next tokens, f32 [rows, vocabulary].

        The logits are valid until the next call.
        """
        self._tokens[:, self._length] = tokens
        if self._length == self._window:
            return self._slide()
        self._counters.fill_(self._length)
        self._length += 1
        positions = self._positions()
        if positions not in self._steps:
            self._steps[positions] = Step(self._decode, self._up_to(positions))
        self._logits = self._steps[positions](tokens[:, None], self._counters[0])
        return self._logits

    @torch.no_grad()
    def write(self, sampling: Sampling, vocab: int, uniform: Tensor) -> Tensor:
        """Samples n tokens for each text, and appends all of them except the last.

        The next call of `write` appends the last token. The host does not wait for the device.

        Args:
            sampling: the sampling settings.
            vocab: the number of logits to use, from id 0.
            uniform: random numbers in [0, 1), f64 [n, rows], with n <= PAGE, on the device.

        Returns:
            The sampled tokens, i64 [rows, n]. A token is -1 if the largest logit is not finite. The tokens of a row
            after -1 are meaningless.
        """
        self._uniform[: len(uniform)] = uniform
        written, since = [self._tokens[:, :0]], 0
        for at in range(len(uniform)):
            if self._logits is None and self._length == self._window:
                written.append(self._tokens[:, self._window + 1 - since :].clone())
                self._slide()
            if at == 0 or self._logits is not None:  # during the following steps, the device counts the positions
                self._counters[0].fill_(self._length - (self._logits is not None))
                self._counters[1].fill_(at)
                since = 0
            if self._logits is not None:
                self._choose(self._logits, sampling, vocab)
                self._logits = None
            else:
                self._length += 1
                self._sample(self._positions(), sampling, vocab)
            since += 1
        written.append(self._tokens[:, self._length + 1 - since : self._length + 1])
        return torch.cat(written, 1)

    def _slide(self) -> Tensor:
        return self.prefill(self._tokens[:, self._window - self._window // 2 :].clamp(min=0))

    def _choose(self, logits: Tensor, sampling: Sampling, vocab: int) -> None:
        sampling.choose(logits[:, :vocab], self._uniform, self._counters, self._next, self._tokens)
        self._counters.add_(1)

    def _sample(self, positions: int, sampling: Sampling, vocab: int) -> None:
        key = positions, sampling, vocab
        if key not in self._sampled:
            cache = self._up_to(positions)

            def work() -> None:
                self._choose(self._decode(self._next[:, None], self._counters[0], cache), sampling, vocab)

            self._sampled[key] = Replayed(work, self._tokens.device)
        self._sampled[key]()

    def _positions(self) -> int:
        return min(-(-self._length // self._stride) * self._stride, self._window)

    def _up_to(self, positions: int) -> Cache:
        sizes = self._model.new_cache(0, positions)  # a cache without rows, which only states shapes
        return [
            tuple(tensor[:, : size.shape[1]] for tensor, size in zip(layer, shapes, strict=True))
            for layer, shapes in zip(self._cache, sizes, strict=True)
        ]


class Replayed:
    """Runs a function that returns nothing. On a CPU, each call runs the function directly. On a GPU, the function is
    captured as a CUDA graph, and each call replays the graph.

    Args:
        work: the function. It must read and write the same addresses in every call, except for its arguments.
        device: the device on which the function runs.
    """

    def __init__(self, work: Callable[..., None], device: torch.device) -> None:
        self._work, self._device = work, device
        self._captured = Captured(work)
        self._calls = 0
        self.preparing = 0.0

    @property
    def replays(self) -> bool:
        return self._calls > WARM_UP

    def __call__(self, *tensors: Tensor) -> None:
        """Runs the function with `tensors` as arguments. The shapes of the arguments must be equal in all calls."""
        if self._device.type != "cuda":
            self._work(*tensors)
        elif self._calls <= WARM_UP:
            torch.cuda.synchronize(self._device)
            began = time.monotonic()
            self._captured(*tensors)
            torch.cuda.synchronize(self._device)
            self.preparing += time.monotonic() - began
            self._calls += 1
        else:
            self._captured(*tensors)


class Step:
    """Runs a decoding step with a cache of a fixed shape. On a CPU, each call runs the step directly. On a GPU, each
    call replays a CUDA graph.

    Args:
        call: the function that computes the logits from tensors and the cache, and updates the cache in place.
        cache: the cache, whose tensors have fixed addresses.
    """

    def __init__(self, call: Callable[..., Tensor], cache: Cache) -> None:
        self._call, self._cache = call, cache
        self._logits: Tensor | None = None
        self._replayed: Replayed | None = None

    @property
    def preparing(self) -> float:
        return self._replayed.preparing if self._replayed is not None else 0.0

    @property
    def replays(self) -> bool:
        return self._replayed is not None and self._replayed.replays

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Returns the logits, which are valid until the next call. The shapes of `tensors` must be equal in all
        calls.
        """
        if tensors[0].device.type != "cuda":
            return self._call(*tensors, self._cache)
        if self._replayed is None:
            self._replayed = Replayed(self._write, tensors[0].device)
        self._replayed(*tensors)
        assert self._logits is not None
        return self._logits

    def _write(self, *tensors: Tensor) -> None:
        logits = self._call(*tensors, self._cache)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits.copy_(logits)


def sample_blocks(
    decoder: Decoder,
    tokens: Tensor,
    vocab: int,
    sampling: Sampling,
    seeds: Sequence[int],
    count: int,
    block: int = BLOCK,
) -> Iterator[Tensor]:
    """Samples `count` tokens that continue each text. Yields the sampled tokens in blocks of at most `block` tokens per
    text.

    After the CUDA graphs are captured, the host waits for the device only once per `PAGE` tokens.

    Args:
        decoder: the decoder of the model.
        tokens: the start of each text, i64 [rows, T].
        vocab: the number of logits to use, from id 0.
        sampling: the sampling settings.
        seeds: one seed per text. The random numbers of a text depend only on its seed.
        count: the number of tokens to sample for each text.
        block: the maximum number of tokens per block.

    Yields:
        The next n tokens of each text, i64 [rows, n] on the device of `tokens`. A token is -1 if the largest logit is
        not finite. The tokens of a row after -1 are meaningless.

    Raises:
        SamplingError: if a seed has more than 64 bits.
    """
    generators = [generator_of(seed) for seed in seeds]
    if count:
        decoder.prefill(tokens)
    for first in range(0, count, PAGE):
        many = min(PAGE, count - first)
        numbers = [torch.rand(many, dtype=torch.float64, generator=generator) for generator in generators]
        for uniform in torch.split(torch.stack(numbers, 1).to(tokens.device), block):
            yield decoder.write(sampling, vocab, uniform)


def on_the_host(blocks: Iterable[Tensor]) -> Iterator[list[list[int]]]:
    """Copies blocks of tokens from the device to the host. Yields each block as lists of integers, one list per row.

    While the host waits for a block, a GPU computes the next block.
    """
    waiting: deque[tuple[Tensor, torch.cuda.Event]] = deque()
    for block in blocks:
        if block.device.type != "cuda":
            yield block.tolist()
            continue
        copy = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
        copy.copy_(block, non_blocking=True)
        waiting.append((copy, torch.cuda.Event()))  # type: ignore[no-untyped-call]
        waiting[-1][1].record()
        if len(waiting) > 1:
            yield _copied(*waiting.popleft())
    for entry in waiting:
        yield _copied(*entry)


def _copied(block: Tensor, event: torch.cuda.Event) -> list[list[int]]:
    event.synchronize()
    rows: list[list[int]] = block.tolist()
    return rows
