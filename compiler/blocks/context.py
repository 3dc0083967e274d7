"""The lowering context of a block: shape dims, shared values, state, and the functions of the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from specc.compiler.blocks.init import Init
from specc.compiler.ir.graph import Builder, Dim, Graph, Size, TensorType, output_refs
from specc.compiler.strict import Path


@dataclass
class SizeNames:
    """The names of sizes in generated code, each with its value and description: `D` is a number of features."""

    values: dict[str, tuple[int, str]] = field(default_factory=dict)

    def size(self, name: str, value: int, words: str, title: str) -> int:
        """Returns `value` as a dim called `name` in generated code.

        If another value has that name, the dim is called `TITLE_NAME`. If both names are taken, returns the plain
        `value`.

        Args:
            name: the preferred name, e.g. `D`.
            value: the size.
            words: the description of the size.
            title: the title of the part that declares the size.
        """
        for option in (name, f"{title}_{name}".upper()):
            if self.values.setdefault(option, (value, words))[0] == value:
                return Size(value, option)
        return value


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of the model that a block can read when it lowers.

    Attributes:
        dim: the number of features.
        layers: the number of blocks.
        context: the number of tokens of context.
        vocab: the number of token ids.
        dtype: the compute dtype.
        matrix_init: the initialization of matrices.
        output_init: the initialization of the matrices that write to the residual stream.
        kept: the number of positions that caches hold.
        source: the number of features of the encoder's output; 0 without an encoder.
        names: the names of sizes in generated code.
        layer: the index of the block that is lowered, from 0.
        values: the number of features of the values of the block's attention; None without attention.
    """

    dim: int
    layers: int
    context: int
    vocab: int
    dtype: str
    matrix_init: Init
    output_init: Init
    kept: Dim = "S"
    source: Dim = 0
    names: SizeNames = field(default_factory=SizeNames, compare=False, repr=False)
    layer: int = 0
    values: int | None = None

    def size(self, name: str, value: int, words: str, title: str = "") -> int:
        """Returns `value` as a dim called `name` in generated code, or `TITLE_NAME` if `name` is taken.

        Args:
            name: the preferred name, e.g. `D`.
            value: the size.
            words: the description of the size.
            title: the title of the part that declares the size; `name` if empty.
        """
        return self.names.size(name, value, words, title or name)

    def of_width(self, width: Dim) -> "Shape":
        """Returns this shape with `dim` set to `width`."""
        assert isinstance(width, int)
        return replace(self, dim=width)

    def activation(self, *dims: int | str) -> TensorType:
        return TensorType(dims, self.dtype)


@dataclass(frozen=True, slots=True)
class Lowered:
    """The result of lowering a layer: its output value, the new values of its state by key, and the losses, f32[], that
    it states, by name."""

    value: str
    state: Mapping[str, str] = field(default_factory=dict)
    losses: Mapping[str, str] = field(default_factory=dict)


class FunctionTable(Protocol):
    """A table of functions. `owners` maps each path at which a function runs to the class that the function
    belongs to."""

    owners: dict[str, str]

    def intern(self, b: Builder, names: Sequence[str], at: str, outputs: Mapping[str, str]) -> Graph:
        """Builds a function, or returns the equal function that the table already holds.

        Args:
            b: the builder of the function.
            names: candidate names, in order of preference. The function gets the first name that is free or that
                belongs to an equal function.
            at: the path prefix of the function's parameters.
            outputs: the output values by label.
        """


@dataclass(frozen=True, slots=True)
class CallSite:
    """The call site of a part that calls functions.

    Attributes:
        at: the prefix of the paths at which the functions run.
        owner: the base name of the functions' class.
        place: the path of the part in the spec.
        places: the spec paths of all nodes so far, by node-name prefix.
        functions: the table that interns the functions.
    """

    at: str
    owner: str
    place: Path
    places: Mapping[str, Path]
    functions: FunctionTable


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token inputs of a program.

    Attributes:
        ids: the token ids, i64[B, T].
        start: the number of tokens that precede `ids`, i64[]; empty unless the program extends a sequence.
        positions: the positions of the tokens, i64[T]; empty if the program has none.
        cache: the state after the preceding tokens, by key; empty unless the program extends a sequence.
        embedded: the input of the first block, [B, T, D]; empty before it is there.
    """

    ids: str
    start: str = ""
    positions: str = ""
    cache: Mapping[str, str] = field(default_factory=dict)
    embedded: str = ""


@dataclass(frozen=True, slots=True)
class LoweringContext:
    """The values that a part can read in addition to its input. A value that the program does not have is empty.

    Attributes:
        positions: the positions of the input's tokens, i64[T].
        shared: values computed once for all layers, by name.
        cache: the part's own state, by key, in a program that extends a sequence.
        ids: the tokens, i64[B, T].
        memory: the output of the encoder, [B, S, D], in an encoder-decoder.
        seen: the mask of source positions that hold tokens, bool[B, S].
        final: the last state of the encoder, by key.
        start: the initial state of a recurrent part, by key. For a part with a `query_stage`, the state of that stage.
        values: the outputs of earlier parts, by title.
        causal: whether each position attends only to itself and earlier positions.
        training: whether dropout applies.
        extends: whether the input continues a sequence whose state is in `cache`.
        site: the call site of a part that calls functions.
        weights: in training, the weights of the losses that layers state, f32[], by LAYER.LOSS.
        wire: adds an expression over heads, for a part of a block. The arguments are the expression, the name of the
            node, values by name, and the number of heads.
    """

    positions: str
    shared: Mapping[str, str]
    cache: Mapping[str, str]
    ids: str = ""
    memory: str = ""
    seen: str = ""
    final: Mapping[str, str] = field(default_factory=dict)
    start: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    causal: bool = True
    training: bool = False
    extends: bool = False
    site: "CallSite | None" = None
    weights: Mapping[str, str] = field(default_factory=dict)
    wire: Callable[[str, str, Mapping[str, str], int], str] | None = None


@dataclass(frozen=True, slots=True)
class Shared:
    """A computation that runs once for all layers that read its outputs.

    Parts that declare equal `Shared` values use the same computation. Two `Shared` values with the same name must be
    equal.

    Attributes:
        name: the name of the computation.
        labels: the names of its outputs in generated code.
        positional: true if it depends only on the positions of the tokens.
    """

    name: str
    labels: tuple[str, ...]
    positional: bool = False

    def state(self) -> Mapping[str, TensorType]:
        """Returns the types of the state that it stores between tokens, by key."""
        return {}

    def lower(self, b: Builder, tokens: Tokens) -> tuple[str, ...]:
        """Adds the computation to the scope of the whole model.

        Returns one value per label. In a program that extends a sequence, the new state follows; `tokens.cache` holds
        the previous state.
        """
        raise TypeError(f"{type(self).__name__} must override `lower`")

    @property
    def refs(self) -> tuple[str, ...]:
        """The keys of its outputs in `LoweringContext.shared`: `name`, then `name:1`, and so on."""
        return output_refs(self.name, len(self.labels))
