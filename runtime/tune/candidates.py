"""The candidates for each node: all kernels that can compute it, with all tiles that these kernels propose."""

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
    """A kernel with one tile, and the files that it renders."""

    kernel: Kernel
    rendered: Rendered
    files: Mapping[str, str]

    @property
    def label(self) -> str:
        return f"{self.kernel.name}, {self.rendered.tile}" if self.rendered.tile else self.kernel.name

    @property
    def digest(self) -> str:
        """A digest of the code. A result is reused only for a candidate with the same code."""
        content = hashlib.sha256()
        for name, text in sorted(self.files.items()):
            content.update(f"{name}\0{text}\0".encode())
        return content.hexdigest()[:16]

    @property
    def source(self) -> tuple[str, str] | None:
        """The name and text of the candidate's CUDA C++ file; None if it has no such file."""
        return next(((name, text) for name, text in self.files.items() if name.endswith(".cu")), None)


def tuned_choices(plan: Plan) -> tuple[Choice, ...]:
    """Returns the choices whose kernels have generated files, one per file, in the order of the plan."""
    return tuple({c.rendered.module: c for c in reversed(plan.choices) if c.rendered.function}.values())[::-1]


def all_choices(plan: Plan) -> tuple[Choice, ...]:
    """Returns `tuned_choices` of the plan, followed by `tuned_choices` of the plans with all other save choices."""
    modules = {choice.rendered.module: choice for choice in tuned_choices(plan)}
    for choice in plan.every_choice:
        if choice.rendered.function:
            modules.setdefault(choice.rendered.module, choice)
    return tuple(modules.values())


def candidates(site: Site, source: str) -> Iterator[Candidate]:
    """Yields every kernel and tile that can compute a node. A kernel without tiles is a single candidate. Kernels that
    cannot compute the node on its target are omitted.

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
                # rendered without a plan key, so that candidates that differ only in their launch share one CUDA source
                yield Candidate(variant, rendered, kernel_files(rendered, "", source))
