"""Settings of SOAP."""

from math import prod
from typing import ClassVar, Literal

from specc.compiler.spec.optimizers.optimizer import Decay, OptimizerSpec
from specc.compiler.strict import Positive, PositiveFloat


class SoapSpec(OptimizerSpec):
    """SOAP (Vyas et al. 2024, arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioner.

    SOAP updates matrices, and stacks of expert matrices. Each matrix of a stack has separate bases. The first update
    only computes the bases.

    Attributes:
        betas: the decays of the first and second moments. The second decay is also the decay of the preconditioner.
        eps: the epsilon of the denominator.
        basis_every: the number of updates from one refresh of the bases to the next.
        largest_side: the largest side of a matrix (rows or columns) that has a basis. A longer side is not rotated, and
            needs no more memory than with Adam.
    """

    slots: ClassVar[int] = 2

    kind: Literal["soap"]
    betas: tuple[Decay, Decay] = (0.95, 0.95)
    eps: PositiveFloat = 1e-8
    basis_every: Positive = 10
    largest_side: Positive = 10_000

    @property
    def of_shape(self) -> float:
        """The number of temporary f32 values that an update allocates per matrix element. The values are the gradient
        and the direction in the eigenbases, the next rotations of both, and two terms of the denominator."""
        return 6

    def refuses(self, shape: tuple[int, ...]) -> str:
        return "" if len(shape) in (2, 3) else "soap updates only matrices"

    def state_numbers(self, shape: tuple[int, ...]) -> int:
        *stack, rows, columns = shape
        sides = sum(2 * side * side for side in (rows, columns) if side <= self.largest_side)
        return super().state_numbers(shape) + prod(stack) * sides + 1  # the number of updates so far
