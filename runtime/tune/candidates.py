"""The candidates for each node of a plan. A candidate is a kernel that can compute the node, with particular tile
sizes.
"""

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
    """A kernel with particular tile sizes, and the generated files of this kernel."""

    kernel: Kernel
    rendered: Rendered
    files: Mapping[str, str]

    @property
    def label(self) -> str:
        return f"{self.kernel.name}, {self.rendered.tile}" if self.rendered.tile else self.kernel.name

    @property
    def digest(self) -> str:
        """A digest of the generated code. A stored measurement is valid only for code with the same digest."""
        content = hashlib.sha256()
        for name, text in sorted(self.files.items()):
            content.update(f"{name}\0{text}\0".encode())
        return content.hexdigest()[:16]

    @property
    def source(self) -> tuple[str, str] | None:
        return next(((name, text) for name, text in self.files.items() if name.endswith(".cu")), None)


def all_choices(plan: Plan) -> tuple[Choice, ...]:
    """Returns the generated kernels of `plan`, followed by the kernels that only other save choices need.

    A save choice is a set of tensors that the forward pass of a fused group saves for the backward pass.
    """
    modules = {choice.rendered.module: choice for choice in plan.generated}
    for choice in plan.every_choice:
        if choice.rendered.function:
            modules.setdefault(choice.rendered.module, choice)
    return tuple(modules.values())


def candidates(site: Site, source: str) -> Iterator[Candidate]:
    """Yields every kernel that can compute a node on its target, with each of its tile sizes.

    A kernel without tiles is a single candidate.

    Args:
        site: the node, with the types of its inputs and the target.
        source: the name of the spec that the generated files state.
    """
    for kernel in catalog(kernels, Kernel).values():
        if not isinstance(site.node.op, kernel.computes):
            continue
        if refusal(kernel, site) is None:
            for variant in kernel.variants(site) or (kernel,):
                rendered = variant.render(site)
                # The files contain no key of a plan, so that candidates that differ only in their launch share one CUDA
                # source.
                yield Candidate(variant, rendered, kernel_files(rendered, "", source))
