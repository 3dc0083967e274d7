"""The splits of a text."""

from typing import Literal

Split = Literal["train", "val"]
