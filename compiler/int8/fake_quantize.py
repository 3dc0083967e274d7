"""Quantization-aware training: copies of training programs that fake-quantize the inputs of int8 products."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from specc.compiler.changing_values import points_of
from specc.compiler.int8.editor import Editor, Source, Unfit, covering
from specc.compiler.int8.fake_quantized_lstm import cells_apart
from specc.compiler.int8.products import factors_of, integer_products, places_of, rewritten
from specc.compiler.ir.graph import Graph, Node, walk
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.region import Scan, calling
from specc.compiler.ops.rounded import RoundRows
from specc.compiler.passes.assign_quant import Allocation, allocation, keeping
from specc.compiler.programs.programs import LoweringError, Phase, Programs
from specc.compiler.quant.none import Unquantized
from specc.compiler.spec.spec import QuantSpec
from specc.compiler.spec.train import TrainSpec
from specc.compiler.strict import Problem

SUFFIX = "_rounded"


def round_inputs(programs: Programs, quant: QuantSpec | None, train: TrainSpec) -> Programs:
    """Adds training programs that fake-quantize the inputs of int8 products, if `train.qat` requests them.

    A phase is a part of the training run with its own training program. For each phase in which `train.qat` applies, a
    copy of the training program is added. The copy rounds each input of an int8 product to a value that the deployed
    model's codes can represent. Recurrent states are rounded at every step.

    If the decoder is not always teacher-forced, copies of the programs that compute the decoder's inputs are added too.
    The scales of the inputs are `buffers` of the returned programs. The caller rounds the weights.

    Args:
        programs: The programs, before any pass that rewrites graphs.
        quant: The quantization of the spec, or None.
        train: The training spec.

    Returns:
        The programs with the copies and the new phases. If the spec requests no rounding of inputs, the programs are
        unchanged.

    Raises:
        LoweringError: If `train.qat` is set but no scheme of the spec rounds parameters, or if a product cannot be
            computed in int8. Also if a loop over time that is not an LSTM contains int8 products, or if the spec does
            not determine when rounding begins.
    """
    if quant is None or train.qat is None:
        return programs
    schemes = allocation(quant, programs.stored)
    if not any(scheme.has_grid for scheme in schemes.values()):
        kinds = ", ".join(dict.fromkeys(scheme.label() for scheme in schemes.values()))
        message = f"`train.qat` rounds weights as `quant` stores them, but `quant` stores them unrounded, in {kinds}"
        hint = "remove `qat`, or give `quant` a scheme that rounds: int8, gptq or round"
        raise LoweringError((Problem(("train", "qat"), "S244", message, hint),))
    if not train.qat.inputs or not any(scheme.integer for scheme in schemes.values()):
        return programs
    phases = tuple(_split((*programs.phases, Phase(1.0, "train", "score")), _begins(train)))
    names = [phase.train.removesuffix(SUFFIX) for phase in phases if phase.rounds]
    if not names:
        return programs
    forcing = train.teacher_forcing
    if forcing is not None and any(share < 1 for _, share in points_of(forcing)):
        plain = Phase(1.0, "", "").writes
        writes = (f"{plain[0]}{SUFFIX}", f"{plain[1]}{SUFFIX}")
        names += plain
        phases = tuple(replace(phase, writes=writes) if phase.rounds else phase for phase in phases)
    try:
        return replace(rounded(programs, schemes, names), phases=phases)
    except Unfit as error:
        raise LoweringError((error.problem(quant, schemes),)) from None


def rounded(programs: Programs, schemes: Allocation, names: Sequence[str]) -> Programs:
    """Returns the programs with a copy of each program in `names`. The copy is named NAME_rounded, and rounds the
    inputs of int8 products.

    Raises:
        LoweringError: If a loop over time other than an LSTM contains int8 products.
        Unfit: If a product cannot be computed in int8.
    """
    sources = {source.weight: source for source in integer_products(programs, schemes)}
    copied = _Copied(programs, schemes, sources)
    for name in dict.fromkeys(names):
        copied.program(programs.program(name))
    return replace(
        programs,
        functions=(*programs.functions, *copied.added.values(), *copied.functions.values()),
        programs=(*programs.programs, *copied.programs),
        whole=(*programs.whole, *(f"{name}{SUFFIX}" for name in dict.fromkeys(names) if name in programs.whole)),
        buffers=tuple(copied.buffers.items()),
    )


def _begins(train: TrainSpec) -> float:
    assert train.qat is not None
    schedule = train.schedule
    left = schedule.below(train.qat.below)
    if train.steps is not None:
        return 1 - left * schedule.of(train.steps)[1] / train.steps
    if schedule.warmdown_steps:
        message = (
            "with `budget_seconds` and `warmdown_steps`, it is unknown at which share of the run `train.qat` begins"
        )
        hint = "use `warmdown_fraction` instead of `warmdown_steps`, or set `inputs: false` in `qat`"
        raise LoweringError((Problem(("train", "schedule", "warmdown_steps"), "S273", message, hint),))
    return 1 - left * (1 - schedule.warmup_fraction if schedule.falls else schedule.warmdown_fraction)


def _split(phases: Sequence[Phase], begins: float) -> Iterable[Phase]:
    """Yields the phases of a run, with an additional boundary at the fraction `begins` of the run. The phases after
    this boundary train the copies that round inputs."""
    start = 0.0
    for phase in phases:
        if start < min(begins, phase.until):
            yield replace(phase, until=min(begins, phase.until))
        if begins < phase.until:
            yield replace(phase, train=f"{phase.train}{SUFFIX}", rounds=True)
        start = phase.until


class _Copied:
    """Copies of training programs, with the functions that they call.

    Attributes:
        programs: The copies.
        functions: Copied functions, by the name of the original.
        added: New functions that the copies call.
        buffers: The types of the values that the copies read in addition to parameters, by full name.
    """

    def __init__(self, programs: Programs, schemes: Allocation, sources: Mapping[str, Source]) -> None:
        # Parameters that only training reads, such as the parameters of the modules of a loss, are never stored
        unstored = dict.fromkeys((param.name for param in programs.params), Unquantized(scheme="none", dtype="f32"))
        self._all, self._schemes, self._sources = programs, {**unstored, **schemes}, sources
        self.programs: list[Graph] = []
        self.functions: dict[str, Graph] = {}
        self.added: dict[str, Graph] = {}
        self.buffers: dict[str, TensorType] = {}

    def program(self, program: Graph) -> None:
        """Copies one program, and the functions that it calls.

        Raises:
            LoweringError: If a loop over time other than an LSTM contains int8 products.
            Unfit: If a product cannot be computed in int8.
        """
        places = places_of(replace(self._all, programs=(program,)))
        called = [graph for graph in self._all.functions if graph.name in places]
        self._refuse_loops((*called, program), places)
        for graph in (*called, program):
            edited = self._edited(graph, tuple(places[graph.name]))
            if graph is program:
                self.programs.append(edited)
            elif edited != graph:
                self.functions.setdefault(graph.name, edited)

    def _refuse_loops(self, graphs: Sequence[Graph], places: Mapping[str, list[str]]) -> None:
        """Raises LoweringError if a loop over time contains int8 products, because this class cannot copy such a loop.
        An LSTM is a single node in the original graphs. Only the copy of an LSTM is a loop."""
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
                    f"`train.qat` cannot round the inputs of {nodes}, because the stages between an additive stage "
                    "and its `query` run token by token"
                )
                names = [name for _, name in loops]
                rule = keeping(self._schemes[names[0]], covering(names))
                hint = f"set `inputs: false` in `qat`, which then rounds only weights; or {rule}"
                raise LoweringError((Problem(("train", "qat"), "S274", message, hint),))

    def _edited(self, graph: Graph, places: tuple[str, ...]) -> Graph:
        """Returns a copy of the graph under a new name. The copy rounds the inputs of int8 products. A function without
        int8 products is returned unchanged."""
        integer = {f"@{name}" for name, _ in graph.params if self._schemes[places[0] + name].integer}
        editor = _Rounding(cells_apart(graph, integer), places, self._schemes, self._sources, self.added)
        edited = rewritten(editor, fake=True)
        names = {name: function.name for name, function in self.functions.items()}
        nodes = tuple(calling(node, names) for node in edited.nodes)
        for at in places:
            self.buffers |= {at + name: type for name, type in editor.added.items()}
        if graph in self._all.functions and nodes == graph.nodes:
            return graph
        return replace(edited, name=f"{graph.name}{SUFFIX}", nodes=nodes)


class _Rounding(Editor):
    """An editor that changes a training graph to round the inputs of int8 products."""

    def coded(self, ref: str, weight: str, before: Node) -> tuple[str, ...]:
        rounding = RoundRows(self.input_bits(weight))
        return (self.add_op(f"{weight[1:]}_input", rounding, (ref, self.inverse(weight)), before),)
