"""Assigns each parameter to the first optimizer whose pattern matches its name."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specc.compiler.errors import counted
from specc.compiler.pattern import matches
from specc.compiler.programs.programs import LoweringError, Programs
from specc.compiler.spec.optimizers.optimizer import OptimizerSpec
from specc.compiler.spec.train import TrainSpec
from specc.compiler.strict import Problem


def assign_optimizers(programs: Programs, train: TrainSpec) -> Programs:
    """Returns the programs with the optimizer of each parameter. Raises LoweringError in the cases that `owners`
    lists."""
    owner = owners(train.optimizers, {param.name: param.shape for param in programs.params})
    return replace(programs, params=tuple(replace(param, optimizer=owner[param.name]) for param in programs.params))


def owners(optimizers: Sequence[OptimizerSpec], shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, int]:
    """Maps each parameter name, in the order of `shapes`, to an index into `optimizers`.

    Raises:
        LoweringError: If an optimizer matches no parameter that earlier optimizers leave, or matches a parameter that
            it cannot update. Also if no optimizer matches a parameter. The error lists all problems.
    """
    owner = {
        name: next((i for i, optimizer in enumerate(optimizers) if matches(optimizer.match, name)), None)
        for name in shapes
    }
    problems: list[Problem] = []
    for i, optimizer in enumerate(optimizers):
        path = ("train", "optimizers", i, "match")
        names = [name for name in shapes if owner[name] == i]
        if not names:
            left = "no parameter, or only parameters of earlier optimizers" if i else "no parameter"
            hint = f"the parameters have names such as {', '.join([*shapes][:: max(len(shapes) - 1, 1)])}"
            problems.append(Problem(path, "S308", f"the optimizer of `{optimizer.match}` matches {left}", hint))
        refusals = ((name, optimizer.refuses(shapes[name])) for name in names)
        if refusal := next(((name, reason) for name, reason in refusals if reason), None):
            name, reason = refusal
            message = f"{reason}, but `{optimizer.match}` also matches {name}"
            hint = f"narrow the pattern, or put an optimizer for {name} before it"
            problems.append(Problem(path, "S309", message, hint))
    if orphans := [name for name in shapes if owner[name] is None]:
        hint = 'end the list with an optimizer for all other parameters: {kind: adamw, match: "*", ...}'
        more = f" and {counted(len(orphans) - 1, 'more parameter')}" if len(orphans) > 1 else ""
        message = f"no optimizer matches {orphans[0]}{more}"
        problems.append(Problem(("train", "optimizers"), "S310", message, hint))
    if problems:
        raise LoweringError(tuple(problems))
    return {name: i for name, i in owner.items() if i is not None}
