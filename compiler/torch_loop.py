"""Spells a run of calls, one a block, as a loop over the module list."""

from collections.abc import Sequence

from specc.compiler.ir import Node
from specc.compiler.ops.region import Call
from specc.compiler.plan import Plan
from specc.compiler.torch_code import LINE, Body


def loop_lines(plan: Plan, body: Body, calls: Sequence[Node], tables: list[str]) -> None:
    """Adds the loop to `body`, and to `tables` which block also reads the output of which earlier one.

    Each call's first input is the output before it; others are the same in every call, a block's own state (inputs
    of the
    program), or, last and only in some calls, the output of an earlier block.
    """
    graph = body.graph
    ops = [call.op for call in calls if isinstance(call.op, Call)]
    field, method = ops[0].at.partition(".")[0], ops[0].callee.partition(".")[2]
    shared = min(len(call.inputs) for call in calls)
    state = {name for name, _ in graph.inputs} - body.names.keys()
    kept = graph.name not in plan.programs.whole
    args: list[str] = []
    for column in zip(*(call.inputs[1:shared] for call in calls), strict=True):
        if not state.issuperset(column):
            assert len(set(column)) == 1, "calls may differ only in their state and their skip"
            args.append(body.text(column[0]))
    args += ["*kept"] if kept else []
    first = body.text(calls[0].inputs[0])
    body.pending.pop(calls[0].inputs[0], None)
    if first != "x":
        body.lines.append(f"x = {first}")
    run = "block" if method == "forward" else f"block.{method}"
    call_text = f"{run}({', '.join(('x', *args))})"
    positions = {call.name: i for i, call in enumerate(calls)}
    skips = {i: positions[call.inputs[shared]] for i, call in enumerate(calls) if len(call.inputs) > shared}
    over = f"zip(self.{field}, cache, strict=True)" if kept else f"self.{field}"
    item = "block, kept" if kept else "block"
    if not skips:
        body.lines += [f"for {item} in {over}:", f"    x = {call_text}"]
    else:
        callee = plan.programs.function(next(op.callee for i, op in enumerate(ops) if i in skips))
        table = f"{callee.inputs[shared][0].upper()}S"
        text = f"# block -> the earlier block whose output it also reads\n{table} = {skips!r}"
        if text not in tables:
            tables.append(text)
        extra = f"{run}({', '.join(('x', *args, f'outputs[{table}[i]]'))})"
        item = f"({item})" if kept else item
        step = f"    x = {extra} if i in {table} else {call_text}"
        steps = [step]
        if len(step) > LINE:
            read = f"    read = (outputs[{table}[i]],) if i in {table} else ()"
            steps = [read, f"    x = {run}({', '.join(('x', *args, '*read'))})"]
        body.lines += [
            "outputs: list[Tensor] = []",
            f"for i, {item} in enumerate({over}):",
            *steps,
            "    outputs.append(x)",
        ]
    body.texts[calls[-1].name] = "x"
    body.held["x"] = calls[-1].name
