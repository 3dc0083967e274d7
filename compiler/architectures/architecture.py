"""The base class of the model kinds."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, Self

from specc.compiler.changing_values import settled
from specc.compiler.losses.term import LossTerm
from specc.compiler.programs.init import Init
from specc.compiler.programs.programs import Programs
from specc.compiler.strict import Path, StrictModel, values_in

Form = Literal["text", "lines"]  # one token stream, or pairs of source and target lines


class Architecture(StrictModel):
    """A model kind. The fields are the parts of the model.

    Attributes:
        reads: the form of the training data.
    """

    reads: ClassVar[Form] = "text"

    def lower(self, name: str, halves: bool = False, losses: Sequence[LossTerm] = ()) -> Programs:
        """Returns all programs of the model.

        Args:
            name: The name of the model.
            halves: Whether to add the programs `features` and `nats`, the halves of `score`. Only some model kinds have
                these programs.
            losses: The terms of the training loss. If empty, the loss is the cross-entropy of the next token.

        Raises:
            LoweringError: If the spec does not describe a valid model.
        """
        raise TypeError(f"{type(self).__name__} must override `lower`")

    @property
    def title(self) -> str:
        """A one-line description of the model, for plans and headers."""
        raise TypeError(f"{type(self).__name__} must override `title`")

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the model reads and writes."""
        raise TypeError(f"{type(self).__name__} must override `vocabulary`")

    @property
    def window(self) -> int:
        """The number of tokens per training window."""
        raise TypeError(f"{type(self).__name__} must override `window`")

    def after(self, done: float) -> Self:
        """Returns a copy of the model in which each schedule is replaced by the schedule's value after the fraction
        `done` of a run."""
        return settled(self, done)

    @property
    def bounded(self) -> str:
        """The name of a part with a learned value per position. The name is empty if no part has such values. A model
        with such a part cannot score texts longer than the context."""
        return ""

    @property
    def unscored(self) -> int:
        """The number of targets at the start of a row that are excluded from the score and the loss."""
        return 0

    def refuses_modules(self) -> Iterator[str]:
        """Yields the reasons why the model cannot have modules that predict later tokens."""
        yield "only a model of kind `decoder` has them"

    @property
    def losses(self) -> frozenset[str]:
        """The names LAYER.LOSS of the auxiliary losses of layers. Loss terms of the kind `auxiliary` refer to these
        names."""
        return frozenset()

    @property
    def marks(self) -> tuple[tuple[Path, int], ...]:
        """The ids that begin documents, as pairs (path in the spec, id)."""
        return ()

    @property
    def scored_input(self) -> str:
        """The name of an input of the program `score`. This input holds the tokens of the scored text, in order."""
        return "ids"

    @property
    def reads_pads(self) -> bool:
        """Whether the encoding of a source depends on the padding after the source. If so, all sources of a batch must
        have the same length."""
        return False

    @property
    def characters(self) -> str | None:
        """The alphabet of the spec, for a model of lines, or None if a tokenizer defines the alphabet."""
        return None

    def place_of(self, init: Init) -> Path:
        """Returns the spec path of the field whose value is the object `init`."""
        return ("model", *next((path for path, other in values_in(self, Init) if other is init), ()))

    @property
    def computes_in(self) -> str | None:
        """The compute dtype of the spec, or None if the target determines the dtype."""
        return None
