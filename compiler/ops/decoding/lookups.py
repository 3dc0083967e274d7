"""Rows of several tables as one op: embeddings and rotary angles of the new tokens of a decoding step."""

from collections.abc import Sequence
from typing import Any, ClassVar

from specc.compiler.ir.op import Op
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType
from specc.compiler.ops.positions import RopeRows
from specc.compiler.ops.shape import Embedding
from specc.compiler.records import record


@record
class Lookups(Op):
    """Reads rows of tables, as `Embedding` and `RopeRows` do. The inputs are indices and a table for each embedding,
    then positions i64[T] for each table of angles. The outputs are the rows of each embedding, then cos and sin for
    each table of angles.

    Attributes:
        tables: The number of embeddings.
        ropes: The settings of each table of angles: the number of rotated channels, the base, and the number of
            positions.
        labels: The names of the outputs in generated code.
    """

    name: ClassVar[str] = "lookups"
    inline: ClassVar[bool] = False
    planned: ClassVar[bool] = True
    everywhere: ClassVar[bool] = True
    flops_per_output: ClassVar[int] = 0
    tables: int
    ropes: tuple[tuple[int, float, int], ...]
    labels: tuple[str, ...]

    @property
    def output_labels(self) -> tuple[str, ...]:
        return self.labels

    @property
    def arity(self) -> int:
        return 2 * self.tables + len(self.ropes)

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        widths = [f"d{table.width}" for table in inputs[1 : 2 * self.tables : 2]]
        return self.name, "_".join((*widths, *(f"r{dims // 2}" for dims, _, _ in self.ropes)))

    def site_type(self, type: TensorType) -> TensorType:
        return type

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        rows = (table.shape[0] for table in inputs[1 : 2 * self.tables : 2])
        return min(*(int(count) for count in rows if isinstance(count, int)), *(rope[2] for rope in self.ropes), 2**31)

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        pairs, positions = self._read(inputs)
        rows = [Embedding().infer(pair)[0] for pair in pairs]
        angles = [
            angle for rope, at in zip(self.ropes, positions, strict=True) for angle in RopeRows(*rope).infer((at,))
        ]
        return (*rows, *angles)

    def moved(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return 2 * sum(type.bytes(sizes) for type in outputs)

    def reference(self, *inputs: Tensor) -> Tensors:
        pairs, positions = self._read(inputs)
        rows = [table[ids] for ids, table in pairs]
        angles: list[Any] = [RopeRows(*rope).reference(at) for rope, at in zip(self.ropes, positions, strict=True)]
        return (*rows, *(value for pair in angles for value in pair))

    def _read(self, inputs: Sequence[Any]) -> tuple[list[tuple[Any, Any]], Sequence[Any]]:
        """Splits the inputs of the op. Returns a list with a pair (indices, table) for each embedding, and a sequence
        with the positions to look up in each table of angles."""
        count = 2 * self.tables
        return list(zip(inputs[:count:2], inputs[1:count:2], strict=True)), inputs[count:]
