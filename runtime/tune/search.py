"""Searches the fastest kernel and tile for every node of a plan, and stores the results in the lock."""

import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path

import torch

from specc.compiler.build import compile_loaded
from specc.compiler.kernels.kernel import symbol
from specc.compiler.plan.lock import Entry, Lock, Machine, refuse_fewer_rows, tile_data
from specc.compiler.plan.plan import Choice, Plan
from specc.compiler.spec.spec import Spec
from specc.runtime.bench import ceilings
from specc.runtime.bench.ceilings import Ceilings, Work
from specc.runtime.bench.environment import device_for, machine_of
from specc.runtime.bench.kernels import work_of
from specc.runtime.dtypes import DTYPES
from specc.runtime.errors import RunFailure, RuntimeFailure
from specc.runtime.support.native import cache_folder, find_cutlass, find_nvcc, nvcc_version
from specc.runtime.tune.candidates import Candidate, all_choices, candidates, tuned_choices
from specc.runtime.tune.journal import Journal, key
from specc.runtime.tune.library_times import measure_rest
from specc.runtime.tune.measure import Measurement
from specc.runtime.tune.merge import merged
from specc.runtime.tune.prepare import prepare, short
from specc.runtime.tune.save_choice import fastest, line
from specc.runtime.verify.random_inputs import sizes_of

LONGEST = 600.0  # seconds for the calls of one candidate, compilation excluded
FINALISTS = 4  # timed again, in turn, because the first times are noisy
COMPILED = "compiled"
SLACK = 1.1  # the factor by which a kernel may exceed the ceilings of the large GEMM and the large copy
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options of a search.

    Attributes:
        spec: the spec.
        target: the target to search for.
        lock: the lock to start from.
        path: the lock file to write.
        only: searches only nodes whose label contains this text.
        compile_only: stops when all CUDA C++ is compiled, which needs no GPU.
        fresh: measures again instead of reusing results, and replaces results for more rows.
        rest: also measures work that has no tile to choose.
    """

    spec: Spec
    target: str
    lock: Lock
    path: Path
    only: str = ""
    compile_only: bool = False
    fresh: bool = False
    rest: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one candidate: a time in ms, or the reason for none."""

    candidate: Candidate
    ms: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """The results of one node: its floor, and the outcome of every candidate, the fastest first, then the rejected
    candidates."""

    label: str
    symbol: str
    rows: int
    floor_ms: float
    outcomes: tuple[Outcome, ...]

    @property
    def best(self) -> Outcome | None:
        return next((outcome for outcome in self.outcomes if outcome.ms is not None), None)

    @property
    def others(self) -> dict[str, float]:
        """The times in ms of all kernels except the fastest, each with its best tile."""
        best: dict[str, float] = {}
        for outcome in self.outcomes:
            if outcome.ms is not None:
                name = outcome.candidate.kernel.name
                best[name] = min(best.get(name, outcome.ms), outcome.ms)
        return {
            name: _rounded(ms) for name, ms in best.items() if self.best and name != self.best.candidate.kernel.name
        }


class TuneError(RuntimeFailure):
    """The requested search is not possible."""

    exit_code = 2


def tune(options: TuneOptions, say: Say) -> tuple[Found, ...]:
    """Searches node after node, for every save choice of its group, and then selects the fastest save choices. Each
    result is merged into the lock on disk as soon as it is known, along with concurrent changes of others.

    Raises:
        TuneError: if there is nothing to search.
        EnvironmentFailure: if the GPU or nvcc is missing.
        RunFailure: if a node has no usable candidate, a kernel has broken the device, or its memory is too small.
        SpeccError: if the lock has been measured on more rows.
    """
    spec, target = options.spec, options.target
    plan = compile_loaded(spec, None, (target,), options.lock).plans[target]
    choices = _chosen(options, plan)
    if options.compile_only:
        return tuple(_compiled(choice, plan, say) for choice in choices)
    device = device_for(target)
    machine = machine_of(device)
    if not options.fresh:
        rows = spec.train.at_once() * spec.model.window
        refuse_fewer_rows(options.lock, target, machine, (choice.site for choice in choices), rows)
    known = options.lock.targets.get(target)
    if known is not None and known.machine != machine:
        say(f"{len(known.kernels)} entries of another machine or other versions leave the lock")
    say("ceilings")
    ceiling = ceilings.measure(device, DTYPES[plan.target.dtype])
    lock, results = options.lock, []
    needed = {choice.rendered.module for choice in tuned_choices(plan)}
    for choice in choices:
        try:
            found = _search(options, choice, plan, machine, ceiling, say)
        except torch.OutOfMemoryError as error:
            hint = "free it of other programs, or lower train.micro_batch in the spec: tiles are for the rows of a step"
            raise RunFailure("out of GPU memory", hint) from error
        results.append(found)
        best = found.best
        if best is None or best.ms is None:
            reasons = "; ".join(sorted({outcome.reason for outcome in found.outcomes})[:5])
            if choice.rendered.module in needed:
                raise RunFailure(f"no candidate for {found.label} is left", reasons)
            say(f"{found.symbol}: no candidate is left, so its group is not compared: {reasons}")
            continue
        say(f"{found.symbol}: {best.candidate.label}, {best.ms:.4f} ms")
        entry = Entry(
            node=found.label,
            key=choice.site.key,
            kernel=best.candidate.kernel.name,
            tile=tile_data(best.candidate.kernel),
            rows=found.rows,
            ms=_rounded(best.ms),
            floor_ms=_rounded(found.floor_ms),
            others=found.others,
        )
        lock = merged(options.path, methodcaller("with_entry", target, found.symbol, entry, machine))
    for group in plan.save_choices:
        fastest_choice = fastest(group, target, lock)
        if fastest_choice is not None:
            say(line(group, fastest_choice))
            lock = merged(options.path, methodcaller("with_group", target, group.name, fastest_choice, machine))
    if options.rest:
        measure_rest(spec, target, options.path, machine, options.only, device, say)
    return tuple(results)


def _chosen(options: TuneOptions, plan: Plan) -> tuple[Choice, ...]:
    """Returns the choices to search. Raises TuneError or EnvironmentFailure if this machine cannot search them."""
    if not plan.target.arch:
        raise TuneError(f"on {plan.target.name} no kernel has tiles to search", "tune a GPU target: --target")
    every = all_choices(plan)
    chosen = tuple(choice for choice in every if options.only in choice.site.label)
    if not chosen:
        raise TuneError(f"no node has {options.only!r} in its path", f"nodes with a kernel: {_labels(every)}")
    compiled = tuple(choice for choice in chosen if _is_compiled(choice, plan))
    if options.compile_only and not compiled:
        others = _labels(tuple(choice for choice in every if _is_compiled(choice, plan)))
        raise TuneError(f"{_labels(chosen)}: no candidate is CUDA C++", f"nodes that have some to compile: {others}")
    if compiled:
        nvcc_version(find_nvcc()), find_cutlass(), cache_folder()  # each raises if nothing could be compiled
    return compiled if options.compile_only else chosen


def _labels(choices: Sequence[Choice]) -> str:
    """Returns the labels without duplicates: the save choices of a group have nodes with the same label."""
    return ", ".join(dict.fromkeys(choice.site.label for choice in choices)) or "none"


def _is_compiled(choice: Choice, plan: Plan) -> bool:
    """Returns whether a candidate of the node has CUDA C++ to compile."""
    return any(candidate.source for candidate in candidates(choice.site, plan.source))


def _rounded(ms: float) -> float:
    return float(f"{ms:.4g}")


def _search(options: TuneOptions, choice: Choice, plan: Plan, machine: Machine, ceiling: Ceilings, say: Say) -> Found:
    spec, site = options.spec, choice.site
    rows = spec.train.at_once() * spec.model.window
    work = work_of(choice, sizes_of(spec))
    every = {candidate: key(candidate) for candidate in candidates(site, plan.source)}
    journal = Journal(machine, site.key, rows)
    if options.fresh:
        journal.forget()
    results = {candidate: journal.results[name] for candidate, name in every.items() if name in journal.results}
    new = [candidate for candidate in every if candidate not in results]
    say(f"{site.label} ({symbol(site)[1]}): {len(every)} candidates, {len(results)} known from before")
    with tempfile.TemporaryDirectory(prefix="specc-tune-") as folder:
        measurement = Measurement(choice, sizes_of(spec), work.bytes, Path(folder), device_for(plan.target.name))
        for candidate, failed in list(measurement.prepared(new)):  # compile all before the first is timed
            best = min((ms for ms in results.values() if isinstance(ms, float)), default=float("inf"))
            whole = ceiling.floor_ms(Work(int(work.flops * candidate.kernel.padding(site, rows)), 0, 0)) / SLACK
            if failed is not None:
                results[candidate] = failed.reason or ""
                if failed.lasting:
                    journal.add(every[candidate], failed.reason or "")
            elif whole > best:
                results[candidate] = f"its whole tiles take {whole:.4f} ms, the best {best:.4f}"
            else:
                results[candidate] = _tried(measurement, candidate, journal, say)
        again = _finals(measurement, results, set(new))
    timed = {candidate: ms for candidate, ms in results.items() if isinstance(ms, float) and candidate not in again}
    rejected = [
        Outcome(candidate, None, reason) for candidate in every if isinstance(reason := results[candidate], str)
    ]
    known = [*_by_time(again), *_by_time(timed)]  # the finalists first: they are known to run, and were timed together
    floor = ceiling.floor_ms(work)
    return Found(site.label, symbol(site)[1], rows, floor, (*known, *rejected))


def _by_time(times: Mapping[Candidate, float]) -> list[Outcome]:
    return [Outcome(candidate, ms) for candidate, ms in sorted(times.items(), key=lambda item: item[1])]


def _finals(
    measurement: Measurement, results: dict[Candidate, float | str], ready: set[Candidate]
) -> dict[Candidate, float]:
    """Returns the times of the fastest candidates, measured in turn.

    Candidates that an earlier search measured, and that are therefore not `ready`, are first compiled and called. If
    one fails, for example because its package is gone, it joins the rejected candidates in `results`, and the next
    fastest replaces it.
    """
    while True:
        timed = {candidate: ms for candidate, ms in results.items() if isinstance(ms, float)}
        chosen = sorted(timed, key=lambda candidate: timed[candidate])[:FINALISTS]
        unknown = [candidate for candidate in chosen if candidate not in ready]
        if not unknown:
            return measurement.side_by_side(chosen)
        for candidate, failed in list(measurement.prepared(unknown)):
            ready.add(candidate)
            if failed is not None:
                results[candidate] = failed.reason or ""


def _tried(measurement: Measurement, candidate: Candidate, journal: Journal, say: Say) -> float | str:
    """Returns the time of a candidate, or the reason for none, and adds it to the journal. A kernel that hangs on the
    device ends the search process: nothing else can end it."""

    def hangs() -> None:
        reason = f"did not end in {LONGEST:.0f} s"
        journal.add(key(candidate), reason)
        say(f"error: {candidate.label} {reason}; run it again: it is left out then")
        os._exit(RunFailure.exit_code)

    watch = threading.Timer(LONGEST, hangs)
    watch.daemon = True
    watch.start()
    try:
        result = measurement.first_time(candidate)
    except torch.AcceleratorError as error:  # the device cannot measure anything more
        reason = short(f"breaks the device: {error}")
        journal.add(key(candidate), reason)
        raise RunFailure(f"{candidate.label}: {reason}", "run it again: what broke is left out then") from error
    finally:
        watch.cancel()
    journal.add(key(candidate), result)
    return result


def _compiled(choice: Choice, plan: Plan, say: Say) -> Found:
    """Compiles the CUDA C++ of all candidates of a node into the cache."""
    sources: dict[tuple[str, str], Candidate] = {}
    for candidate in candidates(choice.site, plan.source):
        if candidate.source is not None:
            sources.setdefault(candidate.source, candidate)
    say(f"{choice.site.label} ({symbol(choice.site)[1]}): {len(sources)} sources")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="specc-tune-") as name:
        folders: list[tuple[int, Path]] = []
        for i, (source, text) in enumerate(sources):
            folder = Path(name, str(i))
            folder.mkdir()
            (folder / source).write_text(text, encoding="utf-8")
            folders.append((i, folder))
        listed = list(sources.values())
        for done in prepare(folders, choice.rendered.module, choice.rendered.function, None):
            outcome = Outcome(listed[done.index], None, done.reason or COMPILED)
            outcomes.append(outcome)
            say(f"  {outcome.candidate.label}: {outcome.reason}")
    if outcomes and all(outcome.reason != COMPILED for outcome in outcomes):
        raise RunFailure(f"no candidate for {choice.site.label} compiles", outcomes[0].reason)
    return Found(choice.site.label, symbol(choice.site)[1], 0, 0.0, tuple(outcomes))
