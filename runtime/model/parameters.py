"""Initializes the parameters of a module, assigns stored values to them, and places them on a device."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor, nn

from specc.runtime.errors import IntegrityError

# In-place initializers, by the name of the distribution in a spec. The float is a parameter of the distribution, such
# as the standard deviation.
DISTRIBUTIONS: Mapping[str, Callable[[Tensor, float, Generator], Any]] = {
    "normal": lambda tensor, value, generator: nn.init.normal_(tensor, 0.0, value, generator=generator),
    "uniform": lambda tensor, value, generator: nn.init.uniform_(tensor, -value, value, generator=generator),
    "orthogonal": lambda tensor, value, generator: [
        nn.init.orthogonal_(matrix, value, generator=generator)
        for matrix in (tensor if tensor.dim() == 3 else tensor.unsqueeze(0))
    ],
    "constant": lambda tensor, value, generator: nn.init.constant_(tensor, value),
}


def fill(model: nn.Module, initial: Mapping[str, tuple[str, float]], seed: int) -> None:
    """Fills every parameter with random f32 values.

    The random numbers of a parameter depend only on `seed` and the name of the parameter.

    Args:
        model: the model.
        initial: the initial distribution of each parameter, as returned by `initial_values`.
        seed: the seed of the random numbers.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            distribution, value = initial[name]
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            values = torch.empty(parameter.shape)
            DISTRIBUTIONS[distribution](values, value, generator)
            parameter.copy_(values)


def assign(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into the parameters with the same names. Raises IntegrityError if names or shapes differ."""
    parameters = dict(model.named_parameters())
    missing, extra = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
    if missing or extra:
        raise IntegrityError(
            f"parameters do not fit the model: {len(missing)} missing {missing[:3]}, {len(extra)} unknown {extra[:3]}",
            "the file belongs to another spec",
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                stored, expected = list(tensors[name].shape), list(parameter.shape)
                message = f"{name} is {stored} in the file but {expected} in the model"
                raise IntegrityError(message, "the file belongs to another spec")
            parameter.copy_(tensors[name])


def place(model: nn.Module, dtypes: Mapping[str, torch.dtype], device: torch.device) -> None:
    """Prepares a model for a device: converts each parameter to its dtype, moves all tensors, and sets eval mode.

    `dtypes` contains the dtype of each parameter, by name.
    """
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(device, dtypes[name])
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    model.eval()
