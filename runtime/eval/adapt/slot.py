"""Implements SLOT. The method fits a vector that is added to the input of the output head. All weights are frozen.

The layers before the head run once per batch, without gradients. Each optimizer step runs only the head, forward and
backward.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import AdamW

from specc.compiler.spec.adapt.slot import Slot, SlotCausal
from specc.runtime.eval.adapt.method import Method, Placed, Work


def _fitted(work: Work, how: Slot | SlotCausal, batch: Placed, fitted: Tensor, vectors: int) -> Tensor:
    """Fits vectors that reduce the loss of the targets in `fitted`. Scores all targets of the batch with these vectors.

    Args:
        work: the model and the text.
        how: the settings of SLOT.
        batch: the batch to score.
        fitted: the targets to fit on, bool [B, T].
        vectors: the number of vectors, 1 or B. A single vector minimizes the mean loss over all rows. With B vectors,
            each vector minimizes the mean loss of its own row.

    Returns:
        The loss of each target in nats, f32 [B, T].
    """
    with torch.no_grad():
        hidden = work.features(batch.ids)
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    counts = fitted.sum(1, keepdim=True) if vectors > 1 else fitted.sum()
    delta = wide.new_zeros(vectors, 1, wide.shape[-1]).requires_grad_()
    optimizer = AdamW([delta], lr=how.lr, eps=how.eps, weight_decay=how.weight_decay)
    for _ in range(how.steps):
        nats = work.nats((wide + delta).to(hidden.dtype), batch.targets)
        loss = (torch.where(fitted, nats, 0) / counts.clamp(min=1)).sum()
        (delta.grad,) = torch.autograd.grad(loss, (delta,))
        optimizer.step()
    with torch.no_grad():
        return work.nats((wide + delta).to(hidden.dtype), batch.targets)


def _published(how: Slot, work: Work) -> str:
    def nats(batch: Placed) -> Tensor:
        fitted = batch.new | batch.seen
        fitted[:, -1] = False
        return _fitted(work, how, batch, fitted, 1)

    return _batches(work, nats, f"one vector for each {how.windows} windows")


def _causal(how: SlotCausal, work: Work) -> str:
    def nats(batch: Placed) -> Tensor:
        return _fitted(work, how, batch, batch.seen, len(batch.ids))

    return _batches(work, nats, "one vector for each window but the first")


def _batches(work: Work, nats: Callable[[Placed], Tensor], what: str) -> str:
    for chunk in work.account.chunks:
        work.each(chunk, nats)
    return f"{what}, of {len(work.account.windows):,}"


SLOT = Method("slot", lambda how: how.windows, lambda how: None, _published)
SLOT_CAUSAL = Method("slot_causal", None, lambda how: None, _causal)
