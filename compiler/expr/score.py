"""Attention scores: expressions of the scaled product of query and key, the positions, and learned tables."""

from collections.abc import Iterator, Mapping
from functools import lru_cache

from ..records import record
from .derive import derive
from .interval import Undecided, example, negation, python_function
from .mask import LANGUAGE as MASKS
from .mask import NUMBERS, POSITIONS, Sizes, find_pair, in_some_documents, numbers_of, with_numbers
from .parse import Positions, parse, reread, written_reads
from .positional import POSITIONAL, HeadFunction
from .python_lines import operand
from .simplify import simplify
from .spell import torch_text
from .traverse import rebuild, substitute, variables
from .values import Binary, Call, Compare, Const, Expr, ExprError, Logic, Neg, Read, Var, children

PLAIN = "s"


def language(tables: Mapping[str, int]) -> Positions:
    """Returns the syntax of a score. `tables` maps each table to its number of dims; 0 allows any number."""
    return Positions((*POSITIONS, *NUMBERS), tuple(tables.items()))


def parse_score(text: str, tables: Mapping[str, int]) -> Expr:
    """Parses a score. A score may read s, i, j, h, numbers of the model and the layer, and elements of tables.

    Args:
        text: The score.
        tables: The number of dims of each table, by name.

    Raises:
        ExprError: If the text is not a score, or does not depend on s.
    """
    expr = parse(text, ("s", *POSITIONS, *NUMBERS), language(tables))
    if "s" not in variables(expr):
        raise ExprError("a score must read s, the scaled product", hint="for example s - slope(h) * (i - j)")
    return expr


@record
class TableRead:
    """An element of a learned table that a score reads.

    Attributes:
        variable: The variable that stands for the element in the score.
        table: The name of the table.
        indices: The index in each dim of the table. Each index is a whole-number expression of the query position i,
            the key position j and the head h.
    """

    variable: str
    table: str
    indices: tuple[Expr, ...]

    def index_texts(self) -> Iterator[str]:
        for dim, index in enumerate(self.indices):
            text = torch_text(index, whole=True)
            fixed = set(variables(index)) <= {"h"}
            yield text if fixed else f"{operand(text)}.clamp(0, {self.table}.shape[{dim}] - 1)"


@record
class Score:
    """A score and its derivatives, in the variables s, i, j, h and one variable per table element.

    Attributes:
        value: The score.
        reads: The table elements that the score reads.
        slope: The derivative of the score with respect to s.
        slopes: The derivative of the score with respect to each element.
    """

    value: Expr
    reads: tuple[TableRead, ...]
    slope: Expr
    slopes: tuple[Expr, ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def of(text: str, tables: tuple[str, ...], heads: int) -> "Score":
        """Returns the score of a canonical text from `bound_score`.

        Args:
            text: The text.
            tables: The names of the tables.
            heads: The number of query heads.
        """
        value, reads = _separated(reread(text, language(dict.fromkeys(tables, 0))))
        value = simplify(_expanded(value, heads))
        slopes = tuple(derive(value, read.variable) for read in reads)
        return Score(value, reads, derive(value, "s"), slopes)

    @property
    def plain(self) -> bool:
        return self.value == Var("s")

    def elements(self) -> Mapping[str, str]:
        return {read.variable: f"{read.table}[{', '.join(read.index_texts())}]" for read in self.reads}


def _separated(expr: Expr) -> tuple[Expr, tuple[TableRead, ...]]:
    reads: dict[Expr, TableRead] = {}

    def visit(part: Expr) -> Expr:
        if isinstance(part, Read):
            read = reads.setdefault(part, TableRead(f"read{len(reads)}", part.table, part.indices))
            return Var(read.variable)
        return rebuild(part, visit)

    return visit(expr), tuple(reads.values())


def _expanded(expr: Expr, heads: int, known: bool = False) -> Expr:
    """Inserts formulas in place of calls of functions that depend on the number of heads. If `known` is True, only
    calls whose first argument has no variables are replaced."""
    expr = rebuild(expr, lambda part: _expanded(part, heads, known))
    match expr:
        case Call(name, (first, *constants)) if isinstance(function := POSITIONAL.get(name), HeadFunction):
            if known and variables(first):
                return expr
            return function.expand(first, heads, *constants)
    return expr


@lru_cache(maxsize=256)
def bound_score(
    text: str,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    mask: str,
    heads: int,
    context: int,
    prefix: int = 0,
    sizes: Sizes = (),
) -> str:
    """Returns the canonical text of a score. In this text, numbers replace names such as `context`.

    Scores that are equal after simplification have equal texts: `s + 0 * i` is `s`.

    Args:
        text: The score.
        shapes: The name and the shape of each table.
        mask: The canonical text of the mask. Indices may be out of range for masked pairs.
        heads: The number of query heads.
        context: The number of tokens of a sequence.
        prefix: The number of tokens at the start of a sequence that may attend to each other.
        sizes: The values of additional numbers of the layer, as in `bound_mask`.

    Raises:
        ExprError: If the text is not a score, if it does not depend on s, or if an index may be out of range.
    """
    numbers = numbers_of(heads, context, prefix, sizes)
    tables = dict(shapes)
    dims = {name: len(shape) for name, shape in tables.items()}
    written = language(dims)
    value = simplify(_expanded(with_numbers(parse_score(text, dims), numbers), heads, known=True))
    if derive(value, "s") == Const(0):
        raise ExprError("the score does not depend on s", hint="for example s - slope(h) * (i - j)")
    condition = reread(mask, MASKS)
    columns = {
        (read.table, tuple(simplify(substitute(index, numbers)) for index in read.indices)): where
        for read, where in written_reads(text, written)
    }
    for read in _separated(value)[1]:
        where = columns.get((read.table, read.indices), (0,) * len(read.indices))
        for place, (index, size) in enumerate(zip(read.indices, tables[read.table], strict=True)):
            _check_index(read.table, place, index, size, condition, heads, context, where[place])
    return str(_defined(value, in_some_documents(condition), heads, context, text))


PARTIAL = ("sqrt", "log", "exp", "exp2")  # functions that are undefined or infinite for some arguments
UNDEFINED = {"sqrt": "<", "log": "<="}  # the comparison with 0 that holds for the undefined arguments of sqrt and log


def _defined(score: Expr, mask: Expr, heads: int, context: int, text: str) -> Expr:
    """Makes a score finite for masked pairs. The score of other pairs does not change.

    A masked pair adds 0 times the derivative of its score to gradients. This product is NaN if the derivative is
    infinite. Some expressions of positions are therefore bounded below by 1 or 0: arguments of PARTIAL functions,
    denominators, and bases of powers. The bound must hold for all unmasked pairs. With the mask `j <= i`, for example,
    log(i - j + 1) becomes log(max(i - j + 1, 1)).

    Args:
        score: The score, or a part of it.
        mask: The condition under which `score` is computed.
        heads: The number of query heads.
        context: The number of tokens of a sequence.
        text: The score as written, for the column of an error.

    Raises:
        ExprError: If one of these expressions is undefined for an unmasked pair.
    """

    def never(condition: Expr) -> bool:
        try:
            return find_pair(condition, heads, context) is None
        except Undecided:
            return False

    def limited(part: Expr) -> Expr:
        if isinstance(part, Read) or not {"i", "j"} & set(variables(part)):
            return part
        if not _of_positions(part):
            return rebuild(part, limited)
        for least in (Const(1), Const(0)):
            below = Compare("<", part, least)
            if never(Logic("and", (mask, below))):
                return part if never(below) else Call("max", (part, least))
        return part

    def refuse(part: Expr, undefined: Compare) -> None:
        if not _of_positions(undefined.a):
            return
        try:
            pair = find_pair(Logic("and", (mask, undefined)), heads, context)
        except Undecided:
            return
        if pair is not None:
            at = ", ".join(f"{name} = {value}" for name, value in zip(POSITIONS, pair, strict=True) if name != "h")
            message = f"`{part}` has no value at {at}, where the query attends to the key"
            raise ExprError(message, max(text.find(str(part)), 0), f"limit the value: max({undefined.a}, 1)")

    def visit(part: Expr) -> Expr:
        return _defined(part, mask, heads, context, text)

    match score:
        case Call("where", (Compare(_, left, right) as test, a, b)) if _of_positions(left) and _of_positions(right):
            branches = zip((test, negation(test)), (a, b), strict=True)
            parts = (_defined(part, Logic("and", (mask, holds)), heads, context, text) for holds, part in branches)
            return Call("where", (test, *parts))
        case Call(function, (argument,)) if function in PARTIAL:
            if function in UNDEFINED:
                refuse(score, Compare(UNDEFINED[function], argument, Const(0)))
            return Call(function, (limited(visit(argument)),))
        case Binary("/", a, b):
            refuse(score, Compare("==", b, Const(0)))
            return Binary("/", visit(a), limited(visit(b)))
        case Binary("**", a, Const(power)) if power < 0 or not power.is_integer():
            return Binary("**", limited(visit(a)), Const(power))
    return rebuild(score, visit)


def _of_positions(expr: Expr) -> bool:
    match expr:
        case Const(value):
            return value.is_integer()
        case Var(name):
            return name in POSITIONS
        case Neg() | Binary("+" | "-" | "*" | "//" | "%") | Call("min" | "max" | "abs" | "bucket"):
            return all(map(_of_positions, children(expr)))
    return False


def _check_index(
    table: str, place: int, index: Expr, size: int, mask: Expr, heads: int, context: int, column: int
) -> None:
    """Raises ExprError if an index is out of range for a pair that the mask admits. The error states the pair.

    Args:
        table: The name of the table.
        place: The position of the dim in the shape of the table, from 0.
        index: The index in this dim.
        size: The size of the dim.
        mask: The mask.
        heads: The number of query heads.
        context: The number of tokens of a sequence.
        column: The column of the index in the score.
    """
    outside = Logic("or", (Compare("<", index, Const(0)), Compare(">=", index, Const(size))))
    condition = Logic("and", (in_some_documents(mask), outside))
    pair = example(condition, context, heads)
    if pair is not None:
        value = python_function(index, POSITIONS)(*pair)
        at = ", ".join(
            f"{name} = {value}" for name, value in zip(POSITIONS, pair, strict=True) if name in variables(index)
        )
        message = f"the index `{index}` in dim {place} of {table}, which has size {size}, may be out of range"
        limit = f"max({index}, 0)" if value < 0 else f"min({index}, {size - 1})"
        raise ExprError(f"{message}: it is {value} at {at}", column, f"limit the index: {limit}")
