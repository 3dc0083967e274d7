"""The value of each term of the training loss on a batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from specc.compiler.losses.term import LossTerm


def loss_terms(
    model: nn.Module, program: Callable[..., Tensor], terms: Sequence[LossTerm], inputs: Sequence[Tensor]
) -> dict[str, float]:
    """Returns the mean of each loss term over a batch, by the title of the term. The means are not weighted.

    If a term has a value per token, the function runs the program with the weight 1 for this term and 0 for all other
    terms. The value of an auxiliary loss is the gradient of the training loss with respect to the weight of this
    auxiliary loss.

    Args:
        model: the model. The function restores its buffers, and the state of the random number generator of Torch.
        program: the training program of `model`, which returns the loss f32 []. The program must not be compiled.
        terms: the loss terms, in the order in which the program expects their weights.
        inputs: the arguments of the program before the weights, such as ids and targets, i64 [B, T].
    """
    weighted = [term for term in terms if term.input]
    saved = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def loss(*ones: LossTerm) -> tuple[Tensor, list[Tensor]]:
        weights = [torch.full((), float(term in ones), device=inputs[0].device) for term in weighted]
        for weight, term in zip(weights, weighted, strict=True):
            weight.requires_grad_(bool(term.states) and torch.is_grad_enabled())
        devices = [inputs[0].device] if inputs[0].is_cuda else []
        with torch.random.fork_rng(devices):  # dropout that Torch draws is the same in every run of the program
            torch.manual_seed(0)
            return program(*inputs, *weights), weights

    values: dict[str, float] = {}
    try:
        with torch.no_grad():
            rest = float(loss()[0])  # the sum of all terms that have no weight
            for term in terms:
                if not term.states:
                    values[term.title] = float(loss(term)[0]) - rest if term.input else rest
        if any(term.states for term in terms):
            with torch.enable_grad():
                total, weights = loss()
                stated = [(term, weight) for term, weight in zip(weighted, weights, strict=True) if term.states]
                gradients = torch.autograd.grad(total, [weight for _, weight in stated], allow_unused=True)
            for (term, _), gradient in zip(stated, gradients, strict=True):
                values[term.title] = float(gradient.detach()) if gradient is not None else 0.0
    finally:
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)
    return {term.title: values[term.title] for term in terms}
