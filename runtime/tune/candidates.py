"""The candidates for each node: all kernels that can compute the node, each with all its tile sizes."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from specc.compiler import kernels
from specc.compiler.build import kernel_files
from specc.compiler.catalog import catalog
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, refusal
from specc.compiler.plan.plan import Choice, Plan


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A kernel with one choice of tile sizes, and the files that it renders."""

    kernel: Kernel
    rendered: Rendered
    files: Mapping[str, str]

    @property
    def label(self) -> str:
        return f"{self.kernel.name}, {self.rendered.tile}" if self.rendered.tile else self.kernel.name

    @property
    def digest(self) -> str:
        """A digest of the code. A stored result is valid only for equal code."""
        content = hashlib.sha256()
        for name, text in sorted(self.files.items()):
            content.update(f"{name}\0{text}\0".encode())
        return content.hexdigest()[:16]

    @property
    def source(self) -> tuple[str, str] | None:
        return next(((name, text) for name, text in self.files.items() if name.endswith(".cu")), None)


def all_choices(plan: Plan) -> tuple[Choice, ...]:
    """Returns the choices in `plan.generated`, then the choices for kernels that save other tensors for the backward
    pass.
    """
    modules = {choice.rendered.module: choice for choice in plan.generated}
    for choice in plan.every_choice:
        if choice.rendered.function:
            modules.setdefault(choice.rendered.module, choice)
    return tuple(modules.values())


def candidates(site: Site, source: str) -> Iterator[Candidate]:
    """Yields every kernel that can compute a node on its target, with each of its tile sizes. A kernel without tiles is
    one candidate.

    Args:
        site: the node.
        source: the name of the spec in generated files.
    """
    for kernel in catalog(kernels, Kernel).values():
        if not isinstance(site.node.op, kernel.computes):
            continue
        if refusal(kernel, site) is None:
            for variant in kernel.variants(site) or (kernel,):
                rendered = variant.render(site)
                # The files contain no key of a plan. Candidates that differ only in their launch share one CUDA source.
                yield Candidate(variant, rendered, kernel_files(rendered, "", source))
