"""The text of generated Python: a value as an operand; a line that is too long, broken at its brackets as a formatter
would."""

import ast
from collections.abc import Iterator

BRACKETS = {"(": ")", "[": "]", "{": "}"}


def operand(text: str) -> str:
    """Python text of a value, in parentheses where an attribute or an operator could not follow it."""
    tree = ast.parse(text, mode="eval").body
    return text if isinstance(tree, ast.Name | ast.Attribute | ast.Call | ast.Subscript) else f"({text})"


def fitted(line: str, width: int) -> tuple[str, ...]:
    """The statement on as many lines as it takes; where even an item alone is too long, that line stays long."""
    indent = line[: len(line) - len(line.lstrip())]
    statement = line.strip()
    if len(line) <= width or statement.endswith(":"):
        return (line,)
    head, value = _value(statement)
    pairs = list(_pairs(value))
    if isinstance(ast.parse(value, mode="eval").body, ast.Call | ast.Dict) and pairs:
        start, end = pairs[-1]
        if len(indent) + len(head) + start >= width:
            start, end = max(pairs, key=lambda pair: pair[1] - pair[0])
    else:
        value, start, end = f"({value})", 0, len(value) + 1
    inside = _items(value[start + 1 : end], width - len(indent) - 4)
    lines = (f"{head}{value[: start + 1]}", *(f"    {item}" for item in inside), value[end:])
    return tuple(indent + text for text in lines)


def _value(statement: str) -> tuple[str, str]:
    """The value that a statement assigns or returns, and the text before it."""
    node = ast.parse(f"def f():\n {statement}").body[0].body[0]  # type: ignore[attr-defined]
    start = node.value.col_offset - 1
    if isinstance(node.value, ast.Tuple):  # a tuple without parentheses starts where its first item does
        start = statement.index(" = ") + 3 if " = " in statement and isinstance(node, ast.Assign) else len("return ")
    return statement[:start], statement[start:]


def _pairs(text: str) -> Iterator[tuple[int, int]]:
    """Where the outermost brackets open and close; no text of generated code has brackets in strings."""
    depth = opened = 0
    for i, char in enumerate(text):
        if char in BRACKETS:
            opened, depth = (i, 1) if depth == 0 else (opened, depth + 1)
        elif char in BRACKETS.values():
            depth -= 1
            if depth == 0:
                yield opened, i


def _items(text: str, width: int) -> tuple[str, ...]:
    """The inside of brackets: on one line, or where that is too long an item a line."""
    if len(text) <= width:
        return (text,)
    depth, items, last = 0, [], 0
    for i, char in enumerate(text):
        depth += (char in BRACKETS) - (char in BRACKETS.values())
        if char == "," and depth == 0:
            items.append(text[last:i].strip())
            last = i + 1
    items.append(text[last:].strip())
    return tuple(f"{item}," for item in items) if len(items) > 1 else (text,)
