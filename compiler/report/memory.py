"""The memory of a training step: the tensors of the whole run, and the peak of a forward and backward pass.

The passes are simulated on the flattened training program. The forward pass keeps the values that the backward pass
reads, and frees other values after the last reader. The backward pass visits the nodes from the last to the first. At
each node, the backward pass computes the gradients of the node's inputs, and then frees each value that no earlier node
reads.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ir.types import BYTES
from specc.compiler.ops.region import Fused
from specc.compiler.passes.select_kernels import group_pattern
from specc.compiler.plan.plan import Plan
from specc.compiler.report.saved import Pass, Sizes, is_barrier, moved
from specc.compiler.spec.train import TrainSpec

# The number of workspaces of cuBLAS. The forward pass and the backward pass run in separate threads, and each thread
# has one workspace on each of two streams: the stream of steps, and the stream that captures graphs.
WORKSPACES = 4
MASTER = BYTES["f32"]  # master weights, their gradients, optimizer state and averages are f32


class Memory(NamedTuple):
    """The peak memory, in bytes, that Torch allocates in a training step. On a GPU, this is
    `torch.cuda.max_memory_allocated`, without the CUDA context and unused parts of segments.

    Attributes:
        parts: The bytes at the peak, by kind of content, such as parameters.
        groups: The bytes that each fused group saves for the backward pass, by path.
    """

    parts: Mapping[str, int]
    groups: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def memory_of(train: TrainSpec, plan: Plan, graph: Graph, sizes: Sizes) -> Memory:
    """Returns the memory of a training step.

    Args:
        train: the training settings.
        plan: the plan of the target.
        graph: the flattened training program, with groups as nodes.
        sizes: the rows and tokens of a micro-batch, as values of the symbolic dims.
    """
    params = plan.programs.params
    count = sum(param.count for param in params)
    copies = [param for param in params if param.dtype != "f32" or (train.qat is not None and param.storage)]
    derived = [(weight.dtype, weight.count) for weight in plan.programs.derived_weights]
    narrow = [(dtype, size) for dtype, size in (*((p.dtype, p.count) for p in params), *derived) if dtype != "f32"]
    owned = [(train.optimizers[param.optimizer], param.shape) for param in params if param.optimizer is not None]
    simulated = Pass(graph, plan.programs, sizes, "gpu" in plan.target.features)
    groups: Counter[str] = Counter()
    for node in graph.nodes:
        if isinstance(node.op, Fused) and not node.region:
            group = plan.programs.group(node.op.group)
            groups[group_pattern(plan.programs, group, group.scope)] += simulated.groups[node.name].computed
    saved, by_groups, peak = sum(simulated.saved.values()), sum(groups.values()), _Peak(simulated, plan).bytes()
    parts = {
        "masters": 0
        if train.precision.masters == "bf16"
        else MASTER * count,  # with bf16 master weights, matrix products read the masters themselves
        "gradients": MASTER * (count + sum(size for _, size in derived))
        + sum(BYTES[dtype] * size for dtype, size in narrow),
        "optimizer state": MASTER * sum(spec.state_numbers(shape) for spec, shape in owned),
        "average": MASTER * count if train.average is not None else 0,
        "weights of the products": sum(BYTES[param.dtype] * param.count for param in copies)
        + sum(BYTES[dtype] * size for dtype, size in derived),
        "library workspaces": WORKSPACES * plan.target.workspace,
    }
    if (update := _update_bytes(train, plan)) > peak:
        parts["temporaries of an update"] = update
    else:
        activations = {"saved activations": saved - by_groups, "saved by fused groups": by_groups}
        parts |= {**activations, "gradients and temporaries": peak - saved}
    return Memory({name: size for name, size in parts.items() if size}, groups)


def _update_bytes(train: TrainSpec, plan: Plan) -> int:
    shapes: dict[int, list[tuple[int, ...]]] = {}
    for param in plan.programs.params:
        if param.optimizer is not None:
            shapes.setdefault(param.optimizer, []).append(param.shape)
    most = max((train.optimizers[i].update_numbers(owned) for i, owned in shapes.items()), default=0)
    in_bf16 = train.precision.masters == "bf16"
    wide = sum(param.count for param in plan.programs.params if param.dtype == "bf16" and in_bf16)
    return MASTER * (2 * wide + most)


class _Peak:
    """Computes the peak memory of a forward and backward pass: the largest number of bytes that activations, gradients
    and temporary values occupy at the same time."""

    def __init__(self, simulated: Pass, plan: Plan) -> None:
        self._pass, self._plan, self._graph = simulated, plan, simulated.graph
        ends = {ref for node in simulated.graph.nodes if is_barrier(node) for ref in (*node.inputs, *node.outputs)}
        stored = {self._root(ref) for ref in ends} | {*simulated.saved}
        # The values that compiled code writes to memory; None for all values
        self._stored = stored if simulated.compiled else None

    def bytes(self) -> int:
        return max(self._forward(), self._backward())

    def _forward(self) -> int:
        saved, sizes = self._pass.saved, self._pass.sizes
        last = {self._root(ref): i for i, node in enumerate(self._graph.nodes) for ref in node.inputs}
        ends: Counter[int] = Counter()
        peak = live = 0
        for i, node in enumerate(self._graph.nodes):
            peak = max(peak, live + self._inside(node, forward=True))
            for ref, type in zip(node.outputs, node.types, strict=True):
                live += saved.get(f"{ref}#", 0)
                if ref not in self._pass.views and type.floating and self._is_stored(ref):
                    live += type.bytes(sizes)
                    ends[last.get(ref, i)] += 0 if ref in saved else type.bytes(sizes)
            peak = max(peak, live)
            live -= ends[i]
        return peak

    def _backward(self) -> int:
        saved, learned, views = self._pass.saved, self._pass.learned, self._pass.views
        # The first node that reads each saved value; the value is freed after the backward pass of this node
        first: dict[str, str] = {}
        for node in self._graph.nodes:
            for ref in (*node.inputs, *node.outputs):
                first.setdefault(self._root(ref), node.name)
                first.setdefault(f"{ref}#", node.name)
        frees: Counter[str] = Counter()
        for ref, size in (entry for values in (saved, *self._pass.again.values()) for entry in values.items()):
            frees[first.get(ref, "")] += size
        peak = live = sum(saved.values())
        waiting = dict(self._pass.again)
        gradients: dict[str, int] = {}
        for node in reversed(self._graph.nodes):
            if node.region in waiting:  # the backward pass of a recomputed region begins with the region's forward pass
                live += sum(waiting.pop(node.region).values())
                peak = max(peak, live + sum(gradients.values()))
            if node.outputs[0] not in views:
                added = {self._root(ref) for ref in node.inputs if ref in learned}
                new = {ref: size for ref in added if (size := self._gradient_bytes(ref))}
                given = sum(gradients.values())
                gradients |= new
                peak = max(peak, live + sum(gradients.values()), live + given + self._inside(node, forward=False))
                for ref in node.outputs:
                    gradients.pop(ref, None)
            live -= frees[node.name]
        return peak

    def _root(self, ref: str) -> str:
        return self._pass.views.get(ref, ref)

    def _is_stored(self, ref: str) -> bool:
        return self._stored is None or ref in self._stored

    def _gradient_bytes(self, ref: str) -> int:
        return self._graph.types[ref].bytes(self._pass.sizes) if ref[0] == "@" or self._is_stored(ref) else 0

    def _inside(self, node: Node, forward: bool) -> int:
        """Returns the largest number of bytes that a fused group allocates at the same time, including its results. If
        `forward` is true, these are the bytes in the forward graph of the group, otherwise in the backward graph. For a
        node that is not a fused group, returns 0."""
        if not isinstance(node.op, Fused):
            return 0
        group = self._plan.programs.group(node.op.group)
        early, late = moved(group, self._pass.compiled)
        nodes = (*group.forward.nodes, *early) if forward else late
        graphs = (group.forward, group.backward)
        lasting = {ref for _, ref in group.backward.outputs}
        if forward:
            labels = dict(group.forward.outputs)
            lasting = {ref for _, ref in group.forward.outputs[: len(node.types)]}
            lasting |= {labels.get(name, name) for name in self._pass.groups[node.name].needed}
        most = live = 0
        roots: dict[str, str] = {}  # the tensor that a value shares, if nodes write to the value in place
        for inner in nodes:
            for output, written in self._written_over(graphs, inner).items():
                ref = inner.inputs[written]
                roots[inner.outputs[output]] = roots.get(ref, ref)
        lasting |= {roots[ref] for ref in lasting if ref in roots}
        last = {roots.get(ref, ref): i for i, inner in enumerate(nodes) for ref in inner.inputs}
        ends: Counter[int] = Counter()
        for i, inner in enumerate(nodes):
            for ref, type in zip(inner.outputs, inner.types, strict=True):
                if not inner.op.views and ref not in roots:
                    live += type.bytes(self._pass.sizes)
                    ends[last.get(ref, i)] += 0 if ref in lasting else type.bytes(self._pass.sizes)
            most = max(most, live + max(self._workspace(graph, inner) for graph in graphs))
            live -= ends[i]
        return most // group.chunks

    def _written_over(self, graphs: Collection[Graph], node: Node) -> Mapping[int, int]:
        if node.op.written is not None:
            return {0: node.op.written}
        choices = (choice for graph in graphs if (choice := self._plan.choice(graph, node)))
        return next((choice.kernel.written_over(choice.site) for choice in choices), {})

    def _workspace(self, graph: Graph, node: Node) -> int:
        choice = self._plan.choice(graph, node)
        return sum(type.bytes(self._pass.sizes) for type in choice.kernel.workspace(choice.site)) if choice else 0
