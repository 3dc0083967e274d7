"""Records the dtypes of the original tensors of an imported run. An export can then write the same dtypes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import ValidationError

from specc.compiler.strict import StrictModel
from specc.runtime.errors import IntegrityError
from specc.runtime.hugging_face.folder import FLOATS
from specc.runtime.storage.atomic import write_atomically
from specc.runtime.storage.run_directory import Run

ORIGIN = "origin.json"


class _Record(StrictModel):
    """The content of the file `origin.json` of an imported run.

    `dtype` is the most frequent dtype. `others` maps the names of all tensors with other dtypes to their dtypes.
    """

    format: Literal[1]
    dtype: str
    others: dict[str, str]


@dataclass(frozen=True)
class Origin:
    """The dtypes of the tensors from which a run was imported.

    Attributes:
        dtype: the most frequent dtype of the tensors, in the spelling of safetensors.
        others: the dtypes of the other tensors, by name.
    """

    dtype: str = "F32"
    others: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_dtypes(cls, dtypes: Mapping[str, str]) -> "Origin":
        usual = Counter(dtypes.values()).most_common(1)[0][0]
        return cls(usual, {name: dtype for name, dtype in dtypes.items() if dtype != usual})

    @classmethod
    def of(cls, run: Run) -> "Origin":
        """Reads the `Origin` of a run from the run directory. If the run was not imported, all dtypes are f32.

        Raises IntegrityError if the file `origin.json` is damaged.
        """
        path = run.files / ORIGIN
        if not path.is_file():
            return cls()
        try:
            record = _Record.model_validate_json(path.read_bytes())
        except ValidationError:
            raise IntegrityError(f"{path}: is damaged", "import the folder again") from None
        if not {record.dtype, *record.others.values()} <= FLOATS.keys():
            raise IntegrityError(f"{path}: has an unknown dtype", "import the folder again")
        return cls(record.dtype, record.others)

    def dtype_of(self, name: str) -> str:
        return self.others.get(name, self.dtype)

    def write(self, run: Run) -> None:
        record = _Record(format=1, dtype=self.dtype, others=dict(self.others))
        write_atomically(run.files / ORIGIN, [record.model_dump_json(indent=1).encode()])
