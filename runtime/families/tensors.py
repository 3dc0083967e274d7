"""Maps parameters of specc to tensors in a file: their names, and the ways in which tensors are split or joined."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """Maps parameters to the tensors of a file that contain the same values.

    Attributes:
        parameters: the names of the parameters. `{i}` is the index of a block.
        tensors: the names of the tensors. `{i}` is the index of a block, and `{e}` is the index of an expert.
        split: computes the parameters from the tensors.
        join: computes the tensors from the parameters.
        dims: the number of dimensions of the first parameter. The mapping applies only to parameters with this number
            of dimensions. None for any number.
    """

    parameters: tuple[str, ...]
    tensors: tuple[str, ...]
    split: Callable[[Tensors], Tensors]
    join: Callable[[Tensors], Tensors]
    dims: int | None = None

    def named(self, rename: Callable[[str], str]) -> "TensorMapping":
        return replace(self, parameters=tuple(map(rename, self.parameters)), tensors=tuple(map(rename, self.tensors)))

    def shapes(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        joined = self.join([torch.empty(shapes[name], device="meta") for name in self.parameters])
        return {name: tuple(tensor.shape) for name, tensor in zip(self.tensors, joined, strict=True)}


def _unchanged(tensors: Tensors) -> Tensors:
    return tensors


def same(parameter: str, tensor: str, dims: int | None = None) -> TensorMapping:
    """Returns the mapping for a parameter that the file stores unchanged.

    The mapping applies only to parameters with `dims` dimensions; None for any number.
    """
    return TensorMapping((parameter,), (tensor,), _unchanged, _unchanged, dims)


def transposed(parameter: str, tensor: str) -> TensorMapping:
    """Returns the mapping for a matrix that the file stores transposed, as [inputs, outputs]."""

    def turn(tensors: Tensors) -> Tensors:
        return [tensors[0].T]

    return TensorMapping((parameter,), (tensor,), turn, turn)


def joint_columns(parameters: Sequence[str], tensor: str) -> TensorMapping:
    """Returns the mapping for matrices of equal shape that the file joins into one tensor [inputs, all outputs].

    The mapping also applies to biases of equal length. The file joins them into one tensor [all outputs].
    """

    def split(tensors: Tensors) -> Tensors:
        return [part.T if part.ndim == 2 else part for part in tensors[0].chunk(len(parameters), -1)]

    def join(tensors: Tensors) -> Tensors:
        return [torch.cat([part.T if part.ndim == 2 else part for part in tensors], -1)]

    return TensorMapping(tuple(parameters), (tensor,), split, join)


def joint_rows(parameters: Sequence[str], tensor: str, sizes: Sequence[int]) -> TensorMapping:
    """Returns the mapping for matrices that the file joins into one matrix, with `sizes[i]` rows for matrix i."""

    def split(tensors: Tensors) -> Tensors:
        return [tensors[0][first:end] for first, end in pairwise(accumulate(sizes, initial=0))]

    def join(tensors: Tensors) -> Tensors:
        return [torch.cat(list(tensors))]

    return TensorMapping(tuple(parameters), (tensor,), split, join)


def joint_heads(parameters: Sequence[str], tensor: str, heads: int, sizes: Sequence[int]) -> TensorMapping:
    """Returns the mapping for matrices or biases that the file joins head by head.

    Args:
        parameters: the names of the matrices or biases.
        tensor: the name of the joint tensor. The tensor contains the rows of the first head, then the rows of the
            second head, and so on. The rows of a head begin with `sizes[0]` rows of the first matrix, followed by
            `sizes[1]` rows of the second matrix.
        heads: the number of heads.
        sizes: the number of rows per head, for each matrix.
    """

    def split(tensors: Tensors) -> Tensors:
        of_heads = tensors[0].reshape(heads, sum(sizes), *tensors[0].shape[1:])
        return [of_heads[:, first:end].flatten(0, 1) for first, end in pairwise(accumulate(sizes, initial=0))]

    def join(tensors: Tensors) -> Tensors:
        parts = [part.reshape(heads, size, *part.shape[1:]) for part, size in zip(tensors, sizes, strict=True)]
        return [torch.cat(parts, 1).flatten(0, 1)]

    return TensorMapping(tuple(parameters), (tensor,), split, join)


def experts(parameter: str, tensor: str) -> TensorMapping:
    """Returns the mapping for a parameter [experts, outputs, inputs] that the file stores as one tensor per expert.

    `tensor` contains `{e}` in place of the index of the expert.
    """

    def split(tensors: Tensors) -> Tensors:
        return [torch.stack(list(tensors))]

    def join(tensors: Tensors) -> Tensors:
        return tensors[0].unbind()

    return TensorMapping((parameter,), (tensor,), split, join, dims=3)


def with_biases(rows: Sequence[TensorMapping]) -> tuple[TensorMapping, ...]:
    """Returns the mappings `rows` of weight matrices, followed by the mappings of the biases of these matrices."""

    def bias(row: TensorMapping) -> TensorMapping:
        parameters = tuple(f"{name}_bias" for name in row.parameters)
        tensors = tuple(f"{name.removesuffix('weight')}bias" for name in row.tensors)
        plain = len(parameters) == 1
        split, join = (_unchanged, _unchanged) if plain else (row.split, row.join)
        return TensorMapping(parameters, tensors, split, join)

    return (*rows, *map(bias, rows))


def expanded(table: Sequence[TensorMapping], shapes: Shapes, blocks: int) -> list[TensorMapping]:
    """Returns the mappings of a model. In all names, indices replace `{i}` and `{e}`.

    Args:
        table: the mappings of the family. The result omits mappings for parameters that the model lacks.
        shapes: the shapes of the parameters of the model.
        blocks: the number of blocks.

    Raises:
        KeyError: if no mapping contains a parameter. The argument of the error is the name of the parameter.
    """
    rows = [row for template in table for row in _rows_of(template, shapes, blocks)]
    named = {name for row in rows for name in row.parameters}
    if missing := [name for name in shapes if name not in named]:
        raise KeyError(missing[0])
    return rows


def _rows_of(template: TensorMapping, shapes: Shapes, blocks: int) -> Iterator[TensorMapping]:
    for i in range(blocks) if "{i}" in template.parameters[0] else (0,):
        shape = shapes.get(template.parameters[0].replace("{i}", str(i)))
        if shape is None or template.dims not in (None, len(shape)):
            continue
        row = template.named(lambda name, i=i: name.replace("{i}", str(i)))  # type: ignore[misc]
        if "{e}" in row.tensors[0]:
            row = replace(row, tensors=tuple(row.tensors[0].replace("{e}", str(e)) for e in range(shape[0])))
        yield row
