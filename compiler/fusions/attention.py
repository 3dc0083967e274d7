"""Replaces attention by two ops, one for the forward pass and one for the gradient. The forward op saves the
log-sum-exp, which the gradient op reads. The plan chooses a kernel for each op."""

from collections.abc import Sequence

from specc.compiler.fusions.fusion import Fusion, Rewrite, node
from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ir.op import Op
from specc.compiler.ops.attention import Sdpa, SdpaSeen
from specc.compiler.ops.saved_attention import CausalAttention, ScoredAttention, SeenAttention


class AttentionFusion(Fusion):
    """Accepts a single attention node over whole sequences.

    The node is an `Sdpa` or an `SdpaSeen`. `Sdpa` is causal attention with any score and mask. `SdpaSeen` is attention
    to the keys in the mask `seen`. The keys of `SdpaSeen` may come from another sequence. Outside of a group, Torch
    chooses the attention kernel. In a group, the plan chooses separate kernels for the forward pass and the gradient.
    """

    def refuses(self, graph: Graph, members: Sequence[Node]) -> str | None:
        attention = next(member for member in members if isinstance(member.op, Sdpa | SdpaSeen))
        others = [member.name for member in members if member is not attention]
        return f"takes a single attention node; {others[0]} is a member too" if others else None

    def rewrite(self, graph: Graph, members: Sequence[Node]) -> Rewrite:
        (attention,) = members
        read = [(ref, graph.types[ref]) for ref in attention.inputs]
        return Rewrite((node(attention.name, _saved(attention.op), read),))


def _saved(op: Op) -> Op:
    if isinstance(op, SdpaSeen):
        return SeenAttention()
    assert isinstance(op, Sdpa)
    return CausalAttention() if op.causal else ScoredAttention(op.score, op.mask, op.scale, op.tables, op.sinks)


ATTENTION = AttentionFusion(
    "attention",
    frozenset({Sdpa.name, SdpaSeen.name}),
    {Sdpa: frozenset({"score", "mask", "scale", "tables", "sinks"}), SdpaSeen: frozenset()},
)
