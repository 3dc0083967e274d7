"""Derives the arrays and the digests of an artifact from its spec, without torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from specc.compiler.build import compiled, interface_digest, spec_of
from specc.compiler.passes.assign_quant import allocation
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.check import problems_of
from specc.compiler.spec.spec import Spec
from specc.runtime.artifact.table import Layout, layout
from specc.runtime.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class Deployment:
    """The contents of an artifact that the compiler derives from the spec.

    Attributes:
        schemes: the quantization scheme of each parameter.
        shapes: the shape of each parameter.
        interface: the digest of parameter names, shapes and storage, 32 bytes.
        code: the SHA-256 of the generated code of all targets. The digest does not depend on the machine.
    """

    schemes: Mapping[str, Scheme]
    shapes: Mapping[str, tuple[int, ...]]
    interface: bytes
    code: bytes

    @classmethod
    def of(cls, spec: Spec) -> "Deployment":
        """Compiles `spec` and returns its deployment. Raises LoweringError if the spec cannot be compiled."""
        built = compiled(spec.at_rest)
        programs = next(iter(built.plans.values())).programs
        code = hashlib.sha256()
        for name, text in sorted(built.files.items()):
            if "/" in name:  # code is in subfolders; PLAN.md and the manifest are not
                code.update(f"{name}\n{len(text)}\n{text}".encode())
        return cls(
            allocation(spec.quant, programs.params),
            {param.name: param.shape for param in programs.params},
            interface_digest(programs.params, {param.name: param.storage for param in programs.params}),
            code.digest(),
        )

    @property
    def layout(self) -> Layout:
        return layout(self.schemes, self.shapes)

    @property
    def integer(self) -> bool:
        """Whether the model has int8 products."""
        return any(scheme.integer for scheme in self.schemes.values())


def deployment_of(text: bytes) -> tuple[Spec, Deployment]:
    """Returns the spec of an artifact, and its deployment.

    Raises IntegrityError if the spec is invalid or cannot be compiled.
    """
    try:
        spec = spec_of(text)
        if problem := next(iter(problems_of(spec)), None):
            raise ValueError(problem.message)
        return spec, Deployment.of(spec)
    except Exception as error:
        raise IntegrityError(f"the stored spec is not valid for this version of specc: {error}") from error
