"""The context in which a block is lowered: the model's sizes, shared values, state, and the functions of the model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import output_refs
from specc.compiler.ir.types import COMPUTE, Dim, TensorType
from specc.compiler.programs.init import Init
from specc.compiler.programs.tables import Tables
from specc.compiler.strict import Path


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of the model that the checks and the lowering of a part can read.

    Attributes:
        dim: the number of features.
        tables: the functions and parameters of the model's programs.
        context: the context length, in tokens.
        vocab: the number of token ids.
        matrix_init: the initialization of matrices.
        output_init: the initialization of the matrices that write to the residual stream.
        cache_length: the number of positions that a cache stores.
        source: the number of features of the encoder's output; 0 without an encoder.
        layer: the index of the block being lowered, from 0.
        attention: the attention sizes, such as `heads`, that formulas of the block may read, by name.
        prefix: the number of tokens at the start of a sequence that may attend to each other.
        page: the number of positions per cache page; 0 if the cache has one row per text.
        coded: whether the cache holds 8-bit codes.
        causal: whether tokens attend only to themselves and earlier tokens. Tokens of the prefix are exempt.
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
    attention: tuple[tuple[str, int], ...] = ()
    prefix: int = 0
    page: int = 0
    coded: bool = False
    causal: bool = True

    @property
    def layers(self) -> int:
        """The number of blocks of the model."""
        return self.tables.layers

    @property
    def size(self) -> Callable[..., int]:
        """A function that returns a size as a named dim. Generated code refers to the dim by its name; see
        `Tables.size`."""
        return self.tables.size

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes that formulas may read."""
        return {"dim": self.dim, "context": self.context, "prefix": self.prefix, **dict(self.attention)}

    def of_width(self, width: Dim) -> "Shape":
        """Returns this shape with `dim` set to `width`."""
        assert isinstance(width, int)
        return replace(self, dim=width)

    def of_attention(self, sizes: Mapping[str, int]) -> "Shape":
        """Returns this shape with the attention sizes that formulas may read."""
        return replace(self, attention=tuple(sizes.items()))

    def activation(self, *dims: int | str) -> TensorType:
        return TensorType(dims, COMPUTE)


@dataclass(frozen=True, slots=True)
class Lowered:
    """The result of lowering a layer.

    Attributes:
        value: the output.
        state: the new state, by key.
        losses: the losses f32[] of the layer, by name.
        head_values: the values [B, T, G, C] that attention reads; empty without attention.
    """

    value: str
    state: Mapping[str, str] = field(default_factory=dict)
    losses: Mapping[str, str] = field(default_factory=dict)
    head_values: str = ""


@dataclass(frozen=True, slots=True)
class CallSite:
    """The call site of a part that calls functions.

    Attributes:
        at: the prefix of the paths at which the functions run.
        owner: the base name of the functions' class.
        place: the path of the part in the spec.
        phase: the name of the functions in this phase of training, if the last phase has other parts; otherwise empty.
    """

    at: str
    owner: str
    place: Path
    phase: str = ""


@dataclass(frozen=True, slots=True)
class LoweringContext:
    """The values that a part can read in addition to its input. A value is empty if the program does not have it.

    Attributes:
        ids: the tokens, i64[B, T].
        start: the number of tokens that precede `ids`, i64[], in a program that extends a sequence.
        positions: the positions of the input's tokens, i64[T].
        table: the pages of each text, i64[R, N], in a program with a paged cache.
        shared: values that are computed once for all layers, by name.
        cache: the state of this part, by key, in a program that extends a sequence.
        embedded: the input of the first block, [B, T, D].
        memory: the output of the encoder, [B, S, D], in an encoder-decoder.
        seen: the mask of source positions that hold tokens, bool[B, S].
        final: the last state of the encoder, by key.
        initial: the initial state of a recurrent part, by key. For a part with a `query_stage`, the state of that
            stage.
        values: the outputs of earlier parts, by title.
        training: whether to apply dropout.
        extends: whether the input continues a sequence whose state is in `cache`.
        site: the call site of a part that calls functions.
        weights: in training, the weights of the layers' auxiliary losses, f32[], by LAYER.LOSS.
        wire: in a block, a function that adds an expression over heads. Its arguments are the expression, the name of
            the node, values by name, and the number of heads.
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


@dataclass(frozen=True, slots=True)
class Shared:
    """A computation that runs once and whose outputs several layers read.

    Parts that declare equal `Shared` values use the same computation. Two `Shared` values with the same name must be
    equal.

    Attributes:
        name: the name of the computation.
        labels: the names of the outputs in generated code.
        positional: whether the outputs depend only on the positions of the tokens.
    """

    name: str
    labels: tuple[str, ...]
    positional: bool = False

    def state(self) -> Mapping[str, TensorType]:
        """Returns the types of the state that the computation stores between tokens, by key."""
        return {}

    def lower(self, b: Builder, context: LoweringContext) -> tuple[str, ...]:
        """Adds the computation to the scope of the whole model.

        Returns one value per label. In a program that extends a sequence, `context.cache` holds the previous state, and
        the new state follows the values.
        """
        raise TypeError(f"{type(self).__name__} must override `lower`")

    @property
    def refs(self) -> tuple[str, ...]:
        """The keys of the outputs in `LoweringContext.shared`: `name`, then `name:1`, and so on."""
        return output_refs(self.name, len(self.labels))
