"""Which scheme stores each parameter: the one rule that names it, else the default."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from specc.compiler.pattern import matches
from specc.compiler.programs import LoweringError, Parameter, Programs
from specc.compiler.quant.none import Unquantized
from specc.compiler.quant.scheme import Scheme, SchemeError
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
    refused: dict[Path, list[tuple[str, str]]] = {}
    for param in params:
        index = ruled.get(param.name)
        scheme: Scheme = quant.default if index is None else quant.rules[index]
        if reason := scheme.rejects(param.shape):
            path: Path = ("quant", "default") if index is None else ("quant", "rules", index)
            refused.setdefault(path, []).append((param.name, reason))
        chosen[param.name] = scheme
    for path, found in refused.items():
        hint = keeping(chosen[found[0][0]], pattern_of(name for name, _ in found), "f16")
        more = f" (and {len(found) - 1} more parameters)" if len(found) > 1 else ""
        problems.append(Problem(path, "S307", f"{found[0][0]}: {found[0][1]}{more}", hint))
    problems += _promotion_problems(quant, params, chosen)
    if problems:
        raise LoweringError(tuple(problems))
    return chosen


def stated(quant: QuantSpec, scheme: Scheme) -> Path:
    """Where the spec says a scheme of an allocation: at a rule, or the default."""
    found = [i for i, rule in enumerate(quant.rules) if rule is scheme]
    return ("quant", "rules", found[0]) if found else ("quant", "default")


def pattern_of(names: Iterable[str]) -> str:
    """A pattern for all parameters with the last words of these names."""
    words = ",".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return f"*.{{{words}}}" if "," in words else f"*.{words}"


def keeping(scheme: Scheme, pattern: str, dtype: str = "f32") -> str:
    """How the parameters of `pattern`, which have `scheme`, can be kept as they are. A parameter has one rule, so that
    beside a rule that names it no other helps."""
    kept = f'{{match: "{pattern}", scheme: none, dtype: {dtype}}}'
    rule = getattr(scheme, "match", None)
    if rule is None:
        return f"add a rule that keeps what it cannot take, e.g. {kept}"
    narrowed = f'narrow {{match: "{rule}"}}, or make its scheme the default'
    return f"a parameter has one rule: {narrowed}; then keep what it cannot take, e.g. {kept}"


def _promotion_problems(quant: QuantSpec, params: tuple[Parameter, ...], chosen: Allocation) -> Iterator[Problem]:
    """A promotion that matches nothing, or no parameter that could have more bits, or fewer than it counts."""
    if quant.promote is None:
        return
    covered = [param.name for param in params if matches(quant.promote.match, param.name)]
    if not covered:
        message, hint = (
            f"promote {quant.promote.match} matches no parameter",
            f"parameters are named like {_examples(params)}",
        )
        yield Problem(("quant", "promote"), "S305", message, hint)
        return
    able = [name for name in covered if _has_more_bits(chosen[name], quant.promote.bits)]
    if not able:
        message = f"promote to {quant.promote.bits} bits gives no parameter more than it has"
        yield Problem(("quant", "promote", "bits"), "S311", message, "promote to more bits than the default has")
    elif quant.promote.count is not None and quant.promote.count > len(able):
        message = (
            f"promote counts {quant.promote.count} tensors, but only {len(able)} can have {quant.promote.bits} bits"
        )
        yield Problem(("quant", "promote", "count"), "S311", message, f"use at most {len(able)}")


def _has_more_bits(scheme: Scheme, bits: int) -> bool:
    """Whether a scheme can be had with `bits`, and has fewer."""
    if scheme.bits_per_value() >= bits:
        return False
    try:
        scheme.with_bits(bits)
    except SchemeError:
        return False
    return True


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
