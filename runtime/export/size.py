"""Reports the size of an artifact in bytes, by section and by group of parameters."""

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
    """The size of a group of parameters.

    A group contains the parameters whose names differ only in the block index, such as `blocks.*.mlp.up`. Each
    parameter outside blocks is a separate group.

    Attributes:
        name: the name of the group, with `*` for the block index.
        tensors: the number of tensors.
        parameters: the number of values in all tensors.
        scheme: the labels of the storage schemes, most bits first.
        stored: the number of bytes before compression. The compressed size of a group is unknown, because the artifact
            compresses several parameters together.
    """

    name: str
    tensors: int
    parameters: int
    scheme: str
    stored: int


@dataclass(frozen=True, slots=True)
class SizeResult:
    """The size of an artifact in bytes.

    Attributes:
        path: the artifact.
        total: the size of the file, which is the sum of `header` and the compressed sizes of `sections`.
        header: the size of the header.
        sections: the size of each section of the file.
        groups: the size of each group of parameters.
        budget: the limit of the size of the file; None without a limit.
    """

    path: Path
    total: int
    header: int
    sections: tuple[SectionSize, ...]
    groups: tuple[GroupSize, ...]
    budget: int | None

    @property
    def over(self) -> bool:
        return self.budget is not None and self.total > self.budget


def size(path: Path, budget: int | None = None, say: Say = lambda _: None, by_layer: bool = False) -> SizeResult:
    """Returns the size of an artifact, for `specc size`.

    Args:
        path: an artifact, or the directory of a run that has an artifact.
        budget: a limit in bytes; None for `quant.budget_bytes` of the spec.
        say: the function that receives a message if the weights of the run have changed since quantization.
        by_layer: whether each parameter is a separate group.

    Raises:
        RunDirectoryError: if `path` is neither an artifact nor a run.
        RunFailure: if the run is not quantized.
        IntegrityError: if the file does not match its header or its spec.
    """
    artifact = artifact_of(path, say)
    size = artifact_size(artifact)
    try:
        spec, deployment = deployment_of(peek_spec(artifact))
    except IntegrityError as error:
        raise IntegrityError(f"{artifact}: {error.message}", error.hint) from error
    require_layout(artifact, deployment.layout)
    total = artifact.stat().st_size
    if total != size.total:
        raise IntegrityError(f"{artifact}: the file changed while it was read")
    if budget is None and spec.quant is not None:
        budget = spec.quant.budget_bytes

    members: dict[str, list[str]] = {}
    for name in deployment.schemes:
        group = name if by_layer else re.sub(r"\.\d+(?=\.|$)", ".*", name)
        members.setdefault(group, []).append(name)
    groups: list[GroupSize] = []
    for group, names in members.items():
        kinds = [(deployment.schemes[name], deployment.shapes[name]) for name in names]
        stored = [array for scheme, shape in kinds for array in scheme.stored(shape)]
        labels = {scheme.label(): scheme.bits_per_value() for scheme, _ in kinds}
        count, raw = sum(math.prod(shape) for _, shape in kinds), sum(array.bytes for array in stored)
        shown = " + ".join(sorted(labels, key=lambda label: (-labels[label], label)))
        groups.append(GroupSize(group, len(names), count, shown, raw))
    return SizeResult(artifact, total, size.header, size.sections, tuple(groups), budget)
