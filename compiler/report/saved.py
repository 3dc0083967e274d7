"""The values that the forward pass of a training program saves for its backward pass.

On the CPU, code is not compiled. The forward pass saves the values that the derivative of each Torch operation reads.
On a GPU, Torch's compiler saves the values around matrix products, attention and groups, and recomputes all other
values.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

from specc.compiler.expr import Expr, derive, reread, variables
from specc.compiler.expr.values import Binary, Call, Var, children
from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.ir.types import BYTES, TensorType
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.region import Fused, Scan
from specc.compiler.programs.programs import Group, Programs, flatten
from specc.compiler.records import record

Sizes = Mapping[str, int]
_F32 = BYTES["f32"]


def aliases(graph: Graph, sizes: Sizes, parts: bool = True) -> Mapping[str, str]:
    """Maps each view to the value with which it shares memory.

    The outputs of a node are views if the node has one input, computes nothing, and preserves the dtype. Together, the
    outputs must have as many elements as the input. If `parts` is false, the outputs of nodes with several outputs do
    not count as views.
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


def learned_values(graph: Graph) -> set[str]:
    learned = {f"@{name}" for name, type in graph.params if type.floating}
    for node in graph.nodes:
        if learned.intersection(node.inputs):
            learned.update(ref for ref, type in zip(node.outputs, node.types, strict=True) if type.floating)
    return learned


class SavedByGroup(NamedTuple):
    """The values that a fused group saves for its backward pass. The group is one node of a graph.

    Attributes:
        read: The values of the graph that the backward pass reads: inputs and results of the group.
        needed: The values that the backward pass reads, by their names in the group.
        inside: The bytes of the values that the group computes for its backward pass, without the results of the group.
        computed: The bytes of the values that the group computes for its backward pass, including the results of the
            group. Views of the group's inputs are not computed values.
    """

    read: frozenset[str]
    needed: frozenset[str]
    inside: int
    computed: int


@record
class Pass:
    """One forward and backward pass of a flattened training program, with groups as nodes.

    Attributes:
        graph: The program.
        programs: The programs of the model, with the groups and functions that `graph` uses.
        sizes: The rows and tokens of a micro-batch, as values of the symbolic dims.
        compiled: Whether Torch's compiler compiles the program.
    """

    graph: Graph
    programs: Programs
    sizes: Sizes
    compiled: bool

    @cached_property
    def views(self) -> Mapping[str, str]:
        return aliases(self.graph, self.sizes)

    @cached_property
    def learned(self) -> frozenset[str]:
        return frozenset(learned_values(self.graph))

    @cached_property
    def groups(self) -> Mapping[str, SavedByGroup]:
        nodes = (node for node in self.graph.nodes if isinstance(node.op, Fused))
        return {node.name: self._saved_by(node) for node in nodes}

    @cached_property
    def saved(self) -> Mapping[str, int]:
        """The bytes of each value that the forward pass saves. As in `_read`, an entry `REF#` stands for values without
        a name in the graph.

        If the backward pass recomputes a region of the graph, only the inputs and some results of the region are saved.
        """
        inputs = {self.views.get(ref, ref) for node in self.graph.nodes if node.region for ref in node.inputs}
        inputs = {ref for ref in inputs if self._region(ref) == "" or self._leaves(ref)}
        return {ref: size for ref, size in self._read.items() if not self._is_computed_again(ref)} | self.bytes_of(
            inputs
        )

    @cached_property
    def again(self) -> Mapping[str, Mapping[str, int]]:
        regions: dict[str, dict[str, int]] = {}
        for ref, size in self._read.items():
            if self._is_computed_again(ref):
                regions.setdefault(self._region(ref), {})[ref] = size
        return regions

    def _region(self, ref: str) -> str:
        node = self.graph.by_name.get(node_of(ref).removesuffix("#"))
        return node.region if node is not None else ""

    def _leaves(self, ref: str) -> bool:
        """Returns whether the forward pass saves the value `ref` of a recomputed region. The value is saved if the
        program returns the value, or if another recomputed region reads the value. Code that is not compiled also saves
        the value if a node outside of all recomputed regions reads the value."""
        not_saved_for = {self._region(ref), *([""] if self.compiled else [])}
        return ref in self._returned or any(reader.region not in not_saved_for for reader in self._readers.get(ref, ()))

    @cached_property
    def _returned(self) -> frozenset[str]:
        return frozenset(self.views.get(ref, ref) for _, ref in self.graph.outputs)

    @cached_property
    def _readers(self) -> Mapping[str, list[Node]]:
        readers: dict[str, list[Node]] = {}
        for node in self.graph.nodes:
            for ref in node.inputs:
                readers.setdefault(self.views.get(ref, ref), []).append(node)
        return readers

    def _is_computed_again(self, ref: str) -> bool:
        return bool(self._region(ref)) and (ref.endswith("#") or not self._leaves(ref))

    @cached_property
    def _read(self) -> Mapping[str, int]:
        """The bytes of the values that the backward pass reads.

        An entry `REF#` stands for values without a name in the graph. These are the intermediate values of a group, a
        recurrence, or an expression that is not compiled.
        """
        refs, inside = (self._saved_by_compiler(), Counter[str]()) if self.compiled else self._saved_by_autograd()
        values = (self.views.get(ref, ref) for ref in refs)
        saved = Counter(self.bytes_of(values)) + Counter({f"{ref}#": size for ref, size in inside.items()})
        for node in self.graph.nodes:
            size = node.op.saved_inside([self.graph.types[ref] for ref in node.inputs], node.types, self.sizes)
            if isinstance(node.op, Scan):
                step = flatten(self.programs, self.programs.function(node.op.callee), at=node.op.at)
                # These inputs are saved once for the whole loop, and not once per step
                read = {name for name, _ in step.inputs[node.op.carried :]}
                saved_in_step = Pass(step, self.programs, self.sizes, self.compiled).saved.items()
                size = node.types[-1].extents(self.sizes)[1] * sum(
                    size for ref, size in saved_in_step if ref not in read
                )
            elif isinstance(node.op, Fused):
                size = self.groups[node.name].inside
            if size:
                saved[f"{node.outputs[0]}#"] += size
        return saved

    def bytes_of(self, refs: Iterable[str]) -> dict[str, int]:
        types = self.graph.types
        return {
            ref: types[ref].bytes(self.sizes) for ref in sorted(set(refs)) if ref[0] not in "@$" and types[ref].floating
        }

    def _saved_by(self, node: Node) -> SavedByGroup:
        """Returns the values that the fused group `node` saves. Torch's compiler may move nodes from the backward pass
        to the forward pass. The group then saves the results of the moved nodes, and not their inputs."""
        assert isinstance(node.op, Fused)
        group, sizes = self.programs.group(node.op.group), self.sizes
        outside = dict(zip((name for name, _ in group.forward.inputs), node.inputs, strict=True))
        labels = dict(group.forward.outputs)
        results = {ref: out for (_, ref), out in zip(group.forward.outputs, node.outputs, strict=False)}
        needed = _needed(group, self.compiled)
        outside |= {name: results[labels[name]] for name in group.saved if labels.get(name) in results}
        types = {**dict(group.backward.inputs), **group.backward.types}
        inside = {name: types[name] for name in sorted(needed) if name not in outside}
        bytes = {n: type.bytes(sizes) // (group.chunks if has_rows(type) else 1) for n, type in inside.items()}
        size = sum(bytes.values())
        # The gradients are computed together with the results; gradients of weights are summed in f32
        if group.chunks > 1:
            gradients = [types[ref] for _, ref in group.backward.outputs]
            wide = (0 if has_rows(type) else _F32 * type.count(sizes) for type in gradients)
            size += sum(max(type.bytes(sizes), sums) for type, sums in zip(gradients, wide, strict=True))
        read = frozenset(outside[name] for name in needed if name in outside)
        returned = sum(self.graph.types[ref].bytes(sizes) for ref in read & frozenset(node.outputs))
        views = {name for name, _ in group.forward.inputs}
        for inner in group.backward.nodes:
            views.update(inner.outputs if inner.op.views and views.issuperset(inner.inputs) else ())
        viewed = sum(size for name, size in bytes.items() if name in views)
        return SavedByGroup(read, needed, size, size + returned - viewed)

    # Compiled code

    def _saved_by_compiler(self) -> set[str]:
        """Returns the values of the graph that compiled code saves for the backward pass.

        Compiled code saves every value that the backward pass of a matrix product, attention or fused group reads. If
        the derivative of another node reads a value, compiled code usually recomputes the value in the backward pass.
        Compiled code therefore also saves the values from which the recomputation starts (see `_sources`).
        """
        saved: set[str] = set()
        for node in filter(is_barrier, self.graph.nodes):
            saved |= self.groups[node.name].read if node.name in self.groups else {*node.inputs}
            saved |= {*node.outputs} if node.op.matrix and node.op.mixes_tokens else set()
        saved = {self.views.get(ref, ref) for ref in saved}
        final = self._never_recomputed()
        for node in self.graph.nodes:
            if not is_barrier(node) and self.learned.intersection(node.outputs):
                for ref in sorted(_derivative_reads(node)):
                    saved |= self._sources(self.views.get(ref, ref), saved, final)
        return saved

    def _sources(self, ref: str, saved: Collection[str], final: Collection[str]) -> set[str]:
        """Returns the values that compiled code must save so that the backward pass can read `ref`, in addition to the
        values in `saved`. These are the nearest values from which the backward pass can recompute `ref`: inputs of the
        graph, and values in `final`. If `ref` itself takes fewer bytes, the result is only `ref`."""
        waiting, visited, new = [ref], set[str](), set[str]()
        while waiting:
            if (value := waiting.pop()) in visited or value in saved or value[0] in "@$":
                continue
            visited.add(value)
            node = self.graph.by_name.get(node_of(value))
            if node is None or value in final:
                new.add(value)
            else:
                waiting += (self.views.get(source, source) for source in node.inputs)
        sources, alone = (sum(self.bytes_of(refs).values()) for refs in (new, [ref]))
        return {ref} if alone < sources else new

    def _never_recomputed(self) -> frozenset[str]:
        """Returns the values that compiled code never recomputes. If the backward pass reads such a value, the value
        is saved.

        These values are the results of three kinds of nodes: barriers, nodes such as lookups and concatenations, and
        nodes that share an input with an earlier barrier. Torch's compiler assumes that each such node would need a
        separate kernel.
        """
        order = {node.name: i for i, node in enumerate(self.graph.nodes)}
        first: dict[str, int] = {}  # the first barrier that reads a value, directly or through other values
        for node in reversed(self.graph.nodes):
            after = min((first[ref] for ref in node.outputs if ref in first), default=len(order))
            reached = order[node.name] if is_barrier(node) else after
            first |= {ref: min(reached, first.get(ref, reached)) for ref in node.inputs}
        final: set[str] = set()
        for node in self.graph.nodes:
            values = [self.views.get(ref, ref) for ref in node.inputs if ref[0] not in "@$"]
            late = any(self._first_use(ref, first) < order[node.name] for ref in values)
            if is_barrier(node) or late or node.op.always_stored:
                final.update(self.views.get(ref, ref) for ref in node.outputs)
        return frozenset(final)

    def _first_use(self, ref: str, first: Mapping[str, int]) -> int:
        return first.get(ref, len(self.graph.nodes))

    # Code that is not compiled

    def _saved_by_autograd(self) -> tuple[set[str], Counter[str]]:
        """Returns the values that Torch saves if code is not compiled, and the bytes of saved values without a name in
        the graph. Values without a name are listed under the named value that is computed from them."""
        saved: set[str] = set()
        inside: Counter[str] = Counter()
        for node in self.graph.nodes:
            if node.outputs[0] in self.views or not self.learned.intersection(node.outputs):
                continue
            if isinstance(node.op, Pointwise):
                names = dict(zip(node.op.variables, node.inputs, strict=True))
                learned = {name for name, ref in names.items() if ref in self.learned}
                for text, out in zip(node.op.outputs, node.outputs, strict=True):
                    expr = reread(text)
                    for value in _read_by_autograd(expr, learned):
                        if isinstance(value, Var):
                            saved.add(names[value.name])
                        elif value == expr:
                            saved.add(out)
                        else:
                            inside[out] += node.types[0].bytes(self.sizes)
            elif isinstance(node.op, Fused):
                saved |= self.groups[node.name].read
            elif is_barrier(node) or node.op.flops_per_output:
                saved.update(node.inputs[node.op.linear_in :])
                saved.update(node.outputs if node.op.matrix and node.op.mixes_tokens else ())
        return saved, inside


def has_rows(type: TensorType) -> bool:
    return bool(type.shape) and isinstance(type.shape[0], str)


def moved(group: Group, compiled: bool) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Returns two lists of nodes in the backward graph of a group: nodes that run at the end of the forward pass, and
    all other nodes.

    Torch's compiler moves the nodes that do not depend on the gradient of the result, such as the products of a loss.
    """
    nodes = group.backward.nodes
    if not compiled or group.chunks > 1:
        return (), nodes
    given = {name for name, _ in group.backward.inputs if name not in group.saved}
    for node in nodes:
        if given.intersection(node.inputs):
            given.update(node.outputs)
    return tuple(n for n in nodes if n.outputs[0] not in given), tuple(n for n in nodes if n.outputs[0] in given)


def _needed(group: Group, compiled: bool) -> frozenset[str]:
    early, late = moved(group, compiled)
    computed = {ref for node in late for ref in node.outputs}
    known = {*group.saved, *(ref for node in early for ref in node.outputs)}
    read = {ref for node in late for ref in node.inputs} | {ref for _, ref in group.backward.outputs}
    return frozenset((read & known) - computed)


def _derivative_reads(node: Node) -> frozenset[str]:
    """Returns the inputs that the derivative of a node reads. The derivatives of copies read no inputs."""
    if not isinstance(node.op, Pointwise):
        return frozenset(node.inputs[node.op.linear_in :] if node.op.flops_per_output else ())
    values = dict(zip(node.op.variables, node.inputs, strict=True))
    slopes = (derive(reread(text), name) for text in node.op.outputs for name in values)
    return frozenset(values[name] for slope in slopes for name in variables(slope))


def _read_by_autograd(expr: Expr, learned: Iterable[str]) -> frozenset[Expr]:
    """Returns the parts of an expression that its derivatives read if Torch runs each operation separately. `learned`
    are the variables that need a gradient."""
    names = set(learned)
    read: set[Expr] = set()

    def visit(part: Expr) -> bool:
        """Records the parts that the derivatives of `part` read. Returns whether `part` needs a gradient."""
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
