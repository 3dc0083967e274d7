"""Chooses the values that the forward pass of a pointwise epilogue y = f(...) saves, so that the backward pass is
cheap.

These are the strategies, in order of preference:

- linear: The derivative depends only on constants and operands. Nothing is saved.
- output: The derivative is a function g(y) of the output. The output is in memory anyway.
- derivative: The derivatives are saved as additional outputs. The backward pass is then one multiplication without a
  branch. If f is homogeneous of degree k, the forward pass may compute f as slope * x / k.
- inputs: The derivatives are themselves inputs of f, as for x * gate. These inputs are saved.

A caller may request a fifth strategy in place of `derivative`:

- recomputed: The inputs of f are saved, and the backward pass computes the derivatives. This strategy moves arithmetic
  from the forward epilogue to the backward epilogue. Measurements decide which is faster.

The strategy "output" requires that f applies a single function, and that the value of this function determines the
derivative of the function. Before and after this function, f may multiply by a constant, or take a power of a base that
is >= 0. Because y may be rounded to bf16, g must be homogeneous of degree at most 2. The gradient then has at most
twice the relative error of y. exp, relu, relu ** n, sqrt and leaky_relu with a positive slope qualify. sigmoid and tanh
do not: y (1 - y) and 1 - y ** 2 lose all digits if y rounds to 1.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from .algebra import const, key, monomial_key, nonnegative, positive, split
from .derive import derive, homogeneous_degree
from .evaluate import number
from .primitives import PRIMITIVES
from .simplify import simplify
from .traverse import rebuild, substitute, variables
from .values import ONE, ZERO, Binary, Call, Compare, Const, Expr, ExprError, Neg, Var, children

STEEPEST = 2.0  # largest factor by which the relative error of y may grow in the gradient

Named = tuple[tuple[str, Expr], ...]
Keep = Literal["derivative", "input"]
KEEPS: tuple[Keep, ...] = get_args(Keep)  # kinds of values that a forward pass may save; the first kind is the default


class Backward(NamedTuple):
    """A plan for the value and the gradients of a pointwise y = f(...).

    Attributes:
        saves: Additional outputs of the forward pass, as pairs (name, expression in variables of f).
        value: y, as an expression of the variables of f and the saved names.
        grads: Pairs (variable, gradient). A gradient is an expression of `d` (the gradient of y), `y`, the names in
            `saves` and the variables in `needs`.
        needs: The variables of f that the backward pass reads from memory.
        strategy: linear, output, derivative, inputs or recomputed.
    """

    saves: tuple[tuple[str, Expr], ...]
    value: Expr
    grads: tuple[tuple[str, Expr], ...]
    needs: tuple[str, ...]
    strategy: str


@lru_cache(maxsize=1024)  # cached, because the programs of all targets contain the same expressions
def plan_backward(expr: Expr, wrt: tuple[str, ...], keep: Keep = "derivative") -> Backward:
    """Plans the backward pass of `expr` for the variables `wrt`.

    Args:
        expr: The expression of y.
        wrt: The variables to differentiate with respect to. These variables are results of matrix products and exist
            only in registers. All other variables are in memory.
        keep: The values to save if the backward pass needs saved values: the derivatives, or the variables that the
            derivatives read.

    Raises:
        ExprError: If `expr` uses the name d, y, or the name of a saved value, or if `wrt` has duplicates.
    """
    if len(set(wrt)) < len(wrt):
        raise ExprError(f"{', '.join(wrt)} repeats a name")
    names = {name: "slope" if len(wrt) == 1 else f"slope_{name}" for name in wrt}
    for name in variables(expr):
        if name in ("d", "y", *names.values()):
            raise ExprError(f"{name} is a reserved name of the backward pass", hint="rename the operand")
    slopes = {name: derive(expr, name) for name in wrt}
    value = min(expr, simplify(expr), key=lambda choice: _cost((choice,)))
    if not any(set(variables(slope)) & set(wrt) for slope in slopes.values()):
        return _plan((), value, {name: _times_d(slope) for name, slope in slopes.items()}, "linear")
    from_output = _from_output(expr, wrt)
    if from_output is not None:
        return _plan((), value, from_output, "output")
    saves: dict[str, Expr] = {}
    grads: dict[str, Expr] = {}
    for name, slope in slopes.items():
        if not set(variables(slope)) & set(wrt):
            grads[name] = _times_d(slope)
            continue
        same = next((saved for saved, other in saves.items() if key(other) == key(slope)), names[name])
        saves.setdefault(same, slope)
        grads[name] = Var("d") * Var(same)
    strategy = "inputs" if all(isinstance(slope, Var) for slope in saves.values()) else "derivative"
    if keep == "input" and strategy == "derivative":
        return _plan((), value, {name: _times_d(slope) for name, slope in slopes.items()}, "recomputed")
    return _plan(tuple(saves.items()), _cheapest(expr, wrt, saves, grads), grads, strategy)


def _plan(saves: Named, value: Expr, grads: dict[str, Expr], strategy: str) -> Backward:
    defined = {"d", "y", *(name for name, _ in saves)}
    read = dict.fromkeys(name for grad in grads.values() for name in variables(grad))
    needs = tuple(name for name in read if name not in defined)
    return Backward(saves, value, tuple(grads.items()), needs, strategy)


def _times_d(slope: Expr) -> Expr:
    return simplify(Var("d") * slope)


def _from_output(expr: Expr, wrt: tuple[str, ...]) -> dict[str, Expr] | None:
    """Returns the gradients of `expr`, as functions of its value y, for each variable of `wrt`. Returns None if a
    gradient also depends on values other than y, or if a rounded y would make a gradient inaccurate."""
    coefficient, factors = split(_with_leaky_relu(simplify(expr)))
    if len(factors) != 1:
        return None
    base, exponent = factors[0]  # f is coefficient * base ** exponent
    root = exponent.denominator != 1  # a root is defined only for base >= 0
    if exponent < 0 or not (exponent == 1 or root or nonnegative(base)):
        return None
    u = Var("u")
    if isinstance(base, Call):
        inner, rate = base.args[0], _rate(base, u)
    else:
        inner, rate = base, ONE if root else None
    through = {name: derive(inner, name) for name in wrt}
    if rate is None or any(set(variables(slope)) & set(wrt) for slope in through.values()):
        return None
    total = simplify(derive(const(coefficient) * u ** const(exponent), "u") * rate)
    y, nonneg = Var("y"), root or nonnegative(base)
    if nonneg:
        total = _knowing_sign(total, u, True)
    total = simplify(substitute(total, {"u": (y / const(coefficient)) ** const(1 / exponent)}))
    if nonneg:
        total = simplify(_knowing_sign(total, y, coefficient > 0))
    degree = homogeneous_degree(total, "y")
    if degree is None or abs(degree) > STEEPEST:
        return None
    return {name: _times_d(total * slope) for name, slope in through.items()}


def _rate(atom: Call, u: Var) -> Expr | None:
    """Returns the derivative of the function that `atom` calls, in terms of the function's value u. All arguments but
    the first are constants. Returns None if u does not determine the derivative."""
    if not all(isinstance(arg, Const) for arg in atom.args[1:]):
        return None
    t = Var("t")
    itself = Call(atom.function, (t, *atom.args[1:]))
    keeps_sign = atom.function == "relu" or (atom.function == "leaky_relu" and nonnegative(atom.args[1]))

    def read_off(expr: Expr) -> Expr:
        if expr == itself:
            return u
        if expr == Compare(">", t, ZERO) and keeps_sign:
            return Compare(">", u, ZERO)
        return rebuild(expr, read_off)

    rate = read_off(derive(itself, "t"))
    return None if "t" in variables(rate) else rate


def _with_leaky_relu(expr: Expr) -> Expr:
    """Rewrites where(u > 0, c * u, s * u) with c > 0 as c * leaky_relu(u, s / c), which `_from_output` can invert."""
    match expr:
        case Call("where", (Compare(">", u, Const(0.0)), a, b)):
            (c, some), (s, more) = split(a), split(b)
            if c > 0 and monomial_key(some) == monomial_key(more) == monomial_key(split(u)[1]):
                return const(c) * Call("leaky_relu", (u, const(s / c)))
    return expr


def _knowing_sign(expr: Expr, name: Var, positive: bool) -> Expr:
    """Simplifies `expr`, given that the variable `name` is >= 0 if `positive`, otherwise <= 0."""
    if expr == Call("relu", (name,)):
        return name if positive else ZERO
    if expr == Call("abs", (name,)):
        return name if positive else -name
    return rebuild(expr, lambda part: _knowing_sign(part, name, positive))


def _cheapest(expr: Expr, wrt: tuple[str, ...], saves: dict[str, Expr], grads: dict[str, Expr]) -> Expr:
    """Returns the cheapest expression for the value of `expr`. The result may read the values in `saves`, which the
    forward pass computes anyway."""
    by_key = {key(slope): Var(name) for name, slope in saves.items() if not isinstance(slope, Var)}

    def reuse(part: Expr) -> Expr:
        return by_key.get(key(part)) or rebuild(part, reuse)

    candidates = [reuse(simplify(expr)), reuse(expr)]
    for name in wrt:
        degree = homogeneous_degree(expr, name)
        saved = [other for other in saves if other in variables(grads[name])]
        if degree is not None and degree >= 1 and saved and not _singular(saves[saved[0]], name):
            candidates.append(simplify(Var(saved[0]) * Var(name) / degree))
    candidates += [simplify(expr), expr]
    return min(candidates, key=lambda candidate: (_cost((candidate, *saves.values())), _cost((candidate,))))


def _singular(slope: Expr, name: str) -> bool:
    """Returns whether `slope`, a derivative with respect to `name`, divides by a function of `name` that may be 0. The
    product of `slope` and `name` is then infinite at some points where the differentiated function is finite."""
    match slope:
        case Binary("/", _, b) if name in variables(b) and not positive(b):
            return True
        case Binary("**", a, b) if name in variables(a) and number(b) < 0 and not positive(a):
            return True
    return any(_singular(part, name) for part in children(slope))


def _cost(exprs: Iterable[Expr]) -> int:
    seen: set[Expr] = set()
    waiting = list(exprs)
    while waiting:
        expr = waiting.pop()
        if expr not in seen:
            seen.add(expr)
            waiting += children(expr)
    return sum(map(_own_cost, seen))


def _own_cost(expr: Expr) -> int:
    match expr:
        case Call(function, _):
            return PRIMITIVES[function].cost
        case Binary("**", _, b):
            exponent = number(b)
            return int(exponent).bit_length() if exponent > 0 and exponent.is_integer() else 8
        case Binary("/", _, _):
            return 4
        case Binary() | Neg() | Compare():
            return 1
    return 0
