"""Formats generated Python: parenthesizes operands, and breaks long lines at brackets."""

import ast
from collections.abc import Iterator, Sequence

WIDTH = 100  # the most columns of a line of generated code
INSIDE = WIDTH - 4  # the most columns of a line in a function or class
BODY = WIDTH - 8  # the most columns of a line in a method, or in a block in a function
BRACKETS = {"(": ")", "[": "]", "{": "}"}


def operand(text: str) -> str:
    """Returns the text of a value, in parentheses unless an attribute access or operator can follow it directly."""
    tree = ast.parse(text, mode="eval").body
    return text if isinstance(tree, ast.Name | ast.Attribute | ast.Call | ast.Subscript) else f"({text})"


def fitted(line: str, width: int) -> tuple[str, ...]:
    """Splits a statement into lines of at most `width` characters, where possible. Breaks are at brackets and
    operators."""
    indent = line[: len(line) - len(line.lstrip())]
    statement = line.strip()
    if len(line) <= width or statement.endswith(":"):
        return (line,)
    head, value = _value(statement)
    room = width - len(indent)
    broken = _broken(value, room, len(head))
    if broken is None:
        breaks = _tuple if isinstance(_parsed(value), ast.Tuple) else _operators
        inside = [value] if len(value) <= room - 4 else breaks(value, room - 4)
        broken = ["(", *(f"    {text}" for text in inside), ")"]
    return tuple(indent + text for text in (f"{head}{broken[0]}", *broken[1:]))


def _parsed(value: str) -> ast.expr:
    (statement,) = ast.parse(value).body  # a statement may be a tuple with a starred item, without parentheses
    assert isinstance(statement, ast.Expr)
    return statement.value


def _tuple(value: str, room: int) -> list[str]:
    return [text for item in _items(value) for text in _item(item, room)]


def _broken(value: str, room: int, before: int) -> list[str] | None:
    """Returns the lines of a long value, or None if the value has no bracket to break at. The break is at the last pair
    of brackets. If this pair is too far right, the break is at the longest pair. `before` is the number of columns
    before the value, and `room` is the number of columns of a line."""
    pairs = list(_pairs(value))
    node = _parsed(value)
    opened = ast.Call | ast.Dict | ast.List | ast.Subscript | ast.Attribute | ast.Tuple
    if not isinstance(node, opened) or not pairs or (isinstance(node, ast.Tuple) and pairs != [(0, len(value) - 1)]):
        return None
    start, end = pairs[-1]
    if before + start >= room or end - start < 3:
        start, end = max(pairs, key=lambda pair: pair[1] - pair[0])
    inside = value[start + 1 : end]
    if (
        value[start] == "("
        and not isinstance(node, ast.Tuple)
        and (start == 0 or not (value[start - 1].isalnum() or value[start - 1] in "_)]"))
    ):
        grouped = [inside] if len(inside) <= room - 4 else _operators(inside, room - 4)
        return [value[: start + 1], *(f"    {text}" for text in grouped), value[end:]]
    lines = [inside] if len(inside) <= room - 4 else listed(_items(inside), room - 4)
    return [value[: start + 1], *(f"    {text}" for text in lines), value[end:]]


def listed(items: Sequence[str], room: int) -> list[str]:
    """Returns the lines of the items between two brackets. If every item fits on a line of `room` characters, each line
    has as many items as fit. Otherwise, each item has its own lines."""
    if any(len(item) >= room for item in items):
        return [text for item in items for text in _item(item, room)]
    lines = [f"{items[0]},"]
    for item in items[1:]:
        if len(lines[-1]) + len(item) + 2 <= room:
            lines[-1] += f" {item},"
        else:
            lines.append(f"{item},")
    return lines


def _item(item: str, room: int) -> list[str]:
    if len(item) < room:
        return [f"{item},"]
    name, equals, value = item.partition("=") if item.partition("=")[0].isidentifier() else ("", "", item)
    if value.startswith("*") or ":" in value.partition("(")[0]:
        return [f"{item},"]
    broken = _broken(value, room, len(name) + 1) or _operators(value, room)
    return [f"{name}{equals}{broken[0]}", *broken[1:-1], f"{broken[-1]},"] if len(broken) > 1 else [f"{item},"]


def _operators(value: str, room: int) -> list[str]:
    """Breaks a sum, product or conditional into one line per operand. Each line begins with its operator."""
    if list(_pairs(value)) == [(0, len(value) - 1)] and value[0] == "(":
        return ["(", *(f"    {text}" for text in _operators(value[1:-1], room - 4)), ")"]
    node = _parsed(value)
    if isinstance(node, ast.IfExp):
        cuts = [(node.body.end_col_offset or 0), (node.test.end_col_offset or 0)]
    elif isinstance(node, ast.BinOp):
        cuts, level = [], type(node.op) in (ast.Add, ast.Sub)
        part: ast.expr = node
        while isinstance(part, ast.BinOp) and (type(part.op) in (ast.Add, ast.Sub)) == level:
            end = part.left.end_col_offset or 0
            cuts.insert(0, end + value[end:].index(" ") if value[end] == ")" else end)
            # An operand in parentheses is not split further
            part = part.left if value[end] != ")" else ast.Constant(None)
    else:
        return [value]
    texts = [value[i:j].strip() for i, j in zip((0, *cuts), (*cuts, len(value)), strict=True)]
    lines: list[str] = []
    for text in texts:
        operator, _, operand = text.partition(" ") if lines else ("", "", text)
        inner = (
            [operand] if len(text) <= room else _broken(operand, room, len(operator) + 1) or _operators(operand, room)
        )
        lines += [f"{operator} {inner[0]}".strip(), *inner[1:]]
    return lines


def _value(statement: str) -> tuple[str, str]:
    node = ast.parse(f"def f():\n {statement}").body[0].body[0]  # type: ignore[attr-defined]
    start = node.value.col_offset - 1
    if isinstance(node.value, ast.Tuple):  # a tuple without parentheses has the position of its first item
        start = statement.index(" = ") + 3 if " = " in statement and isinstance(node, ast.Assign) else len("return ")
    return statement[:start], statement[start:]


def _pairs(text: str) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each outermost bracket pair. Generated code has no brackets in string literals."""
    depth = opened = 0
    for i, char in enumerate(text):
        if char in BRACKETS:
            opened, depth = (i, 1) if depth == 0 else (opened, depth + 1)
        elif char in BRACKETS.values():
            depth -= 1
            if depth == 0:
                yield opened, i


def _items(text: str) -> list[str]:
    depth, items, last, quote = 0, [], 0, ""
    for i, char in enumerate(text):
        if char in "\"'" and quote in ("", char):
            quote = "" if quote else char
        depth += (char in BRACKETS) - (char in BRACKETS.values())
        if char == "," and depth == 0 and not quote:
            items.append(text[last:i].strip())
            last = i + 1
    return [item for item in (*items, text[last:].strip()) if item]
