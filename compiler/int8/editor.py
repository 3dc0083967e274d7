"""Replaces the matrix products of a graph by int8 products. Describes each product of a model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from specc.compiler.int8.finish import finished
from specc.compiler.ir.graph import Graph, Node, needed
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType, TypeRuleError
from specc.compiler.ops.quantized import QuantizeRows, padded
from specc.compiler.passes.assign_quant import Allocation, keeping, pattern_of, stated
from specc.compiler.records import record
from specc.compiler.spec.spec import QuantSpec
from specc.compiler.strict import Problem

STORAGE = "int8"


class Unfit(Exception):
    """Raised if a product cannot be computed in int8.

    `names` are the full names of the product's parameters. If `at_once` is true, the product requires the same scheme
    for these parameters, but the parameters have different schemes.
    """

    def __init__(self, message: str, names: Sequence[str], at_once: bool = False) -> None:
        super().__init__(message)
        self.message, self.names, self.at_once = message, tuple(names), at_once

    def problem(self, quant: QuantSpec, schemes: Allocation) -> Problem:
        """Returns the problem that the compiler reports for this error. The path of the problem is the spec path that
        requests int8."""
        pattern = covering(self.names)
        if self.at_once:
            # A rule takes precedence over the default
            path = max((stated(quant, schemes[name]) for name in self.names), key=len)
            hint = f'give them the same scheme by a single rule {{match: "{pattern}", ...}} or by the default'
            return Problem(path, "S312", self.message, hint)
        scheme = next(schemes[name] for name in self.names if schemes[name].integer)
        return Problem(stated(quant, scheme), "S312", self.message, keeping(scheme, pattern))


def covering(names: Sequence[str]) -> str:
    """Returns a pattern that matches the parameters `names` and the parameters of the same name in other blocks."""
    blocks = [".".join("*" if word.isdigit() else word for word in name.split(".")) for name in names]
    places, last = {name.rpartition(".")[0] for name in blocks}, pattern_of(names)
    if len(places) == 1:
        return f"{places.pop()}{last[1:]}"
    sides = {place.partition(".")[0] for place in places}
    return f"{sides.pop()}.{last}" if len(sides) == 1 else last


@record
class Source:
    """A matrix product of the model. All names are full names, such as `blocks.0.mlp.up`.

    The features of the input are divided into `parts` equal slices. The weight multiplies one of these slices.

    Attributes:
        node: The name of the node that contains the product.
        weight: The name of the weight.
        bias: The name of the int8 bias, or "".
        read: The indices of the node inputs that the weight multiplies.
        outputs: In a recurrence, the indices of the node outputs that the weight multiplies.
        maker: The name of the node that computes the first of the inputs `read`. If this input is an input of the
            graph, the name of the graph input.
        leader: The first weight in the parameter table that multiplies the same input as `weight`. The name of the
            leader identifies the scale of the input.
        part: The index of the slice that the weight multiplies.
        parts: The number of slices.
    """

    node: str
    weight: str
    bias: str
    read: tuple[int, ...]
    outputs: tuple[int, ...]
    maker: str
    leader: str
    part: int = 0
    parts: int = 1


class Factor(NamedTuple):
    """A matrix product inside a node.

    The weight multiplies node inputs and, in a recurrence, node outputs. The features of each of these values are
    divided into `parts` equal slices. The weight multiplies slice `part`.

    Attributes:
        weight: The reference to the weight [N, K].
        bias: The reference to the bias [N], or "".
        read: The indices of the node inputs that the weight multiplies.
        outputs: The indices of the node outputs that the weight multiplies.
        part: The index of the slice.
        parts: The number of slices.
    """

    weight: str
    bias: str
    read: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    part: int = 0
    parts: int = 1


@dataclass
class Editor:
    """A graph whose matrix products are being replaced by int8 products.

    Names and references to values belong to the original graph, except in attributes that hold new nodes.

    Attributes:
        graph: The original graph.
        places: The path of each call of the graph, such as `blocks.0.`. Full names of parameters begin with this path:
            `@mlp.up` is then the parameter `blocks.0.mlp.up`.
        schemes: The scheme of each parameter.
        sources: The int8 products of the model, by weight.
        functions: New functions, by name. The editors of all graphs share this dict.
        added: The types of the declared constants, by name.
        types: The types of all values, original and new.
        new: New nodes, by the name of the original node before which they are inserted.
        gone: The names of the removed nodes.
        names: Maps the reference of each removed value to its replacement.
        shared: The references of codes that several products may read. A key contains the reference of the quantized
            value, and the leader (`Source.leader`), which identifies the input scale.
    """

    graph: Graph
    places: tuple[str, ...]
    schemes: Allocation
    sources: Mapping[str, Source]
    functions: dict[str, Graph]
    added: dict[str, TensorType] = field(default_factory=dict)
    types: dict[str, TensorType] = field(init=False)
    new: dict[str, list[Node]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)
    shared: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.types = dict(self.graph.types)

    def result(self) -> Graph:
        """Returns the graph with all replacements, without new nodes whose outputs no node reads.

        An int8 form may compute outputs that the graph does not read, such as the last state of a recurrent layer.
        """
        remaining = [node.name for node in self.graph.nodes if node.name not in self.gone]
        nodes = [
            replace(new, inputs=tuple(map(self._name, new.inputs)))
            for node in self.graph.nodes
            for new in (*self.new.get(node.name, ()), *((node,) if node.name not in self.gone else ()))
        ]
        outputs = tuple((label, self._name(ref)) for label, ref in self.graph.outputs)
        live = needed(nodes, [*remaining, *(ref for _, ref in outputs)])
        read = {ref for node in live for ref in node.inputs}
        # A parameter that no node reads, such as that of a layer after the last state of an encoder, stays in the model
        gone = {ref for node in self.graph.nodes for ref in node.inputs} - read
        left = (
            entry
            for entry in self.graph.params
            if (ref := f"@{entry[0]}") in read or not (ref in gone or self.integer(ref))
        )
        params = (*left, *self.added.items())
        return finished(replace(self.graph, nodes=live, params=params, outputs=outputs))

    def full_names(self, refs: Iterable[str]) -> list[str]:
        """Returns the full names of the parameters among `refs`, one per path in `places`."""
        return [at + ref[1:] for ref in refs if ref[:1] == "@" for at in self.places]

    def _name(self, ref: str) -> str:
        while ref in self.names:
            ref = self.names[ref]
        return ref

    def integer(self, ref: str) -> bool:
        """Returns whether the value `ref` is a parameter that is stored as integers for int8 products. Raises Unfit if
        this holds in only some of the blocks that share the code of the graph."""
        if ref[0] != "@" or self.places[0] + ref[1:] not in self.schemes:
            return False
        flags = {self.schemes[at + ref[1:]].integer for at in self.places}
        if len(flags) > 1:
            message = f"{self.places[0]}{ref[1:]} is int8 in only some of the blocks that run the same code"
            raise Unfit(message, self.full_names([ref]), at_once=True)
        return flags.pop()

    def constant(self, weight: str, suffix: str, type: TensorType) -> str:
        """Declares a tensor that is stored next to a weight, and returns the reference of the tensor. The name of the
        tensor is the name of the weight, followed by a suffix such as `codes`, `offset` or `scale`."""
        name = f"{weight[1:]}_{suffix}"
        self.added[name] = self.types[f"@{name}"] = replace(type, storage=STORAGE)
        return f"@{name}"

    def inverse(self, weight: str) -> str:
        """Returns the reference of the inverse input scale, f32 [K], of the product with `weight`. The codes of the
        input are the input times this constant, rounded."""
        leader, width = self.leader(weight), self.types[weight].width
        for at in self.places:
            names = [name for name, source in self.sources.items() if source.leader == f"{at}{leader}"]
            if len({self.schemes[name].input_by_feature for name in names}) > 1:
                message = (
                    f"{names[0]} and other weights read the same input, but not all of them use one scale per feature"
                )
                raise Unfit(message, names, at_once=True)
        return self.constant(f"@{leader}", "inverse", TensorType((width,), "f32"))

    def input_bits(self, weight: str) -> Literal[8, 16]:
        """Returns the number of bits of the quantized input of the product with `weight`."""
        leaders = {self.sources[at + weight[1:]].leader for at in self.places}
        names = [name for name, source in self.sources.items() if source.leader in leaders]
        widths = {self.schemes[name].input_bits for name in names}
        if len(widths) > 1:
            message = (
                f"{names[0]} and the weights that share its input or its code must all have 8-bit inputs, or all have "
                "16-bit inputs"
            )
            raise Unfit(message, names, at_once=True)
        return widths.pop()

    def leader(self, weight: str) -> str:
        """Returns the leader of `weight`: the first weight in the parameter table that multiplies the same input."""
        leaders = {self.sources[at + weight[1:]].leader.removeprefix(at) for at in self.places}
        if len(leaders) > 1:
            message = (
                f"the products that read the input of {self.places[0]}{weight[1:]} are not the same in all blocks that "
                "run the same code"
            )
            raise TypeRuleError(message)
        return leaders.pop()

    def codes(self, ref: str, weight: str, before: Node) -> tuple[str, ...]:
        """Returns the references of the int8 codes of the value `ref`, for the product with `weight`.

        A 16-bit input has two codes per value, so the result has two references. New nodes before the node `before`
        compute the codes. All products that read the value share the codes.
        """
        leader = self.leader(weight)
        if (ref, leader) not in self.shared:
            self.shared[ref, leader] = self.coded(ref, weight, before)
        return self.shared[ref, leader]

    def coded(self, ref: str, weight: str, before: Node) -> tuple[str, ...]:
        """Adds nodes that compute the codes of the value `ref`, before the node `before`. Returns the references of the
        codes."""
        width, inputs = self.types[ref].width, (ref, self.inverse(weight))
        assert isinstance(width, int)
        names = (f"{weight[1:]}_input", f"{weight[1:]}_second")[: self.input_bits(weight) // 8]
        return tuple(
            self.add_op(name, QuantizeRows(padded(width), bool(i)), inputs, before) for i, name in enumerate(names)
        )

    def add(self, node: Node, at: Node) -> str:
        """Inserts a new node at the position of the original node `at`. Returns the reference of the new node's first
        output."""
        node.op.infer([self.types[ref] for ref in node.inputs[: node.op.arity or len(node.inputs)]])
        self.new.setdefault(at.name, []).append(node)
        self.types |= zip(node.outputs, node.types, strict=True)
        return node.name

    def add_op(self, name: str, op: Op, inputs: Sequence[str], at: Node) -> str:
        """Inserts a new node without an epilogue. The op infers the output types.

        Args:
            name: The name of the node.
            op: The op of the node.
            inputs: The references of the inputs.
            at: The original node at whose position the new node is inserted.

        Returns:
            The reference of the node's first output.
        """
        return self.add(Node(name, op, tuple(inputs), op.infer([self.types[ref] for ref in inputs])), at)

    def function(self, graph: Graph) -> str:
        """Adds a function, unless an equal function exists. Returns the name of the function. Raises TypeRuleError if a
        different function has this name."""
        if self.functions.setdefault(graph.name, graph) != graph:
            raise TypeRuleError(f"two functions are named {graph.name}")
        return graph.name

    def replace(self, old: Node, *refs: str) -> None:
        """Removes the original node `old`. Nodes that read the outputs of `old` then read `refs`. `refs` is empty if a
        new node with the name of `old` computes the outputs, or if no node reads the outputs any more."""
        self.gone.add(old.name)
        self.names |= {a: b for a, b in zip(old.outputs, refs, strict=False) if a != b}
