"""PLAN.md: a summary for reviewers, then a row for each node."""

from collections.abc import Iterator, Sequence

from specc.compiler import fusions
from specc.compiler.catalog import catalog
from specc.compiler.expr import KEEPS
from specc.compiler.fusions.fusion import Fusion
from specc.compiler.ir.graph import TensorType
from specc.compiler.ops.int8_lstm import Int8LstmStep
from specc.compiler.ops.quantized import QuantizeRows, padded
from specc.compiler.ops.shape import CropColumns
from specc.compiler.passes.select_kernels import group_pattern
from specc.compiler.plan.plan import Choice, Plan, SaveChoice, SaveChoices, place_pattern
from specc.compiler.programs.programs import Programs
from specc.compiler.report.step import Step, StepRow, step_of, words_of
from specc.compiler.report.summary import Summary, by, milliseconds, percent
from specc.compiler.targets import Target

HEADS = ("node", "what", "kernel, tile", "ms x calls", "floor")


def plan_page(summary: Summary) -> str:
    """Returns the text of PLAN.md."""
    main = summary.main
    lines = [f"# {summary.spec.name}: plan", "", summary.head, "", *_step_table(summary), "", *_facts(summary)]
    lines += ["", f"## {main.target.name}: a row per node; ms of one call x calls a step", ""]
    lines += [*_rows(summary.step, main), *_saved(main), *_not_chosen(main)]
    for target, plan in summary.plans.items():
        if plan is not main:
            lines += ["", f"## {target}", "", *_difference(summary, plan)]
    for target, plan in summary.deployed.items():
        lines += ["", f"## {target}, deployed", "", *_padding(plan.programs), *_deployed(plan)]
    return "\n".join(lines) + "\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(row)} |" for row in rows)]


def _step_table(summary: Summary) -> list[str]:
    step = summary.step
    rows = []
    for work in step.works:
        ms = milliseconds(work.ms) if work.ms is not None else "**not measured**"
        rows.append((work.name, ms, milliseconds(work.floor_ms), percent(step.share(work)), by(work)))
    whole = milliseconds(step.timing.ms) if step.timing is not None else f"at least {milliseconds(step.expected_ms)}"
    memory = f"memory: {summary.memory}"
    rows.append(("**whole**", f"**{whole}**", f"**{milliseconds(step.floor_ms)}**", "", memory))
    return table((f"a step of {step.tokens:,} tokens, {step.target}", "ms", "floor", "share", "kernel by"), rows)


def _facts(summary: Summary) -> Iterator[str]:
    """Yields the main facts, one per line, and the table of stored forms."""
    main = summary.main
    facts = [f"Stored: {summary.stored}{f', {summary.choice}' if summary.choice else ''}."]
    facts += (f"{warning[0].upper()}{warning[1:]}." for warning in summary.storage.warnings)
    facts += [f"Largest gap of what was measured: {summary.gap}."] if summary.gap else []
    facts += (f"Backward: {text}." for text in summary.saved)
    if summary.missing:
        tune = f"`specc tune {main.source} --target {main.target.name}`"
        facts.append(f"Not measured: {summary.missing}, shares by floors where times are missing; {tune}.")
    facts.append(_ceilings(main.target))
    if (machine := summary.step.machine) is not None:
        facts.append(f"Measured on {machine.gpu}: {', '.join(machine.versions)}.")
    yield from (f"- {fact}" for fact in facts)
    yield ""
    heads = ("stored as", "tensors", "parameters", "bytes, at most about", "rule")
    rows = [(r.label, str(r.tensors), f"{r.parameters:,}", f"{r.bytes:,}", r.rule) for r in summary.storage.rows]
    rows.append(("header and spec", "", "", f"{summary.storage.overhead:,}", ""))
    yield from table(heads, rows)


def _ceilings(target: Target) -> str:
    if not target.flops:
        return f"No ceilings are stated for {target.name}: shares are of operations."
    speeds = f"{target.flops / 1e12:,.0f} TFLOP/s, bytes at {target.bandwidth / 1e12:.3g} TB/s"
    return f"Floors: operations at {speeds} ({target.machine}). Memory: parameters, optimizer, what a backward reads."


def _rows(step: Step, plan: Plan) -> list[str]:
    """Returns the table of a target's nodes.

    The nodes of a training step come first, then those that only other programs contain, then those that pad or crop.
    """
    rows = [_cells(row) for row in step.rows if row.site is not None or row.what]
    trained = {row.choice.site.key for row in step.rows if row.choice is not None}
    for choice in plan.choices:
        if choice.site.key not in trained and choice.site.node.op.planned:
            ms = milliseconds(choice.measured.ms) if choice.measured is not None else "?"
            cells = (choice.site.label, words_of(choice.site), kernel_words(choice), f"{ms}, not in training", "")
            rows += [cells] if cells not in rows else []
    rows += [(path, f"{op} {types}", "torch", "", "") for path, op, types in _shape_changes(plan.programs)]
    return table(HEADS, rows)


def _cells(row: StepRow) -> tuple[str, ...]:
    ms = milliseconds(row.ms) if row.ms is not None else "?"
    floor = milliseconds(row.floor_ms) if row.floor_ms is not None else ""
    kernel = kernel_words(row.choice) if row.choice is not None else row.kernel
    return (row.node, row.what, kernel, f"{ms} x {row.calls}", floor)


def kernel_words(choice: Choice) -> str:
    """Returns a node's kernel with its tile. The suffix `by rule` marks a kernel that was not measured."""
    file = next(iter(sorted(choice.rendered.files, key=lambda name: not name.endswith(".cu"))), "")
    if not file:
        return choice.kernel.name
    made_of = choice.kernel.made_of + ("" if choice.kernel.deterministic else ", not deterministic")
    tile = f", {choice.rendered.tile}" if choice.rendered.tile else ""
    rule = "" if choice.measured is not None or not choice.site.target.arch else "; by rule"
    return f"{file} ({made_of}){tile}{rule}"


def _saved(plan: Plan) -> Iterator[str]:
    """Yields what each group saves for its backward, and the reason."""
    if plan.save_choices:
        yield from ("", "Saved for the backward:", "")
        yield from map(_save_line, plan.save_choices)


def _save_line(choices: SaveChoices) -> str:
    chosen, measured = choices.chosen, choices.measured
    others = [option for option in choices.options if option is not chosen]
    words = {option.group.keep: _saved_words(option) for option in choices.options}
    if measured is None:
        return f"- {choices.label}: {words[chosen.group.keep]}; by rule: fewest bytes, else the {KEEPS[0]}"
    times = ", ".join(f"{words[other.group.keep]} {measured.ms[other.group.keep]}" for other in others)
    why = f"measured, {measured.ms[chosen.group.keep]} ms forward and backward; {times}"
    return f"- {choices.label}: {words[chosen.group.keep]}; {why}"


def _saved_words(option: SaveChoice) -> str:
    return f"the {option.group.keep} ({', '.join(option.saved)})"


def _not_chosen(plan: Plan) -> Iterator[str]:
    """Yields the kernels that were measured to be slower, and the kernels that a user action could enable."""
    shown = list(dict.fromkeys((*_slower(plan), *_packages(plan), *_refused(plan.programs))))
    if shown:
        yield from ("", "Why not another kernel (where it was measured, or somebody could act):", "", *shown)


def _slower(plan: Plan) -> Iterator[str]:
    for choice in plan.choices:
        if choice.measured is not None and choice.measured.others:
            times = ", ".join(f"{name} {milliseconds(ms)} ms" for name, ms in sorted(choice.measured.others.items()))
            yield f"- {choice.site.label}: {times}"


def _packages(plan: Plan) -> Iterator[str]:
    """Yields the kernels of optional packages that were not measured."""
    waiting: dict[str, dict[str, None]] = {}
    for choice in plan.choices:
        known = choice.measured.others if choice.measured is not None else {}
        for kernel in choice.passed_over:
            if kernel.package and kernel.name not in known:
                waiting.setdefault(kernel.package, {})[choice.site.label] = None
    for package, labels in waiting.items():
        act = f"install it, then `specc tune {plan.source}`"
        yield f"- {', '.join(labels)}: {package} also computes this and was not measured: {act}"


def _refused(programs: Programs) -> Iterator[str]:
    """Yields the reason why a product or attention outside of fused groups cannot be fused, for each fusion.

    Only fusions that can contain the op are listed.
    """
    for graph in programs.graphs:
        for node in graph.nodes if _whole(programs, graph.name) else ():
            for fusion in catalog(fusions, Fusion).values() if node.op.matrix else ():
                if node.op.name in fusion.ops and (reason := fusion.refusal(graph, (node,))):
                    path = place_pattern(programs, _alike(programs, node.name), node.name)
                    yield f"- {path}: {fusion.name} {reason}"


def _difference(summary: Summary, plan: Plan) -> Iterator[str]:
    """Yields the differences of a further target from the main one."""
    if all(choice.kernel.language == "torch" for choice in plan.choices):
        yield f"The same nodes, all by Torch: `specc explain {plan.source} NODE --target {plan.target.name}`."
        return
    main = {_identity(choice): kernel_words(choice) for choice in summary.main.choices}
    rows = [
        (choice.site.label, words_of(choice.site), kernel_words(choice))
        for choice in plan.choices
        if main.get(_identity(choice)) != kernel_words(choice)
    ]
    step = step_of(summary.spec, plan)
    if step.expected_ms:
        times = f"{milliseconds(step.expected_ms)} ms, floor {milliseconds(step.floor_ms)}"
        yield f"A step takes at least {times}. {_ceilings(plan.target)}"
    if not rows:
        yield f"The kernels are those of {summary.main.target.name}."
        return
    yield f"Kernels that are not those of {summary.main.target.name}:"
    yield ""
    yield from table(HEADS[:3], list(dict.fromkeys(rows)))


def _identity(choice: Choice) -> tuple[str, str]:
    return choice.graph, choice.site.node.name


def _deployed(plan: Plan) -> list[str]:
    """Returns the table of the nodes with kernels of a deployed plan."""
    rows = [(choice.site.label, words_of(choice.site), kernel_words(choice)) for choice in plan.choices]
    return table(HEADS[:3], list(dict.fromkeys(rows)))


def _padding(programs: Programs) -> Iterator[str]:
    """Yields what is padded for int8 products, one line each, then an empty line."""
    lines: list[str] = []
    for graph in programs.graphs:
        for node in graph.nodes:
            if isinstance(node.op, CropColumns):
                width = graph.types[node.inputs[0]].width
                path = place_pattern(programs, (graph.name,), node.name)
                lines.append(f"- {path}: N {node.op.columns} is padded to {width}")
            elif isinstance(node.op, QuantizeRows) and (k := graph.types[node.inputs[0]].width) != node.op.columns:
                name = node.name.removesuffix("_input").removesuffix("_second")
                path = place_pattern(programs, (graph.name,), name)
                lines.append(f"- {path}: K {k} is padded to {node.op.columns}")
            elif isinstance(node.op, Int8LstmStep) and isinstance(h := node.type.width, int) and h != padded(h):
                path = place_pattern(programs, (graph.name,), node.name)
                lines.append(f"- {path}: K {h} is padded to {padded(h)}")
    if lines:
        yield from ("Padded to multiples of 16, with zeros:", "", *dict.fromkeys(lines), "")


def _shape_changes(programs: Programs) -> Iterator[tuple[str, str, str]]:
    """Yields the path, op and types of each distinct node in fused groups that pads or crops."""
    seen: set[tuple[str, str]] = set()
    for group in programs.groups:
        for graph in (group.forward, group.backward):
            for node in graph.nodes:
                path = group_pattern(programs, group, node.name)
                if node.op.listed and (path, node.op.name) not in seen:
                    seen.add((path, node.op.name))
                    yield path, node.op.name, _types([graph.types[ref] for ref in node.inputs], node.types)


def _whole(programs: Programs, name: str) -> bool:
    return name in programs.whole[:1] or name.endswith((".forward", ".step"))


def _alike(programs: Programs, node: str) -> tuple[str, ...]:
    return tuple(graph.name for graph in programs.functions if node in graph.by_name)


def _types(inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> str:
    return " x ".join(map(str, inputs)) + " -> " + ", ".join(map(str, outputs))
