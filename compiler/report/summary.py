"""The summary of a plan. `specc plan` prints it, PLAN.md begins with it, and `specc diff` compares the summaries of
two specs."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

from specc.compiler.changing_values import Schedule
from specc.compiler.passes.recompute import recomputed_places
from specc.compiler.passes.select_kernels import group_pattern
from specc.compiler.pipeline import lower
from specc.compiler.plan.plan import Choice, Plan, SaveChoice, SaveChoices
from specc.compiler.programs.cost import cached_bytes, cached_numbers, flops_per_token, used_parameters
from specc.compiler.records import record
from specc.compiler.report.decoding import Decoding, decoding_data, decoding_lines, decoding_of
from specc.compiler.report.int8_products import product_lines, products
from specc.compiler.report.step import Step, Work, step_of
from specc.compiler.report.storage import Storage, storage_of
from specc.compiler.spec.spec import Spec
from specc.compiler.strict import values_in

# The row for the time of a step that no class of work has alone: its name, and the reason
BEYOND = ("beyond the sum", "kernels take longer within a step than alone")
LINES, WIDTH = 24, 120  # `specc plan` adds a line about files, and then prints at most 25 lines


def quantity(value: float) -> str:
    """Returns a count with a unit prefix, such as `29.4 M`."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def milliseconds(value: float) -> str:
    """Returns a time as text: a whole number from 100 on, otherwise three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


@record
class Summary:
    """The main facts about the plans of a spec. `deployed` maps a target to the plan of the model that runs from an
    artifact. `deployed` contains only targets for which this plan differs from the plan in `plans`."""

    spec: Spec
    plans: Mapping[str, Plan]
    deployed: Mapping[str, Plan]

    @cached_property
    def main(self) -> Plan:
        """The plan that the summary describes. A target with measurements is preferred, then a target with known peak
        rates."""
        return max(self.plans.values(), key=lambda plan: (plan.locked is not None, bool(plan.target.flops)))

    @cached_property
    def parameters(self) -> int:
        return sum(param.count for param in self.main.programs.params)

    @cached_property
    def used(self) -> str:
        used = used_parameters(lower(self.spec, next(iter(self.plans))))
        return f", of which a token uses {used:,}" if used < self.parameters else ""

    @cached_property
    def forward_flops(self) -> int:
        _, length = self.spec.train.micro_batch_rows(self.spec.model.window)
        return flops_per_token(lower(self.spec, next(iter(self.plans))), length)

    @cached_property
    def cached_numbers(self) -> int:
        """The number of elements of the cache when a sequence fills the context. The number is 0 for a model without a
        cache."""
        return cached_numbers(self.main.programs, self.spec.model.window)

    @property
    def cached(self) -> str:
        text = f"{self._per_token(self.cached_numbers)} numbers, {self.cached_bytes} bytes per token"
        return f"{text} if the context of {self.spec.model.window:,} is full" if self.cached_numbers else ""

    @property
    def cached_bytes(self) -> str:
        """The bytes of the cache per token when a sequence fills the context, as text."""
        return self._per_token(cached_bytes(self.main.programs, self.spec.model.window))

    def _per_token(self, total: int) -> str:
        return f"{total / self.spec.model.window:,.1f}".removesuffix(".0")

    @cached_property
    def storage(self) -> Storage:
        return storage_of(self.spec, next(iter(self.plans.values())).programs, next(iter(self.plans)))

    @cached_property
    def decoding(self) -> Decoding | None:
        return decoding_of(self.spec, tuple(self.plans))

    @cached_property
    def step(self) -> Step:
        return step_of(self.spec, self.main)

    @property
    def changes(self) -> tuple[str, ...]:
        """Sentences about the terms of the loss, if there are several, and about the values that change during the
        run."""
        terms = [
            f"{term.weight.words if isinstance(term.weight, Schedule) else term.weight} x {term.states or term.kind}"
            for term in self.spec.train.losses
            if term.input
        ]
        plain = [term.kind for term in self.spec.train.losses if not term.input]
        changes = [
            f"`{'.'.join(map(str, path))}` {schedule.words}" for path, schedule in values_in(self.spec, Schedule)
        ]
        loss = f"Loss: {' + '.join((*plain, *terms))}." if terms else ""
        return tuple(filter(None, (loss, f"Changes during the run: {'; '.join(changes)}." if changes else "")))

    @property
    def step_time(self) -> str:
        step = self.step
        if step.timing is not None:
            return f"{milliseconds(step.timing.ms)} ms, floor {milliseconds(step.floor_ms)}"
        return f"at least {milliseconds(step.expected_ms)} ms" if step.expected_ms else "no times"

    @property
    def memory(self) -> str:
        if self.step.timing is not None:
            return f"{quantity(self.step.timing.memory)}B at most"
        return self.forecast

    @property
    def forecast(self) -> str:
        return f"about {quantity(self.step.memory.total)}B"

    @property
    def memory_parts(self) -> str:
        parts = sorted(self.step.memory.parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in parts)

    @property
    def gap(self) -> str:
        """A phrase about the class of work with the largest difference between measured time and floor. The phrase is
        empty without measurements."""
        gaps = [(work.ms - work.floor_ms, work.name) for work in self.step.works if work.ms is not None]
        largest = max(gaps, default=None)
        return f"{largest[1]}, {milliseconds(largest[0])} ms above the floor" if largest is not None else ""

    @property
    def unmeasured(self) -> tuple[Work, ...]:
        return tuple(work for work in self.step.works if work.ms is None)

    @property
    def stored(self) -> str:
        """The bytes of an artifact in words. A remark follows if quantization may choose other bits than the rules
        state."""
        storage = self.storage
        against = f", {100 * storage.bytes / storage.budget:.1f} % of {storage.budget:,}" if storage.budget else ""
        rules = ", with the bits of the rules" if storage.chosen else ""
        return f"estimated {storage.bytes:,} bytes{against}{rules}"

    @property
    def choice(self) -> str:
        if not self.storage.chosen:
            return ""
        return f"then {self.storage.chosen}"

    @property
    def saved(self) -> tuple[str, ...]:
        return tuple(map(self._saved, self.main.save_choices))

    @property
    def recomputed(self) -> str:
        return ", ".join(dict.fromkeys(place for _, place in recomputed_places(self.main.programs)))

    @property
    def saved_names(self) -> dict[str, str]:
        """The values that each group computes and saves, by path. Groups without such values are omitted."""
        groups = [group for group in self.main.programs.groups if group.backward.outputs]
        saved = {group_pattern(self.main.programs, g, g.scope): SaveChoice(g, ()).saved for g in groups}
        return {place: ", ".join(names) for place, names in saved.items() if names}

    def _saved(self, choices: SaveChoices) -> str:
        size = self.step.memory.groups.get(choices.label, 0)
        amount = f", {size / 1e6:,.0f} MB per micro-batch" if size else ""
        how = "measured" if choices.measured is not None else "by rule"
        return f"{choices.label} saves {', '.join(choices.chosen.saved)}{amount}, {how}"


def lines(summary: Summary, spec: str = "SPEC") -> tuple[str, ...]:
    """Returns the lines that `specc plan` prints before its line about files. There are at most 24 lines, of at most
    120 columns. `spec` is the argument of commands in them."""
    step, storage, forward = summary.step, summary.storage, summary.forward_flops
    rows = [
        f"{summary.spec.name}: {summary.spec.model.title}",
        f"parameters   {summary.parameters:,} in {len(summary.main.programs.params)} tensors{summary.used}",
        f"FLOP/token   {quantity(forward)}FLOP forward, {quantity(3 * forward)}FLOP forward and backward",
        *([f"cache        {summary.cached}"] if summary.cached else []),
        f"artifact     {summary.stored}",
    ]
    rows += (f"  {warning}" for warning in storage.warnings)
    width = max((22, *(len(r.stored_as) for r in storage.rows[:4])))
    rows += [
        f"  {r.stored_as:<{width}} {r.tensors:>4} tensors {r.parameters:>12,} parameters {r.estimated_bytes:>12,} bytes"
        for r in storage.rows[:4]
    ]
    rows += [f"  {summary.choice}"] if summary.choice else []
    rows += decoding_lines(summary.decoding)
    rows.append(f"step         {step.tokens:,} tokens on {step.target}: {summary.step_time}; memory {summary.memory}")
    if summary.deployed:  # the matrix products of deployed plans have separate lines
        rows.append("  " + ", ".join(f"{work.name} {percent(step.share(work))}" for work in step.works))
    else:
        rows += (_work_line(summary, work) for work in step.works)
        if (beyond := step.beyond_ms) is not None:
            share = percent(beyond / step.expected_ms)
            rows.append(f"  {BEYOND[0]:<24} {milliseconds(beyond):>9} ms  {'':<16} {share:>5}  {BEYOND[1]}")
    if summary.unmeasured:
        share = percent(sum(map(step.share, summary.unmeasured)))
        rows.append(f"not measured {share} of the step, by floors: specc tune {spec}")
    rows += [f"largest gap  {summary.gap}"] if summary.gap else []
    rows += (f"backward     {text}" for text in summary.saved[:2])
    rows += [f"recomputed   {summary.recomputed}, in the backward pass"] if summary.recomputed else []
    named = {name: _kernels(plan) for name, plan in summary.plans.items()}
    rows += [f"{name:<12} {kernels}" for name, kernels in named.items() if kernels][:4]
    rows += product_lines(summary.deployed)
    if len(rows) > LINES:
        rows[LINES - 1 :] = [f"  and {len(rows) - LINES + 1} more lines in PLAN.md"]
    return tuple(row if len(row) <= WIDTH else f"{row[: WIDTH - 3]}..." for row in rows)


def _work_line(summary: Summary, work: Work) -> str:
    ms = f"{milliseconds(work.ms)} ms" if work.ms is not None else "not measured"
    floor = f"floor {milliseconds(work.floor_ms)} ms" if work.floor_ms else ""
    share = percent(summary.step.share(work))
    return f"  {work.name:<24} {ms:>12}  {floor:<16} {share:>5}  {by(work)}".rstrip()


def by(work: Work) -> str:
    """Returns the languages or libraries of the kernels in a class of work. Adds `by rule` if a generated
    kernel was not measured."""
    kernels = ", ".join(dict.fromkeys(row.kernel for row in work.rows if row.kernel))
    ruled = any(row.choice is not None and row.choice.rendered.function and row.ms is None for row in work.rows)
    return f"{kernels}, by rule" if ruled else kernels


def _kernels(plan: Plan) -> str:
    choices = [choice for choice in plan.choices if choice.rendered.files]
    if choices and all(choice.kernel.language == "torch" for choice in choices):
        return "all by Torch"
    return ", ".join(dict.fromkeys(f"{c.rendered.module} ({c.kernel.language})" for c in choices))


def data(summary: Summary) -> dict[str, Any]:
    step, storage = summary.step, summary.storage
    return {
        "name": summary.spec.name,
        "title": summary.spec.model.title,
        "parameters": summary.parameters,
        "tensors": len(summary.main.programs.params),
        "flops_per_token": {"forward": summary.forward_flops, "forward_and_backward": 3 * summary.forward_flops},
        "cached_numbers": summary.cached_numbers,
        "cached_bytes": cached_bytes(summary.main.programs, summary.spec.model.window),
        "estimated_bytes": storage.bytes,
        "budget_bytes": storage.budget,
        "stored": [asdict(row) for row in storage.rows],
        "promotion": storage.chosen,
        "decoding": decoding_data(summary.decoding),
        "step": {
            "target": step.target,
            "tokens": step.tokens,
            "ms": step.timing.ms if step.timing is not None else None,
            "floor_ms": step.floor_ms,
            "beyond_ms": step.beyond_ms,
            "memory": step.timing.memory if step.timing is not None else None,
            "memory_forecast": {"bytes": step.memory.total, "parts": dict(step.memory.parts)},
            "work": [
                {"name": work.name, "ms": work.ms, "floor_ms": work.floor_ms, "share": step.share(work)}
                for work in step.works
            ],
        },
        "kernels": {name: [_kernel_data(choice) for choice in plan.choices] for name, plan in summary.plans.items()},
        "deployed": {name: [row.data() for row in products(plan)] for name, plan in summary.deployed.items()},
    }


def _kernel_data(choice: Choice) -> dict[str, Any]:
    kernel = {"kernel": choice.kernel.name, "language": choice.kernel.language}
    return {"node": choice.site.label, **kernel, "files": sorted(choice.rendered.files), "tile": choice.rendered.tile}
