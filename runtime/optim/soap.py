"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner, batched over all matrices of one shape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specc.compiler.spec.optimizers.soap import SoapSpec
from specc.runtime.distributed.world import World
from specc.runtime.optim.matrix_rule import MatrixRule
from specc.runtime.optim.schedule import Moment
from specc.runtime.optim.update_rule import SUM

# Eigenvalues below this fraction of the largest eigenvalue count as zero, because rounding causes them
NULL = 1e-5
# The kinds of work that compute the bases: BEGIN in the first update, REFRESH in every `basis_every`-th later update
BEGIN, REFRESH = "begin", "refresh"


@dataclass(frozen=True, slots=True)
class _Side:
    """The preconditioner for the rows, or for the columns, of all matrices in a bank.

    Attributes:
        rows: True for the preconditioner of the rows, False for the preconditioner of the columns.
        gram: the preconditioner [all matrices, ..., n, n]: the running mean of `g g^T` for rows, or of `g^T g` for
            columns.
        basis: the eigenvectors of `gram` as columns [all matrices, ..., n, n], in descending order of the eigenvalues.
    """

    rows: bool
    gram: Tensor
    basis: Tensor

    @property
    def name(self) -> str:
        return "left" if self.rows else "right"

    def part(self, local: slice) -> "_Side":
        return _Side(self.rows, self.gram[local], self.basis[local])

    def rotated(self, x: Tensor, back: bool = False) -> Tensor:
        basis = self.basis.mT if self.rows != back else self.basis
        return basis @ x if self.rows else x @ basis

    def add(self, gradient: Tensor, share: float) -> None:
        self.gram.lerp_(gradient @ gradient.mT if self.rows else gradient.mT @ gradient, share)

    def begin(self) -> None:
        gram = self.gram.nan_to_num()  # another check reports gradients that are not finite
        values, vectors = torch.linalg.eigh(gram)
        largest = values[..., -1:].unsqueeze(-1)
        null = vectors * (values.unsqueeze(-2) < NULL * largest)
        # The next term fixes the eigenvectors in the null space, which would otherwise depend on rounding.
        projector, size = null @ null.mT, gram.shape[-1]
        axes = torch.arange(1, size + 1, dtype=gram.dtype, device=gram.device).unsqueeze(-1) / size
        _, vectors = torch.linalg.eigh(gram - largest * (projector @ (axes * projector)))
        self.basis.copy_(vectors.flip(-1))

    def refresh(self, square: Tensor) -> None:
        """Updates `basis` by one step of orthogonal iteration.

        The step first sorts the eigenvectors by descending eigenvalue. `square` is the second moment of the gradients
        in the basis. The method sorts the rows or columns of `square` in the same order, in place.
        """
        gram = self.gram.nan_to_num()
        values = (self.basis * (gram @ self.basis)).sum(-2)
        order = values.argsort(-1, descending=True)
        along = order.unsqueeze(-1) if self.rows else order.unsqueeze(-2)
        square.copy_(square.gather(-2 if self.rows else -1, along.expand_as(square)))
        basis = self.basis.gather(-1, order.unsqueeze(-2).expand_as(self.basis))
        self.basis.copy_(torch.linalg.qr(gram @ basis).Q)


class Soap(MatrixRule[SoapSpec]):
    """SOAP (Vyas et al. 2024, arXiv 2409.11321).

    `L = b2 L + (1 - b2) g g^T`, and `R = b2 R + (1 - b2) g^T g`. `U` and `V` are the eigenvectors of `L` and `R`. Adam
    runs on the rotated gradient `U^T g V`, and its update is rotated back.

    As in the authors' code, the first update only computes `U` and `V`. A later refresh sorts the columns of `U` by
    eigenvalue, and then replaces `U` by the orthogonal factor of `L U`. `V` is refreshed from `R` in the same way.
    """

    name = "soap"

    def __init__(self, spec: SoapSpec, parameters: Mapping[str, nn.Parameter], world: World) -> None:
        super().__init__(spec, parameters, world)
        self._mean, self._square = self.new_slot(), self.new_slot()
        self._count = self.new_counts()
        self._sides: list[list[_Side]] = []
        for bank in self.banks:
            *stack, rows, columns = bank.params[0].shape
            sizes = [(is_rows, size) for is_rows, size in ((True, rows), (False, columns)) if size <= spec.largest_side]
            sides = [_Side(is_rows, *(bank.new_state(*stack, size, size) for _ in "ab")) for is_rows, size in sizes]
            for side in sides:
                side.basis.diagonal(dim1=-2, dim2=-1).fill_(1)
            self._sides.append(sides)

    def work(self, step: int) -> str:
        work, updates = super().work(step), (step + 1) // self.spec.every
        if work == SUM or (updates - 1) % self.spec.basis_every:
            return work
        return REFRESH if updates > 1 else BEGIN

    def waits(self, work: str) -> bool:
        return work in (BEGIN, REFRESH)

    def numbers(self, now: Moment) -> Sequence[float]:
        lr, *others = super().numbers(now)
        return (0.0 if self.work(now.step) == BEGIN else lr, *others)

    def direction(self, index: int, gradient: Tensor, work: str, numbers: Sequence[Tensor]) -> Tensor:
        (first, second), local = self.spec.betas, self.banks[index].local
        mean, square, count = (slot[index][local] for slot in (self._mean, self._square, self._count))
        sides = [side.part(local) for side in self._sides[index]]
        for side in sides:
            side.add(gradient, 1 - second)
            if work == BEGIN:
                side.begin()
        if work == BEGIN:
            return torch.zeros_like(gradient)
        count.add_(1)
        mean.lerp_(gradient, 1 - first)
        rotated, direction = gradient, mean
        for side in sides:
            rotated, direction = side.rotated(rotated), side.rotated(direction)
        square.lerp_(rotated.square(), 1 - second)
        direction = direction / square.sqrt().add_(self.spec.eps) * ((1 - second**count).sqrt() / (1 - first**count))
        for side in sides:
            direction = side.rotated(direction, back=True)
            if work == REFRESH:
                side.refresh(square)
        return direction

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        slots = {"mean": self._mean, "square": self._square, "count": self._count}
        named = {slot: self.by_name(tensors) for slot, tensors in slots.items()}
        for bank, sides in zip(self.banks, self._sides, strict=True):
            for side in sides:
                for slot, tensor in (("gram", side.gram), ("basis", side.basis)):
                    named.setdefault(f"{side.name}_{slot}", {}).update(self.matrices(bank, tensor))
        return named
