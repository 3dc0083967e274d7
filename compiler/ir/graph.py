"""The typed graph that every pass reads and writes, and the builder that infers the type of each node it adds.

Values are referenced by text. `mlp.up` is the first output of node `mlp.up` (or an input of the graph) and `mlp.up:1`
its second output. `@mlp.up` is a parameter, and `$norm_scale` is a number that the caller of a function passes.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from specc.compiler.expr.python_lines import operand

if TYPE_CHECKING:
    from torch import Tensor

BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i8": 1, "bool": 1}
Dim = int | str
Sizes = Mapping[str, int]


class Size(int):
    """An integer dim with a symbolic name for generated code, such as `D` or `H * C`.

    Three operations return a Size: a size times a size, an integer times a size, and the exact quotient of a product by
    one of its factors but the last (`H * C` // `H` is `C`). All others return plain numbers.
    """

    text: str

    def __new__(cls, value: int, text: str) -> "Size":
        number = super().__new__(cls, value)
        number.text = text
        return number

    def __reduce__(self) -> tuple[Any, ...]:  # processes pass plans to one another
        return Size, (int(self), self.text)

    def __mul__(self, other: Any) -> Any:
        product = int(self) * other
        return Size(product, f"{self.text} * {other.text}") if isinstance(other, Size) else product

    def __rmul__(self, other: Any) -> Any:
        return Size(other * int(self), f"{other} * {self.text}") if isinstance(other, int) else other * int(self)

    def __floordiv__(self, other: int) -> int:
        words = self.text.split(" * ")
        if isinstance(other, Size) and other.text in words[:-1]:
            words.remove(other.text)
            return Size(int(self) // int(other), " * ".join(words))
        return int(self) // int(other)


def spelled(value: object) -> str:
    """Returns a number or dim as generated code writes it: the name of a Size, else the value."""
    return value.text if isinstance(value, Size) else str(value)


class TypeRuleError(ValueError):
    """Raised if an op cannot accept its inputs. `inputs` are the positions of the inputs at fault."""

    def __init__(self, message: str, inputs: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.inputs = inputs


@dataclass(frozen=True, slots=True)
class TensorType:
    """The shape and dtype of a value.

    A dim is an integer or the name of a symbolic dim, such as `B` for rows and `T` for tokens. `storage` is the storage
    form of a deployed parameter, such as `int5`. It is empty if the parameter is stored in `dtype`.
    """

    shape: tuple[Dim, ...]
    dtype: str
    storage: str = ""

    def __str__(self) -> str:
        stored = f"{self.storage}:" if self.storage else ""
        return f"{stored}{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def width(self) -> Dim:
        """Returns the last dim, which is the number of features for most values."""
        return self.shape[-1]

    @property
    def floating(self) -> bool:
        """Returns True if the dtype is a float, so that the value can have a gradient."""
        return self.dtype in ("f64", "f32", "bf16", "f16")

    def with_shape(self, *shape: Dim) -> "TensorType":
        return replace(self, shape=shape)

    def count(self, sizes: Sizes) -> int:
        """Returns the number of elements, with `sizes` for the symbolic dims."""
        return math.prod(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)

    def bytes(self, sizes: Sizes) -> int:
        return self.count(sizes) * BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Input:
    """Input `index` of an op, in a `TorchCall`."""

    index: int


# Functions of a TorchCall that are not written as calls, and the names under which torch.fx records them.
OPERATORS = {
    "[]": "getitem",
    ".": "getattr",
    "==": "eq",
    "!=": "ne",
    "+": "add",
    "*": "mul",
    "/": "truediv",
    "**": "pow",
    "@": "matmul",
}


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A Torch call, as generated code writes it and torch.fx records it.

    Attributes:
        function: a Torch function (`F.pad`), a method of the first argument (`.flip`), one of OPERATORS, or a support
            function (`rope_angles`), which is defined in templates/torch/<function>.py.jinja.
        args: the positional arguments: inputs of the op, other calls, and constants.
        keywords: the keyword arguments.
        generated: for a support function that is generated for the op, its template and typed context.
    """

    function: str
    args: tuple[object, ...]
    keywords: tuple[tuple[str, object], ...] = ()
    generated: tuple[str, Any] | None = None

    @property
    def recorded(self) -> str:
        """Returns the name of the function as torch.fx records it."""
        return OPERATORS.get(self.function) or self.function.rpartition(".")[2]

    @property
    def support(self) -> str:
        """Returns the support function that the call, or a call in its arguments, names; "" if there is none."""
        if self.function.isidentifier():
            return self.function
        return next((arg.support for arg in self.args if isinstance(arg, TorchCall) and arg.support), "")

    def text(self, inputs: Sequence[str]) -> str:
        """Returns the call as Python source, for the texts of the op's inputs."""
        first, *rest = (_source(arg, inputs) for arg in self.args)
        if self.function == "[]":
            index = self.args[1] if isinstance(self.args[1], tuple) else (self.args[1],)
            return f"{operand(first)}[{', '.join(_source(part, inputs) for part in index)}]"
        if self.function == ".":
            return f"{operand(first)}.{self.args[1]}"
        if self.function in OPERATORS:
            return f" {self.function} ".join(
                text if re.fullmatch(r"[\d.]+", text) else operand(text) for text in (first, *rest)
            )
        rest += [f"{name}={_source(value, inputs)}" for name, value in self.keywords]
        if self.function.startswith("."):
            return f"{operand(first)}{self.function}({', '.join(rest)})"
        return f"{self.function}({', '.join((first, *rest))})"


def _source(value: object, inputs: Sequence[str]) -> str:
    """Returns an argument of a TorchCall as Python source."""
    match value:
        case Input(index):
            return inputs[index]
        case TorchCall():
            return value.text(inputs)
        case slice(start=start, stop=stop):
            return ":".join("" if bound is None else _source(bound, inputs) for bound in (start, stop))
        case tuple():
            items = [_source(item, inputs) for item in value]
            return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
        case str():
            return f'"{value}"'
    return "..." if value is Ellipsis else spelled(value)


# Metadata of a field of an op that digests in locks of earlier versions do not contain, while it has its default.
ADDED: Mapping[str, bool] = MappingProxyType({"digested": False})


@dataclass(frozen=True, slots=True)
class Op:
    """Base of the operations. The fields of an instance are its settings.

    Subclasses set `name`, override the class attributes below if the defaults do not apply, and implement the methods.
    """

    name: ClassVar[str] = ""
    # Consumers may print the expression of this value inside their own line.
    inline: ClassVar[bool] = True
    # It computes a gradient: generated code names its value after this node, even if the node has an epilogue.
    gradient: ClassVar[bool] = False
    # It is a matrix product or attention. The FLOP count of a model includes these ops, and a plan lists them.
    matrix: ClassVar[bool] = False
    # The category in which a plan counts its time.
    work: ClassVar[str] = "pointwise"
    # The output has the features of the first input, so that errors about features are attributed to that input.
    keeps_features: ClassVar[bool] = False
    # torch.compile does not compile it, so that a program with it is not a single graph.
    apart: ClassVar[bool] = False
    # It modifies its first input, a state, and returns it.
    in_place: ClassVar[bool] = False
    # Inside fused groups, the plan selects a kernel for it.
    planned: ClassVar[bool] = False
    # Outside of fused groups too, the plan selects a kernel for it.
    everywhere: ClassVar[bool] = False
    # A plan lists it inside fused groups, because it changes shapes.
    listed: ClassVar[bool] = False
    # It combines tokens of a sequence, so that the rows and tokens of sequences cannot be flattened to one dim.
    mixes_tokens: ClassVar[bool] = False
    # Its rows are independent of each other, in however many dims they are. If False, only sequences are independent.
    rowwise: ClassVar[bool] = False
    # The number of sums in sequence, each over values that were rounded after the previous sum.
    chained: ClassVar[int] = 1
    # Floating-point operations per element of the first output.
    flops_per_output: ClassVar[int] = 1

    @property
    def arity(self) -> int:
        """Returns the number of the op's own inputs. Inputs of a node after these belong to its epilogue."""
        raise TypeRuleError(f"{self.name} has no fixed arity")

    @property
    def output_labels(self) -> tuple[str, ...]:
        """Returns names of the outputs for generated code, if there are several or the node's name is too general."""
        return ()

    @property
    def input_labels(self) -> tuple[str, ...]:
        """Returns names of the inputs for the code of a group, if their own names would be ambiguous."""
        return ()

    @property
    def words(self) -> str:
        """Returns a short description for a plan page."""
        return self.name

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        """Returns the parts of a kernel name for the op and its size, such as `linear` and `n3072_k768`."""
        return self.name, ""

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        """Returns the types of the outputs. Raises TypeRuleError if the op cannot accept the inputs."""
        raise TypeRuleError(f"{self.name} has no type rule")

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        """Returns the exclusive upper bound of the integer inputs, which are indices of at least 0."""
        raise TypeRuleError(f"{self.name} has no whole numbers to index with")

    def belonging(self, inputs: "Sequence[Tensor]") -> "Sequence[Tensor]":
        """Makes random inputs consistent, if some of them are determined by others."""
        return inputs

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        """Returns the number of floating-point operations.

        A multiply-add counts as two, a pointwise operation as one per element.
        """
        return self.flops_per_output * outputs[0].count(sizes) if self.flops_per_output else 0

    def call(self, inputs: Sequence[TensorType]) -> TorchCall | None:
        """Returns the Torch call that computes the op, or None if only a kernel does."""
        return None

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        """Returns the Python expression that computes the op, for argument expressions `args`."""
        call = self.call(inputs)
        if call is None:
            raise TypeRuleError(f"{self.name} has no Torch call")
        return call.text(args)

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        """Computes the op in plain Torch in the precision of the inputs, independently of `call`."""
        raise TypeRuleError(f"{self.name} has no reference")

    def sampled(
        self, some: "Sequence[Tensor]", every: "Sequence[Tensor]", sums: Sequence[int] = ()
    ) -> "Tensor | tuple[Tensor, ...]":
        """Computes the reference for a subset of the rows if the op is `rowwise`, else for a subset of the sequences.

        Args:
            some: the inputs, restricted to the subset.
            every: the inputs of all rows, in any precision.
            sums: the positions of outputs without rows. They are computed over `every`, in the precision of `some`.

        Returns:
            The outputs, those with rows restricted to the subset.
        """
        values = self.reference(*some)
        if not sums:
            return values
        whole = self.reference(*(value.to(part.dtype) for value, part in zip(every, some, strict=True)))
        if not isinstance(values, tuple) or not isinstance(whole, tuple):
            return whole
        return tuple(whole[i] if i in sums else value for i, value in enumerate(values))

    def derivative(self, tape: "Tape") -> "Gradients | None":
        """Adds the nodes that compute the gradients of the inputs and returns one gradient per input.

        An entry is None if that input has no gradient. The result is None if the op has no derivative rule. Rules are
        linear in the gradients of the outputs.
        """
        return None

    def settings(self) -> str:
        """Returns the fields as text, without those that have their default."""
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return "{" + ", ".join(shown) + "}" if shown else ""


@dataclass(frozen=True, slots=True)
class Scaled:
    """A gradient `value` that is still to be multiplied by the number `by`, f32[].

    Because every derivative rule is linear, the multiplication is deferred until a gradient leaves the group.
    """

    value: str
    by: str


Gradients = tuple[str | Scaled | None, ...]


class Tape(Protocol):
    """The interface of a derivative rule to the graph: the values it may read and the method that adds nodes.

    A forward value is saved for the backward only if a rule reads it.
    """

    def type(self, index: int) -> TensorType:
        """Returns the type of an input of the op."""

    def input(self, index: int) -> str:
        """Returns a reference to an input of the op."""

    def output(self, index: int) -> str:
        """Returns a reference to an output of the op."""

    def grad(self, index: int = 0) -> str:
        """Returns a reference to the gradient of an output."""

    def add(self, suffix: str, op: Op, inputs: Sequence[str]) -> str:
        """Adds a node whose name is the op's node name with `suffix`, and returns its first output."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of a graph.

    Attributes:
        name: the path of the node, unique in its graph.
        op: the operation.
        inputs: references to the input values: those of `op`, then those of `epilogue`.
        types: the types of the outputs.
        epilogue: a pointwise op applied to the accumulators of `op`, fused into this node.
        members: the spec paths of the nodes that this node replaced, if it replaced several.
    """

    name: str
    op: Op
    inputs: tuple[str, ...]
    types: tuple[TensorType, ...]
    epilogue: Op | None = None
    members: tuple[str, ...] = ()

    @property
    def type(self) -> TensorType:
        return self.types[0]

    @property
    def outputs(self) -> tuple[str, ...]:
        return output_refs(self.name, len(self.types))

    def __str__(self) -> str:
        epilogue = f" |> {self.epilogue.name}{self.epilogue.settings()}" if self.epilogue else ""
        members = f" of ({', '.join(self.members)})" if self.members else ""
        types = ", ".join(map(str, self.types))
        return (
            f"{self.name} = {self.op.name}({', '.join(self.inputs)}){self.op.settings()}{epilogue}{members} : {types}"
        )


Named = tuple[str, TensorType]


@dataclass(frozen=True)
class Graph:
    """A program or a function, immutable.

    Attributes:
        name: the name of the graph.
        inputs: the name and type of each input.
        params: the name and type of each parameter.
        nodes: the nodes in topological order.
        outputs: (label, value) of each output.
        scalars: the names of the numbers that the caller passes.
    """

    name: str
    inputs: tuple[Named, ...]
    params: tuple[Named, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str], ...]
    scalars: tuple[str, ...] = ()

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """Maps every value that a node may reference to its type."""
        types = dict(self.inputs)
        types |= {f"@{name}": type for name, type in self.params}
        types |= {f"${name}": TensorType((), "f32") for name in self.scalars}
        for node in self.nodes:
            types |= zip(node.outputs, node.types, strict=True)
        return types

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        """Maps each value to the nodes that read it, in order. A node that reads it twice is listed twice."""
        readers: dict[str, list[Node]] = {ref: [] for ref in self.types}
        for node in self.nodes:
            for ref in node.inputs:
                readers[ref].append(node)
        return {ref: tuple(nodes) for ref, nodes in readers.items()}

    def uses(self, ref: str) -> int:
        """Returns the number of times that nodes and graph outputs read a value."""
        return len(self.consumers[ref]) + sum(ref == output for _, output in self.outputs)

    def __str__(self) -> str:
        inputs = ", ".join(f"{name}: {type}" for name, type in self.inputs)
        scalars = "".join(f", ${name}" for name in self.scalars)
        lines = [f"graph {self.name}({inputs}{scalars}) {{"]
        lines += [f"  param {name} : {type}" for name, type in self.params]
        lines += [f"  {node}" for node in self.nodes]
        lines += [f"  return {', '.join(f'{label}={ref}' for label, ref in self.outputs)}", "}"]
        return "\n".join(lines)


def output_ref(node: str, index: int) -> str:
    return node if index == 0 else f"{node}:{index}"


@lru_cache(maxsize=65536)  # every pass requests the same few names and counts
def output_refs(node: str, count: int) -> tuple[str, ...]:
    """Returns references to the outputs of a node that has `count` outputs."""
    return tuple(output_ref(node, i) for i in range(count))


def node_of(ref: str) -> str:
    """Returns the name of the node or graph input that a value belongs to."""
    return ref.partition(":")[0]


@dataclass
class Builder:
    """Builds one graph node by node. `scope` is prepended to the name of each node and parameter.

    `constants` maps a name for generated code to the value and text of a formula in the spec.
    """

    name: str
    scope: str = ""
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Named] = field(default_factory=list)
    params: dict[str, TensorType] = field(default_factory=dict)
    scalars: dict[str, tuple[float, str]] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    inits: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    constants: dict[str, tuple[float, str]] = field(default_factory=dict)

    def input(self, name: str, type: TensorType) -> str:
        """Declares an input of the graph and returns a reference to it."""
        self.inputs.append((name, type))
        self.types[name] = type
        return name

    def scalar(self, name: str, value: float, formula: str) -> str:
        """Declares a number that each caller passes, here `value`, and returns a reference to it. `formula` is its
        text in the spec."""
        self.scalars.setdefault(name, (value, formula))
        self.types[f"${name}"] = TensorType((), "f32")
        return f"${name}"

    def param(self, name: str, type: TensorType, init: object) -> str:
        """Declares a parameter under the scope with its initialization and returns a reference to it.

        A second declaration of a name refers to the same parameter. Raises TypeRuleError if its type differs.
        """
        path = self.path(name)
        self.inits.setdefault(path, init)
        if self.params.setdefault(path, type) != type:
            raise TypeRuleError(f"parameter {path} is both {self.params[path]} and {type}")
        self.types[f"@{path}"] = type
        return f"@{path}"

    def constant(self, name: str, value: float, formula: float | str) -> float:
        """Returns `value`. If `formula` is text, records the value and the formula under `name`."""
        if isinstance(formula, str):
            self.constants[name.upper()] = value, formula
        return value

    def path(self, name: str) -> str:
        return f"{self.scope}.{name}" if self.scope else name

    def add(self, name: str, op: Op, inputs: Sequence[str]) -> str:
        """Adds a node and returns its first output.

        Raises TypeRuleError, naming the node, if the op cannot accept the inputs or the name is already used.
        """
        path = self.path(name)
        if path in self.types:
            raise TypeRuleError(f"two nodes are named {path}")
        try:
            types = op.infer([self.types[ref] for ref in inputs])
        except TypeRuleError as error:
            at_fault = inputs[error.inputs[0]] if error.inputs else ""
            message = error.message.replace("{input}", self.origin(at_fault))
            raise TypeRuleError(f"{path} {message}", error.inputs) from None
        node = Node(path, op, tuple(inputs), types)
        self.nodes.append(node)
        self.types |= zip(node.outputs, types, strict=True)
        return path

    def origin(self, ref: str) -> str:
        """Returns the name of the node that determined the features of a value, for error messages.

        Follows ops that preserve features, such as norms, and the call into this function.
        """
        by_name = {node.name: node for node in self.nodes}
        while (node := by_name.get(node_of(ref))) is not None and node.op.keeps_features:
            ref = node.inputs[0]
        return self.origins.get(ref, node_of(ref))

    def build(self, outputs: Mapping[str, str]) -> Graph:
        params = tuple(self.params.items())
        return Graph(
            self.name, tuple(self.inputs), params, tuple(self.nodes), tuple(outputs.items()), tuple(self.scalars)
        )


def rename(graph: Graph, names: Mapping[str, str]) -> Graph:
    """Returns the graph with references to values replaced by `names`, in node inputs and graph outputs."""

    def other(ref: str) -> str:
        return names.get(ref, ref)

    nodes = tuple(replace(node, inputs=tuple(map(other, node.inputs))) for node in graph.nodes)
    return replace(graph, nodes=nodes, outputs=tuple((label, other(ref)) for label, ref in graph.outputs))


def needed(nodes: Sequence[Node], refs: Iterable[str]) -> tuple[Node, ...]:
    """Returns the nodes, in order, that the values `refs` depend on."""
    names, chosen = set(map(node_of, refs)), list[Node]()
    for node in reversed(nodes):
        if node.name in names:
            names |= set(map(node_of, node.inputs))
            chosen.append(node)
    return tuple(reversed(chosen))


def walk(graphs: Mapping[str, Graph], start: Graph) -> Iterator[Graph]:
    """Yields `start` and every function reachable from it by calls, each once, in breadth-first order."""
    seen: list[str] = []
    queue = [start]
    while queue:
        graph = queue.pop(0)
        yield graph
        for node in graph.nodes:
            callee: Any = getattr(node.op, "callee", None)
            if callee is not None and callee not in seen:
                seen.append(callee)
                queue.append(graphs[callee])
