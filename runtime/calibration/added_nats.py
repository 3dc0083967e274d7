"""Estimates the increase of the loss, in nats, that a quantization error of a parameter causes.

The estimate is of second order. Bit allocation minimizes the sum of the increases over all parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from specc.runtime.calibration.uses import signed_sum
from specc.runtime.errors import QuantizeError

# The number of backward passes. The relative standard error of an estimate is about sqrt(2 / PASSES), which is 4 %.
PASSES = 1024


def added_nats(
    model: nn.Module,
    windows: Callable[[], Iterator[tuple[Tensor, Tensor]]],
    errors: Mapping[str, Sequence[Tensor]],
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> Mapping[str, tuple[float, ...]]:
    """Estimates the increase of the loss that each given error of a parameter causes, in nats per token.

    For an error d, the increase is 1/2 E[(d . g)^2], where g is the gradient of the loss of one token (empirical
    Fisher). Let g_n be the gradient for token n of a row of text. A backward pass over the row computes the sum s of
    the terms +-(d . g_n), with random signs. The mean of s^2 over all passes estimates sum_n (d . g_n)^2.

    The first-order term E[d . g] is omitted, because the gradient is 0 at a minimum of the loss.

    Args:
        model: the model, generated without fusions, on `device`.
        windows: a function that returns batches (ids, targets), i64 [rows, window] each. If the batches end before
            `PASSES` rows have been read, the function is called again.
        errors: for each parameter name, the errors to estimate, in the shape of the parameter.
        device: the device of the model.
        progress: a function called as `progress(done, total)`, where both numbers count backward passes.

    Returns:
        For each parameter name, the increases of the loss, in the order of the errors of the parameter.

    Raises:
        QuantizeError: if a gradient contains NaN or infinity, or the loss does not depend on a parameter.
    """
    parameters = [model.get_parameter(name) for name in errors]
    moved = [torch.stack([error.to(p) for error in errors[name]]) for name, p in zip(errors, parameters, strict=True)]
    sums = [torch.zeros(len(each), dtype=torch.float64, device=device) for each in moved]
    generator = torch.Generator().manual_seed(0)
    done = tokens = 0
    while done < PASSES:
        for ids, targets in windows():
            for row in range(len(ids)):
                inputs = (batch[row : row + 1].to(device) for batch in (ids, targets))
                with torch.enable_grad():
                    total = signed_sum(model.score(*inputs), generator)  # type: ignore[operator]
                gradients = torch.autograd.grad(total, parameters, allow_unused=True)
                for at, gradient in enumerate(gradients):
                    if gradient is not None:
                        products = (moved[at] * gradient).flatten(1).sum(1, dtype=torch.float32)
                        sums[at] += products.double().square()
            done += len(ids)
            tokens += ids.numel()
            if progress is not None:
                progress(min(done, PASSES), PASSES)
        if not done:
            raise QuantizeError("the calibration text is empty")
    results = {name: tuple((total / (2 * tokens)).tolist()) for name, total in zip(errors, sums, strict=True)}
    for name, total in zip(errors, sums, strict=True):
        if not bool(total.isfinite().all()):
            raise QuantizeError(
                f"{name}: the gradient of the loss contains NaN or infinity", "calibrate from an earlier checkpoint"
            )
    return results
