"""The language that wires blocks together: pointwise expressions of named values and of values from earlier runs of
blocks."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from functools import lru_cache

from ..records import record
from .index import names_in
from .parse import column_of, parse
from .traverse import rebuild, variables
from .values import Const, Expr, ExprError, Var, children

OUTPUT, VALUE = "output", "value"  # `output(k)` is the stream after run k; `value(k)` is the attention values of run k
NUMBERS = ("layer", "layers")  # the names of numbers that every expression may read
INDEX = ("layer", "layers", "run", "runs")  # the names that the formula k may read


@record
class EarlierValue:
    """A value from an earlier run of a block, such as `output(layer - 1)`.

    Attributes:
        function: `output` or `value`.
        index: The formula of the run's index.
        layer: The title of the attention layer that computes the value. Empty for `output`.
    """

    function: str
    index: str
    layer: str = ""

    def read_by(self, layer: str) -> "EarlierValue":
        """Returns this value as read by an expression of the layer `layer`. In such an expression, `value(k)` is the
        attention values of the same layer in run k."""
        return self if self.function == OUTPUT else replace(self, layer=layer)

    def __str__(self) -> str:
        return f"{self.function}({self.index})"


@record
class Wiring:
    """A parsed expression.

    Attributes:
        expr: The expression. Its variables stand for dotted names and for values from earlier runs.
        names: For each variable, the name in the spec.
        earlier: The values from earlier runs, by the variable that stands for the value.
        text: The text of the spec with variables in place of names. A part of the expression has the same column in
            this text and in the spec.
    """

    expr: Expr
    names: Mapping[str, str]
    earlier: Mapping[str, EarlierValue]
    text: str = field(default="", compare=False)

    def column(self, part: Expr) -> int:
        return column_of(self.text, part)


@lru_cache(maxsize=1024)
def parse_wiring(text: str) -> Wiring:
    """Parses an expression of named values.

    The language is the pointwise language with dotted names, `output(k)` and `value(k)`. A run is one execution of a
    block. `output(k)` is the residual stream after run k, and `value(k)` is the attention values of run k. k is a
    formula of whole numbers.

    Raises:
        ExprError: If the text is not a valid expression.
    """
    dotted: dict[str, str] = {}
    earlier: dict[str, EarlierValue] = {}
    plain = text
    for node in _special(text):
        start, end = node.col_offset, node.end_col_offset or 0
        written = text[start:end]
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if len(node.args) != 1 or node.keywords:
                raise ExprError(f"{function} takes one argument", start, f"write {function}(layer - 1)")
            value = EarlierValue(function, ast.unparse(node.args[0]))
            if unknown := names_in(value.index) - set(INDEX):
                message = f"the index in {function}(...) reads the unknown name `{min(unknown)}`"
                raise ExprError(message, start, f"the names are {', '.join(INDEX)}")
            label = next((name for name, known in earlier.items() if known == value), f"{function}{len(earlier)}")
            earlier[label] = value
        else:
            label = written.replace(".", "_")
            dotted[label] = written
        # a replacement of equal length keeps the columns of later errors
        plain = f"{plain[:start]}{label:<{end - start}}{plain[end:]}"
    expr = parse(plain)
    names = {name: dotted.get(name, name) for name in variables(expr) if name not in earlier and name not in NUMBERS}
    return Wiring(expr, names, earlier, plain)


def _special(text: str) -> Iterator[ast.Attribute | ast.Call]:
    """Yields the syntax-tree nodes of dotted names, `output(k)` and `value(k)`. Yields nothing if the text is not
    Python."""
    try:
        tree = ast.parse(f"({text})", mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return
    for node in ast.walk(tree):
        special = isinstance(node, ast.Attribute) and _is_dotted(node)
        if special or (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in (OUTPUT, VALUE)
        ):
            assert isinstance(node, ast.Attribute | ast.Call)
            node.col_offset, node.end_col_offset = node.col_offset - 1, (node.end_col_offset or 0) - 1
            yield node


def _is_dotted(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_dotted(node.value))


@lru_cache(maxsize=1024)
def wrapped(base: Expr, expr: Expr, name: str) -> Expr | None:
    """Returns the expression E for which `base`, with E in place of the variable `name`, equals `expr`. Returns None if
    there is no such E."""
    if base == Var(name):
        return expr
    inner, other = children(base), children(expr)
    if (
        not inner
        or len(inner) != len(other)
        or rebuild(base, lambda _: Const(0.0)) != rebuild(expr, lambda _: Const(0.0))
    ):
        return None
    inside: Expr | None = None
    for a, b in zip(inner, other, strict=True):
        if name not in variables(a):
            if a != b:
                return None
            continue
        part = wrapped(a, b, name)
        if part is None or inside not in (None, part):
            return None
        inside = part
    return inside


@lru_cache(maxsize=1024)
def repeated(expr: Expr) -> Expr | None:
    """Returns the largest subexpression that occurs several times and has a variable other than the names in NUMBERS.
    Returns None if there is no such subexpression."""
    counts: Counter[Expr] = Counter()
    queue = [expr]
    for part in queue:  # the list grows during the loop
        if children(part) and not set(variables(part)) <= set(NUMBERS):
            counts[part] += 1
        queue += children(part)
    return max((part for part, count in counts.items() if count > 1), key=lambda part: part.size, default=None)


def replaced(expr: Expr, part: Expr, other: Expr) -> Expr:
    return other if expr == part else rebuild(expr, lambda inner: replaced(inner, part, other))
