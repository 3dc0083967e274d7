"""Measures the inputs of products that will be computed in whole numbers: the largest magnitude of each."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from specc.compiler import reference
from specc.compiler.ir import Node
from specc.compiler.passes.quantize_products import Source
from specc.compiler.programs import Programs
from specc.runtime.errors import QuantizeError


def input_peaks(
    programs: Programs,
    sources: Sequence[Source],
    batches: Iterable[Mapping[str, Tensor]],
    weights: Mapping[str, Tensor],
    progress: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """The largest |x| that each product of `sources` meets in the program `score`, by weight; those that share an input
    have it in common.

    `programs` are those before any pass, `batches` the inputs of `score` by name, on the device of `weights` (by name,
    f32 or f64), in whose precision everything is computed, from the ops' references. After each batch `progress` is
    told the rows so far. Raises QuantizeError for a product that no batch reached, and for an input of NaN or infinity.
    """
    by_weight = {f"@{source.weight}": source for source in sources}
    peaks: dict[str, float] = {}

    def observe(node: Node, given: list[Tensor], made: tuple[Tensor, ...]) -> None:
        for source in [by_weight[ref] for ref in node.inputs if ref in by_weight]:
            values = [given[i] for i in source.read] + [made[i] for i in source.made]
            peak = max(float(value.detach().abs().max()) for value in values)
            if not math.isfinite(peak):
                raise QuantizeError(
                    f"{source.node}: its input holds NaN or infinity", "calibrate from an earlier checkpoint"
                )
            peaks[source.leader] = max(peaks.get(source.leader, 0.0), peak)

    done = 0
    with torch.no_grad():
        for batch in batches:
            reference.run(programs, "score", batch, weights, observe)
            done += len(next(iter(batch.values())))
            if progress is not None:
                progress(done)
    if missing := [source.node for source in sources if source.leader not in peaks]:
        raise QuantizeError(f"{missing[0]}: calibration gave its input no rows")
    return {source.weight: peaks[source.leader] for source in sources}
