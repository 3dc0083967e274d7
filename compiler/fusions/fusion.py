"""The interface of a fusion: whether the fusion accepts the members of a fusion point, and the nodes that replace
them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType

POINTWISE = frozenset(
    {"outputs", "variables", "labels", "dtype", "title"}
)  # the fields of Pointwise that rewrites preserve


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The nodes that replace the members of a fusion point, in topological order.

    The last node computes the value of the last member. The nodes read only each other and the inputs of the group. If
    `learns` is false, the group has no backward, and its inputs have no gradient.
    """

    nodes: tuple[Node, ...]
    learns: bool = True


@dataclass(frozen=True, slots=True)
class Fusion:
    """A rewrite that is more than a pointwise epilogue.

    The catalogue discovers one module-level instance of each subclass. `ops` are names of ops. A fusion is tried only
    if the op of some member has one of these names. If such a member cannot be fused, the error states why the fusion
    refused the member.

    `reads` maps each op type that the rewrite replaces to the fields that the rewrite preserves or checks. The fusion
    refuses a member if any other field differs from its default. A fusion therefore never drops a setting that it does
    not know, such as a field of a subclass or a field that was added later.

    Members are in the order of `graph`. Only members of the group read the output of a member other than the last one.
    A node that an earlier fusion has created is in `members`, but not in `graph`. Every op of the result must be linear
    or pointwise, or have a derivative rule.
    """

    name: str
    ops: frozenset[str]
    reads: Mapping[type[Op], frozenset[str]] = field(default_factory=dict)

    def refusal(self, graph: Graph, members: Sequence[Node]) -> str | None:
        """Returns the reason why the fusion does not apply, or None if it applies. The reason completes a sentence that
        begins with the name of the fusion."""
        return next(filter(None, map(self._unknown_field, members)), None) or self.refuses(graph, members)

    def refuses(self, graph: Graph, members: Sequence[Node]) -> str | None:
        """Returns the reason why the fusion does not apply, or None. `refusal` calls this method only if all members
        have defaults in the fields that `reads` does not list. Subclasses must override it."""
        raise TypeError(f"{type(self).__name__} must override `refuses`")

    def rewrite(self, graph: Graph, members: Sequence[Node]) -> Rewrite:
        """Returns the rewritten members. Called only if `refusal` returned None. Subclasses must override it.

        Raises:
            ExprError: If an expression is too long.
        """
        raise TypeError(f"{type(self).__name__} must override `rewrite`")

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
    """Creates a node without an epilogue.

    Args:
        name: The name of the node.
        op: The op of the node.
        inputs: Ref and type of each input, in order.
        members: The names of the nodes that the new node replaces.

    Returns:
        The node, with the output types that the op infers.
    """
    return Node(name, op, tuple(ref for ref, _ in inputs), op.infer([type for _, type in inputs]), None, tuple(members))
