"""The interface of a fusion: whether it takes the members of a fusion point, and what it rewrites them to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from specc.compiler.ir.graph import Graph, Node, Op, TensorType

POINTWISE = frozenset({"outputs", "variables", "labels", "dtype", "title"})  # of Pointwise, what rewrites take over


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The members as a fusion leaves them, in order.

    The last node gives what the last member gave. The nodes read from outside what the members read. Without `learns`
    nothing takes a gradient of them, and the group has no backward.
    """

    nodes: tuple[Node, ...]
    learns: bool = True


@dataclass(frozen=True, slots=True)
class Fusion:
    """A rewrite that is more than a pointwise epilogue.

    One module-level value of each subclass is what the catalogue finds. A fusion is asked only where a member has one
    of `ops`, by name; where such a member is left over, its reason is reported.

    `reads` names, for each op that the rewrite replaces, the fields of it that the rewrite takes over or checks. A
    member with another field, as of a subclass or one that was added to the op later, is refused unless the field has
    its default: no fusion drops what it does not know.

    Members follow each other as in `graph`; all but the last are read by members only. Those that an earlier fusion
    has rewritten are in `members` alone. Every op that comes out is linear, pointwise, or states its derivative.
    """

    name: str
    ops: frozenset[str]
    reads: Mapping[type[Op], frozenset[str]] = field(default_factory=dict)

    def refusal(self, graph: Graph, members: Sequence[Node]) -> str | None:
        """Why the fusion does not apply, in words that follow its name; None where it does."""
        return next(filter(None, map(self._unknown_field, members)), None) or self.refuses(graph, members)

    def refuses(self, graph: Graph, members: Sequence[Node]) -> str | None:
        """As `refusal`, for members of which all fields are known. Subclasses state it."""
        raise TypeError(f"{type(self).__name__} does not say what it takes")

    def rewrite(self, graph: Graph, members: Sequence[Node]) -> Rewrite:
        """The members rewritten. Only called where `refusal` gave None.

        Raises:
            ExprError: An expression is too long.
        """
        raise TypeError(f"{type(self).__name__} does not say what it makes")

    def _unknown_field(self, member: Node) -> str | None:
        op = member.op
        known = next((self.reads[cls] for cls in type(op).__mro__ if cls in self.reads), None)
        if known is None:
            return None
        for f in fields(op):
            value = getattr(op, f.name)
            if f.name not in known and value != f.default:
                return f"does not know the {f.name} of {op.name}; {member.name} has {value!r}"
        return None


def node(name: str, op: Op, inputs: Sequence[tuple[str, TensorType]], members: Sequence[str] = ()) -> Node:
    """A node with the types that its op's rule gives; `members` are those that it replaces."""
    return Node(name, op, tuple(ref for ref, _ in inputs), op.infer([type for _, type in inputs]), None, tuple(members))
