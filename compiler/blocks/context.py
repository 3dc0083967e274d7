"""The context in which a block lowers: sizes, shared values, state, and the functions of the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from specc.compiler.blocks.init import Init
from specc.compiler.ir.graph import Builder, Dim, Graph, Size, TensorType, output_refs
from specc.compiler.strict import Path


@dataclass
class SizeNames:
    """The names that code has for sizes, each with what it is: `D` is a number of features."""

    values: dict[str, tuple[int, str]] = field(default_factory=dict)

    def size(self, name: str, value: int, words: str, title: str) -> int:
        """`value` under `name`, or behind the `title` of its part where another size is called so; without a name where
        both are taken."""
        for option in (name, f"{title}_{name}".upper()):
            if self.values.setdefault(option, (value, words))[0] == value:
                return Size(value, option)
        return value


@dataclass(frozen=True, slots=True)
class Shape:
    """What a block may know of the model around it: features, layers, tokens of context, vocabulary, compute dtype, how
    many positions are kept between tokens, and the features of an encoder. `names` are those of sizes in code."""

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

    def size(self, name: str, value: int, words: str, title: str = "") -> int:
        """`value` with a name for code; `words` say what it is."""
        return self.names.size(name, value, words, title or name)

    def of_width(self, width: Dim) -> "Shape":
        """The same around a value of `width` features."""
        assert isinstance(width, int)
        return replace(self, dim=width)

    def activation(self, *dims: int | str) -> TensorType:
        return TensorType(dims, self.dtype)


@dataclass(frozen=True, slots=True)
class Lowered:
    """The value that a layer made, and the new values of the state that it keeps between tokens."""

    value: str
    state: Mapping[str, str] = field(default_factory=dict)


class FunctionTable(Protocol):
    """Where functions are kept. `owners` are the classes of those kept so far, by the place where they run."""

    owners: dict[str, str]

    def intern(self, b: Builder, names: Sequence[str], at: str, outputs: Mapping[str, str]) -> Graph:
        """The built function under the first free one of `names`, or the equal one that exists; its parameters are
        those under `at`."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where a part that is made of functions stands: their places start with `at`, their class is called after
    `owner`, and the spec states the part at `place`. `places` are those of all nodes so far."""

    at: str
    owner: str
    place: Path
    places: Mapping[str, Path]
    functions: FunctionTable


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids i64[B, T] that a program reads. In a program that goes on after others: how many those are, `start`
    (i64[]), their `positions`, and the state that was kept of them, `cache`; else these are empty."""

    ids: str
    start: str = ""
    positions: str = ""
    cache: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoweringContext:
    """The values that a part can read in addition to its input. A value that a program does not have is empty.

    Attributes:
        positions: the positions of the input's tokens, i64[T].
        shared: values computed once for all layers, by name.
        cache: the part's own state, by key, in a program that extends a sequence.
        ids: the tokens, i64[B, T].
        memory: the output of the encoder, [B, S, D], in an encoder-decoder.
        seen: the positions of the source that hold tokens, bool[B, S].
        final: the last state of the encoder, by key.
        start: the initial state of a recurrent part, by key; of a part with a `query_stage`, the state of that stage.
        values: the outputs of earlier parts, by title.
        causal: whether a position sees only itself and earlier positions.
        training: whether dropout applies.
        extends: whether the input continues a sequence whose state is in `cache`.
        site: the call site of a part that calls functions.
        layer: the index of the block that holds the part, from 0.
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
    layer: int = 0


@dataclass(frozen=True, slots=True)
class Shared:
    """What is computed once for all layers that read it. Equal ones are one; two of a name are equal.

    `labels` are what code calls its outputs; `layers` are those that read it, all where None; `positional` where it
    depends on the tokens' positions alone.
    """

    name: str
    labels: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    positional: bool = False

    def state(self) -> Mapping[str, TensorType]:
        """What it keeps between tokens."""
        return {}

    def lower(self, b: Builder, tokens: Tokens) -> tuple[str, ...]:
        """Adds it, in the scope of the whole model; one value a label, and behind them in a program that extends a
        sequence the new state, of which `tokens.cache` has that before."""
        raise TypeError(f"{type(self).__name__} does not say how it lowers")

    def read_in(self, layer: int) -> bool:
        """Whether `layer` reads it."""
        return self.layers is None or layer in self.layers

    @property
    def refs(self) -> tuple[str, ...]:
        """What `LoweringContext.shared` calls its outputs: its name, then `name:1`."""
        return output_refs(self.name, len(self.labels))


# Which layers, counted from 0; all where the field is left out.
