"""Welch's t-test of whether the means of two groups of runs differ by more than chance.

The tail probability of Student's t distribution is a value of the regularized incomplete beta function. A continued
fraction computes this function.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_TINY = 1e-300
_TERMS = 10_000


@dataclass(frozen=True, slots=True)
class Summary:
    """The number, the mean and the sample standard deviation of values. The divisor of the variance is n - 1. The
    standard deviation of a single value is 0.
    """

    n: int
    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        return cls(len(values), statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class Welch:
    """The result of Welch's t-test (Welch, 1947).

    Attributes:
        difference: the mean of the second group minus the mean of the first group.
        error: the standard error of the difference.
        t: the difference, divided by its standard error.
        df: the degrees of freedom, by the Welch-Satterthwaite equation.
        p: the two-sided p-value.
        low, high: the 95 % confidence interval of the difference.
    """

    difference: float
    error: float
    t: float
    df: float
    p: float
    low: float
    high: float

    def p_below(self, limit: float) -> float:
        """Returns a one-sided p-value. It is the probability that two groups with the true difference `limit` show a
        difference of at most the attribute `difference`.
        """
        t = (self.difference - limit) / self.error
        tail = t_two_sided(t, self.df) / 2
        return tail if t <= 0 else 1 - tail


def welch(first: Summary, second: Summary) -> Welch | None:
    """Tests whether two groups, given by their summaries, have different means (Welch's t-test).

    Returns:
        The result of the test. None if a group has fewer than two values, or if the standard error is zero.
    """
    if min(first.n, second.n) < 2:
        return None
    a, b = first.std**2 / first.n, second.std**2 / second.n
    error = math.sqrt(a + b)
    if error == 0:
        return None
    share = a / (a + b)  # with this ratio, tiny variances do not underflow when they are squared
    df = 1 / (share**2 / (first.n - 1) + (1 - share) ** 2 / (second.n - 1))
    difference = second.mean - first.mean
    t = difference / error
    margin = t_quantile(0.05, df) * error
    return Welch(difference, error, t, df, t_two_sided(t, df), difference - margin, difference + margin)


def t_two_sided(t: float, df: float) -> float:
    """Returns the probability that |T| >= |t|, for Student's t distribution with `df` > 0 degrees of freedom."""
    if math.isinf(t):
        return 0.0
    square = t * t
    # x = df / (df + t^2) and 1 - x, both without cancellation
    return incomplete_beta(df / 2, 0.5, df / (df + square), square / (df + square))


def t_quantile(p: float, df: float) -> float:
    """Returns the number t >= 0 for which `t_two_sided(t, df)` is `p`, with 0 < p <= 1."""
    high = 1.0
    while t_two_sided(high, df) > p and high < 1e300:
        high *= 2
    return _bisect(lambda t: t_two_sided(t, df) > p, 0.0, high)


def _bisect(below: Callable[[float], bool], low: float, high: float) -> float:
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if below(middle) else (low, middle)
    return high


def incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """Returns the regularized incomplete beta function I_x(a, b), 0 <= x <= 1, where y = 1 - x.

    The caller passes both x and y, because the subtraction 1 - x loses all precision if x is close to 1.

    Args:
        a, b: the parameters of the function, both positive.
        x, y: x is the upper limit of the integral, and y is 1 - x.

    Returns:
        The value of the function, 0 to 1.

    Raises:
        ArithmeticError: the continued fraction does not converge.
    """
    if x <= 0:
        return 0.0
    if y <= 0:
        return 1.0
    if x > (a + 1) / (a + b + 2):  # for these x, the continued fraction of 1 - I_y(b, a) converges faster
        return 1 - incomplete_beta(b, a, y, x)
    front = math.exp(a * _log(x, y) + b * _log(y, x) - _log_beta(a, b))
    return front / a * _fraction(a, b, x)


def _log_beta(a: float, b: float) -> float:
    """Returns the logarithm of the beta function B(a, b).

    For large arguments, Stirling's series avoids the difference of two large logarithms of the gamma function.
    """
    small, large = sorted((a, b))
    if large < 10:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    both = large + small
    change = small - (large - 0.5) * math.log1p(small / large) - small * math.log(both)
    return math.lgamma(small) + change + _stirling(large) - _stirling(both)


def _stirling(z: float) -> float:
    """Returns the remainder of Stirling's formula for the logarithm of the gamma function at z, for z >= 10."""
    w = 1 / (z * z)
    return (1 / 12 - w * (1 / 360 - w * (1 / 1260 - w * (1 / 1680 - w * (1 / 1188 - w * 691 / 360360))))) / z


def _log(x: float, y: float) -> float:
    """Returns log(x) with full precision, even if x is close to 1. y is 1 - x."""
    return math.log1p(-y) if y < 0.5 else math.log(x)


def _fraction(a: float, b: float, x: float) -> float:
    """Returns the value of the continued fraction of I_x(a, b). The modified Lentz method computes the value (Thompson
    and Barnett, 1986).
    """
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away(1 + term * d)
            c = _away(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-16:
            return value
    raise ArithmeticError(f"the incomplete beta function does not converge at {a=}, {b=}, {x=}")


def _away(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
