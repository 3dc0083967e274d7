"""Wiring: how a block reads the residual stream and writes to it, as pointwise expressions over named values."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from specc.compiler.blocks.context import Shape
from specc.compiler.blocks.init import Init, LayerFormula, constant, stated, value_of
from specc.compiler.expr import Const, Expr, ExprError, Var, parse, substitute, variables
from specc.compiler.expr import number as compute
from specc.compiler.expr.index import condition_holds, names_in
from specc.compiler.expr.values import children, rebuild
from specc.compiler.ir.graph import Builder
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.shape import Embedding, FirstFeatures
from specc.compiler.strict import Name, Path, Positive, Problem, StrictModel, later

SHARED = "_shared"  # the prefix of the variable of a part that occurs in an expression more than once
IDS = "ids"  # the tokens of the program, i64[B, T]
OUTPUT = "output"  # output(k) is the value of run k
NUMBERS = ("layer", "layers")  # the names of numbers that every expression may read
INDEX = ("layer", "layers", "run", "runs")  # the names that the k of output(k) may read


TableDim = Annotated[int, Field(gt=0, le=2**24)] | Literal["heads", "context"]
TableDims = Annotated[tuple[TableDim, ...], Field(min_length=1, max_length=4)]


@dataclass(frozen=True)
class Wiring:
    """A parsed expression.

    Attributes:
        expr: the expression. Its variables have no dots.
        names: each variable that is a value, with its name as the spec writes it.
        outputs: each variable that is the output of an earlier run, with the formula of the run.
    """

    expr: Expr
    names: Mapping[str, str]
    outputs: Mapping[str, str]


@lru_cache(maxsize=1024)
def parse_wiring(text: str) -> Wiring:
    """Parses an expression over named values.

    The language is the pointwise language with dotted names and `output(k)`, the value of run `k`, which is a formula
    of whole numbers.

    Raises:
        ExprError: if the text is not such an expression.
    """
    dotted: dict[str, str] = {}
    outputs: dict[str, str] = {}
    plain = text
    for node in _special(text):
        start, end = node.col_offset, node.end_col_offset or 0
        written = text[start:end]
        if isinstance(node, ast.Call):
            if len(node.args) != 1 or node.keywords:
                raise ExprError(f"{OUTPUT} takes one argument", start, f"write {OUTPUT}(layer - 1)")
            index = ast.unparse(node.args[0])
            if unknown := names_in(index) - set(INDEX):
                message = f"the run of {OUTPUT} reads `{min(unknown)}`"
                raise ExprError(message, start, f"it may read {', '.join(INDEX)}")
            label = next((name for name, known in outputs.items() if known == index), f"{OUTPUT}{len(outputs)}")
            outputs[label] = index
        else:
            label = written.replace(".", "_")
            dotted[label] = written
        # a replacement of equal length keeps the columns of later errors
        plain = f"{plain[:start]}{label:<{end - start}}{plain[end:]}"
    expr = parse(plain)
    names = {name: dotted.get(name, name) for name in variables(expr) if name not in outputs and name not in NUMBERS}
    return Wiring(expr, names, outputs)


def _special(text: str) -> Iterator[ast.Attribute | ast.Call]:
    """Yields the dotted names and the calls of `output`. Text that Python cannot read has none."""
    try:
        tree = ast.parse(f"({text})", mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return
    for node in ast.walk(tree):
        special = isinstance(node, ast.Attribute) and _is_dotted(node)
        if special or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == OUTPUT):
            assert isinstance(node, ast.Attribute | ast.Call)
            node.col_offset, node.end_col_offset = node.col_offset - 1, (node.end_col_offset or 0) - 1
            yield node


def _is_dotted(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_dotted(node.value))


def _wired(text: str) -> str:
    parse_wiring(text)  # ExprError is a ValueError
    return text


WiringText = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_wired)]
Expressions = WiringText | dict[Name, WiringText]  # the residual stream, or several streams by name


class Learned(StrictModel):
    """A learned value: numbers that all tokens share, or with `of` numbers of each token.

    Attributes:
        init: the value that numbers start with, a number or a formula of `layer` and `layers`; or the initialization of
            a matrix, which is the model's if unset.
        shape: how many numbers there are, one per feature of the model if unset; `values`: as many as the values of the
            block's attention have; or the dims of a table that a score reads, such as `[heads, 32]`.
        of: the value that a matrix [shape, features] is multiplied with, an expression. `ids`: the rows of a table
            [vocabulary, shape], one for each token.
        features: how many of the first features of that value are read; all if unset.
    """

    init: LayerFormula | Init | None = None
    shape: Positive | Literal["values"] | Annotated[tuple[TableDim, ...], Field(min_length=1, max_length=4)] | None = (
        None
    )
    of: WiringText | None = later(None)
    features: Positive | None = later(None)

    @property
    def reads(self) -> Wiring | None:
        """The expression of the value that it reads; None for numbers that all tokens share."""
        return None if self.of is None else parse_wiring(self.of)

    def problems(self) -> Iterator[Problem]:
        if self.of is None and not isinstance(self.init, float | int | str):
            message = "a learned value without `of` needs a number as its init"
            yield Problem((), "S205", message, "for example `init: 1`, or a formula of `layer`")
        if self.of is not None and isinstance(self.shape, tuple):
            yield Problem(("shape",), "S241", "a table that a score reads has no `of`", "use a number of features")
        if self.features is not None and self.of in (None, IDS):
            yield Problem(("features",), "S241", "`features` are of a value that `of` states", "remove features")

    def dims(self, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
        """Returns the dims of a table, with `sizes` for those that have names; None if the value is not a table."""
        if not isinstance(self.shape, tuple):
            return None
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)

    def declare(
        self, b: Builder, name: str, shape: Shape, value: str = "", sizes: Mapping[str, int] | None = None
    ) -> str:
        """Adds the learned value `name`, a path such as `mix.stream`, and returns its reference.

        Args:
            b: the builder of the function.
            name: the path of the parameter and of the nodes.
            shape: the shape dims of the model.
            value: the value that `of` states: ids i64[B, T], or [B, T, D].
            sizes: the dims of a table that have names.
        """
        outer, b.scope = b.scope, ".".join(filter(None, (b.scope, name.rpartition(".")[0])))
        leaf = name.rpartition(".")[2]
        count = shape.values if self.shape == "values" else self.shape
        dims = self.dims(sizes or {}) or (count if isinstance(count, int) else shape.dim,)
        start = self.init if isinstance(self.init, Init) else shape.matrix_init
        if isinstance(self.init, float | int | str):
            start = constant(value_of(self.init, layer=float(shape.layer), layers=float(shape.layers)))
        if self.of is None:
            ref = b.param(leaf, shape.activation(*dims), start)
        elif self.of == IDS:
            ref = b.add(leaf, Embedding(), (value, b.param(leaf, shape.activation(shape.vocab, *dims), start)))
        else:
            width = b.types[value].width
            assert isinstance(width, int)
            features = self.features or width
            if features != width:
                value = b.add(f"{leaf}.read", FirstFeatures(features), (value,))
            ref = b.add(leaf, Linear(), (value, b.param(leaf, shape.activation(*dims, features), start)))
        b.scope = outer
        return ref


def wrapped(base: Expr, expr: Expr, name: str) -> Expr | None:
    """Returns the expression E for which `expr` is `base` with E in place of the variable `name`; None if there is
    none."""
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


def add(b: Builder, name: str, expr: Expr, values: Mapping[str, tuple[str, str]], prefix: str, shape: Shape) -> str:
    """Adds an expression as the node `name` and returns its value. A lone variable adds no node.

    Args:
        b: the builder of the function.
        name: the name of the node.
        expr: the expression.
        values: the value of each variable, with its name in generated code.
        prefix: the name of numbers that depend on the layer, such as `attention_residual`.
        shape: the shape dims of the model.
    """
    if isinstance(expr, Var):
        return values[expr.name][0]
    if (part := _repeated(expr)) is not None:  # computed once
        shared = add(b, _free(b, f"{name}.shared"), part, values, prefix, shape)
        known = sum(variable.startswith(SHARED) for variable in values)
        variable, label = f"{SHARED}{known}", f"shared{known + 1 if known else ''}"
        rest = _replaced(expr, part, Var(variable))
        return add(b, name, rest, {**values, variable: (shared, label)}, prefix, shape)
    operands: dict[str, str] = {}
    renamed: dict[str, Expr] = {}
    for variable in variables(expr):
        if variable in values:
            ref, label = values[variable]
            whole = label.replace(".", "_")  # a learned value may have the name of another value
            options = (label.rpartition(".")[2], whole, *(f"{whole}{i}" for i in range(2, len(values) + 2)))
            label = next(option for option in options if option not in operands)
            operands[label], renamed[variable] = ref, Var(label)

    def numbered(part: Expr) -> Expr:
        if isinstance(part, Const) or not set(variables(part)) <= set(NUMBERS):
            return rebuild(part, numbered)
        text, scalars = number(b, str(part), prefix, shape)
        operands.update(scalars)
        return Var(text) if scalars else Const(float(text))

    text = str(substitute(numbered(expr), renamed))
    return b.add(name, Pointwise((text,), tuple(operands)), tuple(operands.values()))


def _free(b: Builder, name: str) -> str:
    """Returns a name that no node under the builder's scope has: `name`, or `name` with a number."""
    options = (name, *(f"{name}{i}" for i in range(2, len(b.types) + 3)))
    return next(option for option in options if b.path(option) not in b.types)


def _repeated(expr: Expr) -> Expr | None:
    """Returns the largest part of an expression that occurs in it more than once and reads a value; None if there is
    none."""
    counts: Counter[Expr] = Counter()
    queue = [expr]
    for part in queue:  # the list grows during the loop
        if children(part) and not set(variables(part)) <= set(NUMBERS):
            counts[part] += 1
        queue += children(part)
    return max((part for part, count in counts.items() if count > 1), key=lambda part: part.size, default=None)


def _replaced(expr: Expr, part: Expr, other: Expr) -> Expr:
    return other if expr == part else rebuild(expr, lambda inner: _replaced(inner, part, other))


def number(b: Builder, formula: float | str, name: str, shape: Shape) -> tuple[str, Mapping[str, str]]:
    """Returns a number of the spec as text for an expression, and the operands of that text, by name.

    A formula that reads `layer` becomes a scalar called `name` that the caller passes. Any other becomes its value.
    """
    layers = float(shape.layers)
    text = stated(formula, layers=layers)
    if not isinstance(formula, str) or "layer" not in variables(parse(formula)):
        return repr(b.constant(name, value_of(formula, layers=layers), text)), {}
    bound = value_of(formula, layer=float(shape.layer), layers=layers), str(text)
    names = (name, *(f"{name}{i}" for i in range(2, len(b.scalars) + 3)))
    free = next(option for option in names if b.scalars.get(option, bound) == bound)
    return free, {free: b.scalar(free, *bound)}


def width_problem(learned: Learned, at: Path, values: int | None) -> Iterator[Problem]:
    """Yields a problem if a learned value is as wide as the values of attention, and there is none."""
    if learned.shape == "values" and values is None:
        message = "`shape: values` needs attention in the block, which there is not"
        yield Problem(at, "S241", message, "state a number of features")


def number_problem(value: Wiring | Init | float | str | None, at: Path, layer: int, layers: int) -> Iterator[Problem]:
    """Yields a problem if a formula of numbers, or one inside an expression, is not a finite number in a layer."""
    if not isinstance(value, str | Wiring):
        return
    values = {"layer": float(layer), "layers": float(layers)}

    def check(part: Expr) -> Expr:
        if set(variables(part)) <= set(NUMBERS):
            compute(part, **values)
            return part
        return rebuild(part, check)

    try:
        check(parse(value) if isinstance(value, str) else value.expr)
    except ExprError as error:
        yield Problem(at, "S216", f"in layer {layer}, {error.message}", "change the formula; layers are counted from 0")


def condition(*names: str) -> Callable[[str], str]:
    """Returns a validator of conditions that read `names`."""
    primes = (7919, 104729, 1299709, 15485863)  # with primes, divisors such as `layers - 1` are not 0

    def check(text: str) -> str:
        condition_holds(text, dict(zip(names, primes, strict=False)))
        return text

    return check
