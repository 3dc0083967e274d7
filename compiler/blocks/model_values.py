"""Learned values that all blocks of a stack share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from specc.compiler.blocks.context import Shape, Shared, Tokens
from specc.compiler.blocks.wiring import IDS, Learned, add
from specc.compiler.ir.graph import Builder


@dataclass(frozen=True, slots=True)
class ModelValue(Shared):
    """The learned value `path` of `values`, with those of `values` that it reads."""

    path: str = ""
    values: Mapping[str, Learned] = field(default_factory=dict, compare=False)
    shape: Shape | None = None

    def lower(self, b: Builder, tokens: Tokens) -> tuple[str, ...]:
        assert self.shape is not None
        return (_added(b, self.path, self.values, tokens, replace(self.shape, layer=0)),)


def _added(b: Builder, path: str, values: Mapping[str, Learned], tokens: Tokens, shape: Shape) -> str:
    """Returns the value `path`, and adds it if it is read for the first time."""
    if b.path(path) in b.types:
        return b.path(path)
    wiring, value = values[path].reads, ""
    if wiring is not None:
        given = {IDS: tokens.ids, "x0": tokens.embedded}
        refs = {name: given.get(name) or _added(b, name, values, tokens, shape) for name in wiring.names.values()}
        read = {variable: (refs[name], name) for variable, name in wiring.names.items()}
        value = add(b, f"{path}.of", wiring.expr, read, path.replace(".", "_"), shape)
    return values[path].declare(b, path, shape, value)
