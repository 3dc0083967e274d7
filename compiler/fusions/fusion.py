"""The interface of a fusion. A fusion accepts or refuses the members of a fusion point, and creates the nodes that
replace the members."""

from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import NamedTuple

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType
from specc.compiler.records import record

POINTWISE = frozenset(
    {"outputs", "variables", "labels", "dtype", "title"}
)  # the fields of Pointwise that rewrites preserve


class Rewrite(NamedTuple):
    """The nodes that replace the members of a fusion point, in topological order.

    The last node computes the value of the last member. A node reads only results of other nodes of the rewrite, and
    inputs of the group. If `learns` is false, the group has no backward pass, and its inputs have no gradient.
    """

    nodes: tuple[Node, ...]
    learns: bool = True


@record
class Fusion:
    """A rewrite that is more than a pointwise epilogue. Each subclass has one instance at module level, which the
    catalogue finds.

    `ops` are names of ops. The compiler tries a fusion only if a member has one of these ops. If the fusion refuses the
    members, the error states the reason.

    `reads` maps each op type that the rewrite replaces to the fields that the rewrite preserves or checks. The fusion
    refuses a member if any other field has a value other than the default. A fusion therefore never drops a setting
    that is not in `reads`, such as a field of a subclass or a field that was added later.

    In the methods, `members` are in the order of the nodes of `graph`. Nodes outside of `members` read only the output
    of the last member. A node that an earlier fusion has created is in `members`, but not in `graph`. Every op of the
    result must be linear or pointwise, or have a derivative rule.
    """

    name: str
    ops: frozenset[str]
    reads: Mapping[type[Op], frozenset[str]] = field(default_factory=dict)

    def refusal(self, graph: Graph, members: Sequence[Node]) -> str | None:
        """Returns the reason why the fusion does not apply, or None. The reason completes a sentence that begins with
        the name of the fusion."""
        return next(filter(None, map(self._unknown_field, members)), None) or self.refuses(graph, members)

    def refuses(self, graph: Graph, members: Sequence[Node]) -> str | None:
        """Returns the reason why the fusion does not apply, or None. `refusal` calls this method if all fields outside
        of `reads` have their defaults. Subclasses must override this method."""
        raise TypeError(f"{type(self).__name__} must override `refuses`")

    def rewrite(self, graph: Graph, members: Sequence[Node]) -> Rewrite:
        """Returns the nodes that replace the members. The caller must first check that `refusal` returns None.
        Subclasses must override this method.

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
        inputs: The reference and the type of each input, in order.
        members: The names of the nodes that the new node replaces.

    Returns:
        The node, with the output types that the op infers.
    """
    return Node(name, op, tuple(ref for ref, _ in inputs), op.infer([type for _, type in inputs]), None, tuple(members))
