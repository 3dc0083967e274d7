"""A decoder: token ids to a distribution over the next one, through a stack of residual blocks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Field

from specc.compiler import blocks
from specc.compiler.architectures.architecture import Architecture
from specc.compiler.architectures.stack import Lowering
from specc.compiler.blocks.head import LogitHead
from specc.compiler.blocks.init import Init
from specc.compiler.blocks.norm import Rms
from specc.compiler.blocks.roles import (
    Embed,
    Layer,
    LayerList,
    Mix,
    Norm,
    Skips,
    formula_problems,
    layer_problems,
)
from specc.compiler.blocks.token import order_problems
from specc.compiler.catalog import models
from specc.compiler.expr import parse, variables
from specc.compiler.programs import Programs
from specc.compiler.strict import Path, Problem, StrictModel, later


def _one_of(role: type[StrictModel]) -> Any:
    """The union of all blocks that play a part, told apart by `kind`."""
    members = models(blocks, role, "kind")
    if len(members) == 1:
        return members[0]
    return Annotated[Union[members], Field(discriminator="kind")]  # noqa: UP007  (a tuple of classes, not two)


if TYPE_CHECKING:
    AnyEmbed = Embed
    AnyLayer = Layer
    AnyMix = Mix
    AnyNorm = Norm
    AnySkips = Skips
else:
    AnyEmbed, AnyLayer, AnyMix, AnyNorm, AnySkips = map(_one_of, (Embed, Layer, Mix, Norm, Skips))


class Loop(StrictModel):
    """Depth recurrence: blocks `first` to `last`, counted from 0, run `passes` times, one pass after the other."""

    first: Annotated[int, Field(ge=0, lt=1000)]
    last: Annotated[int, Field(ge=0, lt=1000)]
    passes: Annotated[int, Field(ge=2, le=64)]


class Blocks(StrictModel):
    """`count` equal blocks; each is its `layers` in order, every one behind its own `norm`.

    In the blocks listed in `parallel`, counted from 0, all layers read one norm of the block's input, and their values
    are added to it together. With `loop` some blocks run several times: skips then connect these runs, not the blocks.
    """

    count: Annotated[int, Field(gt=0, le=1000)]
    norm: AnyNorm = Rms(kind="rms")
    skips: AnySkips | None = None
    mix: AnyMix | None = later(None)
    parallel: LayerList | None = later(None)
    loop: Loop | None = later(None)
    layers: Annotated[tuple[AnyLayer, ...], Field(min_length=1, max_length=64)]

    @property
    def order(self) -> tuple[int, ...]:
        """The blocks in the order in which they run."""
        if self.loop is None:
            return tuple(range(self.count))
        again = tuple(range(self.loop.first, self.loop.last + 1))
        return (*range(self.loop.last + 1), *again * (self.loop.passes - 1), *range(self.loop.last + 1, self.count))


class Decoder(Architecture):
    """Causal language model: embed, blocks, norm, head; trained and used on `context` tokens at a time."""

    kind: Literal["decoder"]
    vocab: Annotated[int, Field(ge=2, le=2**24)]
    dim: Annotated[int, Field(gt=0, le=2**17)]
    context: Annotated[int, Field(gt=0, le=2**22)]
    init: Init = Init(normal=0.02)
    output_init: Init | None = None
    embed: Annotated[tuple[AnyEmbed, ...], Field(min_length=1, max_length=16)]
    blocks: Blocks
    norm: AnyNorm = Rms(kind="rms")
    head: LogitHead = LogitHead()

    @property
    def title(self) -> str:
        runs = len(self.blocks.order)
        blocks = f"{self.blocks.count} blocks of {self.dim}{f' in {runs} runs' if self.blocks.loop else ''}"
        return f"decoder, {blocks}, {self.context} tokens, vocabulary {self.vocab}"

    @property
    def vocabulary(self) -> int:
        return self.vocab

    @property
    def window(self) -> int:
        return self.context

    def problems(self) -> Iterator[Problem]:
        """What the layers say of themselves in a model of this width."""
        yield from (problem.under("embed") for problem in order_problems(self.embed))
        count = self.blocks.count
        yield from formula_problems(self.blocks.norm.scale, ("blocks", "norm", "scale"), count)
        last = self.norm.scale
        if isinstance(last, str) and "layer" in variables(parse(last)):
            hint = "use `layers`, the number of blocks"
            yield Problem(("norm", "scale"), "S216", "the last norm is in no layer, but its scale reads `layer`", hint)
        else:
            yield from formula_problems(last, ("norm", "scale"), count)
        if self.blocks.loop is not None and not self.blocks.loop.first <= self.blocks.loop.last < count:
            message = f"a loop from block {self.blocks.loop.first} to {self.blocks.loop.last} of {count}"
            yield Problem(
                ("blocks", "loop"), "S225", message, f"blocks go from 0 to {count - 1}, the last not before the first"
            )
        elif self.blocks.skips is not None and not self.blocks.skips.sources(len(self.blocks.order)):
            message = f"skips connect nothing in {count} block{'s' if count > 1 else ''}"
            yield Problem(("blocks", "skips"), "S220", message, "take them out, or use more blocks")
        yield from layer_problems(self.blocks.parallel, ("blocks", "parallel"), count)
        titles: dict[str, int] = {}
        for i, layer in enumerate(self.blocks.layers):
            here: Path = ("blocks", "layers", i)
            if layer.residual != "learned":
                yield from formula_problems(layer.residual, (*here, "residual"), count)
            yield from (problem.under(*here) for problem in layer.problems_in(self.dim, count))
            if (first := titles.setdefault(layer.title, i)) != i:
                message = f"two layers of a block are named {layer.title}"
                related = (("the first one", ("blocks", "layers", first)),)
                yield Problem(here, "S207", message, "give one of them a `name:`", related)

    def lower(self, name: str, dtype: str) -> Programs:
        return Lowering(self, name, dtype).run()
