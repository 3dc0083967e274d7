"""The scales of the inputs of int8 products: measured while a run trains, and kept by its checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from specc.compiler.int8.products import Source
from specc.compiler.passes.assign_quant import Allocation
from specc.compiler.programs.programs import Programs
from specc.runtime.calibration.input_scales import SLOT
from specc.runtime.calibration.ranges import input_ranges

Rows = Callable[[], Iterator[Mapping[str, Tensor]]]


def input_scales(
    programs: Programs,
    sources: Sequence[Source],
    schemes: Allocation,
    rows: Rows,
    weights: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The scale f32 [1] or [K] of each input of `sources`, by the first weight that reads it, as its scheme chooses it
    for `weights` (f32, by name, all on one device) and for what `rows` give the program `score`.

    `programs` are those before any pass. Raises QuantizeError as `input_ranges` does.
    """
    device = next(iter(weights.values())).device
    batches = ({name: ids.to(device) for name, ids in batch.items()} for batch in rows())
    ranges = input_ranges(programs, sources, batches, weights)
    found: dict[str, Tensor] = {}
    for leader in dict.fromkeys(source.leader for source in sources):
        shared = [weights[source.weight] for source in sources if source.leader == leader]
        scale = schemes[leader].input_scale(ranges[leader], shared)
        assert scale is not None  # schemes for whole numbers have one
        found[leader] = scale
    return found


def trained_scales(optimizer: Mapping[str, Tensor], sources: Sequence[Source]) -> dict[str, Tensor]:
    """The scales that a run trained with, by the first weight that reads an input, from the optimizer state of its
    checkpoint; empty where it rounded no inputs, or none yet."""
    found = {source.leader: optimizer.get(f"{SLOT}/{source.leader}") for source in sources}
    kept = {leader: scale for leader, scale in found.items() if scale is not None}
    return kept if any(bool((scale != 1).any()) for scale in kept.values()) else {}
