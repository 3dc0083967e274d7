"""The function of one block, which blocks of equal text share."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specc.compiler.blocks.roles import Shape, Shared, Surroundings, Tokens
from specc.compiler.ir import Builder, Graph, TensorType, TypeRuleError, output_ref
from specc.compiler.programs import LoweringError
from specc.compiler.strict import Path, Problem

if TYPE_CHECKING:
    from specc.compiler.architectures.decoder import Decoder


class BlockFunctions:
    """The functions built so far, by name, and how the last one's parameters start; `shared` is what all of them can
    read."""

    def __init__(self, model: "Decoder", shape: Shape, places: Mapping[str, Path]) -> None:
        self.model, self.shape, self.places = model, shape, places
        self.shared = _shared(model, shape)
        self.built: dict[str, Graph] = {}
        self.inits: Mapping[str, object] = {}
        self.owners: dict[int, str] = {}

    def build(self, outer: Builder, i: int, x: str, caches: Mapping[str, TensorType] | None, skips: bool) -> Graph:
        """The function that block `i` calls on `x`: without `caches` it sees whole sequences.

        Its inputs, in order: the stream; what was embedded, where it mixes that in; what all blocks share; positions
        and caches; what only some blocks share; and an earlier block's output. Sets `inits`.
        """
        blocks = self.model.blocks
        b = Builder("")
        stream = outer.types[x]
        stream = stream.with_shape("B", "T", stream.width)
        value = b.input("x", stream)
        b.origins["x"] = outer.origin(x)
        embedded = b.input("x0", stream) if blocks.mix is not None else ""
        given = self.declared(b, [one for one in self.shared if one.layers is None])
        positions = b.input("positions", TensorType(("T",), "i64")) if caches is not None else ""
        kept = {key: b.input(key.replace(".", "_"), type) for key, type in (caches or {}).items()}
        given |= self.declared(b, [one for one in self.shared if one.layers and one.read_in(i)])
        if skips:
            assert blocks.skips is not None
            skip = b.input("skip", stream)
            b.scope = "skip"
            value = blocks.skips.lower(b, value, skip, self.shape)
        if blocks.mix is not None:
            b.scope = "mix"
            try:
                value = blocks.mix.lower(b, value, embedded, self.shape)
            except TypeRuleError as error:
                raise LoweringError((self.mismatch(error, f"blocks.{i}", ("mix",), b),)) from None
        value, state = self.layered(b, i, value, positions, given, kept)
        outputs = {"x": value, **{key.replace(".", "_"): ref for key, ref in state.items()}}
        self.inits = b.inits
        kind, method = "skip_block" if skips else "block", "forward" if caches is None else "extend"
        return self.named(b, kind, method, i, outputs)

    def skip(self, outer: Builder, x: str) -> Graph:
        """The function that joins an earlier output to the stream `x`, for skips that are no part of a block. Sets
        `inits`."""
        assert self.model.blocks.skips is not None
        b = Builder("skip.forward")
        stream = outer.types[x].with_shape("B", "T", outer.types[x].width)
        inputs = b.input("stream", stream), b.input("skip", stream)
        graph = b.build({"x": self.model.blocks.skips.lower(b, *inputs, self.shape)})
        self.inits = b.inits
        return self.built.setdefault(graph.name, graph)

    def layered(
        self, b: Builder, i: int, x: str, positions: str, given: Mapping[str, str], kept: Mapping[str, str]
    ) -> tuple[str, Mapping[str, str]]:
        """The stream `x` with all layers added, and their new state."""
        blocks = self.model.blocks
        state: dict[str, str] = {}
        together = i in (blocks.parallel or ())
        normed = ""
        for j, layer in enumerate(blocks.layers):
            prefix = f"{layer.title}."
            cache = {key.removeprefix(prefix): ref for key, ref in kept.items() if key.startswith(prefix)}
            try:
                if not (together and normed):
                    b.scope = "parallel" if together else layer.title
                    normed = blocks.norm.lower(b, x, "h", self.shape)
                b.scope = layer.title
                lowered = layer.lower(b, normed, self.shape, Surroundings(positions, given, cache, i))
                x = layer.join(b, x, lowered.value, self.shape)
            except TypeRuleError as error:
                raise LoweringError((self.mismatch(error, f"blocks.{i}", ("layers", j), b),)) from None
            state |= {f"{prefix}{key}": ref for key, ref in lowered.state.items()}
        return x, state

    def named(self, b: Builder, kind: str, method: str, i: int, outputs: Mapping[str, str]) -> Graph:
        """The built function under the name of an equal one, else under a new one. The functions of one block belong to
        one class: the first that is built chooses it."""
        known = dict.fromkeys(self.owners.values())
        for owner in [self.owners[i]] if i in self.owners else [*known, kind, f"{kind}{i}"]:
            b.name = f"{owner}.{method}"
            graph = b.build(outputs)
            if self.built.setdefault(b.name, graph) == graph:
                self.owners[i] = owner
                return graph
        raise AssertionError(f"the functions of block {i} are those of two classes")

    def mismatch(self, error: TypeRuleError, at: str, part: Path, b: Builder) -> Problem:
        """A type error in a part of a block, told with both nodes and both places of the spec."""
        origin = b.origins["x"]
        node = error.message.partition(" ")[0]
        message = error.message.replace(node, f"{at}.{node}", 1)
        related = ((f"{origin} is made here", self.places[origin]),) if origin in self.places else ()
        hint = f"make the widths equal; the model's dim is {self.model.dim}"
        return Problem(("model", "blocks", *part), "S301", message, hint, related)

    def declared(self, b: Builder, given: Sequence[Shared]) -> dict[str, str]:
        """Inputs for shared values, by `name` and `name:1`; a label that two of all have is lengthened by the name."""
        labels = [label for one in self.shared for label in one.labels]
        found: dict[str, str] = {}
        for one in given:
            for j, (label, type) in enumerate(zip(one.labels, self.shared[one], strict=True)):
                long = label if labels.count(label) == 1 else f"{one.name}_{label}"
                found[output_ref(one.name, j)] = b.input(long, type)
        return found


def _shared(model: "Decoder", shape: Shape) -> dict[Shared, tuple[TensorType, ...]]:
    """What the layers of all blocks share, each once, and its types for whole sequences."""
    b = Builder("")
    ids = b.input("ids", TensorType(("B", "T"), "i64"))
    positions = b.input("positions", TensorType(("T",), "i64"))
    wanted = {one.name: one for layer in model.blocks.layers for one in layer.shared(shape)}
    made = {one: one.lower(b, Tokens(ids, positions=positions)) for one in wanted.values()}
    return {one: tuple(b.types[ref] for ref in refs) for one, refs in made.items()}
