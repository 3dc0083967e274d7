"""Splits an 8-bit linear layer into nodes that round the operands to codes, and a node that multiplies the codes. The
kernel of another node in the group can then write the codes."""

from collections.abc import Sequence

from specc.compiler.fusions.fusion import Fusion, Rewrite, node
from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ops.fp8 import Fp8Linear
from specc.compiler.ops.fp8_codes import Fp8Codes, Fp8Product


class Fp8ProductsFusion(Fusion):
    """Accepts linear layers in 8-bit floats with delayed scales. The group may have any other members."""

    def refuses(self, graph: Graph, members: Sequence[Node]) -> str | None:
        for member in members:
            if not isinstance(member.op, Fp8Linear) or member.op.delayed:
                continue
            if member.op.by_rows:
                return f"needs `scale: tensor`, because the products of {member.name} sum over rows and over columns"
            return f"needs `scaling: delayed`, because a scale of {member.name} is known only after the whole tensor"
        return None

    def rewrite(self, graph: Graph, members: Sequence[Node]) -> Rewrite:
        nodes: list[Node] = []
        for member in members:
            if not isinstance(member.op, Fp8Linear):
                nodes.append(member)
                continue
            x, weight, state = ((ref, graph.types[ref]) for ref in member.inputs)
            codes = [
                node(f"{member.name}.{word}", Fp8Codes(factor), [value, state])
                for factor, (word, value) in enumerate((("x_codes", x), ("codes", weight)))
            ]
            product = Fp8Product("y", member.type.dtype, weight[1].dtype)
            inputs = [*((part.name, part.type) for part in codes), state]
            nodes += [*codes, node(member.name, product, inputs)]
        return Rewrite(tuple(nodes))


FP8_PRODUCTS = Fp8ProductsFusion(
    "fp8_products", frozenset({Fp8Linear.name}), {Fp8Linear: frozenset({"by_rows", "delayed"})}
)
