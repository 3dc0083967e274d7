"""Methods that pool a block's keys or values: mean, maximum, a random sample, and learned latent tokens."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from specc.compiler.ir.types import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0x9E3779B1, 0x85EBCA6B)  # odd multipliers of the two rounds of the hash


class Pooling:
    """The base class of pooling methods. A method maps x [B, G, N, P, C], the keys or values of N blocks of P tokens,
    to M pooled keys or values per block, [B, G, N M, C].

    Attributes:
        template: The template of the function `pool` in generated code.
        reads: The arguments of `pool` after `x`. `number` i64[N] are the indices of the blocks, `keys` [B, G, N, P, C]
            are the keys of the same tokens, and `latents` [M, G C] are learned.
        several: Whether M may be more than 1.
    """

    template: str
    reads: tuple[str, ...] = ()
    several = False

    def reference(
        self, x: Tensor, number: Tensor, keys: Tensor, latents: Tensor | None, tokens: int, seed: int
    ) -> Tensor:
        """Returns x pooled, [B, G, N M, C].

        Args:
            x: the keys or values, [B, G, N, P, C].
            number: the indices of the blocks, i64[N].
            keys: the keys of the same tokens, [B, G, N, P, C].
            latents: the learned latent tokens, [M, G C], which only `Latent` reads.
            tokens: the number M of results per block.
            seed: the seed of a sample.
        """
        raise TypeError(f"{type(self).__name__} must override `reference`")


class Mean(Pooling):
    template = "torch/pool_mean.jinja"

    def reference(self, x: Tensor, *_: object) -> Tensor:
        return x.sum(3) / x.shape[3]


class Maximum(Pooling):
    template = "torch/pool_max.jinja"

    def reference(self, x: Tensor, *_: object) -> Tensor:
        return x.amax(3)


class Reservoir(Pooling):
    """A random sample of M tokens without replacement: the M tokens with the largest random priorities (Efraimidis and
    Spirakis, 2006, "Weighted random sampling with a reservoir", with equal weights).

    The priority of a token is a hash of the seed and the token's position, so the priority is the same in training and
    decoding.
    """

    template = "torch/pool_reservoir.jinja"
    reads = ("number",)
    several = True

    def reference(
        self, x: Tensor, number: Tensor, keys: Tensor, latents: Tensor | None, tokens: int, seed: int
    ) -> Tensor:
        import torch

        block, rows = x.shape[3], []
        for row, index in enumerate(number.tolist()):
            order = sorted(range(block), key=lambda token: -priority(index * block + token, seed))
            rows += [x[:, :, row, token] for token in order[:tokens]]
        return torch.stack(rows, 2) if rows else x[:, :, :, 0]


class Latent(Pooling):
    """M learned latent tokens that attend to the tokens of the block, as in a Perceiver (Jaegle et al., 2021). The
    result of a latent token is the mean of x with the weights softmax(latent keys^T / sqrt(C))."""

    template = "torch/pool_latent.jinja"
    reads = ("keys", "latents")
    several = True

    def reference(
        self, x: Tensor, number: Tensor, keys: Tensor, latents: Tensor | None, tokens: int, seed: int
    ) -> Tensor:
        import torch

        assert latents is not None
        queries = latents.reshape(tokens, x.shape[1], keys.shape[-1])
        scores = torch.einsum("bgnpc,mgc->bgnmp", keys, queries) / keys.shape[-1] ** 0.5
        return torch.einsum("bgnmp,bgnpc->bgnmc", scores.softmax(-1), x).flatten(2, 3)


POOLINGS: Mapping[str, Pooling] = MappingProxyType(
    {"mean": Mean(), "max": Maximum(), "reservoir": Reservoir(), "latent": Latent()}
)


def priority(position: int, seed: int) -> int:
    """Returns the sampling priority of a token: a 32-bit hash of the token's position and the seed.

    Each step of the hash is invertible, so two positions below 2**32 never have the same priority.
    """
    word = (position ^ seed) & WORD
    for multiplier in MULTIPLIERS:
        word = word * multiplier & WORD
        word ^= word >> 15
    return word


class PoolContext(NamedTuple):
    """The context of the templates that render the function `pool`.

    Attributes:
        tokens: the number M of results per block.
        block: the number P of tokens of a block.
        seed: the seed of a sample.
        multipliers: the multipliers in the hash function of positions.
    """

    tokens: int
    block: int
    seed: int
    multipliers: tuple[int, ...] = MULTIPLIERS
