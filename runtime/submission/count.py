"""Counts the bytes of a submission by the rules of parameter-golf: the code file plus the weights file."""

import stat
from dataclasses import dataclass
from pathlib import Path

from specc.runtime.artifact.artifact import peek_spec
from specc.runtime.artifact.deployment import deployment_of
from specc.runtime.errors import IntegrityError
from specc.runtime.storage.run_directory import is_run
from specc.runtime.submission.names import CODE, LIMIT, WEIGHTS


@dataclass(frozen=True, slots=True)
class SubmissionSize:
    """The size of a submission in bytes.

    Attributes:
        path: the folder of the submission.
        code: the size of the code file.
        weights: the size of the weights file.
        budget: the limit of the size of code and weights together.
        others: the names of other files in the folder. The bytes of these files do not count.
    """

    path: Path
    code: int
    weights: int
    budget: int
    others: tuple[str, ...]

    @property
    def total(self) -> int:
        return self.code + self.weights

    @property
    def over(self) -> bool:
        return self.total > self.budget

    def report(self) -> list[str]:
        lines = [f"code    {self.code:>12,} bytes {CODE}", f"weights {self.weights:>12,} bytes {WEIGHTS}"]
        lines += [f"not counted: {', '.join(self.others)}"] if self.others else []
        verdict = f"{'OVER by' if self.over else 'within, by'} {abs(self.budget - self.total):,}"
        return [*lines, f"{self.path}: {self.total:,} bytes of {self.budget:,}: {verdict}"]

    def facts(self) -> dict[str, object]:
        counts = {"code": self.code, "weights": self.weights, "total": self.total}
        return {"path": str(self.path), **counts, "budget": self.budget, "over": self.over, "others": [*self.others]}


def is_submission(path: Path) -> bool:
    """Returns whether `path` is a folder with the code file of a submission.

    Raises IntegrityError if an interrupted export left weights without code.
    """
    if (path / CODE).exists() or not path.is_dir() or is_run(path):
        return (path / CODE).exists()
    names = [entry.name for entry in path.iterdir()]
    temporary = tuple(f".{name}." for name in (CODE, WEIGHTS))
    if not names or any(name == WEIGHTS or (name.startswith(temporary) and name.endswith(".tmp")) for name in names):
        message = f"{path} is not a complete submission: it has no {CODE}, which is written last"
        raise IntegrityError(message, "export the submission again: specc export RUN --format submission --force")
    return False


def submission_size(path: Path, budget: int | None = None) -> SubmissionSize:
    """Returns the size of the submission in a folder, with its budget in bytes.

    The default budget is `quant.budget_bytes` of the spec in the weights file, or 16,000,000 bytes, the limit of
    parameter-golf, if the spec has no budget. Raises IntegrityError if a file is missing or is not a regular file. Also
    raises IntegrityError if the budget must be read from a weights file that is not valid.
    """
    sizes = []
    for name in (CODE, WEIGHTS):
        try:
            status = (path / name).lstat()
        except OSError as error:
            hint = "export the submission again: specc export RUN --format submission --force"
            raise IntegrityError(f"{path / name}: {error.strerror}", hint) from error
        if not stat.S_ISREG(status.st_mode):
            raise IntegrityError(f"{path / name} is not a regular file", "replace the link by a copy of the file")
        sizes.append(status.st_size)
    others = tuple(sorted(entry.name for entry in path.iterdir() if entry.name not in (CODE, WEIGHTS)))
    if budget is None:
        quant = deployment_of(peek_spec(path / WEIGHTS))[0].quant
        budget = (quant.budget_bytes if quant is not None else None) or LIMIT
    return SubmissionSize(path, sizes[0], sizes[1], budget, others)
