"""What a whole-model kind is asked."""

from typing import ClassVar, Literal, Self

from specc.compiler.programs.programs import Programs
from specc.compiler.strict import Path, StrictModel

Form = Literal["text", "lines"]  # one stream of tokens, or pairs of a source line and a target line


class Architecture(StrictModel):
    """A model kind. Its fields are blocks; it knows how they connect, and no block by name.

    Attributes:
        reads: the form of the data that it is trained and scored on.
    """

    reads: ClassVar[Form] = "text"

    def lower(self, name: str, dtype: str, halves: bool = False) -> Programs:
        """All programs of the model, computing in `dtype`; with `halves`, those of `score` besides, where the model
        has such. Raises LoweringError with every problem found."""
        raise TypeError(f"{type(self).__name__} does not say how it lowers")

    @property
    def title(self) -> str:
        """One line for plans and headers: what the model is."""
        raise TypeError(f"{type(self).__name__} does not describe itself")

    @property
    def vocabulary(self) -> int:
        """How many token ids it reads and writes."""
        raise TypeError(f"{type(self).__name__} does not state its vocabulary")

    @property
    def window(self) -> int:
        """How many tokens it is trained on at a time."""
        raise TypeError(f"{type(self).__name__} does not state its context")

    def after(self, done: float) -> Self:
        """The model that trains when the share `done` of a run is behind, which it then is for ever."""
        return self

    @property
    def late(self) -> tuple[tuple[Path, str, float], ...]:
        """What begins when a share of the run is behind: where the spec says so, what, and the share."""
        return ()

    @property
    def marks(self) -> tuple[tuple[Path, int], ...]:
        """The ids that it takes for the start of a document, and where the spec says so."""
        return ()

    @property
    def fed(self) -> str:
        """The input of the program `score` that holds the tokens of the line that is scored, in order."""
        return "ids"

    @property
    def reads_pads(self) -> bool:
        """Whether pads behind a source change what is made of it, so that sources have to be of one length."""
        return False

    @property
    def characters(self) -> str | None:
        """The alphabet that the spec itself states, of a model of lines; None where a tokenizer has it."""
        return None

    @property
    def computes_in(self) -> str | None:
        """The dtype that the spec itself states; None where it is the target's."""
        return None
