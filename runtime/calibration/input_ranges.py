"""Measures the range of each input feature of int8 matrix products, and computes the scales by which the inputs are
quantized.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from specc.compiler.int8.editor import Source
from specc.compiler.ir.graph import Node
from specc.compiler.ops.quantized import LARGEST
from specc.compiler.passes.assign_quant import Allocation
from specc.compiler.programs import reference
from specc.compiler.programs.programs import Programs
from specc.compiler.quant.scheme import Range
from specc.runtime.calibration.input_scales import SLOT
from specc.runtime.errors import QuantizeError

Rows = Callable[[], Iterator[Mapping[str, Tensor]]]


def input_ranges(
    programs: Programs,
    sources: Sequence[Source],
    batches: Iterable[Mapping[str, Tensor]],
    weights: Mapping[str, Tensor],
    progress: Callable[[int], None] | None = None,
    scales: Mapping[str, Tensor] | None = None,
) -> dict[str, Range]:
    """Returns the input range of each int8 product in the program `score`, by the name of the weight of the product.

    Products with the same input have the same range. In a bidirectional layer, one tensor contains the input features
    of several products. Each product then has the range of its own features. The reference implementations of the ops
    compute all values, in the dtype of `weights`.

    Args:
        programs: the lowered programs, before any pass.
        sources: the int8 products.
        batches: batches of calibration data: the inputs of `score` by name, on the device of `weights`.
        weights: the parameters by name, f32 or f64.
        progress: called after each batch with the number of rows processed so far.
        scales: input scales, f32 [1] or [K] each, for which the clipping error is also measured. A key is the name of
            the first weight that reads the input. None measures no clipping error.

    Returns:
        The ranges by weight name, in f64.

    Raises:
        QuantizeError: if no batch contains an input of a product, or an input contains NaN or infinity.
    """
    by_weight = {f"@{source.weight}": source for source in sources}
    measured: dict[str, _InputRange] = {}

    def observe(node: Node, inputs: list[Tensor], outputs: tuple[Tensor, ...]) -> None:
        for source in [by_weight[ref] for ref in node.inputs if ref in by_weight]:
            for value in [inputs[i] for i in source.read] + [outputs[i] for i in source.outputs]:
                part = value.detach().chunk(source.parts, -1)[source.part]
                rows = part.double().flatten(0, -2)
                if not bool(rows.isfinite().all()):
                    message = f"{source.node}: the input contains NaN or infinity"
                    raise QuantizeError(message, "calibrate from an earlier checkpoint")
                if source.leader not in measured:
                    measured[source.leader] = _InputRange(rows, (scales or {}).get(source.leader))
                measured[source.leader].take(rows)

    done = 0
    with torch.no_grad():
        for batch in batches:
            reference.run(programs, "score", batch, weights, observe)
            done += len(next(iter(batch.values())))
            if progress is not None:
                progress(done)
    if missing := [source.node for source in sources if source.leader not in measured]:
        raise QuantizeError(f"{missing[0]}: no calibration data reached this weight")
    return {source.weight: measured[source.leader].range for source in sources}


class _InputRange:
    """Accumulates the range of one input over rows, f64 [.., K].

    With `scale`, the class also counts the values that int8 quantization with this scale clips, and sums their squared
    errors.
    """

    def __init__(self, rows: Tensor, scale: Tensor | None) -> None:
        features = rows.shape[1]
        self._largest = rows.new_zeros(features)
        self._products, self._count = rows.new_zeros(features, features), 0
        self._scale = None if scale is None else scale.to(rows)
        self._beyond, self._clipped = rows.new_zeros(features), 0

    def take(self, rows: Tensor) -> None:
        self._largest = torch.maximum(self._largest, rows.abs().amax(0))
        self._products += rows.T @ rows
        self._count += len(rows)
        if self._scale is not None:
            lost = (rows.abs() - LARGEST * self._scale).clamp(min=0)
            self._beyond += lost.square().sum(0)
            self._clipped += int((lost > self._scale / 2).sum())

    @property
    def range(self) -> Range:
        beyond = None if self._scale is None else self._beyond / self._count
        share = self._clipped / (self._count * len(self._largest))
        return Range(self._largest, self._products / self._count, beyond, share)


def input_scales(
    programs: Programs, sources: Sequence[Source], schemes: Allocation, rows: Rows, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Measures the range of each input of int8 products. Returns the input scale that the quantization scheme of the
    weight selects for this range.

    Args:
        programs: the lowered programs, before any pass.
        sources: the int8 products.
        schemes: the quantization scheme of each parameter.
        rows: a function that returns batches of calibration data. A batch contains the inputs of `score` by name.
        weights: the parameters by name, f32, all on one device.

    Returns:
        The scales, f32 [1] or [K]. A key is the name of the first weight that reads the input.

    Raises:
        QuantizeError: as raised by `input_ranges`.
    """
    device = next(iter(weights.values())).device
    batches = ({name: ids.to(device) for name, ids in batch.items()} for batch in rows())
    ranges = input_ranges(programs, sources, batches, weights)
    scales: dict[str, Tensor] = {}
    for leader in dict.fromkeys(source.leader for source in sources):
        shared = [weights[source.weight] for source in sources if source.leader == leader]
        scale = schemes[leader].input_scale(ranges[leader], shared)
        assert scale is not None  # every integer scheme computes an input scale
        scales[leader] = scale
    return scales


def trained_scales(optimizer: Mapping[str, Tensor], sources: Sequence[Source]) -> dict[str, Tensor]:
    """Returns the input scales in the optimizer state `optimizer` of a checkpoint.

    A key of the result is the name of the first weight that reads the input. The result is empty if the run did not yet
    quantize inputs when it wrote the checkpoint.
    """
    slots = {source.leader: optimizer.get(f"{SLOT}/{source.leader}") for source in sources}
    scales = {leader: scale for leader, scale in slots.items() if scale is not None}
    return scales if any(bool((scale != 1).any()) for scale in scales.values()) else {}
