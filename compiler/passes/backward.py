"""Composes the backward pass of a fused group from the derivative rules of the group's nodes, which are called members.
The result is a graph that reads the values saved by the forward pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specc.compiler.expr import (
    KEEPS,
    Expr,
    Keep,
    Var,
    derive,
    key,
    name_of,
    plan_backward,
    reread,
    simplify,
    substitute,
    variables,
)
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.ir.op import Op, Scaled, Tape
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.fp8_codes import Fp8Product
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import Pointwise, SumTo
from specc.compiler.records import record

SCALED = Pointwise(("d * grad",), ("grad", "d"))  # a gradient times the pending factor


def accumulates(op: Op) -> bool:
    """Returns whether the op is a linear layer. The kernel of a linear layer can also compute the pointwise operation
    that follows."""
    return isinstance(op, Linear) or (isinstance(op, Fp8Product) and op.role == "y")


class NoDerivative(Exception):
    """Raised if the op of a node has no derivative rule for its settings."""

    def __init__(self, node: Node) -> None:
        super().__init__(f"{node.name} has no derivative")
        self.node = node


def accumulators(node: Node, linear: set[str]) -> tuple[str, ...]:
    """Returns the variables of a pointwise node in a group that stand for outputs of the group's linear layers.
    `linear` contains the names of these layers. The output of such a layer is stored only if the backward pass reads
    the output."""
    assert isinstance(node.op, Pointwise)
    return tuple(v for v, ref in zip(node.op.variables, node.inputs, strict=True) if ref in linear)


def same_gradient(expression: Expr, operand: str, products: tuple[str, ...]) -> str | None:
    """Returns a product with respect to which `expression` has the same derivative as with respect to `operand`, such
    as the product to which a bias is added. Returns None if there is no such product."""
    slope = key(derive(expression, operand))
    return next((product for product in products if key(derive(expression, product)) == slope), None)


def titled(op: Pointwise, products: tuple[str, ...], keep: Keep) -> str:
    """Returns the part of a kernel name that describes a pointwise node, such as `gelu`. The result is `gelu_pre` if
    the forward pass saves the input of the activation instead of the derivative."""
    expression = reread(op.outputs[0])
    name = op.title or name_of(expression)
    return f"{name}_pre" if plan_backward(expression, products, keep).strategy == "recomputed" else name


def spelled(forward: Graph, ref: str) -> str:
    """Returns the name of the forward value `ref` in the backward graph. An input keeps its name. Other values have a
    short name, such as `act` or `slope`, which differs from the names of all inputs and of other values."""
    node = forward.by_name.get(node_of(ref))
    if node is None:
        return ref
    words = node.name.split(".")
    if ref == node.name:
        alike = [n for n in forward.nodes if n.name.rpartition(".")[2] == words[-1]]
        options = [words[-1]] * (len(alike) == 1) + ["_".join(words[-2:])]
    else:
        label = node.op.output_labels[int(ref.partition(":")[2])]
        alike = [n for n in forward.nodes if label in n.op.output_labels]
        options = [label] * (len(alike) == 1) + [f"{words[-1]}_{label}"]
    taken = {name for name, _ in forward.inputs}
    if ref == node.name:
        taken |= {label for other in forward.nodes for label in other.op.output_labels[1:]}
    options += [f"{options[-1]}_value", "_".join((*words, "value"))]
    return next(name for name in options if name not in taken)


def gradient_names(forward: Graph) -> tuple[str, ...]:
    """Returns the names of the gradients of the results, which are inputs of the backward graph. The name is `d` for a
    single result, otherwise `d_LABEL` for each result."""
    if len(forward.outputs) == 1:
        return ("d",)
    taken = {f"d_{name}" for name, _ in forward.inputs}
    names = (f"d_{label}" for label, _ in forward.outputs)
    return tuple(f"{name}_result" if name in taken else name for name in names)


@dataclass
class Derivation:
    """The backward graph under construction. A forward value becomes an input of this graph when a rule first reads the
    value.

    Attributes:
        members: The nodes of the group by name, before outputs for saved values were added to the nodes.
        forward: The forward graph. Saved values are among its outputs.
        keep: The save choice, which determines the values that the forward pass saves.
    """

    members: Mapping[str, Node]
    forward: Graph
    keep: Keep = KEEPS[0]
    b: Builder = field(default_factory=lambda: Builder(""))

    def run(self, name: str) -> Graph:
        """Returns the backward graph, named `name`. The inputs are the gradients of the results, named by
        `gradient_names`, and the saved values. The outputs are the gradients of the group's inputs, in order. Inputs
        without a gradient have no output."""
        b = self.b
        b.name = name
        gradients: dict[str, list[Scaled]] = {}
        for given, (_, ref) in zip(gradient_names(self.forward), self.forward.outputs, strict=True):
            gradients.setdefault(ref, []).append(Scaled(b.input(given, self.forward.types[ref]), ""))
        for node in reversed(self.forward.nodes):
            reached = {i: self.total(ref, gradients.pop(ref)) for i, ref in enumerate(node.outputs) if ref in gradients}
            numbers = {grad.by for grad in reached.values()}
            by = numbers.pop() if len(numbers) == 1 else ""
            grads = {i: grad.value if by else self.multiplied(node.outputs[i], grad) for i, grad in reached.items()}
            rule = self.pointwise if isinstance(node.op, Pointwise) else self.by_rule
            for ref, value in rule(node, grads):
                gradients.setdefault(ref, []).append(self.scaled(node, value, by))
        wanted = [ref for ref, _ in self.forward.inputs if ref in gradients]
        return b.build({f"d_{ref}": self.multiplied(ref, self.total(ref, gradients[ref])) for ref in wanted})

    def saved(self, ref: str) -> str:
        """Returns the name of the forward value `ref` in the backward graph. The first call for a value makes the value
        an input of the backward graph. A view is not saved. The backward graph computes the view again from the viewed
        value."""
        node = self.forward.by_name.get(node_of(ref))
        if node is not None and node.op.views:
            if node.name not in self.b.types:
                self.b.add(node.name, node.op, [self.saved(source) for source in node.inputs])
            return ref
        name = spelled(self.forward, ref)
        return name if name in self.b.types else self.b.input(name, self.forward.types[ref])

    def total(self, name: str, gradients: Sequence[Scaled]) -> Scaled:
        if len({grad.by for grad in gradients}) > 1:
            gradients = [Scaled(self.multiplied(f"{name}.part{i}", grad), "") for i, grad in enumerate(gradients)]
        total = gradients[0].value
        for i, other in enumerate(gradients[1:], 1):
            total = self.b.add(f"{name}.grad_total{i}", Pointwise(("a + b",), ("a", "b")), (total, other.value))
        return Scaled(total, gradients[0].by)

    def multiplied(self, name: str, grad: Scaled) -> str:
        """Returns the gradient times its pending factor, if there is one. A pending factor is a scalar that has not
        been multiplied into the gradient yet."""
        if not grad.by:
            return grad.value
        return self.b.add(f"{name}.scaled", SCALED, (grad.value, grad.by))

    def scaled(self, node: Node, value: str | Scaled, by: str) -> Scaled:
        """Returns the gradient `value` with the pending factor `by`. The derivative rule of the node computed `value`
        without this factor."""
        if isinstance(value, str):
            return Scaled(value, by)
        if not by:
            return value
        return Scaled(value.value, self.b.add(f"{node.name}.scale", Pointwise(("a * b",), ("a", "b")), (by, value.by)))

    def by_rule(self, node: Node, grads: Mapping[int, str]) -> list[tuple[str, str | Scaled]]:
        values = node.op.derivative(NodeTape(self, node, grads))
        if values is None:
            raise NoDerivative(node)
        return [(ref, value) for ref, value in zip(node.inputs, values, strict=True) if value is not None]

    def pointwise(self, node: Node, grads: Mapping[int, str]) -> list[tuple[str, str | Scaled]]:
        """Returns the gradients of the inputs of a pointwise node. If an input is a product of the group,
        `plan_backward` determines the gradient. The gradient of any other input is the symbolic derivative of the
        node's expression."""
        original = self.members[node.name].op
        assert isinstance(node.op, Pointwise) and isinstance(original, Pointwise)
        expression = reread(original.outputs[0])
        operands = dict(zip(node.op.variables, node.inputs, strict=True))
        linear = {n.name for n in self.forward.nodes if accumulates(n.op)}
        products = accumulators(node, linear)
        readable = {"y": node.name, **operands}
        readable |= dict(zip(node.op.labels[1:], node.outputs[1:], strict=True))
        readable |= {v: readable[f"pre_{v}"] for v in products if f"pre_{v}" in readable}
        title, texts = original.title, []
        if products:
            plan = plan_backward(expression, products, self.keep)
            saved = {v: Var(f"pre_{v}") for v in products}
            texts.append({v: str(substitute(grad, saved)) for v, grad in plan.grads})
            title = titled(original, products, self.keep) if plan.strategy == "recomputed" else title
        shared = {v: p for v in operands if v not in products and (p := same_gradient(expression, v, products))}
        rest = (v for v in operands if v not in products and v not in shared)
        texts += [{v: str(simplify(reread(f"d * ({derive(expression, v)})")))} for v in rest]
        gradients: list[tuple[str, str | Scaled]] = []
        for group in texts:
            suffix = "grad" if set(group) & set(products) else f"grad_{next(iter(group))}"
            name = f"{title}_{suffix}" if title else ""
            gradients += self.gradient_node(f"{node.name}.{suffix}", name, group, operands, readable, grads[0])
        values = dict(gradients)
        for v, product in shared.items():
            of_product, name = values[operands[product]], f"{node.name}.grad_{v}"
            gradients += self.gradient_node(name, "", {v: "d"}, operands, {}, str(of_product))
        return gradients

    def gradient_node(
        self,
        name: str,
        title: str,
        texts: Mapping[str, str],
        operands: Mapping[str, str],
        readable: Mapping[str, str],
        grad: str,
    ) -> list[tuple[str, str]]:
        """Adds one node that computes the gradients `texts`. The gradient of a broadcast operand is summed over the
        broadcast dims.

        Args:
            name: The name of the node.
            title: The title of the node's pointwise op.
            texts: For each variable, the expression of the variable's gradient.
            operands: For each variable, the reference of the forward value that the variable represents.
            readable: For each variable that an expression may read, the reference of the forward value.
            grad: The incoming gradient.

        Returns:
            Pairs (reference of a forward value, name of its gradient).
        """
        read = tuple(dict.fromkeys(v for text in texts.values() for v in variables(reread(text)) if v != "d"))
        inputs = (grad, *(self.saved(readable[v]) for v in read))
        wanted = [self.forward.types[operands[v]] for v in texts]
        cast = wanted[0].dtype if self.b.types[grad].dtype != wanted[0].dtype else ""
        if tuple(texts.values()) == ("d",) and not cast:
            values: tuple[str, ...] = (grad,)
        else:
            op = Pointwise(tuple(texts.values()), ("d", *read), tuple(texts) if len(texts) > 1 else (), cast, title)
            self.b.add(name, op, inputs)
            values = self.b.nodes[-1].outputs
        results = []
        for ref, type, v in zip(values, wanted, texts, strict=True):
            whole = self.b.types[ref].shape == type.shape
            results.append((operands[v], ref if whole else self.b.add(f"{name}.sum", SumTo(type.shape), (ref,))))
        return results


@record
class NodeTape(Tape):
    """The tape for the derivative rule of one node. `grads` maps the index of an output to its gradient. Outputs
    without a gradient are absent."""

    derivation: Derivation
    node: Node
    grads: Mapping[int, str]

    def type(self, index: int) -> TensorType:
        return self.derivation.forward.types[self.node.inputs[index]]

    def input(self, index: int) -> str:
        return self.derivation.saved(self.node.inputs[index])

    def output(self, index: int) -> str:
        return self.derivation.saved(self.node.outputs[index])

    def grad(self, index: int = 0) -> str:
        return self.grads[index]

    def add(self, suffix: str, op: Op, inputs: Sequence[str]) -> str:
        return self.derivation.b.add(f"{self.node.name}.{suffix}", op, inputs)
