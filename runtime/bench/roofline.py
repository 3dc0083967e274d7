"""Draws the roofline picture: the performance of each kernel, and the two measured peak rates.

Drawing needs matplotlib. The input is the JSON data of a report, so that the measurements do not need matplotlib.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specc.compiler.plan.lock import Machine
from specc.runtime.bench.variants import COMPILE, GENERATED, LIBRARY, MAX_AUTOTUNE
from specc.runtime.pictures import new_figure, png, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KERNEL_COLOR, GROUP_COLOR, LIBRARY_COLOR, COMPILE_COLOR, LINE = "#0b5cad", "#0f766e", "#6b7280", "#d97706", "#374151"
SPACING = 30.0  # the distance in points between the centers of adjacent labels, if the space suffices
SHARE = 0.62  # the fraction of the width for the marks; the labels use the rest
TERA = 1e12
Row = Mapping[str, Any]  # a kernel or a group in the data of a report


def require() -> None:
    """Raises EnvironmentFailure if matplotlib is not installed."""
    require_matplotlib("a roofline picture")


def roofline(data: Mapping[str, Any]) -> bytes:
    """Draws the roofline picture of a report.

    Args:
        data: the data of a report, as `report.data` returns it, with at least one kernel or group.

    Returns:
        A PNG of 1500 x 900 pixels, with a mark for each kernel and group. The x-axis shows operations per byte, and the
        y-axis shows the measured operations per second.

    Raises:
        EnvironmentFailure: if matplotlib is missing.
    """
    require()
    figure = new_figure(12.5, 7.5)
    axes = figure.add_subplot()
    rows: list[Row] = [*data["kernels"], *data["groups"]]
    _ceilings(axes, data["ceilings"], rows)
    _points(axes, rows)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    machine = Machine.model_validate(data["machine"])
    figure.suptitle(f"{data['spec']} for {data['target']} on {machine.gpu}", fontsize=15, weight="bold")
    lines = (f"{data['date']} · {', '.join(machine.versions)}", data["command"])
    axes.set_title("\n".join(filter(None, lines)), fontsize=9, color=LINE)
    figure.draw_without_rendering()  # computes the layout, because the labels depend on it
    figure.set_layout_engine("none")
    _labels(axes, rows, data["ceilings"])
    return png(figure)


def _time(row: Row) -> float:
    times = row["times"]
    return float((times.get(GENERATED) or times[LIBRARY])["ms"])


def _position(row: Row, variant: str | None = None) -> tuple[float, float]:
    ms = _time(row) if variant is None else row["times"][variant]["ms"]
    return row["flops"] / row["bytes"], row["flops"] / (1e-3 * ms) / TERA


def _ceilings(axes: "Axes", ceilings: Mapping[str, Any], rows: Sequence[Row]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    rate, bandwidth = ceilings["flops_per_second"], ceilings["bytes_per_second"]
    ridge, size = rate / bandwidth, ceilings["gemm_size"]
    positions = [_position(row, variant) for row in rows for variant in (None, *row["times"])]
    left, most = min([ridge, *(x for x, _ in positions)]) / 3, max([ridge, *(x for x, _ in positions)]) * 1.2
    right = left * (most / left) ** (1 / SHARE)
    low, high = min([rate / TERA / 4, *(y for _, y in positions)]) / 2.5, rate / TERA * 1.6
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, high))
    axes.set_xlabel("operations per byte (FLOP/B), bytes as the compiler counts them")
    axes.set_ylabel(f"TFLOP/s, {ceilings['dtype']}")
    axes.grid(True, color="#e5e7eb", linewidth=0.6)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axis.set_minor_locator(NullLocator())
    copy = f"copy, {bandwidth / 1e9:,.0f} GB/s"
    gemm = f"GEMM of {size} x {size} x {size}, {rate / TERA:,.3g} TFLOP/s"
    axes.plot([left, ridge], [left * bandwidth / TERA, rate / TERA], color=LINE, linewidth=2, label=copy)
    axes.plot([ridge, right], [rate / TERA] * 2, color=LINE, linewidth=2, linestyle=(0, (6, 2)), label=gemm)


def _points(axes: "Axes", rows: Sequence[Row]) -> None:
    kinds = (
        ("generated kernel", KERNEL_COLOR, "o", [row for row in rows if GENERATED in row["times"] and row["language"]]),
        ("fused group", GROUP_COLOR, "D", [row for row in rows if not row["language"]]),
        ("library", LIBRARY_COLOR, "s", [row for row in rows if GENERATED not in row["times"]]),
    )
    for label, color, marker, chosen in kinds:
        if chosen:
            xs, ys = zip(*map(_position, chosen), strict=True)
            axes.scatter(xs, ys, s=60, color=color, marker=marker, label=label, zorder=4)
    for variant, label in ((MAX_AUTOTUNE, "torch.compile, max-autotune"), (COMPILE, "torch.compile")):
        positions = [_position(row, variant) for row in rows if variant in row["times"]]
        if positions:
            xs, ys = zip(*positions, strict=True)
            axes.scatter(
                xs, ys, s=60, facecolors="none", edgecolors=COMPILE_COLOR, linewidths=1.5, label=label, zorder=3
            )
            return


def _labels(axes: "Axes", rows: Sequence[Row], ceilings: Mapping[str, Any]) -> None:
    to_pixels, box = axes.transData, axes.bbox
    column, top = (
        box.x0 + (SHARE + 0.02) * box.width,
        float(to_pixels.transform((1, ceilings["flops_per_second"] / TERA))[1]),
    )
    step = min(axes.figure.dpi / 72 * SPACING, (top - box.y0) / (len(rows) + 1))
    for row in sorted(rows, key=lambda row: -_position(row)[1]):
        top = min(float(to_pixels.transform(_position(row))[1]), top - step)
        axes.annotate(
            _label(row),
            _position(row),
            xytext=(column, top),
            textcoords="figure pixels",
            va="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": "#9ca3af", "linewidth": 0.7, "shrinkB": 5, "relpos": (0, 0.5)},
            zorder=2,
        )


def _label(row: Row) -> str:
    label = f"{row['name']}\n{_time(row):.3g} ms, {row['share_of_floor']:.0%} of the roof"
    ratios = ((variant, row["ratio"][variant]) for variant in (MAX_AUTOTUNE, COMPILE))
    best = next(((variant, ratio) for variant, ratio in ratios if ratio is not None), None)
    return label if best is None else f"{label}, {best[1]:.2f}x {best[0].replace('_', '-')}'s time"
