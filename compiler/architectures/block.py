"""One block: its norm, its layers, and the expressions between them."""

import operator
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from specc.compiler import blocks
from specc.compiler.architectures.circuit import STREAM, Circuit, Streams
from specc.compiler.blocks.context import Shape
from specc.compiler.blocks.norm import Rms
from specc.compiler.blocks.parts import Layer, Norm
from specc.compiler.blocks.wiring import Expressions, Learned, number_problem
from specc.compiler.catalog import Kinds
from specc.compiler.ir.types import TensorType
from specc.compiler.strict import LearnedName, Problem, StrictModel, later

if TYPE_CHECKING:
    AnyLayer = Layer
    AnyNorm = Norm
else:
    AnyLayer, AnyNorm = Kinds(blocks, Layer), Kinds(blocks, Norm)


NO_LAYERS = "a block needs a layer, for example `- {kind: mlp, ratio: 4, act: gelu(x)}`"


class Block(StrictModel):
    """One block: its layers in order, with norms.

    A run is one execution of a block. Runs are counted from 0. Expressions can read the residual stream `x`, `x0` (the
    input of the first block), `output(k)` (the stream after run k), learned values, `layer` (the index of the block)
    and `layers` (the number of blocks of this stack). With several residual streams, `read` and `write` have one
    expression per stream, by name. Expressions read streams by these names.

    Attributes:
        norm: the norms of the block, before each layer or in other places. null for no norms.
        learn: learned values, by name.
        read: an expression for the residual stream at the start of the block. By default, the stream is unchanged.
        write: an expression for the residual stream at the end of the block. The name of each layer stands for the
            layer's output. By default, each layer writes to the stream in turn.
        layers: the layers of a block.
    """

    norm: AnyNorm | None = Rms(kind="rms")
    learn: dict[LearnedName, Learned] = Field({}, exclude_if=operator.not_)
    read: Expressions | None = later(None)
    write: Expressions | None = later(None)
    layers: Annotated[tuple[AnyLayer, ...], Field(max_length=64)]

    @cached_property
    def circuit(self) -> Circuit:
        return Circuit(self.learn, self.read, self.layers, self.write)

    def reads_value(self, name: str) -> bool:
        return name in self.circuit.reads

    def state(self, shape: Shape) -> Mapping[str, TensorType]:
        """Returns the types of the block's decoding state, such as caches, by layer and key."""
        return {f"{layer.title}.{key}": type for layer in self.layers for key, type in layer.state(shape).items()}

    def sizes(self, dim: int, name: str = "") -> Mapping[str, int]:
        """Returns the attention sizes, such as `heads`, that the shape of the learned value `name` may use. For a value
        of an attention layer, these are the sizes of this layer. For any other value, these are the sizes of the first
        attention layer of the block. The result is empty if the block has no attention layer. `dim` is the number of
        features of the model."""
        layers = sorted(self.layers, key=lambda layer: not name.startswith(f"{layer.title}."))
        return next(filter(None, (layer.sizes(dim) for layer in layers)), {})

    def shape_of(self, shape: Shape, path: str = "") -> Shape:
        """Returns a copy of `shape`, the sizes of the model, with the attention sizes that the learned value `path` may
        use. `path` is LAYER.NAME for a learned value of a layer (see `sizes`)."""
        return shape.of_attention(self.sizes(shape.dim, path))

    def problems_of(self, shape: Shape, streams: Streams, known: tuple[str, ...]) -> Iterator[Problem]:
        """Yields the problems of the block in a model of this shape. Paths are relative to the block.

        Args:
            shape: The sizes of the model, and the index of the block.
            streams: The names of the streams before the block.
            known: The names of additional values that expressions of the block may read.
        """
        layer, layers = shape.layer, shape.layers
        if self.norm is not None:
            yield from number_problem(self.norm.scale, ("norm", "scale"), layer, layers)
            if "stream" in self.norm.places and len(self.circuit.streams_after((STREAM,))) > 1:
                message = "a norm with the place `stream` needs a single residual stream, but the block writes several"
                yield Problem(("norm", "places"), "S285", message, "use `before` or `after`")
        if not self.layers:
            yield Problem(("layers",), "S254", f"block {layer} has no layers", NO_LAYERS)
        for i, part in enumerate(self.layers):
            yield from (problem.under("layers", i) for problem in part.problems_in(shape))
            if "reads_source" in part.traits and not shape.source:
                message = f"{part.title} reads an encoder, but a model of kind decoder has none"
                yield Problem(("layers", i), "S230", message, "use `kind: encoder_decoder`, or `of: self`")
        yield from self.circuit.problems(streams, known, layer, layers)
        for name, learned in self.circuit.learned.items():
            yield from learned.size_problem(self.shape_of(shape, name).sizes, *self.circuit.place(name))
