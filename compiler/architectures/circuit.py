"""The expressions in a block, an encoder or a decoder, and the checks of these expressions."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property

from specc.compiler.blocks.parts import Part
from specc.compiler.blocks.wiring import IDS, Expressions, Learned, number_problem, texts_of
from specc.compiler.expr import Var
from specc.compiler.expr.wiring import VALUE, EarlierValue, Wiring, parse_wiring
from specc.compiler.records import record
from specc.compiler.strict import Path, Problem

STREAM = "x"  # the name of the residual stream in blocks with a single stream
Streams = tuple[str, ...]


@record
class Circuit:
    """The parts of a block, an encoder or a decoder, and the expressions that connect the parts. A part is a layer or a
    stage.

    Attributes:
        learn: The learned values that do not belong to a part, by name.
        read: The expressions that compute the streams before the first part. None if the streams are unchanged.
        layers: The parts, in order.
        write: The expressions that compute the streams after the last part. None if each part writes to the streams.
    """

    learn: Mapping[str, Learned] = field(default_factory=dict)
    read: Expressions | None = None
    layers: Sequence[Part] = ()
    write: Expressions | None = None

    @cached_property
    def learned(self) -> Mapping[str, Learned]:
        inner = {f"{part.title}.{name}": value for part in self.layers for name, value in part.learned.items()}
        return {**self.learn, **inner}

    @property
    def expressions(self) -> Iterator[tuple[Path, Wiring, str]]:
        """Yields (path, expression, title) for each expression. `title` is the title of the part that contains the
        expression, or "" outside of parts."""
        fields = {name: value for name, value in (("read", self.read), ("write", self.write)) if value is not None}
        owners: list[tuple[Path, Mapping[str, Learned], Mapping[str, Expressions], str]]
        owners = [((), self.learn, fields, "")]
        owners += [(("layers", i), part.learned, part.wirings, part.title) for i, part in enumerate(self.layers)]
        for path, learn, wirings, title in owners:
            for name, learned in sorted(learn.items()):
                if learned.reads is not None:
                    yield (*path, "learn", name, "of"), learned.reads, title
            for name, value in wirings.items():
                for key, text in texts_of(value).items():
                    yield (*path, name, *filter(None, (key,))), parse_wiring(text), title

    def names(self, wiring: Wiring, title: str) -> Iterator[str]:
        """Yields the names that an expression of the part `title` reads. The name of a learned value is its path."""
        for name in wiring.names.values():
            yield f"{title}.{name}" if f"{title}.{name}" in self.learned else name

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names of all values that expressions read. The name of a learned value is its path."""
        return frozenset(name for _, wiring, title in self.expressions for name in self.names(wiring, title))

    @cached_property
    def earlier(self) -> tuple[EarlierValue, ...]:
        values = (value.read_by(title) for _, wiring, title in self.expressions for value in wiring.earlier.values())
        return tuple(dict.fromkeys(values))

    def streams_after(self, streams: Streams, parts: int | None = None) -> Streams:
        """Returns the names of the streams after the first `parts` parts. If `parts` is None, returns the names after
        all parts and `write`. `streams` are the names before the first part."""
        wirings = [self.read, *(part.wirings.get("write") for part in self.layers[:parts])]
        for value in (*wirings, *((self.write,) if parts is None else ())):
            if value is not None:
                streams = tuple(value) if isinstance(value, dict) else (STREAM,)
        return streams

    def problems(
        self, streams: Streams, further: Collection[str], layer: int | None, layers: int, also: Collection[str] = ()
    ) -> Iterator[Problem]:
        """Checks the names and the numbers in the expressions, and yields the problems. Paths are relative to the
        circuit.

        Args:
            streams: The names of the streams before the circuit.
            further: The names of additional values that every expression may read.
            layer: The index of the block. None outside of blocks.
            layers: The number of blocks.
            also: The learned values that are read outside of the circuit.
        """
        where = "" if layer is None else f"in layer {layer}, "
        titles = [part.title for part in self.layers]
        for i, title in enumerate(titles):
            if (first := titles.index(title)) != i:
                related = (("first use", ("layers", first)),)
                yield Problem(
                    ("layers", i),
                    "S207",
                    f"two parts have the name `{title}`",
                    "give one of them another `name:`",
                    related,
                )
            if self.write is not None and "write" in self.layers[i].wirings:
                message = f"both the block and its layer `{title}` have a `write`"
                yield Problem(("layers", i, "write"), "S247", message, "remove one of the two")
        read = {f"{part.title}.{name}" for part in self.layers for name in part.own_values} | {*also, *self.reads}
        sources: dict[str, set[str]] = {}
        for path, wiring, title in self.expressions:
            at = path[1] if title else len(titles) if path[0] == "write" else 0
            assert isinstance(at, int)
            # The width of the model is not known yet, so formulas that read the width are not checked
            later = () if layer is not None else tuple(f"{other}." for other in titles[at + 1 :])
            learned_names = [name for name in self.learned if not name.startswith(later)]
            names = {*further, *learned_names, *(name.removeprefix(f"{title}.") for name in learned_names)}
            names |= {*titles[:at], *(streams if path[0] == "read" else self.streams_after(streams, at))}
            if title:
                names |= {"read": set(), "learn": {"h", "y"}, "write": {"h", "y"}}.get(
                    str(path[2]), {"h", str(path[2])}
                )
                names -= {"h", STREAM} if "starts" in self.layers[at].traits else set()
            if path[-1] == "of":
                names.add(IDS)
                sources[f"{title}.{path[-2]}" if title else str(path[-2])] = set(self.names(wiring, title))
            for variable, name in wiring.names.items():
                if name not in names:
                    message = f"{where}`{name}` is not a known value"
                    hint = (
                        f"choose from {', '.join(sorted(names))}"
                        if names
                        else "remove it; an expression here can read no value"
                    )
                    yield Problem(path, "S246", message, hint, offset=wiring.column(Var(variable)))
                elif name == IDS and wiring.expr != Var(variable):
                    message = f"{where}an expression cannot compute with `{IDS}`, the numbers of the tokens"
                    hint = f"write `of: {IDS}`, which looks up a row of a learned table, and read this value instead"
                    yield Problem(path, "S246", message, hint, offset=wiring.column(Var(variable)))
            for variable, value in wiring.earlier.items():
                if title and layer is None:
                    message = f"a stage cannot read `{value}`, because only blocks have earlier runs"
                    hint = "read the output of an earlier stage by its name"
                    yield Problem(path, "S220", message, hint, offset=wiring.column(Var(variable)))
                elif value.function == VALUE and not (title and path[2] in self.layers[at].over_values):
                    message = f"{where}this expression cannot read `{value}`, which has one vector per head"
                    hint = "read it in the expression `v` of an attention layer"
                    yield Problem(path, "S246", message, hint, offset=wiring.column(Var(variable)))
            if not wiring.names and not wiring.earlier:
                yield Problem(path, "S246", f"{where}this expression reads no value", "read one, such as `x`")
            yield from number_problem(wiring, path, layer, layers)
        used = {name for _, wiring, _ in self.expressions for name in wiring.names.values()}
        for i, title in enumerate(titles):
            if self.write is not None and title not in used:
                message = f"{where}no expression reads `{title}`, the result of this layer"
                yield Problem(
                    ("layers", i), "S247", message, "read it in the `write` of the block, or remove the layer"
                )
        if circle := first_circle(sources):
            message = f"the learned value `{circle}` depends on itself"
            yield Problem(
                (*self.place(circle), "of"),
                "S246",
                message,
                "change `of`, so that no value reads itself, directly or through another value",
            )
        for name, learned in self.learned.items():
            yield from number_problem(learned.init, (*self.place(name), "init"), layer, layers)
            if name not in read:
                message = f"{where}no expression reads the learned value `{name}`"
                yield Problem(self.place(name), "S247", message, "read it in an expression, or remove it")

    def place(self, name: str) -> Path:
        if name in self.learn:
            return ("learn", name)
        title, _, inner = name.partition(".")
        return ("layers", [part.title for part in self.layers].index(title), "learn", inner)


def first_circle(sources: Mapping[str, Collection[str]]) -> str | None:
    """Returns the alphabetically first name that depends on itself, directly or through other names. Returns None if
    there is no such name. `sources` maps each name to the direct dependencies of the name."""
    for name in sorted(sources):
        reached = set(sources[name])
        queue = list(reached)
        for other in queue:  # the list grows during the loop
            new = set(sources.get(other, ())) - reached
            reached |= new
            queue += new
        if name in reached:
            return name
    return None
