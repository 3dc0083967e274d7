"""Master weights: f32 parameters and gradients for the optimizers, while the model computes in another dtype."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from specc.compiler.programs.programs import DerivedWeight
from specc.compiler.quant.scheme import Scheme
from specc.runtime.distributed.world import World
from specc.runtime.optim.bank import Bank
from specc.runtime.optim.derived_weights import DerivedWeights
from specc.runtime.optim.fake_quantized import FakeQuantized

_ALONE = World.alone()
ALIGNMENT = 64  # the alignment, in elements, of each gradient in a flat buffer, so that kernels can use vector loads


class Masters:
    """The f32 master weights of a model by name, with f32 gradients in `.grad`.

    If the model uses a parameter in f32, the parameter is its own master. Otherwise, the parameter is a copy of its
    master in another dtype. The copy is refreshed once per step, and its gradients are summed in f32.

    With `in_bf16`, the bf16 parameters of the model are the masters. The f32 values of these masters in `tensors` exist
    only inside the context `in_f32`. Outside the context, they are NaN. At the end of the context, the values are
    rounded stochastically to bf16 (Zamirai et al., 2020, arXiv 2010.06192).

    Args:
        model: the model, on its final device. Its parameters are f32 and have exactly the names in `dtypes`.
        dtypes: the compute dtype of each parameter, by name.
        sharded: the names of the parameters in banks. For these parameters, each process sums only its part of the
            gradients.
        copied: the names of f32 parameters whose master is a separate tensor.
        unclipped: the names of the parameters whose gradients are neither clipped nor part of the norm. These
            parameters must not be in `sharded`.
        in_bf16: whether the bf16 parameters of the model are the masters. These parameters must not be in `copied`.
        derived: the matrices that the model computes only from parameters.

    Attributes:
        tensors: the masters, by name.
        model_parameters: the parameters of the model, by name.
        gradients: the f32 gradients, in the order of `tensors`. They are views of `sums`.
        quantized: the fake quantization. None if the model computes with unquantized weights.
        loss: the sum of the losses, f32 []. It is the last element of `sums`.
        sums: one buffer for all gradients and the loss, f32 [N].
        common: the part of `sums` after the gradients of `sharded`. One collective call sums this part over the
            processes.

    Raises:
        ValueError: if the parameters of the model do not have the names in `dtypes`.
    """

    def __init__(
        self,
        model: nn.Module,
        dtypes: Mapping[str, torch.dtype],
        sharded: Collection[str] = (),
        copied: Collection[str] = (),
        unclipped: Collection[str] = (),
        in_bf16: bool = False,
        derived: Sequence[DerivedWeight] = (),
    ) -> None:
        self.model_parameters = dict(model.named_parameters())
        self.quantized: FakeQuantized | None = None
        if self.model_parameters.keys() != dtypes.keys():
            differing = sorted(self.model_parameters.keys() ^ dtypes.keys())
            raise ValueError(f"the model and `dtypes` have different parameters: {differing}")
        self.tensors: dict[str, nn.Parameter] = {}
        for name, dtype in dtypes.items():
            param = self.model_parameters[name]
            if dtype == torch.float32 and name not in copied:
                self.tensors[name] = param
            else:
                self.tensors[name] = nn.Parameter(param.detach().clone())
                param.data = param.data.to(dtype)
        self._released: dict[str, Tensor] = {}  # the NaN tensors that stand for bf16 masters outside `in_f32`
        for name in [name for name, dtype in dtypes.items() if in_bf16 and dtype == torch.bfloat16]:
            (master := self.tensors[name]).data.copy_(self.model_parameters[name])
            self._released[name] = torch.full((), math.nan, device=master.device).expand(master.shape)
        self.derived = DerivedWeights(model, derived)
        self.fake_quantize(None)
        self._lay_out(dtypes, sharded, unclipped, {name for weight in derived for name in weight.params})

    def release(self) -> None:
        """Frees the memory of the f32 values of bf16 masters. Create the optimizer state before this call."""
        for name, nan in self._released.items():
            self.tensors[name].data = nan

    @contextmanager
    def in_f32(self, changes: bool = True) -> Iterator[None]:
        """A context manager in which `tensors` have the f32 values of all masters.

        At the end, bf16 masters are rounded, unless `changes` is False.
        """
        if not self._released:
            yield
            return
        parameters = [self.model_parameters[name].data for name in self._released]
        flat = torch.empty(sum(map(_room, parameters)), device=parameters[0].device)
        views = _views(flat, parameters)
        torch._foreach_copy_(views, parameters)
        for name, view in zip(self._released, views, strict=True):
            self.tensors[name].data = view
        yield
        if changes:
            _round_stochastically(flat)
            torch._foreach_copy_(parameters, views)
        self.release()

    def weights(self) -> dict[str, Tensor]:
        """Returns the f32 values of all masters, by name. The values of bf16 masters are copies."""
        return {
            name: self.model_parameters[name].detach().float() if name in self._released else master
            for name, master in self.tensors.items()
        }

    @torch.no_grad()
    def fake_quantize(
        self, schemes: Mapping[str, Scheme] | None, input_shares: Mapping[str, Tensor] | None = None
    ) -> bool:
        """Makes the model compute with quantized weights.

        From now on, `refresh` quantizes the masters. This quantization needs no calibration data. The optimizer applies
        the gradients of the quantized weights to the masters (the straight-through estimator, Bengio et al. 2013). A
        call with the current schemes does nothing.

        Args:
            schemes: the scheme of each parameter, by name. With None, the model computes with unquantized weights.
            input_shares: factors of the input features of each weight, as in `FakeQuantized`.

        Returns:
            Whether `refresh` now launches different kernels than before.

        Raises:
            ValueError: if a parameter to round shares its tensor with its master.
        """
        before = self.quantized.schemes if self.quantized is not None else None
        if schemes is not None and before == schemes:
            return False
        parameters, names = self.model_parameters, frozenset[str]()
        self.quantized = None
        if schemes is not None:
            self.quantized = FakeQuantized(self.tensors, parameters, schemes, input_shares)
            names = self.quantized.names
        quantized_or_masters = {*names, *self._released}
        copied = [n for n in parameters if self.tensors[n] is not parameters[n] and n not in quantized_or_masters]
        self._copies: list[Tensor] = [parameters[name] for name in copied]
        self._sources: list[Tensor] = [self.tensors[name] for name in copied]
        self.refresh()
        return before != schemes

    def _lay_out(
        self,
        dtypes: Mapping[str, torch.dtype],
        sharded: Collection[str],
        unclipped: Collection[str],
        read_once: Collection[str],
    ) -> None:
        """Allocates one f32 buffer `sums` for all gradients and the loss, and creates a view of each gradient.

        The buffer has four sections: the gradients of `sharded`, the gradients of all other clipped parameters, the
        gradients of `unclipped`, and the loss. Within a section, gradients of the same compute dtype are adjacent.

        Args:
            dtypes: the compute dtype of each parameter, by name.
            sharded: the names of the parameters in banks.
            unclipped: the names of the parameters whose gradients are not clipped.
            read_once: the names of the parameters that only derived weights read. Their gradients are computed once per
                step instead of once per micro-batch, so they are adjacent and summed separately.
        """
        groups: dict[tuple[int, bool, torch.dtype], list[str]] = {}
        place = {name: (name in unclipped) - (name in sharded) for name in dtypes}
        for name in sorted(dtypes, key=place.__getitem__):
            groups.setdefault((place[name], name in read_once, dtypes[name]), []).append(name)
        sizes = [sum(_room(self.tensors[name]) for name in names) for names in groups.values()]
        self.sums = torch.zeros(sum(sizes) + 1, device=next(iter(self.tensors.values())).device)
        self.loss = self.sums[-1]
        parts = [sum(_room(self.tensors[name]) for name in dtypes if place[name] == part) for part in (-1, 0)]
        self.common = self.sums[parts[0] :]
        self._clipped = self.common[: parts[1]]
        self._groups: list[_Group] = []
        views: dict[str, Tensor] = {}
        for ((*_, dtype), names), total in zip(groups.items(), torch.split(self.sums[:-1], sizes), strict=True):
            self._groups.append(_Group([self.model_parameters[name] for name in names], total, dtype))
            views.update(zip(names, self._groups[-1].totals, strict=True))
        self.gradients = [views[name] for name in self.tensors]
        self._in_norm = [views[name] for name in self.tensors if place[name] == 0]
        totals: dict[torch.dtype, list[Tensor]] = {}
        for leaf in self.derived.leaves:
            totals.setdefault(leaf.dtype, []).append(leaf)
        self._derived_groups = [
            _Group(leaves, leaves[0].new_zeros(sum(map(_room, leaves)), dtype=torch.float32), dtype)
            for dtype, leaves in totals.items()
        ]
        self.attach()

    def attach(self) -> None:
        for master, gradient in zip(self.tensors.values(), self.gradients, strict=True):
            master.grad = gradient

    def clear(self) -> None:
        self.sums.zero_()
        for param in self.model_parameters.values():
            param.grad = None  # otherwise, autograd would add to the gradient, with one launch per parameter
        for group in self._derived_groups:
            group.clear()

    def collect(self) -> None:
        for group in (*self._groups, *self._derived_groups):
            group.collect()

    def finish(
        self,
        micro_batches: int,
        clip_norm: float | None,
        banks: Sequence[Bank] = (),
        world: World = _ALONE,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Computes the mean gradients over all micro-batches of all processes, and clips the gradients.

        The host does not wait for the GPU.

        Args:
            micro_batches: the number of micro-batches of one process.
            clip_norm: the limit for the 2-norm of all gradients together. None for no limit.
            banks: the banks of the sharded parameters. Each bank receives the mean gradients of its local matrices.
            world: the processes that train together.
            scale: the loss scale, f32 []. The gradients are divided by this value. None if the loss was not scaled.

        Returns:
            The 2-norm of all gradients except the gradients of `unclipped`, before clipping, f32 []. The norm is
            bitwise equal on all processes.
        """
        self.attach()
        totals = {id(leaf): total for group in self._derived_groups for leaf, total in group.pairs()}
        gradients = dict(zip(self.tensors, self.gradients, strict=True))
        self.derived.add_gradients([totals[id(leaf)] for leaf in self.derived.leaves], self._computed_with, gradients)
        local: list[Tensor] = []
        if world.size > 1:
            pending = [bank.add_up() for bank in banks]
            world.add(self.common)
            for sum_of_parts in pending:
                sum_of_parts.wait()
            local = [bank.gradient for bank in banks if bank.gradient is not None]
        if (passes := micro_batches * world.size) > 1:
            for tensor in (self.common, *local):
                tensor.mul_(1 / passes)
        if scale is not None:
            for tensor in (self.common[:-1], *local):  # all elements except the last, which is the loss
                tensor.div_(scale)
        norm = get_total_norm(self._in_norm)
        if local:
            squares = get_total_norm(local).square()
            world.add(squares)
            norm = (norm.square() + squares).sqrt()
        if clip_norm is not None:
            factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
            # If the norm is not finite, the gradients are not scaled, so that `first_not_finite` can name the parameter
            factor = torch.where(norm.isfinite(), factor, 1.0)
            for tensor in (self._clipped, *local):
                tensor.mul_(factor)
        return norm

    @torch.no_grad()
    def refresh(self) -> None:
        """Writes the masters to the parameters of the model, converted to the compute dtypes or quantized."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._sources)
        if self.quantized is not None:
            self.quantized.write()
        self.derived.write(self._computed_with)

    @property
    def _computed_with(self) -> Mapping[str, Tensor]:
        names = {*self._released, *(self.quantized.names if self.quantized is not None else ())}
        return {name: self.model_parameters[name] if name in names else self.tensors[name] for name in self.tensors}

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Copies `weights` to the masters and the model. `weights` must have the names and shapes of `tensors`."""
        for name in self.tensors:
            (self.model_parameters if name in self._released else self.tensors)[name].copy_(weights[name])
        self.refresh()

    @contextmanager
    def swapped(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        before = {name: param.detach().clone() for name, param in self.model_parameters.items()}
        try:
            self._write(weights)
            self.derived.write(weights)
            yield
        finally:
            self._write(before)
            self.derived.write(self._computed_with)

    @torch.no_grad()
    def _write(self, weights: Mapping[str, Tensor]) -> None:
        for name, param in self.model_parameters.items():
            param.copy_(weights[name])

    def first_not_finite(self) -> str | None:
        """Returns the name of the first parameter whose value contains NaN or infinity.

        If all values are finite, returns the name of the first parameter whose gradient contains NaN or infinity.
        Returns None if all gradients are finite, too. The method checks values first, because one value that is not
        finite makes all gradients of the next step non-finite.
        """
        gradients = zip(self.tensors, self.gradients, strict=True)
        pairs = (*self.weights().items(), *gradients)
        return next((name for name, tensor in pairs if not bool(torch.isfinite(tensor).all())), None)

    def digests(self) -> dict[str, int]:
        """Returns a checksum of each master, by name. Equal weights have equal checksums on any device."""
        sums = [master.detach().view(torch.int32).sum(dtype=torch.int64) for master in self.weights().values()]
        return dict(zip(self.tensors, torch.stack(sums).tolist(), strict=True))


class _Group:
    """Parameters of one compute dtype, and the part of the buffer `Masters.sums` for their gradients.

    `totals` has one f32 view of the buffer for each parameter.
    """

    def __init__(self, params: Sequence[Tensor], flat: Tensor, dtype: torch.dtype) -> None:
        self._params, self._flat = params, flat
        self.totals = _views(flat, params)
        # Multi-tensor kernels do not mix dtypes. The gradients are therefore copied to a buffer of their own dtype,
        # which a single kernel adds to the f32 buffer.
        self._staging = torch.zeros_like(flat, dtype=dtype) if dtype != torch.float32 else None
        self._staged = _views(self._staging, params) if self._staging is not None else []

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self._params, self.totals, strict=True)

    def clear(self) -> None:
        self._flat.zero_()
        for param in self._params:
            param.grad = None

    @torch.no_grad()
    def collect(self) -> None:
        gradients = {index: param.grad for index, param in enumerate(self._params) if param.grad is not None}
        for param in self._params:
            param.grad = None
        if not gradients:
            return
        if self._staging is None:
            torch._foreach_add_([self.totals[index] for index in gradients], list(gradients.values()))
            return
        if len(gradients) < len(self._params):
            self._staging.zero_()  # otherwise, missing gradients would add the values of the previous pass again
        torch._foreach_copy_([self._staged[index] for index in gradients], list(gradients.values()))
        self._flat.add_(self._staging)


def _round_stochastically(values: Tensor) -> None:
    """Rounds f32 values stochastically to bf16 values, in place. Infinity and NaN do not change.

    The bf16 format has the upper 16 bits of f32. The function adds a uniform random 16-bit integer to the bits of each
    value, and then clears the lower 16 bits. The addition may carry into the upper bits, which rounds the value away
    from zero. The probability of a carry is proportional to the lower 16 bits of the value.
    """
    bits = values.view(torch.int32)
    bits.add_(torch.randint_like(bits, 1 << 16)).bitwise_and_(-1 << 16)


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() // ALIGNMENT) * ALIGNMENT


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [_room(tensor) for tensor in like])
    return [part[: tensor.numel()].view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
