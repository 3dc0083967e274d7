"""Compares two specs: a summary of the changes, then unified diffs of the spec and the generated code."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

from specc.compiler.build import Built, compile_loaded
from specc.compiler.generated_folder import MANIFEST
from specc.compiler.passes.select_kernels import together
from specc.compiler.plan.lock import lock_path, read_lock
from specc.compiler.records import record
from specc.compiler.report.step import Work
from specc.compiler.report.summary import Summary, milliseconds, quantity
from specc.compiler.spec.check import load
from specc.compiler.text.shell import shell_path
from specc.compiler.text.source import STDIN, name_of

PLAN = "PLAN.md"
SHOWN = 10  # tensors, tiles or files that one line of the summary names
LINES, WIDTH = 25, 120  # the most lines and columns of the summary
CONTEXT = 0  # context lines in diffs of generated code; none, because reviewers have the kernels next to the diff


@record
class Comparison:
    """Two built specs. `before` and `after` are the spec files. `spec_diff` has the lines of the unified diff of both
    files."""

    before: Path
    after: Path
    old: Built
    new: Built
    spec_diff: tuple[str, ...]

    @classmethod
    def of(cls, before: Path, after: Path) -> "Comparison":
        """Builds the spec files `before` and `after`.

        A spec without a lock uses the lock of the other spec. A copied spec therefore gets the same measured tiles.
        Raises SpecError if either spec does not build.
        """
        paths = (before, after)
        specs = [load(path) for path in paths]
        locks = [read_lock(lock_path(path, spec.name)) for path, (spec, _) in zip(paths, specs, strict=True)]
        old, new = (
            compile_loaded(spec, source, (), lock if lock.targets else other)
            for (spec, source), lock, other in zip(specs, locks, reversed(locks), strict=True)
        )
        left, right = (source.text.splitlines() for _, source in specs)
        spec_diff = difflib.unified_diff(left, right, name_of(before), name_of(after), n=1, lineterm="")
        return cls(before, after, old, new, tuple(spec_diff))

    @cached_property
    def summaries(self) -> tuple[Summary, Summary]:
        old, new = (Summary(built.spec, built.plans, built.deployed) for built in (self.old, self.new))
        return old, new

    @property
    def equal(self) -> bool:
        old, new = ({n: t for n, t in built.files.items() if n != MANIFEST} for built in (self.old, self.new))
        return not self.spec_diff and old == new  # the manifest names the file of the spec

    @property
    def summary(self) -> tuple[str, ...]:
        """Returns the most important differences, in at most 25 lines of at most 120 columns."""
        rows = [f"{self.old.spec.name} -> {self.new.spec.name}", *self._sizes(), *self._times(), *self._kernels()]
        rows += [*self._shapes(), *self._files()]
        if len(rows) > LINES:
            rows[LINES - 1 :] = [f"and {len(rows) - LINES + 1} more lines"]
        return tuple(row if len(row) <= WIDTH else f"{row[: WIDTH - 3]}..." for row in rows)

    def _sizes(self) -> Iterator[str]:
        old, new = self.summaries
        targets, others = (", ".join(summary.plans) for summary in self.summaries)
        if targets != others:
            yield f"targets      {targets} -> {others}"
        yield f"parameters   {_change(f'{old.parameters:,}', f'{new.parameters:,}', new.parameters - old.parameters)}"
        flops, others = (f"{quantity(3 * summary.forward_flops)}FLOP" for summary in self.summaries)
        yield f"FLOP/token   {_change(flops, others)}"
        stored = (summary.storage for summary in self.summaries)
        sizes, others = (f"{s.bytes:,}" + (f", budget {s.budget:,}" if s.budget else "") for s in stored)
        chosen, other = (summary.storage.chosen for summary in self.summaries)
        by = "by the rules alone: " if chosen or other else ""
        yield f"bytes        estimated {by}{_change(sizes, others, new.storage.bytes - old.storage.bytes)}"
        if chosen != other:  # two lines, because each side takes most of a line
            yield f"  quantize   {chosen or 'by the rules'}"
            yield f"          -> {other or 'by the rules'}"
        elif other:
            yield f"  quantize   {other}"
        was, now = (summary.storage.warnings[:1] for summary in self.summaries)
        if was != now:
            yield from (f"  before     {warning}" for warning in was)
            yield from (f"  after      {warning}" for warning in now)
        else:
            yield from (f"  {warning}" for warning in now)
        yield from self._decoding()

    def _decoding(self) -> Iterator[str]:
        """Yields a line about the bytes per decoded token, if they differ."""
        cached = [summary.cached_bytes for summary in self.summaries]
        packed = [f"{s.decoding.packed_bytes:,}" if s.decoding is not None else "none" for s in self.summaries]
        sizes = {"cache": cached, "weights": packed}
        changes = [f"{what} {old} -> {new}" for what, (old, new) in sizes.items() if old != new]
        if changes:
            yield f"decoding     bytes per token: {'; '.join(changes)}"

    def _times(self) -> Iterator[str]:
        """Yields times and memory. A measured time is compared only if both specs have measured the time. Otherwise,
        the floors of both specs are compared."""
        old, new = self.summaries
        before, after = ({work.name: work for work in summary.step.works} for summary in self.summaries)
        whole = all(work.ms is not None for summary in self.summaries for work in summary.step.works)
        times = {name: _times_of(whole, before.get(name), after.get(name)) for name in {**after, **before}}
        if old.step.timing is not None and new.step.timing is not None:
            was, now, memory = old.step_time, new.step_time, (old.memory, new.memory)
        else:
            was, now = (_least(sum(ms[i] or 0.0 for ms, _ in times.values()), False) for i in (0, 1))
            memory = (old.forecast, new.forecast)
        known = [
            f"; {milliseconds(summary.step.timing.ms)} ms measured {word}"
            for word, summary in zip(("before", "after"), self.summaries, strict=True)
            if summary.step.timing is not None and summary.step_time not in (was, now)
        ]
        if old.step.tokens != new.step.tokens:
            was, now = (
                f"{time} per {s.step.tokens:,} tokens" for time, s in zip((was, now), self.summaries, strict=True)
            )
        change = f"{was} -> {now} on {new.step.target}" if was != now else f"{now} on {new.step.target}, as before"
        yield f"step         {change}{''.join(known)}"
        for name, (ms, measured) in times.items():
            first, second = ("none" if time is None else _least(time, measured) for time in ms)
            if first != second:
                yield f"  {name:<24} {first} -> {second}"
        yield f"memory       {_change(*memory)}"
        yield f"saved        {self._saved()}"

    def _saved(self) -> str:
        sizes = [f"{sum(summary.step.memory.groups.values()) / 1e6:,.0f}" for summary in self.summaries]
        amount = f"{' -> '.join(dict.fromkeys(sizes))} MB per micro-batch by fused groups"
        old, new = (summary.saved_names for summary in self.summaries)
        places = [place for place in {**old, **new} if old.get(place) != new.get(place)]
        return "; ".join((amount, *(f"{p}: {_change(old.get(p, 'nothing'), new.get(p, 'nothing'))}" for p in places)))

    def _kernels(self) -> Iterator[str]:
        old, new = self.summaries
        known = {choice.site.key for choice in new.main.every_choice if choice.measured is not None}
        lost = [c for c in old.main.choices if c.measured is not None and c.site.key not in known]
        names = list(dict.fromkeys(choice.rendered.module for choice in lost))
        if names:
            yield f"tiles lost   {len(names)}: {_named(names)}"
        unmeasured = any(choice.measured is None and choice.rendered.function for choice in new.main.choices)
        if names and unmeasured and new.main.target.arch and self.after != STDIN:
            yield f"  measure    specc tune {shell_path(self.after)}"

    def _shapes(self) -> Iterator[str]:
        old, new = ({p.name: p for p in s.main.programs.params} for s in self.summaries)
        alike: dict[str, list[str]] = {}
        shapes: dict[tuple[str, str], list[str]] = {}
        for name in dict.fromkeys((*old, *new)):
            pattern = ".".join("*" if word.isdigit() else word for word in name.split("."))
            alike.setdefault(pattern, []).append(name)
            was, now = (f"{list(table[name].shape)}" if name in table else "none" for table in (old, new))
            if was != now:
                shapes.setdefault((pattern, f"{was} -> {now}"), []).append(name)
        named = ((p if names == alike[p] else together(names), change) for (p, change), names in shapes.items())
        yield from _folded("shapes", [f"{names} {change}" for names, change in named])
        forms: dict[str, int] = {}
        for name in old.keys() & new.keys():
            if old[name].storage != new[name].storage:
                change = f"{old[name].storage} -> {new[name].storage}"
                forms[change] = forms.get(change, 0) + 1
        yield from _folded("stored as", [f"{count} tensors {change}" for change, count in sorted(forms.items())])

    def _files(self) -> Iterator[str]:
        renamed = [(a, b) for a, b in sorted(self._pairs.items()) if a != b and not self._quiet(a)]
        yield from _folded("replaced", [f"{a} -> {Path(b).name}" for a, b in renamed])
        for word, names in self._unpaired():
            yield from _folded(word, names)
        left, right = self.old.files, self.new.files
        changed = [n for n in sorted(left.keys() & right.keys()) if left[n] != right[n] and n not in (MANIFEST, PLAN)]
        rows = [line.split("|")[1].strip() for line in self._plan_diff if line.startswith("+|")]
        if self._plan_diff:
            changed = [": ".join((PLAN, *filter(None, [_named(rows)])))]
        yield f"changed      {_named(changed) if changed else 'nothing'}"

    @cached_property
    def _plan_diff(self) -> tuple[str, ...]:
        """The unified diff of PLAN.md, if nothing else differs. The measured times of the locks then differ."""
        if self.spec_diff or _code(self.old) != _code(self.new):
            return ()
        left, right = (built.files[PLAN].splitlines() for built in (self.old, self.new))
        return tuple(difflib.unified_diff(left, right, f"a/{PLAN}", f"b/{PLAN}", n=CONTEXT, lineterm=""))

    @cached_property
    def _pairs(self) -> Mapping[str, str]:
        return dict(_pairs(self.old, self.new))

    def _unpaired(self) -> Iterator[tuple[str, list[str]]]:
        left, right = self.old.files.keys(), self.new.files.keys()
        for word, names in (
            ("removed", left - right - self._pairs.keys()),
            ("added", right - left - set(self._pairs.values())),
        ):
            yield word, sorted(name for name in names if not self._quiet(name))

    def _quiet(self, name: str) -> bool:
        target = name.partition("/")[0]
        plans = {**self.old.plans, **self.new.plans}
        return target in plans and not plans[target].target.arch and any(plan.target.arch for plan in plans.values())

    @property
    def details(self) -> tuple[str, ...]:
        """Returns unified diffs of the spec, model.py and the kernels. Kernels are paired by node. If none of these
        files differ, returns the unified diff of PLAN.md.

        Unpaired files are listed by name. If a spec has a GPU target, changed CPU files are only counted.
        """
        lines = [*self.spec_diff, *self._plan_diff]
        left, right = (_code(built) for built in (self.old, self.new))
        pairs = {name: name for name in left.keys() & right.keys()} | {
            a: b for a, b in self._pairs.items() if a in left and b in right
        }
        quiet = 0
        for a, b in sorted(pairs.items(), key=lambda pair: (not pair[1].endswith("model.py"), pair)):
            if left[a] == right[b] and a == b:
                continue
            if self._quiet(a):
                quiet += 1
                continue
            before, after = _body(_renamed(left[a], a, b)), _body(right[b])
            lines += difflib.unified_diff(before, after, f"a/{a}", f"b/{b}", n=CONTEXT, lineterm="")
        if quiet:
            lines.append(f"cpu: {quiet} files also change, all by Torch")
        lines += [f"{word}: {name}" for word, names in self._unpaired() for name in names]
        return tuple(lines)

    def markdown(self) -> str:
        if self.equal:
            return f"`{name_of(self.after)}`: no difference\n"
        body = ["```", *self.summary, "```", "", "<details><summary>spec, model and kernels</summary>", ""]
        body += ["```diff", *(line.replace("```", "'''") for line in self.details), "```", "", "</details>"]
        return "\n".join([f"### specc diff `{name_of(self.before)}` -> `{name_of(self.after)}`", "", *body]) + "\n"

    def text(self) -> str:
        return "\n".join(self.summary if self.equal else (*self.summary, "", *self.details))


def _code(built: Built) -> dict[str, str]:
    return {name: text for name, text in built.files.items() if name not in (MANIFEST, PLAN)}


def _body(text: str) -> list[str]:
    lines = text.splitlines()
    start = next((i + 1 for i, line in enumerate(lines[:10]) if "    plan " in line), 0)
    return lines[start:]


def _renamed(text: str, old: str, new: str) -> str:
    """Renames the kernel in the text of a file, so that a diff with the file `new` does not show the renaming. `old`
    and `new` are the file names."""
    before, after = Path(old).stem, Path(new).stem
    if before == after:
        return text
    text = text.replace(before, after)
    return re.sub(
        rf"(?<![A-Za-z]){re.escape(before.partition('__')[0])}(?![A-Za-z]|_grad)", after.partition("__")[0], text
    )


def _change(old: str, new: str, difference: int | None = None) -> str:
    if old == new:
        return f"{new}, as before"
    return f"{old} -> {new}" + (f" ({difference:+,})" if difference is not None else "")


def _times_of(whole: bool, *works: Work | None) -> tuple[tuple[float | None, ...], bool]:
    """Returns the time in ms of a class of work in each spec, and whether the times are measured: all of them, or none.
    The time is None in a spec without such work. Work of only one spec moves to other classes in the other spec.
    Its measured time is therefore used only if all work of both specs is measured (`whole`)."""
    measured = whole or all(work is not None and work.ms is not None for work in works)
    return tuple(work and (work.ms if measured else work.floor_ms) for work in works), measured


def _least(ms: float, measured: bool) -> str:
    if not ms and not measured:
        return "no times"
    return f"{milliseconds(ms)} ms" if measured else f"at least {milliseconds(ms)} ms"


def _named(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _folded(word: str, entries: list[str]) -> Iterator[str]:
    shown = entries if len(entries) <= 4 else [*entries[:3], f"and {len(entries) - 3} more"]
    for i, entry in enumerate(shown):
        yield f"{word if i == 0 else '':<12} {entry}"


def _pairs(old: Built, new: Built) -> Iterator[tuple[str, str]]:
    before, after = (json.loads(built.files[MANIFEST])["nodes"] for built in (old, new))
    for target in sorted(before.keys() & after.keys()):
        for node in sorted(before[target].keys() & after[target].keys()):
            source, other = before[target][node], after[target][node]
            if source != other and (f"{target}/{source}" in new.files or f"{target}/{other}" in old.files):
                continue  # a file that both builds have replaces nothing
            if Path(source).suffix == Path(other).suffix:
                yield f"{target}/{source}", f"{target}/{other}"
                if source.endswith(".cu"):
                    yield f"{target}/{source[:-3]}.py", f"{target}/{other[:-3]}.py"
