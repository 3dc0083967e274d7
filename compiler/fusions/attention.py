"""Fuses attention into ops with a choice of kernels: a forward that saves its log-sum-exp, and a gradient that reads
it."""

from collections.abc import Sequence
from dataclasses import dataclass

from specc.compiler.fusions.fusion import Fusion, Rewrite, node
from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ops.attention import CausalAttention, Sdpa, SdpaSeen, SeenAttention


@dataclass(frozen=True, slots=True)
class AttentionFusion(Fusion):
    """Accepts a single attention node over whole sequences, without a window.

    The node is either causal (`Sdpa`) or reads the keys that its mask `seen` marks, of the same or of another sequence
    (`SdpaSeen`). Outside a group, Torch chooses the attention kernel. In a group, the plan chooses the kernels of the
    forward and of the gradient independently.
    """

    def refuses(self, graph: Graph, members: Sequence[Node]) -> str | None:
        attention = next(member for member in members if isinstance(member.op, Sdpa | SdpaSeen))
        if others := [member.name for member in members if member is not attention]:
            return f"takes attention alone; {others[0]} is a member too"
        if isinstance(attention.op, SdpaSeen):
            return None
        assert isinstance(attention.op, Sdpa)
        if attention.op.window is not None:
            return f"takes attention without a window; {attention.name} has one of {attention.op.window} tokens"
        if attention.op.documents:
            kernels = "the kernels of cuDNN and flash attention here take no mask of documents"
            return f"takes attention to all earlier tokens; {attention.name} ends at its document, and {kernels}"
        return None

    def rewrite(self, graph: Graph, members: Sequence[Node]) -> Rewrite:
        (attention,) = members
        read = [(ref, graph.types[ref]) for ref in attention.inputs]
        op = SeenAttention() if isinstance(attention.op, SdpaSeen) else CausalAttention()
        return Rewrite((node(attention.name, op, read),))


ATTENTION = AttentionFusion(
    "attention",
    frozenset({Sdpa.name, SdpaSeen.name}),
    {Sdpa: frozenset({"window", "documents"}), SdpaSeen: frozenset()},
)
