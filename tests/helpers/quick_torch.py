"""Torch without work that it repeats. The results are the same.

Each custom op stores the place in the source that registers it. Torch takes it from `inspect`, which walks through all
modules for each file that it does not know, and tests import thousands of generated files.
"""

import sys

from torch._library import utils


def place_of_caller(stacklevel: int) -> str:
    frame = sys._getframe(stacklevel)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def quicken() -> None:
    utils.get_source = place_of_caller
