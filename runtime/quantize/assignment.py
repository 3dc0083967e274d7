"""The storage scheme of each parameter: read from the rules of a spec, and written back as rules."""

from collections.abc import Mapping
from typing import cast

from specc.compiler.passes.assign_quant import allocation
from specc.compiler.programs.programs import Parameter
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.spec import SCHEMES, AnyRule, QuantSpec, Spec, rule_model

Allocation = Mapping[str, Scheme]


def base_schemes(quant: QuantSpec | None, parameters: tuple[Parameter, ...]) -> dict[str, Scheme]:
    """Returns the scheme of each parameter according to the rules of `quant`.

    The settings `promote`, `allocate` and `correct` of `quant` are not applied.
    """
    return {name: _without_match(scheme) for name, scheme in allocation(quant, parameters).items()}


def _without_match(scheme: Scheme) -> Scheme:
    kind = next(kind for kind in SCHEMES.models if isinstance(scheme, kind))
    settings = {name: getattr(scheme, name) for name in kind.model_fields}
    return kind.model_validate(settings)


def resolved(spec: Spec, schemes: Allocation) -> Spec:
    """Returns `spec` with the chosen schemes, as one rule of `quant` per parameter.

    The settings `promote`, `allocate` and `correct` are removed from `quant`.
    """
    assert spec.quant is not None
    rules = tuple(_rule(name, scheme) for name, scheme in schemes.items())
    decided = {"rules": rules, "promote": None, "allocate": None, "correct": None}
    return spec.model_copy(update={"quant": spec.quant.model_copy(update=decided)})


def _rule(name: str, scheme: Scheme) -> AnyRule:
    kind = next(kind for kind in SCHEMES.models if isinstance(scheme, kind))
    return cast(AnyRule, rule_model(kind).model_validate({**dict(scheme), "match": name}))
