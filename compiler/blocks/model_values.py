"""Learned values that all blocks of a stack share."""

from collections.abc import Mapping
from dataclasses import field

from specc.compiler.blocks.context import LoweringContext, Shape, Shared
from specc.compiler.blocks.wiring import IDS, Learned, add
from specc.compiler.ir.builder import Builder
from specc.compiler.records import record


@record
class ModelValue(Shared):
    """The learned value `path`, which may depend on other learned values in `values`."""

    path: str = ""
    prefix: str = ""
    values: Mapping[str, Learned] = field(default_factory=dict, compare=False)
    shape: Shape | None = None

    def lower(self, b: Builder, context: LoweringContext) -> tuple[str, ...]:
        assert self.shape is not None
        return (self._added(b, self.path, context, self.shape),)

    def _added(self, b: Builder, name: str, context: LoweringContext, shape: Shape) -> str:
        path = f"{self.prefix}{name}"
        if b.path(path) in b.types:
            return b.path(path)
        wiring, value = self.values[name].reads, ""
        if wiring is not None:
            inputs = {IDS: context.ids, "x0": context.embedded}
            refs = {
                other: inputs.get(other) or self._added(b, other, context, shape) for other in wiring.names.values()
            }
            read = {variable: (refs[other], other) for variable, other in wiring.names.items()}
            value = add(b, f"{path}.of", wiring.expr, read, path.replace(".", "_"), shape)
        return self.values[name].declare(b, path, shape, value)
