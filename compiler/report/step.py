"""A training step on one GPU, as a table. Each row describes one kind of node: the number of calls, the floor, and the
measured time if there is one.

A floor is a lower bound of a time: the time of a node's operations and bytes at the target's peak rates.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ir.op import Op, Tape
from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.region import Fused, Scan
from specc.compiler.passes.select_kernels import group_pattern, together
from specc.compiler.plan.lock import Machine, StepTiming
from specc.compiler.plan.plan import Choice, Plan
from specc.compiler.programs.cost import graph_costs
from specc.compiler.programs.programs import flatten
from specc.compiler.records import record
from specc.compiler.report.memory import Memory, memory_of
from specc.compiler.report.saved import aliases, is_barrier
from specc.compiler.spec.spec import Spec
from specc.compiler.spec.train import TrainSpec

LIBRARY, FUSED, POINTWISE, REST = "library products", "fused products", "pointwise outside groups", "rest of the step"
TORCH = "torch"
# Bytes per parameter: the optimizer reads master, gradient and two moments, and writes master, moments and the bf16
# copy of the weight.
OPTIMIZER_BYTES = 4 * 4 + 3 * 4 + 2
RATES = {"match", "lr", "weight_decay", "momentum", "betas", "eps"}


@record
class StepRow:
    """One row of the table of a step: a group of equivalent nodes.

    Attributes:
        node: The path of the nodes, with wildcards.
        work: The class of work.
        what: The description of the op.
        kernel: The library or language of the kernel.
        calls: The number of calls in a step.
        flops: The operations of one call.
        moved: The bytes that one call reads and writes.
        floor_ms: The floor of one call. None if the target's peak rates are unknown.
        ms: The time of one call. None if the call was not measured.
        site: The node. None for work that is not a node of a graph.
        choice: The plan's choice of kernel. None if the plan has no kernel for the node.
    """

    node: str
    work: str
    what: str
    kernel: str
    calls: int
    flops: int
    moved: int
    floor_ms: float | None
    ms: float | None
    site: Site | None = None
    choice: Choice | None = None


class Work(NamedTuple):
    """One class of work in a training step, with its time."""

    name: str
    rows: tuple[StepRow, ...]

    @property
    def ms(self) -> float | None:
        times = [row.ms * row.calls for row in self.rows if row.ms is not None]
        return sum(times) if len(times) == len(self.rows) else None

    @property
    def floor_ms(self) -> float:
        return sum((row.floor_ms or 0.0) * row.calls for row in self.rows)

    @property
    def flops(self) -> int:
        return sum(row.flops * row.calls for row in self.rows)

    @property
    def expected_ms(self) -> float:
        return self.floor_ms if self.ms is None else self.ms


@record
class Step:
    """A training step on one target. `key` is a digest of the step's programs, kernels, tiles and sizes."""

    target: str
    tokens: int
    micro_batches: int
    rows: tuple[StepRow, ...]
    memory: Memory
    key: str
    machine: Machine | None = None
    timing: StepTiming | None = None

    @cached_property
    def works(self) -> tuple[Work, ...]:
        names = dict.fromkeys(row.work for row in self.rows)
        works = [Work(name, tuple(row for row in self.rows if row.work == name)) for name in names]
        return tuple(sorted(works, key=lambda work: (work.name == REST, -work.expected_ms, -work.flops)))

    @property
    def floor_ms(self) -> float:
        return sum(work.floor_ms for work in self.works)

    @property
    def expected_ms(self) -> float:
        """The measured time of the whole step in ms. If the step was not measured, this is the sum of the times of the
        rows, with floors in place of missing times."""
        return self.timing.ms if self.timing is not None else sum(work.expected_ms for work in self.works)

    @property
    def beyond_ms(self) -> float | None:
        """The measured time of the step minus the sum of the times of its classes of work, in ms. Kernels take longer
        within a step than alone. None if a time is missing, or if the difference is not positive."""
        if self.timing is None or any(work.ms is None for work in self.works):
            return None
        beyond = self.timing.ms - sum(work.expected_ms for work in self.works)
        return beyond if beyond > 0 else None

    def share(self, work: Work) -> float:
        """Returns the share of a class of work in the step's time. If the target's peak rates and the times are
        unknown, returns the share of the class in the number of operations."""
        if self.expected_ms:
            return work.expected_ms / self.expected_ms
        return work.flops / max(1, sum(other.flops for other in self.works))


def step_of(spec: Spec, plan: Plan) -> Step:
    """Returns the training step of a plan.

    The step has a row for each attention, matrix product and kernel, in the forward and the backward pass. The step
    also has a row for each other class of work.
    """
    train, window, programs = spec.train, spec.model.window, plan.programs
    count, length = train.micro_batch_rows(window)
    sizes = {"B": count, "T": length, "S": length}
    tokens, micro_batches = train.rows(window) * window, max(1, -(-train.rows(window) // train.at_once()))
    graph = flatten(programs, programs.program("train"), groups=False, derived=False)
    key = _key(train, plan, graph, tokens, sizes)
    locked = plan.locked
    timing = locked.step if locked is not None and locked.step is not None and locked.step.key == key else None
    rows: list[StepRow] = []
    for node in graph.nodes:
        rows += (replace(row, calls=row.calls * micro_batches) for row in _rows_of(plan, graph, node, sizes))
    numbers = sum(param.count for param in programs.params)
    # The backward pass counts as the forward pass. This is an estimate: Torch's compiler decides what is joined. The
    # measured times of three specs are 1.2 to 1.6 times this floor (H200).
    moved = 2 * _pointwise_bytes(graph, sizes)
    for name, bytes, calls in ((POINTWISE, moved, micro_batches), (REST, OPTIMIZER_BYTES * numbers, 1)):
        ms = timing.classes.get(name) if timing is not None else None
        floor = plan.target.floor_ms(0, bytes)
        kernel = "Torch's compiler" if name == POINTWISE else ""
        rows.append(StepRow(name, name, "", kernel, calls, 0, bytes, floor, None if ms is None else ms / calls))
    memory = memory_of(train, plan, graph, sizes)
    machine = locked.machine if locked is not None else None
    return Step(plan.target.name, tokens, micro_batches, tuple(_joined(rows)), memory, key, machine, timing)


def _key(train: TrainSpec, plan: Plan, graph: Graph, tokens: int, sizes: Mapping[str, int]) -> str:
    groups = (f"{group.chunks}\n{group.forward}\n{group.backward}" for group in plan.programs.groups)
    choices = (choice.key for choice in plan.choices if choice.site.node.op.planned)
    # The storage formats do not change the training step.
    words = (*map(without_storage, (str(graph), *groups)), *choices, str(tokens), str(sizes), *plan.programs.recomputed)
    words += ("deterministic",) if any(choice.site.deterministic for choice in plan.choices) else ()
    # Rates do not change the time and the memory of an update.
    words += tuple(entry.model_dump_json(exclude=RATES) for entry in train.optimizers)
    words += tuple(str(param.optimizer) for param in plan.programs.params)
    words += (train.precision.model_dump_json(),)
    words += tuple(str(part is None) for part in (train.average, train.qat, train.clip_norm))
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]


def _rows_of(plan: Plan, graph: Graph, node: Node, sizes: Mapping[str, int]) -> Iterator[StepRow]:
    """Yields the rows of one node of the flattened training program, for one micro-batch. The row of a recomputed
    node's forward pass has two calls."""
    programs, again = plan.programs, 2 if node.region else 1
    if isinstance(node.op, Fused):
        group = programs.group(node.op.group)
        for inner in (group.forward, group.backward):
            for member in inner.nodes:
                if member.op.matrix or member.op.planned:
                    choice = plan.choice(inner, member)
                    inputs = tuple(inner.types[ref] for ref in member.inputs)
                    site = _site(plan, member, inputs, group_pattern(programs, group, member.name))
                    row = _row(plan, choice.site if choice is not None else site, choice, sizes)
                    yield replace(row, calls=again if inner is group.forward else 1)
    elif isinstance(node.op, Scan):
        step = flatten(programs, programs.function(node.op.callee), at=node.op.at)
        times = node.types[-1].extents(sizes)[1]
        costs = list(graph_costs(step, {**sizes}))
        flops, moved = (times * sum(values) for values in zip(*((c.flops, c.bytes) for c in costs), strict=True))
        path, what = _pattern(node.name), f"a loop of {times:,} steps"
        for name, factor in ((path, again), (f"{path}.grad", 2)):
            yield _plain_row(plan, name, "recurrence", what, factor * flops, factor * moved)
    elif node.op.matrix:
        inputs = tuple(_as_computed(graph.types[ref]) for ref in node.inputs)
        yield replace(_row(plan, _site(plan, node, inputs, _pattern(node.name)), None, sizes), calls=again)
        backward = _Rule(node, graph)
        if node.op.derivative(backward) is None:
            flops = node.op.flops(inputs, node.types, sizes)
            moved = sum(type.bytes(sizes) for type in (*inputs, *node.types))
            name = f"{_pattern(node.name)}.grad"
            yield _plain_row(plan, name, node.op.work, f"gradient of {node.op.words}", 2 * flops, 2 * moved, node.op)
        for suffix, op, types in backward.added:
            gradient = Node(f"{node.name}.{suffix}", op, (), op.infer(types))
            if op.matrix:
                yield _row(plan, _site(plan, gradient, types, _pattern(gradient.name)), None, sizes)


class _Rule(Tape):
    """A tape that records each node of a derivative rule: its suffix, its op and its input types."""

    def __init__(self, node: Node, graph: Graph) -> None:
        self._node = node
        self._types = {ref: _as_computed(type) for ref, type in graph.types.items()} | {
            f"d{i}": type for i, type in enumerate(node.types)
        }
        self.added: list[tuple[str, Op, tuple[TensorType, ...]]] = []

    def type(self, index: int) -> TensorType:
        return self._types[self._node.inputs[index]]

    def input(self, index: int) -> str:
        return self._node.inputs[index]

    def output(self, index: int) -> str:
        return self._node.outputs[index]

    def grad(self, index: int = 0) -> str:
        return f"d{index}"

    def add(self, suffix: str, op: Op, inputs: Sequence[str]) -> str:
        types = tuple(self._types[ref] for ref in inputs)
        self.added.append((suffix, op, types))
        name = f"added{len(self.added)}"
        self._types |= {name if i == 0 else f"{name}:{i}": type for i, type in enumerate(op.infer(types))}
        return name


def _site(plan: Plan, node: Node, inputs: tuple[TensorType, ...], path: str) -> Site:
    return Site(node, inputs, plan.target, path, plan.name, plan.programs.context)


def _row(plan: Plan, site: Site, choice: Choice | None, sizes: Mapping[str, int]) -> StepRow:
    op, fused = site.node.op, choice is not None and bool(choice.rendered.function)
    flops = op.flops(site.inputs[: op.arity] if site.node.epilogue else site.inputs, site.node.types, sizes)
    between = choice.kernel.between(site) if choice is not None else ()
    moved = site.node.op.moved(site.inputs, site.node.types, sizes) + sum(type.bytes(sizes) for type in between)
    work = op.work if op.work != "products" else FUSED if fused else LIBRARY
    kernel = choice.kernel.made_of if choice is not None and fused else TORCH
    label = choice.site.label if choice is not None else site.label
    floor, ms = plan.target.floor_ms(flops // op.speed, moved), _measured(plan, site, choice, sizes)
    return StepRow(label, work, words_of(site), kernel, 1, flops, moved, floor, ms, site, choice)


def _plain_row(plan: Plan, node: str, work: str, what: str, flops: int, moved: int, op: Op | type[Op] = Op) -> StepRow:
    floor = plan.target.floor_ms(flops // op.speed, moved)
    return StepRow(node, LIBRARY if work == "products" else work, what, TORCH, 1, flops, moved, floor, None)


def _measured(plan: Plan, site: Site, choice: Choice | None, sizes: Mapping[str, int]) -> float | None:
    """Returns the measured time of one call in ms, for the rows of a step. An op that mixes tokens takes longer per row
    for longer sequences, so a measurement with sequences of another length does not apply to such an op."""
    entry = choice.measured if choice is not None else None
    if entry is not None and site.node.op.mixes_tokens and entry.length not in (None, sizes["T"]):
        return None
    timings = plan.locked.timings if plan.locked is not None else {}
    alike = (timing for key, timing in timings.items() if without_storage(key) == site.key)
    timing = entry or timings.get(site.key) or next(alike, None)
    return timing.ms * sizes["B"] * sizes["T"] / timing.rows if timing is not None else None


def _as_computed(type: TensorType) -> TensorType:
    return TensorType(type.shape, type.dtype)


def without_storage(key: str) -> str:
    """Returns the key of a node without the storage formats of its matrices. Old keys in locks may contain storage
    formats, such as `int5` in `int5:bf16[512,512]`."""
    return re.sub(r"[\w()]+:(?=\w+\[)", "", key)


def words_of(site: Site) -> str:
    epilogue = site.epilogue
    words = site.node.op.words + (f", `{epilogue.outputs[0]}`" if epilogue is not None else "")
    saved = ", ".join((epilogue or site.node.op).output_labels[1:])
    return f"{words}, also {saved}" if saved else words


def _joined(rows: Iterable[StepRow]) -> Iterator[StepRow]:
    alike: dict[object, list[StepRow]] = {}
    for row in rows:
        key = (row.site.key, row.choice.rendered.module if row.choice else "") if row.site is not None else row.node
        alike.setdefault(key, []).append(row)
    for group in alike.values():
        labels = list(dict.fromkeys(row.node for row in group))
        choice = next((row.choice for row in group if row.choice is not None), None)
        yield replace(group[0], choice=choice, node=together(labels), calls=sum(row.calls for row in group))


def _pattern(name: str) -> str:
    return ".".join("*" if word.isdigit() else re.sub(r"_run\d+$", "", word) for word in name.split("."))


def _pointwise_bytes(graph: Graph, sizes: Mapping[str, int]) -> int:
    """Returns the smallest number of bytes that the pointwise nodes of a forward pass can move. Matrix products,
    attention and groups are barriers.

    All nodes between the same barriers count as one kernel. This kernel reads each of its inputs once. If another
    kernel reads a value, the value is written once. No other values are written.
    """
    views, parts = aliases(graph, sizes, parts=False), aliases(graph, sizes)
    # For each value: the stage of the value, and whether a kernel between barriers computes the value
    computed: dict[str, tuple[int, bool]] = {}
    read: set[tuple[int, str]] = set()
    written: set[str] = set()
    for node in graph.nodes:
        inputs = [views.get(ref, ref) for ref in node.inputs if ref[0] != "$"]
        stage = max((computed.get(ref, (0, False))[0] for ref in inputs), default=0)
        if len(node.types) > 1 and node.outputs[0] in parts:
            computed |= dict.fromkeys(node.outputs, computed.get(inputs[0], (0, False)))
            continue
        between = not is_barrier(node) and node.outputs[0] not in views
        for ref in inputs:
            before, pointwise = computed.get(ref, (0, False))
            if between and not (pointwise and before == stage):
                read.add((stage, ref))
            if pointwise and (not between or before < stage) and node.outputs[0] not in views:
                written.add(ref)
        for ref in node.outputs:
            computed[ref] = (stage + is_barrier(node), between)
    types = graph.types
    return sum(types[ref].bytes(sizes) for _, ref in read) + sum(types[ref].bytes(sizes) for ref in written)
