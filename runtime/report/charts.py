"""Charts of a report as inline SVG: curves and heat maps, with axes, units and a legend.

Lines differ in color, dashes and markers, so that readers can distinguish them without color. The style sheet of the
page defines the colors, for dark and light mode. `Markup` escapes every string.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

Point = tuple[float, float]

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 78, 16, 14, 46
LEGEND_ROW, LETTER = 20, 6.6  # in SVG units: the height of a row of the legend, and the width of a letter in a label
# The maximum number of points of a curve. A longer curve is divided into this number of parts, and the mean of each
# part is drawn.
MOST_POINTS = 300
STYLES = 8  # the number of line styles in the style sheet
LOG_RANGE = 30  # if the ratio of the largest value to the smallest value exceeds this number, the axis is logarithmic
# 7 markers and 8 line styles have no common divisor, so that 56 curves differ
MARKS = (
    '<circle r="3.4" cx="{x}" cy="{y}" class="{c}"/>',
    '<rect x="{a}" y="{b}" width="6" height="6" class="{c}"/>',
    '<path d="M{x},{t} l4,7 h-8 z" class="{c}"/>',
    '<path d="M{x},{t} l4,4 l-4,4 l-4,-4 z" class="{c}"/>',
    '<path d="M{a},{b} h6 l-3,6 z" class="{c}"/>',
    '<path d="M{x},{y} m-1,-4 h2 v3 h3 v2 h-3 v3 h-2 v-3 h-3 v-2 h3 z" class="{c}"/>',
    '<path d="M{a},{b} h6 l-6,6 h6 z" class="{c}"/>',
)


@dataclass(frozen=True, slots=True)
class Series:
    """A curve of a chart: the label, the points in order, and whether each point has a marker."""

    label: str
    points: Sequence[Point]
    marks: bool = False


def curves(title: str, x_label: str, y_label: str, series: Sequence[Series], *, zero: bool = False) -> Markup:
    """Returns a chart of curves.

    Args:
        title: a description for readers who do not see the picture.
        x_label: the quantity on the horizontal axis, with its unit.
        y_label: the quantity on the vertical axis, with its unit.
        series: the curves. Curves without points are omitted.
        zero: whether the vertical axis begins at zero.
    """
    shown = [Series(s.label, thinned(s.points), s.marks) for s in series if s.points]
    xs, ys = [x for s in shown for x, _ in s.points], [y for s in shown for _, y in s.points]
    logarithmic = not zero and min(ys) > 0 and max(ys) / min(ys) > LOG_RANGE
    rows = _legend_rows([s.label for s in shown]) if len(shown) > 1 else []
    top = TOP + LEGEND_ROW * len(rows)
    height = HEIGHT + LEGEND_ROW * len(rows)
    start = 0.0 if 0 <= min(xs) <= max(xs) / 4 else min(xs)
    across = _Axis.over(start, max(xs), LEFT, WIDTH - RIGHT)
    up = _Axis.over(0.0 if zero else min(ys), max(ys), height - BOTTOM, top, logarithmic).rounded()
    parts = [_legend(rows, shown)]
    for value, label in up.labels():
        y = up.at(value)
        parts.append(_f('<path d="M{},{} H{}" class="grid"/>', LEFT, y, WIDTH - RIGHT))
        parts.append(_f('<text x="{}" y="{}" text-anchor="end">{}</text>', LEFT - 8, y + 4, label))
    for value, label in across.labels():
        x = across.at(value)
        parts.append(_f('<path d="M{},{} v5" class="axis"/>', x, height - BOTTOM))
        parts.append(_f('<text x="{}" y="{}" text-anchor="middle">{}</text>', x, height - BOTTOM + 19, label))
    frame = '<path d="M{},{} V{} H{}" class="axis"/>'
    parts.append(_f(frame, LEFT, top, height - BOTTOM, WIDTH - RIGHT))
    center = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_f('<text x="{}" y="{}" text-anchor="middle">{}</text>', center, height - 8, x_label))
    turned = '<text transform="translate(14,{}) rotate(-90)" text-anchor="middle">{}</text>'
    scale = ", logarithmic" if logarithmic else ""
    parts.append(_f(turned, (top + height - BOTTOM) / 2, f"{y_label}{scale}"))
    for number, curve in enumerate(shown):
        places = [(across.at(x), up.at(y)) for x, y in curve.points]
        path = "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(_f('<path d="{}" class="line s{}"/>', path, number % STYLES))
        if curve.marks or len(places) == 1:
            parts += [_mark(number, x, y) for x, y in places]
    return _svg(title, WIDTH, height, parts)


def cells(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Mapping[tuple[str, str], float],
    text: str,
    column_label: str,
) -> Markup:
    """Returns a heat map with one cell per row and column. A cell shows its value as a shade and as text.

    Args:
        title: a description for readers who do not see the picture.
        rows: the labels of the rows.
        columns: the labels of the columns.
        values: the value of each (row, column). Cells without a value are empty.
        text: the format of a value, such as `.1f`.
        column_label: the meaning of the columns.
    """
    left = 16 + LETTER * max(map(len, rows))
    width = min(64.0, max(34.0, (WIDTH - left) / max(len(columns), 1)))
    low, high = min(values.values()), max(values.values())
    parts: list[Markup] = []
    for r, row in enumerate(rows):
        y = 26 + 24 * r
        parts.append(_f('<text x="{}" y="{}" text-anchor="end">{}</text>', left - 8, y + 16, row))
        for c, column in enumerate(columns):
            if (row, column) in values:
                value = values[row, column]
                share = (value - low) / (high - low) if high > low else 0.0
                box = '<rect x="{}" y="{}" width="{}" height="22" class="cell" fill-opacity="{}"/>'
                parts.append(_f(box, left + c * width, y, width - 2, f"{0.06 + 0.5 * share:.2f}"))
                label = '<text x="{}" y="{}" text-anchor="middle" class="small">{}</text>'
                parts.append(_f(label, left + (c + 0.5) * width - 1, y + 15, format(value, text)))
    for c, column in enumerate(columns):
        parts.append(_f('<text x="{}" y="18" text-anchor="middle">{}</text>', left + (c + 0.5) * width, column))
    bottom = 26 + 24 * len(rows)
    middle = left + width * len(columns) / 2
    parts.append(_f('<text x="{}" y="{}" text-anchor="middle">{}</text>', middle, bottom + 18, column_label))
    return _svg(title, math.ceil(left + width * len(columns)) + 4, bottom + 26, parts)


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> Sequence[Point]:
    """Returns a curve with at most `most` points.

    If `points` has more points, it is divided into `most` parts, and each returned point is the mean of a part.

    """
    if len(points) <= most:
        return points
    parts = [points[i * len(points) // most : (i + 1) * len(points) // most] for i in range(most)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


@dataclass(frozen=True, slots=True)
class _Axis:
    """A mapping from values to positions on an axis."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool

    @classmethod
    def over(cls, low: float, high: float, start: float, end: float, logarithmic: bool = False) -> "_Axis":
        if low == high == 0:
            high = 1.0
        elif low == high:
            low, high = (low / 2, high * 2) if logarithmic else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)
        return cls(low, high, start, end, logarithmic)

    @property
    def step(self) -> float:
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * (1 - 1e-9))

    def rounded(self) -> "_Axis":
        if self.logarithmic:
            return replace(self, low=self.low / 1.2, high=self.high * 1.2)
        low, high = math.floor(self.low / self.step + 1e-9), math.ceil(self.high / self.step - 1e-9)
        return replace(self, low=low * self.step, high=high * self.step)

    def at(self, value: float) -> float:
        low, high, value = (map(math.log, (self.low, self.high, value)) if self.logarithmic else
                            (self.low, self.high, value))  # fmt: skip
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def labels(self) -> Sequence[tuple[float, str]]:
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) < 5 else (1,)
            values = [step * 10.0**decade for decade in decades for step in steps]
            return [(value, f"{value:g}") for value in values if self.low <= value <= self.high]
        step = self.step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        digits = max(0, -math.floor(math.log10(step)))
        return [(number * step, _short(number * step, digits)) for number in range(first, last + 1)]


def _short(value: float, digits: int) -> str:
    if digits == 0 and abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value + 0.0:,.{digits}f}"


def _legend_rows(labels: Sequence[str]) -> list[list[tuple[int, float, str]]]:
    rows: list[list[tuple[int, float, str]]] = [[]]
    x = float(LEFT)
    for number, label in enumerate(labels):
        width = 44 + LETTER * len(label) + 14
        if rows[-1] and x + width > WIDTH - RIGHT:
            rows.append([])
            x = float(LEFT)
        rows[-1].append((number, x, label))
        x += width
    return rows


def _legend(rows: Sequence[Sequence[tuple[int, float, str]]], series: Sequence[Series]) -> Markup:
    parts = []
    for i, row in enumerate(rows):
        y = TOP + LEGEND_ROW * i
        for number, x, label in row:
            parts.append(_f('<path d="M{},{} h36" class="line s{}"/>', x, y, number % STYLES))
            if series[number].marks:
                parts.append(_mark(number, x + 18, y))
            parts.append(_f('<text x="{}" y="{}">{}</text>', x + 44, y + 4, label))
    return Markup("").join(parts)


def _mark(number: int, x: float, y: float) -> Markup:
    places = {"x": f"{x:.1f}", "y": f"{y:.1f}", "a": f"{x - 3:.1f}", "b": f"{y - 3:.1f}", "t": f"{y - 4:.1f}"}
    return Markup(MARKS[number % len(MARKS)]).format(**places, c=f"mark s{number % STYLES}")


def _svg(title: str, width: float, height: float, parts: Sequence[Markup]) -> Markup:
    start = '<svg viewBox="0 0 {} {}" width="{}" role="img"><title>{}</title>'
    return _f(start, width, height, width, title) + Markup("").join(parts) + Markup("</svg>")


def _f(template: str, *values: object) -> Markup:
    return Markup(template).format(*_texts(values))


def _texts(values: Sequence[object]) -> Iterator[object]:
    return (f"{value:.1f}" if isinstance(value, float) else value for value in values)
