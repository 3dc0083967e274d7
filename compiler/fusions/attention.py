"""Causal attention as a choice of kernels: a forward that keeps its log-sum-exp, and a gradient that reads it."""

from collections.abc import Sequence
from dataclasses import dataclass

from specc.compiler.fusions.fusion import Fusion, Rewrite, node
from specc.compiler.ir import Graph, Node
from specc.compiler.ops.attention import CausalAttention, Sdpa


@dataclass(frozen=True, slots=True)
class AttentionFusion(Fusion):
    """Takes attention over whole sequences, alone and without a window. Outside a group it is the library's own choice;
    in one, the plan chooses a kernel for the forward and one for the gradient, each for itself."""

    def refuses(self, graph: Graph, members: Sequence[Node]) -> str | None:
        attention = next(member for member in members if isinstance(member.op, Sdpa))
        if others := [member.name for member in members if member is not attention]:
            return f"takes attention alone; {others[0]} is a member too"
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
        return Rewrite((node(attention.name, CausalAttention(), read),))


ATTENTION = AttentionFusion("attention", frozenset({Sdpa.name}))
