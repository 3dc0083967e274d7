"""The picture of a sweep: the final metric of each setting, its spread over the seeds, and the metric of every run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specc.runtime.pictures import new_figure, png, require_matplotlib, style_of
from specc.runtime.sweep.plan import setting_name
from specc.runtime.sweep.results import SettingResult, SweepResults

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GRAY = "#6b7280"


def sweep_picture(results: SweepResults, title: str) -> bytes:
    """Draws the results of a sweep.

    If the values of the first path of the grid are numbers, these values are on the x axis, and each combination of
    values of the other paths is a line. Otherwise, the picture has one row per setting, in the order of the sweep file.

    Args:
        results: the results, with at least one finished run.
        title: the heading of the picture.

    Returns:
        The content of a PNG file.

    Raises:
        EnvironmentFailure: if matplotlib is missing.
    """
    require_matplotlib("the picture of a sweep")
    rows = [row for row in results.settings if row.metric is not None]
    axis = _numeric_axis(rows)
    figure = new_figure(9.5, 5.5) if axis is not None else new_figure(9.5, max(3.2, 1.6 + 0.3 * len(rows)))
    axes = figure.add_subplot()
    if axis is not None:
        _lines(axes, results, rows, axis)
    else:
        _rows(axes, results, rows)
    axes.set_title(title, fontsize=12, weight="bold", loc="left")
    return png(figure)


def _numeric_axis(rows: Sequence[SettingResult]) -> str | None:
    path = next(iter(rows[0].grid), None)
    values = [row.grid.get(path or "") for row in rows]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return path if path is not None and numbers and len(set(values)) > 1 else None


def _lines(axes: "Axes", results: SweepResults, rows: Sequence[SettingResult], path: str) -> None:
    groups: dict[tuple[str, str], list[SettingResult]] = {}
    for row in rows:
        others = {key: value for key, value in row.grid.items() if key != path}
        # The name cuts long values, so that it may be equal for different values
        groups.setdefault((setting_name(row.entry, others), str(others)), []).append(row)
    for index, ((label, _), members) in enumerate(groups.items()):
        style = style_of(index)
        members = sorted(members, key=lambda row: row.grid[path])
        places = [row.grid[path] for row in members]
        samples = [row.metric for row in members if row.metric is not None]
        axes.errorbar(
            places,
            [sample.mean for sample in samples],
            yerr=[sample.std or 0.0 for sample in samples],
            color=style.color,
            linestyle=style.dashes,
            marker=style.marker,
            capsize=4,
            label=label or "mean ± std over the seeds; hollow: runs",
        )
        for place, sample in zip(places, samples, strict=True):
            axes.plot([place] * len(sample.values), sample.values, style.marker, mfc="none", mec=GRAY, ms=9, zorder=1)
    numbers = sorted({row.grid[path] for row in rows})
    if numbers[0] > 0 and numbers[-1] / numbers[0] >= 8:
        axes.set_xscale("log")
    axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
    axes.minorticks_off()
    axes.set_xlabel(path)
    axes.set_ylabel(f"{results.metric.label} on the validation split")
    axes.grid(axis="y", color="#e5e7eb")
    title = "mean ± std over the seeds; hollow: runs" if any(label for label, _ in groups) else None
    axes.legend(title=title, fontsize=9, frameon=False)


def _rows(axes: "Axes", results: SweepResults, rows: Sequence[SettingResult]) -> None:
    first: Any = rows[0].metric
    label = f"mean of the first setting{' ± its std' if first.std is not None else ''}"
    axes.axvline(first.mean, color=GRAY, linestyle="--", linewidth=1.2, label=label, zorder=1)
    if first.std is not None:
        axes.axvspan(first.mean - first.std, first.mean + first.std, color="#e5e7eb", zorder=0)
    for place, row in enumerate(rows):
        sample = row.metric
        assert sample is not None
        named = place == 0
        axes.plot(
            sample.values, [place] * len(sample.values), "o", mfc="none", mec=GRAY, label="a run" if named else None
        )
        axes.errorbar(
            sample.mean,
            place,
            xerr=sample.std or 0.0,
            color="#0072b2",
            marker="D",
            capsize=4,
            label="mean ± std over the seeds" if named else None,
        )
    axes.set_yticks(range(len(rows)), [row.setting for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)  # inverted, so that the first setting is at the top
    axes.set_xlabel(f"{results.metric.label} on the validation split")
    axes.grid(axis="x", color="#e5e7eb")
    axes.legend(
        fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14 * 12 / (4 + len(rows))), ncols=3
    )
