"""The functions of positions and heads that attention masks and scores may call. Each is one entry of POSITIONAL.

To add a function, add an entry: a `WholeFunction` if the function returns whole numbers, a `HeadFunction` if the
function depends on the number of heads. No other change is needed.

The functions `slope` and `document` are never computed directly. `slope` depends on the number of heads. When this
number is known, a formula replaces each call of `slope`. A mask can call `document` only to compare the documents of
two positions, as in document(i) == document(j). parse.py and mask.py treat this comparison as one condition.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import KW_ONLY
from functools import lru_cache
from math import log2
from typing import TYPE_CHECKING

from ..records import record
from .primitives import PRIMITIVES, Function, Primitive
from .values import ATOM, Call, Compare, Const, Expr, Printer

if TYPE_CHECKING:
    from torch import Tensor

Refusal = tuple[int, str, str]  # the index of the argument at fault, the message, and the hint


@record
class Positional(Function):
    """A function of masks and scores. The first argument is a whole number, and all other arguments are constants.

    Attributes:
        check: a function that returns the reason why the arguments are invalid, or None.
        sign: the sign of the values, as in `Primitive`.
    """

    _: KW_ONLY
    check: Callable[[tuple[Expr, ...]], Refusal | None] = lambda args: None
    sign: str = ""


@record
class WholeFunction(Positional):
    """A function whose values are whole numbers. Masks, scores and indices of tables may call the function.

    Attributes:
        value: The function on numbers.
        bounds: `bounds(low, high, *constants)` returns two expressions: the least and the greatest value of the
            function, if the first argument is between the expressions `low` and `high`.
        torch: `torch(tensor, *constants)` returns the values for a tensor of first arguments.
        text: `text(printer, language, *args)` returns the source text of a call in the language `torch`, `triton` or
            `cute`. The printer prints the arguments. The text needs no parentheses.
    """

    _: KW_ONLY
    value: Callable[..., int]
    bounds: Callable[..., tuple[Expr, Expr]]
    torch: "Callable[..., Tensor]"
    text: Callable[..., str]


@record
class HeadFunction(Positional):
    """A function that depends on the number of heads. Only scores may call the function.

    Attributes:
        expand: `expand(first, heads, *constants)` returns the formula that replaces a call.
    """

    _: KW_ONLY
    expand: Callable[..., Expr]


@lru_cache(maxsize=256)
def bucket_bounds(buckets: int, distance: int) -> tuple[int, ...]:
    """Returns the smallest distance of each bucket of the function `bucket`. The first bucket is omitted. The
    arithmetic is exact.

    Let `exact` be half the number of buckets. The first `exact` buckets each hold one distance. After these buckets,
    bucket `exact + k` begins at the smallest d with log(d / exact) / log(distance / exact) * (buckets - exact) >= k
    (T5, Raffel et al., 2020).
    """
    exact = buckets // 2
    bounds, rest = list(range(1, exact + 1)), buckets - exact
    for k in range(1, rest):
        low, high = bounds[-1], distance  # for d = `distance`, d ** rest * exact ** k >= distance ** k * exact ** rest
        while low < high:
            middle = (low + high) // 2
            if middle**rest * exact**k >= distance**k * exact**rest:
                high = middle
            else:
                low = middle + 1
        bounds.append(low)
    return tuple(bounds)


def _refused_buckets(args: tuple[Expr, ...]) -> Refusal | None:
    count, distance = (part.value if isinstance(part, Const) else 0.0 for part in args[1:])
    if count.is_integer() and distance.is_integer() and count >= 2 and distance > count // 2:
        return None
    hint = "use at least 2 buckets, and a distance above half the number of buckets: bucket(i - j, 32, 128)"
    return 1, f"bucket cannot divide distances up to {args[2]} into {args[1]} buckets", hint


def _torch_bucket(distances: "Tensor", count: float, distance: float) -> "Tensor":
    import torch

    ends = bucket_bounds(int(count), int(distance))
    return torch.bucketize(distances, torch.tensor(ends, dtype=distances.dtype, device=distances.device), right=True)


# Source text in each language. FLOORED_LOGARITHM is min(floor(scale * log2(d) + offset), last) for a distance d >= 1.
# CHOICE selects one of two numbers. FLAG converts a condition to the number 0 or 1.
FLOORED_LOGARITHM = {
    "torch": "({scale!r} * torch.log2({d}.clamp(min=1).float()) + {offset!r}).long().clamp(max={last})",
    "triton": (
        "tl.minimum(({scale!r} * tl.log2(tl.maximum({d}, 1).to(tl.float32)) + {offset!r}).to(tl.int32), {last})"
    ),
    "cute": (
        "smaller(({scale!r} * cute.math.log2(larger({d}, 1).to(cutlass.Float32)) + {offset!r})"
        ".to(cutlass.Int32), {last})"
    ),
}
CHOICE = {"torch": "torch.where({}, {}, {})", "triton": "tl.where({}, {}, {})", "cute": "cute.where({}, {}, {})"}
FLAG = {"torch": "{}.long()", "triton": "{}.to(tl.int32)", "cute": "{}.to(cutlass.Int32)"}


def _bucket_text(printer: Printer, language: str, d: Expr, *limits: Const) -> str:
    """Returns source text that computes the bucket of the distance `d`. `limits` are the number of buckets and the
    maximum distance. If `d` is below half the number of buckets, the bucket is `d` itself. Otherwise, the bucket is the
    floor of a logarithm.

    An offset is added to the logarithm, so that rounding in fp32 never changes the bucket. If no such offset exists,
    the text is a sum of comparisons instead.
    """
    count, distance = (int(limit.value) for limit in limits)
    exact, ends = count // 2, bucket_bounds(count, distance)
    rest = count - exact
    scale = rest / log2(distance / exact)
    slack = 1e-6 * (4 * scale + rest)
    steps = list(enumerate(ends[exact:], 1))
    least = max((k - scale * log2(end) for k, end in steps), default=0.0) + slack
    most = min((k - scale * log2(end - 1) for k, end in steps if end > exact), default=1.0) - slack
    if least > most:
        return f"({' + '.join(FLAG[language].format(f'({printer.side(d)} >= {end})') for end in ends)})"
    d_text, offset = printer.text(d, ATOM), (least + most) / 2
    far = FLOORED_LOGARITHM[language].format(d=d_text, scale=scale, offset=offset, last=rest - 1)
    return CHOICE[language].format(f"{printer.side(d)} < {exact}", printer.text(d), f"{exact} + {far}")


def slope(h: Expr, heads: int) -> Expr:
    """Returns the slope of head `h` of `heads` heads (ALiBi, Press et al., 2022).

    If the number of heads n is a power of 2, the slope of head h is 2 ** (-8 (h + 1) / n). Otherwise, let m be the
    largest power of 2 below n. The slopes are all slopes for m heads, followed by every second slope for 2 m heads.
    """
    n = 1 << (heads.bit_length() - 1)
    first = Call("exp2", (Const(-8 / n) * (h + 1),))
    if n == heads:
        return first
    return Call("where", (Compare("<", h, Const(n)), first, Call("exp2", (Const(-4 / n) * (2 * h - (2 * n - 1)),))))


POSITIONAL: dict[str, Positional] = {
    function.name: function
    for function in (
        WholeFunction(
            "bucket(i - j, 32, 128)",
            check=_refused_buckets,
            sign=">= 0",
            value=lambda d, count, distance: bisect_right(bucket_bounds(int(count), int(distance)), d),
            bounds=lambda low, high, *limits: (Call("bucket", (low, *limits)), Call("bucket", (high, *limits))),
            torch=_torch_bucket,
            text=_bucket_text,
        ),
        HeadFunction("slope(h)", sign="> 0", expand=slope),
        Positional(
            "document(i)",
            check=lambda args: (0, "document(...) is not a number", "compare it: document(i) == document(j)"),
        ),
    )
}


def function_named(name: str) -> Primitive | Positional:
    return PRIMITIVES.get(name) or POSITIONAL[name]


def whole_function(name: str) -> WholeFunction | None:
    function = POSITIONAL.get(name)
    return function if isinstance(function, WholeFunction) else None
