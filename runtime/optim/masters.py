"""Master weights: the optimizer owns parameters and gradients in f32, whatever the model computes in."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm


class Masters:
    """The f32 parameters of a model, by name, each with an f32 gradient in `.grad`.

    A parameter that the model computes with in another dtype (`dtypes`) becomes a copy in that dtype,
    refreshed from its master once a step; its gradients are added up in f32. One computed with in f32 is its
    own master. The model must hold f32 parameters under exactly the names of `dtypes`, on the device where it
    will run.
    """

    def __init__(self, model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
        self._shown = dict(model.named_parameters())
        if self._shown.keys() != dtypes.keys():
            raise ValueError(f"model and plan differ in {sorted(self._shown.keys() ^ dtypes.keys())}")
        self.tensors: dict[str, nn.Parameter] = {}
        for name, dtype in dtypes.items():
            param = self._shown[name]
            if dtype == torch.float32:
                self.tensors[name] = param
            else:
                self.tensors[name] = nn.Parameter(param.detach().clone())
                param.data = param.data.to(dtype)
        for master in self.tensors.values():
            master.grad = torch.zeros_like(master)
        copied = [name for name in dtypes if self.tensors[name] is not self._shown[name]]
        self._copies: list[Tensor] = [self._shown[name] for name in copied]
        self._sources: list[Tensor] = [self.tensors[name] for name in copied]

    @property
    def gradients(self) -> list[Tensor]:
        """f32, in the order of `tensors`."""
        return [master.grad for master in self.tensors.values() if master.grad is not None]

    def clear(self) -> None:
        """Sets all gradients to 0."""
        torch._foreach_zero_(self.gradients)

    def collect(self) -> None:
        """Adds what the last backward pass left in the copies to the f32 gradients."""
        pairs = [
            (source.grad, copy.grad)
            for source, copy in zip(self._sources, self._copies, strict=True)
            if source.grad is not None and copy.grad is not None
        ]
        if pairs:
            torch._foreach_add_([total for total, _ in pairs], [part for _, part in pairs])
        for copy in self._copies:
            copy.grad = None

    def finish(self, parts: int, clip_norm: float | None) -> Tensor:
        """Turns the sum over `parts` backward passes into their mean and clips it to `clip_norm`.

        Returns the 2-norm over all gradients before clipping, f32 [], without waiting for the device.
        """
        if parts > 1:
            torch._foreach_mul_(self.gradients, 1 / parts)
        norm = get_total_norm(self.gradients)
        if clip_norm is not None:
            factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
            # one gradient that is not finite must not make the others so: it could no longer be named
            torch._foreach_mul_(self.gradients, torch.where(norm.isfinite(), factor, 1.0))
        return norm

    @torch.no_grad()
    def refresh(self) -> None:
        """Casts the masters into the copies that the model reads."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._sources)

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Copies `weights`, which must have the names and shapes of `tensors`, over masters and model."""
        for name, master in self.tensors.items():
            master.copy_(weights[name])
        self.refresh()

    @contextmanager
    def showing(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Lets the model run with other weights for a while."""
        own = {name: param.detach().clone() for name, param in self._shown.items()}
        try:
            self._show(weights)
            yield
        finally:
            self._show(own)

    @torch.no_grad()
    def _show(self, weights: Mapping[str, Tensor]) -> None:
        for name, param in self._shown.items():
            param.copy_(weights[name])

    def first_not_finite(self) -> str | None:
        """The first parameter whose value, or else whose gradient, holds NaN or infinity.

        Values come first: a step later they still tell which gradients were at fault, when all gradients are.
        """
        for tensors in (list(self.tensors.values()), self.gradients):
            for name, tensor in zip(self.tensors, tensors, strict=True):
                if not bool(torch.isfinite(tensor).all()):
                    return name
        return None
