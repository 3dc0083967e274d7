"""What an artifact of a spec holds, by the local compiler; needs no torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from specc.compiler.build import compile_loaded, interface_digest, spec_of
from specc.compiler.passes.assign_quant import allocation
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.check import problems_of
from specc.compiler.spec.spec import Spec
from specc.runtime.artifact.layout import Layout, layout
from specc.runtime.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a resolved spec stores of a model, and the digests that an artifact of it carries.

    `code` is the SHA-256 of the generated code of all targets, so that it does not depend on where one is.
    """

    schemes: Mapping[str, Scheme]
    shapes: Mapping[str, tuple[int, ...]]
    interface: bytes
    code: bytes

    @classmethod
    def of(cls, spec: Spec) -> "Deployment":
        """Raises LoweringError when the spec makes no model."""
        built = compile_loaded(spec.at_rest, None)
        programs = next(iter(built.plans.values())).programs
        code = hashlib.sha256()
        for name, text in sorted(built.files.items()):
            if "/" in name:  # PLAN.md and the manifest, beside the folders, are no code
                code.update(f"{name}\n{len(text)}\n{text}".encode())
        return cls(
            allocation(spec.quant, programs.params),
            {param.name: param.shape for param in programs.params},
            interface_digest(programs.params, {param.name: param.storage for param in programs.params}),
            code.digest(),
        )

    @property
    def layout(self) -> Layout:
        """The arrays of an artifact, in file order."""
        return layout(self.schemes, self.shapes)

    @property
    def integer(self) -> bool:
        """Whether arrays are multiplied as they are stored, so that the file also says what they are."""
        return any(scheme.integer for scheme in self.schemes.values())


def deployment_of(text: bytes) -> tuple[Spec, Deployment]:
    """What the local compiler makes of the spec in an artifact. Raises IntegrityError if that is no model."""
    try:
        spec = spec_of(text)
        if problem := next(iter(problems_of(spec)), None):
            raise ValueError(problem.message)
        return spec, Deployment.of(spec)
    except Exception as error:
        raise IntegrityError(f"its spec is not one that this specc understands: {error}") from error
