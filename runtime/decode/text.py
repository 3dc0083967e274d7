"""Decodes a batch of texts from a KV cache. On a GPU each step is one CUDA graph, and sampling runs on the device."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from specc.runtime.errors import RuntimeFailure
from specc.runtime.model.cuda_graph import WARM_UP, Captured
from specc.runtime.model.protocols import Cache, GeneratedText

STRIDES = 8  # number of cache lengths that steps are captured for; a step reads the cache up to the next such length
SHORTEST = 256  # positions: smaller cache lengths save no time
PAGE = 1024  # random numbers per row that are generated at once


class SamplingError(RuntimeFailure):
    """A sampling setting is out of range."""

    code = "U011"
    exit_code = 2


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings for sampling the next token.

    Raises SamplingError if a value is out of range.

    Attributes:
        temperature: divides the logits. 0 selects the most probable token, and the lowest id among equals.
        top_k: only the `top_k` most probable tokens remain. None keeps all tokens.
        top_p: of the tokens that remain after `top_k`, only the smallest set of most probable tokens whose
            renormalized probabilities sum to at least `top_p` remains (nucleus sampling, Holtzman et al. 2020, "The
            Curious Case of Neural Text Degeneration", arXiv 1904.09751).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            message = f"the temperature is {self.temperature}; it must be a number of at least 0"
            raise SamplingError(message, "0 selects the most probable token")
        if self.top_k is not None and self.top_k < 1:
            raise SamplingError(f"top-k is {self.top_k}; it must be at least 1", "leave it out to keep all tokens")
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top-p is {self.top_p}; it must be in (0, 1]", "1 keeps all tokens")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the sampling distribution of each row, f64 [..., vocabulary], from `logits` [..., vocabulary].

        The result is on the device of `logits`. It is NaN in rows whose largest logit is not finite.
        """
        exact = logits.detach().double()
        if self.temperature > 0 and self.top_k is None and self.top_p == 1:
            return ((exact - exact.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        # Sorted by falling logit, lower ids first among equals, so that the remaining tokens are a prefix.
        ordered, tokens = exact.sort(dim=-1, descending=True, stable=True)
        vocabulary = exact.shape[-1]
        keep = 1 if self.temperature == 0 else min(self.top_k or vocabulary, vocabulary)
        probable = ((ordered[..., :keep] - ordered[..., :1]) / (self.temperature or 1.0)).softmax(-1)
        if self.top_p < 1:
            before = F.pad(probable.cumsum(-1)[..., :-1], (1, 0))  # the total probability of all more probable tokens
            probable = probable.masked_fill(before >= self.top_p, 0.0)
            probable = probable / probable.sum(-1, keepdim=True)
        return torch.zeros_like(exact).scatter(-1, tokens[..., :keep], probable)

    def pick(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Samples one token per row without synchronizing with a GPU.

        Args:
            logits: [B, vocabulary].
            uniform: random numbers in [0, 1), f64 [B].

        Returns:
            Tokens, i64 [B]; -1 in rows whose largest logit is not finite.
        """
        finite = logits.amax(-1).isfinite()
        if self.temperature == 0:  # the first of equals, as in `probabilities`, without its sort
            return logits.argmax(-1).where(finite, -1)
        steps = self.probabilities(logits).cumsum(-1)
        last = steps[:, -1:]
        # Tokens of probability 0 do not increase the sum, so `right=True` skips them. The last sum may be less than 1.
        tokens = torch.searchsorted(steps, uniform[:, None] * last, right=True)
        tokens = torch.minimum(tokens, (steps < last).sum(-1, keepdim=True))
        return tokens[:, 0].where(finite, -1)


class Decoder:
    """Computes next-token logits for a batch of growing texts of equal length from a KV cache in the model's dtype.

    A step reads the cache up to the smallest of a few fixed lengths that holds the text. On a GPU there is one CUDA
    graph per such length, captured after two uncaptured steps. When the cache of `window` tokens is full, the most
    recent `window // 2` tokens are prefilled again as the start of a text. The model therefore attends to between
    `window // 2` and `window` tokens, at an average cost of about two token computations per token.

    Args:
        model: the model, on `device`.
        window: the number of tokens that the cache holds.
        device: the device of the model.
        rows: the number of texts.
    """

    def __init__(self, model: GeneratedText, window: int, device: torch.device, rows: int = 1) -> None:
        self._model, self._window = model, window
        self._cache = model.new_cache(rows, window)
        self._seen = torch.zeros(rows, window, dtype=torch.int64, device=device)
        self._length = 0
        self._start = torch.zeros((), dtype=torch.int64, device=device)
        self._stride = max(SHORTEST, -(-window // STRIDES))
        self._steps: dict[int, Step] = {}

    @property
    def preparing(self) -> float:
        """Seconds spent in the uncaptured steps and in capturing CUDA graphs."""
        return sum(step.preparing for step in self._steps.values())

    @torch.no_grad()
    def prefill(self, tokens: Tensor) -> Tensor:
        """Starts new texts, i64 [rows, T] with 1 <= T <= `window`, and returns logits, f32 [rows, vocabulary]."""
        self._length = tokens.shape[1]
        self._seen[:, : self._length] = tokens
        self._start.zero_()
        return self._model.prefill(tokens, self._start, self._up_to(self._positions()))

    @torch.no_grad()
    def append(self, tokens: Tensor) -> Tensor:
        """Appends one token to each text, i64 [rows], and returns logits, f32 [rows, vocabulary].

        The logits are valid until the next call.
        """
        if self._length == self._window:
            tail = self._window // 2
            return self.prefill(torch.cat((self._seen[:, self._window - tail :], tokens[:, None]), 1))
        self._seen[:, self._length] = tokens
        self._start.fill_(self._length)
        self._length += 1
        positions = self._positions()
        if positions not in self._steps:
            self._steps[positions] = Step(self._model.decode, self._up_to(positions))
        return self._steps[positions](tokens[:, None], self._start)

    def _positions(self) -> int:
        """Returns the cache length for the current text: the next multiple of the stride, at most the window."""
        return min(-(-self._length // self._stride) * self._stride, self._window)

    def _up_to(self, positions: int) -> Cache:
        """Returns views of the cache up to `positions`. Tensors that do not grow with the text are not cut."""
        sizes = self._model.new_cache(0, positions)  # has no rows: only its shapes are used
        return [
            tuple(tensor[:, : size.shape[1]] for tensor, size in zip(layer, shapes, strict=True))
            for layer, shapes in zip(self._cache, sizes, strict=True)
        ]


class Step:
    """A decoding step with a cache of one shape: run directly on a CPU, captured and replayed on a GPU.

    Args:
        call: computes the logits of tensors and the cache, which it updates in place.
        cache: the cache, at fixed addresses.
    """

    def __init__(self, call: Callable[..., Tensor], cache: Cache) -> None:
        self._call, self._cache = call, cache
        self._logits: Tensor | None = None
        self._captured = Captured(self._write)
        self._calls = 0
        self.preparing = 0.0

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Returns the logits, which are valid until the next call. All calls have tensors of the same shapes."""
        if tensors[0].device.type != "cuda":
            return self._call(*tensors, self._cache)
        if self._calls <= WARM_UP:
            torch.cuda.synchronize(tensors[0].device)
            began = time.monotonic()
            self._captured(*tensors)
            torch.cuda.synchronize(tensors[0].device)
            self.preparing += time.monotonic() - began
        else:
            self._captured(*tensors)
        self._calls += 1
        assert self._logits is not None
        return self._logits

    def _write(self, *tensors: Tensor) -> None:
        logits = self._call(*tensors, self._cache)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits.copy_(logits)


class TextDecoder(Protocol):
    """Computes next-token logits for a batch of texts of equal length, as `Decoder` does."""

    def prefill(self, tokens: Tensor) -> Tensor:
        """Starts new texts, i64 [rows, T], and returns logits, f32 [rows, vocabulary]."""

    def append(self, tokens: Tensor) -> Tensor:
        """Appends one token to each text, i64 [rows], and returns logits, f32 [rows, vocabulary]."""


def sample_tokens(
    decoder: TextDecoder, tokens: Tensor, vocab: int, sampling: Sampling, seeds: Sequence[int], count: int
) -> Iterator[Tensor]:
    """Yields `count` steps of sampled tokens that follow `tokens`.

    After the CUDA graphs are captured, the host synchronizes with the device only once per `PAGE` tokens, to copy
    random numbers to it.

    Args:
        decoder: the decoder of the model.
        tokens: the start of each text, i64 [rows, T].
        vocab: number of logits to use, from id 0.
        sampling: the sampling settings.
        seeds: a seed per row. A row's random numbers depend only on its seed.
        count: number of steps.

    Yields:
        The next token of each row, i64 [rows] on the device of `tokens`. It is -1 in rows whose largest logit is not
        finite; later tokens of such a row are meaningless.

    Raises:
        SamplingError: a seed has more than 64 bits.
    """
    generators = [generator_of(seed) for seed in seeds]
    last: Tensor | None = None
    for at in range(count):
        if at % PAGE == 0:
            many = min(PAGE, count - at)
            numbers = [torch.rand(many, dtype=torch.float64, generator=generator) for generator in generators]
            uniform = torch.stack(numbers, 1).to(tokens.device)
        logits = decoder.prefill(tokens) if last is None else decoder.append(last.clamp(min=0))
        last = sampling.pick(logits[:, :vocab], uniform[at % PAGE])
        yield last


def generator_of(seed: int) -> torch.Generator:
    """Returns the generator of the random numbers of a text. Raises SamplingError if the seed has more than 64 bits."""
    if not -(2**63) <= seed < 2**64:
        raise SamplingError(f"the seed {seed} has more than 64 bits", f"give 0 to {2**64 - 1}")
    return torch.Generator().manual_seed(seed)
