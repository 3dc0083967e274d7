"""Scales the matrices of linear layers, instead of the outputs of these layers.

In `x + scale * linear(h)`, the gradient of `scale` reads `linear(h)` for all tokens. The gradient of `linear(h)` is
`scale` times the gradient of the sum, so this gradient is a separate tensor. If the layer multiplies by the matrix
`scale * w` instead of `w`, the gradient of the layer's output equals the gradient of the sum. The gradients of `w` and
`scale` follow from the gradient of the scaled matrix: d w = scale * d(scale * w), and d scale is the sum of d(scale *
w) * w over each row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from specc.compiler.expr import Binary, Const, Expr, Neg, Var, number, reread, simplify, substitute, variables
from specc.compiler.ir.builder import first_free
from specc.compiler.ir.graph import Graph, Node, rename
from specc.compiler.ir.op import Op
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.region import Fused
from specc.compiler.ops.shape import Column
from specc.compiler.passes.merge import free
from specc.compiler.passes.requests import Patterns, Requests
from specc.compiler.programs.programs import Programs

MATRIX = "w"  # the name of the matrix in the expression of the scaled matrix


def fold_scales(programs: Programs, patterns: Patterns) -> Programs:
    """Scales the matrices of linear layers, instead of the outputs of these layers. `scale * linear(h)` becomes a
    linear layer with the matrix `scale * w`. Returns the new programs.

    The pass applies to scales that are constants or functions of parameters. A scale consists of one number, or of one
    number per feature. The linear layer may be the last node of a fused group. Dropout may lie between the linear layer
    and the scaling. The pass changes programs over whole sequences, such as the programs for training and scoring.
    Decoding programs are unchanged, because they read few bytes other than the matrices.

    Args:
        programs: The programs, with fused groups.
        patterns: The patterns of the layers to change. `auto` selects all layers.

    Raises:
        LoweringError: If a pattern has no effect. The error lists the problems of all patterns.
    """
    requests = Requests(programs, "fold_scales", "fold", patterns)
    return requests.run(lambda graph: _folded(programs, graph, requests))


class _Scale(NamedTuple):
    """A factor that a pointwise node multiplies with a product. Homogeneous ops (see `Op.homogeneous`) may lie between
    the product and this node. No other node reads the product.

    Attributes:
        reader: The pointwise node.
        value: The reference that `reader` reads: the product, or the last homogeneous op after the product.
        product: The node of the product: a linear layer, or a fused group that ends in a linear layer.
        weight: The index of the matrix among the inputs of `product`.
        variable: The variable of `value` in the expression of `reader`.
        factor: The factor.
        total: The expression of `reader` without the factor.
        operands: For each variable of `factor`, the reference of its value.
    """

    reader: Node
    value: str
    product: Node
    weight: int
    variable: str
    factor: Expr
    total: Expr
    operands: Mapping[str, str]


def _folded(programs: Programs, graph: Graph, requests: Requests) -> Graph:
    refused: set[str] = set()
    while True:
        scales = (scale for scale in _scales(programs, graph) if scale.product.name not in refused)
        scale = next((scale for scale in scales if requests.names(graph, scale.product.name)), None)
        if scale is None:
            return graph
        if reason := _refusal(graph, scale):
            refused.add(scale.product.name)
            requests.refuse(graph, [scale.product.name], reason)
            continue
        text = f"over whole sequences, the factor {scale.factor} is multiplied into the matrix, once per step"
        requests.done(graph, [scale.product.name], text)
        graph = _applied(graph, scale)


def _scales(programs: Programs, graph: Graph) -> Iterator[_Scale]:
    """Yields the factors of products, except factors that depend on the tokens."""
    for node in graph.nodes:
        if not isinstance(node.op, Pointwise) or len(node.op.outputs) > 1:
            continue
        expression = reread(node.op.outputs[0])
        refs = dict(zip(node.op.variables, node.inputs, strict=True))
        for variable, ref in refs.items():
            product = _source(graph, ref)
            index = _matrix(programs, product) if product is not None else None
            if product is None or index is None:
                continue
            term = _term(expression, variable)
            factor = _factor(term, variable)
            if factor is None:
                continue
            factor = simplify(factor)
            operands = {name: refs[name] for name in variables(factor)}
            if any(ref[0] not in "@$" for ref in operands.values()):
                continue
            if not operands and number(factor) == 1:
                continue
            rest = simplify(substitute(term, {variable: Const(0)}))
            whole = Var(variable) if rest == Const(0) else Binary("+", rest, Var(variable))
            total = _with_term(expression, variable, whole)
            yield _Scale(node, ref, product, index, variable, factor, total, operands)


def _source(graph: Graph, ref: str) -> Node | None:
    """Follows homogeneous ops back from the value `ref`, and returns the first node that is not homogeneous. Returns
    None if the ops begin at an input of the graph, or if several nodes read one of the values on the way."""
    node = graph.by_name.get(ref)
    if node is None or graph.uses(ref) != 1:
        return None
    return _source(graph, node.inputs[0]) if node.op.homogeneous else node


def _term(expression: Expr, variable: str) -> Expr:
    """Returns the term that contains the variable, if `expression` is a sum. If several terms contain the variable,
    returns the whole expression."""
    match expression:
        case Binary("+" | "-", a, b) if (variable in variables(a)) != (variable in variables(b)):
            return _term(a if variable in variables(a) else b, variable)
    return expression


def _factor(term: Expr, variable: str) -> Expr | None:
    """Returns the factor `f` if `term` is `f * variable`, otherwise None."""
    match term:
        case Var(name) if name == variable:
            return Const(1)
        case Neg(a) if (inner := _factor(a, variable)) is not None:
            return Neg(inner)
        case Binary("+" | "-" | "*" | "/" as op, a, b) if (variable in variables(a)) != (variable in variables(b)):
            left = variable in variables(a)
            inner = _factor(a if left else b, variable)
            if inner is None or (op == "/" and not left):
                return None
            if op in "*/":
                return Binary(op, inner, b) if left else Binary(op, a, inner)
            return Neg(inner) if op == "-" and not left else inner
    return None


def _with_term(expression: Expr, variable: str, term: Expr) -> Expr:
    match expression:
        case Binary("+" | "-" as op, a, b) if (variable in variables(a)) != (variable in variables(b)):
            if variable in variables(a):
                return Binary(op, _with_term(a, variable, term), b)
            return Binary(op, a, _with_term(b, variable, term))
    return term


def _matrix(programs: Programs, product: Node) -> int | None:
    """Returns the index of the matrix among the inputs of a product. Returns None if the node is not a product, or if
    the epilogue of the product does more than multiply by factors. A dropout mask counts as a factor."""
    if product.op == Linear() and product.epilogue is None:
        return 1
    if not isinstance(product.op, Fused) or programs.group(product.op.group).chunks > 1:
        return None
    forward = programs.group(product.op.group).forward
    last = forward.by_name.get(forward.outputs[0][1])
    if last is None or last.op != Linear() or not _multiplies(last.epilogue):
        return None
    names = [name for name, _ in forward.inputs]
    return names.index(last.inputs[1]) if last.inputs[1] in names and forward.uses(last.inputs[1]) == 1 else None


def _multiplies(epilogue: Op | None) -> bool:
    """Returns whether an epilogue does nothing but multiply the product by a factor. Returns True if `epilogue` is
    None. Returns False if the epilogue also adds a term, such as a bias, or has several outputs."""
    if not isinstance(epilogue, Pointwise):
        return epilogue is None
    if len(epilogue.outputs) > 1:
        return False
    expression, product = reread(epilogue.outputs[0]), epilogue.variables[0]
    at_zero = simplify(substitute(expression, {product: Const(0)}))
    return _factor(expression, product) is not None and at_zero == Const(0)


def _refusal(graph: Graph, scale: _Scale) -> str | None:
    reader, matrix = scale.reader, graph.types[scale.product.inputs[scale.weight]]
    if reader.types != scale.product.types:
        return f"{reader.name} is {reader.type}, but the product is {scale.product.type}"
    for ref in scale.operands.values():
        type = graph.types[ref]
        if type.shape not in ((), (1,), matrix.shape[:1]):
            return f"the factor {ref[1:]} is {type}, not one number, or one number per feature"
        if ref[0] == "@" and type.dtype != matrix.dtype:
            return f"the factor {ref[1:]} is {type.dtype}, but the matrix is {matrix.dtype}"
    remaining = [graph.types[ref] for name, ref in _remaining_operands(scale).items() if name != scale.variable]
    if remaining and remaining[0].dtype != reader.type.dtype:
        return f"{reader.name} would be {remaining[0].dtype} without the factor"
    return None


def _remaining_operands(scale: _Scale) -> Mapping[str, str]:
    assert isinstance(scale.reader.op, Pointwise)
    names = variables(scale.total)
    pairs = zip(scale.reader.op.variables, scale.reader.inputs, strict=True)
    return {name: ref for name, ref in pairs if name in names}


def _applied(graph: Graph, scale: _Scale) -> Graph:
    product, reader = scale.product, scale.reader
    matrix = product.inputs[scale.weight]
    added: list[Node] = []

    def unused(name: str) -> bool:
        return name not in graph.types  # a second factor of a product

    # Factors have the names of their parameters, so that blocks with different expressions share the matrix
    words: dict[str, str] = {}
    for name, ref in scale.operands.items():
        words[name] = free([ref[1:].rpartition(".")[2]], {MATRIX, *words.values()}.__contains__)
    inputs, types = [matrix], [graph.types[matrix]]
    for name, ref in scale.operands.items():
        type = graph.types[ref]
        if type.shape not in ((), (1,)):
            path = first_free(f"{product.name}.{words[name]}", unused)
            column = Node(path, Column(), (ref,), Column().infer([type]))
            added.append(column)
            ref, type = column.name, column.type
        inputs.append(ref)
        types.append(type)
    factor = substitute(scale.factor, {name: Var(word) for name, word in words.items()})
    op = Pointwise((str(simplify(Binary("*", factor, Var(MATRIX)))),), (MATRIX, *words.values()))
    scaled = Node(first_free(f"{product.name}.scaled", unused), op, tuple(inputs), op.infer(types))
    refs = (*product.inputs[: scale.weight], scaled.name, *product.inputs[scale.weight + 1 :])
    swapped: dict[str, tuple[Node, ...]] = {product.name: (*added, scaled, replace(product, inputs=refs))}
    if scale.total == Var(scale.variable):
        swapped[reader.name] = ()
    else:
        remaining = _remaining_operands(scale)
        assert isinstance(reader.op, Pointwise)
        op = replace(reader.op, outputs=(str(scale.total),), variables=tuple(remaining))
        swapped[reader.name] = (replace(reader, op=op, inputs=tuple(remaining.values())),)
    nodes = tuple(new for node in graph.nodes for new in swapped.get(node.name, (node,)))
    graph = replace(graph, nodes=nodes)
    return rename(graph, {reader.name: scale.value}) if not swapped[reader.name] else graph
