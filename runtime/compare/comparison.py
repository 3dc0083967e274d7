"""Compares groups of runs by their logs: the final metric, Welch's t-test for each pair of groups, training time and
throughput.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

from specc.runtime.compare.evaluations import EvaluationResult, evaluations_of
from specc.runtime.compare.groups import CompareError, Group, Member
from specc.runtime.compare.statistics import Summary, Welch, welch
from specc.runtime.metrics.names import BITS, NATS, Metric, metric_of
from specc.runtime.storage.records import note_of_unreadable
from specc.runtime.storage.run_directory import differences
from specc.runtime.storage.run_history import NOT_SCORED

THRESHOLD = 0.005  # in nats per token: the improvement that openai/parameter-golf requires for a record
LEVEL = 0.01  # the p-value that openai/parameter-golf requires for the improvement
PAIRS_OF_ALL = 6  # with more groups than this number, each group is compared only with the first group
UNFINISHED = "finish a run with `specc train --run RUN --resume auto`"
SHOWN = 12  # the maximum number of differences between specs that are listed per pair


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The results of a group of runs.

    Attributes:
        name: the name of the group.
        runs: the names of the complete runs of the group.
        seeds: the seed of each run.
        values: the final value of the metric for each run.
        summary: the number, mean and sample standard deviation of `values`.
        nats: the number, mean and sample standard deviation of the final losses in nats per token. None if the losses
            of the compared runs are not comparable.
        seconds: the mean training time of the runs.
        tokens_per_second: the mean throughput of the runs; None if no log contains a throughput.
    """

    name: str
    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    summary: Summary
    nats: Summary | None
    seconds: float
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class PairResult:
    """The comparison of two groups of runs.

    Attributes:
        first, second: the names of the groups.
        test: Welch's t-test of the metric. None if a group has a single run, or if all runs of each group have the same
            value.
        reason: why `test` is None.
        nats: Welch's t-test of the final loss in nats per token; None without a test.
        improves_by_threshold: the one-sided p-value for the null hypothesis that the loss of the second group is lower
            by at most THRESHOLD nats. None if `nats` is None.
        spec: the differences between the specs of the groups, except the seed. The mapping is from the path of a field
            to the value in the first spec and the value in the second spec.
    """

    first: str
    second: str
    test: Welch | None
    reason: str
    nats: Welch | None
    improves_by_threshold: float | None
    spec: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Comparison:
    """The comparison of groups of runs. `notes` has one sentence for each result that is omitted or not comparable."""

    metric: Metric
    groups: tuple[GroupResult, ...]
    pairs: tuple[PairResult, ...]
    evaluations: tuple[EvaluationResult, ...] = ()
    notes: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        return {
            "metric": asdict(self.metric),
            "groups": [asdict(group) for group in self.groups],
            "pairs": [asdict(pair) for pair in self.pairs],
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations],
            "threshold": {"nats": THRESHOLD, "p": LEVEL},
            "notes": list(self.notes),
        }


def compare(groups: Sequence[Group]) -> tuple[Comparison, tuple[Group, ...]]:
    """Compares groups of runs by their logs and recorded evaluations.

    Args:
        groups: the groups.

    Returns:
        The comparison, and the groups without their incomplete runs.

    Raises:
        CompareError: if the runs have different metrics or data, or if too few runs are complete.
    """
    notes: list[str] = []
    groups = tuple(group for group in (_complete(group, notes) for group in groups) if group.members)
    if not groups:
        raise CompareError(f"no run is complete: {notes[0]}", UNFINISHED)
    _require_equal_metric(groups)
    members = [member for group in groups for member in group.members]
    metric = metric_of(members[0].run.spec.eval.metric, [member.history.final for member in members])
    metric, in_nats = _comparable(members, metric, notes)
    notes += [note for group in groups for note in _doubts(group)]
    results = tuple(_group(group, metric, in_nats) for group in groups)
    numbers = list(combinations(range(len(groups)), 2))
    if len(groups) > PAIRS_OF_ALL:
        numbers = [(0, i) for i in range(1, len(groups))]
        notes.append(f"{len(groups)} groups: each is compared with the first, {groups[0].name}")
    pairs = tuple(_pair((groups[a], results[a]), (groups[b], results[b])) for a, b in numbers)
    if (tested := sum(pair.test is not None for pair in pairs)) > 1:
        notes.append(f"{tested} pairs were tested, and p is not corrected for their number")
    evaluations = evaluations_of(groups, notes)
    return Comparison(metric, results, pairs, evaluations, tuple(notes)), groups


def _complete(group: Group, notes: list[str]) -> Group:
    complete = tuple(member for member in group.members if member.history.final is not None)
    for member in group.members:
        if member not in complete:
            notes.append(f"{member.name} is left out: {_why_unfinished(member)}")
    unreadable = [(member.run.log, count) for member in group.members if (count := member.history.unreadable)]
    notes += [note_of_unreadable(log, count) for log, count in unreadable]
    if group.named and not complete:
        raise CompareError(f"{group.name} has no complete run: {_why_unfinished(group.first)}", UNFINISHED)
    return replace(group, members=complete)


def _why_unfinished(member: Member) -> str:
    history = member.history
    if history.complete:
        return NOT_SCORED
    return history.message or (
        f"it ended after step {history.steps[-1].step:,}" if history.steps else "it has no steps"
    )


def _require_equal_metric(groups: Sequence[Group]) -> None:
    first = groups[0].first
    for group in groups:
        for member in group.members:
            metric, other = first.run.spec.eval.metric, member.run.spec.eval.metric
            if metric != other:
                message = f"{first.name} is scored by {metric}, but {member.name} by {other}"
                raise CompareError(message, "compare runs with the same metric")


def _comparable(members: Sequence[Member], metric: Metric, notes: list[str]) -> tuple[Metric, bool]:
    first = members[0]
    other = next((member for member in members if not _same_data(first, member)), None)
    if other is None:
        unknown = [member.name for member in members if member.run.data_digests is None]
        if unknown:
            notes.append(f"{unknown[0]} states no digest of its data, so the data may differ")
        return metric, True
    here, there = _tokenizer(first), _tokenizer(other)
    data = f"the validation split of {first.name} ({first.run.data}) and that of {other.name} ({other.run.data})"
    if here == there:
        if _digest(first) == _digest(other):
            tokens = [int((member.history.final or {})["tokens"]) for member in (first, other)]
            message = f"{first.name} was scored on {tokens[0]:,} tokens, but {other.name} on {tokens[1]:,}"
            raise CompareError(message, "train both with the same `train.validate_tokens`")
        raise CompareError(f"{data} differ", "train on the same data")
    sizes = {_scored_bytes(member) for member in members} if metric == BITS else set()
    if metric != BITS or len(sizes) > 1 or len({member.run.data for member in members}) > 1:
        message = f"{data} have the tokenizers {here} and {there}, and are not known to be the same text"
        raise CompareError(message, "train on the same data, and score the whole split: train.validate_tokens: null")
    (size,) = sizes
    notes.append(f"the tokenizers differ ({here}, {there}): only bits per byte are compared, over {size:,} bytes")
    return metric, False


def _same_data(first: Member, other: Member) -> bool:
    same = (
        _digest(first) == _digest(other)
        if None not in (_digest(first), _digest(other))
        else (first.run.data == other.run.data and _tokenizer(first) == _tokenizer(other))
    )
    scored = ((member.history.final or {}).get("tokens") for member in (first, other))
    return same and len(set(scored)) == 1


def _digest(member: Member) -> str | None:
    return member.run.data_digests.val if member.run.data_digests is not None else None


def _tokenizer(member: Member) -> str:
    return str(getattr(member.run.spec.train.data, "tokenizer", member.run.spec.train.data.kind))


def _scored_bytes(member: Member) -> int:
    final: Mapping[str, Any] = member.history.final or {}
    size: float = final["nats"] * final["tokens"] / math.log(2) / final["bpb"]
    return round(size)


def _doubts(group: Group) -> Iterator[str]:
    """Yields each reason why the runs of a group are not independent samples of one distribution, as a sentence."""
    first = group.first
    for member in group.members[1:]:
        if member.kind != first.kind:
            paths = ", ".join(_spec_differences(first, member)) or "the target or the data"
            yield f"{group.name}: {member.name} and {first.name} differ in {paths}, and not only in the seed"
            break
    for (seed, _), count in Counter((member.seed, member.kind) for member in group.members).items():
        if count > 1:
            yield f"{group.name}: {count} runs have the same spec and the seed {seed}; they are not independent samples"


def _spec_differences(first: Member, second: Member) -> dict[str, tuple[Any, Any]]:
    old, new = (member.run.spec.model_dump(mode="json") for member in (first, second))
    return {path: (was, now) for path, was, now in differences(old, new) if path != "train.seed"}


def _group(group: Group, metric: Metric, in_nats: bool) -> GroupResult:
    finals = [member.history.final for member in group.members]
    values = tuple(value for final in finals if (value := metric.value(final)) is not None)
    nats = [value for final in finals if (value := NATS.value(final)) is not None] if in_nats else []
    rates = [rate for member in group.members if (rate := member.history.tokens_per_second) is not None]
    return GroupResult(
        group.name,
        tuple(member.name for member in group.members),
        tuple(member.seed for member in group.members),
        values,
        Summary.of(values),
        Summary.of(nats) if nats else None,
        sum(member.history.seconds for member in group.members) / len(group.members),
        sum(rates) / len(rates) if rates else None,
    )


def _pair(first: tuple[Group, GroupResult], second: tuple[Group, GroupResult]) -> PairResult:
    (group, a), (other, b) = first, second
    test = welch(a.summary, b.summary)
    reason = ""
    if test is None:
        few = [result.name for result in (a, b) if result.summary.n < 2]
        reason = f"{' and '.join(few)} {'has' if len(few) == 1 else 'have'} one run: a test needs two in each group"
        reason = reason if few else "neither group has any spread"
    nats = welch(a.nats, b.nats) if a.nats is not None and b.nats is not None else None
    beyond = nats.p_below(-THRESHOLD) if nats is not None else None
    return PairResult(a.name, b.name, test, reason, nats, beyond, _spec_differences(group.first, other.first))
