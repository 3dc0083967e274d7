"""Draws the picture of a comparison.

The picture has plots of the loss over tokens and over seconds, of recorded evaluations, and of calibration.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specc.runtime.compare.evaluations import EvaluationResult
from specc.runtime.compare.groups import Group
from specc.runtime.pictures import Style, new_figure, png, require_matplotlib, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from specc.runtime.compare.calibration import Calibration

EVALUATIONS = 6  # the maximum number of recorded evaluations in the picture
POINTS = 100  # the approximate number of points of a training curve; a point is the mean of several steps
SKIPPED = (
    # The fraction of steps at the start that may be omitted. Their large losses would hide differences.
    0.02
)


def comparison_picture(
    groups: Sequence[Group],
    calibrations: Mapping[str, Sequence["Calibration"]],
    evaluations: Sequence[EvaluationResult] = (),
) -> bytes:
    """Draws the loss curves, the evaluations and the calibration of groups of runs.

    Args:
        groups: the groups, without incomplete runs.
        calibrations: the calibration of each run, by group. If empty, the picture has no reliability diagram.
        evaluations: the recorded evaluations of the groups. Only the first `EVALUATIONS` entries are drawn.

    Returns:
        A PNG with plots of the loss over tokens and over seconds. It also has plots of the evaluations, and a
        reliability diagram of the calibrations, if there are any.

    Raises:
        EnvironmentFailure: if matplotlib is missing.
    """
    require_matplotlib("the picture of a comparison")
    count = 2 + bool(evaluations) + bool(calibrations)
    figure = new_figure(5.5 * count, 5.2)
    plots = figure.subplots(1, count)
    logged = (step.tokens for group in groups for member in group.members for step in member.history.steps)
    most = max(logged, default=0.0)
    scale, unit = next(
        (s, u)
        for s, u in ((1e9, "billion "), (1e6, "million "), (1e3, "thousand "), (1.0, ""))
        if most >= s or s == 1.0
    )
    for index, group in enumerate(groups):
        style = style_of(index)
        _curve(plots[0], group, style, "tokens", scale)
        _curve(plots[1], group, style, "seconds", 1.0)
    for axes, label in ((plots[0], f"{unit}tokens of training"), (plots[1], "seconds of training")):
        axes.set_xlabel(label)
        axes.set_ylabel("loss in nats per token")
        axes.grid(color="#e5e7eb")
        axes.set_xlim(left=0)
        axes.set_ylim(*_limits(groups))
    plots[0].set_title("loss over tokens", fontsize=11, loc="left")
    plots[1].set_title("loss over time", fontsize=11, loc="left")
    if evaluations:
        _evaluations(plots[2], [group.name for group in groups], evaluations[:EVALUATIONS])
    if calibrations:
        _reliability(plots[-1], calibrations)
    figure.legend(*plots[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return png(figure)


def _curve(axes: "Axes", group: Group, style: Style, over: str, scale: float) -> None:
    steps = min(len(member.history.steps) for member in group.members)
    width = max(1, round(steps / POINTS))
    whole = steps - steps % width
    losses, places = (
        np.array([[getattr(s, name) for s in member.history.steps[:whole]] for member in group.members])
        for name in ("loss", over)
    )
    means = losses.reshape(len(losses), -1, width).mean(2)
    place = places.reshape(len(places), -1, width).mean((0, 2)) / scale
    runs = len(group.members)
    words = f", mean and range of {runs} runs" if runs > 1 else ""
    smoothed = f", each point {width} steps" if width > 1 else ""
    axes.plot(
        place,
        means.mean(0),
        color=style.color,
        linestyle=style.dashes,
        linewidth=1.4,
        label=f"{group.name}: training{words}{smoothed}",
    )
    if runs > 1:
        axes.fill_between(place, means.min(0), means.max(0), color=style.color, alpha=0.15, linewidth=0)
    known = {
        number: float(np.mean([getattr(member.history.steps[at], over) for member in group.members]))
        for at, number in enumerate(step.step for step in group.first.history.steps[:steps])
    }
    scored: dict[int, list[float]] = {}
    for member in group.members:
        for entry in member.history.validations:
            if entry.weights == "raw" and entry.step in known and entry.values.get("nats") is not None:
                scored.setdefault(entry.step, []).append(float(entry.values["nats"]))
    if scored:
        axes.plot(
            [known[step] / scale for step in sorted(scored)],
            [float(np.mean(scored[step])) for step in sorted(scored)],
            color=style.color,
            linestyle="",
            marker=style.marker,
            markerfacecolor="white",
            label=f"{group.name}: validation, weights not averaged",
        )


def _limits(groups: Sequence[Group]) -> tuple[float, float]:
    losses: list[float] = []
    for group in groups:
        for member in group.members:
            steps = member.history.steps
            losses += [step.loss for step in steps[int(SKIPPED * len(steps)) :]]
            losses += [v.values["nats"] for v in member.history.validations if v.step and v.weights == "raw"]
    low, high = min(losses), max(losses)
    margin = 0.04 * (high - low) or 0.1
    return low - margin, high + margin


def _evaluations(place: "Axes", groups: Sequence[str], evaluations: Sequence[EvaluationResult]) -> None:
    """Replaces the axes `place` by one plot per evaluation. A plot shows the first measure of the evaluation, with one
    row for each entry of `groups`.
    """
    whole, figure = place.get_subplotspec(), place.figure
    assert whole is not None
    rows = whole.subgridspec(len(evaluations), 1)
    place.remove()
    for number, evaluation in enumerate(evaluations):
        axes = figure.add_subplot(rows[number, 0])
        measure = evaluation.measures[0]
        for index, group in enumerate(groups):
            if (result := evaluation.groups.get(group, {}).get(measure)) is not None:
                style = style_of(index)
                mean, spread = result.summary.mean, result.spread
                axes.errorbar([mean], [index], xerr=spread, color=style.color, marker=style.marker, capsize=3)
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.set_yticks(range(len(groups)), groups)
        axes.set_xlabel(measure, fontsize=9)
        axes.set_title(evaluation.title, fontsize=9, loc="left")
        axes.grid(color="#e5e7eb")


def _reliability(axes: "Axes", calibrations: Mapping[str, Sequence["Calibration"]]) -> None:
    axes.plot([0, 1], [0, 1], color="#6b7280", linewidth=1, linestyle=(0, (1, 3)), label="perfect calibration")
    for index, (name, results) in enumerate(calibrations.items()):
        style = style_of(index)
        counts = np.array([[entry.count for entry in result.bins] for result in results]).sum(0)
        sums = [
            np.array([[entry.count * getattr(entry, value) for entry in result.bins] for result in results]).sum(0)
            for value in ("confidence", "accuracy")
        ]
        used = counts > 0
        mean = float(np.mean([result.ece for result in results]))
        axes.plot(
            sums[0][used] / counts[used],
            sums[1][used] / counts[used],
            color=style.color,
            linestyle=style.dashes,
            marker=style.marker,
            label=f"{name}: ECE {100 * mean:.2f} %",
        )
    axes.set_xlabel("probability of the most probable token")
    axes.set_ylabel("share of targets that are this token")
    axes.set_title("calibration", fontsize=11, loc="left")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.grid(color="#e5e7eb")
    axes.legend(fontsize=9, frameon=False, loc="upper left")
