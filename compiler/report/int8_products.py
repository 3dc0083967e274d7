"""The int8 matrix products of a deployed plan, as rows of a table with kernel, extents and padding."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.ops.quantized import Int8Product, QuantizeRows
from specc.compiler.ops.shape import CropColumns, TimeMajor
from specc.compiler.plan.plan import Choice, Plan


class ProductRow(NamedTuple):
    """One matrix product [M, K] x [N, K]^T.

    Attributes:
        m: The extent M as an expression of the symbolic dims, such as `B x T`.
        model_n, model_k: The extents in the model.
        n, k: The extents in the kernel, padded with zeros.
    """

    node: str
    module: str
    kernel: str
    language: str
    tile: str
    m: str
    n: int
    k: int
    model_n: int
    model_k: int

    @property
    def extents(self) -> str:
        """The extents N and K as text, such as `N 31 -> 32, K 128` if N is padded from 31 to 32."""
        dims = (("N", self.model_n, self.n), ("K", self.model_k, self.k))
        return ", ".join(
            f"{name} {size} -> {padded}" if size != padded else f"{name} {size}" for name, size, padded in dims
        )

    def data(self) -> dict[str, Any]:
        names = ("node", "kernel", "language", "module", "tile", "m", "n", "k")
        padded = {"n": [self.model_n, self.n], "k": [self.model_k, self.k]}
        shown = {name: pair for name, pair in padded.items() if pair[0] != pair[1]}
        return {**{name: getattr(self, name) for name in names}, "padded": shown}


def products(plan: Plan) -> Iterator[ProductRow]:
    rows: set[ProductRow] = set()
    for choice in plan.choices:
        op, types = choice.site.node.op, choice.site.inputs
        if not isinstance(op, Int8Product):
            continue
        n, k = op.extent(types[op.stored])
        graph = next(graph for graph in plan.programs.graphs if graph.name == choice.graph)
        model_n, model_k = _model_extents(graph, choice.site.node, n)
        kernel, rendered = choice.kernel, choice.rendered
        names = (path_of(choice), rendered.module, kernel.name, kernel.language, rendered.tile)
        m = " x ".join(map(str, graph.types[choice.site.node.inputs[0]].shape[:-1]))
        row = ProductRow(*names, m, n, k, model_n, model_k)
        if row not in rows:  # several programs may contain the same node
            rows.add(row)
            yield row


def path_of(choice: Choice) -> str:
    return choice.site.label.split(" ")[0].removesuffix(".padded")


def _model_extents(graph: Graph, product: Node, n: int) -> tuple[int, int]:
    for reader in graph.consumers[product.name]:
        if isinstance(reader.op, CropColumns):
            n = reader.op.features
    read = product.inputs[0]
    while (node := graph.by_name.get(node_of(read))) is not None and isinstance(node.op, TimeMajor | QuantizeRows):
        read = node.inputs[0]
    k = graph.types[read].width
    assert isinstance(k, int)
    return n, k


def product_lines(deployed: Mapping[str, Plan]) -> list[str]:
    """Returns the lines of `specc plan` about int8 products.

    There is one line per combination of kernel and extents. Only the products of the first target are listed, because
    targets differ only in the languages of kernels.
    """
    if not deployed:
        return []
    where = ", ".join(
        f"{target} ({'/'.join(dict.fromkeys(row.language for row in products(plan)))})"
        for target, plan in deployed.items()
    )
    shared: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for row in products(next(iter(deployed.values()))):
        rows, nodes = shared.setdefault((row.module, row.extents), ({}, {}))
        rows[row.m] = nodes[row.node] = None
    lines = [f"deployed     int8 products: {where}"]
    for (module, extents), (rows, nodes) in shared.items():
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        lines.append(f"  {module:<38} {extents}, M {' or '.join(rows)}: {next(iter(nodes))}{more}")
    return lines
