"""Second moments of the gradients of a loss, by parameter."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gradients:
    """How much the loss l hangs on what a parameter of shape [rows, columns] gives where it is used.

    Attributes:
        products: E[(dl/dy_i)^2] of the outputs y of linears whose weight it is, f64 [rows]; None where it is none's.
        lookups: E[1(id = v) (dl/dy_j)^2] of the rows y that are looked up in it, a token, f64 [rows, columns]; None
            where none are.
    """

    products: Tensor | None = None
    lookups: Tensor | None = None

    def cpu(self) -> "Gradients":
        """The same on the CPU."""
        products, lookups = (None if one is None else one.cpu() for one in (self.products, self.lookups))
        return Gradients(products, lookups)
