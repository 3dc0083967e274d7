"""Pairs of lines from a file."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from specc.compiler.architectures.architecture import Form
from specc.compiler.spec.data.kind import DataKind
from specc.compiler.strict import NonNegative, accepted_by


def _within_a_line(text: str) -> None:
    if "\n" in text:
        raise ValueError("a separator is within a line, so it cannot contain the end of a line")


class LinesData(DataKind):
    """Pairs of a source and a target, one pair per line of the file that `--data` names.

    A hash of each line determines whether the line is held out for validation. Equal lines are in the same split.

    Attributes:
        separator: the text between source and target. Each line contains this text once.
        validation_fraction: the share of the lines that are held out. By default, one line in ten.
        seed: the seed for the choice of held-out lines.
    """

    gives: ClassVar[Form] = "lines"

    kind: Literal["lines"]
    separator: Annotated[str, Field(min_length=1, max_length=16), accepted_by(_within_a_line)] = "="
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    seed: NonNegative = 0

    @property
    def form(self) -> str:
        """The form of a line, in printable characters."""
        form = f"source{self.separator}target"
        return form if form.isprintable() else repr(form)


def file_settings(data: DataKind | None = None) -> LinesData:
    """Returns the settings with which a file of lines is read. These are the settings of the spec, if the spec has data
    of this kind. Otherwise, `--data FILE` replaces the data of the spec, and the settings are the defaults."""
    return data if isinstance(data, LinesData) else LinesData(kind="lines")
