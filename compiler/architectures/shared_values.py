"""The positions of a program's tokens, and the computations that parts of the program share."""

from dataclasses import dataclass, field, replace

from specc.compiler.architectures.blocks import Blocks
from specc.compiler.blocks.context import LoweringContext, Shape
from specc.compiler.blocks.parts import Part
from specc.compiler.ir.builder import Builder
from specc.compiler.ops.positions import Positions


@dataclass
class SharedValues:
    """The positions and the shared computations of one program. A computation is added when a part first reads the
    result.

    Attributes:
        refs: The graph values of `positions`, and of the computations that depend on positions only. The keys are the
            same as in `LoweringContext.shared`.
        state: The new state of the computations, by name and key.
    """

    refs: dict[str, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)

    def with_positions(self, b: Builder, context: LoweringContext) -> LoweringContext:
        if "positions" not in self.refs:
            self.refs["positions"] = b.add("positions", Positions(), tuple(filter(None, (context.ids, context.start))))
        return replace(context, positions=self.refs["positions"])

    def with_shared(self, b: Builder, part: Part | Blocks, shape: Shape, context: LoweringContext) -> LoweringContext:
        """Returns the context with the positions and the shared computations of a part. Adds each computation that no
        earlier part has added. In a program that continues a sequence, the previous state of a computation is an
        input.

        Args:
            b: The builder of the program.
            part: The part.
            shape: The sizes of the part.
            context: The values that the part can read.
        """
        computations = part.shared(shape)
        positional = any(value.positional for value in computations)
        if positional or "reads_positions" in part.traits or (context.extends and "in_place" in part.traits):
            context = self.with_positions(b, context)
        tokens = replace(context, positions=self.refs.get("positions", ""))
        separate: dict[str, str] = {}  # two parts may have one name for different values
        for value in computations:
            known = self.refs if value.positional else separate
            if value.name not in known:
                types = value.state() if context.extends else {}
                inputs = {key: f"cache.shared.{value.name}.{key}" for key in types}
                cache = {key: b.input(name, types[key]) for key, name in inputs.items()}
                refs = value.lower(b, replace(tokens, cache=cache))
                known |= zip(value.refs, refs, strict=False)
                self.state |= zip(inputs.values(), refs[len(value.refs) :], strict=True)
        return replace(tokens, shared={**self.refs, **separate})
