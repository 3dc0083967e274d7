"""The lowering of a stack of blocks: each run of a block is a call, and equal blocks share a function."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from specc.compiler.architectures.blocks import STREAM, Block, Blocks, index_values
from specc.compiler.blocks.context import CallSite, LoweringContext, Shape
from specc.compiler.blocks.wiring import IDS, Expressions, Learned, Wiring, add, parse_wiring, wrapped
from specc.compiler.expr import Var, variables
from specc.compiler.expr.index import formula_value
from specc.compiler.ir.graph import Builder, Dim, TypeRuleError, output_ref, output_refs
from specc.compiler.ops.region import Call, returned
from specc.compiler.ops.sequence import Concat
from specc.compiler.ops.shape import Split, SplitHeads
from specc.compiler.programs.programs import LoweringError
from specc.compiler.strict import Path, Problem


@dataclass(frozen=True)
class Stack:
    """The lowering of blocks in one program, at the paths 0, 1, ... under the site's.

    `phase` is the name of the blocks' methods in a phase whose blocks differ from those at the end of the run.
    """

    blocks: Blocks
    shape: Shape
    site: CallSite
    phase: str = ""

    @property
    def runs(self) -> tuple[int, ...]:
        """The index of the block of each run."""
        return self.blocks.runs

    @cached_property
    def labels(self) -> Sequence[Mapping[str, str]]:
        """The input names of the shared values that each block reads, by ref. A label that occurs twice in a block is
        prefixed with the computation's name."""
        labels: list[Mapping[str, str]] = []
        for i in range(self.blocks.count):
            shared = dict.fromkeys(self.blocks.shared_by(i, self.shape))
            known = [label for entry in shared for label in entry.labels]
            labels.append(
                {
                    ref: label if known.count(label) == 1 else f"{entry.name}_{label}"
                    for entry in shared
                    for ref, label in zip(entry.refs, entry.labels, strict=True)
                }
            )
        return labels

    def run(self, b: Builder, x: str, context: LoweringContext) -> tuple[str, dict[str, str]]:
        """Adds one call per run of a block.

        The arguments of a call are, in order: the stream; the values that all blocks read; the state; the values that
        only some blocks read; and the outputs of earlier runs.

        Args:
            b: the builder of the program.
            x: the input of the first block, [B, T, D].
            context: the values that the blocks can read. If it `extends` a sequence, `context.cache` is the previous
                state.

        Returns:
            The last block's value, and the new state by run, layer and key.

        Raises:
            LoweringError: if the shapes or dtypes in a block do not match.
        """
        outer, b.scope = b.scope, self.site.at
        embedded = x
        streams: tuple[str, ...] = (STREAM,)
        state: dict[str, str] = {}
        outputs: list[str] = []
        for run, i in enumerate(self.runs):
            x = self._between(b, run, x, streams, outputs)
            block = self.blocks.block(i)
            source = {
                index: outputs[formula_value(index, index_values(run, self.runs, self.blocks.count))]
                for index in block.outputs()
            }
            call = _BlockCall(self, b, i, block, streams, context)
            x, new = call.add(x, embedded, source, run)
            streams = block.streams_after(streams)
            state |= {f"{run}.{key}": ref for key, ref in new.items()}
            outputs.append(x)
        b.scope = outer
        return x, state

    def _between(self, outer: Builder, run: int, x: str, streams: tuple[str, ...], outputs: Sequence[str]) -> str:
        """Adds the modules before a run, each as a separate call, and returns the stream after them.

        They are outside the blocks, because the same block may run with and without them.
        """
        for spec in self.blocks.modules:
            number = spec.number(run, self.runs, self.blocks.count)
            if number is None:
                continue
            wirings = [parse_wiring(text) for text in texts_of(spec.read)]
            labels = labels_of(tuple(dict.fromkeys(k for wiring in wirings for k in wiring.outputs.values())))
            values = index_values(run, self.runs, self.blocks.count)
            earlier = {label: outputs[formula_value(k, values)] for k, label in labels.items()}
            b = Builder("")
            for label, ref in ((STREAM, x), *earlier.items()):
                b.input(label, outer.types[ref].with_shape("B", "T", outer.types[ref].width))
            at = f"{spec.name}.{number}"
            parts = split(b, STREAM, streams)
            first, *others = parts.values()
            known = {STREAM: first} if isinstance(spec.read, str) else parts
            result = _Scope(b, self.shape, known, labels, spec.learn).wire(spec.read, "joined", f"{spec.name}_factor")
            if isinstance(spec.read, str):
                result = dict(zip(streams, (result[STREAM], *others), strict=True))
            owner = spec.name.removesuffix("s")
            names = (f"{owner}.forward",) if len(streams) == 1 else (f"{owner}.streams", f"{owner}.forward")
            body = self.site.functions.intern(b, names, at, {"x": joined(b, result)})
            outer.scope = ""
            x = outer.add(at, Call(body.name, at, returned([outer.types[x]])), (x, *earlier.values()))
            outer.scope = self.site.at
        return x

    def begin(self, b: Builder, context: LoweringContext) -> dict[str, str]:
        """Adds the calls that compute every block's state before the first token. Returns the state by block, layer and
        key."""
        state: dict[str, str] = {}
        outer, b.scope = b.scope, self.site.at
        for i, block in enumerate(self.blocks.every):
            stored = block.state(self.shape)
            if not stored:
                continue
            inner = Builder("")
            memory = inner.input("memory", b.types[context.memory])
            first: dict[str, str] = {}
            for layer in block.layers:
                inner.scope = layer.title
                begun = layer.begin(inner, self.shape, replace(context, memory=memory))
                first |= {f"{layer.title}.{key}": ref for key, ref in begun.items()}
            outputs = {key.replace(".", "_"): first[key] for key in stored}
            at = f"{self.site.at}.{i}"
            body = self.site.functions.intern(inner, self.names(i, ("begin",), bool(block.outputs())), at, outputs)
            call = Call(body.name, at, returned([inner.types[first[key]] for key in stored]))
            node = b.add(str(i), call, (context.memory,))
            state |= {f"{i}.{key}": output_ref(node, j) for j, key in enumerate(stored)}
        b.scope = outer
        return state

    def names(self, i: int, methods: Sequence[str], skips: bool) -> tuple[str, ...]:
        """Returns the candidate names of a function of block `i`. All functions of a block belong to one class.

        The first function that is built selects the class: a class of the blocks before, or a new class.
        """
        owners, at = self.site.functions.owners, self.site.at
        kind = f"skip_{self.site.owner}" if skips else self.site.owner
        before = [owner for place, owner in owners.items() if place.rpartition(".")[0] == at]
        known = owners.get(f"{at}.{i}")
        classes = [known] if known else dict.fromkeys((*before, kind, f"{kind}{i}"))
        return tuple(f"{owner}.{method}" for owner in classes for method in methods)


@dataclass
class _BlockCall:
    """One call of a block."""

    stack: Stack
    outer: Builder
    i: int
    block: Block
    streams: tuple[str, ...]
    context: LoweringContext
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        shape = self.stack.shape
        self.shape = replace(shape, layer=self.i, values=self.block.values_width(shape.dim))

    def add(self, x: str, embedded: str, source: Mapping[str, str], run: int) -> tuple[str, Mapping[str, str]]:
        """Adds the call to the program.

        Args:
            x: the stream before the block; several streams are concatenated.
            embedded: the input of the first block.
            source: the values of the earlier runs that the block reads, by formula.
            run: the index of the run.

        Returns:
            The stream after the block, and its new state by layer and key.
        """
        outer, context, site = self.outer, self.context, self.stack.site
        caches = self.block.state(self.shape) if context.extends else {}
        mixes = [block.reads_value("x0") for block in self.stack.blocks.every]
        by_all, by_some = self._shared(True), self._shared(False)
        before = {**({"x0": embedded} if all(mixes) else {}), **by_all, **self._source()}
        later = {**by_some, **({"x0": embedded} if mixes[self.i] and not all(mixes) else {})}
        labels = labels_of(tuple(source))
        later |= {labels[index]: ref for index, ref in source.items()}
        later |= {IDS: context.ids} if self.block.reads_value(IDS) else {}
        b = Builder("")

        def take(values: Mapping[str, str]) -> None:
            for name, ref in values.items():
                type = outer.types[ref]
                shape = type.shape if ref.startswith("@") else _tokens(type.shape, outer.types[x].shape[1])
                b.input(name, type.with_shape(*shape))

        take({STREAM: x, **before})
        b.origins[STREAM] = outer.origin(x)
        state = {key: b.input(key.replace(".", "_"), type) for key, type in caches.items()}
        take(later)
        given = {**before, **later}
        inside = replace(
            context,
            shared=self.stack.labels[self.i],
            positions="positions" if "positions" in given else "",
            memory="memory" if "memory" in given else "",
            seen="seen" if "seen" in given else "",
            weights={name: self._weight_label(name) for name in context.weights},
        )
        value, new = self._body(b, inside, state, labels)
        outputs = {"x": value, **{key.replace(".", "_"): ref for key, ref in new.items()}}
        method = "extend" if context.extends else "forward"
        # a function that only scores gets another name if the training function has dropout or losses
        methods = (method,) if context.extends or context.training else (method, "score")
        if phase := self.stack.phase:
            methods = (phase,) if context.training else (phase, f"{phase}_score")
        names = self.stack.names(self.i, methods, bool(source))
        at = f"{site.at}.{self.i}"
        body = site.functions.intern(b, names, at, outputs)
        args = (x, *before.values(), *(context.cache[f"{run}.{key}"] for key in caches), *later.values())
        wide = outer.types[x].with_shape(*outer.types[x].shape[:-1], body.types[value].width)
        scalars = tuple((name, number) for name, (number, _) in b.scalars.items())
        formulas = tuple((name, text) for name, (_, text) in b.scalars.items())
        call = Call(body.name, at, returned([wide, *(caches[key] for key in new)]), scalars, formulas=formulas)
        again = self.stack.runs[:run].count(self.i)
        node = outer.add(f"{self.i}.again{again}" if again else str(self.i), call, args)
        return node, {key: f"{node}:{j}" for j, key in enumerate(new, 1)}

    def _body(
        self, b: Builder, context: LoweringContext, state: Mapping[str, str], outputs: Mapping[str, str]
    ) -> tuple[str, Mapping[str, str]]:
        """Adds the block to its function. Returns the stream after it and the new state by layer and key.

        Args:
            b: the builder of the function.
            context: the values that its layers can read.
            state: the inputs that hold the previous state, by layer and key.
            outputs: the inputs that hold outputs of earlier runs, by formula.
        """
        part: Path = ("read",)
        try:
            common = {name: name.replace(".", "_") for name in self.stack.blocks.common}
            learned = self.block.learned
            scope = _Scope(b, self.shape, split(b, STREAM, self.streams), outputs, learned, common=common)
            if self.block.read is not None:
                b.scope = "read"
                scope.streams = scope.wire(self.block.read, "x", "read_factor", self.stack.blocks.read)
            new: dict[str, str] = {}
            norm, normed = self.block.norm, dict[str, str]()
            for j, layer in enumerate(self.block.layers):
                part = ("layers", j)
                b.scope = layer.title
                x = next(iter(scope.streams.values()))
                if layer.read is not None:
                    x = next(iter(scope.wire(layer.read, "read", f"{layer.title}_factor", title=layer.title).values()))
                h = normed.get(x) or norm.lower_at("before", b, x, self.shape)
                if norm.shared or norm.op.arity == 1:  # computed once
                    normed[x] = h
                prefix = f"{layer.title}."
                cache = {key.removeprefix(prefix): ref for key, ref in state.items() if key.startswith(prefix)}
                scope.branches["h"] = h
                wire = partial(scope.over_heads, title=layer.title)
                lowered = layer.lower(b, h, self.shape, replace(context, cache=cache, wire=wire))
                new |= {f"{prefix}{key}": ref for key, ref in lowered.state.items()}
                value = layer.with_losses(b, lowered, context)
                y = layer.dropped(b, norm.lower_at("after", b, value, self.shape), context)
                if self.block.write is not None:
                    scope.branches[layer.title] = y
                else:
                    scope.branches["y"] = y
                    scope.streams = scope.wire(
                        layer.write or DEFAULT_WRITE, "x", f"{layer.title}_residual", title=layer.title
                    )
            if self.block.write is not None:
                part = ("write",)
                b.scope = "write"
                scope.streams = scope.wire(self.block.write, "x", "write_factor")
        except TypeRuleError as error:
            raise LoweringError((self._mismatch(error, part, b),)) from None
        b.scope = ""
        return joined(b, scope.streams), new

    def _shared(self, by_all: bool) -> dict[str, str]:
        """Returns the shared values that the block reads, by input name: those that have a name in all blocks if
        `by_all`, else those that have it in some."""
        names = [labels.values() for labels in self.stack.labels]
        return {
            label: self.context.shared[ref]
            for ref, label in self.stack.labels[self.i].items()
            if all(label in others for others in names) == by_all
        }

    def _source(self) -> dict[str, str]:
        """Returns the values of an encoder that the blocks read, unless their state holds what they need of it, and the
        positions of a sequence that is extended, by input name."""
        context, blocks = self.context, self.stack.blocks
        reads = any(layer.reads_source for _, _, layer in blocks.all_layers)
        values = {"memory": context.memory} if reads and not context.extends else {}
        values |= {"seen": context.seen} if reads or (blocks.reads_seen and not context.causal) else {}
        values |= {self._weight_label(name): ref for name, ref in context.weights.items()}
        return values | ({"positions": context.positions} if context.extends and context.positions else {})

    def _weight_label(self, loss: str) -> str:
        return f"{loss.replace('.', '_')}_weight"

    def _mismatch(self, error: TypeRuleError, part: Path, b: Builder) -> Problem:
        """Returns the problem for a type error in a part of the block, with both nodes and both spec paths."""
        site = self.stack.site
        origin = b.origins[STREAM]
        node = error.message.partition(" ")[0]
        message = error.message.replace(node, f"{site.at}.{self.i}.{node}", 1)
        related = ((f"{origin} is computed here", site.places[origin]),) if origin in site.places else ()
        hint = f"make the widths equal; the model's dim is {self.shape.dim}"
        return Problem((*site.place, *self.stack.blocks.source_of(part, self.i)), "S301", message, hint, related)


BRANCH = "branch"  # the name of y in generated code, where y is the output of a function
DEFAULT_WRITE = f"{STREAM} + y"


@dataclass
class _Scope:
    """The values that expressions of one function can read.

    Attributes:
        b: the builder of the function.
        shape: the shape dims of the model.
        streams: the residual streams, by name.
        outputs: the inputs that hold outputs of earlier runs, by formula.
        learned: the learned values, by path.
        common: the inputs that hold learned values of all blocks, by name.
        branches: the values of layers, by title; `y` and `h` are those of the last one.
        added: the learned values that were added, by path and by the value that each reads.
    """

    b: Builder
    shape: Shape
    streams: Mapping[str, str]
    outputs: Mapping[str, str]
    learned: Mapping[str, Learned]
    common: Mapping[str, str] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    added: dict[tuple[str, str], str] = field(default_factory=dict)

    def wire(
        self, value: Expressions, name: str, prefix: str, base: Expressions | None = None, title: str = ""
    ) -> Mapping[str, str]:
        """Adds the expression of each stream and returns the new streams, by name.

        Args:
            value: one expression, or one per stream.
            name: the name of the node, for a single expression; else nodes are named after their streams.
            prefix: the name of numbers that depend on the layer.
            base: the expression that `value` changes. Where `value` is `base` of a changed stream, the changed stream
                is a node of its own, so that blocks with and without the change share the rest.
            title: the layer whose learned values have short names.
        """
        if isinstance(value, dict):
            return {stream: self._add(parse_wiring(text), stream, prefix, title) for stream, text in value.items()}
        wiring = parse_wiring(value)
        if isinstance(base, str) and base != value:
            outside = parse_wiring(base)
            inner = wrapped(outside.expr, wiring.expr, STREAM)
            if inner is not None and not isinstance(inner, Var):
                changed = self._add(replace(wiring, expr=inner), f"{name}.changed", prefix, title)
                return {STREAM: self._add(outside, name, prefix, title, {STREAM: changed})}
        return {STREAM: self._add(wiring, name, prefix, title)}

    def over_heads(self, text: str, name: str, values: Mapping[str, str], heads: int, title: str) -> str:
        """Adds an expression over `values` [B, T, H, C] and returns its value.

        Other values, [B, T, H C] or [B, T, H], are split into heads, [B, T, H, C] or [B, T, H, 1], and so are learned
        numbers [H C] or [H].
        """
        return self._add(parse_wiring(text), name, f"{title}_factor", title, values, heads)

    def _add(
        self,
        wiring: Wiring,
        name: str,
        prefix: str,
        title: str,
        replaced: Mapping[str, str] | None = None,
        heads: int = 0,
    ) -> str:
        """Adds an expression as the node `name`. `replaced` are values that it reads instead of those of the scope."""
        given = {**self.streams, **self.branches, "x0": "x0", IDS: IDS, **self.common, **(replaced or {})}
        values: dict[str, tuple[str, str]] = {}
        used = set(variables(wiring.expr))
        for variable, written in wiring.names.items():
            path = f"{title}.{written}" if f"{title}.{written}" in self.learned else written
            if path in self.learned and (variable in used or self.learned[path].of is None):
                values[variable] = self._learned(path, title), path
            elif variable in used:
                values[variable] = given[written], BRANCH if written == "y" and not heads else written
        values |= {variable: (self.outputs[k], self.outputs[k]) for variable, k in wiring.outputs.items()}
        if heads:
            values = {variable: (self._split(ref, label, heads), label) for variable, (ref, label) in values.items()}
        return add(self.b, name, wiring.expr, values, prefix, self.shape)

    def _learned(self, path: str, title: str) -> str:
        """Returns a learned value, and adds it if it is read for the first time."""
        spec, value = self.learned[path], ""
        outer, self.b.scope = self.b.scope, ""
        if spec.reads is not None:
            value = self._add(spec.reads, f"{path}.of", f"{path}_factor".replace(".", "_"), title)
        if (path, value) not in self.added:
            self.added[path, value] = spec.declare(self.b, path, self.shape, value)
        self.b.scope = outer
        return self.added[path, value]

    def _split(self, ref: str, label: str, heads: int) -> str:
        """Adds the split of features into heads, [..., H C] to [..., H, C]. A single number is the same in all
        heads."""
        type = self.b.types[ref]
        if len(type.shape) not in (1, 3) or type.shape == (1,):
            return ref
        name = f"{label}.heads".removeprefix(f"{self.b.scope}.")
        return self.b.add(name, SplitHeads(heads if type.width != 1 else 1), (ref,))


def texts_of(value: Expressions) -> tuple[str, ...]:
    return tuple(value.values()) if isinstance(value, dict) else (value,)


def labels_of(indices: Sequence[str]) -> Mapping[str, str]:
    """Returns the input name of each output of an earlier run, by its formula."""
    return {index: "skip" if i == 0 else f"skip{i + 1}" for i, index in enumerate(indices)}


def split(b: Builder, x: str, streams: tuple[str, ...]) -> Mapping[str, str]:
    """Adds the split of x [B, T, n D] into n streams [B, T, D], by name."""
    if len(streams) == 1:
        return {streams[0]: x}
    node = b.add("streams.split", Split(streams), (x,))
    return dict(zip(streams, output_refs(node, len(streams)), strict=True))


def joined(b: Builder, streams: Mapping[str, str]) -> str:
    """Adds the concatenation of streams, if there are several, and returns it."""
    outer, b.scope = b.scope, ""
    first, *rest = streams.values()
    for i, ref in enumerate(rest):
        first = b.add("streams.joined" if i == 0 else f"streams.joined{i + 1}", Concat(), (first, ref))
    b.scope = outer
    return first


def _tokens(shape: Sequence[Dim], length: Dim) -> Iterator[Dim]:
    """Yields the dims of a shape as a function declares it: `length`, the number of tokens of any sequence,
    becomes T."""
    first = 1 if shape[:1] == ("B",) else 0
    for i, dim in enumerate(shape):
        yield "T" if dim == length and (i == first or isinstance(dim, str)) else dim
