"""From the stored arrays of int8 products to the tensors that their kernels read: padded, scaled, checked."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specc.compiler.ops.quantized import padded
from specc.compiler.passes.quantize_products import Source
from specc.compiler.quant.int8 import steps
from specc.runtime.errors import IntegrityError
from specc.runtime.load import Loaded
from specc.runtime.quantize.tensors import Array, QuantizedModel


def constants(sources: Sequence[Source], stored: QuantizedModel) -> dict[str, Tensor]:
    """What the deployed programs keep beside their parameters, by name, on the CPU: of each product's weight [N, K] the
    `codes` i8, the `offset` i32 [N] (its bias, zeros without one) and the `scale` f32 [N] of the sums, N and K padded
    with zeros as the product takes them; and, once an input, the `inverse` f32 [K] of its scale.

    Raises IntegrityError, naming the product, where arrays do not fit the product or each other.
    """
    made: dict[str, Tensor] = {}
    for source in sources:
        n, k = stored.shapes[source.weight]
        weight = stored.tensors[source.weight]
        _check_weight(source, weight, n, k)
        shared = stored.tensors[source.leader]["input_scale"]
        if weight["input_scale"].tobytes() != shared.tobytes():
            found = f"{weight['input_scale'][0]:.6g} and {shared[0]:.6g}"
            raise IntegrityError(
                f"{source.node}: {source.weight} and {source.leader} share an input, but scale it by {found}"
            )
        scale = steps(weight)
        codes = torch.zeros(padded(n), padded(k), dtype=torch.int8)
        codes[:n, :k] = torch.from_numpy(weight["codes"].copy())
        offset = torch.zeros(padded(n), dtype=torch.int32)
        if source.bias:
            bias = stored.tensors[source.bias]
            _check_bias(source, bias, scale)
            offset[:n] = torch.from_numpy(bias["codes"].copy())
        worth = torch.ones(padded(n))
        worth[:n] = scale
        made |= {f"{source.weight}_{name}": tensor for name, tensor in (("codes", codes), ("offset", offset))}
        made[f"{source.weight}_scale"] = worth
        inverse = 1.0 / torch.from_numpy(shared.copy())
        made[f"{source.leader}_inverse"] = inverse.expand(stored.shapes[source.leader][1]).contiguous()
    return made


def fill(loaded: Loaded, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into the constants of a module. Raises IntegrityError where names, shapes or dtypes differ."""
    found = dict(loaded.model.named_buffers())
    if odd := sorted(found.keys() ^ tensors.keys()):
        raise IntegrityError(f"{len(odd)} constants have a place or a value, not both: {', '.join(odd[:5])}")
    for name, buffer in found.items():
        have, want = tensors[name], (buffer.dtype, buffer.shape)
        if (have.dtype, have.shape) != want:
            shown = f"{have.dtype} {list(have.shape)} in the file but {buffer.dtype} {list(buffer.shape)}"
            raise IntegrityError(f"{name} is {shown} in the model", "the file is of another spec")
        buffer.copy_(have)


def _check_weight(source: Source, weight: Mapping[str, Array], n: int, k: int) -> None:
    codes, scale, node = weight["codes"], weight["scale"], source.node
    if codes.dtype != "int8":
        raise IntegrityError(f"{node}: the weight is stored as {codes.dtype}, and its product reads int8")
    if codes.ndim != 2 or codes.shape[1] != k:
        shown = codes.shape[1] if codes.ndim == 2 else list(codes.shape)
        raise IntegrityError(f"{node}: K is {shown} in the weight but its input has {k} features ({source.maker})")
    if codes.shape[0] != n:
        raise IntegrityError(f"{node}: N is {codes.shape[0]} in the weight, and the model has {n}")
    if scale.shape != (n,):
        raise IntegrityError(f"{node}: N is {n} in the weight, and its scales are {list(scale.shape)}")


def _check_bias(source: Source, bias: Mapping[str, Array], scale: Tensor) -> None:
    codes = bias["codes"]
    if codes.dtype != "int32":
        raise IntegrityError(f"{source.node}: the bias is stored as {codes.dtype}, and its sums are int32")
    if codes.shape != tuple(scale.shape):
        raise IntegrityError(f"{source.node}: N is {len(scale)} in the weight but its bias has {codes.size} numbers")
    if bias["scale"].tobytes() != scale.numpy().tobytes():
        message = f"{source.node}: {source.bias} was made for other scales than those of {source.weight}"
        raise IntegrityError(message, "quantize the run again")
