"""Spells runs of calls, one a block, as loops over a module list, and a scan as a loop over time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specc.compiler.ir import Graph, Node
from specc.compiler.ops.region import Call, Scan
from specc.compiler.plan import Plan
from specc.compiler.torch_code import LINE, Body
from specc.compiler.torch_function import Function


@dataclass(frozen=True, slots=True)
class Piece:
    """One node, or the calls of all blocks of a module list, `field`. They are `chained` where each reads the one
    before it."""

    nodes: tuple[Node, ...]
    field: str = ""

    @property
    def calls(self) -> bool:
        return bool(self.field)

    @property
    def chained(self) -> bool:
        return callee_of(self.nodes[0]).partition(".")[2] != "begin"


def callee_of(node: Node) -> str:
    assert isinstance(node.op, Call | Scan)
    return node.op.callee


def pieces(nodes: Sequence[Node]) -> Iterator[Piece]:
    """The nodes in order, the calls of equal fields together."""
    run: list[Node] = []
    for node in (*nodes, None):
        field = _field(node) if node is not None else ""
        if run and _field(run[0]) != field:
            yield Piece(tuple(run), _field(run[0]))
            run = []
        if node is not None and field:
            run.append(node)
        elif node is not None:
            yield Piece((node,))


def _field(node: Node) -> str:
    """The module list that a call's block is in; empty for what is no such call."""
    if not isinstance(node.op, Call):
        return ""
    field, _, number = node.op.at.rpartition(".")
    return field if number.isdigit() else ""


def stacks(nodes: Sequence[Node]) -> Iterator[Sequence[Node]]:
    """The calls of each module list."""
    return (piece.nodes for piece in pieces(nodes) if piece.calls)


def read_beside(graph: Graph) -> frozenset[str]:
    """The values from before a loop over blocks that the loop, but as its start, or something after it reads."""
    found: set[str] = set()
    done = 0
    for piece in pieces(graph.nodes):
        before = {ref for node in graph.nodes[:done] for ref in node.outputs}
        done += len(piece.nodes)
        if piece.calls:
            start = piece.nodes[0].inputs[:1] if piece.chained else ()
            read = [ref for node in graph.nodes[done - len(piece.nodes) :] for ref in node.inputs]
            for ref in start:
                read.remove(ref)
            read += [ref for _, ref in graph.outputs]
            found |= before.intersection(read)
    return frozenset(found)


def scans(graphs: Sequence[Graph]) -> Iterator[tuple[Node, Scan]]:
    """The loops over time of some programs."""
    return ((node, node.op) for graph in graphs for node in graph.nodes if isinstance(node.op, Scan))


def time_loop(step: Graph, scan: Node) -> Function:
    """The method that runs `step` over all positions."""
    assert isinstance(scan.op, Scan)
    names = [name for name, _ in step.inputs]
    last = scan.op.carried + scan.op.stepped
    carried, stepped = names[: scan.op.carried], names[scan.op.carried : last]
    each = [f"{name}_t" for name in stepped]
    over = [f"{name}.split(1, dim=1)" for name in stepped]
    items = f"for {', '.join(each)} in "
    items += f"zip({', '.join(over)}, strict=True):" if len(over) > 1 else f"{over[0]}:"
    lines = (
        "outputs: list[Tensor] = []",
        items,
        f"    {', '.join((*carried, 'y'))} = self.step({', '.join((*carried, *each, *names[last:]))})",
        "    outputs.append(y)",
    )
    doc = f"`step` at each position of {' and '.join(stepped)}, one after another: the last {', '.join(carried)}, and "
    doc += f"all y {scan.types[-1]}."
    arguments = ("self", *(f"{name}: Tensor" for name in names))
    returns = f"{', '.join(carried)}, torch.cat(outputs, dim=1)"
    annotation = f"tuple[{', '.join('Tensor' for _ in scan.types)}]"
    compiled = "@torch.compiler.disable(recursive=False)  # a loop: only its step is compiled, once"
    return Function("forward", doc, arguments, lines, returns, annotation, compiled)


def begin_lines(body: Body, calls: Sequence[Node]) -> str:
    """Adds to `body` a dict with what every block begins with; returns its name. All blocks are given the same."""
    op = calls[0].op
    assert isinstance(op, Call) and len({call.inputs for call in calls}) == 1
    field = op.at.rpartition(".")[0]
    name = field.rpartition(".")[2]
    given = ", ".join(body.text(ref) for ref in calls[0].inputs)
    for ref in calls[0].inputs:
        if ref in body.pending:  # every block reads it, so it is computed once, before
            body.write(ref)
            given = ", ".join(body.text(ref) for ref in calls[0].inputs)
    begun = f"block.begin({given})"
    begun = begun if len(calls[0].types) > 1 else f"({begun},)"
    body.lines.append(f'{name} = {{f"{field}.{{i}}": {begun} for i, block in enumerate(self.{field})}}')
    return name


def loop_lines(plan: Plan, body: Body, calls: Sequence[Node], tables: list[str], keeper: str) -> None:
    """Adds the loop to `body`, and to `tables` which block also reads the output of which earlier one.

    Each call's first input is the output before it; others are the same in every call, a block's own state (inputs
    of the program, which it finds in `keeper`), or, last and only in some calls, the output of an earlier block.
    """
    graph = body.graph
    ops = [call.op for call in calls if isinstance(call.op, Call)]
    field, method = ops[0].at.rpartition(".")[0], ops[0].callee.partition(".")[2]
    shared = min(len(call.inputs) for call in calls)
    state = {name for name, _ in graph.inputs} - body.names.keys()
    listed = method == "extend" and keeper == "cache"
    kept = method == "extend" and keeper == "state" and any(state.intersection(call.inputs) for call in calls)
    args: list[str] = []
    for column in zip(*(call.inputs[1:shared] for call in calls), strict=True):
        if not state.issuperset(column):
            assert len(set(column)) == 1, "calls may differ only in their state and their skip"
            if column[0] in body.pending:
                body.write(column[0])
            args.append(body.text(column[0]))
    args += ["*kept"] if listed else [f'*state[f"{field}.{{i}}"]'] if kept else []
    first = body.text(calls[0].inputs[0])
    body.pending.pop(calls[0].inputs[0], None)
    if first != "x":
        body.release("x")
        body.lines.append(f"x = {first}")
    run = "block" if method == "forward" else f"block.{method}"
    call_text = f"{run}({', '.join(('x', *args))})"
    positions = {call.name: i for i, call in enumerate(calls)}
    skips = {i: positions[call.inputs[shared]] for i, call in enumerate(calls) if len(call.inputs) > shared}
    over = f"zip(self.{field}, cache, strict=True)" if listed else f"self.{field}"
    item = "block, kept" if listed else "block"
    if not skips:
        counted = (f"i, {item}", f"enumerate({over})") if kept else (item, over)
        body.lines += [f"for {counted[0]} in {counted[1]}:", f"    x = {call_text}"]
    else:
        callee = plan.programs.function(next(op.callee for i, op in enumerate(ops) if i in skips))
        table = f"{callee.inputs[shared][0].upper()}S"
        text = f"# block -> the earlier block whose output it also reads\n{table} = {skips!r}"
        if text not in tables:
            tables.append(text)
        extra = f"{run}({', '.join(('x', *args, f'outputs[{table}[i]]'))})"
        item = f"({item})" if listed else item
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
