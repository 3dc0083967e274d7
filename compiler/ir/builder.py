"""The builder of graphs, which infers the type of each node."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count

from specc.compiler.ir.graph import Graph, Named, Node, node_of
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType, TypeRuleError


@dataclass
class Builder:
    """Builds one graph by adding nodes. The name of each node and parameter begins with `scope`.

    A formula of the spec becomes a constant of the generated code. `constants` maps the name of each constant to its
    value and its formula. `scalars` maps the name of each number that callers pass to its formula. `learned` maps the
    path of each learned value to the value of `layers` in its initialization.
    """

    name: str
    scope: str = ""
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Named] = field(default_factory=list)
    params: dict[str, TensorType] = field(default_factory=dict)
    scalars: dict[str, str] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    inits: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    constants: dict[str, tuple[float, str]] = field(default_factory=dict)
    learned: dict[str, int] = field(default_factory=dict)

    def input(self, name: str, type: TensorType) -> str:
        self.inputs.append((name, type))
        self.types[name] = type
        return name

    def scalar(self, name: str, formula: str) -> str:
        """Declares a number that each caller of the graph passes, and returns a reference to the number. Each caller
        computes the number from `formula`, which reads only `layer`."""
        self.scalars.setdefault(name, formula)
        self.types[f"${name}"] = TensorType((), "f32")
        return f"${name}"

    def param(self, name: str, type: TensorType, init: object) -> str:
        """Declares the parameter `name` with the initialization `init`, and returns a reference to the parameter.

        If a parameter of this name is already declared, the reference is to that parameter. Raises TypeRuleError if the
        two declarations differ in type, or if a learned value has this name.
        """
        path = self.path(name)
        if path in self.learned:
            raise _same_name(path)
        self.inits.setdefault(path, init)
        if self.params.setdefault(path, type) != type:
            raise TypeRuleError(f"parameter {path} is both {self.params[path]} and {type}")
        self.types[f"@{path}"] = type
        return f"@{path}"

    def learned_param(self, name: str, type: TensorType, init: object, layers: int) -> str:
        """Declares the parameter of a learned value of the spec.

        Args:
            name: The name of the parameter.
            type: The type of the parameter.
            init: The initialization.
            layers: The value of `layers` in `init`.

        Returns:
            A reference to the parameter.

        Raises:
            TypeRuleError: If another parameter has the same name.
        """
        path = self.path(name)
        if path in self.params and path not in self.learned:
            raise _same_name(path)
        self.learned.pop(path, None)
        ref = self.param(name, type, init)
        self.learned[path] = layers
        return ref

    def constant(self, name: str, value: float, formula: float | str) -> float:
        """Returns `value`. If `formula` is text, records the value and the formula under `name`."""
        if isinstance(formula, str):
            self.constants[name.upper()] = value, formula
        return value

    def path(self, name: str) -> str:
        return f"{self.scope}.{name}" if self.scope else name

    def add(self, name: str, op: Op, inputs: Sequence[str]) -> str:
        """Adds a node with the given op and inputs, and returns a reference to the first output of the node.

        Raises TypeRuleError if the op cannot accept the inputs, or if the name is already used. The message states the
        name of the node.
        """
        path = self.path(name)
        if path in self.types:
            raise TypeRuleError(f"two nodes are named {path}")
        try:
            types = op.infer([self.types[ref] for ref in inputs])
        except TypeRuleError as error:
            origins = tuple(self.origin(ref) for i, ref in enumerate(inputs) if i in error.inputs)
            message = error.message.replace("{input}", origins[0] if origins else "")
            raise TypeRuleError(f"{path} {message}", error.inputs, error.hint, origins) from None
        node = Node(path, op, tuple(inputs), types)
        self.nodes.append(node)
        self.types |= zip(node.outputs, types, strict=True)
        return path

    def origin(self, ref: str) -> str:
        """Returns the name of the node that determines the number of features of the value `ref`, for error messages.

        The search skips ops that preserve the number of features, such as norms. If `ref` is an input of a function,
        the node is in the caller of the function.
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


def first_free(name: str, free: Callable[[str], object], separator: str = "") -> str:
    """Returns `name` if `free(name)` is true. Otherwise, returns `name` followed by `separator` and a number: the
    smallest number from 2 on for which `free` is true."""
    return next(filter(free, chain((name,), (f"{name}{separator}{i}" for i in count(2)))))


def underscored(name: str, taken: set[str], reserved: Collection[str] = ()) -> str:
    """Appends underscores to `name` until the name is neither taken nor reserved. Adds the result to `taken`. Returns
    the result."""
    while name in taken or name in reserved:
        name += "_"
    taken.add(name)
    return name


def _same_name(path: str) -> TypeRuleError:
    return TypeRuleError(f"{path} is both a parameter and a learned value", hint="choose another name under `learn`")
