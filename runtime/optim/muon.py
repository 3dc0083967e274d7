"""Muon: momentum whose matrix is orthogonalized (Jordan, 2024), for all matrices of one shape at once."""

from collections import defaultdict
from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor
from torch.optim import Optimizer

# The quintic of Jordan (2024): steepest at 0, so that small singular values grow fast; takes (0, 1] near 1.
A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """About the nearest semi-orthogonal matrix of each: singular values go to roughly 0.7 .. 1.2.

    Newton-Schulz iterations with batched products, in bf16 on a GPU and f32 on the CPU.
    `matrices` and the result are f32 [N, rows, columns]; a matrix of zeros stays so.
    """
    x: Tensor = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + EPS)
    if x.is_cuda:
        x = x.bfloat16()
    tall = x.size(-2) > x.size(-1)
    if tall:  # the Gram matrix over the shorter side
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return (x.mT if tall else x).float()


class Muon(Optimizer):
    """buf = momentum buf + g; u = g + momentum buf (Nesterov) or buf; p *= 1 - lr weight_decay;
    p -= lr sqrt(max(1, rows / columns)) orthogonalize(u).

    Parameters and momentum are f32. Raises ValueError for a parameter that is not a matrix.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "steps": steps}
        super().__init__(params, {**settings, "weight_decay": weight_decay})
        for group in self.param_groups:
            for param in group["params"]:
                if param.dim() != 2:
                    raise ValueError(f"Muon takes matrices, not a parameter of shape {tuple(param.shape)}")
                self.state[param]["momentum"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update from the gradients that are there; a parameter without one stays as it is."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            for params in by_shape.values():
                self._update(params, **{name: group[name] for name in self.defaults})

    def _update(
        self,
        params: list[Tensor],
        lr: float,
        momentum: float,
        nesterov: bool,
        steps: int,
        weight_decay: float,
    ) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        buffers = [self.state[param]["momentum"] for param in params]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, grads)
        updates = torch._foreach_add(grads, buffers, alpha=momentum) if nesterov else buffers
        directions = orthogonalize(torch.stack(list(updates)), steps)
        rows, columns = params[0].shape
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        torch._foreach_add_(params, list(directions.unbind()), alpha=-lr * sqrt(max(1, rows / columns)))
