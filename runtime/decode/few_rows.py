"""Builds decoding steps for few texts. These steps run four kinds of fused kernels:

- embedding lookups and rotary angles;
- a norm and the matrix products that follow it;
- a matrix product and its epilogue;
- attention, including the rotary embedding and the write to the cache.

torch.compile may fuse the remaining operations. For a quantized model, matrix products read the stored codes.
"""

from typing import Any

import torch
from torch import Tensor

from specc.compiler.build import decoding_files
from specc.compiler.kernels.gemm.rows import MOST_ROWS
from specc.compiler.ops.decoding.packed_codes import lanes_of, pack
from specc.runtime.decode.text import StepFunction
from specc.runtime.model.load import Loaded, sharing

FOLDER, PACKED = "decoding", "packed"  # subfolders of the generated code
RECOMPILED = 64  # the maximum number of shapes of caches and rows for which torch.compile compiles one function


def step_of(loaded: Loaded, rows: int, compiled: bool = False) -> StepFunction:
    """Returns a function that runs a decoding step of the model. A step appends one token to each text.

    For at most 64 texts on a GPU, the function uses kernels for few rows. Otherwise, the result is the result of
    `library_step`.

    Args:
        loaded: the model.
        rows: the number of texts.
        compiled: whether torch.compile compiles the function, separately for each shape of the cache.

    Returns:
        A function with the arguments of the program `decode` of the model. If the cache is paged, the function has the
        arguments of the program `step`.

    Raises:
        LoweringError: if no kernel can compute a node of the step.
    """
    if not loaded.target.arch or rows > MOST_ROWS or loaded.deployed:
        return library_step(loaded, rows, compiled)
    return _program(few_row_model(loaded), compiled)


def library_step(loaded: Loaded, rows: int, compiled: bool = False) -> StepFunction:
    """Returns a function that runs a decoding step with library calls for matrix products. The arguments and the result
    are as in `step_of`.
    """
    return _program(loaded.model, compiled)


def few_row_model(loaded: Loaded) -> Any:
    """Returns a module with a single program, which runs a decoding step with kernels for few rows.

    The module shares the parameters of the model. For a quantized model, the program reads the stored codes.
    """
    packed = loaded.stored is not None
    files = decoding_files(loaded.spec, loaded.target.name, packed)
    model = sharing(loaded, files, loaded.directory / (PACKED if packed else FOLDER))
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, _stored(loaded, name, buffer))
    return model


def _stored(loaded: Loaded, name: str, like: Tensor) -> Tensor:
    weight, _, suffix = name.rpartition("_")
    assert loaded.stored is not None
    array = torch.from_numpy(loaded.stored[weight][suffix].copy()).to(loaded.model.get_parameter(weight).device)
    return pack(array, like.shape[1] // lanes_of(array.shape[1])) if suffix == "codes" else array


def _program(model: Any, compiled: bool) -> StepFunction:
    step: StepFunction = model.step if hasattr(model, "step") else model.decode
    if not compiled:
        return step
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, RECOMPILED)
    # With this setting, Inductor generates a kernel for products of one row. The kernel is faster than the library.
    options: dict[str, Any] = {"coordinate_descent_tuning": True}
    result: StepFunction = torch.compile(step, fullgraph=True, dynamic=False, options=options)
    return result
