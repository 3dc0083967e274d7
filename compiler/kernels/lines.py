"""Formats generated source as lines of at most `WIDTH` columns."""

from collections.abc import Sequence
from functools import lru_cache
from textwrap import wrap

from specc.compiler.expr.python_lines import WIDTH

HEADER = WIDTH - len("/    plan 0123456789ab")  # columns; the plan key follows on the last line
_GLUE = "\0"


def unbroken(text: str) -> str:
    """Returns the text with marked spaces, at which `flowed` does not break lines."""
    return text.replace(" ", _GLUE)


@lru_cache(maxsize=4096)  # cached, because kernels are rendered for each node
def flowed(text: str, indent: str = "", rest: str = "", width: int = WIDTH) -> str:
    """Wraps text. Words are never broken, so a long word may exceed the width.

    Args:
        text: The words, separated by spaces. Lines are not broken at spaces that `unbroken` has marked.
        indent: The prefix of every line.
        rest: An additional prefix of every line except the first.
        width: The maximum number of columns.

    Returns:
        The lines, joined by newlines.
    """
    lines = wrap(text, width - len(indent), subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)
    return "\n".join(indent + line for line in lines).replace(_GLUE, " ")


def listed(head: str, items: Sequence[str], tail: str, indent: int = 0, last: str = ",") -> str:
    """Returns a bracketed list. If one line is too short for the list, the items are wrapped on indented lines between
    the brackets.

    Args:
        head: The text up to the opening bracket, inclusive.
        items: The items. No item is broken across lines.
        tail: The text from the closing bracket on.
        indent: The number of spaces before the first line.
        last: The text after the last item if the list has several lines. By default, a comma.

    Returns:
        The lines, joined by newlines.
    """
    pad = " " * indent
    line = f"{pad}{head}{', '.join(items)}{tail}"
    if len(line) <= WIDTH:
        return line
    inner = flowed(", ".join(map(unbroken, items)) + last, pad + "    ")
    return f"{pad}{head}\n{inner}\n{pad}{tail}"


def assigned(name: str, value: str, indent: int = 0) -> str:
    """Returns the Python statement `name = value`. A value that is too long is wrapped inside parentheses."""
    pad = " " * indent
    line = f"{pad}{name} = {value}"
    if len(line) <= WIDTH:
        return line
    return f"{pad}{name} = (\n{flowed(value, pad + '    ')}\n{pad})"


def nested(name: str, value: str, indent: int = 4) -> str:
    """Returns the Python statement `name = value`, wrapped as by `assigned`. The first line is not indented, because
    the template indents it."""
    return assigned(name, value, indent).lstrip()


def returned(value: str) -> str:
    """Returns the statement `return value`. The first line is not indented, because the template indents it by 4."""
    return f"return {value}" if len(value) + 11 <= WIDTH else f"return (\n{flowed(value, ' ' * 8)}\n    )"
