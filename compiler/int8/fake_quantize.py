"""The end of training with int8 products ahead: programs that round the inputs of products as the deployed model
will."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from specc.compiler.int8.fake_quantized_lstm import cells_apart
from specc.compiler.int8.form import Factor, Int8Form
from specc.compiler.int8.products import Editor, Source, Unfit, covering, factors_of, integer_products, sites
from specc.compiler.ir.graph import Graph, Node, TensorType, walk
from specc.compiler.ops.region import Call, Scan
from specc.compiler.ops.rounded import RoundRows
from specc.compiler.passes.assign_quant import Allocation, allocation, keeping
from specc.compiler.programs.programs import LoweringError, Phase, Programs
from specc.compiler.spec.spec import QuantSpec
from specc.compiler.spec.train import TrainSpec
from specc.compiler.strict import Problem

SUFFIX = "_rounded"


def round_inputs(programs: Programs, quant: QuantSpec | None, train: TrainSpec) -> Programs:
    """With quantization-aware training of int8 products' inputs, the programs with one more for each phase that
    `train.qat` reaches: its training program with each input of an int8 product rounded to the codes that the deployed
    model will make of it, states of recurrences at every step. Where a decoder is not always fed the truth, what it
    writes instead is of such copies too. Their scales are `programs.buffers`.

    Weights are the caller's to round. All other specs get back what they gave. Raises LoweringError for a quantization
    with nothing to round, a loop over time that is no LSTM, and for a beginning that no share of the run tells.
    """
    if quant is None or train.qat is None:
        return programs
    schemes = allocation(quant, programs.params)
    if not any(scheme.has_grid for scheme in schemes.values()):
        kinds = ", ".join(dict.fromkeys(scheme.label() for scheme in schemes.values()))
        message = (
            f"train.qat rounds weights as quant will store them, and quant keeps all of them as they are, in {kinds}"
        )
        hint = "remove qat, or give quant a scheme that rounds: int8, gptq or round"
        raise LoweringError((Problem(("train", "qat"), "S244", message, hint),))
    if not train.qat.inputs or not any(scheme.integer for scheme in schemes.values()):
        return programs
    phases = tuple(_split((*programs.phases, Phase(1.0, "train", "score")), _begins(train)))
    names = [phase.train.removesuffix(SUFFIX) for phase in phases if phase.rounds]
    if not names:
        return programs
    if train.forcing is not None and any(share < 1 for _, share in train.forcing.points):
        plain = Phase(1.0, "", "").writes
        writes = (f"{plain[0]}{SUFFIX}", f"{plain[1]}{SUFFIX}")
        names += plain
        phases = tuple(replace(phase, writes=writes) if phase.rounds else phase for phase in phases)
    try:
        return replace(rounded(programs, schemes, names), phases=phases)
    except Unfit as error:
        raise LoweringError((error.problem(quant, schemes),)) from None


def rounded(programs: Programs, schemes: Allocation, names: Sequence[str]) -> Programs:
    """With a copy of each of the programs `names`, NAME_rounded, that rounds the inputs of int8 products. Raises
    LoweringError, Unfit."""
    sources = {source.weight: source for source in integer_products(programs, schemes)}
    copied = _Copied(programs, schemes, sources)
    for name in dict.fromkeys(names):
        copied.program(programs.program(name))
    return replace(
        programs,
        functions=(*programs.functions, *copied.made.values(), *copied.functions.values()),
        programs=(*programs.programs, *copied.programs),
        whole=(*programs.whole, *(f"{name}{SUFFIX}" for name in dict.fromkeys(names) if name in programs.whole)),
        buffers=tuple(copied.buffers.items()),
    )


def _begins(train: TrainSpec) -> float:
    """The share of the run after which the learning rate is below the limit of `qat`."""
    assert train.qat is not None
    schedule = train.schedule
    if train.steps is not None:
        return 1 - train.qat.below * schedule.of(train.steps)[1] / train.steps
    if schedule.warmdown_steps:
        message = "train.qat rounds inputs from a share of the run on, and a warm-down in steps has none by the clock"
        hint = "give the schedule warmdown_fraction in place of warmdown_steps, or qat inputs: false"
        raise LoweringError((Problem(("train", "schedule", "warmdown_steps"), "S273", message, hint),))
    return 1 - train.qat.below * schedule.warmdown_fraction


def _split(phases: Sequence[Phase], begins: float) -> Iterable[Phase]:
    """The phases of a run with what comes after `begins` rounded."""
    start = 0.0
    for phase in phases:
        if start < min(begins, phase.until):
            yield replace(phase, until=min(begins, phase.until))
        if begins < phase.until:
            yield replace(phase, train=f"{phase.train}{SUFFIX}", rounds=True)
        start = phase.until


class _Copied:
    """Training programs as they are copied, with the functions that they call.

    Attributes:
        programs: the copies.
        functions: copied functions, by the name of what they are of.
        made: functions that the copies call besides.
        buffers: the types of what the copies read besides parameters, by full name.
    """

    def __init__(self, programs: Programs, schemes: Allocation, sources: Mapping[str, Source]) -> None:
        self._all, self._schemes, self._sources = programs, schemes, sources
        self.programs: list[Graph] = []
        self.functions: dict[str, Graph] = {}
        self.made: dict[str, Graph] = {}
        self.buffers: dict[str, TensorType] = {}

    def program(self, program: Graph) -> None:
        """Copies one program. Raises LoweringError, Unfit."""
        places: dict[str, list[str]] = {}
        for graph, at in sites(replace(self._all, programs=(program,))):
            places.setdefault(graph.name, []).append(at)
        called = [graph for graph in self._all.functions if graph.name in places]
        self._refuse_loops((*called, program), places)
        for graph in (*called, program):
            edited = self._edited(graph, tuple(places[graph.name]))
            if graph is program:
                self.programs.append(edited)
            elif edited != graph:
                self.functions.setdefault(graph.name, edited)

    def _refuse_loops(self, graphs: Sequence[Graph], places: Mapping[str, list[str]]) -> None:
        """Loops over time are not copied: what an LSTM becomes is one already."""
        table = {graph.name: graph for graph in self._all.graphs}
        for loop in [node for graph in graphs for node in graph.nodes if isinstance(node.op, Scan)]:
            assert isinstance(loop.op, Scan)
            loops = [
                (at + node.name, at + name[1:])
                for graph in walk(table, table[loop.op.callee])
                for at in places[graph.name]
                for node in graph.nodes
                for factor in factors_of(graph, node)
                for name in (factor.weight, factor.bias)
                if name and self._schemes[at + name[1:]].integer
            ]
            if loops:
                nodes = " and ".join(dict.fromkeys(node for node, _ in loops))
                message = (
                    "train.qat cannot round the inputs of int8 products in every step of training: "
                    f"{loop.name} loops over time with {nodes} inside, and it can do so only in an lstm by itself"
                )
                names = [name for _, name in loops]
                rule = keeping(self._schemes[names[0]], covering(names))
                hint = f"give qat inputs: false, which rounds weights alone; or {rule}"
                raise LoweringError((Problem(("train", "qat"), "S274", message, hint),))

    def _edited(self, graph: Graph, places: tuple[str, ...]) -> Graph:
        """A graph with its products' inputs rounded, under its new name; itself where there is nothing to do."""
        integer = {f"@{name}" for name, _ in graph.params if self._schemes[places[0] + name].integer}
        editor = _Rounding(cells_apart(graph, integer), places, self._schemes, self._sources, self.made)
        edited = editor.run()
        nodes = tuple(self._calling(node) for node in edited.nodes)
        for at in places:
            self.buffers |= {at + name: type for name, type in editor.added.items()}
        if graph in self._all.functions and nodes == graph.nodes:
            return graph
        return replace(edited, name=f"{graph.name}{SUFFIX}", nodes=nodes)

    def _calling(self, node: Node) -> Node:
        """A node that calls the copy of what it called."""
        if not isinstance(node.op, Call) or node.op.callee not in self.functions:
            return node
        return replace(node, op=replace(node.op, callee=self.functions[node.op.callee].name))


class _Rounding(Editor):
    """A graph while the inputs of its products are rounded."""

    def take(self, form: Int8Form, node: Node, factors: Sequence[Factor]) -> None:
        form.fake_quantize(self, node, factors)

    def coded(self, ref: str, weight: str, before: Node) -> tuple[str, ...]:
        rounding = RoundRows(self.input_bits(weight))
        return (self.add_op(f"{weight[1:]}_input", rounding, (ref, self.inverse(weight)), before),)
