"""The roofline picture: the performance of each kernel below the two ceilings measured in the same run. Needs
matplotlib."""

from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING

from specc.runtime.bench.ceilings import Ceilings
from specc.runtime.bench.kernels import Row
from specc.runtime.bench.suite import Report
from specc.runtime.bench.variants import COMPILE, GENERATED, MAX_AUTOTUNE
from specc.runtime.errors import EnvironmentFailure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OWN, WHOLE, LIBRARY_COLOR, OTHER, LINE = "#0b5cad", "#0f766e", "#6b7280", "#d97706", "#374151"
SPACING = 30.0  # points between the centers of adjacent labels, if there is room
SHARE = 0.62  # the share of the width for the marks; the rest is for their labels
TERA = 1e12


def require() -> None:
    """Raises EnvironmentFailure if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise EnvironmentFailure("a roofline picture needs matplotlib", "pip install 'specc[bench]'")


def roofline(report: Report) -> bytes:
    """Returns the picture as PNG, 1500 x 900 pixels: a point for each kernel and group, at its operations per byte (by
    the compiler's count) and its measured operations per second. Raises EnvironmentFailure if matplotlib is missing."""
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 7.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = [*report.kernels, *report.groups]
    _ceilings(axes, report.ceilings, rows)
    _points(axes, rows)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    machine = report.machine
    name = f"{report.options.spec.name} for {report.options.target} on {machine.gpu}"
    figure.suptitle(name, fontsize=15, weight="bold")
    lines = (f"{report.date} · {', '.join(machine.versions)}", report.options.command)
    axes.set_title("\n".join(filter(None, lines)), fontsize=9, color=LINE)
    figure.draw_without_rendering()  # computes the layout, which the labels need
    figure.set_layout_engine("none")
    _labels(axes, rows, report.ceilings)
    out = BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def place(row: Row, variant: str | None = None) -> tuple[float, float]:
    """Returns the position of a row: operations per byte, and tera-operations per second of one variant (by default of
    the code that the plan runs)."""
    time = row.time if variant is None else row.times[variant]
    return row.work.flops / row.work.bytes, row.work.flops / (1e-3 * time.ms) / TERA


def _ceilings(axes: "Axes", ceilings: Ceilings, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    rate, speed = ceilings.flops_per_second, ceilings.bytes_per_second
    ridge = rate / speed
    spots = [place(row, variant) for row in rows for variant in (None, *row.times)]
    left, most = min([ridge, *(x for x, _ in spots)]) / 3, max([ridge, *(x for x, _ in spots)]) * 1.2
    right = left * (most / left) ** (1 / SHARE)
    low, high = min([rate / TERA / 4, *(y for _, y in spots)]) / 2.5, rate / TERA * 1.6
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, high))
    axes.set_xlabel("operations a byte (FLOP/B), bytes as the compiler counts them")
    axes.set_ylabel(f"TFLOP/s, {ceilings.dtype}")
    axes.grid(True, color="#e5e7eb", linewidth=0.6)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axis.set_minor_locator(NullLocator())
    copy = f"copy, {speed / 1e9:,.0f} GB/s"
    gemm = f"GEMM of {ceilings.gemm_size} x {ceilings.gemm_size} x {ceilings.gemm_size}, {rate / TERA:,.3g} TFLOP/s"
    axes.plot([left, ridge], [left * speed / TERA, rate / TERA], color=LINE, linewidth=2, label=copy)
    axes.plot([ridge, right], [rate / TERA] * 2, color=LINE, linewidth=2, linestyle=(0, (6, 2)), label=gemm)


def _points(axes: "Axes", rows: Sequence[Row]) -> None:
    """Draws generated kernels, whole groups and library products as filled marks, and torch.compile's best as open
    marks."""
    kinds = (
        ("generated kernel", OWN, "o", [row for row in rows if GENERATED in row.times and row.language]),
        ("fused group", WHOLE, "D", [row for row in rows if not row.language]),
        ("library product", LIBRARY_COLOR, "s", [row for row in rows if GENERATED not in row.times]),
    )
    for label, color, marker, chosen in kinds:
        spots = [place(row) for row in chosen]
        if spots:
            xs, ys = zip(*spots, strict=True)
            axes.scatter(xs, ys, s=60, color=color, marker=marker, label=label, zorder=4)
    for variant, words in ((MAX_AUTOTUNE, "torch.compile, max-autotune"), (COMPILE, "torch.compile")):
        spots = [place(row, variant) for row in rows if variant in row.times]
        if spots:
            xs, ys = zip(*spots, strict=True)
            axes.scatter(xs, ys, s=60, facecolors="none", edgecolors=OTHER, linewidths=1.5, label=words, zorder=3)
            return


def _labels(axes: "Axes", rows: Sequence[Row], ceilings: Ceilings) -> None:
    """Draws a column of labels next to the marks, in their order from top to bottom, moved apart if they would
    overlap."""
    to_pixels, box = axes.transData, axes.bbox
    column, top = (
        box.x0 + (SHARE + 0.02) * box.width,
        float(to_pixels.transform((1, ceilings.flops_per_second / TERA))[1]),
    )
    step = min(axes.figure.dpi / 72 * SPACING, (top - box.y0) / (len(rows) + 1))
    for row in sorted(rows, key=lambda row: -place(row)[1]):
        top = min(float(to_pixels.transform(place(row))[1]), top - step)
        axes.annotate(
            _words(row, ceilings),
            place(row),
            xytext=(column, top),
            textcoords="figure pixels",
            va="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": "#9ca3af", "linewidth": 0.7, "shrinkB": 5, "relpos": (0, 0.5)},
            zorder=2,
        )


def _words(row: Row, ceilings: Ceilings) -> str:
    """Returns the text of a label: name, time, share of the floor, and of torch.compile's best time."""
    share = ceilings.floor_ms(row.work) / row.time.ms
    words = f"{row.name}\n{row.time.ms:.3g} ms, {share:.0%} of the roof"
    best = next((name for name in (MAX_AUTOTUNE, COMPILE) if row.ratio(name) is not None), None)
    return words if best is None else f"{words}, {row.ratio(best):.2f}x {best.replace('_', '-')}'s time"
