"""The bytes of an artifact, by section and by group of parameters."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from specc.runtime.artifact.artifact import SectionSize, artifact_size, peek_spec, require_layout
from specc.runtime.artifact.deployment import deployment_of
from specc.runtime.errors import IntegrityError
from specc.runtime.log import Say
from specc.runtime.storage.quantized_run import artifact_of


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Equal parameters of all blocks, such as `blocks.*.mlp.up`.

    `stored` is their bytes before compression: brotli sees all codes of a model as one stream, so the
    compressed bytes of one parameter do not exist. `scheme` is the schemes of its tensors, most bits first.
    """

    name: str
    tensors: int
    parameters: int
    scheme: str
    stored: int


@dataclass(frozen=True, slots=True)
class SizeResult:
    """The bytes of an artifact, decimal.

    `total`, what the file system says, is `header` plus the compressed bytes of `sections`. The raw bytes of
    all sections but the spec's are the `stored` bytes of all `groups`, and two a row where rows were ordered.
    """

    path: Path
    total: int
    header: int
    sections: tuple[SectionSize, ...]
    groups: tuple[GroupSize, ...]
    budget: int | None

    @property
    def over(self) -> bool:
        """Whether there is a budget, and more bytes than it allows."""
        return self.budget is not None and self.total > self.budget


def size(path: Path, budget: int | None = None, say: Say = lambda _: None) -> SizeResult:
    """The bytes of an artifact, or of that of a quantized run. Without `budget` the spec's holds. `say` is told where
    the run has other weights since it was quantized.

    Raises RunDirectoryError when there is neither at `path`, RunFailure for a run that was not quantized, and
    IntegrityError for a file that is not what its header and its spec say.
    """
    artifact = artifact_of(path, say)
    found = artifact_size(artifact)
    try:
        spec, deployment = deployment_of(peek_spec(artifact))
    except IntegrityError as error:
        raise IntegrityError(f"{artifact}: {error.message}", error.hint) from error
    require_layout(artifact, deployment.layout)
    total = artifact.stat().st_size
    if total != found.total:
        raise IntegrityError(f"{artifact}: it changed while it was read")
    if budget is None and spec.quant is not None:
        budget = spec.quant.budget_bytes

    members: dict[str, list[str]] = {}
    for name in deployment.schemes:
        members.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), []).append(name)
    groups: list[GroupSize] = []
    for group, names in members.items():
        kinds = [(deployment.schemes[name], deployment.shapes[name]) for name in names]
        stored = [array for scheme, shape in kinds for array in scheme.stored(shape)]
        labels = {scheme.label(): scheme.bits_per_value() for scheme, _ in kinds}
        groups.append(
            GroupSize(
                group,
                len(names),
                sum(math.prod(shape) for _, shape in kinds),
                " + ".join(sorted(labels, key=lambda label: (-labels[label], label))),
                sum(array.bytes for array in stored),
            )
        )
    return SizeResult(artifact, total, found.header, found.sections, tuple(groups), budget)
