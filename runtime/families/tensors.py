"""The correspondence between parameters and the tensors of a file: names, and how tensors are split or joined."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the correspondence: parameters, and the tensors of a file that contain the same values.

    Attributes:
        parameters: the names of the parameters. `{i}` is the index of a block.
        tensors: the names of the tensors. `{i}` is the index of a block, and `{e}` is the index of an expert.
        split: a function that computes the parameters from the tensors.
        join: a function that computes the tensors from the parameters.
        dims: the row applies only if the first parameter has this number of dims. None for any number.
    """

    parameters: tuple[str, ...]
    tensors: tuple[str, ...]
    split: Callable[[Tensors], Tensors]
    join: Callable[[Tensors], Tensors]
    dims: int | None = None

    def named(self, rename: Callable[[str], str]) -> "Row":
        """Returns the row with `rename` applied to the names of parameters and tensors."""
        return replace(self, parameters=tuple(map(rename, self.parameters)), tensors=tuple(map(rename, self.tensors)))

    def shapes(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tensors. `shapes` contains the shapes of the parameters."""
        joined = self.join([torch.empty(shapes[name], device="meta") for name in self.parameters])
        return {name: tuple(tensor.shape) for name, tensor in zip(self.tensors, joined, strict=True)}


def _unchanged(tensors: Tensors) -> Tensors:
    return tensors


def same(parameter: str, tensor: str, dims: int | None = None) -> Row:
    """Returns the table row for a parameter that equals a tensor."""
    return Row((parameter,), (tensor,), _unchanged, _unchanged, dims)


def transposed(parameter: str, tensor: str) -> Row:
    """Returns the table row for a matrix that the file stores as [inputs, outputs]."""

    def turn(tensors: Tensors) -> Tensors:
        return [tensors[0].T]

    return Row((parameter,), (tensor,), turn, turn)


def joint_columns(parameters: Sequence[str], tensor: str) -> Row:
    """Returns the table row for matrices of equal shape that the file joins as [inputs, all outputs], or for their
    biases."""

    def split(tensors: Tensors) -> Tensors:
        return [part.T if part.ndim == 2 else part for part in tensors[0].chunk(len(parameters), -1)]

    def join(tensors: Tensors) -> Tensors:
        return [torch.cat([part.T if part.ndim == 2 else part for part in tensors], -1)]

    return Row(tuple(parameters), (tensor,), split, join)


def joint_rows(parameters: Sequence[str], tensor: str, sizes: Sequence[int]) -> Row:
    """Returns the table row for matrices that the file joins into one matrix. The joined matrix has `sizes[i]` rows for
    matrix i, in order."""

    def split(tensors: Tensors) -> Tensors:
        return [tensors[0][first:end] for first, end in pairwise(accumulate(sizes, initial=0))]

    def join(tensors: Tensors) -> Tensors:
        return [torch.cat(list(tensors))]

    return Row(tuple(parameters), (tensor,), split, join)


def joint_heads(parameters: Sequence[str], tensor: str, heads: int, sizes: Sequence[int]) -> Row:
    """Returns the table row for matrices, or biases, whose outputs are ordered by head in the file.

    Args:
        parameters: the names of the matrices.
        tensor: the name of the joint tensor. For each head, it has `sizes[i]` rows of matrix i, for all i in order.
        heads: the number of heads.
        sizes: the rows per head of each matrix.

    Returns:
        A row that splits the joint tensor into the matrices, and joins them.
    """

    def split(tensors: Tensors) -> Tensors:
        of_heads = tensors[0].reshape(heads, sum(sizes), *tensors[0].shape[1:])
        return [of_heads[:, first:end].flatten(0, 1) for first, end in pairwise(accumulate(sizes, initial=0))]

    def join(tensors: Tensors) -> Tensors:
        parts = [part.reshape(heads, size, *part.shape[1:]) for part, size in zip(tensors, sizes, strict=True)]
        return [torch.cat(parts, 1).flatten(0, 1)]

    return Row(tuple(parameters), (tensor,), split, join)


def experts(parameter: str, tensor: str) -> Row:
    """Returns the table row for a parameter that contains the matrices of all experts, [E, outputs, inputs]. The file
    has one tensor per expert."""

    def split(tensors: Tensors) -> Tensors:
        return [torch.stack(list(tensors))]

    def join(tensors: Tensors) -> Tensors:
        return tensors[0].unbind()

    return Row((parameter,), (tensor,), split, join, dims=3)


def with_biases(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Returns the table rows, and an additional row for the bias of each matrix whose tensor name ends in `weight`.
    Biases are never transposed."""

    def bias(row: Row) -> Row:
        parameters = tuple(f"{name}_bias" for name in row.parameters)
        tensors = tuple(f"{name.removesuffix('weight')}bias" for name in row.tensors)
        plain = len(parameters) == 1
        split, join = (_unchanged, _unchanged) if plain else (row.split, row.join)
        return Row(parameters, tensors, split, join)

    return (*rows, *map(bias, rows))


def expanded(table: Sequence[Row], shapes: Shapes, blocks: int) -> list[Row]:
    """Returns the table rows of a model. Their names contain the index of each block and expert.

    Args:
        table: the rows of the family. Rows whose first parameter the model lacks are left out.
        shapes: the shapes of the parameters of the model.
        blocks: the number of blocks.

    Raises:
        KeyError: if a parameter is in no row; the argument is its name.
    """
    rows = [row for template in table for row in _rows_of(template, shapes, blocks)]
    named = {name for row in rows for name in row.parameters}
    if missing := [name for name in shapes if name not in named]:
        raise KeyError(missing[0])
    return rows


def _rows_of(template: Row, shapes: Shapes, blocks: int) -> Iterator[Row]:
    for i in range(blocks) if "{i}" in template.parameters[0] else (0,):
        shape = shapes.get(template.parameters[0].replace("{i}", str(i)))
        if shape is None or template.dims not in (None, len(shape)):
            continue
        row = template.named(lambda name, i=i: name.replace("{i}", str(i)))  # type: ignore[misc]
        if "{e}" in row.tensors[0]:
            row = replace(row, tensors=tuple(row.tensors[0].replace("{e}", str(e)) for e in range(shape[0])))
        yield row
