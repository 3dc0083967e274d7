"""Fuses the rotary embedding of attention heads with the norm before it and the gain after it, so that the heads are
read once."""

from collections.abc import Sequence
from dataclasses import dataclass

from specc.compiler.expr import Binary, Expr, Var, reread
from specc.compiler.fusions.fusion import POINTWISE, Fusion, Rewrite, node
from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.ops.norm import RmsNorm
from specc.compiler.ops.norm_rope import NormRope
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.positions import Rope


@dataclass(frozen=True, slots=True)
class Parts:
    """The members to fuse. `scale` is the ref of the gain's value, or empty if there is no gain."""

    norm: Node | None
    rope: Node
    gain: Node | None
    scale: str = ""


@dataclass(frozen=True, slots=True)
class NormRopeFusion(Fusion):
    """Accepts a rope, an optional RMSNorm without a weight that it reads, and an optional product of its output with
    one gain per head. The group may have no other members."""

    def refuses(self, graph: Graph, members: Sequence[Node]) -> str | None:
        parts = _parts(graph, members)
        return parts if isinstance(parts, str) else None

    def rewrite(self, graph: Graph, members: Sequence[Node]) -> Rewrite:
        parts = _parts(graph, members)
        assert isinstance(parts, Parts)
        chain = [member for member in (parts.norm, parts.rope, parts.gain) if member is not None]
        eps = parts.norm.op.eps if parts.norm is not None and isinstance(parts.norm.op, RmsNorm) else None
        angles = parts.rope.inputs[1:]
        read = (chain[0].inputs[0], *angles, *([parts.scale] if parts.gain else []))
        others = [member.name for member in chain if member is not parts.rope]
        replaced = (parts.rope.name, *others) if others else ()
        assert isinstance(parts.rope.op, Rope)
        op = NormRope(eps, parts.gain is not None, parts.rope.op.neighbors)
        return Rewrite((node(parts.rope.name, op, [(ref, graph.types[ref]) for ref in read], replaced),))


def _parts(graph: Graph, members: Sequence[Node]) -> Parts | str:
    """Returns the members by role, or the reason why the fusion does not accept them."""
    by_name = {member.name: member for member in members}
    ropes = [member for member in members if isinstance(member.op, Rope)]
    if len(ropes) != 1:
        return f"takes one rope, not {len(ropes)}"
    (rope,) = ropes
    norm = by_name.get(node_of(rope.inputs[0]))
    gain = next((member for member in members if rope.name in member.inputs), None)
    if left := [member.name for member in members if member not in (norm, rope, gain)]:
        return f"takes a norm, a rope and a gain alone; {left[-1]} is a member too"
    if norm is not None and not isinstance(norm.op, RmsNorm):
        return f"takes only an rms_norm before the rope; {norm.name} is a {norm.op.name}"
    if norm is not None and len(norm.inputs) > 1:
        return f"takes a norm without a weight; {norm.name} reads {norm.inputs[1]}"
    if gain is None:
        return Parts(norm, rope, None)
    scale = _factor(rope, gain)
    if not scale:
        return f"takes only a product after the rope; {gain.name} is not one"
    heads = rope.type.shape[-2]
    if graph.types[scale].shape != (heads, 1):
        return f"takes a gain of shape ({heads}, 1), one number per head; {scale} is {graph.types[scale]}"
    return Parts(norm, rope, gain, scale)


def _factor(rope: Node, gain: Node) -> str:
    """Returns the ref that a node multiplies the rope's output with, or "" if the node computes anything else."""
    if not isinstance(gain.op, Pointwise) or len(gain.op.outputs) > 1 or gain.types != rope.types:
        return ""
    given: dict[Expr, str] = {Var(name): ref for name, ref in zip(gain.op.variables, gain.inputs, strict=True)}
    product = reread(gain.op.outputs[0])
    factors = {product.a, product.b} if isinstance(product, Binary) and product.op == "*" else set()
    others = [ref for ref in given.values() if ref != rope.name]
    return others[0] if factors == set(given) and len(others) == 1 else ""


NORM_ROPE = NormRopeFusion(
    "norm_rope",
    frozenset({Rope.name}),
    {Rope: frozenset({"neighbors"}), RmsNorm: frozenset({"eps", "affine"}), Pointwise: POINTWISE},
)
