"""Master weights: the optimizer owns parameters and gradients in f32, whatever the model computes in."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from specc.compiler.quant.scheme import Scheme
from specc.runtime.optim.fake_quantized import FakeQuantized

ALIGNMENT = 64  # elements between the starts of gradients in a flat buffer: kernels then load vectors


class Masters:
    """The f32 master weights of a model, by name, each with an f32 gradient in `.grad` once a step is collected.

    A parameter that the model computes with in another dtype becomes a copy in that dtype, refreshed from its master
    once a step; its gradients are summed up in f32. A parameter that it computes with in f32 is its own master.

    Args:
        model: holds f32 parameters under exactly the names of `dtypes`, on the device where it will run.
        dtypes: what the model computes with each parameter in, by name.
        sharded: the parameters of whose gradients each process sums up a part, in banks.
        copied: the parameters that get a master of their own although the model computes in f32.

    Attributes:
        tensors: the masters.
        model_parameters: the model's own parameters, which it computes with.
        gradients: f32, in the order of `tensors`; views of `sums`.
        loss: f32 [], the last element of `sums`, for the caller to add up the losses in.
        sums: f32 [N], everything that a step sums up, in one buffer.
        common: the end of `sums`, without the gradients of `sharded`: several processes sum it up in one call.
    """

    def __init__(
        self,
        model: nn.Module,
        dtypes: Mapping[str, torch.dtype],
        sharded: Collection[str] = (),
        copied: Collection[str] = (),
    ) -> None:
        self.model_parameters = dict(model.named_parameters())
        self._quantized: FakeQuantized | None = None
        if self.model_parameters.keys() != dtypes.keys():
            raise ValueError(f"model and plan differ in {sorted(self.model_parameters.keys() ^ dtypes.keys())}")
        self.tensors: dict[str, nn.Parameter] = {}
        for name, dtype in dtypes.items():
            param = self.model_parameters[name]
            if dtype == torch.float32 and name not in copied:
                self.tensors[name] = param
            else:
                self.tensors[name] = nn.Parameter(param.detach().clone())
                param.data = param.data.to(dtype)
        self.fake_quantize(None)
        self._lay_out(dtypes, sharded)

    @torch.no_grad()
    def fake_quantize(
        self, schemes: Mapping[str, Scheme] | None, input_shares: Mapping[str, Tensor] | None = None
    ) -> bool:
        """Lets the model compute with quantized weights from now on: with what each scheme would store of a parameter
        without seeing data. `refresh` keeps it so. Gradients are those at the quantized values and go to the masters
        as they are: the straight-through estimator (Bengio et al. 2013). The schemes of before cost nothing.

        Args:
            schemes: by parameter name; None for the masters themselves.
            input_shares: as of `FakeQuantized`.

        Returns:
            Whether `refresh` launches other work from now on.

        Raises:
            ValueError: for a parameter that is its own master.
        """
        before = self._quantized.schemes if self._quantized is not None else None
        if schemes is not None and before == schemes:
            return False
        parameters = self.model_parameters
        quantized = FakeQuantized(self.tensors, parameters, schemes, input_shares) if schemes is not None else None
        self._quantized = quantized
        names = quantized.names if quantized is not None else ()
        copied = [n for n in parameters if self.tensors[n] is not parameters[n] and n not in names]
        self._copies: list[Tensor] = [parameters[name] for name in copied]
        self._sources: list[Tensor] = [self.tensors[name] for name in copied]
        self.refresh()
        return before != schemes

    @property
    def fake_quantizes(self) -> bool:
        """Whether the model computes with quantized weights."""
        return self._quantized is not None

    def _lay_out(self, dtypes: Mapping[str, torch.dtype], sharded: Collection[str]) -> None:
        """One f32 buffer for all gradients, those of one compute dtype side by side, and the loss."""
        groups: dict[tuple[bool, torch.dtype], list[str]] = {}
        for name in sorted(dtypes, key=lambda name: name not in sharded):
            groups.setdefault((name in sharded, dtypes[name]), []).append(name)
        sizes = [sum(_room(self.tensors[name]) for name in names) for names in groups.values()]
        self.sums = torch.zeros(sum(sizes) + 1, device=next(iter(self.tensors.values())).device)
        self.loss = self.sums[-1]
        self.common = self.sums[sum(_room(self.tensors[name]) for name in dtypes if name in sharded) :]
        self._groups: list[_Group] = []
        views: dict[str, Tensor] = {}
        for ((_, dtype), names), total in zip(groups.items(), torch.split(self.sums[:-1], sizes), strict=True):
            self._groups.append(_Group([self.model_parameters[name] for name in names], total, dtype))
            views.update(zip(names, self._groups[-1].totals, strict=True))
        self.gradients = [views[name] for name in self.tensors]
        self._common = [views[name] for name in self.tensors if name not in sharded]
        self.attach()

    def attach(self) -> None:
        """Puts the gradients where optimizers look for them."""
        for master, gradient in zip(self.tensors.values(), self.gradients, strict=True):
            master.grad = gradient

    def clear(self) -> None:
        """Begins a step: sets all gradients and the loss to 0."""
        self.sums.zero_()
        for param in self.model_parameters.values():
            param.grad = None  # else autograd would add to it, one kernel per parameter

    def collect(self) -> None:
        """Adds what the last backward pass left in the model to the f32 gradients, in a few kernels."""
        for group in self._groups:
            group.collect()

    def finish(
        self,
        passes: int,
        clip_norm: float | None,
        local: Sequence[Tensor] = (),
        add: Callable[[Tensor], None] = lambda squares: None,
    ) -> Tensor:
        """Turns sums of gradients into means and clips them.

        Args:
            passes: the backward passes that were summed up, over all processes.
            clip_norm: the largest 2-norm over all gradients; None for no limit.
            local: this process's part of the gradients of sharded parameters, which is treated alike. The
                `gradients` of these stay as they are.
            add: replaces a tensor by its sum over all processes.

        Returns:
            The 2-norm over all gradients before clipping, f32 [], without waiting for the device.
        """
        if passes > 1:
            self.common.mul_(1 / passes)
            for tensor in local:
                tensor.mul_(1 / passes)
        norm = get_total_norm(self._common)
        if local:
            squares = get_total_norm(local).square()
            add(squares)
            norm = (norm.square() + squares).sqrt()
        if clip_norm is not None:
            factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
            # one gradient that is not finite must not make the others so: it could no longer be named
            factor = torch.where(norm.isfinite(), factor, 1.0)
            for tensor in (self.common[:-1], *local):
                tensor.mul_(factor)
        self.attach()
        return norm

    @torch.no_grad()
    def refresh(self) -> None:
        """Casts, or quantizes, the masters into the copies that the model reads."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._sources)
        if self._quantized is not None:
            self._quantized.write()

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Copies `weights`, which must have the names and shapes of `tensors`, over masters and model."""
        for name, master in self.tensors.items():
            master.copy_(weights[name])
        self.refresh()

    @contextmanager
    def swapped(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Within it the model runs with other weights."""
        before = {name: param.detach().clone() for name, param in self.model_parameters.items()}
        try:
            self._write(weights)
            yield
        finally:
            self._write(before)

    @torch.no_grad()
    def _write(self, weights: Mapping[str, Tensor]) -> None:
        for name, param in self.model_parameters.items():
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

    def digests(self) -> dict[str, int]:
        """The sum of each master's bits read as i32: equal weights have equal ones, on any device."""
        sums = [master.detach().view(torch.int32).sum(dtype=torch.int64) for master in self.tensors.values()]
        return dict(zip(self.tensors, torch.stack(sums).tolist(), strict=True))


class _Group:
    """The parameters of one compute dtype, and their part of the sums.

    `totals` are views of `flat`, f32, one per parameter in its shape.
    """

    def __init__(self, params: Sequence[Tensor], flat: Tensor, dtype: torch.dtype) -> None:
        self._params, self._flat = params, flat
        self.totals = _views(flat, params)
        # Adding bf16 to f32 tensor by tensor would be a kernel each: no multi-tensor kernel mixes dtypes.
        self._staging = torch.zeros_like(flat, dtype=dtype) if dtype != torch.float32 else None
        self._staged = _views(self._staging, params) if self._staging is not None else []

    @torch.no_grad()
    def collect(self) -> None:
        grads = [param.grad for param in self._params]
        for param in self._params:
            param.grad = None
        present = [(index, grad) for index, grad in enumerate(grads) if grad is not None]
        if not present:
            return
        into = self.totals if self._staging is None else self._staged
        targets, sources = [into[index] for index, _ in present], [grad for _, grad in present]
        if self._staging is None:
            torch._foreach_add_(targets, sources)
            return
        if len(present) < len(grads):
            self._staging.zero_()  # what the pass before has left must not count again
        torch._foreach_copy_(targets, sources)
        self._flat.add_(self._staging)


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() // ALIGNMENT) * ALIGNMENT


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive parts of `flat` in the shapes of `like`."""
    parts = torch.split(flat, [_room(tensor) for tensor in like])
    return [part[: tensor.numel()].view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
