"""Draws an inspection: one PNG per part. Needs matplotlib.

All pictures can be read without color. Lines differ in dashes and markers. Heat maps show values as shades of a single
color.
"""

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.runtime.errors import EnvironmentFailure, cannot_write
from specc.runtime.inspection.inspect import Inspection
from specc.runtime.pictures import new_figure
from specc.runtime.storage.atomic import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0b5cad", "#b3440e", "#0f766e", "#7b2d8b", "#8a6100", "#4a5560", "#b01e4a", "#3f6f1d")
DASHES = ("-", "--", ":", "-.")
MARKS = ("o", "s", "^", "D", "v", "x", "P", "*")
LETTERED = 24  # a map with more columns or rows than this number has no numbers in its cells
_INDEX = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")


def require() -> None:
    if find_spec("matplotlib") is None:
        raise EnvironmentFailure("pictures need matplotlib", "pip install 'specc[bench]'")


def draw(result: Inspection, folder: Path) -> Iterator[Path]:
    """Draws a picture of each part that was measured, and yields the path of each picture.

    Args:
        result: the results of the inspection.
        folder: the output folder. It is created if it does not exist.

    Raises:
        EnvironmentFailure: matplotlib is missing, or a file cannot be written.
    """
    require()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    parts = {
        "ranks": (_ranks, result.ranks),
        "heads": (_heads, result.heads),
        "units": (_units, result.units),
        "norms": (_norms, result.norms),
        "experts": (_experts, result.experts),
        "sensitivity": (_sensitivity, result.sensitivity),
    }
    for name, (picture, measured) in parts.items():
        if measured:
            path = folder / f"{name}.png"
            write_atomically(path, [_png(picture(result))])
            yield path


def role_of(name: str) -> tuple[str, int | None]:
    """Returns two values: the name of a parameter with `*` in place of its block index, and this index.

    For a parameter outside blocks, the name is unchanged, and the index is None.
    """
    match = _INDEX.search(name)
    if match is None:
        return name, None
    return f"{name[: match.start()]}*{name[match.end() :]}", int(match[0])


def _figure(width: float, height: float, title: str) -> "Figure":
    figure = new_figure(width, height)
    figure.suptitle(title, fontsize=12)
    return figure


def _png(figure: "Figure") -> bytes:
    out = BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _by_block(axes: "Axes", label: str, rows: Sequence[tuple[str, float]]) -> None:
    from matplotlib.ticker import MaxNLocator

    roles: dict[str, list[tuple[int, float]]] = {}
    for name, value in rows:
        role, block = role_of(name)
        roles.setdefault(role, []).append((-1 if block is None else block, value))
    for i, (role, points) in enumerate(roles.items()):
        means: dict[int, list[float]] = {}
        for block, value in points:  # one mark, at the mean, represents all experts of a block
            means.setdefault(block, []).append(value)
        xs = sorted(means)
        ys = [sum(means[x]) / len(means[x]) for x in xs]
        color, dash, mark = COLORS[i % len(COLORS)], DASHES[i % len(DASHES)], MARKS[i % len(MARKS)]
        axes.plot(xs, ys, label=role, markersize=5, linewidth=1.4, color=color, linestyle=dash, marker=mark)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("block" if all(x >= 0 for role in roles.values() for x, _ in role) else "block (-1: outside)")
    axes.set_ylabel(label)
    axes.grid(True, color="#e5e7eb", linewidth=0.6)


def _without_expert(name: str) -> str:
    return name.partition("[")[0]


def _ranks(result: Inspection) -> "Figure":
    figure = _figure(12, 5, f"{result.name}: rank use of its matrices, step {result.step:,}")
    stable, effective = figure.subplots(1, 2)
    _by_block(
        stable, "stable rank / full rank", [(_without_expert(r.name), r.stable_rank / r.full) for r in result.ranks]
    )
    rows = [(_without_expert(r.name), r.effective_rank / r.full) for r in result.ranks]
    _by_block(effective, "effective rank / full rank", rows)
    for axes in (stable, effective):
        axes.set_ylim(0, 1.03 if axes is effective else None)
    figure.legend(*stable.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _heads(result: Inspection) -> "Figure":
    scores = ("previous", "first", "induction", "content")
    titles = ("previous token", "first token", "induction", "content")
    layers = list(dict.fromkeys(head.layer for head in result.heads))
    count = 1 + max(head.head for head in result.heads)
    height = max(3.2, 1.6 + 0.32 * len(layers))
    figure = _figure(4 * 3.4 + 1.2, height, f"{result.name}: attention of each head, step {result.step:,}")
    maps = figure.subplots(1, 4, sharey=True)
    image: Any = None
    for axes, score, title in zip(maps, scores, titles, strict=True):
        cells = [[float("nan")] * count for _ in layers]
        for head in result.heads:
            value = getattr(head, score)
            cells[layers.index(head.layer)][head.head] = float("nan") if value is None else value
        image = axes.imshow(cells, cmap="Greys", vmin=0, vmax=1, aspect="auto")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("head")
        axes.set_xticks(range(count), [str(i) for i in range(count)] if count <= LETTERED else [""] * count)
        axes.set_yticks(range(len(layers)), layers, fontsize=8)
        if count <= LETTERED and len(layers) <= LETTERED:
            for y, row in enumerate(cells):
                for x, value in enumerate(row):
                    if value == value:
                        color = "white" if value > 0.55 else "black"
                        axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(image, ax=list(maps), label="score, 0 to 1")
    return figure


def _units(result: Inspection) -> "Figure":
    figure = _figure(7, 4.5, f"{result.name}: dead and weak units, step {result.step:,}")
    axes = figure.subplots()
    names = [unit.layer for unit in result.units]
    places = range(len(names))
    dead, weak = ([100 * getattr(unit, key) / unit.units for unit in result.units] for key in ("dead", "weak"))
    axes.bar([p - 0.2 for p in places], dead, 0.4, color=COLORS[0], label="dead: zero at every token")
    label = "weak: below 1 % of the median at every token"
    axes.bar([p + 0.2 for p in places], weak, 0.4, color="white", edgecolor=COLORS[1], hatch="////", label=label)
    axes.set_xticks(list(places), names, rotation=90, fontsize=7)
    axes.set_ylabel("share of the units, %")
    axes.set_ylim(0, max(1.0, *(1.1 * value for value in [*dead, *weak])))
    axes.legend(fontsize=8, frameon=False)
    return figure


def _experts(result: Inspection) -> "Figure":
    count = max(len(row.loads) for row in result.experts)
    height = max(3.2, 1.6 + 0.32 * len(result.experts))
    figure = _figure(max(6.0, 2.5 + 0.4 * min(count, 40)), height, f"{result.name}: experts, step {result.step:,}")
    axes = figure.subplots()
    cells = [[100 * load for load in row.loads] + [float("nan")] * (count - len(row.loads)) for row in result.experts]
    image = axes.imshow(cells, cmap="Greys", vmin=0, aspect="auto")
    axes.set_xlabel("expert")
    axes.set_yticks(range(len(cells)), [f"{row.layer}, {row.kind}" for row in result.experts], fontsize=8)
    if count <= LETTERED and len(cells) <= LETTERED:
        most = max(value for row in cells for value in row if value == value)
        for y, row in enumerate(cells):
            for x, value in enumerate(row):
                color = "white" if value > 0.55 * most else "black"
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(image, ax=axes, label="share of the tokens, %")
    return figure


def _norms(result: Inspection) -> "Figure":
    figure = _figure(7, 4.5, f"{result.name}: the residual stream, step {result.step:,}")
    axes = figure.subplots()
    names = [norm.block for norm in result.norms]
    places = range(len(names))
    axes.plot(places, [norm.after for norm in result.norms], "-o", color=COLORS[0], label="after the block")
    befores = [float("nan") if norm.before is None else norm.before for norm in result.norms]
    axes.plot(places, befores, ":s", color=COLORS[1], label="before the block")
    changes = [
        float("nan") if norm.change is None or norm.before is None else norm.change * norm.before
        for norm in result.norms
    ]
    axes.plot(places, changes, "--^", color=COLORS[2], label="change by the block")
    axes.set_xticks(list(places), names, rotation=90, fontsize=7)
    axes.set_ylabel("root mean square")
    axes.set_ylim(bottom=0)
    axes.grid(True, color="#e5e7eb", linewidth=0.6)
    axes.legend(fontsize=8, frameon=False)
    return figure


def _sensitivity(result: Inspection) -> "Figure":
    figure = _figure(
        12, 5, f"{result.name}: increase in bits per byte if one matrix is quantized, step {result.step:,}"
    )
    over, against = figure.subplots(1, 2)
    several = len({row.bits for row in result.sensitivity}) > 1
    rises = [(f"{row.name}{f', {row.bits:g} bits' if several else ''}", row.rise) for row in result.sensitivity]
    _by_block(over, "measured rise, bits per byte", rises)
    middle = sorted(abs(rise) for _, rise in rises)[len(rises) // 2]
    over.set_yscale("symlog", linthresh=max(middle, 1e-9))  # a few matrices often cause most of the increase
    over.axhline(0, color="#4a5560", linewidth=0.8)
    pairs = [(row.estimate, row.rise) for row in result.sensitivity if row.estimate and row.rise > 0]
    against.set_xlabel("estimated rise, bits per byte")
    against.set_ylabel("measured rise, bits per byte")
    if pairs:
        low, high = (choose(value for pair in pairs for value in pair) for choose in (min, max))
        against.plot([low, high], [low, high], color="#4a5560", linewidth=0.8, label="equal")
        for share, dash in ((0.8, ":"), (1.2, ":")):
            label = "20 % apart" if share < 1 else None
            against.plot([low, high], [share * low, share * high], dash, color="#4a5560", linewidth=0.8, label=label)
        xs, ys = zip(*pairs, strict=True)
        against.scatter(xs, ys, s=24, color=COLORS[0], label="a matrix", zorder=3)
        against.set(xscale="log", yscale="log")
        against.legend(fontsize=8, frameon=False)
    figure.legend(*over.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure
