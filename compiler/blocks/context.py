"""The context in which a block is lowered: the model's sizes, shared values, state, and the functions of the model."""

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import NamedTuple

from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import output_refs
from specc.compiler.ir.types import COMPUTE, Dim, TensorType
from specc.compiler.programs.init import Init
from specc.compiler.programs.tables import Tables
from specc.compiler.records import record
from specc.compiler.strict import Path


@record
class Shape:
    """The sizes and settings of a model, for the checks and the lowering of a part.

    Attributes:
        dim: The number of features.
        tables: The functions and parameters of the model's programs.
        context: The context length, in tokens.
        vocab: The number of token ids.
        matrix_init: The initialization of matrices.
        output_init: The initialization of the matrices that write to the residual stream.
        cache_length: The number of positions that a cache stores.
        source: The number of features of the encoder's output. 0 without an encoder.
        layer: The index of the block being checked, from 0. Blocks are lowered without this index, so that equal blocks
            are lowered once.
        blocks: The number of blocks of the stack that contains the part. 0 outside of stacks.
        attention: The attention sizes, such as `heads`, that formulas of the block may read.
        prefix: The number of tokens at the start of a sequence that may attend to each other.
        page: The number of positions per cache page. 0 if the cache has one row per text.
        coded: Whether the cache holds 8-bit codes.
        causal: Whether tokens attend only to themselves and earlier tokens. Tokens of the prefix are exempt.
    """

    dim: int
    tables: Tables = field(compare=False, repr=False)
    context: int
    vocab: int
    matrix_init: Init
    output_init: Init
    cache_length: Dim = "S"
    source: Dim = 0
    layer: int = 0
    blocks: int = 0
    attention: tuple[tuple[str, int], ...] = ()
    prefix: int = 0
    page: int = 0
    coded: bool = False
    causal: bool = True

    @property
    def layers(self) -> int:
        """The value of `layers` in formulas. Inside a stack, the value is the number of blocks of the stack. Outside of
        stacks, the value is the number of blocks of the model."""
        return self.blocks or self.tables.layers

    @property
    def size(self) -> Callable[..., int]:
        """A function that returns a size as a named dim. Generated code refers to the dim by name; see
        `Tables.size`."""
        return self.tables.size

    @property
    def sizes(self) -> Mapping[str, int]:
        return {"dim": self.dim, "context": self.context, "prefix": self.prefix, **dict(self.attention)}

    def of_width(self, width: Dim) -> "Shape":
        assert isinstance(width, int)
        return replace(self, dim=width)

    def of_attention(self, sizes: Mapping[str, int]) -> "Shape":
        return replace(self, attention=tuple(sizes.items()))

    def activation(self, *dims: int | str) -> TensorType:
        return TensorType(dims, COMPUTE)


@record
class Lowered:
    """The result of lowering a layer.

    Attributes:
        value: the output.
        state: the new state, by key.
        losses: the losses f32[] of the layer, by name.
        head_values: the values `v` [B, T, G, C] of attention. Empty without attention.
    """

    value: str
    state: Mapping[str, str] = field(default_factory=dict)
    losses: Mapping[str, str] = field(default_factory=dict)
    head_values: str = ""


class CallSite(NamedTuple):
    """The call site of a part that calls functions.

    Attributes:
        at: The prefix of the paths of the calls.
        owner: The base name of the generated class that contains the functions.
        place: The path of the part in the spec.
        phase: The method name of the functions in this training phase. Empty if the last phase of training has the same
            functions.
    """

    at: str
    owner: str
    place: Path
    phase: str = ""


@record
class LoweringContext:
    """The values that a part can read besides its input. A value is empty if the program lacks the value.

    Attributes:
        ids: The tokens, i64[B, T].
        start: The number of tokens before `ids`, i64[], in a program that continues a sequence.
        positions: The positions of the input's tokens, i64[T].
        table: The pages of each text, i64[R, N], in a program with a paged cache.
        shared: Values that are computed once for all layers, by name.
        cache: The state of this part, by key, in a program that continues a sequence.
        embedded: The input of the first block, [B, T, D].
        memory: The output of the encoder, [B, S, D], in an encoder-decoder.
        seen: The mask of source positions that hold tokens, bool[B, S].
        final: The last state of the encoder, by key.
        initial: The initial state of a recurrent part, by key. For a part with a `query_stage`, `initial` is the state
            of the query stage.
        values: The outputs of earlier parts, by title.
        training: Whether to apply dropout.
        extends: Whether the input continues a sequence whose state is in `cache`.
        site: The call site of a part that calls functions.
        weights: In training, the weights of the layers' auxiliary losses, f32[]. A key has the form LAYER.LOSS.
        wire: In a block, a function that adds an expression of head values. Its arguments are the expression, the name
            of the node, values by name, and the number of heads.
    """

    ids: str = ""
    start: str = ""
    positions: str = ""
    table: str = ""
    shared: Mapping[str, str] = field(default_factory=dict)
    cache: Mapping[str, str] = field(default_factory=dict)
    embedded: str = ""
    memory: str = ""
    seen: str = ""
    final: Mapping[str, str] = field(default_factory=dict)
    initial: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    training: bool = False
    extends: bool = False
    site: CallSite | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    wire: Callable[[str, str, Mapping[str, str], int], str] | None = None


@record
class Shared:
    """A computation that runs once, for several layers.

    Parts that declare equal `Shared` values share one computation. Two `Shared` values with the same name are equal if
    one part declares both, or if both are positional.

    Attributes:
        name: The name of the computation.
        labels: The names of the outputs in generated code.
        positional: Whether the outputs depend only on the positions of the tokens.
    """

    name: str
    labels: tuple[str, ...]
    positional: bool = False

    def state(self) -> Mapping[str, TensorType]:
        """Returns the types of the computation's decoding state, by key."""
        return {}

    def lower(self, b: Builder, context: LoweringContext) -> tuple[str, ...]:
        """Adds the computation to the scope of the whole model. Returns one value per label.

        In a program that continues a sequence, `context.cache` holds the previous state. The result then has the new
        state after the values of the labels.
        """
        raise TypeError(f"{type(self).__name__} must override `lower`")

    @property
    def refs(self) -> tuple[str, ...]:
        """The keys of the outputs in `LoweringContext.shared`: `name`, then `name:1`, and so on."""
        return output_refs(self.name, len(self.labels))
