"""Muon: momentum whose matrix is orthogonalized (Jordan, 2024), for all matrices of one shape at once.

Several processes share the work: each adds up, keeps the momentum of and orthogonalizes some matrices of a shape,
and gives the others what came out.
"""

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from specc.runtime.optim.orthogonalize import METHODS, Method, orthogonalize

LEAST_ROW = 1e-7  # the length that a shorter row counts as
EPS = 1e-10  # added to NorMuon's mean squares, which are about 1 / columns


class Pending(Protocol):
    """What was asked of other processes and may still be under way."""

    def wait(self) -> None:
        """On a GPU the stream waits, not the host."""


class Shards(Protocol):
    """The processes among which matrices are shared out. All make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def add_parts(self, whole: Tensor, own: Tensor) -> Pending:
        """Puts this rank's equal part (along the first axis) of the sum of all ranks' `whole` into `own`."""

    def join_parts(self, own: Tensor, whole: Tensor) -> Pending:
        """Puts all ranks' `own`, one after the other, into `whole`. `own` may be this rank's part of it."""


class Alone:
    """One process: a part is the whole."""

    rank, size = 0, 1

    def add_parts(self, whole: Tensor, own: Tensor) -> Pending:
        own.copy_(whole)
        return _Done()

    def join_parts(self, own: Tensor, whole: Tensor) -> Pending:
        whole.copy_(own)
        return _Done()


class _Done:
    def wait(self) -> None: ...


class Bank:
    """All matrices of one shape, filled up with zeros to equal parts for all ranks.

    Attributes:
        params: f32 [rows, columns] each.
        gradient: f32 [matrices of this rank, rows, columns], once `add_up` has been waited for; in several processes
            the sum of theirs, always at one address, for a graph of the update to find.
        momentum: f32 [all matrices, rows, columns]; what is not this rank's is out of date until `gather`.
        second_moment: f32 [all matrices, rows, 1] of NorMuon, likewise; None without it.
    """

    def __init__(self, params: Sequence[Tensor], shards: Shards, second_moment: bool) -> None:
        self.params, self._shards = list(params), shards
        rows, columns = params[0].shape
        each = -(-len(params) // shards.size)
        self._whole = (each * shards.size, rows, columns)
        self._own = slice(shards.rank * each, (shards.rank + 1) * each)
        self.momentum = params[0].new_zeros(self._whole)
        self.second_moment = params[0].new_zeros(*self._whole[:2], 1) if second_moment else None
        self.gradient: Tensor | None = None
        self._summed = params[0].new_zeros(each, rows, columns) if shards.size > 1 else None
        self.scale = sqrt(max(1, rows / columns))

    def add_up(self) -> Pending:
        """Begins to fill `gradient` from the parameters' own. Raises ValueError where one has none."""
        if any(param.grad is None for param in self.params):
            raise ValueError("Muon needs the gradient of every parameter")
        gradients = [param.grad for param in self.params if param.grad is not None]
        if self._summed is None:
            self.gradient = torch.stack(gradients)
            return _Done()
        missing = self._whole[0] - len(gradients)
        whole = torch.stack([*gradients, *[torch.zeros_like(gradients[0])] * missing])
        self.gradient = self._summed
        return self._shards.add_parts(whole, self._summed)

    def direction(
        self,
        momentum: float | Tensor,
        nesterov: bool,
        steps: int,
        method: Method,
        equalize_rows: bool,
        second_moment: float | None,
    ) -> Tensor:
        """Takes the gradient into the momentum; gives what this rank's matrices should move against, f32."""
        assert self.gradient is not None
        own, gradient = self.momentum[self._own], self.gradient
        own.mul_(momentum).add_(gradient)
        update = torch.add(gradient, own * momentum) if nesterov else own
        self.gradient = None
        if equalize_rows:
            update = update / update.norm(dim=-1, keepdim=True).clamp_(min=LEAST_ROW)
        found = orthogonalize(update, steps, method)
        if second_moment is None or self.second_moment is None:
            return found
        moment = self.second_moment[self._own]
        moment.lerp_(found.square().mean(-1, keepdim=True), 1 - second_moment)
        scaled = found / (moment + EPS).sqrt_()
        # as long as it was: the learning rate keeps its meaning
        lengths = [one.norm(dim=(-2, -1), keepdim=True) for one in (found, scaled)]
        evened: Tensor = scaled * (lengths[0] / lengths[1].clamp_(min=EPS))
        return evened

    def join(self, own: Tensor, exact_in_bf16: bool) -> tuple[Pending, Tensor]:
        """Begins to give all ranks the directions of all matrices, [all matrices, rows, columns]."""
        if self._shards.size == 1:
            return _Done(), own
        sent = own.bfloat16() if exact_in_bf16 else own
        whole = sent.new_empty(self._whole)
        return self._shards.join_parts(sent.contiguous(), whole), whole

    def apply(self, directions: Tensor, lr: float | Tensor, weight_decay: float | Tensor) -> None:
        """Moves the parameters."""
        torch._foreach_mul_(self.params, 1 - lr * weight_decay)
        moves = directions[: len(self.params)].float() * (lr * self.scale)
        torch._foreach_sub_(self.params, list(moves.unbind()))

    def gather(self) -> None:
        """Brings what the state holds of other ranks' matrices up to date."""
        if self._shards.size == 1:
            return
        for whole in (self.momentum, self.second_moment):
            if whole is not None:
                self._shards.join_parts(whole[self._own].clone(), whole).wait()


class Muon(Optimizer):
    """buf = momentum buf + g; u = g + momentum buf (Nesterov) or buf; p *= 1 - lr weight_decay;
    p -= lr sqrt(max(1, rows / columns)) orthogonalize(u).

    `lr`, `momentum` and `weight_decay` may be tensors of one number, on the parameters' device: a step can then be
    captured in a CUDA graph and replayed with other numbers. `method` is a key of `orthogonalize.METHODS`.
    `equalize_rows` divides each row of u by its 2-norm first (MuonEq-R). `second_moment` is NorMuon's decay v of the
    mean square of each row of the result o: it is divided by sqrt(v m + (1 - v) mean(o^2)), and then scaled to the
    norm that it had (Li et al. 2025 give all updates one RMS instead, which would change what lr means).

    Parameters and state are f32; the state of a parameter is a view of that of its shape. Raises ValueError for a
    parameter that is not a matrix.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float | Tensor,
        momentum: float | Tensor = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        weight_decay: float | Tensor = 0.0,
        *,
        method: str = "newton_schulz",
        equalize_rows: bool = False,
        second_moment: float | None = None,
        shards: Shards | None = None,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "steps": steps, "weight_decay": weight_decay}
        more = {"method": METHODS[method], "equalize_rows": equalize_rows, "second_moment": second_moment}
        super().__init__(params, {**settings, **more})
        shards = shards or Alone()
        self._banks = [_banks(group["params"], shards, second_moment is not None) for group in self.param_groups]
        for bank in self.banks:
            for i, param in enumerate(bank.params):
                self.state[param]["momentum"] = bank.momentum[i]
                if bank.second_moment is not None:
                    self.state[param]["second_moment"] = bank.second_moment[i]

    @property
    def banks(self) -> list[Bank]:
        """The matrices by shape, those with the most numbers first."""
        return [bank for banks in self._banks for bank in banks]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update. Each bank's gradient must have been added up; those that were not are, here."""
        for bank in self.banks:
            if bank.gradient is None:
                bank.add_up().wait()
        under_way: list[tuple[Bank, Pending, Tensor, float | Tensor, float | Tensor]] = []
        for group, banks in zip(self.param_groups, self._banks, strict=True):
            names = ("momentum", "nesterov", "steps", "method", "equalize_rows", "second_moment")
            settings = {name: group[name] for name in names}
            for bank in banks:
                own = bank.direction(**settings)
                pending, directions = bank.join(own, own.is_cuda and group["second_moment"] is None)
                under_way.append((bank, pending, directions, group["lr"], group["weight_decay"]))
                if len(under_way) > 1:  # the one before has been on its way while this one was computed
                    _apply(*under_way.pop(0))
        for last in under_way:
            _apply(*last)

    @torch.no_grad()
    def gather(self) -> None:
        """Makes the state whole on every rank; all must call it."""
        for bank in self.banks:
            bank.gather()


def _apply(bank: Bank, pending: Pending, directions: Tensor, lr: float | Tensor, weight_decay: float | Tensor) -> None:
    pending.wait()
    bank.apply(directions, lr, weight_decay)


def _banks(params: Sequence[Tensor], shards: Shards, second_moment: bool) -> list[Bank]:
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for param in params:
        if param.dim() != 2:
            raise ValueError(f"Muon takes matrices, not a parameter of shape {tuple(param.shape)}")
        by_shape.setdefault(param.shape, []).append(param)
    banks = [Bank(same, shards, second_moment) for same in by_shape.values()]
    return sorted(banks, key=lambda bank: -bank.momentum.numel())
