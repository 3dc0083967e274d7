"""What is worth trying for each node: every kernel that takes it, with every tile that the kernel proposes."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from specc.compiler import kernels
from specc.compiler.build import kernel_files
from specc.compiler.catalog import catalog
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, missing
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
        """Of the code, so that a result is never taken for that of other code."""
        content = hashlib.sha256()
        for name, text in sorted(self.files.items()):
            content.update(f"{name}\0{text}\0".encode())
        return content.hexdigest()[:16]

    @property
    def source(self) -> tuple[str, str] | None:
        """Name and text of its CUDA C++, if it has any."""
        return next(((name, text) for name, text in self.files.items() if name.endswith(".cu")), None)


def tuned_choices(plan: Plan) -> tuple[Choice, ...]:
    """The choices with a kernel of their own, one a kernel file, in the order of the plan."""
    return tuple({c.rendered.module: c for c in reversed(plan.choices) if c.rendered.function}.values())[::-1]


def all_choices(plan: Plan) -> tuple[Choice, ...]:
    """As `tuned_choices`, and behind them those of every other save choice."""
    modules = {choice.rendered.module: choice for choice in tuned_choices(plan)}
    for choices in plan.save_choices:
        for option in choices.options:
            for choice in option.kernels:
                modules.setdefault(choice.rendered.module, choice)
    return tuple(modules.values())


def candidates(site: Site, source: str) -> Iterator[Candidate]:
    """Everything that can compute a node, for the spec that generated files call `source`; one form of a kernel that
    has no tiles. What a target's features or the kernel itself rule out is not among them."""
    for kernel in catalog(kernels, Kernel).values():
        if not isinstance(site.node.op, kernel.computes):
            continue
        if missing(kernel, site.target) is None and kernel.rejects(site) is None:
            for variant in kernel.variants(site) or (kernel,):
                rendered = variant.render(site)
                # without a plan key: candidates that differ in their launch alone share one CUDA source
                yield Candidate(variant, rendered, kernel_files(rendered, "", source))
