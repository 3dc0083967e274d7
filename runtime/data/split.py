"""The names of the two splits of a data set."""

from typing import Literal

Split = Literal["train", "val"]
