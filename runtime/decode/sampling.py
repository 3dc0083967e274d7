"""Samples the next token: the settings, the distribution, and the random numbers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specc.runtime.errors import RuntimeFailure


class SamplingError(RuntimeFailure):
    """Raised if a sampling setting is out of range."""

    code = "U011"
    exit_code = 2


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings for sampling the next token.

    Raises SamplingError if a value is out of range.

    Attributes:
        temperature: the divisor of the logits. The temperature 0 selects the most probable token, and the lowest id
            among equally probable tokens.
        top_k: only the `top_k` most probable tokens can be sampled. None allows all tokens.
        top_p: the total probability for nucleus sampling (Holtzman et al. 2020, "The Curious Case of Neural Text
            Degeneration", arXiv 1904.09751). The probabilities of the tokens that `top_k` allows are first normalized
            to the sum 1. Nucleus sampling then keeps the smallest set of the most probable tokens whose total
            probability is at least `top_p`.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            message = f"the temperature is {self.temperature}; it must be a number of at least 0"
            raise SamplingError(message, "0 selects the most probable token")
        if self.top_k is not None and self.top_k < 1:
            raise SamplingError(
                f"top-k is {self.top_k}; it must be at least 1", "to sample from all tokens, do not set top-k"
            )
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top-p is {self.top_p}; it must be in (0, 1]", "with 1, all tokens remain")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns the sampling distribution of each row, f64 [..., vocabulary], from `logits` [..., vocabulary].

        The result is on the device of `logits`. A row whose largest logit is not finite has the result NaN.
        """
        exact = logits.detach().double()
        if self.temperature > 0 and self.top_k is None and self.top_p == 1:
            return ((exact - exact.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        # Tokens are sorted by descending logit, and by id if logits are equal. The tokens to keep are then a prefix.
        ordered, tokens = exact.sort(dim=-1, descending=True, stable=True)
        vocabulary = exact.shape[-1]
        keep = 1 if self.temperature == 0 else min(self.top_k or vocabulary, vocabulary)
        weights = ((ordered[..., :keep] - ordered[..., :1]) / (self.temperature or 1.0)).exp()
        if self.top_p < 1:
            before = F.pad(weights.cumsum(-1)[..., :-1], (1, 0))  # the total weight of the tokens before each token
            weights = weights.masked_fill(before >= self.top_p * weights.sum(-1, keepdim=True), 0.0)
        probable = weights / weights.sum(-1, keepdim=True)
        return torch.zeros_like(exact).scatter(-1, tokens[..., :keep], probable)

    def sample(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Returns the tokens that `pick` returns for the same arguments. On a GPU, unlike `pick`, it does not sort."""
        if logits.device.type != "cuda":
            return self.pick(logits, uniform)
        counters = torch.zeros(2, dtype=torch.int64, device=logits.device)
        tokens = torch.zeros(len(logits), 2, dtype=torch.int64, device=logits.device)
        self.choose(logits, uniform[None], counters, torch.empty_like(tokens[:, 0]), tokens)
        return tokens[:, 1]

    def pick(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Samples one token per row. The host does not wait for a GPU.

        Args:
            logits: the logits of each row, [B, vocabulary].
            uniform: a random number in [0, 1) for each row, f64 [B].

        Returns:
            The tokens, i64 [B]; -1 in rows whose largest logit is not finite.
        """
        finite = logits.amax(-1).isfinite()
        if self.temperature == 0:  # selects the first of equal logits, like `probabilities`, without a sort
            return logits.argmax(-1).where(finite, -1)
        steps = self.probabilities(logits).cumsum(-1)
        last = steps[:, -1:]
        # `right=True` skips tokens of probability 0, whose sums equal the sums before them. The last sum may be less
        # than 1.
        tokens = torch.searchsorted(steps, uniform[:, None] * last, right=True)
        tokens = torch.minimum(tokens, (steps < last).sum(-1, keepdim=True))
        return tokens[:, 0].where(finite, -1)

    def choose(self, logits: Tensor, uniform: Tensor, counters: Tensor, following: Tensor, tokens: Tensor) -> None:
        """Samples the tokens that `pick` returns for the same logits and random numbers. Writes them to `following` and
        `tokens`. On a GPU, a single kernel performs the whole method without a sort.

        Args:
            logits: the logits of each row, [B, vocabulary].
            uniform: random numbers in [0, 1), f64 [P, B].
            counters: two integers, i64 [2]: the column of the last token in `tokens`, and the row of `uniform` to use.
            following: receives the sampled tokens, i64 [B]. A row whose largest logit is not finite receives 0.
            tokens: receives the sampled tokens, i64 [B, N], in the column after the last token. A row whose largest
                logit is not finite receives -1.
        """
        if logits.device.type == "cuda":
            from specc.runtime.decode.choose_token import choose_token

            choose_token(logits, uniform, counters, following, tokens, self.temperature, self.top_k, self.top_p)
            return
        column, row = counters.tolist()
        chosen = self.pick(logits, uniform[row])
        tokens[:, column + 1] = chosen
        following.copy_(chosen.clamp(min=0))


def generator_of(seed: int) -> torch.Generator:
    """Returns the generator that draws the random numbers for a text. Raises SamplingError if the seed has more than 64
    bits.
    """
    if not -(2**63) <= seed < 2**64:
        raise SamplingError(f"the seed {seed} has more than 64 bits", f"give 0 to {2**64 - 1}")
    return torch.Generator().manual_seed(seed)
