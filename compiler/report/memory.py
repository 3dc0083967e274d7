"""The memory of a training step: the tensors of the whole run, and the peak of a forward and backward pass.

A pass is simulated on the flattened training program. The forward keeps the values that the backward reads. The
backward then visits the nodes from the last to the first: it computes the gradients of the inputs of a node, and frees
the values that no earlier node reads.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specc.compiler.expr import Expr, derive, reread, variables
from specc.compiler.expr.values import Binary, Call, Var, children
from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.ir.types import BYTES, TensorType
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.region import Fused, Scan
from specc.compiler.passes.select_kernels import group_pattern
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import Group, Programs, flatten
from specc.compiler.spec.train import TrainSpec

MASTER = BYTES["f32"]  # masters, their gradients, optimizer state and averages are f32
Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Memory:
    """The least bytes of a training step.

    Attributes:
        parts: the bytes of each kind of content, such as parameters.
        groups: the bytes that each fused group saves in a pass, by path.
    """

    parts: Mapping[str, int]
    groups: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def memory_of(train: TrainSpec, plan: Plan, graph: Graph, sizes: Sizes) -> Memory:
    """Returns the memory of a step.

    On a GPU, Torch's compiler recomputes the values between products, attention and groups. On the CPU, where code is
    not compiled, the forward saves what the derivative of each operation reads.

    Args:
        train: the training settings.
        plan: the plan of the target.
        graph: the flattened training program, with groups as nodes.
        sizes: the rows and tokens of a micro-batch, as the symbolic dims.
    """
    params = plan.programs.params
    count = sum(param.count for param in params)
    copies = [param for param in params if param.dtype != "f32" or (train.qat is not None and param.storage)]
    owned = ((train.optimizers[param.optimizer], param.shape) for param in params if param.optimizer is not None)
    groups: Counter[str] = Counter()
    for node in graph.nodes:
        if isinstance(node.op, Fused):
            group = plan.programs.group(node.op.group)
            groups[group_pattern(plan.programs, group, group.scope)] += kept_bytes(group, sizes)
    compiled = "gpu" in plan.target.features
    saved = _saved(graph, sizes, plan.programs, compiled)
    saved_bytes = sum(saved.values())
    peak = _Pass(graph, sizes, plan.programs, saved, compiled).peak()
    parts = {
        "masters": 0 if train.precision.masters == "bf16" else MASTER * count,  # the weights of the products are they
        "gradients": MASTER * count + sum(BYTES[param.dtype] * param.count for param in params if param.dtype != "f32"),
        "optimizer state": MASTER * sum(spec.state_numbers(shape) for spec, shape in owned),
        "average": MASTER * count if train.average is not None else 0,
        "weights of the products": sum(BYTES[param.dtype] * param.count for param in copies),
        "saved activations": saved_bytes,
        "saved by fused groups": sum(groups.values()),
        "gradients and temporaries": peak - saved_bytes - sum(groups.values()),
    }
    return Memory({name: size for name, size in parts.items() if size}, groups)


def _saved(graph: Graph, sizes: Sizes, programs: Programs, compiled: bool) -> Mapping[str, int]:
    """Returns the bytes of the values that the forward saves for the backward, by value.

    An entry `value#` holds values without a name in the graph: intermediate values of an expression that is not
    compiled, and those inside a recurrence. Values that groups compute are left out.
    """
    saved = Counter(saved_values(graph, sizes) if compiled else _eagerly_saved(graph, sizes, programs))
    for node in graph.nodes:
        size = node.op.saved_inside(node.types, sizes)
        if isinstance(node.op, Scan):
            step = flatten(programs, programs.function(node.op.callee), at=node.op.at)
            read = {name for name, _ in step.inputs[node.op.carried :]}  # by all steps, or parts of a sequence
            values = _saved(step, sizes, programs, compiled).items()
            size = node.types[-1].extents(sizes)[1] * sum(size for ref, size in values if ref not in read)
        if size:
            saved[f"{node.outputs[0]}#"] += size
    return saved


def kept_bytes(group: Group, sizes: Sizes) -> int:
    """Returns the bytes that a group computes for its backward. With chunks, these are its gradients, of which those of
    weights are sums in f32, and the values of one chunk."""
    computed = set(group.saved) - {name for name, _ in group.forward.inputs}
    values = (type for name, type in group.backward.inputs if name in computed)
    size = sum(type.bytes(sizes) // (group.chunks if _has_rows(type) else 1) for type in values)
    if group.chunks == 1:
        return size
    gradients = [group.backward.types[ref] for _, ref in group.backward.outputs]
    wide = (0 if _has_rows(type) else MASTER * type.count(sizes) for type in gradients)
    return size + sum(max(type.bytes(sizes), sums) for type, sums in zip(gradients, wide, strict=True))


def _has_rows(type: TensorType) -> bool:
    return bool(type.shape) and isinstance(type.shape[0], str)


def aliases(graph: Graph, sizes: Sizes, parts: bool = True) -> Mapping[str, str]:
    """Maps each value that is a view to the value it is a view of.

    A node returns views if it has one input, computes nothing, and keeps the dtype and, in all of its outputs, the
    number of elements. Without `parts`, a part of a value is a value of its own.
    """
    views: dict[str, str] = {}
    for node in graph.nodes:
        inputs = [ref for ref in node.inputs if ref[0] not in "@$"]
        if len(inputs) == 1 and not is_barrier(node) and (parts or len(node.types) == 1):
            source = graph.types[inputs[0]]
            same = {source.dtype} == {type.dtype for type in node.types}
            same = same and source.count(sizes) == sum(type.count(sizes) for type in node.types)
            if same and node.op.flops([graph.types[ref] for ref in node.inputs], node.types, sizes) == 0:
                views |= dict.fromkeys(node.outputs, views.get(inputs[0], inputs[0]))
    return views


def is_barrier(node: Node) -> bool:
    """Returns whether Torch's compiler cannot fuse across a node."""
    return isinstance(node.op, Fused | Scan) or node.op.matrix


def saved_values(graph: Graph, sizes: Sizes) -> Mapping[str, int]:
    """Returns the bytes of the values that a compiled forward saves for the backward, by value, without those that
    groups compute inside.

    The forward saves the activations that products, attention and groups read. Torch's compiler recomputes the values
    that other derivatives read. The forward also saves the inputs of this recomputation: the nearest values that are
    saved anyway or that a barrier returns.
    """
    views = aliases(graph, sizes)
    barriers = {ref for node in graph.nodes if is_barrier(node) for ref in node.outputs}
    saved = {views.get(ref, ref) for node in graph.nodes if is_barrier(node) for ref in node.inputs}
    waiting = [views.get(ref, ref) for node in graph.nodes if not is_barrier(node) for ref in _derivative_reads(node)]
    visited: set[str] = set()
    while waiting:
        if (ref := waiting.pop()) in visited:
            continue
        visited.add(ref)
        if ref in barriers:
            saved.add(ref)
        elif ref not in saved and (node := graph.by_name.get(node_of(ref))) is not None:
            waiting += (views.get(ref, ref) for ref in node.inputs)
    return _sizes_of(graph, sizes, saved)


def _derivative_reads(node: Node) -> frozenset[str]:
    """Returns the inputs that the derivative of a node reads. The derivative of a copy reads no inputs."""
    if not isinstance(node.op, Pointwise):
        return frozenset(node.inputs if node.op.flops_per_output else ())
    values = dict(zip(node.op.variables, node.inputs, strict=True))
    slopes = (derive(reread(text), name) for text in node.op.outputs for name in values)
    return frozenset(values[name] for slope in slopes for name in variables(slope))


def _eagerly_saved(graph: Graph, sizes: Sizes, programs: Programs) -> Mapping[str, int]:
    """Returns the bytes of the values that Torch saves if code is not compiled, as `_saved`."""
    views, learned = aliases(graph, sizes), _learned(graph)
    saved: set[str] = set()
    inside: Counter[str] = Counter()
    for node in graph.nodes:
        if node.outputs[0] in views or not learned.intersection(node.outputs):
            continue
        if isinstance(node.op, Pointwise):
            names = dict(zip(node.op.variables, node.inputs, strict=True))
            for text, out in zip(node.op.outputs, node.outputs, strict=True):
                expr = reread(text)
                for value in _read_by_autograd(expr, {name for name, ref in names.items() if ref in learned}):
                    if isinstance(value, Var):
                        saved.add(names[value.name])
                    elif value == expr:
                        saved.add(out)
                    else:
                        inside[out] += node.types[0].bytes(sizes)
        elif isinstance(node.op, Fused):
            group = programs.group(node.op.group)
            names = dict(zip((name for name, _ in group.forward.inputs), node.inputs, strict=True))
            saved.update(names[name] for name in group.saved if name in names)
        elif is_barrier(node) or node.op.flops_per_output:
            saved.update(node.inputs)
            saved.update(node.outputs if node.op.matrix and node.op.mixes_tokens else ())
    values = {views.get(ref, ref) for ref in saved}
    return {**_sizes_of(graph, sizes, values), **{f"{out}#": size for out, size in inside.items()}}


def _read_by_autograd(expr: Expr, learned: Iterable[str]) -> frozenset[Expr]:
    """Returns the parts of an expression that its derivatives read, if each operation is one of Torch.

    `learned` are the variables that need a gradient.
    """
    names = set(learned)
    read: set[Expr] = set()

    def visit(part: Expr) -> bool:
        """Returns whether a part needs a gradient."""
        needs = [visit(inner) for inner in children(part)]
        match part:
            case Var(name):
                return name in names
            case Binary("*" | "/", a, b) if any(needs):
                read.update(other for other, need in ((b, needs[0]), (a, needs[1])) if need and variables(other))
            case Binary("**", a, _) if any(needs):
                read.add(a)
            case Call(function, args) if any(needs):
                read.update([part] if function in _OF_RESULT else [arg for arg in args if variables(arg)])
        return any(needs)

    visit(expr)
    return frozenset(read)


_OF_RESULT = ("relu", "sigmoid", "tanh", "exp", "sqrt")  # functions whose derivative in Torch reads their result


def _sizes_of(graph: Graph, sizes: Sizes, refs: Iterable[str]) -> dict[str, int]:
    """Returns the bytes of the floating values among `refs` that are not parameters."""
    return {
        ref: graph.types[ref].bytes(sizes) for ref in sorted(refs) if ref[0] not in "@$" and graph.types[ref].floating
    }


def _learned(graph: Graph) -> set[str]:
    """Returns the values that need a gradient, parameters among them."""
    learned = {f"@{name}" for name, type in graph.params if type.floating}
    for node in graph.nodes:
        if learned.intersection(node.inputs):
            learned.update(ref for ref, type in zip(node.outputs, node.types, strict=True) if type.floating)
    return learned


class _Pass:
    """The backward of a pass. `saved` are the bytes of the values that the forward saves, by value."""

    def __init__(
        self, graph: Graph, sizes: Sizes, programs: Programs, saved: Mapping[str, int], compiled: bool
    ) -> None:
        self._graph, self._sizes, self._programs, self._saved = graph, sizes, programs, saved
        self._views = aliases(graph, sizes)
        self._learned = _learned(graph)
        ends = {ref for node in graph.nodes if is_barrier(node) for ref in (*node.inputs, *node.outputs)}
        self._computed = {self._views.get(ref, ref) for ref in ends} if compiled else None  # None: all values

    def peak(self) -> int:
        """Returns the most bytes that are in use at once: saved values and gradients."""
        first: dict[str, str] = {}  # the first node that reads a saved value, after whose backward it is free
        for node in self._graph.nodes:
            for ref in (*node.inputs, *node.outputs):
                first.setdefault(self._views.get(ref, ref), node.name)
                first.setdefault(f"{ref}#", node.name)
        frees: Counter[str] = Counter()
        for ref, size in self._saved.items():
            frees[first.get(ref, "")] += size
        live = sum(self._saved.values())
        for node in self._graph.nodes:
            if isinstance(node.op, Fused):
                frees[node.name] += (kept := kept_bytes(self._programs.group(node.op.group), self._sizes))
                live += kept
        peak, gradients = live, dict[str, int]()
        for node in reversed(self._graph.nodes):
            added = {self._views.get(ref, ref) for ref in node.inputs if ref in self._learned}
            if node.outputs[0] not in self._views:
                new = {ref: size for ref in added if (size := self._gradient_bytes(ref))}
                forward, backward = self._inside(node)
                peak = max(peak, live + forward, live + sum(gradients.values()) + sum(new.values()) + backward)
                gradients |= new
                for ref in node.outputs:
                    gradients.pop(ref, None)
            live -= frees[node.name]
        return peak

    def _gradient_bytes(self, ref: str) -> int:
        """Returns the bytes of the gradient of a value; 0 if compiled code does not write it to memory."""
        if ref[0] != "@" and self._computed is not None and ref not in self._computed:
            return 0
        return self._graph.types[ref].bytes(self._sizes)

    def _inside(self, node: Node) -> tuple[int, int]:
        """Returns the most bytes of the values that the forward and the backward of a group compute for themselves."""
        if not isinstance(node.op, Fused):
            return 0, 0
        group = self._programs.group(node.op.group)
        forward, backward = (
            _transient(graph, self._sizes, group.saved, self._computed is None) // group.chunks
            for graph in (group.forward, group.backward)
        )
        return forward, backward


def _transient(graph: Graph, sizes: Sizes, saved: Iterable[str], eager: bool) -> int:
    """Returns the most bytes of values of a graph that live at once, without its inputs and outputs and `saved`. If it
    runs as `eager` code, the temporary values of its operations count too."""
    last = {ref: i for i, node in enumerate(graph.nodes) for ref in node.inputs}
    outputs = {*saved, *(ref for _, ref in graph.outputs)}
    most = live = 0
    ends: Counter[int] = Counter()
    for i, node in enumerate(graph.nodes):
        for ref, type in zip(node.outputs, node.types, strict=True):
            if ref not in outputs:
                live += type.bytes(sizes)
                ends[last.get(ref, i)] += type.bytes(sizes)
        inside = node.op.temporaries * graph.types[node.inputs[0]].bytes(sizes) if eager and node.inputs else 0
        most = max(most, live + inside)
        live -= ends[i]
    return most
