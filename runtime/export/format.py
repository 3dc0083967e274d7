"""The base class of export formats, and the arguments of an export."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from specc.runtime.errors import ExportError
from specc.runtime.log import Say
from specc.runtime.storage.atomic import require_replaceable
from specc.runtime.storage.run_directory import Run


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The arguments of `specc export`.

    Attributes:
        run: the run directory.
        out: the output file or folder; None for the default in the run directory.
        force: whether to replace an existing output.
        search: additional folders to search for the tokenizer.
        say: the function that receives messages for the user.
        options: the values of the options that only some formats read, by name.
    """

    run: Path
    out: Path | None = None
    force: bool = False
    search: tuple[Path, ...] = ()
    say: Say = lambda _: None
    options: Mapping[str, Any] = field(default_factory=dict)

    def file(self, run: Run, suffix: str) -> Path:
        """Returns `out`, or a file in the directory of `run` that has the name of the spec plus `suffix`.

        Raises ExportError if the file exists and `force` is False, if the path is a folder, or if the parent folder
        does not exist. Raises EnvironmentFailure if the path is another kind of file, such as a device.
        """
        out = self.out if self.out is not None else run.directory / f"{run.spec.name}{suffix}"
        if out.is_dir() or not out.parent.is_dir():
            raise ExportError(f"{out} is not the path of a file", "name a file in a folder that exists")
        require_replaceable(out, self.force)
        return out


@dataclass(frozen=True, slots=True)
class Exported:
    """The files that an export wrote.

    If the format limits the size of the files, `total` is their size and `budget` is the limit, in bytes. Otherwise,
    `total` is 0 and `budget` is None.
    """

    paths: tuple[Path, ...]
    total: int = 0
    budget: int | None = None


class ExportFormat(ABC):
    """A format of `specc export`.

    Each format is a subclass in a separate file of `runtime/export/formats`. The name of the file is the name of the
    format.

    Attributes:
        options: the names of the entries of `ExportRequest.options` that the format reads.
    """

    options: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def write(self, request: ExportRequest) -> Exported:
        """Writes the output under a temporary name, verifies it, and then renames it.

        If an error occurs, the output path does not change.
        """
