"""Fuses an RMSNorm, the rotary embedding, and the multiplication by a gain, on attention heads. The fused kernel reads
the heads only once."""

from collections.abc import Sequence
from typing import NamedTuple

from specc.compiler.expr import Binary, Expr, Var, reread, substitute
from specc.compiler.fusions.fusion import POINTWISE, Fusion, Rewrite, node
from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.ops.norm import RmsNorm
from specc.compiler.ops.norm_rope import NormRope
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.positions import Rope


class Parts(NamedTuple):
    """The members of a fusion point that are fused.

    Attributes:
        norm: The norm before or after the rotary embedding.
        rope: The rotary embedding.
        gain: The node that multiplies the heads by their gain, after norm and rotation.
        scale: The reference to the gain, or "" if there is no gain.
        weight: The node that computes the weight of the norm from a parameter.
    """

    norm: Node | None
    rope: Node
    gain: Node | None
    scale: str = ""
    weight: Node | None = None

    @property
    def chain(self) -> tuple[Node, ...]:
        """The members in the order of their computation, without the node `weight`."""
        before = [self.norm] if self.norm is not None and self.norm.name == node_of(self.rope.inputs[0]) else []
        chain = [*before, self.rope, *([] if before else [self.norm]), self.gain]
        return tuple(member for member in chain if member is not None)

    @property
    def weights(self) -> tuple[str, tuple[str, ...]]:
        """The weight of the norm as an expression in `w`, and a tuple with the reference to `w`. Both values are empty
        if there is no norm, or if the norm has no weight."""
        if self.norm is None or len(self.norm.inputs) == 1:
            return "", ()
        if self.weight is None:
            return "w", self.norm.inputs[1:]
        assert isinstance(self.weight.op, Pointwise)
        (variable,) = self.weight.op.variables
        return str(substitute(reread(self.weight.op.outputs[0]), {variable: Var("w")})), self.weight.inputs


class NormRopeFusion(Fusion):
    """Accepts a rotary embedding, an optional RMSNorm before the rotation, and an optional multiplication by one gain
    per head.

    The weight of the norm may be a function of a parameter. A norm without a weight may also follow the rotation,
    because a rotation does not change the mean square. The group may have no other members.
    """

    def refuses(self, graph: Graph, members: Sequence[Node]) -> str | None:
        parts = _parts(graph, members)
        return parts if isinstance(parts, str) else None

    def rewrite(self, graph: Graph, members: Sequence[Node]) -> Rewrite:
        parts = _parts(graph, members)
        assert isinstance(parts, Parts)
        chain = parts.chain
        eps = parts.norm.op.eps if parts.norm is not None and isinstance(parts.norm.op, RmsNorm) else None
        angles, (weight, learned) = parts.rope.inputs[1:], parts.weights
        read = (chain[0].inputs[0], *angles, *learned, *([parts.scale] if parts.gain else []))
        others = [member.name for member in chain if member is not parts.rope]
        replaced = (parts.rope.name, *others) if others else ()
        assert isinstance(parts.rope.op, Rope)
        op = NormRope(eps, parts.gain is not None, parts.rope.op.neighbors, weight)
        return Rewrite((node(parts.rope.name, op, [(ref, graph.types[ref]) for ref in read], replaced),))


def _parts(graph: Graph, members: Sequence[Node]) -> Parts | str:
    """Returns the members by role, or the reason to reject the members."""
    by_name = {member.name: member for member in members}
    ropes = [member for member in members if isinstance(member.op, Rope)]
    if len(ropes) != 1:
        return f"needs one rope, not {len(ropes)}"
    (rope,) = ropes
    norm = by_name.get(node_of(rope.inputs[0]))
    last = rope
    after = next((member for member in members if rope.name in member.inputs), None)
    if norm is None and after is not None and isinstance(after.op, RmsNorm):
        if len(after.inputs) > 1:
            return f"takes a norm with a weight only before the rope; {after.name} is after the rope"
        if isinstance(rope.op, Rope) and rope.op.scales:
            return f"takes a norm only before a rope that changes lengths; the angles of {rope.name} have a magnitude"
        last = norm = after
    gain = next((member for member in members if last.name in member.inputs and member is not rope), None)
    weight = by_name.get(node_of(norm.inputs[1])) if norm is not None and len(norm.inputs) > 1 else None
    if left := [member.name for member in members if member not in (norm, rope, gain, weight)]:
        return f"takes only a norm, a rope and a gain; {left[-1]} is a member too"
    if norm is not None and not isinstance(norm.op, RmsNorm):
        return f"takes only an rms_norm before the rope; {norm.name} is a {norm.op.name}"
    if weight is not None and not _of_parameter(weight):
        return f"takes a weight that is a function of one parameter; {weight.name} is not such a function"
    if gain is None:
        return Parts(norm, rope, None, weight=weight)
    scale = _factor(last, gain)
    if not scale:
        return f"takes only a product after the rope; {gain.name} is not a product"
    heads = rope.type.shape[-2]
    if graph.types[scale].shape != (heads, 1):
        return f"takes a gain of shape ({heads}, 1), one number per head; {scale} is {graph.types[scale]}"
    return Parts(norm, rope, gain, scale, weight)


def _of_parameter(weight: Node) -> bool:
    op = weight.op
    return isinstance(op, Pointwise) and len(op.variables) == len(op.outputs) == 1 and not op.dtype


def _factor(value: Node, gain: Node) -> str:
    if not isinstance(gain.op, Pointwise) or len(gain.op.outputs) > 1 or gain.types != value.types:
        return ""
    operands: dict[Expr, str] = {Var(name): ref for name, ref in zip(gain.op.variables, gain.inputs, strict=True)}
    product = reread(gain.op.outputs[0])
    factors = {product.a, product.b} if isinstance(product, Binary) and product.op == "*" else set()
    others = [ref for ref in operands.values() if ref != value.name]
    return others[0] if factors == set(operands) and len(others) == 1 else ""


NORM_ROPE = NormRopeFusion(
    "norm_rope",
    frozenset({Rope.name}),
    {Rope: frozenset({"neighbors", "scales"}), RmsNorm: frozenset({"eps", "affine"}), Pointwise: POINTWISE},
)
