"""Helpers that draw measurements with matplotlib. The pictures can be read without color."""

from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

from specc.runtime.errors import EnvironmentFailure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Style(NamedTuple):
    """The color, the dash pattern and the marker of a line in a plot."""

    color: str
    dashes: str
    marker: str


# Colors that color-blind readers can distinguish (Okabe and Ito, 2008), from dark to light.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9")
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")


def style_of(index: int) -> Style:
    """Returns the style of line `index` of a plot. Among the first 20 lines, lines of the same color differ in dash
    pattern or marker.
    """
    return Style(_COLORS[index % 7], _DASHES[index % 4], _MARKERS[index % 10])


def require_matplotlib(what: str) -> None:
    """Raises EnvironmentFailure if matplotlib is missing. `what` names the picture in the message."""
    if find_spec("matplotlib") is None:
        raise EnvironmentFailure(f"{what} needs matplotlib", "pip install 'specc[bench]'")


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure of the given size in inches. Drawing it needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: "Figure") -> bytes:
    """Returns the figure as the bytes of a PNG file."""
    out = BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
