"""Collects the results that `specc eval` recorded for groups of runs, by task and model."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specc.runtime.compare.groups import Group, Member
from specc.runtime.compare.statistics import Summary
from specc.runtime.storage.evaluations import recorded_evaluations
from specc.runtime.tables import aligned


@dataclass(frozen=True, slots=True)
class MeasureResult:
    """The values of one measure, such as accuracy, for a group of runs.

    Attributes:
        summary: the number, mean and sample standard deviation of the values of the runs.
        error: the root mean square over the runs of the standard error over examples. None if a result has no standard
            error.
    """

    summary: Summary
    error: float | None

    @property
    def spread(self) -> float | None:
        """The standard deviation over the runs. For a single run, the result is the standard error over the examples.
        The result is None if this standard error is unknown.
        """
        return self.summary.std if self.summary.n > 1 else self.error


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The results of one evaluation for all groups.

    Attributes:
        file: the name of the file or of the data on which the models were evaluated. Other evaluations of the same name
            have other digests; the field then also contains the start of the digest.
        task: the kind of the task, with its settings.
        sha256: the digest of the examples, or of the data and settings.
        model: `run` for the trained weights, `quantized` for the quantized weights.
        groups: the measures of each group that has a result, by group name and measure name.
    """

    file: str
    task: str
    sha256: str
    model: str
    groups: Mapping[str, Mapping[str, MeasureResult]]

    @property
    def title(self) -> str:
        return f"{self.file} ({self.task}, {'trained' if self.model == 'run' else self.model} weights)"

    @property
    def measures(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for measures in self.groups.values() for name in measures))


Key = tuple[str, str, str]


def evaluations_of(groups: Sequence[Group], notes: list[str]) -> tuple[EvaluationResult, ...]:
    """Collects the recorded evaluations of groups of runs.

    Two results belong to the same evaluation if they have the same task, digest and model. The name of the file may
    differ. A result is omitted if the evaluated weights are not the weights of the last step of the run.

    Args:
        groups: the groups, without incomplete runs.
        notes: the function appends a message for each omitted result, for each damaged file, and for each evaluation
            without a result for some runs.

    Returns:
        The evaluations, sorted by file, task and model.
    """
    files: dict[Key, str] = {}
    measures_by_key: dict[Key, dict[str, list[Mapping[str, Any]]]] = {}
    for group in groups:
        for member in group.members:
            for key, facts in _of_last_step(member, notes).items():
                files.setdefault(key, facts["file"])
                measures_by_key.setdefault(key, {}).setdefault(group.name, []).append(facts["measures"])
    evaluations = []
    titles = Counter((file, *key[:2]) for key, file in files.items())
    for key, values in sorted(measures_by_key.items(), key=lambda item: (files[item[0]], item[0])):
        task, model, digest = key
        file = files[key] if titles[files[key], task, model] == 1 else f"{files[key]}, sha256 {digest[:8]}"
        measured = {name: _measures(results) for name, results in values.items()}
        result = EvaluationResult(file, task, digest, model, measured)
        evaluations.append(result)
        for group in groups:
            have, all_runs = len(values.get(group.name, ())), len(group.members)
            if have < all_runs:
                notes.append(f"{result.title}: {have} of {all_runs} runs of {group.name} have a result")
    return tuple(evaluations)


def _of_last_step(member: Member, notes: list[str]) -> Mapping[Key, Mapping[str, Any]]:
    """Returns one result per key, also if the run was scored on several files of equal content."""
    last = member.history.steps[-1].step if member.history.steps else None
    results: dict[Key, Mapping[str, Any]] = {}
    earlier: dict[Key, Mapping[str, Any]] = {}
    for facts in recorded_evaluations(member.run.directory, notes.append):
        step, key = facts.get("step"), (facts["task"], facts["model"], facts["sha256"])
        (results if step is None or last is None or step == last else earlier)[key] = facts
    for key in sorted(earlier.keys() - results.keys()):
        file, step = earlier[key]["file"], earlier[key]["step"]
        notes.append(f"{member.name}: the result of {file} at step {step:,} is left out; score it again")
    return results


def _measures(results: Sequence[Mapping[str, Any]]) -> dict[str, MeasureResult]:
    names = [name for name in results[0] if all(name in result for result in results)]
    measures = {}
    for name in names:
        errors = [result[name].get("standard_error") for result in results]
        known = None not in errors
        error = math.sqrt(sum(value**2 for value in errors) / len(errors)) if known else None
        measures[name] = MeasureResult(Summary.of([float(result[name]["value"]) for result in results]), error)
    return measures


def evaluation_lines(evaluations: Sequence[EvaluationResult]) -> Iterator[str]:
    for evaluation in evaluations:
        rows = [["group", "n", *evaluation.measures]]
        for name, measures in evaluation.groups.items():
            count = max((measure.summary.n for measure in measures.values()), default=0)
            rows.append([name, str(count), *(_cell(measures.get(measure)) for measure in evaluation.measures)])
        yield from ("", evaluation.title, *aligned(rows))
    if evaluations:
        yield "±: sample standard deviation over the runs; for one run, the standard error over its examples"


def _cell(measure: MeasureResult | None) -> str:
    if measure is None:
        return "-"
    return f"{measure.summary.mean:.4f}" + ("" if measure.spread is None else f" ± {measure.spread:.4f}")
