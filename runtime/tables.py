"""Formats tables as text."""

from collections.abc import Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a Markdown table. The first row is the heading, and the first column is left-aligned."""
    for number, cells in enumerate(_padded(rows, 1)):
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            yield f"|{'-' * (len(cells[0]) + 2)}|{'|'.join('-' * (len(cell) + 1) + ':' for cell in cells[1:])}|"


def spaced(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns a table with two spaces between the columns. The first `left` columns are left-aligned."""
    return "\n".join("  ".join(cells).rstrip() for cells in _padded(rows, left))


def _padded(rows: Sequence[Sequence[str]], left: int) -> Iterator[Sequence[str]]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [*zip(row, widths, strict=True)]
        yield [
            *(cell.ljust(width) for cell, width in cells[:left]),
            *(cell.rjust(width) for cell, width in cells[left:]),
        ]
