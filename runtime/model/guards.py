"""Checks the inputs of a loaded model against its vocabulary and context.

Without these checks, an invalid id could make a program read outside the embedding table, or end the process with a
CUDA error.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specc.compiler.ir.graph import Named
from specc.compiler.ir.types import TensorType
from specc.compiler.programs.programs import Programs

PLACES = ("starts", "table")  # inputs that do not contain token ids
STATE_PREFIXES = ("state.", "cache.")  # prefixes of the names of inputs that persist between decoding steps


def require_ids(name: str, ids: Tensor, vocabulary: int) -> None:
    """Raises ValueError if an element of `ids` is not in 0 .. `vocabulary` - 1. The message names the first such id.

    `name` is the name of the input in the message. The check synchronizes with the device of `ids`.
    """
    wrong = ((ids < 0) | (ids >= vocabulary)).nonzero()
    if len(wrong):
        place = wrong[0].tolist()
        raise ValueError(f"{name}{place} is {int(ids[tuple(place)])}; the vocabulary has ids 0 to {vocabulary - 1}")


def check_programs(model: nn.Module, programs: Programs, vocabulary: int, least: int = 1) -> None:
    """Adds input checks to every program of `model`, except training programs.

    A checked program raises ValueError if an input has the wrong shape, dtype or device, or contains an invalid id. The
    check of ids synchronizes with the GPU once per call. On a GPU, programs for a single token therefore do not check
    ids: these programs run at every decoding step.

    Args:
        model: the module, whose methods the function replaces by methods with checks.
        programs: the programs, with the types of their inputs.
        vocabulary: the number of ids.
        least: the minimum length of a new sequence, in tokens.
    """
    for graph in programs.programs:
        trains = {"train", *(phase.train for phase in programs.phases)}
        if graph.name not in trains and callable(getattr(model, graph.name, None)):
            inputs = tuple(entry for entry in graph.inputs if not entry[0].startswith(STATE_PREFIXES))
            setattr(model, graph.name, _checked(model, graph.name, inputs, vocabulary, programs.context, least))


def _checked(
    model: nn.Module, program: str, inputs: tuple[Named, ...], vocabulary: int, context: int | None, least: int
) -> Callable[..., Any]:
    """Returns a function that checks its inputs and then calls the method `program` of `model`.

    The function refers to the model only weakly, so that the model can be freed.
    """
    model_of = weakref.ref(model)
    names = tuple(name for name, _ in inputs)
    step = all(isinstance(dim, int) for _, type in inputs for dim in type.shape[1:])

    def run(*args: Any, **kwargs: Any) -> Any:
        live: Any = model_of()
        tensors = {**dict(zip(names, args, strict=False)), **kwargs}
        sizes: dict[str, int] = {}
        device = next((tensor.device for tensor in (*live.parameters(), *live.buffers())), None)
        for name, type in inputs:
            if name in tensors:  # a missing argument causes a TypeError in the call below
                _require(name, tensors[name], type, sizes, context, device)
                if type.shape and name not in PLACES and not (step and tensors[name].is_cuda):
                    require_ids(name, tensors[name], vocabulary)
        if sizes.get("T", least) < least and not int(tensors.get("start", 0)):
            raise ValueError(
                f"{names[0]} has {sizes['T']} tokens per row; a new sequence of this model needs at least {least}"
            )
        for state in (*args[len(names) :], *(value for name, value in kwargs.items() if name not in names)):
            if "B" in sizes:  # a paged cache has no batch dimension to compare
                _require_rows(state, names[0], sizes["B"])
        return getattr(Unchecked(live), program)(*args, **kwargs)

    return run


class Unchecked:
    """A view of a model whose programs run without the checks of `check_programs`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self._model), name).__get__(self._model)


def _require(
    name: str, value: Any, expected: TensorType, sizes: dict[str, int], context: int | None, device: torch.device | None
) -> None:
    """Raises ValueError unless `value` is an i64 tensor of the shape in `expected`, on `device`.

    Args:
        name: the name of the input, for messages.
        value: the value to check.
        expected: the expected type. Each dimension of its shape is an integer or a name.
        sizes: the sizes of the named dimensions in the inputs that are already checked. The function adds named
            dimensions that are new in this input.
        context: the maximum length of a sequence, in tokens; None for no limit. A scalar input is a position, which
            must be less than `context`.
        device: the expected device; None accepts any device.

    Raises:
        ValueError: if the type, dtype, shape or device differs, a dimension is 0, or a sequence is longer than
            `context`.
    """
    shape = f"torch.int64 [{', '.join(map(str, expected.shape))}]"
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {type(value).__name__}; it must be a tensor, {shape}")
    if value.dtype != torch.int64:
        raise ValueError(f"{name} is {value.dtype}; it must be {shape}")
    if value.dim() != len(expected.shape):
        raise ValueError(f"{name} has the shape {list(value.shape)}; it must be {shape}")
    if device is not None and value.device != device:
        raise ValueError(f'{name} is on {value.device}, and the model on {device}; use {name}.to("{device}")')
    if not expected.shape:
        if not value.is_cuda and context is not None and not 0 <= int(value) < context:
            raise ValueError(f"{name} is {int(value)}; the positions of the model are 0 to {context - 1}")
        return
    for i, (dim, size) in enumerate(zip(expected.shape, value.shape, strict=True)):
        known = sizes.setdefault(dim, size) if isinstance(dim, str) else dim
        if size != known:
            where = f", and {dim} is {known} in another input" if isinstance(dim, str) else ""
            raise ValueError(f"{name} has the shape {list(value.shape)}{where}; it must be {shape}")
        if size == 0:
            raise ValueError(f"{name} is empty: its shape is {list(value.shape)}; it must be {shape}")
        if i and context is not None and size > context:
            raise ValueError(f"{name} has {size} tokens per row; the model's context is {context}")


def _require_rows(state: Any, name: str, rows: int) -> None:
    groups = list(state.values()) if isinstance(state, dict) else state
    if not isinstance(groups, list) or not groups or not all(isinstance(group, tuple) for group in groups):
        raise ValueError("the state must be a result of encode or new_cache")
    for tensor in (tensor for group in groups for tensor in group):
        if tensor.dim() and tensor.shape[0] != rows:
            raise ValueError(f"the state has {tensor.shape[0]} rows, and {name} has {rows}")
