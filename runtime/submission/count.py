"""The bytes of a submission, counted as the challenge counts them: its code as it stands, and its weights."""

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
    """Bytes, decimal. `others` are the names of files beside the two, which do not count."""

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
        """For people."""
        lines = [f"code    {self.code:>12,} bytes {CODE}", f"weights {self.weights:>12,} bytes {WEIGHTS}"]
        lines += [f"not counted: {', '.join(self.others)}"] if self.others else []
        verdict = f"{'OVER by' if self.over else 'within, by'} {abs(self.budget - self.total):,}"
        return [*lines, f"{self.path}: {self.total:,} bytes of {self.budget:,}: {verdict}"]

    def facts(self) -> dict[str, object]:
        """For programs."""
        counts = {"code": self.code, "weights": self.weights, "total": self.total}
        return {"path": str(self.path), **counts, "budget": self.budget, "over": self.over, "others": [*self.others]}


def is_submission(path: Path) -> bool:
    """Whether the folder `path` holds the code of a submission.

    Raises IntegrityError for what an export leaves there that was killed: nothing, or weights without the code.
    """
    if (path / CODE).exists() or not path.is_dir() or is_run(path):
        return (path / CODE).exists()
    names = [entry.name for entry in path.iterdir()]
    if not names or any(own in name for name in names for own in (CODE, WEIGHTS)):
        message = f"{path} holds no submission: {CODE}, which is written last, is not there"
        raise IntegrityError(message, "export it again: specc export RUN --format submission --force")
    return False


def submission_size(path: Path, budget: int | None = None) -> SubmissionSize:
    """The bytes of the submission in the folder `path` against a budget: `budget`, else the `quant.budget_bytes` of the
    spec in its weights, else the challenge's 16,000,000.

    Raises IntegrityError where one of its files is missing or not a regular file, or the weights are none.
    """
    sizes = []
    for name in (CODE, WEIGHTS):
        try:
            found = (path / name).lstat()
        except OSError as error:
            hint = "export it again: specc export RUN --format submission --force"
            raise IntegrityError(f"{path / name}: {error.strerror}", hint) from error
        if not stat.S_ISREG(found.st_mode):
            raise IntegrityError(f"{path / name} is not a regular file", "what a link leads to would not be counted")
        sizes.append(found.st_size)
    others = tuple(sorted(entry.name for entry in path.iterdir() if entry.name not in (CODE, WEIGHTS)))
    if budget is None:
        quant = deployment_of(peek_spec(path / WEIGHTS))[0].quant
        budget = (quant.budget_bytes if quant is not None else None) or LIMIT
    return SubmissionSize(path, sizes[0], sizes[1], budget, others)
