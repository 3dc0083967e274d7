"""Assigns a quantization scheme to each parameter: the scheme of the matching rule, or the default scheme. Also checks
`promote`, `allocate` and `correct`, settings that apply after training."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace

from specc.compiler.errors import counted
from specc.compiler.ir.graph import Node
from specc.compiler.ir.op import Op
from specc.compiler.ops.experts.dispatch import GroupedLinear
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.shape import Embedding
from specc.compiler.pattern import matches
from specc.compiler.programs.programs import LoweringError, Parameter, Programs, flatten
from specc.compiler.quant.none import Unquantized
from specc.compiler.quant.rows import correctable, largest_rank
from specc.compiler.quant.scheme import Scheme, variants
from specc.compiler.spec.spec import QuantSpec
from specc.compiler.strict import Path, Problem

Allocation = Mapping[str, Scheme]


def allocation(
    quant: QuantSpec | None,
    params: tuple[Parameter, ...],
    seen: frozenset[str] | None = None,
    looked: frozenset[str] = frozenset(),
) -> Allocation:
    """Returns the scheme of every parameter, by name. Without quantization, all parameters are stored in f32.

    Args:
        quant: The quantization of the spec, or None.
        params: The parameter table.
        seen: The first result of `observed`: the names of the weights of matrix products that calibration observes. If
            None, the function does not check whether calibration observes the inputs that the schemes need.
        looked: The second result of `observed`: the names of the embedding tables whose lookups calibration observes.

    Raises:
        LoweringError: If a rule matches nothing, overlaps another rule, or does not fit a parameter. Also if a scheme
            needs inputs that calibration does not observe, or if the parameters do not support `promote`, `allocate` or
            `correct`. The error lists all problems.
    """
    if quant is None:
        return {param.name: Unquantized(dtype="f32") for param in params}
    problems: list[Problem] = []
    ruled: dict[str, int] = {}
    for i, rule in enumerate(quant.rules):
        covered = [param for param in params if matches(rule.match, param.name)]
        if not covered:
            names = [param.name for param in params]
            problems.append(_unmatched(("quant", "rules", i, "match"), f"the rule `{rule.match}`", names))
        for param in covered:
            first = ruled.setdefault(param.name, i)
            if first != i:
                message = f"the rules `{quant.rules[first].match}` and `{rule.match}` both match {param.name}"
                related = (("the first rule", ("quant", "rules", first, "match")),)
                hint = "narrow one of the two patterns; a parameter can have only one rule"
                problems.append(Problem(("quant", "rules", i, "match"), "S306", message, hint, related))
                break
    chosen: dict[str, Scheme] = {}
    refused: dict[Path, list[tuple[str, str]]] = {}
    blind: dict[Path, list[str]] = {}
    for param in params:
        index = ruled.get(param.name)
        scheme: Scheme = quant.default if index is None else quant.rules[index]
        path: Path = ("quant", "default") if index is None else ("quant", "rules", index)
        if reason := scheme.rejects(param.shape):
            refused.setdefault(path, []).append((param.name, reason))
        elif scheme.needs_hessian and seen is not None and param.name not in seen | looked:
            blind.setdefault(path, []).append(param.name)
        chosen[param.name] = scheme
    for path, reasons in refused.items():
        hint = keeping(chosen[reasons[0][0]], pattern_of([name for name, _ in reasons]), "f16")
        problems.append(
            Problem(path, "S307", f"{reasons[0][0]}: {reasons[0][1]}{and_more(reasons, 'this also applies to')}", hint)
        )
    problems += [_blind(path, names, chosen) for path, names in blind.items()]
    known = frozenset(chosen) if seen is None else seen
    problems += _promotion_problems(quant, chosen, known)
    problems += _allocation_problems(quant, chosen, known | looked)
    problems += _correction_problems(quant, chosen, {param.name: param.shape for param in params})
    if problems:
        raise LoweringError(tuple(problems))
    return chosen


def stated(quant: QuantSpec, scheme: Scheme) -> Path:
    """Returns the spec path of a parameter's scheme: the path of a rule, or the path of the default."""
    positions = [i for i, rule in enumerate(quant.rules) if rule is scheme]
    return ("quant", "rules", positions[0]) if positions else ("quant", "default")


def pattern_of(names: Collection[str]) -> str:
    """Returns a pattern of parameter names. A name matches if its last component, such as `weight`, is the last
    component of one of `names`."""
    words = dict.fromkeys(name.rpartition(".")[2] for name in names)
    whole = "*" if "" in {name.rpartition(".")[0] for name in names} else "*."  # some names may be outside of all parts
    return f"{whole}{{{','.join(words)}}}" if len(words) > 1 else f"{whole}{next(iter(words))}"


def keeping(scheme: Scheme, pattern: str, dtype: str = "f32") -> str:
    """Returns a hint that explains how to store the parameters that match `pattern` in `dtype`, without quantization.
    `scheme` is the current scheme of these parameters. A parameter may match only one rule, so the hint may be to
    narrow an existing rule."""
    exception = f'{{match: "{pattern}", scheme: none, dtype: {dtype}}}'
    rule = getattr(scheme, "match", None)
    if rule is None:
        return f"add a rule for the parameters that this scheme cannot quantize, e.g. {exception}"
    narrowed = f'narrow {{match: "{rule}"}}, or make its scheme the default'
    return f"{narrowed}; then add a rule for the parameters that this scheme cannot quantize, e.g. {exception}"


def fitting(schemes: Collection[Scheme], promotes: bool) -> str:
    """Returns a hint that explains how to make an artifact fit into its budget. `schemes` are the schemes of parameters
    whose bits `quant.allocate` could choose. `promotes` states whether the spec has `quant.promote`."""
    fewer = {bits for scheme in schemes for bits in _numbers(scheme) if bits < scheme.bits_per_value()}
    if fewer:
        same = {int(scheme.bits_per_value()) for scheme in schemes if _numbers(scheme)}
        instead = " instead of quant.promote" if promotes else ""
        change = f"use `quant.allocate: {{bits: {sorted(fewer | same)}}}`{instead}"
    else:
        change = "give some parameters a scheme with fewer bits, such as gptq or round"
    return f"{change}, or raise quant.budget_bytes"


def and_more(items: Sized, verb: str) -> str:
    """Returns the end of a message about the first of `items`, such as `; so do 3 more parameters`. `verb` is the verb
    in this text. The result is empty if there are no more items."""
    return f"; {verb} {counted(len(items) - 1, 'more parameter')}" if len(items) > 1 else ""


def _blind(path: Path, names: list[str], chosen: Allocation) -> Problem:
    needs = f"({chosen[names[0]].label()}) needs calibration, but calibration does not measure this parameter"
    message = f"{names[0]}: the scheme {needs}{and_more(names, 'this also applies to')}"
    rule = f'{{match: "{pattern_of(names)}", scheme: round, bits: 8}}'
    return Problem(path, "S307", message, f"use `scheme: round`, which needs no calibration, e.g. by a rule {rule}")


def _promotion_problems(quant: QuantSpec, chosen: Allocation, seen: frozenset[str]) -> Iterator[Problem]:
    if (promote := quant.promote) is None:
        return
    known = _calibrated(("quant", "promote"), f"`{promote.match}` of `promote`", promote.match, chosen, seen, "product")
    if isinstance(known, Problem):
        yield known
        return
    able = [name for name in known if _has_more_bits(chosen[name], promote.bits)]
    if not able:
        message = f"`promote` changes nothing: every parameter that it matches already has {promote.bits} bits or more"
        yield Problem(
            ("quant", "promote", "bits"), "S311", message, "use more `bits` than the scheme of the parameters"
        )
    elif promote.count is not None and promote.count > len(able):
        message = f"`count` is {promote.count}, but only {counted(len(able), 'parameter')} can have {promote.bits} bits"
        yield Problem(("quant", "promote", "count"), "S311", message, f"use at most {len(able)}")


def _allocation_problems(quant: QuantSpec, chosen: Allocation, seen: frozenset[str]) -> Iterator[Problem]:
    if (allocate := quant.allocate) is None:
        return
    path: Path = ("quant", "allocate", "match")
    known = _calibrated(path, f"`{allocate.match}` of `allocate`", allocate.match, chosen, seen, "product or lookup")
    if isinstance(known, Problem):
        yield known
        return
    # Counted once per scheme, because most parameters share a scheme
    schemes = {id(chosen[name]): chosen[name] for name in known}
    counts = {key: len(variants(scheme, allocate.bits, allocate.clip_stds)) for key, scheme in schemes.items()}
    options = {name: counts[id(chosen[name])] for name in known}
    listed, path = [*map(str, sorted(set(allocate.bits)))], ("quant", "allocate", "bits")
    if left := [name for name in known if not options[name] and _widths(chosen[name])]:
        more = and_more(left, "neither can")
        message = f"{left[0]} ({chosen[left[0]].label()}) cannot have {' or '.join(listed)} bits{more}"
        hint = f"use {_widths(chosen[left[0]])}, or narrow the `match` of `allocate`"
        yield Problem(path, "S311", message, hint)
    elif max(options.values()) < 2:
        labels = {chosen[name].label(): _widths(chosen[name]) or "no other width" for name in known}
        message = (
            f"`allocate` has nothing to choose: no parameter can have more than one of the widths {', '.join(listed)}"
        )
        yield Problem(path, "S311", message, "; ".join(f"{label} can have {text}" for label, text in labels.items()))


def _widths(scheme: Scheme) -> str:
    numbers = _numbers(scheme)
    return f"{' to '.join(map(str, sorted({numbers[0], numbers[-1]})))} bits" if numbers else ""


def _numbers(scheme: Scheme) -> list[int]:
    """Returns the numbers of bits that the scheme can have, in ascending order."""
    return [int(variant.bits_per_value()) for variant in variants(scheme, range(2, 9), ())]


def _correction_problems(
    quant: QuantSpec, chosen: Allocation, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Problem]:
    if (correct := quant.correct) is None:
        return
    if not any(matches(correct.match, name) for name in chosen):
        yield _unmatched(("quant", "correct", "match"), f"`{correct.match}` of `correct`", chosen)
        return
    able = [name for name, scheme in chosen.items() if matches(correct.match, name) and correctable(scheme)]
    ranks = sorted((largest_rank(shapes[name]) for name in able), reverse=True)
    count = len(able)
    wanted = f"`count` is {correct.count}{'' if 'count' in correct.model_fields_set else ' by default'}"
    if count < correct.count:
        corrected = f"only {counted(count, 'parameter')}" if count else "no parameter"
        message = f"{wanted}, but {corrected} of `{correct.match}` can be corrected"
        hint = f"use at most {count}" if count else "match parameters of `scheme: round` or `scheme: gptq`"
        yield Problem(("quant", "correct", "count"), "S311", message, hint)
    elif (limit := ranks[correct.count - 1]) < correct.rank:
        enough = sum(rank >= correct.rank for rank in ranks)
        large = f"only {counted(enough, 'parameter')}" if enough else "no parameter"
        message = f"{large} of `{correct.match}` can have a correction of rank {correct.rank}, but {wanted}"
        hint = f"use a `rank` of at most {limit}"
        yield Problem(("quant", "correct", "rank"), "S311", message, hint)


def _calibrated(
    path: Path, what: str, pattern: str, chosen: Allocation, seen: frozenset[str], use: str
) -> list[str] | Problem:
    covered = [name for name in chosen if matches(pattern, name)]
    if not covered:
        return _unmatched(path, what, chosen)
    hint = 'match weights of matrix products of a text model, e.g. with `match: "blocks.*"`'
    nothing = Problem(path, "S311", f"{what} matches no parameter that calibration measures in a {use}", hint)
    return [name for name in covered if name in seen] or nothing


def _unmatched(path: Path, what: str, params: Iterable[str]) -> Problem:
    return Problem(
        path, "S305", f"{what} matches no parameter", f"the parameters have names such as {_examples(params)}"
    )


def _has_more_bits(scheme: Scheme, bits: int) -> bool:
    return scheme.bits_per_value() < bits and bool(variants(scheme, (bits,), ()))


def assign_quant(programs: Programs, quant: QuantSpec | None) -> Programs:
    """Returns the programs with the storage format of each parameter. Raises LoweringError in the cases that
    `allocation` lists."""
    schemes = allocation(quant, programs.stored, *observed(programs))
    names = {name: storage_name(scheme) for name, scheme in schemes.items()}
    params = tuple(replace(param, storage=names.get(param.name, "")) for param in programs.params)
    return replace(programs, params=params)


def observed(programs: Programs) -> tuple[frozenset[str], frozenset[str]]:
    """Returns two sets of parameter names: the weights of the matrix products that calibration observes, and the
    embedding tables whose lookups calibration observes. Calibration runs the program `score` of a text model, and
    observes all products and lookups of this program. For other models, both sets are empty. `programs` are the
    programs before any pass that rewrites graphs."""
    nodes = _scored(programs)
    return frozenset(_reads(nodes, Linear, GroupedLinear)), frozenset(_reads(nodes, Embedding))


def reused(programs: Programs) -> frozenset[str]:
    """Returns the parameters of a text model that `score` reads in several products or in a lookup. These are the
    weights of blocks that run more than once, and the embedding tables. Matrices of experts are not included, because
    calibration sums X^T X of the experts' inputs over all calls."""
    nodes = _scored(programs)
    repeated = (name for name, count in _reads(nodes, Linear).items() if count > 1)
    return frozenset(_reads(nodes, Embedding)).union(repeated)


def _scored(programs: Programs) -> tuple[Node, ...]:
    score = programs.program("score")
    return flatten(programs, score).nodes if [name for name, _ in score.inputs] == ["ids", "targets"] else ()


def _reads(nodes: Sequence[Node], *kinds: type[Op]) -> Counter[str]:
    refs = (ref for node in nodes if isinstance(node.op, kinds) for ref in node.inputs[1:])
    return Counter(ref[1:] for ref in refs if ref.startswith("@"))


def storage_name(scheme: Scheme) -> str:
    """Returns the name of a scheme in types and in PLAN.md, such as `int5`."""
    return scheme.label().split(" ")[0].rstrip(",")


def _examples(params: Iterable[str]) -> str:
    names = list(params)
    return ", ".join(dict.fromkeys((names[0], names[len(names) // 2], names[-1])))
