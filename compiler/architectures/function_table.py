"""What the programs of a model share while it is lowered: functions by name, parameters by path."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specc.compiler.blocks.init import Init
from specc.compiler.ir.graph import Builder, Graph, TensorType
from specc.compiler.programs.programs import Parameter


@dataclass
class Functions:
    """Functions and parameters in the order in which they were found. `refused` are starts that a parameter cannot
    have, each with the first such parameter and the reason; `owners` are the classes of functions, by the place where
    they run; `constants` are numbers that formulas give, by a name for code."""

    layers: int
    graphs: dict[str, Graph] = field(default_factory=dict)
    params: dict[str, Parameter] = field(default_factory=dict)
    refused: dict[Init, str] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    constants: dict[str, tuple[float, str]] = field(default_factory=dict)

    def intern(self, b: Builder, names: Sequence[str], at: str, outputs: Mapping[str, str]) -> Graph:
        """The built function under the first free one of `names`, or the equal one that exists; its parameters are
        those under `at`."""
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
        """The built program, without what nothing reads."""
        graph = _read(b.build(outputs))
        for path, type in graph.params:
            self._add(path, type, b.inits[path])
        self._define(b)
        return graph

    def _define(self, b: Builder) -> None:
        """Takes the constants of a graph; two of a name and different values are told apart by a number."""
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
    """The graph without the nodes whose values neither a node nor a caller reads."""
    while unread := [node for node in graph.nodes if not any(map(graph.uses, node.outputs))]:
        graph = replace(graph, nodes=tuple(node for node in graph.nodes if node not in unread))
    return graph
