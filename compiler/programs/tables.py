"""Tables that the programs of a model share during lowering: functions, parameters, and the names of sizes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specc.compiler.ir.builder import Builder, first_free
from specc.compiler.ir.graph import Graph
from specc.compiler.ir.types import Size, TensorType
from specc.compiler.programs.init import Init, value_of
from specc.compiler.programs.programs import LoweringError, Parameter, Programs
from specc.compiler.strict import Path, Problem

TRAIN = "train"  # the name prefix of programs that only training runs


@dataclass
class Tables:
    """The functions and parameters of a model, in the order in which they were added.

    Attributes:
        layers: The total number of blocks, which formulas outside of stacks read as `layers`.
        places: The spec paths of all nodes so far, by the prefix of the node names.
        graphs: The functions, by name.
        params: The parameters, by path.
        scored: The paths of the parameters that are read outside of training programs.
        refused: For each initialization that a parameter cannot have, a text with the parameter and the reason.
        owners: For each path, the name of the class whose functions run at the path.
        constants: The value and the text of each formula, by the name of the constant in generated code.
        sizes: The sizes with their descriptions, by the name in generated code, such as `D` for a number of features.
    """

    layers: int
    places: dict[str, Path] = field(default_factory=dict)
    graphs: dict[str, Graph] = field(default_factory=dict)
    params: dict[str, Parameter] = field(default_factory=dict)
    scored: set[str] = field(default_factory=set)
    refused: dict[Init, str] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    constants: dict[str, tuple[float, str]] = field(default_factory=dict)
    sizes: dict[str, tuple[int, str]] = field(default_factory=dict)

    def size(self, name: str, value: int, words: str, title: str = "") -> int:
        """Returns `value` as a dim called `name` in generated code.

        If `name` stands for another value, the dim is called `TITLE_NAME`. If both names are taken, the result is a
        plain number.

        Args:
            name: The preferred name, such as `D`.
            value: The size.
            words: The description of the size.
            title: The title of the part that declares the size. By default, `name`.
        """
        for option in (name, f"{title or name}_{name}".upper()):
            if self.sizes.setdefault(option, (value, words))[0] == value:
                return Size(value, option)
        return value

    def programs(
        self,
        name: str,
        programs: tuple[Graph, ...],
        whole: tuple[str, ...],
        context: int,
        place_of: Callable[[Init], Path],
    ) -> Programs:
        """Returns the lowered model.

        Args:
            name: the name of the model.
            programs: the programs of the model.
            whole: the names of the programs that read whole sequences at once.
            context: the maximum number of tokens of a sequence.
            place_of: a function that returns the spec path of an initialization, for errors.

        Raises:
            LoweringError: if a parameter cannot have its initialization.
        """
        if self.refused:
            hint = "change the number or formula"
            refused = self.refused.items()
            raise LoweringError(tuple(Problem(place_of(init), "S221", text, hint) for init, text in refused))
        return Programs(
            name,
            tuple(replace(param, training=path not in self.scored) for path, param in self.params.items()),
            tuple(self.graphs.values()),
            programs,
            tuple(self.places.items()),
            whole,
            context=context,
            constants=tuple((name, *constant) for name, constant in self.constants.items()),
            sizes=tuple((name, *size) for name, size in self.sizes.items()),
        )

    def intern(self, b: Builder, names: Sequence[str], at: str, outputs: Mapping[str, str], layer: int = 0) -> Graph:
        """Builds a function, or returns an equal function of the table.

        Args:
            b: The builder of the function.
            names: Candidate names, most preferred first. The function gets the first name that is free or belongs to an
                equal function.
            at: The path prefix of the function's parameters.
            outputs: The output values by label.
            layer: The index of the block that calls the function, for the initial values of the function's parameters.

        Raises:
            AssertionError: If every candidate name belongs to a different function.
        """
        for name in names:
            b.name = name
            graph = b.build(outputs)
            if self.graphs.setdefault(name, graph) == graph:
                self.owners.setdefault(at, name.partition(".")[0])
                break
        else:
            raise AssertionError(f"all names for the function at {at} are taken by other functions: {', '.join(names)}")
        for path, type in graph.params:
            self._add(f"{at}.{path}", type, b.inits[path], layer, b.learned.get(path, self.layers))
            self.scored.add(f"{at}.{path}")
        self._define(b)
        return graph

    def program(self, b: Builder, outputs: Mapping[str, str]) -> Graph:
        """Builds a program without unused nodes. Adds the parameters and constants of the program to the tables."""
        graph = _read(b.build(outputs))
        for path, type in graph.params:
            # Only the modules of `module_ahead` read `layer`. These modules repeat the last block.
            self._add(path, type, b.inits[path], self.layers - 1, b.learned.get(path, self.layers))
            if not graph.name.startswith(TRAIN):
                self.scored.add(path)
        self._define(b)
        return graph

    def _define(self, b: Builder) -> None:
        for name, constant in b.constants.items():

            def free(option: str, constant: tuple[float, str] = constant) -> bool:
                return self.constants.get(option, constant) == constant

            self.constants[first_free(name, free, "_")] = constant

    def _add(self, path: str, type: TensorType, start: object, layer: int, layers: int) -> None:
        if isinstance(start, float | int | str):
            start = Init(constant=value_of(start, layer=float(layer), layers=float(layers)))
        assert isinstance(start, Init)
        shape, init = tuple(dim for dim in type.shape if isinstance(dim, int)), start.with_layers(layers)
        self.params.setdefault(path, Parameter(path, shape, type.dtype, init))
        if reason := init.refusal(shape):
            self.refused.setdefault(start, f"{path}: {reason}")


def _read(graph: Graph) -> Graph:
    while unread := [node for node in graph.nodes if not any(map(graph.uses, node.outputs))]:
        graph = replace(graph, nodes=tuple(node for node in graph.nodes if node not in unread))
    return graph
