"""The base class of all kinds of training data."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from specc.compiler.architectures.architecture import Form
from specc.compiler.strict import Problem, StrictModel

FileName = Annotated[str, Field(min_length=1, max_length=256)]

GIVES: Mapping[Form, str] = {"text": "one stream of tokens", "lines": "pairs of lines"}
# For each form that a model reads: a phrase for the model's task, and the hint for data of another form
READS: Mapping[Form, tuple[str, str]] = {
    "text": ("reads one stream of tokens", "use `data: {kind: text}`, or a model of kind `encoder_decoder`"),
    "lines": ("translates lines", "use `data: {kind: lines}`, or a model of kind `decoder`"),
}


class DataKind(StrictModel):
    """The base class of `train.data`. A subclass has a `kind` Literal as its tag and adds its settings.

    Attributes:
        gives: the form of the data. The model must read this form.
        usual: the default of `--data`. Empty if the data have no default.
        generated: whether the data is generated without files. `--data KIND` then replaces the data of the spec by this
            kind, with default settings.
    """

    gives: ClassVar[Form]
    usual: ClassVar[str] = ""
    generated: ClassVar[bool] = False

    kind: str

    @property
    def least_vocabulary(self) -> int:
        """The smallest vocabulary that the data needs. 0 stands for a vocabulary that is not known before files are
        read."""
        return 0

    def problems_with(self, model: Any) -> Iterator[Problem]:
        """Yields the reasons why a model (an Architecture) cannot read the data. Paths are relative to the root of
        the spec."""
        if model.reads == self.gives:
            yield from self.problems_with_reader(model)
        else:
            does, hint = READS[model.reads]
            message = f"`{self.kind}` gives {GIVES[self.gives]}, but the model {does}"
            yield Problem(("train", "data"), "S222", message, hint)

    def problems_with_reader(self, model: Any) -> Iterator[Problem]:
        """Yields the reasons why a model cannot read these data, although the model reads data of this form."""
        yield from ()
