"""The effective rank of each matrix, from its singular values."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RankUse:
    """The distribution of the energy of a matrix over its singular values s_1 >= s_2 >= ...

    Attributes:
        name: the name of the parameter. The name of the matrix of one expert ends with the index of the expert, as in
            `blocks.0.moe.up[3]`.
        shape: the numbers of rows and columns.
        largest: s_1, the spectral norm.
        stable_rank: sum s_i^2 / s_1^2, which is the square of the ratio of the Frobenius norm to the spectral norm; 0
            for a zero matrix.
        effective_rank: exp of the entropy of s_i / sum s (Roy and Vetterli 2007, "The effective rank").
        top: the number of the largest singular values that `energy` includes.
        energy: the sum of the squares of the `top` largest singular values, divided by sum s_i^2.
        spectrum: the singular values, in descending order.
    """

    name: str
    shape: tuple[int, int]
    largest: float
    stable_rank: float
    effective_rank: float
    top: int
    energy: float
    spectrum: tuple[float, ...]

    @property
    def full(self) -> int:
        return min(self.shape)


def is_matrix(shape: tuple[int, ...]) -> bool:
    """Returns whether a parameter of shape `shape` consists of one or more matrices with several rows and columns."""
    return len(shape) in (2, 3) and min(shape[-2:]) > 1


def rank_uses(name: str, weight: Tensor, top: int | None = None) -> Iterator[RankUse]:
    """Yields the rank of a matrix [rows, columns], or of the matrix of each expert in [experts, rows, columns].

    Args:
        name: the name of the parameter.
        weight: the values of the parameter. Singular values are computed on its device, in f64.
        top: the number of the largest singular values that `energy` includes. None for a tenth of all values, but at
            least one value.
    """
    matrices = weight.detach().double()
    names = [name] if weight.dim() == 2 else [f"{name}[{i}]" for i in range(len(weight))]
    for label, matrix in zip(names, matrices.reshape(-1, *weight.shape[-2:]), strict=True):
        values = torch.linalg.svdvals(matrix).cpu()
        rows, columns = matrix.shape
        count = min(top or max(1, min(rows, columns) // 10), len(values))
        squares = values.square()
        total, largest = float(squares.sum()), float(values[0])
        if total == 0.0:
            yield RankUse(label, (rows, columns), 0.0, 0.0, 0.0, count, 0.0, tuple(values.tolist()))
            continue
        shares = values / values.sum()
        entropy = -float((shares * shares.clamp(min=1e-300).log()).sum())
        yield RankUse(
            name=label,
            shape=(rows, columns),
            largest=largest,
            stable_rank=total / largest**2,
            effective_rank=math.exp(entropy),
            top=count,
            energy=float(squares[:count].sum()) / total,
            spectrum=tuple(values.tolist()),
        )
