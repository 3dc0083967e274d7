"""Fuses logits, an optional softcap, and cross-entropy. Loss and gradient are computed together, so that the logits
are read once."""

from collections.abc import Sequence
from typing import NamedTuple

from specc.compiler.expr import Var, derive, number, reread, substitute, variables
from specc.compiler.fusions.fusion import POINTWISE, Fusion, Rewrite, node
from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.ops.fp8_codes import Fp8Product
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.loss import CrossEntropy, SoftmaxLoss
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.shape import PadRows

# In columns: 16 bytes of bf16, one vector load. If row lengths are not multiples of VECTOR, cuBLAS is six times slower.
VECTOR = 8
LINE = 64  # columns: 128 bytes of bf16, one cache line. Rows start at a line, and no GEMM tile is narrower than a line


class Parts(NamedTuple):
    """The members of a fusion point that are fused.

    Attributes:
        product: the matrix product that computes the logits.
        codes: the node that rounds the weight of the product to 8 bits. None if the product reads the weight itself.
        bound: the pointwise node between the logits and the loss, such as a softcap. None if the loss reads the logits.
        loss: the cross-entropy.
    """

    product: Node
    codes: Node | None
    bound: Node | None
    loss: Node

    @property
    def vocab(self) -> int:
        assert isinstance(self.product.type.width, int)
        return self.product.type.width

    @property
    def f(self) -> str:
        """The function that is applied to a logit `z` before the softmax, as text."""
        if self.bound is None:
            return "z"
        assert isinstance(self.bound.op, Pointwise)
        (variable,) = self.bound.op.variables
        return str(substitute(reread(self.bound.op.outputs[0]), {variable: Var("z")}))


class SoftmaxLossFusion(Fusion):
    """Accepts a linear layer, at most one pointwise node, and the cross-entropy of the result. The layer may multiply
    8-bit floats.

    If the vocabulary size is not a multiple of 8, the weight is padded with rows of zeros. Every row of logits is then
    aligned in memory. A mean loss is computed together with its gradient. A loss per token only scores a model, so such
    a loss has no gradient.
    """

    def refuses(self, graph: Graph, members: Sequence[Node]) -> str | None:
        parts = _parts(members)
        if isinstance(parts, str):
            return parts
        if parts.loss is not members[-1]:
            return f"takes {parts.loss.name} as the last member, not {members[-1].name}"
        slope = derive(reread(parts.f), "z")
        if not variables(slope) and number(slope) == 0:
            return f"cannot train: {parts.f} has gradient 0 everywhere"
        return None

    def rewrite(self, graph: Graph, members: Sequence[Node]) -> Rewrite:
        parts = _parts(members)
        assert isinstance(parts, Parts) and isinstance(parts.loss.op, CrossEntropy)
        learns = parts.loss.op.reduction == "mean"
        scope, dot, _ = parts.product.name.rpartition(".")
        padded = _padded(parts, graph, members, f"{scope}{dot}padded")
        logits = padded[-1]
        names = [parts.loss.name, *([parts.bound.name] if parts.bound else [])]
        if not learns:  # a distinct name, since the plan lists both losses
            names = [f"{scope}{dot}nats", *names[1:], parts.loss.name]
        inputs = [(logits.name, logits.type), *((ref, graph.types[ref]) for ref in parts.loss.inputs[1:])]
        loss, bound = parts.loss.op, parts.bound.op if parts.bound is not None else None
        title = bound.title if isinstance(bound, Pointwise) else ""
        op = SoftmaxLoss(parts.vocab, loss.reduction, parts.f, loss.per_token, loss.weights, title, loss.further)
        scored = node(names[0], op, inputs, names if len(names) > 1 else ())
        changed: dict[Node | None, tuple[Node, ...]] = dict.fromkeys((parts.codes, parts.bound), ())
        changed |= {parts.product: padded, parts.loss: (scored,)}
        return Rewrite(tuple(new for old in members for new in changed.get(old, (old,))), learns)


def _padded(parts: Parts, graph: Graph, members: Sequence[Node], name: str) -> tuple[Node, ...]:
    """Returns the nodes that compute the logits. If the vocabulary size is not a multiple of 8, the first node, `name`,
    pads the weight with rows of zeros."""
    chain = (parts.product,) if parts.codes is None else (parts.codes, parts.product)
    if parts.vocab % VECTOR == 0:
        return chain
    weight = parts.product.inputs[1] if parts.codes is None else parts.codes.inputs[0]
    types = {**graph.types, **{member.name: member.type for member in members}}
    nodes = [node(name, PadRows(-(-parts.vocab // LINE) * LINE), [(weight, types[weight])])]
    for old in chain:
        types[nodes[-1].name] = nodes[-1].type
        refs = [name if ref == weight else ref for ref in old.inputs]
        nodes.append(node(old.name, old.op, [(ref, types[ref]) for ref in refs]))
    return tuple(nodes)


def _parts(members: Sequence[Node]) -> Parts | str:
    """Returns the members by role, or the reason to reject the members."""
    by_name = {member.name: member for member in members}
    losses = [member for member in members if isinstance(member.op, CrossEntropy)]
    if len(losses) != 1:
        return f"takes one cross_entropy, not {len(losses)}"
    loss = reader = losses[0]
    assert isinstance(loss.op, CrossEntropy)
    if loss.op.ignore is not None:
        return f"cannot ignore targets, but {loss.name} ignores targets of {loss.op.ignore}"
    if inside := [ref for ref in loss.inputs[1:] if ref in by_name]:
        return f"needs targets from outside of the group; {inside[0]} is a member"
    producer, bound = by_name.get(node_of(loss.inputs[0])), None
    if producer is not None and isinstance(producer.op, Pointwise):
        if len(producer.op.variables) != 1 or len(producer.op.outputs) != 1:
            return f"takes a function of the logits alone; {producer.name} reads {', '.join(producer.op.variables)}"
        reader = bound = producer
        producer = by_name.get(node_of(bound.inputs[0]))
    if producer is None:
        reason = "takes the linear layer that computes the logits"
        return f"{reason}; {reader.name} reads {reader.inputs[0]}, which is not a member"
    if producer.op != Linear() and not isinstance(producer.op, Fp8Product):
        return f"takes logits from a linear layer; {producer.name} is a {producer.op.name}"
    return Parts(producer, by_name[node_of(producer.inputs[1])] if producer.op != Linear() else None, bound, loss)


SOFTMAX_LOSS = SoftmaxLossFusion(
    "softmax_loss",
    frozenset({CrossEntropy.name}),
    {CrossEntropy: frozenset({"reduction", "ignore", "per_token", "weights", "further"}), Pointwise: POINTWISE},
)
