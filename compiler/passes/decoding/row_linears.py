"""Rewrites the programs of decoding steps for few rows. A linear layer, the preceding norm and the following pointwise
operations become one node. All layers that read the same input also become one node."""

from collections.abc import Iterator
from dataclasses import replace

from specc.compiler.ir.graph import Graph, Node, node_of, rename
from specc.compiler.ops.decoding.row_linear import RowLinear
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.norm import RmsNorm
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.programs.cost import DECODING
from specc.compiler.programs.programs import Programs


def row_linears(programs: Programs) -> Programs:
    """Returns the programs that append tokens to texts, with every linear layer as a `RowLinear`.

    If only one pointwise node reads a product, the pointwise node becomes the epilogue of the product. If the pointwise
    node reads several products of the same input, these products become one node. Any other products of the same input
    also become one node. An RMS norm that only products read becomes a part of each product.

    Raises:
        ValueError: If the model has no program that appends tokens to texts.
    """
    steps = tuple(graph for graph in programs.programs if graph.name in DECODING)
    if not steps:
        raise ValueError(f"{programs.name} has no program that extends a text")
    titles: dict[str, Pointwise] = {}
    return replace(
        programs,
        programs=tuple(_rewritten(graph, titles) for graph in steps),
        functions=tuple(_rewritten(graph, titles) for graph in programs.called_from(steps)),
        whole=(),
        groups=(),
        phases=(),
    )


def _rewritten(graph: Graph, titles: dict[str, Pointwise]) -> Graph:
    for name in tuple(graph.by_name):  # the rewrite changes the names of readers, so the nodes are looked up again
        node = graph.by_name.get(name)
        if node is not None and isinstance(node.op, Pointwise) and (products := tuple(_only_read_by(graph, node))):
            graph = _with_epilogue(graph, node, products, titles)
    alike: dict[str, list[str]] = {}
    for node in graph.nodes:
        if isinstance(node.op, Linear):
            alike.setdefault(node.inputs[0], []).append(node.name)
    for names in alike.values():
        graph = _together(graph, [graph.by_name[name] for name in names])
    for name in tuple(graph.by_name):
        node = graph.by_name[name]
        if isinstance(node.op, RmsNorm) and _feeds_products(graph, node):
            graph = _with_norm(graph, node)
    return graph


def _only_read_by(graph: Graph, reader: Node) -> Iterator[Node]:
    """Yields the products that can have `reader` as their epilogue. These products have the same input and the shape of
    `reader`, and only `reader` reads these products."""
    first: Node | None = None
    shapes = (reader.type.shape, (reader.type.width,))
    if any(graph.types[ref].shape not in shapes or not graph.types[ref].floating for ref in reader.inputs):
        return
    for ref in dict.fromkeys(reader.inputs):
        node = graph.by_name.get(node_of(ref))
        if node is None or not isinstance(node.op, Linear) or node.type.shape != reader.type.shape:
            continue
        if graph.uses(ref) == 1 and (first is None or node.inputs[0] == first.inputs[0]):
            first = first or node
            yield node


def _with_epilogue(graph: Graph, reader: Node, products: tuple[Node, ...], titles: dict[str, Pointwise]) -> Graph:
    assert isinstance(reader.op, Pointwise)
    names = dict(zip(reader.inputs, reader.op.variables, strict=True))
    accumulators = [product.name for product in products]
    operands = [ref for ref in dict.fromkeys(reader.inputs) if ref not in accumulators]
    variables = tuple(names[ref] for ref in (*accumulators, *operands))
    words = products[0].name.replace(".", "_")
    epilogue = replace(reader.op, variables=variables, dtype="", title="")
    options = (words, *(f"{words}_{i}" for i in range(2, len(titles) + 3)))
    title = next(option for option in options if titles.setdefault(option, epilogue) == epilogue)
    inputs = (products[0].inputs[0], *(product.inputs[1] for product in products), *operands)
    members = (*accumulators, reader.name)
    joined = replace(epilogue, title=title)
    node = Node(products[0].name, RowLinear(len(products)), inputs, reader.types, joined, members)
    nodes = tuple(node if old is reader else old for old in graph.nodes if old not in products)
    return rename(replace(graph, nodes=nodes), dict(zip(reader.outputs, node.outputs, strict=True)))


def _together(graph: Graph, products: list[Node]) -> Graph:
    first = products[0]
    inputs = (first.inputs[0], *(product.inputs[1] for product in products))
    types = tuple(product.type for product in products)
    members = tuple(product.name for product in products) if len(products) > 1 else ()
    labels = tuple(name.rpartition(".")[2] for name in members)
    if len(set(labels)) < len(labels):
        labels = tuple(name.replace(".", "_") for name in members)
    node = Node(first.name, RowLinear(len(products), labels=labels), inputs, types, None, members)
    nodes = tuple(node if old is first else old for old in graph.nodes if old is first or old not in products)
    names = {product.name: ref for product, ref in zip(products, node.outputs, strict=True)}
    return rename(replace(graph, nodes=nodes), names)


def _feeds_products(graph: Graph, norm: Node) -> bool:
    readers = graph.consumers[norm.name]
    only = graph.uses(norm.name) == len(readers) > 0
    return only and all(
        isinstance(node.op, RowLinear) and node.inputs[0] == norm.name and node.inputs.count(norm.name) == 1
        for node in readers
    )


def _with_norm(graph: Graph, norm: Node) -> Graph:
    assert isinstance(norm.op, RmsNorm)
    nodes = []
    for node in graph.nodes:
        if norm.name in node.inputs:
            assert isinstance(node.op, RowLinear) and node.op.norm is None
            node = replace(
                node,
                op=replace(node.op, eps=norm.op.eps, affine=norm.op.affine),
                inputs=(*norm.inputs, *node.inputs[1:]),
            )
        nodes += [node] if node.name != norm.name else []
    return replace(graph, nodes=tuple(nodes))
