"""Rotary position embeddings: the spec fields, and the table of angles that layers share."""

import zlib
from collections.abc import Iterator
from dataclasses import field
from math import ceil, floor, log, pi
from typing import Annotated, Literal

from pydantic import Field

from specc.compiler.blocks.context import LoweringContext, Shared
from specc.compiler.expr import ExprError, number, parse
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import output_refs
from specc.compiler.ops.pointwise import pointwise
from specc.compiler.ops.positions import Rope, RopeAngles, RotaryAngles, RotaryFrequencies, RotaryPairs
from specc.compiler.programs.init import formula, reading, value_of
from specc.compiler.records import record
from specc.compiler.strict import ExprText, Positive, PositiveFloat, Problem, StrictModel, later

MOST_DIMS = 65_536  # checking the frequencies of a larger head would take minutes

Frequency = Annotated[ExprText, reading("f", "a scaled frequency must read f", "pair")]


class Scaling(StrictModel):
    """Frequency scaling. Slow pairs of channels rotate `factor` times slower. Fast pairs are unchanged. The frequency
    of any other pair is a weighted mean of the slowed and unchanged frequencies.

    Attributes:
        factor: the divisor of slow frequencies.
        trained: the context length in training, before the scaling.
        low: a pair is slow if it makes at most this many turns over `trained` tokens.
        high: a pair is fast if it makes at least this many turns over `trained` tokens.
    """

    factor: Annotated[float, Field(ge=1)]
    trained: Positive
    low: PositiveFloat = 1.0
    high: PositiveFloat

    @property
    def multiplier(self) -> float:
        """The factor of queries and keys after the rotation."""
        return 1.0

    def settings(self) -> str:
        """Returns a text that identifies the angles. Scalings with equal texts have equal angles."""
        return self.model_dump_json()

    def share(self, dims: int, base: float) -> str:
        """Returns an expression for a weight from 0 to 1. The scaled frequency of a pair of channels is
        weight * f + (1 - weight) * f / factor, where `f` is the unchanged frequency. The expression may read `f`, and
        `pair`, the index of the pair. `dims` is the number of rotated channels, and `base` is the base of the
        frequencies."""
        raise TypeError(f"{type(self).__name__} must override `share`")

    def problems(self) -> Iterator[Problem]:
        if self.low >= self.high:
            message = f"`high` is {self.high:g}, but must be more than `low`, {self.low:g}"
            yield Problem(("high",), "S270", message, "raise `high`, or lower `low`", (("low", ("low",)),))


class Llama3(Scaling):
    """The scaling of Llama 3.1. A pair that is neither slow nor fast has a weighted mean of the slowed and unchanged
    frequencies. The weight is linear in the number of turns of the pair over `trained` tokens.

    Attributes:
        high: a pair is fast if it makes at least this many turns over `trained` tokens.
    """

    kind: Literal["llama3"]
    high: PositiveFloat = 4.0

    def share(self, dims: int, base: float) -> str:
        return f"min(max(({self.trained} / ({2 * pi!r} / f) - {self.low!r}) / {self.high - self.low!r}, 0), 1)"


class Yarn(Scaling):
    """YaRN (Peng et al., 2023). A pair that is neither slow nor fast has a weighted mean of the slowed and unchanged
    frequencies. The weight is linear in the index of the pair. Queries and keys are multiplied by `magnitude`.

    Attributes:
        high: a pair is fast if it makes at least this many turns over `trained` tokens.
        whole: whether the two pair indices between which the weight changes are rounded to whole numbers, the smaller
            index down and the larger index up.
        magnitude: the factor of queries and keys after the rotation: a number or a formula of `factor`.
    """

    kind: Literal["yarn"]
    high: PositiveFloat = 32.0
    whole: bool = True
    magnitude: Annotated[float | str, formula("factor")] = "0.1 * log(factor) + 1"

    @property
    def multiplier(self) -> float:
        return value_of(self.magnitude, factor=self.factor)

    def settings(self) -> str:
        return self.model_copy(update={"magnitude": self.multiplier}).model_dump_json()

    def share(self, dims: int, base: float) -> str:
        first, last = (dims * log(self.trained / (turns * 2 * pi)) / (2 * log(base)) for turns in (self.high, self.low))
        if self.whole:
            first, last = floor(first), ceil(last)
        first, last = max(first, 0), min(last, dims - 1)
        span = last - first if last != first else 0.001
        return f"1 - min(max((pair - {first!r}) / {span!r}, 0), 1)"


class RopeSpec(StrictModel):
    """Rotary positions (Su et al., 2021). Pair i of R pairs of channels turns by base ** (-i / R) radians per token.

    With `trained`, a longer context has a larger base: base * (context / trained) ** (dims / (dims - 2)). Over the
    whole context, the slowest pair then rotates as far as the slowest pair of the unchanged `base` rotates over
    `trained` tokens (NTK-aware scaling). The context is the maximum context of the model, not the length of the input.
    Cached keys therefore stay valid when a text grows.

    Attributes:
        dims: the number of rotated channels of each head, counted from the first channel. By default, all channels.
        base: the base of the powers in the formula above.
        trained: the context length, in tokens, with which `base` was trained.
        pairs: the channels of pair i. `halves`: i and R + i. `neighbors`: 2 i and 2 i + 1.
        turn: the direction. `forward`: a pair (a, b) at angle t becomes (a cos t - b sin t, b cos t + a sin t), as in
            the models of Hugging Face Transformers. `backward`: a rotation by the opposite angle.
        scaling: scaled frequencies: an expression of the frequency `f` and the index `pair`, such as `f / 8`; or a
            published kind.
    """

    dims: Annotated[int, Field(gt=0, le=4096)] | None = None
    base: Annotated[float, Field(gt=0, le=1e15)] = 10000.0
    trained: Positive | None = later(None)
    pairs: Literal["halves", "neighbors"] = later("halves")
    turn: Literal["forward", "backward"] = later("forward")
    scaling: Frequency | Annotated[Llama3 | Yarn, Field(discriminator="kind")] | None = later(None)

    @property
    def magnitude(self) -> float:
        return self.scaling.multiplier if isinstance(self.scaling, Scaling) else 1.0

    def angles(self, size: int, context: int) -> RopeAngles:
        """Returns the angles without scaling, for heads of `size` channels in a model of `context` tokens."""
        dims = self.dims or size
        if self.trained is None or context <= self.trained:
            return RopeAngles(dims, self.base)
        return RopeAngles(dims, self.base * (context / self.trained) ** (dims / (dims - 2)))

    def formula(self, size: int, context: int) -> str | None:
        """Returns the base of the angles as a formula, if the context is longer than `trained` and therefore raises the
        base. Otherwise, returns None."""
        dims = self.dims or size
        if self.trained is None or context <= self.trained:
            return None
        return f"{self.base:g} * ({context} / {self.trained}) ** ({dims} / {dims - 2})"

    def table(self, size: int, context: int) -> "RopeTable":
        """Returns the table of angles for heads of `size` channels in a model of `context` tokens. Layers with equal
        rotations share one table."""
        angles = self.angles(size, context)
        # the name holds every setting of the angles, so only layers with equal rotations share a table
        name = f"rope{angles.dims}_{angles.base:.17g}".replace(".", "p").replace("+", "")
        if self.scaling is not None:
            settings = self.scaling if isinstance(self.scaling, str) else self.scaling.settings()
            name += f"_{getattr(self.scaling, 'kind', 'scaled')}_{zlib.crc32(settings.encode()):08x}"
        name += "_backward" * (self.turn == "backward")
        formula = self.formula(size, context)
        return RopeTable(name, angles.output_labels, positional=True, angles=angles, formula=formula, spec=self)

    def problems_in(self, size: int) -> Iterator[Problem]:
        dims, place = self.dims or size, ("dims",) if self.dims else ()
        if dims > size:
            hint = f"use at most {size}, or remove `dims` to rotate all"
            yield Problem(place, "S212", f"RoPE rotates {dims} dims, but a head has {size}", hint)
        if dims > MOST_DIMS:
            message = f"RoPE has {dims:,} dims; it rotates at most {MOST_DIMS:,}"
            yield Problem(place, "S212", message, f"use at most {MOST_DIMS:,}")
        elif dims % 2:
            message = f"RoPE has {dims} dims; it rotates pairs, so the number must be even"
            yield Problem(place, "S213", message, "use an even number")
        elif self.trained is not None and dims == 2:
            message = (
                "`trained` has no effect: RoPE with 2 dims has one pair, whose frequency does not depend on the base"
            )
            yield Problem(("trained",), "S242", message, "remove `trained`, or rotate more `dims`")
        else:
            yield from self._scaling_problems(dims)

    def _scaling_problems(self, dims: int) -> Iterator[Problem]:
        scaling = self.scaling
        if scaling is None or (isinstance(scaling, Scaling) and any(scaling.problems())):
            return
        try:
            share = parse(scaling.share(dims, self.base) if isinstance(scaling, Scaling) else scaling)
            for pair in range(dims // 2):
                number(share, f=self.base ** (-2 * pair / dims), pair=float(pair))
            if isinstance(scaling, Scaling) and scaling.multiplier <= 0:
                raise ExprError(f"`magnitude` is {scaling.multiplier:g}, but must be positive")
        except (ExprError, ArithmeticError) as error:
            reason = "a power of the base overflows" if isinstance(error, OverflowError) else "log(base) is 0"
            message = f"the RoPE frequencies cannot be computed: {getattr(error, 'message', reason)}"
            yield Problem(("scaling",), "S270", message, "change `scaling` or `base`")


@record
class RopeTable(Shared):
    """The cosine and sine of the rotary angles at each position."""

    angles: RopeAngles | None = None
    formula: str | None = field(default=None, compare=False)  # the name holds every setting
    spec: RopeSpec | None = field(default=None, compare=False)

    def rotate(self, b: Builder, x: str, name: str, context: LoweringContext) -> str:
        assert self.spec is not None
        op = Rope(self.spec.pairs == "neighbors", self.spec.magnitude != 1)
        return b.add(name, op, (x, *(context.shared[ref] for ref in self.refs)))

    def lower(self, b: Builder, context: LoweringContext) -> tuple[str, ...]:
        assert self.angles is not None and self.spec is not None
        if self.formula is not None:
            b.constant("rope_base", self.angles.base, self.formula)
        positions, scaling = context.positions, self.spec.scaling
        if self.spec.turn == "forward":  # the ops turn backward
            positions = pointwise(b, f"{self.name}.positions", "-positions", positions=positions)
        if scaling is None:
            return output_refs(b.add(self.name, self.angles, (positions,)), 2)
        dims, base = self.angles.dims, self.angles.base
        pair = b.add(f"{self.name}.pair", RotaryPairs(dims // 2), (positions,))
        f = b.add(f"{self.name}.f", RotaryFrequencies(base), (pair,))
        if isinstance(scaling, str):
            scaled = pointwise(b, f"{self.name}.scaled", scaling, f=f, pair=pair)
        else:
            share = pointwise(b, f"{self.name}.share", scaling.share(dims, base), f=f, pair=pair)
            blend = f"(1 - share) * f / {scaling.factor!r} + share * f"
            scaled = pointwise(b, f"{self.name}.scaled", blend, f=f, share=share)
        return output_refs(b.add(self.name, RotaryAngles(self.spec.magnitude), (positions, scaled)), 2)
