"""The typed graph that every pass reads and writes, and the builder that types each node at its birth.

A value is named by text: `mlp.up` is the first output of that node (or an input of the graph), `mlp.up:1` its second,
`@mlp.up` a parameter and `$norm_scale` a number that the caller of a function fixes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor

BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i8": 1, "bool": 1}
Dim = int | str
Sizes = Mapping[str, int]


class Size(int):
    """A dim with a name for code, such as `D` or `H * C`; in all else the number that it is."""

    text: str

    def __new__(cls, value: int, text: str) -> "Size":
        made = super().__new__(cls, value)
        made.text = text
        return made

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


def spelled(dim: Dim) -> str:
    """A dim as code has it."""
    return dim.text if isinstance(dim, Size) else str(dim)


class TypeRuleError(ValueError):
    """An op was given inputs that it cannot take. `inputs` are the positions of those at fault."""

    def __init__(self, message: str, inputs: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.inputs = inputs


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype of a value. A dim is a number or the name of a symbol (`B` rows, `T` tokens).

    `storage` is how a deployed parameter is kept, e.g. `int5`; empty where it is kept as it is computed with.
    """

    shape: tuple[Dim, ...]
    dtype: str
    storage: str = ""

    def __str__(self) -> str:
        stored = f"{self.storage}:" if self.storage else ""
        return f"{stored}{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def width(self) -> Dim:
        """The last dim: features, for most values."""
        return self.shape[-1]

    @property
    def floating(self) -> bool:
        """Whether it has a gradient; whole numbers have none."""
        return self.dtype in ("f64", "f32", "bf16", "f16")

    def with_shape(self, *shape: Dim) -> "TensorType":
        return replace(self, shape=shape)

    def count(self, sizes: Sizes) -> int:
        """Elements, once the symbols have `sizes`."""
        return math.prod(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)

    def bytes(self, sizes: Sizes) -> int:
        return self.count(sizes) * BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Input:
    """Stands for input `index` of an op in what the witness expects."""

    index: int


@dataclass(frozen=True, slots=True)
class Traced:
    """A call that torch.fx records: the name of the function or method, its arguments in order, its keywords."""

    function: str
    args: tuple[object, ...]
    keywords: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class Op:
    """One kind of node; its settings are its fields. Subclasses state their `name` and answer these questions."""

    name: ClassVar[str] = ""
    # Consumers may print this value inside their own line.
    inline: ClassVar[bool] = True
    # It computes a gradient, so code names its value for itself and not for what it follows.
    gradient: ClassVar[bool] = False
    # A matrix product or attention: what the cost of a model is counted in, and a plan lists.
    matrix: ClassVar[bool] = False
    # The class of work that a plan counts its time in.
    work: ClassVar[str] = "pointwise"
    # The features of the output are those of the first input, so an error about them is that input's.
    keeps_features: ClassVar[bool] = False
    # The compiler of Torch leaves it as it is, so that a program with it is no single graph.
    apart: ClassVar[bool] = False
    # It changes its first input, a state, and gives it back.
    in_place: ClassVar[bool] = False
    # In a fused group the plan chooses a kernel for it.
    planned: ClassVar[bool] = False
    # The plan chooses a kernel for it outside of fused groups too.
    everywhere: ClassVar[bool] = False
    # In a fused group a plan lists it, though the group could be read without it: it changes shapes.
    listed: ClassVar[bool] = False
    # Tokens of a sequence meet in it, so rows of sequences cannot be taken as one dim.
    mixes_tokens: ClassVar[bool] = False
    # Its rows, in however many dims they are, know nothing of each other; else only sequences do not.
    rowwise: ClassVar[bool] = False
    # So many sums of it follow each other, each over what the one before has rounded.
    chained: ClassVar[int] = 1

    @property
    def arity(self) -> int:
        """How many inputs are the op's own; those after them belong to its epilogue."""
        raise TypeRuleError(f"{self.name} has no fixed arity")

    @property
    def output_labels(self) -> tuple[str, ...]:
        """Names of the outputs in generated code, where there are several or the node's name is too general."""
        return ()

    @property
    def input_labels(self) -> tuple[str, ...]:
        """Names of the inputs in the code of a group, where their own names would be ambiguous."""
        return ()

    @property
    def words(self) -> str:
        """A short description for a plan page."""
        return self.name

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        """The words for it, and for its size, in the name of a kernel: `linear` and `n3072_k768`."""
        return self.name, ""

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        """The types of the outputs. Raises TypeRuleError."""
        raise TypeRuleError(f"{self.name} has no type rule")

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        """The exclusive upper bound of its integer inputs, which are indices of at least 0."""
        raise TypeRuleError(f"{self.name} has no whole numbers to index with")

    def belonging(self, inputs: "Sequence[Tensor]") -> "Sequence[Tensor]":
        """Random inputs such that they belong together, where some of them follow from others."""
        return inputs

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        """Floating-point operations; a multiply-add counts two. Pointwise work counts one an element."""
        return outputs[0].count(sizes)

    def support(self, inputs: Sequence[TensorType]) -> str:
        """The name of the function that the Torch spelling calls, with the text of templates/torch/<support>.py.jinja;
        empty where it calls none."""
        return ""

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        """The Python expression that computes it."""
        raise TypeRuleError(f"{self.name} has no Torch spelling")

    def traced(self, inputs: Sequence[TensorType]) -> "Traced":
        """The nodes that torch.fx must find where the Torch spelling ran; the witness compares generated code with
        them."""
        return Traced(self.support(inputs), tuple(map(Input, range(len(inputs)))))

    def reference(self, *inputs: "Tensor") -> "Tensor | tuple[Tensor, ...]":
        """The same in plain Torch, in whatever precision the inputs have; written apart from `torch`."""
        raise TypeRuleError(f"{self.name} has no reference")

    def sampled(
        self, some: "Sequence[Tensor]", every: "Sequence[Tensor]", sums: Sequence[int] = ()
    ) -> "Tensor | tuple[Tensor, ...]":
        """The reference of some rows, where the op is `rowwise`, or else of some sequences.

        Args:
            some: inputs of these rows.
            every: inputs of all rows, in any precision.
            sums: the outputs that have no rows, by position: they are taken over `every`, in the precision of `some`.
        """
        values = self.reference(*some)
        if not sums:
            return values
        whole = self.reference(*(value.to(part.dtype) for value, part in zip(every, some, strict=True)))
        if not isinstance(values, tuple) or not isinstance(whole, tuple):
            return whole
        return tuple(whole[i] if i in sums else value for i, value in enumerate(values))

    def derivative(self, tape: "Tape") -> "Gradients | None":
        """Adds the nodes that compute the gradient of each input, None for one that has none; it is linear in the
        gradients of the outputs. None alone where the op states no rule."""
        return None

    def settings(self) -> str:
        """Its fields as text, those left at their default omitted."""
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return "{" + ", ".join(shown) + "}" if shown else ""


@dataclass(frozen=True, slots=True)
class Scaled:
    """The gradient `value` times the number `by`, f32[]. As every rule is linear, the number need not be multiplied
    into `value`: it waits until a gradient leaves the group."""

    value: str
    by: str


Gradients = tuple[str | Scaled | None, ...]


class Tape(Protocol):
    """The interface of a derivative rule: the values that it may read, and where it adds nodes. A value of the forward
    is saved for the backward only if a rule asks for it."""

    def type(self, index: int) -> TensorType:
        """The type of an input of the op."""

    def input(self, index: int) -> str:
        """An input of the op."""

    def output(self, index: int) -> str:
        """An output of the op."""

    def grad(self, index: int = 0) -> str:
        """The gradient of an output."""

    def add(self, suffix: str, op: Op, inputs: Sequence[str]) -> str:
        """Adds a node named after the op's own, and returns its first output."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. `epilogue` is a pointwise node that joined it, over its accumulators and the inputs after
    `op.arity`; `members` are the spec paths of the nodes that it replaced, where these were several."""

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
    """A program or a function: typed inputs, numbers fixed by the caller, parameters, nodes in order, labelled
    outputs."""

    name: str
    inputs: tuple[Named, ...]
    params: tuple[Named, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str], ...]
    scalars: tuple[str, ...] = ()

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """The type of every value that a node may name."""
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
        """For each value, the nodes that read it, in order; a node that reads it twice stands twice."""
        readers: dict[str, list[Node]] = {ref: [] for ref in self.types}
        for node in self.nodes:
            for ref in node.inputs:
                readers[ref].append(node)
        return {ref: tuple(nodes) for ref, nodes in readers.items()}

    def uses(self, ref: str) -> int:
        """How often a value is read, by nodes or as an output of the graph."""
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


@lru_cache(maxsize=65536)  # asked for again by every pass; a name has few counts
def output_refs(node: str, count: int) -> tuple[str, ...]:
    """All outputs of a node that has `count`."""
    return tuple(output_ref(node, i) for i in range(count))


def node_of(ref: str) -> str:
    """The node (or graph input) that a value belongs to."""
    return ref.partition(":")[0]


@dataclass
class Builder:
    """Collects the nodes of one graph. `scope` is put before every name that is added; `constants` are numbers that a
    formula of the spec gives, by a name for code."""

    name: str
    scope: str = ""
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Named] = field(default_factory=list)
    params: dict[str, TensorType] = field(default_factory=dict)
    scalars: list[str] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    inits: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    constants: dict[str, tuple[float, str]] = field(default_factory=dict)

    def input(self, name: str, type: TensorType) -> str:
        """Declares an input of the graph."""
        self.inputs.append((name, type))
        self.types[name] = type
        return name

    def scalar(self, name: str) -> str:
        """Declares a number that each caller fixes."""
        if name not in self.scalars:
            self.scalars.append(name)
            self.types[f"${name}"] = TensorType((), "f32")
        return f"${name}"

    def param(self, name: str, type: TensorType, init: object) -> str:
        """Declares a parameter under the scope, and how it starts; the same name twice is the same parameter."""
        path = self.path(name)
        self.inits.setdefault(path, init)
        if self.params.setdefault(path, type) != type:
            raise TypeRuleError(f"parameter {path} is both {self.params[path]} and {type}")
        self.types[f"@{path}"] = type
        return f"@{path}"

    def constant(self, name: str, value: float, formula: float | str) -> float:
        """Declares that `value` is what a formula gives, where it is one, and returns it."""
        if isinstance(formula, str):
            self.constants[name.upper()] = value, formula
        return value

    def path(self, name: str) -> str:
        return f"{self.scope}.{name}" if self.scope else name

    def add(self, name: str, op: Op, inputs: Sequence[str]) -> str:
        """Adds a node and returns its first output. Raises TypeRuleError, naming the node, where the op's rule does."""
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
        """The node that gave a value its features: back through norms, residuals and the call into this function."""
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
    """The graph with some values replaced by others wherever they are read."""

    def other(ref: str) -> str:
        return names.get(ref, ref)

    nodes = tuple(replace(node, inputs=tuple(map(other, node.inputs))) for node in graph.nodes)
    return replace(graph, nodes=nodes, outputs=tuple((label, other(ref)) for label, ref in graph.outputs))


def walk(graphs: Mapping[str, Graph], start: Graph) -> Iterator[Graph]:
    """`start` and every function that it calls, each once, callers first."""
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
