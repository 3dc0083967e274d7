"""Parses text to an expression with Python's grammar (`ast`) and an allowlist of node types.

The text is never evaluated as Python.
"""

import ast
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache
from typing import NamedTuple, NoReturn

from .evaluate import apply
from .positional import POSITIONAL, Positional, whole_function
from .primitives import PRIMITIVES, Function, Primitive
from .simplify import simplify
from .traverse import variables
from .values import Binary, Call, Compare, Const, Expr, ExprError, Logic, Neg, Read, Var, children

LONGEST = 500  # maximum length in characters
DEEPEST = 64  # maximum levels of nesting
LARGEST_EXPONENT = 64.0

OPERATORS: Mapping[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**",
}  # fmt: skip
WHOLE_OPERATORS: Mapping[type[ast.operator], str] = {ast.FloorDiv: "//", ast.Mod: "%"}
COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip

# Function names from other languages, and the equivalent in this language.
ELSEWHERE = {
    "swish": "write silu(x)", "maximum": "write max(a, b)", "minimum": "write min(a, b)",
    "pow": "write x ** n",
    "square": "write x ** 2", "softcap": "write c * tanh(x / c)",
    "swiglu": "write silu(gate) * x", "geglu": "write gelu(gate) * x",
    "clamp": "write min(max(x, low), high)", "clip": "write min(max(x, low), high)",
    "hardtanh": "write min(max(x, -1), 1)", "relu6": "write min(relu(x), 6)", "relu2": "write relu(x) ** 2",
    "elu": "write where(x > 0, x, exp(x) - 1)", "quick_gelu": "write x * sigmoid(1.702 * x)",
}  # fmt: skip


class Positions(NamedTuple):
    """The additional syntax of expressions of token positions.

    Expressions of token positions may contain whole-number arithmetic (// and %), functions of positional.py, and
    elements of tables.

    Attributes:
        whole: The variables that are whole numbers.
        tables: The number of dims of each table, by name. 0 allows any number.
        condition: Whether the text is a condition: comparisons of whole numbers, joined by `and`, `or` and `not`.
    """

    whole: tuple[str, ...]
    tables: tuple[tuple[str, int], ...] = ()
    condition: bool = False


def parse(text: str, variables: Collection[str] | None = None, positions: Positions | None = None) -> Expr:
    """Parses one expression.

    `variables` are the allowed variable names. None allows every identifier that is not a function name. `positions`
    allows additional syntax.

    Raises ExprError, with the column and a hint, if the text is not in the language. The error is also raised if the
    text is too long or nested too deeply, if a constant is not finite, or if a part is undefined for all values of the
    variables, such as x / (x - x).
    """
    return _written(text, None if variables is None else frozenset(variables), positions)


@lru_cache(maxsize=4096)  # a build parses the same few texts thousands of times; expressions are immutable
def _written(text: str, variables: Collection[str] | None, positions: Positions | None) -> Expr:
    expr = _parse(text, variables, LONGEST, DEEPEST, LARGEST_EXPONENT, positions)
    if _no_value(expr):
        parts = sorted(_parts(text, positions), key=lambda found: found[0].size)
        part, cause, column = next((part, cause, column) for part, column in parts if (cause := _no_value(part)))
        hint = "change this part; it has no value for any values of its variables"
        raise ExprError(cause if str(part) in cause else f"{part} has no value: {cause}", column, hint)
    return expr


def _no_value(expr: Expr) -> str:
    """Returns the reason why an expression is undefined for all values of its variables. The result is empty if
    `simplify` finds no such reason."""
    try:
        simplify(expr)
    except ExprError as error:
        return error.message
    return ""


@lru_cache(maxsize=4096)
def reread(text: str, positions: Positions | None = None) -> Expr:
    """Parses text that this package printed.

    The limits of length and depth are larger than in `parse`, because derivatives are longer than the expressions of a
    spec.
    """
    return _parse(text, None, 40 * LONGEST, 8 * DEEPEST, 2 * LARGEST_EXPONENT, positions)


def _parse(
    text: str,
    variables: Collection[str] | None,
    longest: int,
    deepest: int,
    largest_exponent: float,
    positions: Positions | None,
) -> Expr:
    tree = _tree(text, longest, deepest)
    reader = _Reader(variables, deepest, largest_exponent, positions)
    if positions is not None and positions.condition:
        return reader.truth(tree, 1)
    return reader.read(tree, 1)[0]


def written_reads(text: str, positions: Positions) -> Iterator[tuple[Read, tuple[int, ...]]]:
    """Yields each table element that an expression reads, such as `bias[h, i - j]`, and the columns at which the
    indices of the element begin in the text. `parse` must accept `text`."""
    reader = _Reader(None, DEEPEST, LARGEST_EXPONENT, positions)
    for node in ast.walk(_tree(text, LONGEST, DEEPEST)):
        if isinstance(node, ast.Subscript):
            read, _ = reader.read(node, 1)
            assert isinstance(read, Read)
            yield read, tuple(map(_column, _indices(node.slice)))


def alternatives(text: str, positions: Positions) -> Iterator[tuple[Expr, int]]:
    """Yields the operands of the outermost `or` of a condition, with their columns. Yields the whole condition if its
    outermost operator is not `or`."""
    tree, reader = _tree(text, LONGEST, DEEPEST), _Reader(None, DEEPEST, LARGEST_EXPONENT, positions)
    is_or = isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.Or)
    for node in tree.values if is_or else [tree]:  # type: ignore[attr-defined]
        yield reader.truth(node, 1), _column(node) if is_or else 0


def column_of(text: str, part: Expr) -> int:
    """Returns the column at which `part` first occurs in a text that `parse` accepts. Returns 0 if `part` does not
    occur."""
    return min((column for other, column in _parts(text) if other == part), default=0)


def _parts(text: str, positions: Positions | None = None) -> Iterator[tuple[Expr, int]]:
    """Yields all parts of a text that are expressions, with their columns."""
    reader = _Reader(None, DEEPEST, LARGEST_EXPONENT, positions)
    for node in ast.walk(_tree(text, LONGEST, DEEPEST)):
        with suppress(ExprError):  # a comparison is not an expression
            if isinstance(node, ast.expr):
                yield reader.read(node, 1)[0], _column(node)


def _tree(text: str, longest: int, deepest: int) -> ast.expr:
    """Returns Python's syntax tree of a text. Raises ExprError if the text has more than `longest` characters, more
    than `deepest` levels of parentheses, or a syntax error. A column in the tree is one higher than the column in the
    text."""
    if len(text) > longest:
        raise ExprError(
            f"the expression has {len(text)} characters; it may have at most {longest}", longest, "split it"
        )
    text = text.translate({ord(space): " " for space in "\t\r\n"})
    _scan(text, deepest)
    try:
        with warnings.catch_warnings():
            # Python warns about `1if`, which the allowlist rejects. The parentheses permit leading blanks.
            warnings.simplefilter("ignore")
            return ast.parse(f"({text})", mode="eval").body
    except SyntaxError as error:
        column = min(max((error.offset or 2) - 2, 0), len(text))
        if "leading zeros" in error.msg:  # 0,01, whose Python meaning is not what the author means
            raise ExprError(
                "not an expression: a whole number begins with 0", column, "write 0.01 with a point"
            ) from None
        raise ExprError(f"not an expression: {error.msg}", column) from None
    except (ValueError, MemoryError, RecursionError):
        raise ExprError("this is not an expression") from None


def _scan(text: str, deepest: int) -> None:
    """Raises ExprError for an empty text, for unbalanced parentheses, for parentheses nested more than `deepest` levels
    deep, and for characters that Python's tokenizer would change."""
    if not text.strip():
        raise ExprError("the expression is empty", hint="write x for the identity")
    opened: list[int] = []
    for column, character in enumerate(text):
        if not " " <= character <= "~" or character in "#\\":
            raise ExprError(f"the character {character!a} is not part of the language", column, "write it in ASCII")
        if character == "(":
            opened.append(column)
        if character == ")" and not opened:
            raise ExprError("this parenthesis has no opening parenthesis", column)
        if character == ")":
            opened.pop()
        if len(opened) > deepest:
            raise ExprError(f"the expression is nested more than {deepest} levels deep", column, "split the expression")
    if opened:
        hint = "close it; within { } or [ ], put an expression with commas in quotes"
        raise ExprError("this parenthesis is not closed", opened[-1], hint)


class _Reader:
    """Converts `ast` nodes to expressions. The result of a conversion is a pair of an expression and its value. The
    value is None if the expression has variables."""

    def __init__(
        self,
        variables: Collection[str] | None,
        deepest: int,
        largest_exponent: float,
        positions: Positions | None = None,
    ) -> None:
        self.deepest, self.largest_exponent = deepest, largest_exponent
        self.variables, self.positions = variables, positions
        self.functions: Mapping[str, Function] = PRIMITIVES if positions is None else {**PRIMITIVES, **POSITIONAL}

    def read(self, node: ast.expr, depth: int) -> tuple[Expr, float | None]:
        if depth > self.deepest:
            fail(f"the expression is nested more than {self.deepest} levels deep", node, "split the expression")
        match node:
            case ast.Constant(value=bool() | str() | bytes() | complex() | None):
                fail(f"{node.value!r} is not a number", node)
            case ast.Constant(value=int() | float() as literal):
                try:
                    constant = Const(float(literal))
                except (OverflowError, ExprError):
                    fail("the constant is not finite", node)
                return constant, constant.value
            case ast.Name(id=name):
                return self.name(name, node), None
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.read(operand, depth + 1)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner, value = self.read(operand, depth + 1)
                return -inner, None if value is None else -value
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                a, b = self.read(left, depth + 1), self.read(right, depth + 1)
                symbol = OPERATORS[type(op)]
                if symbol == "**":
                    self.check_exponent(b[1], right)
                return Binary(symbol, a[0], b[0]), fold(symbol, (a[1], b[1]), node)
            case ast.BinOp(left=left, op=op, right=right) if self.positions and type(op) in WHOLE_OPERATORS:
                return self.whole_division(WHOLE_OPERATORS[type(op)], left, right, node, depth)
            case ast.Subscript(value=ast.Name(id=name), slice=index) if self.positions:
                return self.table(name, index, node, depth), None
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                return self.call(name, args, keywords, node, depth)
            case ast.Compare():
                fail("a comparison is only valid as the condition of where", node, "write where(x > 0, a, b)")
            case ast.BoolOp() | ast.IfExp() | ast.UnaryOp(op=ast.Not()):
                fail("and, or, not and if are not part of the language", node, "write where(x > 0, a, b)")
            case ast.Tuple():
                hint = "write decimals with a point, such as 0.5"
                fail("a comma is only valid between the arguments of a function", node, hint)
        power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor)
        hint = "write ** for a power" if power else "use numbers, names, + - * / ** and functions"
        fail(f"{describe(node)} is not part of the language", node, hint)

    def name(self, name: str, node: ast.expr) -> Expr:
        if name in self.functions:
            fail(f"{name} is a function", node, f"write {self.functions[name].example}")
        if self.positions and name in dict(self.positions.tables):
            fail(f"{name} is a table, not a number", node, f"read an element, for example {name}[h, i - j]")
        if self.variables is not None and name not in self.variables:
            known = sorted(self.variables)
            choice = f"choose from {', '.join(known) or 'none'}"
            fail(f"unknown variable {name}", node, suggest(name, known) or ELSEWHERE.get(name.lower()) or choice)
        return Var(name)

    def call(
        self, name: str, args: list[ast.expr], keywords: list[ast.keyword], node: ast.expr, depth: int
    ) -> tuple[Expr, float | None]:
        function = self.functions.get(name)
        if function is None:
            known = f"choose from {', '.join(sorted(self.functions))}"
            hint = ELSEWHERE.get(name.lower()) or suggest(name, self.functions) or known
            fail(f"unknown function {name}", node, hint)
        example = f"write {function.example}"
        if keywords:
            fail(f"{name} takes no named arguments", keywords[0].value, example)
        if len(args) != function.arity:
            fail(f"{name} takes {function.arity} arguments, not {len(args)}", node, example)
        first = self.condition(args[0], depth + 1) if name == "where" else self.read(args[0], depth + 1)
        read = (first, *(self.read(arg, depth + 1) for arg in args[1:]))
        constants = not isinstance(function, Primitive) or function.derivative
        if constants and any(value is None for _, value in read[1:]):
            definition = function.definition if isinstance(function, Primitive) else ""
            hint = f"write {definition}" if definition else example
            fail(f"the arguments of {name} after the first must be constants", args[1], hint)
        if isinstance(function, Positional):
            self.check_positional(function, tuple(arg for arg, _ in read), args)
            return Call(name, tuple(arg for arg, _ in read)), None
        return Call(name, tuple(arg for arg, _ in read)), fold(name, tuple(value for _, value in read), node)

    def is_whole(self, expr: Expr) -> bool:
        match expr:
            case Const(value):
                return value.is_integer()
            case Var(name):
                return self.positions is not None and name in self.positions.whole
            case Neg(a):
                return self.is_whole(a)
            case Binary("+" | "-" | "*" | "//" | "%", a, b) | Call("min" | "max", (a, b)):
                return self.is_whole(a) and self.is_whole(b)
            case Call("abs", (a,)):
                return self.is_whole(a)
        return isinstance(expr, Call) and whole_function(expr.function) is not None

    def whole(self, node: ast.expr, depth: int) -> Expr:
        expr, _ = self.read(node, depth)
        if not self.is_whole(expr):
            self.refuse_power(expr, node)
            fail(f"{expr} is not a whole number", node, "use whole numbers with + - * // % min max abs")
        return expr

    def refuse_power(self, expr: Expr, node: ast.expr) -> None:
        """Fails if a part of `expr` is a power of a position. The message states a product, because the simplifier
        writes i * i as a power."""
        match expr:
            case Binary("**", a, _) if self.is_whole(a) and not set("ijh").isdisjoint(variables(a)):
                base = str(a) if isinstance(a, Var) else f"({a})"
                hint = "multiply a position only by constants and by other positions"
                fail(f"{base} * {base} multiplies a position by itself", node, hint)
        for part in children(expr):
            self.refuse_power(part, node)

    def whole_division(
        self, op: str, left: ast.expr, right: ast.expr, node: ast.expr, depth: int
    ) -> tuple[Expr, float | None]:
        a, divisor = self.whole(left, depth + 1), self.read(right, depth + 1)
        if divisor[1] is None or not divisor[1].is_integer() or divisor[1] < 1:
            fail(
                f"{op} divides by {divisor[0]}, which is not a positive whole constant", right, f"for example i {op} 64"
            )
        return Binary(op, a, Const(divisor[1])), None

    def table(self, name: str, index: ast.expr, node: ast.expr, depth: int) -> Expr:
        assert self.positions is not None
        known = dict(self.positions.tables)
        if name not in known:
            hint = suggest(name, known) or "declare it: `learn: {bias: {shape: [heads, 32], init: 0}}`"
            fail(f"unknown table {name}", node, hint)
        parts = _indices(index)
        if known[name] not in (0, len(parts)):
            indices = "1 index" if len(parts) == 1 else f"{len(parts)} indices"
            dims = "1 dim" if known[name] == 1 else f"{known[name]} dims"
            message = f"{name} has {dims}, but this element has {indices}"
            fail(message, node, "give one index for each dim")
        return Read(name, tuple(self.whole(part, depth + 1) for part in parts))

    def check_positional(self, function: Positional, args: tuple[Expr, ...], nodes: list[ast.expr]) -> None:
        if (refusal := function.check(args)) is not None:
            place, message, hint = refusal
            fail(message, nodes[place], hint)
        if not self.is_whole(args[0]):
            fail(f"{args[0]} is not a whole number", nodes[0], f"write {function.example}")

    def truth(self, node: ast.expr, depth: int) -> Expr:
        if depth > self.deepest:
            fail(f"the expression is nested more than {self.deepest} levels deep", node, "split the expression")
        match node:
            case ast.BoolOp(op=op, values=parts):
                return Logic("and" if isinstance(op, ast.And) else "or", tuple(self.truth(p, depth + 1) for p in parts))
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return Logic("not", (self.truth(inner, depth + 1),))
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in COMPARISONS for op in ops):
                sides = (left, *others)
                pairs = zip(ops, sides, others, strict=False)
                compared = [self.comparison(COMPARISONS[type(op)], a, b, depth + 1) for op, a, b in pairs]
                return compared[0] if len(compared) == 1 else Logic("and", tuple(compared))
        fail("this is not a condition", node, "compare positions, for example j <= i and i - j < 512")

    def comparison(self, op: str, left: ast.expr, right: ast.expr, depth: int) -> Expr:
        documents = [_document_of(side) for side in (left, right)]
        if documents == [None, None]:
            return Compare(op, self.whole(left, depth), self.whole(right, depth))
        if sorted(filter(None, documents)) != ["i", "j"] or op not in ("==", "!="):
            fail("a document can only be compared with another document", left, "write document(i) == document(j)")
        return Compare(op, *(Call("document", (Var(name),)) for name in "ij"))

    def condition(self, node: ast.expr, depth: int) -> tuple[Expr, float | None]:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
                a, b = self.read(left, depth + 1), self.read(right, depth + 1)
                symbol = COMPARISONS[type(op)]
                return Compare(symbol, a[0], b[0]), fold(symbol, (a[1], b[1]), node)
            case ast.Compare(ops=[_, _, *_]):
                fail("comparisons cannot be chained", node, "nest the conditions: where(x > 0, where(x < 1, a, b), b)")
        fail("the condition of where must be one comparison", node, "write where(x > 0, a, b)")

    def check_exponent(self, value: float | None, node: ast.expr) -> None:
        if value is None:
            fail("the exponent of ** must be a constant", node, "write exp(n * log(x))")
        if abs(value) > self.largest_exponent:
            fail(f"an exponent must be at most {self.largest_exponent:g}", node)


def _document_of(node: ast.expr) -> str | None:
    match node:
        case ast.Call(func=ast.Name(id="document"), args=[ast.Name(id=name)], keywords=[]):
            return name
        case ast.Call(func=ast.Name(id="document")):
            fail("document(...) takes a single position, i or j", node, "write document(i) == document(j)")
    return None


def fold(name: str, values: tuple[float | None, ...], node: ast.expr) -> float | None:
    """Evaluates an operation on constants in floats, because Python integers could become arbitrarily large. Returns
    None if one of `values` is None, which stands for an operand that is not constant."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    try:
        return apply(name, *known)
    except ExprError as error:
        fail(error.message, node)


def suggest(name: str, known: Collection[str]) -> str:
    close = get_close_matches(name.lower(), [other for other in known if len(other) > 1], n=1, cutoff=0.62)
    return f"did you mean {close[0]}?" if close else ""


def describe(node: ast.expr) -> str:
    names = {"Lambda": "lambda", "NamedExpr": ":=", "Attribute": "attribute access", "Subscript": "indexing"}
    operators = {"Mod": "%", "FloorDiv": "//", "MatMult": "@", "BitXor": "^"}
    kind = type(node.op).__name__ if isinstance(node, ast.BinOp) else type(node).__name__
    return names.get(kind) or operators.get(kind) or f"a Python {kind.lower()}"


def fail(message: str, node: ast.expr, hint: str = "") -> NoReturn:
    raise ExprError(message, _column(node), hint)


def _column(node: ast.expr) -> int:
    return max(node.col_offset - 1, 0)


def _indices(index: ast.expr) -> list[ast.expr]:
    return index.elts if isinstance(index, ast.Tuple) else [index]
