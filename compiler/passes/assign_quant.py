"""Which scheme stores each parameter: the one rule that names it, else the default."""

from collections.abc import Mapping
from dataclasses import replace

from specc.compiler.pattern import matches
from specc.compiler.programs import LoweringError, Parameter, Programs
from specc.compiler.quant.none import Unquantized
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec import QuantSpec
from specc.compiler.strict import Path, Problem

Allocation = Mapping[str, Scheme]


def allocation(quant: QuantSpec | None, params: tuple[Parameter, ...]) -> Allocation:
    """The scheme of every parameter, by name; all are kept in f32 where the spec quantizes nothing.

    Raises LoweringError with every rule that matches nothing, overlaps another, or cannot take what it matches.
    """
    if quant is None:
        return {param.name: Unquantized(dtype="f32") for param in params}
    problems: list[Problem] = []
    ruled: dict[str, int] = {}
    for i, rule in enumerate(quant.rules):
        covered = [param for param in params if matches(rule.match, param.name)]
        if not covered:
            hint = f"parameters are named like {_examples(params)}"
            problems.append(
                Problem(("quant", "rules", i, "match"), "S305", f"rule {rule.match} matches no parameter", hint)
            )
        for param in covered:
            first = ruled.setdefault(param.name, i)
            if first != i:
                message = f"rules {quant.rules[first].match} and {rule.match} both match {param.name}"
                related = (("the first rule", ("quant", "rules", first, "match")),)
                hint = "narrow one of them: a parameter has one rule"
                problems.append(Problem(("quant", "rules", i, "match"), "S306", message, hint, related))
                break
    chosen: dict[str, Scheme] = {}
    refused: dict[Path, tuple[str, str]] = {}
    for param in params:
        index = ruled.get(param.name)
        scheme: Scheme = quant.default if index is None else quant.rules[index]
        if reason := scheme.rejects(param.shape):
            path: Path = ("quant", "default") if index is None else ("quant", "rules", index)
            refused.setdefault(path, (param.name, reason))
        chosen[param.name] = scheme
    for path, (name, reason) in refused.items():
        hint = f'add a rule that keeps it, e.g. {{match: "*.{name.rpartition(".")[2]}", scheme: none, dtype: f16}}'
        problems.append(Problem(path, "S307", f"{name}: {reason}", hint))
    if quant.promote is not None and not any(matches(quant.promote.match, param.name) for param in params):
        message = f"promote {quant.promote.match} matches no parameter"
        problems.append(
            Problem(("quant", "promote"), "S305", message, f"parameters are named like {_examples(params)}")
        )
    if problems:
        raise LoweringError(tuple(problems))
    return chosen


def assign_quant(programs: Programs, quant: QuantSpec | None) -> Programs:
    """The programs with each parameter's storage stated in the table. Raises LoweringError as `allocation` does."""
    schemes = allocation(quant, programs.params)
    params = tuple(replace(param, storage=storage_name(schemes[param.name])) for param in programs.params)
    return replace(programs, params=params)


def storage_name(scheme: Scheme) -> str:
    """How types and plans call a scheme's stored form, e.g. `int5`."""
    return scheme.label().split(" ")[0].rstrip(",")


def _examples(params: tuple[Parameter, ...]) -> str:
    names = [param.name for param in params]
    return ", ".join(dict.fromkeys((names[0], names[len(names) // 2], names[-1])))
