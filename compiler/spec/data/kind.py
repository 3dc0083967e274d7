"""The base of every kind of training data."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from specc.compiler.architectures.architecture import Form
from specc.compiler.strict import Problem, StrictModel

FileName = Annotated[str, Field(min_length=1, max_length=256)]


class DataKind(StrictModel):
    """The base of what `train.data` may be. A subclass names itself by a `kind` Literal and adds its settings.

    Attributes:
        gives: the form of its data, which the model has to read.
        usual: the data where `--data` is not given.
        generated: whether the data need no files, so that `--data KIND` selects the kind, with its defaults, over the
            spec.
    """

    gives: ClassVar[Form]
    usual: ClassVar[str]
    generated: ClassVar[bool] = False

    kind: str

    @property
    def least_vocabulary(self) -> int:
        """How many ids a model needs to read it, as far as that is known without files."""
        return 0

    def problems_with(self, model: Any) -> Iterator[Problem]:
        """Why a model (an Architecture) cannot read it; paths are from the top of the spec."""
        yield from ()
