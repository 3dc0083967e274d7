"""What a whole-model kind is asked."""

from specc.compiler.programs import Programs
from specc.compiler.strict import StrictModel


class Architecture(StrictModel):
    """A model kind. Its fields are blocks; it knows how they connect, and no block by name."""

    def lower(self, name: str, dtype: str) -> Programs:
        """All programs of the model, computing in `dtype`. Raises LoweringError with every problem found."""
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
