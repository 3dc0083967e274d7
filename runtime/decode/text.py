"""Decodes rows of text side by side from a cache; on a GPU each step is one CUDA graph, and sampling stays on the
device."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specc.runtime.errors import RuntimeFailure
from specc.runtime.model.cuda_graph import WARM_UP, Captured
from specc.runtime.model.protocols import Cache, GeneratedText

STRIDES = 8  # lengths of the cache that steps are built for; a step reads the cache up to the next of them
SHORTEST = 256  # positions: shorter lengths save nothing
PAGE = 1024  # numbers of each row that are drawn at once


class SamplingError(RuntimeFailure):
    """A setting of sampling that is out of range."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn.

    `temperature` divides the logits; 0 takes the most probable token, the first of equals. Of all tokens
    the `top_k` most probable tokens remain (None: all), and of these the fewest whose probabilities,
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
        """The distribution of each row that is drawn from: f64 [..., vocabulary], of `logits` [..., vocabulary], where
        they are. NaN for a row whose largest logit is not finite."""
        exact = logits.detach().double()
        if self.temperature > 0 and self.top_k is None and self.top_p == 1:
            return ((exact - exact.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        # By falling logit, the lower token first among equals: the tokens that remain are a prefix.
        ordered, tokens = exact.sort(dim=-1, descending=True, stable=True)
        vocabulary = exact.shape[-1]
        keep = 1 if self.temperature == 0 else min(self.top_k or vocabulary, vocabulary)
        probable = ((ordered[..., :keep] - ordered[..., :1]) / (self.temperature or 1.0)).softmax(-1)
        if self.top_p < 1:
            before = F.pad(probable.cumsum(-1)[..., :-1], (1, 0))  # the sum of the more probable tokens
            probable = probable.masked_fill(before >= self.top_p, 0.0)
            probable = probable / probable.sum(-1, keepdim=True)
        return torch.zeros_like(exact).scatter(-1, tokens[..., :keep], probable)

    def pick(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """A token a row, i64 [B], of logits [B, vocabulary], by a number in [0, 1) each, f64 [B]; -1 where the logits
        give no distribution. Waits for nothing on a GPU."""
        steps = self.probabilities(logits).cumsum(-1)
        last = steps[:, -1:]
        # Tokens without a chance add no step, so `right` passes over them; the last sum may fall short of 1.
        tokens = torch.searchsorted(steps, uniform[:, None] * last, right=True)
        tokens = torch.minimum(tokens, (steps < last).sum(-1, keepdim=True))
        return tokens[:, 0].where(logits.amax(-1).isfinite(), -1)


class Decoder:
    """The logits behind growing texts of one length, one row per text, by a cache in the dtype of the model.

    A step attends to the cache up to one of a few lengths, the next that holds the text. On a GPU each of these steps
    is a CUDA graph of its own, captured after two passes that count already. When the cache of `window` tokens is
    full, the last half of the context's tokens are computed anew as the start of a text: at most `window` tokens are
    ever seen, at least half as many, and the cost is about two tokens a token.
    """

    def __init__(self, model: GeneratedText, window: int, device: torch.device, rows: int = 1) -> None:
        self._model, self._window = model, window
        self._cache = model.new_cache(rows, window)
        self._seen = torch.zeros(rows, window, dtype=torch.int64, device=device)
        self._length = 0
        self._start = torch.zeros((), dtype=torch.int64, device=device)
        self._stride = max(SHORTEST, -(-window // STRIDES))
        self._steps: dict[int, _Step] = {}

    @property
    def preparing(self) -> float:
        """Seconds that went into the steps before their graphs were there, and into capturing these."""
        return sum(step.preparing for step in self._steps.values())

    @torch.no_grad()
    def prefill(self, tokens: Tensor) -> Tensor:
        """Starts new texts of 1 to `window` tokens each, i64 [rows, T]; logits f32 [rows, vocabulary]."""
        self._length = tokens.shape[1]
        self._seen[:, : self._length] = tokens
        self._start.zero_()
        return self._model.prefill(tokens, self._start, self._up_to(self._positions()))

    @torch.no_grad()
    def append(self, tokens: Tensor) -> Tensor:
        """Appends one token to each text, i64 [rows]; logits f32 [rows, vocabulary], valid until the next call."""
        if self._length == self._window:
            tail = self._window // 2
            return self.prefill(torch.cat((self._seen[:, self._window - tail :], tokens[:, None]), 1))
        self._seen[:, self._length] = tokens
        self._start.fill_(self._length)
        self._length += 1
        positions = self._positions()
        if positions not in self._steps:
            self._steps[positions] = _Step(self._model, self._up_to(positions))
        return self._steps[positions](tokens[:, None], self._start)

    def _positions(self) -> int:
        """The length of the cache that holds the text: a multiple of the stride, or all."""
        return min(-(-self._length // self._stride) * self._stride, self._window)

    def _up_to(self, positions: int) -> Cache:
        """Views of the cache up to `positions`; tensors that do not grow with the text stay whole."""
        sizes = self._model.new_cache(0, positions)  # empty: only its shapes are used
        return [
            tuple(tensor[:, : size.shape[1]] for tensor, size in zip(layer, shapes, strict=True))
            for layer, shapes in zip(self._cache, sizes, strict=True)
        ]


class _Step:
    """One token per row against a cache of one length: run directly, or on a GPU captured and replayed."""

    def __init__(self, model: GeneratedText, cache: Cache) -> None:
        self._model, self._cache = model, cache
        self._logits: Tensor | None = None
        self._captured = Captured(self._write)
        self._calls = 0
        self.preparing = 0.0

    def __call__(self, ids: Tensor, start: Tensor) -> Tensor:
        if ids.device.type != "cuda":
            return self._model.decode(ids, start, self._cache)
        if self._calls <= WARM_UP:
            torch.cuda.synchronize(ids.device)
            began = time.monotonic()
            self._captured(ids, start)
            torch.cuda.synchronize(ids.device)
            self.preparing += time.monotonic() - began
        else:
            self._captured(ids, start)
        self._calls += 1
        assert self._logits is not None
        return self._logits

    def _write(self, ids: Tensor, start: Tensor) -> None:
        logits = self._model.decode(ids, start, self._cache)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits.copy_(logits)


def sample_tokens(
    decoder: Decoder, tokens: Tensor, vocab: int, sampling: Sampling, seeds: Sequence[int], count: int
) -> Iterator[Tensor]:
    """`count` times the next token of each row, i64 [rows] on the device of `tokens`, i64 [rows, T], which they follow.

    Row r is drawn by a generator of its own, of the seed `seeds[r]`: it depends on no other row. Of the logits the
    first `vocab` count. A token is -1 where the model gave no distribution; what follows it has no meaning. Once
    the graphs are there, nothing waits for the device but once in `PAGE` tokens, to hand it random numbers.
    """
    generators = [_generator(seed) for seed in seeds]
    last: Tensor | None = None
    for at in range(count):
        if at % PAGE == 0:
            many = min(PAGE, count - at)
            numbers = [torch.rand(many, dtype=torch.float64, generator=generator) for generator in generators]
            uniform = torch.stack(numbers, 1).to(tokens.device)
        logits = decoder.prefill(tokens) if last is None else decoder.append(last.clamp(min=0))
        last = sampling.pick(logits[:, :vocab], uniform[at % PAGE])
        yield last


def _generator(seed: int) -> torch.Generator:
    if not -(2**63) <= seed < 2**64:
        raise SamplingError(f"the seed {seed} has more than 64 bits", f"give 0 to {2**64 - 1}")
    return torch.Generator().manual_seed(seed)
