"""PLAN.md: a summary for reviewers, then a row for each node."""

from collections.abc import Iterator, Sequence

from specc.compiler import fusions
from specc.compiler.catalog import catalog
from specc.compiler.expr import KEEPS
from specc.compiler.fusions.fusion import Fusion
from specc.compiler.ops.fp8 import Fp8Linear
from specc.compiler.ops.fp8_codes import CodesLinear, Fp8Product
from specc.compiler.ops.int8_lstm import Int8LstmStep
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.quantized import QuantizeRows, padded
from specc.compiler.ops.shape import CropColumns
from specc.compiler.passes.select_kernels import group_pattern, together
from specc.compiler.plan.plan import Choice, Plan, SaveChoices, place_pattern
from specc.compiler.programs.programs import Programs
from specc.compiler.report.step import Step, StepRow, step_of, words_of
from specc.compiler.report.summary import BEYOND, Summary, by, milliseconds, percent, quantity
from specc.compiler.targets import Target

HEADS = ("node", "what", "kernel, tile", "ms x calls", "floor")


def plan_page(summary: Summary) -> str:
    main, flops = summary.main, f"{quantity(3 * summary.forward_flops)}FLOP per token forward and backward"
    head = f"{summary.spec.model.title}: {summary.parameters:,} parameters{summary.used}, {flops}"
    lines = [f"# {summary.spec.name}: plan", "", head, "", *_step_table(summary), "", *_facts(summary)]
    lines += ["", f"## {main.target.name}: one row per node, ms of one call x calls per step", ""]
    lines += [*_rows(summary.step, main), *_saved(main), *_not_chosen(main)]
    for target, plan in summary.plans.items():
        if plan is not main:
            lines += ["", f"## {target}", "", *_difference(summary, plan)]
    for target, plan in summary.deployed.items():
        lines += ["", f"## {target}, deployed", "", *_padding(plan.programs), *_deployed(plan)]
    return "\n".join(lines) + "\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(row)} |" for row in rows)]


def _step_table(summary: Summary) -> list[str]:
    step = summary.step
    rows = []
    for work in step.works:
        ms = milliseconds(work.ms) if work.ms is not None else "**not measured**"
        rows.append((work.name, ms, milliseconds(work.floor_ms), percent(step.share(work)), by(work)))
    if (beyond := step.beyond_ms) is not None:
        rows.append((BEYOND[0], milliseconds(beyond), "", percent(beyond / step.expected_ms), BEYOND[1]))
    whole = milliseconds(step.timing.ms) if step.timing is not None else f"at least {milliseconds(step.expected_ms)}"
    memory = f"memory: {summary.memory}"
    rows.append(("**whole**", f"**{whole}**", f"**{milliseconds(step.floor_ms)}**", "", memory))
    return table((f"a step of {step.tokens:,} tokens, {step.target}", "ms", "floor", "share", "kernel by"), rows)


def _facts(summary: Summary) -> Iterator[str]:
    main = summary.main
    facts = [f"Stored: {summary.stored}{f'; {summary.choice}' if summary.choice else ''}."]
    facts += (f"{warning[0].upper()}{warning[1:]}." for warning in summary.storage.warnings)
    facts += [f"Cache: {summary.cached}."] if summary.cached else []
    facts += [f"Largest gap of measured work: {summary.gap}."] if summary.gap else []
    facts += summary.changes
    facts += (f"In 8 bits in training, not measured: {text}." for text in products_of_8_bits(main))
    facts += joined(main)
    facts += (f"Backward: {text}." for text in summary.saved)
    facts += rewritten(main.programs)
    if summary.spec.train.deterministic:
        facts.append(
            "Deterministic: every kernel returns the same bits in repeated calls, as `train.deterministic` requires."
        )
    if summary.recomputed:
        facts.append(f"Recomputed in the backward: {summary.recomputed}, whose values are not kept in memory.")
    facts.append(f"Memory, forecast of allocated tensors: {summary.memory_parts}.")
    if summary.unmeasured:
        missing = ", ".join(f"{work.name} {percent(summary.step.share(work))}" for work in summary.unmeasured)
        tune = f"`specc tune {main.source} --target {main.target.name}`"
        facts.append(f"Not measured: {missing}, with shares of the floors where times are missing; {tune}.")
    facts.append(_ceilings(main.target))
    if (machine := summary.step.machine) is not None:
        facts.append(f"Measured on {machine.gpu}: {', '.join(machine.versions)}.")
    yield from (f"- {fact}" for fact in facts)
    yield ""
    heads = ("stored as", "tensors", "parameters", "bytes, at most about", "rule")
    rows = [
        (r.stored_as, str(r.tensors), f"{r.parameters:,}", f"{r.estimated_bytes:,}", r.rule)
        for r in summary.storage.rows
    ]
    rows.append(("header and spec", "", "", f"{summary.storage.overhead:,}", ""))
    yield from table(heads, rows)


def rewritten(programs: Programs) -> Iterator[str]:
    """Yields a sentence for each rewriting: the effect of a pass on some nodes, or the reason why the pass did not
    rewrite these nodes."""
    alike: dict[tuple[str, str, str], dict[str, None]] = {}
    for rewriting in programs.rewritings:
        key = rewriting.step, rewriting.text, rewriting.refusal
        alike.setdefault(key, {})[together(rewriting.nodes)] = None
    for (step, text, refusal), nodes in alike.items():
        yield f"`{step}`{' not' if refusal else ''} of {'; '.join(nodes)}: {text or refusal}."


def products_of_8_bits(plan: Plan) -> Iterator[str]:
    """Yields a phrase for each kind of scale of 8-bit floats. A phrase lists the linear layers with this kind of
    scale."""
    forms: dict[str, dict[str, None]] = {}
    for graph in plan.programs.graphs:
        for node in graph.nodes:
            if isinstance(node.op, Fp8Linear):
                path = place_pattern(plan.programs, (graph.name,), node.name)
                forms.setdefault(node.op.words, {})[path] = None
    for group in plan.programs.groups:
        for node in group.forward.nodes:
            if isinstance(node.op, Fp8Product | CodesLinear):
                words = Fp8Linear(delayed=True).words
                forms.setdefault(words, {})[group_pattern(plan.programs, group, node.name)] = None
    yield from (f"{', '.join(paths)} ({words})" for words, paths in forms.items())


def joined(plan: Plan) -> Iterator[str]:
    """Yields sentences about dropout and about rounding to 8 bits. The sentences name the matrix products whose kernels
    also compute these operations, and the operations that Torch computes."""
    kernels: dict[str, dict[str, None]] = {}
    torch: dict[str, dict[str, None]] = {}
    for group in plan.programs.groups:
        for graph in (group.forward, group.backward):
            for node in graph.nodes:
                path = group_pattern(plan.programs, group, node.name)
                if isinstance(node.epilogue, Pointwise):
                    for words in (*["dropout"] * bool(node.epilogue.draws), *["codes"] * bool(node.epilogue.codes)):
                        kernels.setdefault(words, {})[path] = None
                elif node.op.joined_when:
                    torch.setdefault(node.op.joined_when, {})[path] = None
    titles = {"dropout": "Dropout in the kernel of", "codes": "Rounded to 8 bits by the kernel of"}
    yield from (f"{titles[words]} {', '.join(paths)}." for words, paths in kernels.items())
    for reason, paths in torch.items():
        yield f"In plain Torch, for Torch's compiler: {', '.join(paths)}: {reason}."


def _ceilings(target: Target) -> str:
    if not target.flops:
        return f"No ceilings are stated for {target.name}: shares are of operations."
    speeds = f"{target.flops / 1e12:,.0f} TFLOP/s, bytes at {target.bandwidth / 1e12:.3g} TB/s"
    return f"Floors: operations at {speeds} ({target.machine})."


def _rows(step: Step, plan: Plan) -> list[str]:
    rows = [_cells(row) for row in step.rows if row.site is not None or row.what]
    trained = {row.choice.site.key for row in step.rows if row.choice is not None}
    for choice in plan.choices:
        if choice.site.key not in trained and choice.listed:
            ms = milliseconds(choice.measured.ms) if choice.measured is not None else "?"
            cells = (*_kernel_cells(choice), f"{ms}, not in training", "")
            rows += [cells] if cells not in rows else []
    rows += [(path, what, "torch", "", "") for path, what in _shape_changes(plan.programs)]
    return table(HEADS, rows)


def _cells(row: StepRow) -> tuple[str, ...]:
    ms = milliseconds(row.ms) if row.ms is not None else "?"
    floor = milliseconds(row.floor_ms) if row.floor_ms is not None else ""
    kernel = kernel_words(row.choice) if row.choice is not None else row.kernel
    return (row.node, row.what, kernel, f"{ms} x {row.calls}", floor)


def _kernel_cells(choice: Choice) -> tuple[str, ...]:
    return choice.site.label, words_of(choice.site), kernel_words(choice)


def kernel_words(choice: Choice) -> str:
    """Returns the names of a node's kernel and tile. The suffix `by rule` marks a kernel without a measurement."""
    file = next(iter(sorted(choice.rendered.files, key=lambda name: not name.endswith(".cu"))), "")
    if not file:
        return choice.kernel.name
    made_of = choice.kernel.made_of + ("" if choice.kernel.deterministic else ", not deterministic")
    tile = f", {choice.rendered.tile}" if choice.rendered.tile else ""
    rule = "" if choice.measured is not None or not choice.site.target.arch else "; by rule"
    return f"{file} ({made_of}){tile}{rule}"


def _saved(plan: Plan) -> Iterator[str]:
    if plan.save_choices:
        yield from ("", "Saved for the backward:", "")
        yield from map(_save_line, plan.save_choices)


def _save_line(choices: SaveChoices) -> str:
    keep, measured = choices.chosen.group.keep, choices.measured
    words = {o.group.keep: f"the {o.group.keep} ({', '.join(o.saved)})" for o in choices.options}
    if measured is None:
        return f"- {choices.label}: {words[keep]}; by rule: fewest bytes, else the {KEEPS[0]}"
    times = ", ".join(f"{words[other]} {measured.ms[other]}" for other in words if other != keep)
    return f"- {choices.label}: {words[keep]}; measured, {measured.ms[keep]} ms forward and backward; {times}"


def _not_chosen(plan: Plan) -> Iterator[str]:
    shown = list(dict.fromkeys((*_slower(plan), *_packages(plan), *_refused(plan.programs))))
    if shown:
        yield from ("", "Kernels that were not chosen, where they were measured or could be installed:", "", *shown)


def _slower(plan: Plan) -> Iterator[str]:
    for choice in plan.choices:
        if choice.measured is not None and choice.measured.others:
            times = ", ".join(f"{name} {milliseconds(ms)} ms" for name, ms in sorted(choice.measured.others.items()))
            yield f"- {choice.site.label}: {times}"


def _packages(plan: Plan) -> Iterator[str]:
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
    """Yields the reasons why fusions refuse the matrix products and attention outside of fused groups, one line per
    node and fusion.

    Only fusions that can contain the op of the node are listed.
    """
    for graph in programs.graphs:
        if graph.name not in programs.whole[:1] and not graph.name.endswith((".forward", ".step")):
            continue
        for node in graph.nodes:
            for fusion in catalog(fusions, Fusion).values() if node.op.matrix else ():
                if node.op.name in fusion.ops and (reason := fusion.refusal(graph, (node,))):
                    functions = tuple(other.name for other in programs.functions if node.name in other.by_name)
                    yield f"- {place_pattern(programs, functions, node.name)}: {fusion.name} {reason}"


def _difference(summary: Summary, plan: Plan) -> Iterator[str]:
    if all(choice.kernel.language == "torch" for choice in plan.choices):
        yield f"The same nodes, all by Torch: `specc explain {plan.source} NODE --target {plan.target.name}`."
        return
    main = {(c.graph, c.site.node.name): kernel_words(c) for c in summary.main.choices}
    rows = [_kernel_cells(c) for c in plan.choices if main.get((c.graph, c.site.node.name)) != kernel_words(c)]
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


def _deployed(plan: Plan) -> list[str]:
    return table(HEADS[:3], list(dict.fromkeys(_kernel_cells(choice) for choice in plan.listed)))


def _padding(programs: Programs) -> Iterator[str]:
    lines: list[str] = []
    for graph in programs.graphs:
        for node in graph.nodes:
            extent: tuple[str, object, object]  # the dim, its extent in the model, and its extent in the kernel
            name = node.name
            if isinstance(node.op, CropColumns):
                extent = "N", node.op.features, graph.types[node.inputs[0]].width
            elif isinstance(node.op, QuantizeRows):
                extent = "K", graph.types[node.inputs[0]].width, node.op.columns
                name = name.removesuffix("_input").removesuffix("_second")
            elif isinstance(node.op, Int8LstmStep) and isinstance(h := node.type.width, int):
                extent = "K", h, padded(h)
            else:
                continue
            dim, size, width = extent
            if size != width:
                lines.append(f"- {place_pattern(programs, (graph.name,), name)}: {dim} {size} is padded to {width}")
    if lines:
        yield from ("Padded to multiples of 16, with zeros:", "", *dict.fromkeys(lines), "")


def _shape_changes(programs: Programs) -> Iterator[tuple[str, str]]:
    seen: set[tuple[str, str]] = set()
    for group in programs.groups:
        for graph in (group.forward, group.backward):
            for node in graph.nodes:
                path = group_pattern(programs, group, node.name)
                if node.op.listed and (path, node.op.name) not in seen:
                    seen.add((path, node.op.name))
                    inputs = " x ".join(str(graph.types[ref]) for ref in node.inputs)
                    yield path, f"{node.op.name} {inputs} -> {', '.join(map(str, node.types))}"
