"""What quantization did to each parameter, as rows and as a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.compiler.int8.products import Source
from specc.compiler.ops.quantized import LARGEST, step_of
from specc.compiler.quant.scheme import Range, Scheme, Solution
from specc.runtime.artifact.quantized_model import QuantizedModel, dequantized, entropy_bytes
from specc.runtime.quantize.bit_allocation import added_nats
from specc.runtime.quantize.quantizer import Statistics

COLUMNS = 100  # of a terminal that tables are made for
MANY = 40  # rows of a table; more are told by role


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter after quantization.

    `mse` is the mean squared error of the weights. `output_error` is ||dW X|| / ||W X|| over the calibration
    inputs, which is sqrt(tr(dW H dW^T) / tr(W H W^T)); None without a Hessian. `bytes` is stored bytes before
    compression, `compressed` about how many they take after it. `added_nats` is what the error adds to the loss, a
    token, by the estimate that bits are allocated by; None where there is none. `solution` says how it was solved for
    by its Hessian, where it was.
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
    """One input of int8 products. `maker` is what made it, `weights` what it is multiplied by. `peak` is the largest
    magnitude that calibration saw, `rms` the root mean square; `scale` the largest of its features', which differ by
    the factor `spread`; of `bits` 16 a scale is of 254 steps. `reach` is the largest magnitude as a share of the range
    of its feature's scale, beyond which inputs are cut off: above 1 it can be where a run trained with the scale.
    `clipped` is the share of numbers that lose more than half a scale so, which is what a second code, of 16 bits,
    still reaches. `error` is what rounding to these steps costs by expectation, with what was cut off, as a share
    of `rms`: sqrt(sum_k (step_k^2 / 12 + E[lost_k^2])) / sqrt(sum_k E[x_k^2]).
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
    """A row for each input of `sources`, in their order."""
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
                members[0].node if members[0].made else members[0].maker,
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
    """A line about the inputs that their scales do not reach to, the farthest first; empty where there are none."""
    found = sorted((row for row in rows if row.clipped), key=lambda row: -row.reach)
    if not found:
        return ""
    each = [f"{row.weights[0]} (to {row.reach:.3g} times it, {row.clipped:.2%} of its numbers)" for row in found]
    told = "inputs are cut off beyond the range of the scale that training measured"
    return f"{told}: {', '.join(each)}; a smaller train.qat.below measures it later"


def input_table(rows: Sequence[InputRow]) -> str:
    """The rows as aligned text, with a header; empty without any."""
    if not rows:
        return ""
    cells = [("input of", "made by", "peak", "rms", "scale", "spread", "bits", "error")]
    for row in rows:
        more = f" and {len(row.weights) - 1} more" if len(row.weights) > 1 else ""
        numbers = (f"{row.peak:.4g}", f"{row.rms:.4g}", f"{row.scale:.4g}", f"{row.spread:.3g}")
        cells.append((f"{row.weights[0]}{more}", row.maker, *numbers, str(row.bits), f"{row.error:.3%}"))
    return _aligned(cells)


def report(
    params: Mapping[str, Tensor],
    model: QuantizedModel,
    statistics: Statistics,
    solutions: Mapping[tuple[str, Scheme], Solution] | None = None,
) -> tuple[Row, ...]:
    """A row per parameter, in the model's order.

    Args:
        params: the originals, f32.
        model: the quantized arrays.
        statistics: of the calibration; names may be missing.
        solutions: by (name, scheme), as `Quantizer.solutions`; keys may be missing.
    """
    solutions = solutions or {}
    hessians, gradients = statistics.hessians, statistics.gradients
    restored = dequantized(model)
    rows: list[Row] = []
    for name, scheme in model.schemes.items():
        weight = params[name].detach().cpu().double()
        delta = weight - restored[name].double()
        hessian = hessians[name].cpu().double() if name in hessians else None
        rows.append(
            Row(
                name,
                scheme.label(),
                scheme.bits_per_value(),
                float(delta.square().mean()),
                None if hessian is None else _output_error(delta, weight, hessian),
                sum(stored.bytes for stored in scheme.stored(model.shapes[name])),
                entropy_bytes(model.only(name)),
                added_nats(delta, hessian, gradients[name].cpu()) if name in gradients else None,
                solutions.get((name, scheme)),
            )
        )
    return tuple(rows)


def _output_error(delta: Tensor, weight: Tensor, hessian: Tensor) -> float:
    """0 where there is no output to be wrong; infinity where there was none and now there is."""
    # Scaled to a largest entry of 1, so that no Hessian under- or overflows; the ratio does not change.
    largest = float(hessian.abs().max())
    hessian = hessian / largest if largest > 0 else hessian
    wrong = max(float((delta @ hessian * delta).sum()), 0.0)
    whole = max(float((weight @ hessian * weight).sum()), 0.0)
    if whole == 0.0:
        return 0.0 if wrong == 0.0 else math.inf
    return math.sqrt(wrong / whole)


def solution_line(rows: Sequence[Row]) -> str:
    """By how much Hessians were damped, which of them by more than the rest, and where columns had no input; empty
    where nothing was solved for."""
    solved = {row.name: row.solution for row in rows if row.solution is not None}
    if not solved:
        return ""
    asked = " or ".join(f"{damping:g}" for damping in sorted({one.asked for one in solved.values()}))
    more = [f"{name} by {one.damping:g}" for name, one in solved.items() if one.damping > one.asked]
    dead = [f"{one.dead:,} columns of {name}" for name, one in solved.items() if one.dead]
    parts = [f"{len(solved)} Hessians damped by {asked} mean diagonals"]
    parts += [f"as Cholesky failed there, {', '.join(more)}"] if more else []
    parts += [f"without input, so rounded to nearest: {', '.join(dead)}"] if dead else []
    return "; ".join(parts)


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text of at most 100 columns, with a header and a total. Of more than 40 rows there is a line
    for those of each role, whose names differ in the layer's number alone, with the largest of their errors and the
    sums of the rest."""
    roles: dict[str, list[Row]] = {}
    for row in rows:
        alike = ".".join("*" if word.isdigit() else word for word in row.name.split("."))
        roles.setdefault(alike if len(rows) > MANY else row.name, []).append(row)
    cells: list[tuple[str, ...]] = [
        ("parameter", "bits", "weight mse", "output error", "added nats", "compressed", "bytes")
    ]
    cells += [(f"{name} x {len(one)}" if len(one) > 1 else name, *_told(one)) for name, one in roles.items()]
    sums = _told(rows)[3:]
    cells.append(("total", "", "", "", *sums))
    if all(row.added_nats is None for row in rows):
        cells = [(*line[:4], *line[5:]) for line in cells]
    room = COLUMNS - sum(2 + max(len(line[i]) for line in cells) for i in range(1, len(cells[0])))
    return _aligned([(_shortened(line[0], room), *line[1:]) for line in cells], left=1)


def _told(rows: Sequence[Row]) -> tuple[str, ...]:
    """What `table` says of rows of one role, after their name."""
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
    """A name without its middle, where it is longer than `room`; its ends tell it from others."""
    if len(name) <= room:
        return name
    end = (room - 1) // 2
    return f"{name[: room - 1 - end]}…{name[len(name) - end :]}"


def _aligned(cells: Sequence[tuple[str, ...]], left: int = 2) -> str:
    """Columns, the first `left` to the left, the others to the right."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = []
    for line in cells:
        padded = [cell.ljust(width) for cell, width in zip(line[:left], widths[:left], strict=True)]
        padded += [cell.rjust(width) for cell, width in zip(line[left:], widths[left:], strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
