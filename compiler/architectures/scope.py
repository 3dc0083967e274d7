"""The values that expressions of one function or program can read, and the lowering of these expressions and of
parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from specc.compiler.architectures.circuit import STREAM, Streams
from specc.compiler.architectures.shared_values import SharedValues
from specc.compiler.blocks.context import LoweringContext, Shape
from specc.compiler.blocks.parts import Norm, Part, Place
from specc.compiler.blocks.wiring import IDS, Expressions, Learned, add, texts_of
from specc.compiler.expr import Var, variables
from specc.compiler.expr.wiring import EarlierValue, Wiring, parse_wiring, wrapped
from specc.compiler.ir.builder import Builder, first_free
from specc.compiler.ir.graph import output_refs
from specc.compiler.ir.types import TypeRuleError
from specc.compiler.ops.sequence import Concat
from specc.compiler.ops.shape import Split, SplitHeads

BRANCH = "branch"  # the name of `y` in generated code if `y` is the output of a function


@dataclass
class Scope:
    """The values that expressions of one function or program can read.

    Attributes:
        b: The builder.
        shape: The sizes of the model.
        streams: The residual streams, by name.
        learned: The learned values, by path.
        earlier: The inputs that hold values of earlier runs of blocks.
        common: Additional values, by name.
        at: The prefix of the names of nodes.
        norm: The norm of the block.
        shape_of: A function that maps the path of a learned value to the sizes that the shape of this value may use.
        values: The outputs of the parts that were already added, by title.
        branches: The input `h` and the output `y` of the last part.
        inputs: The results of `read` expressions. A key contains an expression, and the references of the values that
            the expression reads.
        head_values: The per-head values of attention layers, by the title of the layer.
        shared: The token positions of the program, and the shared computations.
        added: The references of the learned values that were already added. A key contains the path of the learned
            value and, for a learned matrix, the reference of the value that the matrix multiplies.
    """

    b: Builder
    shape: Shape
    streams: Mapping[str, str]
    learned: Mapping[str, Learned]
    earlier: Mapping[EarlierValue, str] = field(default_factory=dict)
    common: Mapping[str, str] = field(default_factory=dict)
    at: str = ""
    norm: Norm | None = None
    shape_of: Callable[[str], Shape] | None = None
    values: dict[str, str] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    inputs: dict[tuple[object, ...], str] = field(default_factory=dict)
    head_values: dict[str, str] = field(default_factory=dict)
    shared: SharedValues = field(default_factory=SharedValues)
    added: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def value(self) -> str:
        """The first stream, or "" without streams."""
        return next(iter(self.streams.values()), "")

    def enter(self, part: str) -> None:
        """Sets the prefix of the names of all nodes that are added from now on. The prefix is the attribute `at`, a dot
        and the title `part`. If `at` or `part` is empty, the prefix is the other text, without a dot."""
        self.b.scope = ".".join(filter(None, (self.at, part)))

    def input(self, part: Part) -> str:
        self.enter(part.title)
        text = part.wirings.get("read")
        if not isinstance(text, str):
            return self.value
        return self._add(parse_wiring(text), "read", f"{part.title}_factor", part.title, known=self.inputs)

    def normalized(self, place: Place, value: str) -> str:
        """Applies the block's norm to `value` if the block has a norm at `place`. Returns the result."""
        return value if self.norm is None else self.norm.lower_at(place, self.b, value, self.shape)

    def add(self, part: Part, h: str, context: LoweringContext, write: str | None) -> Mapping[str, str]:
        """Adds the nodes of a part. Returns the new state of the part, by key.

        Args:
            part: The part.
            h: The input of the part, after the norm.
            context: The values that the part can read.
            write: The expression for the stream after a part that has no `write`. None if parts do not write to
                streams.
        """
        title = part.title
        self.enter(title)
        self.branches["h"] = h
        lowered = part.lower(self.b, h, self.shape, replace(context, wire=partial(self.over_heads, title=title)))
        self.head_values[title] = lowered.head_values
        y = self.normalized("after", part.with_losses(self.b, lowered, context))
        self.values[title] = self.branches["y"] = part.dropped(self.b, y, context)
        if write is not None:
            self.write(part.wirings.get("write", write), f"{title}_residual", title)
        return lowered.state

    def write(
        self, value: Expressions, prefix: str, title: str = "", replaced: Mapping[str, str] | None = None
    ) -> None:
        """Adds the nodes of a field `write`, and makes the results the new streams.

        Args:
            value: The field `write` of a part or block: one expression, or one expression per stream.
            prefix: The name for a layer-dependent number in the expressions, as in `wire`.
            title: The title of a part. The expression reads the learned values of this part by their short names.
            replaced: Values that override values of the scope, by name.
        """
        streams = self.wire(value, "x", prefix, title=title, replaced=replaced)
        self.streams = {name: self.normalized("stream", ref) for name, ref in streams.items()}

    def wire(
        self,
        value: Expressions,
        name: str,
        prefix: str,
        base: Expressions | None = None,
        title: str = "",
        replaced: Mapping[str, str] | None = None,
    ) -> Mapping[str, str]:
        """Adds the expression of each stream. Returns the new streams, by name.

        Args:
            value: One expression, or one per stream.
            name: The name of the node, if `value` is one expression. If not, nodes have the names of the streams. A
                number is appended to a name that another node has.
            prefix: The name for a layer-dependent number in the expressions, such as `mlp_residual`. A second number of
                this kind gets the name `mlp_residual2`.
            base: The expression of most blocks, if `value` is the changed expression of one block. If `value` is `base`
                with an expression in place of the stream, this expression becomes a separate node. The block then
                shares the node of `base` with the other blocks.
            title: The title of a part. The expression reads the learned values of this part by their short names.
            replaced: Values that override values of the scope, by name.
        """
        if isinstance(value, str) and isinstance(base, str) and base != value:
            outside, wiring = parse_wiring(base), parse_wiring(value)
            inner = wrapped(outside.expr, wiring.expr, STREAM)
            if inner is not None and not isinstance(inner, Var):
                changed = self._add(replace(wiring, expr=inner), f"{name}.changed", prefix, title)
                return {STREAM: self._add(outside, name, prefix, title, {STREAM: changed})}
        return {
            stream or STREAM: self._add(parse_wiring(text), self._free(stream or name), prefix, title, replaced)
            for stream, text in texts_of(value).items()
        }

    def _free(self, name: str) -> str:
        """Returns a name that no node of the part has. Parts choose the names of their nodes without regard to the
        names of streams."""
        return first_free(name, lambda free: self.b.path(free) not in self.b.types)

    def over_heads(self, text: str, name: str, values: Mapping[str, str], heads: int, title: str) -> str:
        """Adds an expression of per-head values.

        All other values and learned numbers that the expression reads are split into heads: [B, T, H C] becomes
        [B, T, H, C], and [B, T, H] becomes [B, T, H, 1].

        Args:
            text: The expression.
            name: The name of the node.
            values: The per-head values, [B, T, H, C], by name.
            heads: The number of heads H.
            title: The title of the layer.

        Returns:
            The result, [B, T, H, C].
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
        known: dict[tuple[object, ...], str] | None = None,
    ) -> str:
        """Adds the expression `wiring` as the node `name`, and returns its value. The arguments `prefix`, `title` and
        `replaced` have the meaning of the arguments of `wire`. If `heads` is not 0, the values are split into this
        number of heads. If `known` is given, an expression that was already added for the same values is not added
        again. `known` then records the added expressions."""
        named = {**self.values, **self.streams, **self.branches, "x0": "x0", IDS: IDS, **self.common}
        named |= replaced or {}
        values: dict[str, tuple[str, str]] = {}
        used = set(variables(wiring.expr))
        for variable, written in wiring.names.items():
            path = f"{title}.{written}" if f"{title}.{written}" in self.learned else written
            if path in self.learned and (variable in used or self.learned[path].of is None):
                values[variable] = self._learned(path, title), path
            elif variable in used:
                values[variable] = named[written], BRANCH if written == "y" and not heads else written
        for variable, value in wiring.earlier.items():
            values[variable] = (self.earlier[value.read_by(title)],) * 2
        if heads:
            values = {name: (self._split(ref, label, heads, title), label) for name, (ref, label) in values.items()}
        key = wiring.expr, *sorted((variable, ref) for variable, (ref, _) in values.items())
        if known is None:
            return add(self.b, name, wiring.expr, values, prefix, self.shape)
        if key not in known:
            known[key] = add(self.b, name, wiring.expr, values, prefix, self.shape)
        return known[key]

    def _learned(self, path: str, title: str) -> str:
        spec, value = self.learned[path], ""
        outer = self.b.scope
        self.enter("")
        if spec.reads is not None:
            value = self._add(spec.reads, f"{path}.of", f"{path}_factor".replace(".", "_"), title)
        if (path, value) not in self.added:
            shape = self.shape if self.shape_of is None else self.shape_of(path)
            self.added[path, value] = spec.declare(self.b, path, shape, value)
        self.b.scope = outer
        return self.added[path, value]

    def _split(self, ref: str, label: str, heads: int, title: str) -> str:
        """Splits the features of the value `ref` into heads, [..., H C] to [..., H, C]. `label` is the name of the
        value, and `title` is the title of the layer. A value with a single feature is the same for all heads."""
        type = self.b.types[ref]
        if len(type.shape) not in (1, 3) or type.shape == (1,):
            return ref
        name = f"{label}.heads".removeprefix(f"{title}.")
        return self.b.add(name, SplitHeads(heads if type.width != 1 else 1), (ref,))

    def check_streams(self) -> None:
        """Raises TypeRuleError if a stream has another shape than [B, T, D]."""
        for name, ref in self.streams.items():
            if len(shape := self.b.types[ref].shape) != 3:
                message = f"{self.b.path(name)} has the shape [{', '.join(map(str, shape))}]"
                hint = "read a value of each token as well, for example `x + residual * y`"
                raise TypeRuleError(f"{message}, but a stream has one vector for each token", hint=hint)

    def split(self, streams: Streams) -> None:
        """Splits the stream x [B, T, n D] into n named streams [B, T, D]. A single stream is not split."""
        if len(streams) > 1:
            node = self.b.add("streams.split", Split(streams), (self.streams[STREAM],))
            self.streams = dict(zip(streams, output_refs(node, len(streams)), strict=True))

    def joined(self) -> str:
        self.enter("")
        first, *rest = self.streams.values()
        for i, ref in enumerate(rest):
            first = self.b.add("streams.joined" if i == 0 else f"streams.joined{i + 1}", Concat(), (first, ref))
        return first
