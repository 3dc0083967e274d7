"""What a fusion is asked: whether it takes the members of a fusion point, and what becomes of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from specc.compiler.ir.graph import Graph, Node, Op, TensorType


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The members as a fusion leaves them, in order; the last gives what the last member gave. They read from outside
    what the members read. Without `learns` nobody takes a gradient of them, and the group has no backward."""

    nodes: tuple[Node, ...]
    learns: bool = True


@dataclass(frozen=True, slots=True)
class Fusion:
    """A rewrite that is more than a pointwise tail. Subclasses answer; one module-level value of each is what the
    catalogue finds. It is asked only where a member has one of `ops`, by name; where such a member is left over, its
    reason is told.

    Members follow each other as in `graph`; all but the last are read by members only. Those that an earlier fusion
    has rewritten are in `members` alone. Every op that comes out is linear, pointwise, or states its derivative.
    """

    name: str
    ops: frozenset[str]

    def refuses(self, graph: Graph, members: Sequence[Node]) -> str | None:
        """Why it does not apply, in words that follow its name; None where it does."""
        raise TypeError(f"{type(self).__name__} does not say what it takes")

    def rewrite(self, graph: Graph, members: Sequence[Node]) -> Rewrite:
        """The members rewritten. Only asked where `refuses` gave None. ExprError where an expression is too long."""
        raise TypeError(f"{type(self).__name__} does not say what it makes")


def node(name: str, op: Op, inputs: Sequence[tuple[str, TensorType]], members: Sequence[str] = ()) -> Node:
    """A node with the types that its op's rule gives; `members` are those that it replaces."""
    return Node(name, op, tuple(ref for ref, _ in inputs), op.infer([type for _, type in inputs]), None, tuple(members))
