"""Turns pointwise nodes and dropout into epilogues of the matrix products whose results they read. A kernel computes
the epilogue before it stores the result."""

from dataclasses import replace

from specc.compiler.expr import Expr, Var, name_of, reread, substitute
from specc.compiler.ir.builder import underscored
from specc.compiler.ir.graph import Graph, Node, node_of, rename
from specc.compiler.ops.dropout import Dropout
from specc.compiler.ops.fp8_codes import ROLES, CodesLinear, Fp8Product
from specc.compiler.ops.linear import Linear, Product
from specc.compiler.ops.pointwise import Pointwise


def join_epilogues(graph: Graph) -> Graph:
    """Turns each pointwise node that is the only reader of a matrix product into the epilogue of this product. Returns
    the new graph.

    If a pointwise node reads several linear layers of the same input, these layers become one node with several
    accumulators. A pointwise node that reads a scalar, such as the gradient of a loss, stays separate. Such a pointwise
    node only scales a small tensor, and the product can remain a library call.

    Dropout with a buffer counts as a pointwise node that reads a mask. If such a dropout node reads the result of an
    epilogue, the dropout node joins this epilogue. If a pointwise node reads the result of an epilogue with a dropout
    mask, the pointwise node also joins this epilogue. Dropout between a product and a sum then needs no separate pass
    over memory.
    """
    for node in graph.nodes:
        reader = _as_pointwise(node)
        if reader is None or any(not graph.types[ref].shape for ref in reader.inputs):
            continue
        if products := _products(graph, reader):
            return join_epilogues(_joined(graph, reader, products))
        if (first := _drawing(graph, reader)) is not None:
            return join_epilogues(_composed(graph, first, reader))
    return graph


def _as_pointwise(node: Node) -> Node | None:
    op = node.op
    if isinstance(op, Dropout) and op.counted:
        title = f"dropout_{op.p:.4g}".replace(".", "p")
        text = str(reread(f"x * keep / {1 - op.p!r}"))
        return replace(node, op=Pointwise((text,), ("x", "keep"), title=title, draws=(("keep", op.p),)))
    return node if isinstance(op, Pointwise) else None


def _products(graph: Graph, epilogue: Node) -> tuple[Node, ...]:
    products = [
        node
        for ref in epilogue.inputs
        if (node := graph.by_name.get(node_of(ref))) is not None
        and (isinstance(node.op, Product) or (isinstance(node.op, Fp8Product) and node.op.role != "dw"))
        and node.epilogue is None
        and graph.uses(ref) == 1
    ]
    if len(products) > 1 and not (
        all(node.op == Linear() for node in products) and len({n.inputs[0] for n in products}) == 1
    ):
        return tuple(products[:1])
    return tuple(products)


def _joined(graph: Graph, epilogue: Node, products: tuple[Node, ...]) -> Graph:
    first = products[0]
    op = replace(first.op, weights=len(products)) if isinstance(first.op, Linear) else first.op
    assert isinstance(epilogue.op, Pointwise)
    names = dict(zip(epilogue.inputs, epilogue.op.variables, strict=True))
    accumulators = [product.name for product in products]
    operands = [ref for ref in epilogue.inputs if ref not in accumulators]
    variables = tuple(names[ref] for ref in (*accumulators, *operands))
    inputs = (first.inputs[0], *(product.inputs[1] for product in products), *operands)
    joined = replace(epilogue.op, variables=variables, dtype="")
    if isinstance(first.op, Fp8Product):
        op, joined, inputs = CodesLinear(), _scaled(joined, *ROLES[first.op.role][1]), (*inputs, first.inputs[2])
    members = (*accumulators, *(name for name in epilogue.members or (epilogue.name,) if name not in accumulators))
    node = Node(first.name, op, inputs, epilogue.types, joined, members)
    nodes = tuple(node if old.name == epilogue.name else old for old in graph.nodes if old not in products)
    renamed = dict(zip(epilogue.outputs, node.outputs, strict=True))
    return rename(replace(graph, nodes=nodes), renamed)


def _scaled(op: Pointwise, first: int, second: int) -> Pointwise:
    scale = underscored("scale", {*op.variables, *op.labels})
    scaled = {op.variables[0]: Var(op.variables[0]) * Var(scale)}
    outputs = tuple(str(substitute(reread(text), scaled)) for text in op.outputs)
    title = title_of(op)
    variables = (*op.variables, scale)
    return replace(op, outputs=outputs, variables=variables, title=title, scales=((scale, first, second),))


def _drawing(graph: Graph, reader: Node) -> Node | None:
    """Returns the product whose epilogue `reader` can join. Returns None if there is no such product, or if neither the
    epilogue nor `reader` has a dropout mask."""
    for ref in reader.inputs:
        node = graph.by_name.get(node_of(ref))
        if node is None or not isinstance(node.epilogue, Pointwise) or not isinstance(node.op, Product):
            continue
        assert isinstance(reader.op, Pointwise)
        alone = all(graph.consumers[output] == () for output in node.outputs if output != ref)
        shapes = {graph.types[other].shape for other, v in zip(reader.inputs, reader.op.variables, strict=True)}
        shapes -= {graph.types[other].shape for other in _buffers(reader)}
        drawn = node.epilogue.draws or reader.op.draws
        if drawn and alone and len(graph.consumers[ref]) == 1 and shapes <= {node.type.shape, (node.type.width,)}:
            return node
    return None


def _buffers(node: Node) -> tuple[str, ...]:
    assert isinstance(node.op, Pointwise)
    masks = dict(node.op.draws)
    return tuple(ref for ref, variable in zip(node.inputs, node.op.variables, strict=True) if variable in masks)


def _composed(graph: Graph, first: Node, second: Node) -> Graph:
    """Moves the node `second` into the epilogue of `first`. The new node has the outputs of `second`, then those
    outputs of `first` that the graph returns."""
    before, after = first.epilogue, second.op
    assert isinstance(before, Pointwise) and isinstance(after, Pointwise)
    count = len(before.variables) - len(first.inputs[first.op.arity :])
    known = dict(zip(first.inputs[first.op.arity :], before.variables[count:], strict=True))  # ref -> variable
    labels = before.labels or ("",) * len(before.outputs)
    texts = [reread(text) for text in before.outputs]
    saved = {label: text for label, text in zip(labels[1:], texts[1:], strict=True) if label}
    whole = [substitute(text, {v: saved[v] for v in saved if v not in before.variables}) for text in texts]
    returned = [i for i, ref in enumerate(first.outputs) if ref in dict(graph.outputs).values()]
    if not saved.keys() <= {labels[i] for i in returned}:
        texts = whole  # an expression reads an output that no longer exists
    taken = {*before.variables, *labels, *after.labels, "y"}
    last = first.members[-1].rpartition(".")[2]
    names = {i: labels[i] if i and labels[i] else underscored(last, taken) for i in returned}
    renamed: dict[str, Expr] = {}
    for ref, variable in zip(second.inputs, after.variables, strict=True):
        if ref in first.outputs:
            i = first.outputs.index(ref)
            renamed[variable] = whole[i] if len(after.outputs) > 1 else Var(names[i]) if i in names else texts[i]
            continue
        if ref not in known:
            known[ref] = underscored(variable, taken)
        renamed[variable] = Var(known[ref])
    outputs = [str(substitute(reread(text), renamed)) for text in after.outputs] + [str(whole[i]) for i in returned]
    labels = (*(after.labels or ("y",)), *names.values()) if names or after.labels else ()
    masks = tuple((str(renamed[name]), p) for name, p in after.draws)
    title = "_".join(filter(None, (title_of(before), title_of(after))))
    variables = (*before.variables[:count], *known.values())
    joined = Pointwise(
        tuple(outputs), variables, labels, title=title, draws=(*before.draws, *masks), scales=before.scales
    )
    inputs, types = (*first.inputs[: first.op.arity], *known), (*second.types, *(first.types[i] for i in returned))
    node = Node(first.name, first.op, inputs, types, joined, (*first.members, second.name))
    nodes = tuple(node if old.name == second.name else old for old in graph.nodes if old is not first)
    moved = zip((*second.outputs, *(first.outputs[i] for i in returned)), node.outputs, strict=True)
    return rename(replace(graph, nodes=nodes), dict(moved))


def title_of(op: Pointwise) -> str:
    """Returns the part of a kernel name that describes an epilogue: its title, or else the names of its expressions."""
    return op.title or "_".join(filter(None, (name_of(reread(text)) for text in op.outputs)))
