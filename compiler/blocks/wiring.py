"""Wiring: the pointwise expressions by which a block reads and writes the residual stream and other named values."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from specc.compiler.blocks.context import Shape
from specc.compiler.expr import Binary, Const, Expr, ExprError, Var, parse, substitute, variables
from specc.compiler.expr import number as compute
from specc.compiler.expr.index import condition_holds, formula_value, names_in
from specc.compiler.expr.parse import column_of
from specc.compiler.expr.traverse import rebuild
from specc.compiler.expr.values import ONE
from specc.compiler.expr.wiring import NUMBERS, Wiring, parse_wiring, repeated, replaced
from specc.compiler.ir.builder import Builder, first_free
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.shape import Embedding, FirstFeatures
from specc.compiler.programs.init import Init, LayerFormula, stated, value_of
from specc.compiler.strict import ExprText, Name, Path, Positive, Problem, StrictModel, accepted_by, later

SHARED = "_shared"  # the prefix of variables for common subexpressions
IDS = "ids"  # the tokens of the program, i64[B, T]


# A whole number, or a formula over the sizes of the model and of the block's attention.
Formula = Annotated[ExprText, accepted_by(names_in)]
Count = Annotated[int, Field(gt=0, le=2**24)] | Formula
Counts = Annotated[tuple[Count, ...], Field(min_length=1, max_length=4)]

WiringText = Annotated[ExprText, accepted_by(parse_wiring)]
Expressions = WiringText | dict[Name, WiringText]  # the residual stream, or several streams by name


def texts_of(value: Expressions) -> Mapping[str, str]:
    """Returns the expression of each stream, by name. A single expression has the name ""."""
    return value if isinstance(value, dict) else {"": value}


class Learned(StrictModel):
    """A learned value: numbers that all tokens share or, with `of`, numbers for each token.

    Attributes:
        init: the initial value of numbers: a number, or a formula of `layer` and `layers`. For a matrix, an
            initialization. By default, the model's `init`.
        shape: the number of learned numbers, by default the features of the model. A list such as `[heads, 32]` states
            the dims of a table that a score reads. A formula may read `dim`, `context`, `prefix` and the sizes of
            attention in the layer or block: `heads`, `kv_heads`, `head_dim` and `values`, the total width of the value
            heads.
        of: an expression. A learned matrix [shape, features] multiplies the value of the expression. `ids` looks up a
            row of a learned table [vocabulary, shape] for each token.
        features: the number of features of the value that are multiplied, counted from the first feature. By default,
            all features.
    """

    init: LayerFormula | Init | None = None
    shape: Count | Counts | None = None
    of: WiringText | None = later(None)
    features: Positive | None = later(None)

    @property
    def reads(self) -> Wiring | None:
        """The parsed expression `of`, or None for numbers that all tokens share."""
        return None if self.of is None else parse_wiring(self.of)

    def problems(self) -> Iterator[Problem]:
        if self.of is None and not isinstance(self.init, float | int | str):
            message = "a learned value without `of` is not a matrix, so its `init` must be a number or a formula"
            yield Problem((), "S205", message, "for example `init: 1`, or a formula of `layer`")
        if self.of is not None and isinstance(self.shape, tuple):
            message = "a learned value with `of` cannot be a table"
            yield Problem(("shape",), "S241", message, "write one number, the features per token")
        if self.features is not None and self.of in (None, IDS):
            message = "`features` needs `of`, the value whose features are read"
            yield Problem(("features",), "S241", message, "remove features")

    def dims(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the dims of one token's value. Raises ExprError if a formula has no value for `sizes`."""
        return tuple(_number(count, sizes) for count in self.counts)

    @property
    def counts(self) -> Counts:
        return self.shape if isinstance(self.shape, tuple) else (self.shape or "dim",)

    def size_problem(self, sizes: Mapping[str, int], *at: str | int) -> Iterator[Problem]:
        """Yields a problem if a formula of the shape has no value for `sizes`, or if a dim is not positive."""
        for i, count in enumerate(self.counts):
            path = (*at, "shape", *((i,) if isinstance(self.shape, tuple) else ()))

            def check(count: Count = count) -> None:
                if (dim := _number(count, sizes)) < 1:
                    raise ExprError(f"`shape` has a dim of {dim}", hint="a dim must be at least 1")

            yield from failure(check, path, "S241", "")

    def declare(self, b: Builder, name: str, shape: Shape, value: str = "") -> str:
        """Adds the learned value `name`, a path such as `mix.stream`, and returns its reference.

        Args:
            b: The builder of the function.
            name: The path of the parameter and of the nodes.
            shape: The sizes of the model.
            value: The value of the expression `of`: ids i64[B, T], or [B, T, D].
        """
        outer, b.scope = b.scope, ".".join(filter(None, (b.scope, name.rpartition(".")[0])))
        leaf = name.rpartition(".")[2]
        dims = self.dims(shape.sizes)
        # The initialization of the model reads the number of all layers, and that of a value reads those of its stack.
        start = (shape.matrix_init, shape.tables.layers) if self.init is None else (self.init, shape.layers)
        if self.of is None:
            ref = b.learned_param(leaf, shape.activation(*dims), *start)
        elif self.of == IDS:
            table = b.learned_param(leaf, shape.activation(shape.vocab, *dims), *start)
            ref = b.add(leaf, Embedding(), (value, table))
        else:
            width = b.types[value].width
            assert isinstance(width, int)
            features = self.features or width
            if features != width:
                value = b.add(f"{leaf}.read", FirstFeatures(features), (value,))
            ref = b.add(leaf, Linear(), (value, b.learned_param(leaf, shape.activation(*dims, features), *start)))
        b.scope = outer
        return ref


def _number(count: Count, sizes: Mapping[str, int]) -> int:
    return formula_value(count, sizes) if isinstance(count, str) else count


def add(b: Builder, name: str, expr: Expr, values: Mapping[str, tuple[str, str]], prefix: str, shape: Shape) -> str:
    """Adds an expression as the node `name` and returns the value. An expression that is only a variable needs no node.

    Args:
        b: The builder of the function.
        name: The name of the node.
        expr: The expression.
        values: The value of each variable, and the value's name in generated code.
        prefix: The name of a number that depends on the layer, such as `attention_residual`. A second number of this
            kind gets the name `attention_residual2`.
        shape: The sizes of the model.
    """
    if isinstance(expr, Var):
        return values[expr.name][0]
    if (part := repeated(expr)) is not None:  # computed once
        node = first_free(f"{name}.shared", lambda option: b.path(option) not in b.types)
        shared = add(b, node, part, values, prefix, shape)
        known = sum(variable.startswith(SHARED) for variable in values)
        variable, label = f"{SHARED}{known}", f"shared{known + 1 if known else ''}"
        rest = replaced(expr, part, Var(variable))
        return add(b, name, rest, {**values, variable: (shared, label)}, prefix, shape)
    operands: dict[str, str] = {}
    renamed: dict[str, Expr] = {}
    for variable in variables(expr):
        if variable in values:
            ref, label = values[variable]
            whole = label.replace(".", "_")  # a learned value may have the name of another value
            short = label.rpartition(".")[2]
            label = short if short not in operands else first_free(whole, lambda option: option not in operands)
            operands[label], renamed[variable] = ref, Var(label)

    def numbered(part: Expr) -> Expr:
        if isinstance(part, Const) or not set(variables(part)) <= set(NUMBERS):
            return rebuild(part, numbered)
        text, scalars = number(b, str(part), prefix, shape)
        operands.update(scalars)
        return Var(text) if scalars else Const(float(text))

    text = str(substitute(numbered(expr), renamed))
    return b.add(name, Pointwise((text,), tuple(operands)), tuple(operands.values()))


def number(b: Builder, formula: float | str, name: str, shape: Shape) -> tuple[str, Mapping[str, str]]:
    """Converts a number or formula of the spec to the text of an expression.

    A formula that reads `layer` becomes a scalar input. Any other formula is evaluated.

    Args:
        b: The builder of the function.
        formula: The number or the formula.
        name: The name of the constant or of the scalar input.
        shape: The sizes of the model.

    Returns:
        The text of the expression, and the operands of the expression by name.
    """
    text = stated(formula, layers=float(shape.layers))
    if not isinstance(text, str) or "layer" not in variables(parse(text)):
        return repr(b.constant(name, value_of(text), text)), {}
    free = first_free(name, lambda option: b.scalars.get(option, text) == text)
    return free, {free: b.scalar(free, text)}


def number_problem(
    value: Wiring | Init | float | str | None, at: Path, layer: int | None, layers: int
) -> Iterator[Problem]:
    """Yields a problem if a number of the spec, or a formula inside an expression, is not finite in a layer.

    Args:
        value: The number or the expression.
        at: The spec path of the number.
        layer: The index of the layer. None outside of blocks.
        layers: The number of layers.
    """
    if not isinstance(value, str | Wiring):
        return
    values = {"layers": float(layers)} | ({} if layer is None else {"layer": float(layer)})
    offset = 0

    def check(part: Expr, divides: bool = False) -> Expr:
        nonlocal offset
        if not set(variables(part)) <= set(NUMBERS):
            if isinstance(part, Binary) and part.op == "/":
                return Binary("/", check(part.a), check(part.b, divides=True))
            return rebuild(part, check)
        try:
            compute(ONE / part if divides else part, **values)
        except ExprError:
            offset = column_of(value, part) if isinstance(value, str) else value.column(part)
            raise
        return part

    try:
        check(parse(value) if isinstance(value, str) else value.expr)
    except ExprError as error:
        message, hint = f"in layer {layer}, {error.message}", "change the formula; layers are counted from 0"
        if layer is None:
            message, hint = f"{error.message} outside of blocks", "use `layers`, the number of blocks"
        yield Problem(at, "S216", message, hint, offset=offset)


def failure(compute: Callable[[], object], path: Path, code: str, hint: str, where: str = "") -> Iterator[Problem]:
    """Yields a problem if `compute` raises ExprError.

    Args:
        compute: A function that evaluates an expression.
        path: The spec path of the expression.
        code: The code of the error.
        hint: The hint of the problem, for an ExprError without a hint.
        where: The beginning of the message, such as `in layer 2, `.
    """
    try:
        compute()
    except ExprError as error:
        yield Problem(path, code, f"{where}{error.message}", error.hint or hint, offset=error.column)


def condition(*names: str) -> AfterValidator:
    """Returns a validator of conditions that read `names`."""
    primes = (7919, 104729, 1299709, 15485863)  # with primes, divisors such as `layers - 1` are not 0
    values = dict(zip(names, primes, strict=False))
    return accepted_by(lambda text: condition_holds(text, values))
