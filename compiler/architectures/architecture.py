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
    """A model kind. The fields are the parts of the model. A model kind uses its parts only through the methods of
    their base classes.

    Attributes:
        reads: the form of the training data.
    """

    reads: ClassVar[Form] = "text"

    def lower(self, name: str, halves: bool = False, losses: Sequence[LossTerm] = ()) -> Programs:
        """Returns all programs of the model.

        Args:
            name: the name of the model.
            halves: whether to add the two programs into which `score` can be split, if the model kind supports it.
            losses: the terms of the training loss. If empty, the loss is the cross-entropy of the next token.

        Raises:
            LoweringError: if the spec does not describe a valid model.
        """
        raise TypeError(f"{type(self).__name__} must override `lower`")

    @property
    def title(self) -> str:
        """A one-line description of the model for plans and headers."""
        raise TypeError(f"{type(self).__name__} does not describe itself")

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the model reads and writes."""
        raise TypeError(f"{type(self).__name__} does not state its vocabulary")

    @property
    def window(self) -> int:
        """The number of tokens per training window."""
        raise TypeError(f"{type(self).__name__} does not state its context")

    def after(self, done: float) -> Self:
        """Returns the model with each schedule replaced by its value after the fraction `done` of a training run."""
        return settled(self, done)

    @property
    def bounded(self) -> str:
        """The name of a part with a learned value for each position; empty if there is none. A model with such a part
        cannot score texts that are longer than the context."""
        return ""

    @property
    def unscored(self) -> int:
        """The number of targets at the start of a row that neither the loss nor the score counts."""
        return 0

    def refuses_modules(self) -> Iterator[str]:
        """Yields the reasons why the model cannot have modules that predict later tokens."""
        yield "only models of kind decoder have them"

    @property
    def losses(self) -> frozenset[str]:
        """The auxiliary losses that layers compute, as LAYER.LOSS, for terms of the kind `auxiliary`."""
        return frozenset()

    @property
    def marks(self) -> tuple[tuple[Path, int], ...]:
        """The ids with which documents start, each with the spec path that sets the id."""
        return ()

    @property
    def scored_input(self) -> str:
        """The name of the input of the program `score` that contains the tokens of the scored text, in order."""
        return "ids"

    @property
    def reads_pads(self) -> bool:
        """Whether the encoding of a source depends on the padding after it. If so, all sources in a batch must have the
        same length."""
        return False

    @property
    def characters(self) -> str | None:
        """The alphabet that the spec itself sets, for a model of lines; None if a tokenizer defines it."""
        return None

    def place_of(self, init: Init) -> Path:
        """Returns the spec path of the field that states an initialization."""
        return ("model", *next((path for path, other in values_in(self, Init) if other is init), ()))

    @property
    def computes_in(self) -> str | None:
        """The compute dtype that the spec itself sets; None if the target determines the dtype."""
        return None
