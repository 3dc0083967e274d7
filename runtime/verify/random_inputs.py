"""Random inputs for the types of a plan, with the sizes of a spec."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.int8.gemm import Int8Epilogue
from specc.compiler.ops.dropout import DRAW
from specc.compiler.ops.fp8 import STORAGE, begin_scales
from specc.compiler.ops.quantized import LARGEST
from specc.compiler.spec.spec import Spec
from specc.runtime.dtypes import DTYPES as DTYPES

Value = Tensor | float
SCALAR = 0.5  # the value of a scalar parameter, for which each block otherwise has its own number


def sizes_of(spec: Spec) -> Mapping[str, int]:
    """Returns the sizes of the symbolic dimensions for one micro-batch at the end of training."""
    rows, length = spec.train.micro_batch_rows(spec.model.window)
    return {"B": rows, "T": length, "S": length}


def random_tensor(
    type: TensorType, sizes: Mapping[str, int], generator: torch.Generator, below: Callable[[torch.dtype], int]
) -> Tensor:
    """Returns a random tensor of a type, on the device of `generator`.

    Floating-point values are normally distributed. A matrix without symbolic dimensions is a parameter. The values of a
    parameter are scaled so that the elements of its products have a magnitude of about 1.

    Args:
        type: the dtype and the shape.
        sizes: the sizes of the symbolic dimensions.
        generator: the random number generator.
        below: maps a dtype to the exclusive upper bound of random integers. The lower bound is 0.
    """
    shape = type.extents(sizes)
    dtype, known = DTYPES[type.dtype], all(isinstance(dim, int) for dim in type.shape)
    if type == DRAW:  # a key, followed by positions and lengths; a length of 0 would be invalid
        draw = torch.randint(1, 2**16, shape, generator=generator, device=generator.device)
        draw[0] = torch.randint(2**62, (), generator=generator, device=generator.device)
        return draw
    if type.storage == STORAGE:
        state = torch.empty(shape, device=generator.device)
        begin_scales(state)
        return state
    if not dtype.is_floating_point:
        return torch.randint(below(dtype), shape, generator=generator, device=generator.device).to(dtype)
    values = torch.randn(shape, generator=generator, device=generator.device)
    return (values.mul_(shape[-1] ** -0.5) if known and len(shape) > 1 else values).to(dtype)


class Operands:
    """A source of random inputs for nodes of a plan.

    Symbolic dimensions have the sizes `sizes`, or the sizes of the spec if `sizes` is None. Integers are token ids.
    """

    def __init__(self, spec: Spec, device: torch.device, seed: int = 0, sizes: Mapping[str, int] | None = None) -> None:
        self._sizes, self._vocabulary = sizes or sizes_of(spec), spec.model.vocabulary
        self._generator = torch.Generator(device).manual_seed(seed)

    def tensor(self, type: TensorType) -> Tensor:
        return random_tensor(type, self._sizes, self._generator, self._below)

    def _below(self, dtype: torch.dtype) -> int:
        return 2 if dtype == torch.bool else min(self._vocabulary, torch.iinfo(dtype).max)

    def of(self, refs: Sequence[str], types: Sequence[TensorType]) -> list[Value]:
        """Returns a random value for each name in `refs`.

        A name refers to a value of the plan. If a name occurs twice, both results are the same object. The value of a
        scalar parameter of a block is a Python number.
        """
        values: dict[str, Value] = {}
        for ref, type in zip(refs, types, strict=True):
            if ref not in values:
                values[ref] = SCALAR if ref.startswith("$") else self.tensor(type)
        return [values[ref] for ref in refs]


def int8_operands(epilogue: Int8Epilogue, m: int, device: torch.device) -> list[Tensor]:
    """Returns random operands of an int8 product: x i8 [M, K], w i8 [N, K], offset i32 [N], and the operands of the
    epilogue.

    The epilogue is the computation that follows the integer sums. Its first operand of shape [N] is a scale, which
    makes the scaled sums about 1. If the outputs are int8 codes, the last operand of shape [N] makes the codes cover
    their whole range.
    """
    generator = torch.Generator(device).manual_seed(m)

    def codes(*shape: int) -> Tensor:
        return torch.randint(-LARGEST, LARGEST + 1, shape, generator=generator, device=device, dtype=torch.int8)

    offset = torch.randint(-99, 100, (epilogue.n,), generator=generator, device=device, dtype=torch.int32)
    operands = [codes(m, epilogue.k), codes(epilogue.n, epilogue.k), offset]
    for value in epilogue.operands:
        shape = (epilogue.n,) if value.column else (m, epilogue.n)
        numbers = torch.randn(shape, generator=generator, device=device)
        operands.append(numbers.to(DTYPES[value.type.dtype]))
    columns = [i for i, value in enumerate(epilogue.operands, 3) if value.column]
    operands[columns[0]] = operands[columns[0]] / (LARGEST**2 * epilogue.k**0.5)
    if epilogue.codes and len(columns) > 1:
        operands[columns[-1]] = operands[columns[-1]] * LARGEST
    return operands
