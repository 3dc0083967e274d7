"""Builds a fused group: the forward graph of some nodes, and a backward composed from their derivative rules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specc.compiler.expr import derive, name_of, number, plan_backward, reread, simplify, variables
from specc.compiler.ir import Builder, Graph, Node, Op, TensorType, node_of
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import Pointwise, SumTo
from specc.compiler.passes.tails import join_tails
from specc.compiler.programs import Group


class Unfusable(Exception):
    """A node that cannot be in a group, and why."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"{node} {reason}")
        self.node, self.reason = node, reason


def build_group(graph: Graph, scope: str, members: Sequence[Node]) -> Group:
    """The group of `members` (in graph order, only the last of them read from outside). Raises Unfusable, and
    ExprError where an expression has no name of its own or grows beyond what can be printed."""
    _check(graph, members)
    inside = {node.name for node in members}
    external = tuple(dict.fromkeys(ref for node in members for ref in node.inputs if node_of(ref) not in inside))
    names = _input_names(external)
    name = f"fused_{scope.rpartition('.')[2]}"
    forward = _forward(graph, f"{name}.forward", names, members)
    derivation = _Derivation(graph, forward, tuple(names.values()))
    backward = derivation.run(f"{name}.backward")
    saved = tuple(label for label, _ in backward.inputs if label != "d")
    return Group(
        name, scope, tuple(node.name for node in members), _returning(forward, saved), join_tails(backward), saved
    )


def _check(graph: Graph, members: Sequence[Node]) -> None:
    inside = {node.name for node in members}
    for node in members:
        if not isinstance(node.op, Linear | Pointwise):
            reason = f"is a {node.op.name}; only linear and pointwise nodes state the derivative that a group needs"
            raise Unfusable(node.name, reason)
        if numbers := [ref[1:] for ref in node.inputs if ref[0] == "$"]:
            raise Unfusable(node.name, f"reads {numbers[0]}, which differs from layer to layer and is no tensor")
    returned = dict(graph.outputs).values()
    for node in members[:-1]:
        readers = [reader.name for reader in graph.consumers[node.name] if reader.name not in inside]
        if readers or node.name in returned:
            reader = readers[0] if readers else "the caller"
            raise Unfusable(node.name, f"is also read by {reader}, so it has to be stored")
        if not graph.consumers[node.name]:
            raise Unfusable(node.name, "is read by no other node of the group")


def _input_names(refs: Sequence[str]) -> Mapping[str, str]:
    """Short names for what a group reads: parameters by their last word, activations `x`; longer ones where two
    meet."""
    names: dict[str, str] = {}
    for ref in refs:
        path = ref.lstrip("@$").replace(":", "_")
        word = path.rpartition(".")[2] if ref[0] in "@$" else "x"
        long = path.replace(".", "_")
        free = (name for name in (word, long, f"{long}_in", f"{long}_given") if name not in (*names.values(), "d"))
        names[ref] = next(free)
    return names


def _accumulators(node: Node, linear: set[str]) -> tuple[str, ...]:
    """The variables of a pointwise member that stand for products of the group, which are never stored."""
    assert isinstance(node.op, Pointwise)
    return tuple(v for v, ref in zip(node.op.variables, node.inputs, strict=True) if ref in linear)


def _forward(graph: Graph, name: str, names: Mapping[str, str], members: Sequence[Node]) -> Graph:
    """The members over short input names; each pointwise one also gives what its backward will read."""
    b = Builder(name)
    for ref, short in names.items():
        b.input(short, graph.types[ref])
    linear = {node.name for node in members if isinstance(node.op, Linear)}
    for node in members:
        inputs = tuple(names.get(ref, ref) for ref in node.inputs)
        op, types = node.op, [node.type]
        if isinstance(op, Pointwise) and (accumulators := _accumulators(node, linear)):
            op = _with_saves(op, accumulators)
            types += [replace(node.type, dtype=b.types[inputs[0]].dtype) for _ in op.labels[1:]]
        b.nodes.append(replace(node, op=op, inputs=inputs, types=tuple(types)))
        b.types |= zip(b.nodes[-1].outputs, types, strict=True)
    return b.build({"y": members[-1].name})


def _with_saves(op: Pointwise, accumulators: tuple[str, ...]) -> Pointwise:
    """`op` with the further outputs that its backward reads: what the plan saves, and products that are needed
    whole."""
    expression = reread(op.outputs[0])
    if flat := [v for v in accumulators if not variables(derive(expression, v)) and number(derive(expression, v)) == 0]:
        raise Unfusable("the activation", f"has gradient 0 in {flat[0]} everywhere, so {flat[0]} would never learn")
    plan = plan_backward(expression, accumulators)
    operands = [v for v in op.variables if v not in accumulators]
    read = {v for operand in operands for v in variables(derive(expression, operand))} | set(plan.needs)
    saves = [*plan.saves, *((f"pre_{v}", reread(v)) for v in accumulators if v in read)]
    outputs = (str(plan.value), *(str(saved) for _, saved in saves))
    labels = ("y", *(label for label, _ in saves)) if saves else ()
    return replace(op, outputs=outputs, labels=labels, title=op.title or name_of(expression))


def _returning(forward: Graph, saved: Sequence[str]) -> Graph:
    """The forward with its epilogues joined, which also returns what the backward reads, by the backward's names."""
    joined = join_tails(forward)
    where = {_spelled(forward, ref): ref for node in forward.nodes for ref in node.outputs}
    for node in joined.nodes:
        if node.members:
            tail = forward.by_name[node.members[-1]]
            moved = dict(zip(tail.outputs, node.outputs, strict=True))
            where = {name: moved.get(ref, ref) for name, ref in where.items()}
    inputs = {name for name, _ in forward.inputs}
    extra = tuple((name, where[name]) for name in saved if name not in inputs)
    return replace(joined, outputs=(*joined.outputs, *extra))


def _spelled(forward: Graph, ref: str) -> str:
    """The backward's name of a forward value: inputs keep theirs, others are like `act` and `slope`."""
    node = forward.by_name.get(node_of(ref))
    if node is None:
        return ref
    if ref == node.name:
        return node.name.rpartition(".")[2]
    label = node.op.output_labels[int(ref.partition(":")[2])]
    alike = [n for n in forward.nodes if label in n.op.output_labels]
    return label if len(alike) == 1 else f"{node.name.rpartition('.')[2]}_{label}"


@dataclass
class _Derivation:
    """The backward under construction. It declares a forward value as an input when a rule first reads it."""

    graph: Graph
    forward: Graph
    inputs: tuple[str, ...]
    b: Builder = field(default_factory=lambda: Builder(""))

    def run(self, name: str) -> Graph:
        """Gradients of every input of the forward, in their order, from `d` and the values that were kept."""
        b = self.b
        b.name = name
        last = self.forward.nodes[-1]
        gradients: dict[str, list[str]] = {last.name: [b.input("d", last.type)]}
        for node in reversed(self.forward.nodes):
            grad = self.total(node.name, gradients.pop(node.name))
            rule = self.pointwise if isinstance(node.op, Pointwise) else self.stated
            for ref, value in rule(node, grad):
                gradients.setdefault(ref, []).append(value)
        return b.build({f"d_{ref}": self.total(ref, gradients[ref]) for ref in self.inputs})

    def kept(self, ref: str) -> str:
        """The backward's name of a forward value."""
        name = _spelled(self.forward, ref)
        return name if name in self.b.types else self.b.input(name, self.forward.types[ref])

    def stated(self, node: Node, grad: str) -> list[tuple[str, str]]:
        """The gradients by the op's own rule."""

        def emit(suffix: str, op: Op, operands: Sequence[str]) -> str:
            return self.b.add(f"{node.name}.{suffix}", op, operands)

        values = node.op.derivative([self.kept(ref) for ref in node.inputs], grad, emit)
        assert values is not None
        return [(ref, value) for ref, value in zip(node.inputs, values, strict=True) if value is not None]

    def pointwise(self, node: Node, grad: str) -> list[tuple[str, str]]:
        """The gradients of a pointwise member: of its products as planned, of each other operand by derivation."""
        original = self.graph.by_name[node.name].op
        assert isinstance(node.op, Pointwise) and isinstance(original, Pointwise)
        expression = reread(original.outputs[0])
        operands = dict(zip(node.op.variables, node.inputs, strict=True))
        linear = {n.name for n in self.forward.nodes if isinstance(n.op, Linear)}
        accumulators = _accumulators(node, linear)
        readable = {"y": node.name, **operands}
        readable |= dict(zip(node.op.labels[1:], node.outputs[1:], strict=True))
        readable |= {v: readable[f"pre_{v}"] for v in accumulators if f"pre_{v}" in readable}
        texts = [{v: str(grad) for v, grad in plan_backward(expression, accumulators).grads}] if accumulators else []
        texts += [
            {v: str(simplify(reread(f"d * ({derive(expression, v)})")))} for v in operands if v not in accumulators
        ]
        found: list[tuple[str, str]] = []
        for group in texts:
            suffix = "grad" if set(group) & set(accumulators) else f"grad_{next(iter(group))}"
            title = f"{original.title}_{suffix}" if original.title else ""
            found += self.emitted(f"{node.name}.{suffix}", title, group, operands, readable, grad)
        return found

    def emitted(
        self,
        name: str,
        title: str,
        texts: Mapping[str, str],
        operands: Mapping[str, str],
        readable: Mapping[str, str],
        grad: str,
    ) -> list[tuple[str, str]]:
        """One node for the gradients `texts` by variable, summed where an operand was stretched to the others'
        shape."""
        read = tuple(dict.fromkeys(v for text in texts.values() for v in variables(reread(text)) if v != "d"))
        inputs = (grad, *(self.kept(readable[v]) for v in read))
        wanted = [self.forward.types[operands[v]] for v in texts]
        cast = wanted[0].dtype if self.b.types[grad].dtype != wanted[0].dtype else ""
        op = Pointwise(tuple(texts.values()), ("d", *read), tuple(texts) if len(texts) > 1 else (), cast, title)
        self.b.add(name, op, inputs)
        results = []
        for ref, type, v in zip(self.b.nodes[-1].outputs, wanted, texts, strict=True):
            summed = ref if self.b.types[ref].shape == type.shape else self.sum(f"{name}.sum", ref, type)
            results.append((operands[v], summed))
        return results

    def sum(self, name: str, ref: str, type: TensorType) -> str:
        return self.b.add(name, SumTo(type.shape), (ref,))

    def total(self, name: str, gradients: Sequence[str]) -> str:
        """The sum of the gradients that reach a value along its paths."""
        total = gradients[0]
        for i, other in enumerate(gradients[1:], 1):
            total = self.b.add(f"{name}.grad_total{i}", Pointwise(("a + b",), ("a", "b")), (total, other))
        return total
