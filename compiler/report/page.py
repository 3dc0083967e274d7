"""PLAN.md, where a reviewer starts, and the summary that `specc plan` prints."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specc.compiler import fusions
from specc.compiler.catalog import catalog
from specc.compiler.expr import KEEPS
from specc.compiler.fusions.fusion import Fusion
from specc.compiler.ir.graph import TensorType
from specc.compiler.ops.int8_lstm import Int8LstmStep
from specc.compiler.ops.quantized import CropColumns, QuantizeRows, padded
from specc.compiler.passes.assign_quant import Allocation, allocation, calibrated, looked_up
from specc.compiler.passes.select_kernels import group_pattern
from specc.compiler.pattern import matches
from specc.compiler.pipeline import lower
from specc.compiler.plan.plan import Alternatives, Choice, Plan, place_pattern
from specc.compiler.programs.cost import flops_per_token
from specc.compiler.programs.programs import Group, Programs
from specc.compiler.quant.variants import variants
from specc.compiler.report.int8_products import product_lines, products
from specc.compiler.spec.spec import Spec


def quantity(value: float) -> str:
    """A count in the unit that fits, e.g. `29.4 M`."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def quant_rows(spec: Spec, schemes: Allocation, programs: Programs) -> Iterator[tuple[str, int, int, int, str]]:
    """Stored form, tensors, parameters, estimated bytes and the rule, a row for each scheme in use."""
    groups: dict[str, list[int]] = {}
    rules: dict[str, list[str]] = {}
    for param in programs.params:
        scheme = schemes[param.name]
        groups.setdefault(scheme.label(), []).extend((param.count, scheme.estimate_bytes(param.shape)))
    if spec.quant is not None:
        rules.setdefault(spec.quant.default.label(), []).append("default")
        for rule in spec.quant.rules:
            rules.setdefault(rule.label(), []).append(f"`{rule.match}`")
    for label, numbers in groups.items():
        words = ", ".join(rules.get(label, ["not quantized"]))
        if len(rules.get(label, ())) > 4:
            words = f"a rule for each of {len(rules[label])} tensors"
        yield label, len(numbers) // 2, sum(numbers[::2]), sum(numbers[1::2]), words


def promotion(spec: Spec) -> str:
    """What quantization will choose, in words; empty where there is nothing to choose."""
    if spec.quant is not None and spec.quant.allocate is not None:
        wish, widths = spec.quant.allocate, ", ".join(map(str, sorted(set(spec.quant.allocate.bits))))
        clips = f" and clips of {', '.join(f'{c:g}' for c in sorted(set(wish.clip_stds)))} deviations" * bool(
            wish.clip_stds
        )
        within = f"chosen together within {spec.quant.budget_bytes:,} bytes"
        return f"then each of `{wish.match}` at {widths} bits{clips}, {within}"
    rule = spec.quant.promote if spec.quant is not None else None
    if rule is None or spec.quant is None:
        return ""
    many = f"the {rule.count} tensors" if rule.count is not None else "as many tensors"
    fit = f" within {spec.quant.budget_bytes:,} bytes" if spec.quant.budget_bytes is not None else ""
    return f"then {many} of largest Hessian trace among `{rule.match}` to int{rule.bits}{fit}, chosen at quantization"


def too_large(spec: Spec, target: str, schemes: Allocation) -> Iterator[str]:
    """A warning where what `quant.allocate` can choose may exceed the budget however it chooses, in two lines: about
    how many bytes there are at the least, and the largest parameters that it does not choose for."""
    if (quant := spec.quant) is None or (wish := quant.allocate) is None or quant.budget_bytes is None:
        return
    programs, total, kept = lower(spec, target), 0, dict[tuple[str, str], int]()
    seen = calibrated(programs) | looked_up(programs)
    for param in programs.params:
        scheme = schemes[param.name]
        chosen = matches(wish.match, param.name) and param.name in seen
        options = variants(scheme, wish.bits, wish.clip_stds) if chosen else ()
        if len(options) > 1:
            total += min(one.estimate_bytes(param.shape) for one in options)
            continue
        alike = ".".join("*" if word.isdigit() else word for word in param.name.split("."))
        size = scheme.estimate_bytes(param.shape)
        kept[alike, scheme.label()] = kept.get((alike, scheme.label()), 0) + size
        total += size
    if total <= quant.budget_bytes:
        return
    largest = sorted(kept.items(), key=lambda item: -item[1])[:3]
    named = "; ".join(f"{name} {size:,} ({label})" for (name, label), size in largest)
    yield f"  may not fit: with the fewest bits that `allocate` may choose still about {total:,} bytes"
    if named:
        yield f"  not for it to choose: {named}"


def first_programs(plans: Mapping[str, Plan]) -> Programs:
    return next(iter(plans.values())).programs


def forward_flops(spec: Spec, plans: Mapping[str, Plan]) -> int:
    """Operations of a forward pass for one token: the model's own, without what a fusion pads."""
    return flops_per_token(lower(spec, next(iter(plans))), spec.model.window)


def plan_page(spec: Spec, plans: Mapping[str, Plan], deployed: Mapping[str, Plan] | None = None) -> str:
    """The text of PLAN.md; `deployed` are the plans of what runs from an artifact, where these are others."""
    programs = first_programs(plans)
    schemes = allocation(spec.quant, programs.params)
    count = sum(param.count for param in programs.params)
    flops = 3 * forward_flops(spec, plans)
    lines = [
        f"# {spec.name}: plan",
        "",
        f"{spec.model.title} · {count:,} parameters · {quantity(flops)}FLOP a token forward and backward",
        "",
        "| stored as | tensors | parameters | bytes, at most about | rule |",
        "|---|---|---|---|---|",
    ]
    rows = list(quant_rows(spec, schemes, programs))
    lines += [f"| {label} | {n} | {total:,} | {size:,} | {rule} |" for label, n, total, size, rule in rows]
    if words := promotion(spec):
        lines += ["", f"{words[0].upper()}{words[1:]}."]
    for target, plan in plans.items():
        lines += ["", f"## {target}", "", *_target(spec, plan)]
        if deployed and target in deployed:
            lines += ["", f"## {target}, deployed", "", *_padding(deployed[target].programs)]
            lines += _target(spec, deployed[target])
    return "\n".join(lines) + "\n"


def _padding(programs: Programs) -> Iterator[str]:
    """What is padded for int8 products, a line each, and an empty one."""
    lines: list[str] = []
    for graph in programs.graphs:
        for node in graph.nodes:
            if isinstance(node.op, CropColumns):
                made = graph.types[node.inputs[0]].width
                path = place_pattern(programs, (graph.name,), node.name)
                lines.append(f"- {path}: N {node.op.columns} is padded to {made}")
            elif isinstance(node.op, QuantizeRows) and (k := graph.types[node.inputs[0]].width) != node.op.columns:
                name = node.name.removesuffix("_input").removesuffix("_second")
                path = place_pattern(programs, (graph.name,), name)
                lines.append(f"- {path}: K {k} is padded to {node.op.columns}")
            elif isinstance(node.op, Int8LstmStep) and isinstance(h := node.type.width, int) and h != padded(h):
                path = place_pattern(programs, (graph.name,), node.name)
                lines.append(f"- {path}: K {h} is padded to {padded(h)}")
    if lines:
        yield "Padded to multiples of 16, with zeros:"
        yield ""
        yield from dict.fromkeys(lines)
        yield ""


def _target(spec: Spec, plan: Plan) -> Iterator[str]:
    programs = plan.programs
    tokens = max(spec.train.at_once() * spec.model.window, 1)
    yield "| node | op and epilogue | kernel | tile | GFLOP | MB moved |"
    yield "|---|---|---|---|---|---|"
    sizes = {"B": spec.train.at_once(), "T": spec.model.window, "S": spec.model.window}
    yield from dict.fromkeys(_row(choice, sizes) for choice in plan.choices)
    for path, op, types in _others(programs):
        yield f"| {path} | {op} {types} | torch | | | |"
    yield ""
    yield f"GFLOP and MB are of one micro-batch of {tokens:,} tokens in one block. What no row names is Torch's own."
    if plan.machine is not None and any(choice.measured for choice in plan.choices):
        yield f"Measured on {plan.machine.gpu}: {', '.join(plan.machine.versions)}."
    if plan.alternatives:
        yield ""
        yield "Kept for the backward:"
        yield ""
        yield from map(_kept, plan.alternatives)
    shown = [
        f"- {c.site.label}: {name} {reason}"
        for c in plan.choices
        for name, reason in c.considered
        if c.rendered.files and name != "torch"
    ]
    shown += _refused(programs)
    if shown:
        yield ""
        yield "Not chosen:"
        yield ""
        yield from dict.fromkeys(shown)


def _row(choice: Choice, sizes: Mapping[str, int]) -> str:
    site = choice.site
    op = site.node.op
    words = op.words
    if site.epilogue is not None:
        words += f", `{site.epilogue.outputs[0]}`"
    saved = ", ".join((site.epilogue or op).output_labels[1:])
    words += f", also {saved}" if saved else ""
    file = next(iter(sorted(choice.rendered.files, key=lambda name: not name.endswith(".cu"))), "")
    made_of = choice.kernel.made_of + ("" if choice.kernel.deterministic else ", not deterministic")
    kernel = f"{file} ({made_of})" if file else choice.kernel.name
    flops = op.flops(site.inputs[: op.arity], site.node.types, sizes) / 1e9
    between = choice.kernel.between(site)
    moved = sum(type.bytes(sizes) for type in (*site.inputs, *site.node.types, *between)) / 1e6
    return f"| {site.label} | {words} | {kernel} | {_tile(choice)} | {flops:.1f} | {moved:.1f} |"


def _kept(found: Alternatives) -> str:
    """What a group keeps, and why not something else."""
    group, measured = found.chosen.group, found.measured
    others = [way.group for way in found.ways if way is not found.chosen]
    words = {way.keep: f"the {way.keep} ({', '.join(_made(way))})" for way in (group, *others)}
    why = f"by rule: fewest bytes, else the {KEEPS[0]}"
    if measured is not None:
        times = ", ".join(f"{words[other.keep]} {measured.ms[other.keep]}" for other in others)
        why = f"measured, {measured.ms[group.keep]} ms forward and backward; {times}"
    return f"- {found.label}: {words[group.keep]}; {why}"


def _made(group: Group) -> list[str]:
    """What a group keeps of what it computed itself."""
    inputs = {name for name, _ in group.forward.inputs}
    return [name for name in group.saved if name not in inputs]


def _tile(choice: Choice) -> str:
    """The tile, and whether it was measured or follows a rule."""
    found = choice.measured
    chosen = f"measured, {found.ms} ms for {found.rows:,} rows" if found else "by rule"
    if not choice.rendered.tile:
        return chosen if found else ""
    return f"{choice.rendered.tile}; {chosen}"


def _others(programs: Programs) -> Iterator[tuple[str, str, str]]:
    """The library products and attention outside groups, once a function; what pads and crops inside them."""
    seen: set[tuple[str, str]] = set()
    for graph in programs.graphs:
        if not _whole(programs, graph.name):
            continue
        for node in graph.nodes:
            if node.op.matrix and not node.op.everywhere:
                path = place_pattern(programs, _alike(programs, node.name), node.name)
                if (path, node.op.name) not in seen:
                    seen.add((path, node.op.name))
                    yield path, node.op.name, _types([graph.types[ref] for ref in node.inputs], node.types)
    for group in programs.groups:
        for graph in (group.forward, group.backward):
            for node in graph.nodes:
                path = group_pattern(programs, group, node.name)
                if node.op.listed and (path, node.op.name) not in seen:
                    seen.add((path, node.op.name))
                    yield path, node.op.name, _types([graph.types[ref] for ref in node.inputs], node.types)


def _refused(programs: Programs) -> Iterator[str]:
    """Why a product or attention outside groups could be in none that one fusion takes."""
    for graph in programs.graphs:
        for node in graph.nodes if _whole(programs, graph.name) else ():
            for fusion in catalog(fusions, Fusion).values() if node.op.matrix else ():
                if node.op.name in fusion.ops and (reason := fusion.refusal(graph, (node,))):
                    path = place_pattern(programs, _alike(programs, node.name), node.name)
                    yield f"- {path}: {fusion.name} {reason}"


def _whole(programs: Programs, name: str) -> bool:
    return name in programs.whole[:1] or name.endswith((".forward", ".step"))


def _alike(programs: Programs, node: str) -> tuple[str, ...]:
    return tuple(graph.name for graph in programs.functions if node in graph.by_name)


def _types(inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> str:
    return " x ".join(map(str, inputs)) + " -> " + ", ".join(map(str, outputs))


def summary(spec: Spec, plans: Mapping[str, Plan], deployed: Mapping[str, Plan] | None = None) -> tuple[str, ...]:
    """The lines of `specc plan`: at most 25. `deployed` are as `plan_page` has them."""
    programs = first_programs(plans)
    schemes = allocation(spec.quant, programs.params)
    count = sum(param.count for param in programs.params)
    forward = forward_flops(spec, plans)
    rows = list(quant_rows(spec, schemes, programs))
    lines = [f"{spec.name}: {spec.model.title}", f"parameters   {count:,} in {len(programs.params)} tensors"]
    lines.append(f"FLOP a token {quantity(forward)}FLOP forward, {quantity(3 * forward)}FLOP forward and backward")
    total = sum(size for _, _, _, size, _ in rows)
    budget = spec.quant.budget_bytes if spec.quant is not None else None
    against = f" of {budget:,} ({100 * total / budget:.1f} %)" if budget else ""
    words = promotion(spec)
    when = " at the bits of its rules, before others are chosen" if words else ""
    lines.append(
        f"artifact     at most about {total:,} bytes{against}{when}, compressed; by the entropy of normal rows"
    )
    if budget and total > budget and spec.quant is not None and spec.quant.allocate is None:
        lines.append("  may not fit: `quant.allocate` chooses among widths, fewer bits too, so that it does")
    lines += too_large(spec, next(iter(plans)), schemes)
    for label, n, numbers, size, _ in rows[:6]:
        lines.append(f"  {label:<22} {n:>4} tensors {numbers:>12,} parameters {size:>12,} bytes")
    if words:
        lines.append(f"  {words}")
    for target, plan in list(plans.items())[:7]:
        own = [c for c in plan.choices if c.rendered.files]
        names = ", ".join(dict.fromkeys(f"{c.rendered.module} ({c.kernel.language})" for c in own)) or "none of its own"
        lines.append(f"{target:<12} {names}")
    lines += product_lines(deployed or {})
    if len(lines) > 25:
        lines[24:] = [f"  and {len(lines) - 24} more, which PLAN.md lists"]
    return tuple(lines)


def summary_data(spec: Spec, plans: Mapping[str, Plan], deployed: Mapping[str, Plan] | None = None) -> dict[str, Any]:
    """What `summary` tells, as data."""
    programs = first_programs(plans)
    forward = forward_flops(spec, plans)
    rows = quant_rows(spec, allocation(spec.quant, programs.params), programs)
    names = ("stored_as", "tensors", "parameters", "estimated_bytes", "rule")
    stored = [dict(zip(names, row, strict=True)) for row in rows]
    return {
        "name": spec.name,
        "title": spec.model.title,
        "parameters": sum(param.count for param in programs.params),
        "tensors": len(programs.params),
        "flops_per_token": {"forward": forward, "forward_and_backward": 3 * forward},
        "estimated_bytes": sum(row["estimated_bytes"] for row in stored),
        "budget_bytes": spec.quant.budget_bytes if spec.quant is not None else None,
        "stored": stored,
        "promotion": promotion(spec),
        "kernels": {name: _kernel_data(plan) for name, plan in plans.items()},
        "deployed": {name: [row.data() for row in products(plan)] for name, plan in (deployed or {}).items()},
    }


def _kernel_data(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "node": c.site.label,
            "kernel": c.kernel.name,
            "language": c.kernel.language,
            "files": sorted(c.rendered.files),
            "tile": c.rendered.tile,
        }
        for c in plan.choices
    ]
