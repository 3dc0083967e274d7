"""The size of compressed codes, estimated before there are weights.

Of all rows of one variance those that are normally distributed have the most entropy (Cover and Thomas, "Elements of
Information Theory", theorem 8.6.5), and brotli-11 comes within 1 % of the order-0 entropy of codes. Trained rows have
heavier tails, and take less.
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist


def normal_bits(clip: float, top: int) -> float:
    """The entropy, in bits a value, of normal values of deviation 1 as codes -top .. top, of which `top` stands for
    `clip`."""
    step = clip / top
    edges = [-math.inf, *((code - 0.5) * step for code in range(1 - top, top + 1)), math.inf]
    below = [0.5 * math.erfc(-edge / math.sqrt(2)) for edge in edges]
    shares = [after - before for before, after in pairwise(below)]
    return -sum(share * math.log2(share) for share in shares if share > 0)


def normal_clip(columns: int, quantile: float = 1.0) -> float:
    """About the `quantile` of |row|, of `columns` values of a normal distribution of deviation 1; of 1 the median of
    the largest."""
    largest = 0.5 ** (1 / columns)
    return NormalDist().inv_cdf((1 + min(quantile, largest)) / 2)
