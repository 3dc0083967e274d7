"""The report of a quantization: errors and sizes of each parameter."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.compiler.int8.editor import Source
from specc.compiler.ops.quantized import LARGEST, step_of
from specc.compiler.quant.scheme import Range, Scheme, Solution
from specc.runtime.artifact.quantized_model import QuantizedModel, dequantized
from specc.runtime.quantize.quantizer import Quantizer
from specc.runtime.tables import spaced

COLUMNS = 100  # the maximum number of columns of a text table
MANY = 40  # a longer table has one line per role


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter after quantization.

    Attributes:
        name: the name of the parameter.
        scheme: the label of the scheme.
        bits: the number of bits per value.
        mse: the mean squared error of the weights.
        output_error: the relative error of the output, ||dW X|| / ||W X||. W is the trained matrix, dW is the
            quantization error, and X are the calibration inputs. The value is computed from the Hessian H of the
            inputs, as sqrt(tr(dW H dW^T) / tr(W H W^T)). None without a Hessian.
        bytes: the number of stored bytes before compression.
        compressed: the estimated number of bytes after compression.
        added_nats: the increase of the loss, in nats per token, that bit allocation estimated; None without bit
            allocation.
        solution: the damping of the Hessian, and the number of columns whose input is always 0; None without a Hessian.
    """

    name: str
    scheme: str
    bits: float
    mse: float
    output_error: float | None
    bytes: int
    compressed: int
    added_nats: float | None
    solution: Solution | None = None


@dataclass(frozen=True, slots=True)
class InputRow:
    """One input of int8 products.

    Attributes:
        maker: the name of the node that computes the input.
        weights: the names of the weights that multiply the input.
        features: the number of features K of the input.
        peak: the largest magnitude during calibration.
        rms: the root mean square of the values during calibration.
        scale: the largest of the scales of all features.
        spread: the ratio of the largest scale to the smallest scale.
        bits: 8, or 16 if a second int8 code of each value stores the rounding error of the first code.
        reach: the largest magnitude of a value, relative to the largest magnitude that an int8 code with the same scale
            represents. If `reach` is above 1, some values are clipped.
        clipped: the fraction of values that clipping changes by more than half a scale.
        error: the root mean square of the expected error of rounding and clipping, divided by `rms`.
    """

    maker: str
    weights: tuple[str, ...]
    features: int
    peak: float
    rms: float
    scale: float
    spread: float
    bits: int
    reach: float
    clipped: float
    error: float


def input_report(sources: Sequence[Source], ranges: Mapping[str, Range], model: QuantizedModel) -> tuple[InputRow, ...]:
    """Returns one row for each distinct input of the products in `sources`, in the order in which the products first
    read the inputs.

    Args:
        sources: the int8 products. Products with a common input have the same `leader`, which is the name of the first
            weight that multiplies the input.
        ranges: the measured range of each input, by `leader`.
        model: the quantized arrays, with the input scales.
    """
    shared: dict[str, list[Source]] = {}
    for source in sources:
        shared.setdefault(source.leader, []).append(source)
    rows: list[InputRow] = []
    for leader, members in shared.items():
        seen, features = ranges[leader], model.shapes[leader][1]
        scale = torch.from_numpy(model.tensors[leader]["input_scale"].copy()).double().expand(features)
        square = float(seen.square.sum())
        bits = model.schemes[leader].input_bits
        wrong = step_of(bits) ** 2 / 12 * float(scale.square().sum())
        wrong += float(seen.beyond.sum()) if seen.beyond is not None else 0.0
        rows.append(
            InputRow(
                members[0].node if members[0].outputs else members[0].maker,
                tuple(member.weight for member in members),
                features,
                float(seen.largest.max()),
                math.sqrt(square / features),
                float(scale.max()),
                float(scale.max() / scale.min()),
                bits,
                float((seen.largest.cpu() / (LARGEST * scale)).max()),
                seen.clipped,
                math.sqrt(wrong / square) if square else 0.0,
            )
        )
    return tuple(rows)


def clipped_line(rows: Sequence[InputRow]) -> str:
    """Returns a line that lists the clipped inputs by descending `reach`; empty if no input is clipped."""
    clipped = sorted((row for row in rows if row.clipped), key=lambda row: -row.reach)
    if not clipped:
        return ""
    inputs = [f"{row.weights[0]} (to {row.reach:.3g} times the range, {row.clipped:.2%} of values)" for row in clipped]
    problem = "inputs exceed the range of their scale from training and are clipped"
    return f"{problem}: {', '.join(inputs)}; with a smaller train.qat.below, training measures the scale later"


def input_table(rows: Sequence[InputRow]) -> str:
    """Returns the rows as aligned text with a header; empty if there are no rows."""
    if not rows:
        return ""
    cells = [("input of", "made by", "peak", "rms", "scale", "spread", "bits", "error")]
    for row in rows:
        more = f" and {len(row.weights) - 1} more" if len(row.weights) > 1 else ""
        numbers = (f"{row.peak:.4g}", f"{row.rms:.4g}", f"{row.scale:.4g}", f"{row.spread:.3g}")
        cells.append((f"{row.weights[0]}{more}", row.maker, *numbers, str(row.bits), f"{row.error:.3%}"))
    return spaced(cells, left=2)


def report(quantizer: Quantizer, schemes: Mapping[str, Scheme]) -> tuple[Row, ...]:
    """Returns one row per parameter, in the order of `schemes`, with errors relative to the trained parameters."""
    hessians = quantizer.statistics.hessians
    rows: list[Row] = []
    for name, scheme in schemes.items():
        weight = quantizer.weights[name].detach().cpu().double()
        stored = quantizer.model({name: scheme})
        delta = weight - dequantized(stored)[name].double()
        hessian = hessians[name].cpu().double() if name in hessians else None
        rows.append(
            Row(
                name,
                scheme.label(),
                scheme.bits_per_value(),
                float(delta.square().mean()),
                None if hessian is None else _output_error(delta, weight, hessian),
                sum(array.bytes for array in scheme.stored(stored.shapes[name])),
                quantizer.estimate({name: scheme}),
                quantizer.rise(name, scheme),
                quantizer.solutions.get((name, scheme)),
            )
        )
    return tuple(rows)


def _output_error(delta: Tensor, weight: Tensor, hessian: Tensor) -> float:
    """Returns sqrt(tr(dW H dW^T) / tr(W H W^T)), with the traces summed over experts.

    dW is `delta`, W is `weight` and H is `hessian`. If the denominator is zero, the result is 0 or infinity.
    """
    # Scale the Hessian to a largest entry of 1, which prevents underflow and overflow. The ratio does not change.
    largest = float(hessian.abs().max())
    hessian = hessian / largest if largest > 0 else hessian
    wrong = max(float((delta @ hessian * delta).sum()), 0.0)
    output = max(float((weight @ hessian * weight).sum()), 0.0)
    if output == 0.0:
        return 0.0 if wrong == 0.0 else math.inf
    return math.sqrt(wrong / output)


def solution_line(rows: Sequence[Row]) -> str:
    """Returns a line about the damping of Hessians; empty if there are no Hessians.

    The line lists each parameter whose Hessian needed more damping than usual, and each parameter with columns whose
    input is always 0.
    """
    solved = {row.name: row.solution for row in rows if row.solution is not None}
    if not solved:
        return ""
    requested = " or ".join(f"{damping:g}" for damping in sorted({solution.requested for solution in solved.values()}))
    more = [
        f"{name} by {solution.damping:g}" for name, solution in solved.items() if solution.damping > solution.requested
    ]
    dead = [f"{solution.dead:,} columns of {name}" for name, solution in solved.items() if solution.dead]
    parts = [f"{len(solved)} Hessians damped by {requested} times their mean diagonals"]
    parts += [f"more where Cholesky failed: {', '.join(more)}"] if more else []
    parts += [f"rounded to nearest, because they had no input: {', '.join(dead)}"] if dead else []
    return "; ".join(parts)


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as aligned text of at most 100 columns, with a header and a total.

    A table of more than 40 rows has one line for all parameters whose names differ only in numbers. The line shows the
    largest error of these parameters, and the sums of their nats and bytes.
    """
    roles: dict[str, list[Row]] = {}
    for row in rows:
        alike = ".".join("*" if word.isdigit() else word for word in row.name.split("."))
        roles.setdefault(alike if len(rows) > MANY else row.name, []).append(row)
    cells: list[tuple[str, ...]] = [
        ("parameter", "bits", "weight mse", "output error", "added nats", "compressed", "bytes")
    ]
    cells += [
        (f"{name} x {len(members)}" if len(members) > 1 else name, *_cells(members)) for name, members in roles.items()
    ]
    sums = _cells(rows)[3:]
    cells.append(("total", "", "", "", *sums))
    if all(row.added_nats is None for row in rows):
        cells = [(*line[:4], *line[5:]) for line in cells]
    room = COLUMNS - sum(2 + max(len(line[i]) for line in cells) for i in range(1, len(cells[0])))
    return spaced([(_shortened(line[0], room), *line[1:]) for line in cells])


def _cells(rows: Sequence[Row]) -> tuple[str, ...]:
    bits = sorted({row.bits for row in rows})
    errors = [row.output_error for row in rows if row.output_error is not None]
    nats = [row.added_nats for row in rows if row.added_nats is not None]
    return (
        f"{bits[0]:g}" if len(bits) == 1 else f"{bits[0]:g} to {bits[-1]:g}",
        f"{max(row.mse for row in rows):.2e}",
        f"{max(errors):.3%}" if errors else "-",
        f"{sum(nats):.2e}" if nats else "-",
        f"{sum(row.compressed for row in rows):,}",
        f"{sum(row.bytes for row in rows):,}",
    )


def _shortened(name: str, room: int) -> str:
    if len(name) <= room:
        return name
    end = (room - 1) // 2
    return f"{name[: room - 1 - end]}…{name[len(name) - end :]}"
