"""Which optimizer owns each parameter: the first whose pattern covers it."""

from collections.abc import Mapping
from dataclasses import replace

from specc.compiler.pattern import matches
from specc.compiler.programs.programs import LoweringError, Parameter, Programs
from specc.compiler.spec.optimizers import MuonSpec
from specc.compiler.spec.train import TrainSpec
from specc.compiler.strict import Problem


def assign_optimizers(programs: Programs, train: TrainSpec) -> Programs:
    """The programs with the optimizer of each parameter stated in the table. Raises LoweringError as `owners` does."""
    owned = owners(train, programs.params)
    return replace(programs, params=tuple(replace(param, optimizer=owned[param.name]) for param in programs.params))


def owners(train: TrainSpec, params: tuple[Parameter, ...]) -> Mapping[str, int]:
    """Parameter name -> index into `train.optimizers`. Raises LoweringError with every pattern or parameter left
    over."""
    found: dict[str, int] = {}
    for i, optimizer in enumerate(train.optimizers):
        for param in params:
            if param.name not in found and matches(optimizer.match, param.name):
                found[param.name] = i
    problems: list[Problem] = []
    for i, optimizer in enumerate(train.optimizers):
        path = ("train", "optimizers", i, "match")
        if i not in found.values():
            left = "no parameter that an earlier one leaves" if i else "no parameter"
            hint = f"parameters are named like {params[0].name}, {params[-1].name}"
            problems.append(Problem(path, "S308", f"optimizer {optimizer.match} matches {left}", hint))
        flat = [p.name for p in params if found.get(p.name) == i and len(p.shape) != 2]
        if isinstance(optimizer, MuonSpec) and flat:
            message = f"muon orthogonalizes matrices, and {optimizer.match} also matches {flat[0]}"
            problems.append(Problem(path, "S309", message, "narrow its pattern; let adamw take vectors and tables"))
    if orphans := [param.name for param in params if param.name not in found]:
        hint = 'end the list with one that takes the rest: {kind: adamw, match: "*", ...}'
        message = f"no optimizer matches {orphans[0]}" + (f" and {len(orphans) - 1} others" if len(orphans) > 1 else "")
        problems.append(Problem(("train", "optimizers"), "S310", message, hint))
    if problems:
        raise LoweringError(tuple(problems))
    return found
