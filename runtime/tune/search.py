"""Finds the fastest kernel and tile for every node of a plan, and keeps it in the lock."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specc.compiler.build import compile_loaded
from specc.compiler.kernels.kernel import symbol
from specc.compiler.lock import Entry, Lock, Machine, refuse_fewer_rows, site_digest, tile_data
from specc.compiler.plan import Choice, Plan
from specc.compiler.spec import Spec
from specc.runtime.bench import ceilings
from specc.runtime.bench.ceilings import Ceilings
from specc.runtime.bench.environment import device_for, environment
from specc.runtime.bench.kernels import cost_of
from specc.runtime.bench.operands import DTYPES, sizes_of
from specc.runtime.bench.timing import alternate
from specc.runtime.errors import RunFailure, RuntimeFailure
from specc.runtime.export.atomic import write_atomically
from specc.runtime.judge import Judge, inputs_of
from specc.runtime.native import cache_folder, find_cutlass, find_nvcc, nvcc_version
from specc.runtime.tune.candidates import Candidate, all_choices, candidates, tuned_choices
from specc.runtime.tune.journal import Journal
from specc.runtime.tune.keep import fastest, told
from specc.runtime.tune.measure import CHECKED, forget, loaded, refusal
from specc.runtime.tune.prepare import Prepared, prepare, short

FINALISTS = 4  # timed again, in turn, as the first times are some noise apart
COMPILED = "compiled"
SLACK = 1.1  # a kernel may run so much faster than the large GEMM and the large copy that made the ceilings
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What to search: a spec on one of its targets, and `path`, the lock to start from and to write.

    `only` takes nodes whose label contains it. `compile_only` stops when all CUDA C++ is compiled, which needs no
    GPU; `fresh` measures again what was measured before, and replaces what was measured on more rows.
    """

    spec: Spec
    target: str
    lock: Lock
    path: Path
    only: str = ""
    compile_only: bool = False
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one candidate: a time in ms, or the reason for none."""

    candidate: Candidate
    ms: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """One node: every candidate's outcome, the fastest first and then the rejected, and the floor of the node."""

    label: str
    symbol: str
    rows: int
    floor_ms: float
    outcomes: tuple[Outcome, ...]

    @property
    def best(self) -> Outcome | None:
        return next((outcome for outcome in self.outcomes if outcome.ms is not None), None)


class TuneError(RuntimeFailure):
    """What was asked for cannot be searched."""

    exit_code = 2


def tune(options: TuneOptions, say: Say) -> tuple[Found, ...]:
    """Searches node after node, in every way to keep something for the backward of its group, and then chooses the way;
    the lock on disk has each as soon as it is found.

    Raises TuneError where there is nothing to search, EnvironmentFailure without the GPU or nvcc, RunFailure where no
    candidate of a node is left, where a kernel has broken the device, or where its memory is too small, and SpeccError
    where the lock has been measured on more rows.
    """
    spec, target = options.spec, options.target
    plan = compile_loaded(spec, None, (target,), options.lock).plans[target]
    choices = _chosen(options, plan)
    if options.compile_only:
        return tuple(_compiled(choice, plan, say) for choice in choices)
    device = device_for(target)
    machine = environment(device).machine
    if not options.fresh:
        rows = spec.train.at_once() * spec.model.window
        refuse_fewer_rows(options.lock, target, machine, (choice.site for choice in choices), rows)
    known = options.lock.targets.get(target)
    if known is not None and known.machine != machine:
        say(f"{len(known.kernels)} entries of another machine or other versions leave the lock")
    say("ceilings")
    found_ceilings = ceilings.measure(device, DTYPES[plan.target.dtype])
    lock, results = options.lock, []
    needed = {choice.rendered.module for choice in tuned_choices(plan)}
    for choice in choices:
        try:
            found = _search(options, choice, plan, machine, found_ceilings, say)
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
            site=site_digest(choice.site),
            kernel=best.candidate.kernel.name,
            tile=tile_data(best.candidate.kernel),
            rows=found.rows,
            ms=_rounded(best.ms),
            floor_ms=_rounded(found.floor_ms),
        )
        lock = lock.with_entry(target, found.symbol, entry, machine)
        write_atomically(options.path, [lock.text().encode()], lambda _: None)
    for alternatives in plan.alternatives:
        kept = fastest(alternatives, target, lock)
        if kept is not None:
            say(told(alternatives, kept))
            lock = lock.with_kept(target, alternatives.name, kept, machine)
            write_atomically(options.path, [lock.text().encode()], lambda _: None)
    return tuple(results)


def _chosen(options: TuneOptions, plan: Plan) -> tuple[Choice, ...]:
    """The choices to search, once it is known that this machine can."""
    if not plan.target.arch:
        raise TuneError(f"on {plan.target.name} no kernel has tiles to search", "tune a GPU target: --target")
    every = all_choices(plan)
    chosen = tuple(choice for choice in every if options.only in choice.site.label)
    if not chosen:
        labels = ", ".join(choice.site.label for choice in every)
        raise TuneError(f"no node has {options.only!r} in its path", f"nodes with a kernel: {labels or 'none'}")
    if any(candidate.source for choice in chosen for candidate in candidates(choice.site, plan.source)):
        nvcc_version(find_nvcc()), find_cutlass(), cache_folder()  # raise where nothing could be compiled
    return chosen


def _rounded(ms: float) -> float:
    return float(f"{ms:.4g}")


def _search(options: TuneOptions, choice: Choice, plan: Plan, machine: Machine, ceiling: Ceilings, say: Say) -> Found:
    spec, site = options.spec, choice.site
    rows = spec.train.at_once() * spec.model.window
    cost = cost_of(choice, sizes_of(spec))
    every = tuple(candidates(site, plan.source))
    journal = Journal(machine, site_digest(site), rows)
    if options.fresh:
        journal.forget()
    results = dict(journal.results)
    new = [candidate for candidate in every if candidate.digest not in results]
    say(f"{site.label} ({symbol(site)[1]}): {len(every)} candidates, {len(every) - len(new)} known from before")
    with tempfile.TemporaryDirectory(prefix="specc-tune-") as folder:
        measurement = _Measurement(choice, sizes_of(spec), cost.bytes, Path(folder))
        for candidate, failed in list(measurement.prepared(new)):  # all, before the first is timed
            best = min((ms for ms in results.values() if isinstance(ms, float)), default=float("inf"))
            whole = ceiling.floor_ms(int(cost.flops * candidate.kernel.padding(site, rows)), 0) / SLACK
            if failed is not None:
                results[candidate.digest] = failed.reason or ""
                if failed.lasting:
                    journal.add(candidate.digest, failed.reason or "")
            elif whole > best:
                results[candidate.digest] = f"its whole tiles take {whole:.4f} ms, the best {best:.4f}"
            else:
                results[candidate.digest] = _tried(measurement, candidate, journal)
        timed = sorted(
            (candidate for candidate in every if isinstance(results[candidate.digest], float)),
            key=lambda candidate: float(results[candidate.digest]),
        )
        again = measurement.side_by_side(timed[:FINALISTS])
    known = [Outcome(candidate, ms) for candidate, ms in again.items()]
    known += [Outcome(c, float(results[c.digest])) for c in timed[FINALISTS:]]
    rejected = [Outcome(c, None, reason) for c in every if isinstance(reason := results[c.digest], str)]
    order = sorted(known, key=lambda outcome: outcome.ms or 0.0)
    return Found(site.label, symbol(site)[1], rows, ceiling.floor_ms(cost.flops, cost.bytes), (*order, *rejected))


def _tried(measurement: "_Measurement", candidate: Candidate, journal: Journal) -> float | str:
    """The time of a candidate, or the reason for none, as the journal keeps it."""
    try:
        result = measurement.first_time(candidate)
    except torch.AcceleratorError as error:  # the device is in no state to measure anything more
        reason = short(f"breaks the device: {error}")
        journal.add(candidate.digest, reason)
        raise RunFailure(f"{candidate.label}: {reason}", "run it again: what broke is left out then") from error
    journal.add(candidate.digest, result)
    return result


class _Measurement:
    """The inputs of one node and the folders of its candidates."""

    def __init__(self, choice: Choice, sizes: Mapping[str, int], moved: int, folder: Path) -> None:
        self._site, self._rendered = choice.site, choice.rendered
        self._moved, self._folder = moved, folder
        self._judge = Judge.of(choice.site, inputs_of(choice.site, CHECKED, "cuda", seed=1))
        self._inputs = inputs_of(choice.site, sizes, "cuda")

    def _place(self, candidate: Candidate) -> Path:
        folder = self._folder / candidate.digest
        if not folder.is_dir():
            folder.mkdir()
            for name, text in candidate.files.items():
                (folder / name).write_text(text, encoding="utf-8")
        return folder

    def prepared(self, listed: Sequence[Candidate]) -> Iterator[tuple[Candidate, Prepared | None]]:
        """The candidates as they are compiled, each with what is against it, if anything. Candidates of one CUDA
        source differ in constants of their Python file only: the first of them compiles it for all."""
        alike: dict[object, list[Candidate]] = {}
        for candidate in listed:
            alike.setdefault(candidate.source or candidate.digest, []).append(candidate)
        groups = list(alike.values())
        folders = [(i, self._place(group[0])) for i, group in enumerate(groups)]
        for done in prepare(folders, self._rendered.module, self._rendered.function, self._site):
            yield from ((one, done if done.reason else None) for one in groups[done.index])

    def _call(self, candidate: Candidate) -> Callable[[], object]:
        function = loaded(self._place(candidate), self._rendered.module, self._rendered.function)
        return lambda: function(*self._inputs)

    def first_time(self, candidate: Candidate) -> float | str:
        """Its time in ms, or why it must not be used."""
        try:
            function = loaded(self._place(candidate), self._rendered.module, self._rendered.function)
            if reason := refusal(self._judge, function, candidate.kernel.deterministic):
                return reason
            return self.side_by_side([candidate])[candidate]
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any kernel may fail in any way; the search goes on without it
            return short(f"{type(error).__name__}: {error}")
        finally:
            forget(self._place(candidate))

    def side_by_side(self, chosen: Sequence[Candidate]) -> dict[Candidate, float]:
        """The time of each in ms, measured in turn."""
        if not chosen:
            return {}
        calls = {str(i): self._call(candidate) for i, candidate in enumerate(chosen)}
        with torch.no_grad():
            times = alternate(calls, torch.device("cuda"), self._moved)
        return {candidate: times[str(i)].ms for i, candidate in enumerate(chosen)}


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
