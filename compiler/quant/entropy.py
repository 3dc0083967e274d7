"""Estimates the compressed size of codes before weights exist.

The estimate is the entropy of codes of normally distributed rows. At a given variance, the normal distribution has the
largest entropy (Cover and Thomas, "Elements of Information Theory", theorem 8.6.5). brotli-11 comes within 1 % of the
order-0 entropy of codes. Trained rows have heavier tails and compress better.
"""

import math
from functools import lru_cache
from itertools import pairwise


@lru_cache(maxsize=1024)  # cached, because many tensors have equal shapes
def normal_bits(clip: float, top: int) -> float:
    """Returns the entropy of standard normal values that are rounded to the codes -top .. top, in bits per value. Code
    `top` represents `clip` standard deviations."""
    step = clip / top
    edges = [-math.inf, *((code - 0.5) * step for code in range(1 - top, top + 1)), math.inf]
    below = [0.5 * math.erfc(-edge / math.sqrt(2)) for edge in edges]
    shares = [after - before for before, after in pairwise(below)]
    return -sum(share * math.log2(share) for share in shares if share > 0)


def normal_clip(columns: int, quantile: float = 1.0) -> float:
    """Returns the approximate `quantile` of the magnitudes in a row of `columns` standard normal values. For
    quantile 1, the result is the median of the largest magnitude."""
    from statistics import NormalDist  # imported here because the import is slow and only `allocate` needs it

    largest = 0.5 ** (1 / columns)
    return NormalDist().inv_cdf((1 + min(quantile, largest)) / 2)
