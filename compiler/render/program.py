"""A program as a method of the model: plain nodes, loops over blocks, and the state that it reads and gives back."""

from collections.abc import Iterator, Mapping, Sequence

from specc.compiler.ir.graph import Graph, Named, Node, TensorType
from specc.compiler.plan.plan import Plan
from specc.compiler.render.body import Body
from specc.compiler.render.function import Function, Speller, types_doc
from specc.compiler.render.loops import begin_lines, index_of, inputs_of, loop_lines, pieces, read_beside, stacks

METHODS = {"train": "forward"}  # a module is called to train it; other programs are methods of their own names
CACHE = "cache"  # a list with a tuple for each block
STATE = "state"  # a dict with a tuple for each place in the spec
STATE_TYPE = "dict[str, tuple[Tensor, ...]]"


def keeper(plan: Plan, graph: Graph) -> str:
    """What a program calls the state that it reads or makes; empty where it has none."""
    if graph.name in plan.programs.whole:
        return ""
    names = [*(name for name, _ in graph.inputs), *(label for label, _ in graph.outputs)]
    return STATE if any(name.startswith(f"{STATE}.") for name in names) else CACHE


def program_method(plan: Plan, graph: Graph, reserved: frozenset[str], tables: list[str]) -> Function:
    """The method of one program. Loops of which a table tells what they read add to `tables`."""
    kept = keeper(plan, graph)
    prefix = f"{kept}." if kept else "\0"
    inputs = [(name, type) for name, type in graph.inputs if not name.startswith(prefix)]
    outputs = [(label, ref) for label, ref in graph.outputs if not label.startswith(prefix)]
    unpacked = _unpacked(graph, [name for name, _ in inputs]) if kept == STATE else {}
    names = {name: name for name, _ in inputs} | {ref: name for group in unpacked.values() for ref, name in group}
    paths = [path.split(".") for path, _ in graph.params]
    sides = frozenset(path[0] for path in paths if len(path) > 2) - {path[0] for path in paths if len(path) == 2}
    own = {name: "_".join(name.split(".")[2:]) for name, _ in own_state(graph)} if kept == CACHE else {}
    names |= own
    speller, apart = Speller(plan, graph), read_beside(graph)
    body = Body(graph, names, speller, reserved, scopes=sides, apart=apart, wanted=_wanted(plan, graph))
    if own:
        body.lines.append(f"{', '.join(own.values())}{',' if len(own) == 1 else ''} = {CACHE}[0]")
    for place, group in unpacked.items():
        targets = ", ".join(name for _, name in group)
        body.lines.append(f'{targets if len(group) > 1 else f"({targets},)"} = {kept}["{place}"]')
    made: dict[str, str] = {}
    for piece in pieces(graph.nodes):
        if not piece.calls:
            body.run([piece.nodes[0]])
        elif piece.chained:
            loop_lines(plan, body, piece.nodes, tables, f"{kept}[1:]" if own else kept)
        else:
            made[piece.field] = begin_lines(body, piece.nodes)
    arguments = ["self", *(f"{name}: Tensor" for name, _ in inputs)]
    doc = types_doc(inputs, [graph.types[ref] for _, ref in outputs])
    name = METHODS.get(graph.name, graph.name)
    doc = f"{graph.name}: {doc}"
    if kept == CACHE:
        arguments.append("cache: list[tuple[Tensor, ...]]")
        doc = doc[:-1] + ", with the tokens added to `cache`, which holds `start` of them."
    elif kept and outputs:
        arguments.append(f"state: {STATE_TYPE}")
        doc = doc[:-1] + ", with the token added to `state`, in place."
    elif kept:
        entries = tuple(_entries(graph, body, made))
        doc = f"{doc.rpartition(' -> ')[0]} -> the state before the first token, by place in the spec."
        return Function(name, doc, tuple(arguments), tuple(body.lines), f"{{{', '.join(entries)}}}", STATE_TYPE)
    returns = body.returned([ref for _, ref in outputs])
    return Function(name, doc, tuple(arguments), tuple(body.lines), returns, "Tensor")


def _places(names: Sequence[str]) -> Mapping[str, list[str]]:
    """State by its place: `state.decoder.lstm.h` is at `decoder.lstm`; that of a block is at the block."""
    found: dict[str, list[str]] = {}
    for name in names:
        words = name.split(".")[1:]
        number = next((i for i, word in enumerate(words) if word.isdigit()), None)
        place = ".".join(words[:-1] if number is None else words[: number + 1])
        found.setdefault(place, []).append(name)
    return found


def _unpacked(graph: Graph, taken: Sequence[str]) -> Mapping[str, list[tuple[str, str]]]:
    """The state of stages that are no blocks, by place: each input with the Python name that it gets."""
    state = [name for name, _ in graph.inputs if name.startswith(f"{STATE}.")]
    places = {place: names for place, names in _places(state).items() if not place.rpartition(".")[2].isdigit()}
    keys = [name.rpartition(".")[2] for names in places.values() for name in names]

    def local(name: str) -> str:
        _, *words = name.split(".")
        return words[-1] if keys.count(words[-1]) == 1 and words[-1] not in taken else "_".join(words[-2:])

    return {place: [(name, local(name)) for name in names] for place, names in places.items()}


def _entries(graph: Graph, body: Body, made: Mapping[str, str]) -> Iterator[str]:
    """The entries of the dict of a new state; `made` are dicts of blocks, by their field."""
    values = dict(graph.outputs)
    done: set[str] = set()
    for place, labels in _places(list(values)).items():
        field, _, number = place.rpartition(".")
        if not number.isdigit():
            for label in labels:
                if values[label] in body.pending:
                    body.write(values[label])
            texts = [body.text(values[label]) for label in labels]
            yield f'"{place}": ({", ".join(texts)}{"," if len(texts) == 1 else ""})'
        elif field not in done:
            done.add(field)
            yield f"**{made[field]}"


def own_state(graph: Graph) -> tuple[Named, ...]:
    """The state in a list of a program, as far as no block keeps it."""
    passed = {ref for calls in stacks(graph.nodes) for call in calls for ref in call.inputs}
    return tuple((name, type) for name, type in graph.inputs if name.startswith(f"{CACHE}.") and name not in passed)


def _wanted(plan: Plan, graph: Graph) -> dict[str, str]:
    """The name that blocks have for what the first of them starts from, where all are given that besides."""
    found: dict[str, str] = {}
    for calls in stacks(graph.nodes):
        start, *passed = inputs_of(plan, calls[0]).items()
        found |= {ref: name for name, ref in passed if ref == start[1]}
    return found


def new_cache(graph: Graph, params: Sequence[Named], calls: Sequence[Node]) -> Function:
    """The method that makes empty state: of the embedding, where it keeps some, and a tuple of tensors a run of a
    block, all of which keep the same."""
    own = own_state(graph)
    kept = [type for name, type in graph.inputs if name.startswith(f"{CACHE}.") and (name, type) not in own]
    each = kept[: len(kept) // len(calls)]
    assert kept == each * len(calls)
    over = "self.blocks" if len({index_of(call) for call in calls}) == len(calls) else "ORDER"
    lines = [f"new = self.{params[0][0]}.new_zeros"] if kept or own else []
    returns = f"[({', '.join(map(_empty, each))}{',' if len(each) == 1 else ''}) for _ in {over}]"
    if len(each) > 2:
        lines.append(f"shapes = ({', '.join(str(type.shape[2:]) for type in each)})")
        returns = f"[tuple(new(rows, positions, *shape) for shape in shapes) for _ in {over}]"
    doc = "Empty state for `rows` sequences of at most `positions` tokens."
    if own:
        lines.append(f"own = ({', '.join(_empty(type) for _, type in own)}{',' if len(own) == 1 else ''})")
        returns = f"[own, *({returns[1:-1]})]"
        doc = f"{doc[:-1]}: the embedding's own, then each block's."
    arguments = ("self", "rows: int", "positions: int")
    return Function("new_cache", doc, arguments, tuple(lines), returns, "list[tuple[Tensor, ...]]")


def _empty(type: TensorType) -> str:
    """An empty tensor of state."""
    dims = ", ".join({"B": "rows", "S": "positions"}.get(str(dim), str(dim)) for dim in type.shape)
    return f"new({dims})" if type.floating else f"new({dims}, dtype=torch.int64)"
