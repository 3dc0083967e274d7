"""Searches for the fastest kernel and tile sizes of every node of a plan, and stores the results in a lock file."""

import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter, methodcaller
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
from specc.runtime.tune.candidates import Candidate, all_choices, candidates
from specc.runtime.tune.journal import Journal, key
from specc.runtime.tune.library_times import measure_rest
from specc.runtime.tune.measure import Measurement
from specc.runtime.tune.merge import merged
from specc.runtime.tune.prepare import prepare, short
from specc.runtime.tune.save_choice import fastest, line
from specc.runtime.verify.random_inputs import sizes_of

LONGEST = 600.0  # the maximum duration in seconds of the calls of one candidate, without compilation
FINALISTS = 4  # the number of fastest candidates that are timed again side by side, because the first times are noisy
COMPILED = "compiled"
SLACK = 1.1  # the factor by which a kernel may exceed the measured peak rates of the large GEMM and the large copy
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options of a search.

    Attributes:
        spec: the spec.
        target: the target whose kernels are searched.
        lock: the content of the lock file before the search.
        path: the lock file to write.
        only: a part of a node path. The search includes only nodes whose path contains this text.
        compile_only: whether to stop after all CUDA C++ code is compiled. Such a search needs no GPU.
        fresh: whether to measure all candidates again, without reusing results of earlier searches.
        rest: whether to also measure library products and a whole training step, which have no tile sizes.
        search: whether to search for kernels and tile sizes. If False, the lock file keeps its kernels and tile sizes.
    """

    spec: Spec
    target: str
    lock: Lock
    path: Path
    only: str = ""
    compile_only: bool = False
    fresh: bool = False
    rest: bool = False
    search: bool = True


@dataclass(frozen=True, slots=True)
class NodeResult:
    """The results of one node.

    Attributes:
        label: the path of the node.
        symbol: the name of the kernel file.
        rows: the number of rows in each measured call; 0 if nothing was measured.
        floor_ms: the minimum time for the bytes and operations of the node on this machine.
        times: the times in ms of the usable candidates, the fastest first.
        reasons: the reason for each candidate that must not be used.
    """

    label: str
    symbol: str
    rows: int
    floor_ms: float
    times: Mapping[Candidate, float]
    reasons: Mapping[Candidate, str]

    @property
    def others(self) -> dict[str, float]:
        """The time in ms of each kernel except the fastest kernel. The time of a kernel is its time with its best tile
        sizes.
        """
        best: dict[str, float] = {}
        for candidate, ms in self.times.items():
            best[candidate.kernel.name] = min(best.get(candidate.kernel.name, ms), ms)
        return {name: _rounded(ms) for name, ms in list(best.items())[1:]}


class TuneError(RuntimeFailure):
    """Raised if the requested search is not possible (exit code 2)."""

    code = "U014"
    exit_code = 2


def tune(options: TuneOptions, say: Say) -> tuple[NodeResult, ...]:
    """Searches for the fastest kernel and tile sizes of each node, and for the fastest save choice of each fused group.

    A save choice is a set of tensors that the forward pass of a fused group saves for the backward pass. The function
    first measures the kernels of every save choice. It writes each result to the lock file immediately. Other searches
    may change the lock file at the same time; their changes are preserved.

    Raises:
        TuneError: if there is nothing to search.
        EnvironmentFailure: if the GPU or nvcc is missing.
        RunFailure: if a node has no usable candidate, a kernel caused a device error, or memory is too small.
        LockError: if the lock file has a result of this machine that was measured on more rows.
    """
    spec, target = options.spec, options.target
    plan = compile_loaded(spec, None, (target,), options.lock).plans[target]
    if not plan.target.arch:
        raise TuneError(
            f"specc tune measures kernels of a GPU, but the target is {plan.target.name}",
            "select a GPU target with --target",
        )
    choices = _chosen(options, plan) if options.search else ()
    if options.compile_only:
        return tuple(_compiled(choice, plan, say) for choice in choices)
    device = device_for(target)
    machine = machine_of(device)
    if not options.fresh:
        rows = spec.train.at_once() * spec.model.window
        refuse_fewer_rows(options.lock, target, machine, (choice.site for choice in choices), rows)
    known = options.lock.targets.get(target)
    if known is not None and known.machine != machine:
        say(f"the lock drops {len(known.kernels)} entries, which another machine or other versions measured")
    if not options.search:
        measure_rest(spec, target, options.path, machine, options.only, device, say)
        return ()
    say("ceilings")
    ceiling = ceilings.measure(device, DTYPES[plan.target.dtype])
    lock, results = options.lock, []
    needed = {choice.rendered.module for choice in plan.generated}
    for choice in choices:
        try:
            result = _search(options, choice, plan, machine, ceiling, say)
        except torch.OutOfMemoryError as error:
            hint = "stop other programs on the GPU, or lower train.micro_batch in the spec"
            raise RunFailure("out of GPU memory", hint) from error
        results.append(result)
        if not result.times:
            reasons = "; ".join(sorted(set(result.reasons.values()))[:5])
            if choice.rendered.module in needed:
                raise RunFailure(f"every candidate for {result.label} was rejected", reasons)
            say(f"{result.symbol}: every candidate was rejected, so its group is not compared: {reasons}")
            continue
        best, ms = next(iter(result.times.items()))
        say(f"{result.symbol}: {best.label}, {ms:.4f} ms")
        entry = Entry(
            node=result.label,
            key=choice.site.key,
            kernel=best.kernel.name,
            tile=tile_data(best.kernel),
            rows=result.rows,
            length=sizes_of(spec)["T"],
            ms=_rounded(ms),
            floor_ms=_rounded(result.floor_ms),
            others=result.others,
        )
        lock = merged(options.path, methodcaller("with_measured", target, machine, {result.symbol: entry}))
    for group in plan.save_choices:
        fastest_choice = fastest(group, target, lock)
        if fastest_choice is not None:
            say(line(group, fastest_choice))
            lock = merged(
                options.path, methodcaller("with_measured", target, machine, groups={group.name: fastest_choice})
            )
    if options.rest:
        measure_rest(spec, target, options.path, machine, options.only, device, say)
    return tuple(results)


def _chosen(options: TuneOptions, plan: Plan) -> tuple[Choice, ...]:
    every = all_choices(plan)
    chosen = tuple(choice for choice in every if options.only in choice.site.label)
    if not chosen:
        raise TuneError(f"no node has {options.only!r} in its path", f"nodes with a kernel: {_labels(every)}")
    cuda = tuple(choice for choice in every if any(c.source for c in candidates(choice.site, plan.source)))
    compiled = tuple(choice for choice in chosen if choice in cuda)
    if options.compile_only and not compiled:
        others = _labels(cuda)
        raise TuneError(f"{_labels(chosen)} has no CUDA C++ candidates", f"nodes with CUDA C++ candidates: {others}")
    if compiled:
        # These calls raise an error if a compiler is missing
        nvcc_version(find_nvcc()), find_cutlass(), cache_folder()
    return compiled if options.compile_only else chosen


def _labels(choices: Sequence[Choice]) -> str:
    return ", ".join(dict.fromkeys(choice.site.label for choice in choices)) or "none"


def _rounded(ms: float) -> float:
    return float(f"{ms:.4g}")


def _search(
    options: TuneOptions, choice: Choice, plan: Plan, machine: Machine, ceiling: Ceilings, say: Say
) -> NodeResult:
    spec, site = options.spec, choice.site
    rows = spec.train.at_once() * spec.model.window
    sizes = site.node.op.site_sizes(sizes_of(spec))
    work = work_of(choice, sizes)
    every = {candidate: key(candidate) for candidate in candidates(site, plan.source)}
    journal = Journal(machine, site.key, rows)
    if options.fresh:
        journal.forget()
    results = {candidate: journal.results[name] for candidate, name in every.items() if name in journal.results}
    new = [candidate for candidate in every if candidate not in results]
    say(f"{site.label} ({symbol(site)[1]}): {len(every)} candidates, {len(results)} already measured")
    with tempfile.TemporaryDirectory(prefix="specc-tune-") as folder:
        measurement = Measurement(choice, sizes, work.bytes, Path(folder), device_for(plan.target.name))
        # Compile all candidates before timing any of them
        for candidate, failed in list(measurement.prepared(new)):
            best = next(iter(_times(results).values()), float("inf"))
            least = ceiling.floor_ms(Work(int(work.flops * candidate.kernel.padding(site, rows)), 0, 0)) / SLACK
            if failed is not None:
                results[candidate] = failed.reason or ""
                if failed.lasting:
                    journal.add(every[candidate], failed.reason or "")
            elif least > best:
                results[candidate] = (
                    f"its padded tiles take at least {least:.4f} ms; the fastest candidate takes {best:.4f} ms"
                )
            else:
                results[candidate] = _tried(measurement, candidate, journal, say)
        finals = _times(_finals(measurement, results, set(new)))
    # The times of the finalists come first, because they were measured side by side in this search
    times = finals | {candidate: ms for candidate, ms in _times(results).items() if candidate not in finals}
    reasons = {candidate: reason for candidate in every if isinstance(reason := results[candidate], str)}
    floor = ceiling.floor_ms(work)
    return NodeResult(site.label, symbol(site)[1], rows, floor, times, reasons)


def _times(results: Mapping[Candidate, float | str]) -> dict[Candidate, float]:
    times = {candidate: result for candidate, result in results.items() if isinstance(result, float)}
    return dict(sorted(times.items(), key=itemgetter(1)))


def _finals(
    measurement: Measurement, results: dict[Candidate, float | str], ready: set[Candidate]
) -> Mapping[Candidate, float]:
    """Measures the fastest candidates in `results` alternately, and returns their times.

    A candidate that is not in `ready` was measured in an earlier search. The function compiles and calls such a
    candidate first. If this fails, the function adds the reason to `results`, and measures the next fastest candidate.
    """
    while True:
        finalists = list(_times(results))[:FINALISTS]
        unknown = [candidate for candidate in finalists if candidate not in ready]
        if not unknown:
            return measurement.side_by_side(finalists)
        for candidate, failed in list(measurement.prepared(unknown)):
            ready.add(candidate)
            if failed is not None:
                results[candidate] = failed.reason or ""


def _tried(measurement: Measurement, candidate: Candidate, journal: Journal, say: Say) -> float | str:
    """Measures a candidate, and adds the result to the journal.

    Returns the time of the candidate in ms, or the reason for its rejection. If the kernel hangs, this process ends,
    because a running kernel cannot be stopped.
    """

    def hangs() -> None:
        reason = f"did not finish within {LONGEST:.0f} s"
        journal.add(key(candidate), reason)
        say(f"error: {candidate.label} {reason}; run the command again: it then skips this candidate")
        os._exit(RunFailure.exit_code)

    watch = threading.Timer(LONGEST, hangs)
    watch.daemon = True
    watch.start()
    try:
        result = measurement.first_time(candidate)
    except torch.AcceleratorError as error:  # the device cannot be used for further measurements
        reason = short(f"caused an error of the device: {error}")
        journal.add(key(candidate), reason)
        message = f"{candidate.label}: {reason}"
        raise RunFailure(message, "run the command again: it then skips this candidate") from error
    finally:
        watch.cancel()
    journal.add(key(candidate), result)
    return result


def _compiled(choice: Choice, plan: Plan, say: Say) -> NodeResult:
    sources: dict[tuple[str, str], Candidate] = {}
    for candidate in candidates(choice.site, plan.source):
        if candidate.source is not None:
            sources.setdefault(candidate.source, candidate)
    say(f"{choice.site.label} ({symbol(choice.site)[1]}): {len(sources)} sources")
    reasons: dict[Candidate, str] = {}
    with tempfile.TemporaryDirectory(prefix="specc-tune-") as name:
        folders: list[tuple[int, Path]] = []
        for i, (source, text) in enumerate(sources):
            folder = Path(name, str(i))
            folder.mkdir()
            (folder / source).write_text(text, encoding="utf-8")
            folders.append((i, folder))
        listed = list(sources.values())
        for result in prepare(folders, choice.rendered.module, choice.rendered.function, None):
            candidate = listed[result.index]
            reasons[candidate] = result.reason or COMPILED
            say(f"  {candidate.label}: {reasons[candidate]}")
    if reasons and COMPILED not in reasons.values():
        raise RunFailure(f"no candidate for {choice.site.label} compiles", next(iter(reasons.values())))
    return NodeResult(choice.site.label, symbol(choice.site)[1], 0, 0.0, {}, reasons)
