"""Approximate orthogonalization of matrices by quintic iterations, which need only batched matrix products.

An iteration is `X <- a X + (b A + c A^2) X` with `A = X X^T`. It maps each singular value `s` of X to `a s + b s^3 + c
s^5`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Quintic = tuple[float, float, float]
EPS = 1e-7


@dataclass(frozen=True, slots=True)
class Method:
    """An orthogonalization method.

    Attributes:
        name: the name in a spec.
        quintics: the coefficients (a, b, c) of each iteration. All later iterations use the last coefficients.
        prepare: maps matrices [N, m, n] with m <= n to the pair (X, A). The Frobenius norm of a matrix is 1 or 0. X is
            the input of the first iteration, with singular values of at most 1. A is X X^T.
        replaces: the number of iterations that `prepare` makes unnecessary.
    """

    name: str
    quintics: tuple[Quintic, ...]
    prepare: Callable[[Tensor], tuple[Tensor, Tensor]]
    replaces: int = 0


def _plain(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x @ x.mT


def _almost_orthogonal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Makes the rows of X almost orthogonal, as in Prach and Lampert (2022). Returns the new X, and X X^T of the new X.

    The function computes A = X X^T from the given X. It then divides row i of X by the square root of the sum of |A|
    over row i.
    """
    gram = x @ x.mT
    scale = gram.abs().sum(-1, keepdim=True, dtype=torch.float32).sqrt().add_(EPS).reciprocal_().to(x.dtype)
    return x * scale, gram * scale * scale.mT


# The quintic of Jordan (2024). It increases small singular values fast, and maps large singular values close to 1.
NEWTON_SCHULZ = Method("newton_schulz", ((3.4445, -4.7750, 2.0315),), _plain)

# The five minimax quintics of Amsel et al. (2025), one per iteration, with the safety margins of modded-nanogpt.
POLAR_EXPRESS = Method(
    "polar_express",
    (
        (8.15655, -22.48329, 15.87877),
        (4.04293, -2.80892, 0.50002),
        (3.89167, -2.77248, 0.50606),
        (3.28575, -2.36813, 0.46449),
        (2.34654, -1.70978, 0.42324),
    ),
    _plain,
)

# Turbo-Muon (arXiv 2512.04632): almost-orthogonal rows replace the first iteration. The later iterations use these
# quintics.
TURBO = Method(
    "turbo",
    ((4.1071, -2.9478, 0.5448), (3.9487, -2.9089, 0.5518), (3.3184, -2.4885, 0.5100), (2.3007, -1.6689, 0.4188)),
    _almost_orthogonal,
    replaces=1,
)

METHODS: Mapping[str, Method] = {method.name: method for method in (NEWTON_SCHULZ, POLAR_EXPRESS, TURBO)}


def orthogonalize(matrices: Tensor, steps: int, method: Method = NEWTON_SCHULZ) -> Tensor:
    """Returns an approximation of the nearest semi-orthogonal matrix for each matrix.

    The singular values of the result are roughly 0.7 to 1.2. Products are in bf16 on a GPU and in f32 on the CPU.

    Args:
        matrices: the matrices [..., rows, columns] in f32, or in f64 on the CPU.
        steps: the number of iterations.
        method: the orthogonalization method.

    Returns:
        The results [..., rows, columns], in the dtype of `matrices`. The result for a matrix of zeros is zero.
    """
    # Normalization prevents underflow in products of small gradients. The result of `turbo` does not depend on this
    # normalization.
    x: Tensor = matrices.reshape(-1, *matrices.shape[-2:])
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + EPS)
    if x.is_cuda:
        x = x.bfloat16()
    tall = x.size(-2) > x.size(-1)
    if tall:  # so that the Gram matrix X X^T has the size of the shorter side
        x = x.mT
    x, gram = method.prepare(x)
    for step in range(steps - method.replaces):
        a, b, c = method.quintics[min(step, len(method.quintics) - 1)]
        gram = x @ x.mT if step else gram
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype).reshape(matrices.shape)
