"""Implements test-time training. After each chunk of text is scored, the weights are trained on this chunk."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from specc.compiler.pattern import matches
from specc.compiler.spec.adapt.ttt import AdamWSettings, LoraSettings, SgdSettings, TestTimeTraining
from specc.runtime.errors import RunFailure
from specc.runtime.eval.adapt.method import AdaptError, Method, Placed, Work

OPTIMIZERS: Mapping[type, Callable[[list[Tensor], Any], Optimizer]] = {
    SgdSettings: lambda leaves, how: SGD(
        leaves, how.lr, how.momentum, weight_decay=how.weight_decay, nesterov=how.nesterov
    ),
    AdamWSettings: lambda leaves, how: AdamW(leaves, how.lr, how.betas, how.eps, how.weight_decay),
}
SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "constant": lambda done: 1.0,
}


@dataclass(frozen=True, slots=True)
class Whole:
    """A weight that is trained directly. `leaves` contains the f32 master copy of the weight."""

    leaves: tuple[Tensor, ...]

    @classmethod
    def of(cls, weight: Tensor) -> "Whole":
        return cls((_wide(weight).clone().requires_grad_(),))

    def value(self) -> Tensor:
        return self.leaves[0].clone()


@dataclass(frozen=True, slots=True)
class LowRank:
    """A weight that is the sum of a frozen matrix `base` [out, in] and a trained low-rank update, f32. The update is
    factor * b [out, rank] @ a [rank, in]. `leaves` contains a and b.
    """

    base: Tensor
    leaves: tuple[Tensor, ...]
    factor: float

    @classmethod
    def of(cls, weight: Tensor, how: LoraSettings, generator: torch.Generator) -> "LowRank":
        base = _wide(weight).clone()  # copied, because `_wide` returns an f32 weight itself, which is overwritten later
        rows, columns = base.shape
        a = (2 * torch.rand(how.rank, columns, generator=generator) - 1) * columns**-0.5
        b = base.new_zeros(rows, how.rank)
        return cls(base, (a.to(base).requires_grad_(), b.requires_grad_()), how.scale / how.rank)

    def value(self) -> Tensor:
        a, b = self.leaves
        return self.base + self.factor * (b @ a)


@dataclass(frozen=True, slots=True)
class Row:
    """A window of training text that begins at token `start`. The loss covers only the targets at the positions `after`
    + 1 .. `end`.
    """

    start: int
    after: int
    end: int


def rows_of(span: tuple[int, int], length: int) -> list[Row]:
    """Divides the targets at the positions span[0] + 1 .. span[1] among rows of up to `length` tokens. Each target
    belongs to exactly one row.

    The tokens of a row before its targets serve only as context.
    """
    after, end = span
    ends = [*range(after + length, end, length), end]
    return [Row(max(0, e - length), a, e) for a, e in zip([after, *ends], ends, strict=False)]


class Learner:
    """Trains the weights whose names match the pattern in the settings.

    The trained tensors are f32 copies. After each step, the values of the copies are written to the parameters of the
    model. Raises AdaptError if no parameter matches the pattern.
    """

    def __init__(self, how: TestTimeTraining, work: Work) -> None:
        self.how, self.work = how, work
        covered = {n: p for n, p in work.model.named_parameters() if matches(how.match, n)}
        shown = {n: p for n, p in covered.items() if how.lora is None or p.dim() == 2}
        if not shown:
            what = "parameter" if not covered else "matrix, and lora requires matrices"
            raise AdaptError(f"eval.adapt: `match: {how.match}` matches no {what}", "e.g. `blocks.*` or `*`")
        self.shown = shown
        self.weights = [_learning(name, weight, how, work.seed) for name, weight in shown.items()]
        self.leaves = [leaf for weight in self.weights for leaf in weight.leaves]
        self.optimizer = OPTIMIZERS[type(how.learns_by)](self.leaves, how.learns_by)
        self.sums = torch.zeros(sum(p.numel() for p in shown.values()), device=work.world.device, dtype=_dtype(shown))

    @contextmanager
    def learning(self) -> Iterator[None]:
        """A context manager in whose block the weights require gradients. At the end of the block, the original weights
        are restored.
        """
        originals = [weight.detach().clone() for weight in self.shown.values()]
        try:
            for weight in self.shown.values():
                weight.requires_grad_()
            yield
        finally:
            with torch.no_grad():
                for weight, before in zip(self.shown.values(), originals, strict=True):
                    weight.requires_grad_(False).copy_(before)

    def learn(self, span: tuple[int, int], done: float) -> None:
        """Trains on the targets at the positions span[0] + 1 .. span[1].

        `done` is the fraction of the chunks that are complete. It determines the learning rate.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.how.learns_by.lr * SCHEDULES[self.how.schedule](done)
        rows = rows_of(span, self.work.account.windows.length)
        for _ in range(self.how.epochs):
            for first in range(0, len(rows), self.how.batch):
                self._step(rows[first : first + self.how.batch])

    def _step(self, rows: Sequence[Row]) -> None:
        world, count = self.work.world, sum(row.end - row.after for row in rows)
        part = self.work.share.of(len(rows))
        local = rows[part.start : part.stop]
        self.sums.zero_()
        for first in range(0, len(local), self.work.rows):
            self._backward(local[first : first + self.work.rows], count)
        world.add(self.sums)
        sizes = [weight.numel() for weight in self.shown.values()]
        self.optimizer.zero_grad()
        for weight, shown, grad in zip(self.weights, self.shown.values(), torch.split(self.sums, sizes), strict=True):
            torch.autograd.backward(weight.value(), grad.view(shown.shape))
        if self.how.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.leaves, self.how.clip_norm)
        self.optimizer.step()
        with torch.no_grad():
            for weight, shown in zip(self.weights, self.shown.values(), strict=True):
                shown.copy_(weight.value())

    def _backward(self, rows: Sequence[Row], count: int) -> None:
        account, device = self.work.account, self.work.world.device
        length = min(account.windows.length, max(row.end for row in rows))
        filled = [*rows, *[rows[-1]] * (self.work.rows - len(rows))]
        tokens = torch.from_numpy(np.stack([account.tokens_at(row.start, length + 1) for row in filled])).to(device)
        bounds = torch.tensor([(row.after - row.start, row.end - row.start) for row in filled], device=device)
        place = torch.arange(1, length + 1, device=device)
        counted = (place > bounds[:, :1]) & (place <= bounds[:, 1:])
        counted[len(rows) :] = False
        nats = self.work.nats(self.work.features(tokens[:, :-1].contiguous()), tokens[:, 1:].contiguous())
        loss = (torch.where(counted, nats, 0) / count).sum()
        grads = torch.autograd.grad(loss, list(self.shown.values()), materialize_grads=True)
        self.sums += torch.cat([grad.flatten().to(self.sums.dtype) for grad in grads])


def _learning(name: str, weight: Tensor, how: TestTimeTraining, seed: int) -> Whole | LowRank:
    if how.lora is None:
        return Whole.of(weight.detach())
    digest = hashlib.sha256(f"{seed} {name} lora".encode()).digest()
    return LowRank.of(
        weight.detach(), how.lora, torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    )


def _wide(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _dtype(shown: Mapping[str, Tensor]) -> torch.dtype:
    return _wide(next(iter(shown.values()))[:0]).dtype


def _run(how: TestTimeTraining, work: Work) -> str:
    """Runs test-time training. Returns a message with the numbers of parameters and chunks.

    The method is causal: all targets of a chunk are scored before the weights are trained on the chunk.
    """

    def nats(batch: Placed) -> Tensor:
        with torch.no_grad():
            return work.score(batch.ids, batch.targets)

    learner, chunks = Learner(how, work), work.account.chunks
    with learner.learning():
        for number, chunk in enumerate(chunks):
            work.each(chunk, nats)
            if number + 1 < len(chunks):
                learner.learn(work.account.span(chunk), number / max(len(chunks) - 1, 1))
                if not all(bool(leaf.isfinite().all()) for leaf in learner.leaves):
                    message = f"weights are not finite after chunk {number + 1} of {len(chunks)}"
                    raise RunFailure(message, "lower eval.adapt.optimizer.lr, or eval.adapt.clip_norm")
    count = sum(leaf.numel() for leaf in learner.leaves)
    return f"{count:,} parameters trained on {len(chunks) - 1:,} of {len(chunks):,} chunks"


TTT = Method("ttt", None, lambda how: how.chunk, _run)
