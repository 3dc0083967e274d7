"""Lines of generated source, at most 110 columns wide."""

from collections.abc import Sequence
from textwrap import wrap

WIDTH = 110


_GLUE = "\0"


def unbroken(text: str) -> str:
    """The text with its blanks marked, so that `flowed` breaks no line at them."""
    return text.replace(" ", _GLUE)


def flowed(text: str, indent: str = "", rest: str = "", width: int = WIDTH) -> str:
    """Words on as many lines as they need, each behind `indent`, those after the first also behind `rest`."""
    lines = wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_GLUE, " ")


def listed(head: str, items: Sequence[str], tail: str, indent: int = 0, last: str = ",") -> str:
    """`head`, the items and `tail` on one line or, where that is too long, the items on lines of their own,
    with `last` behind them. No item is broken."""
    pad = " " * indent
    line = f"{pad}{head}{', '.join(items)}{tail}"
    if len(line) <= WIDTH:
        return line
    inner = flowed(", ".join(map(unbroken, items)) + last, pad + "    ")
    return f"{pad}{head}\n{inner}\n{pad}{tail}"


def assigned(name: str, value: str, indent: int = 0) -> str:
    """`name = value` as Python; a long value is broken inside parentheses."""
    pad = " " * indent
    line = f"{pad}{name} = {value}"
    if len(line) <= WIDTH:
        return line
    return f"{pad}{name} = (\n{flowed(value, pad + '    ')}\n{pad})"
