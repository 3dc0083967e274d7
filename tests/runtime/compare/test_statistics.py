"""Welch's test against scipy, and against tests that others have published with their per-seed values."""

import random

import pytest
from scipy import stats

from specc.runtime.compare.statistics import Summary, t_quantile, t_two_sided, welch


def test_the_tail_of_t_equals_scipy() -> None:
    chooser = random.Random(0)
    for _ in range(5000):
        df, t = 10 ** chooser.uniform(-0.3, 4), 10 ** chooser.uniform(-6, 3)
        expected = 2 * stats.t.sf(t, df)
        assert t_two_sided(t, df) == pytest.approx(expected, rel=1e-12, abs=1e-290), (t, df)
        assert t_two_sided(-t, df) == t_two_sided(t, df)


def test_the_ends_of_the_tail() -> None:
    assert t_two_sided(0.0, 3.5) == 1.0
    assert t_two_sided(float("inf"), 3.5) == 0.0
    assert t_two_sided(1.0, 1.0) == pytest.approx(0.5, rel=1e-15)  # the Cauchy distribution


def test_the_quantile_inverts_the_tail() -> None:
    for df in (1.0, 2.12, 7.0, 300.0):
        assert t_quantile(0.05, df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-12)


def test_welch_equals_scipy() -> None:
    chooser = random.Random(1)
    for _ in range(500):
        sizes = chooser.choices(range(2, 12), k=2)
        spread = 10 ** chooser.uniform(-9, 2)
        a, b = ([chooser.gauss(1.0, spread * scale) for _ in range(n)] for n, scale in zip(sizes, (1, 3), strict=True))
        ours, theirs = welch(Summary.of(a), Summary.of(b)), stats.ttest_ind(b, a, equal_var=False)
        assert ours is not None
        # the two add the values in another order, which matters where they are nearly equal
        close = 1e-12 + 1e-15 / spread
        assert ours.t == pytest.approx(theirs.statistic, rel=close, abs=close)
        assert ours.df == pytest.approx(theirs.df, rel=close)
        assert ours.p == pytest.approx(theirs.pvalue, rel=20 * close)
        interval = theirs.confidence_interval()
        assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high), rel=1e-9, abs=close)


# Scores in bits per byte of three seeds each, as openai/parameter-golf states them: pull requests 549 and 1019, and an
# earlier text of the latter. Both texts state t and df of Welch's test, and the second also the two-sided p.
RECORD_549 = (1.11922988, 1.12002032, 1.11888882)
RECORD_1019 = (1.11508120, 1.11437394, 1.11475014)
EARLIER_1019 = (1.11409447, 1.11421185, 1.11429444)


def test_a_published_test_is_reproduced() -> None:
    result = welch(Summary.of(RECORD_549), Summary.of(RECORD_1019))
    assert result is not None
    assert (f"{result.t:.2f}", f"{result.df:.2f}") == ("-11.83", "3.31")
    assert f"{result.difference:.8f}" == "-0.00464458"


def test_a_published_p_is_reproduced() -> None:
    result = welch(Summary.of(RECORD_549), Summary.of(EARLIER_1019))
    assert result is not None
    assert (f"{result.t:.2f}", f"{result.df:.2f}", f"{result.p:.5f}") == ("-15.23", "2.12", "0.00335")


def test_the_probability_of_a_margin() -> None:
    """Against scipy's one-sided test of values that are moved by the margin."""
    a, b = [3.30, 3.31, 3.29], [3.28, 3.285, 3.27, 3.276]
    result = welch(Summary.of(a), Summary.of(b))
    assert result is not None
    for margin in (0.0, 0.005, 0.03):
        moved = [value + margin for value in b]
        expected = stats.ttest_ind(moved, a, equal_var=False, alternative="less").pvalue
        assert result.p_below(-margin) == pytest.approx(expected, rel=1e-10)


def test_without_spread_or_with_one_run_there_is_no_test() -> None:
    assert welch(Summary.of([1.0]), Summary.of([1.0, 2.0])) is None
    assert welch(Summary.of([1.0, 1.0]), Summary.of([2.0, 2.0])) is None
    result = welch(Summary.of([1.0, 1.0]), Summary.of([2.0, 2.2]))
    assert result is not None and result.df == pytest.approx(1.0)
