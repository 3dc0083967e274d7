"""The table of functions and parameters that the programs of a model share during lowering."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specc.compiler.blocks.init import Init
from specc.compiler.ir.graph import Builder, Graph, TensorType
from specc.compiler.programs.programs import Parameter


@dataclass
class Functions:
    """Functions by name and parameters by path, in the order in which they were added.

    Attributes:
        layers: the number of blocks, for formulas.
        graphs: the functions, by name.
        params: the parameters, by path.
        refused: the initializations that a parameter cannot have, each with the first such parameter and the reason.
        owners: the class of the functions that run at each path.
        constants: the values of formulas with their texts, by a name for generated code.
    """

    layers: int
    graphs: dict[str, Graph] = field(default_factory=dict)
    params: dict[str, Parameter] = field(default_factory=dict)
    refused: dict[Init, str] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    constants: dict[str, tuple[float, str]] = field(default_factory=dict)

    def intern(self, b: Builder, names: Sequence[str], at: str, outputs: Mapping[str, str]) -> Graph:
        """Builds a function, or returns the equal function that the table already holds.

        Args:
            b: the builder of the function.
            names: candidate names, in order of preference. The function gets the first name that is free or that
                belongs to an equal function.
            at: the path prefix of the function's parameters.
            outputs: the output values by label.

        Raises:
            AssertionError: if every candidate name belongs to a different function.
        """
        for name in names:
            b.name = name
            graph = b.build(outputs)
            if self.graphs.setdefault(name, graph) == graph:
                self.owners.setdefault(at, name.partition(".")[0])
                break
        else:
            raise AssertionError(f"what runs at {at} is none of {', '.join(names)}")
        for path, type in graph.params:
            self._add(f"{at}.{path}", type, b.inits[path])
        self._define(b)
        return graph

    def program(self, b: Builder, outputs: Mapping[str, str]) -> Graph:
        """Builds a program without unused nodes, adds its parameters and constants, and returns it."""
        graph = _read(b.build(outputs))
        for path, type in graph.params:
            self._add(path, type, b.inits[path])
        self._define(b)
        return graph

    def _define(self, b: Builder) -> None:
        """Adds the constants of a graph. A constant whose name already has a different value gets a number after its
        name."""
        for name, constant in b.constants.items():
            options = (name, *(f"{name}_{i}" for i in range(2, len(self.constants) + 3)))
            free = next(option for option in options if self.constants.get(option, constant) == constant)
            self.constants[free] = constant

    def _add(self, path: str, type: TensorType, init: object) -> None:
        assert isinstance(init, Init)
        shape = tuple(dim for dim in type.shape if isinstance(dim, int))
        self.params.setdefault(path, Parameter(path, shape, type.dtype, init))
        if reason := init.refusal(shape, self.layers):
            self.refused.setdefault(init, f"{path}: {reason}")


def _read(graph: Graph) -> Graph:
    """Returns the graph without the nodes whose values are read neither by a node nor by the caller."""
    while unread := [node for node in graph.nodes if not any(map(graph.uses, node.outputs))]:
        graph = replace(graph, nodes=tuple(node for node in graph.nodes if node not in unread))
    return graph
