"""Pairs of lines as tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from specc.runtime.data.tokenizers.characters import PAD, CharTokenizer, Codes, Tokens

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Ints = npt.NDArray[np.int64]


class TextPairs(Protocol):
    """N pairs of lines as text."""

    def sides(self) -> tuple[Codes, Codes]:
        """Sources and targets as code points [N, W], zeros behind the end of each line."""
        ...


@dataclass(frozen=True, slots=True)
class Pairs:
    """N pairs as tokens, u8 [N, width] each: characters, stop, pad."""

    source: Tokens
    target: Tokens

    @classmethod
    def of(cls, lines: TextPairs, tokenizer: CharTokenizer, width: int) -> Pairs:
        """The tokens of `lines`. Raises DataError for a line of `width` characters or more."""
        source, target = (tokenizer.encode_codes(side, width) for side in lines.sides())
        return cls(source, target)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, rows: slice | Ints) -> Pairs:
        return Pairs(self.source[rows], self.target[rows])

    def within(self, tokens: int | None) -> Pairs:
        """The first pairs whose targets have at most `tokens` tokens in all, stops included; at least one, all for
        None."""
        if tokens is None:
            return self
        count = int(np.searchsorted(lengths(self.target).cumsum(), tokens, side="right"))
        return self[: max(count, 1)]

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the tokens."""
        digest = hashlib.sha256(np.ascontiguousarray(self.source).data)
        digest.update(np.ascontiguousarray(self.target).data)
        return digest.hexdigest()


def lengths(tokens: Tokens) -> Ints:
    """Tokens of each row without pads, i64 [N]."""
    counts: Ints = (tokens != PAD).sum(axis=1, dtype=np.int64)
    return counts


def placed(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copies an array to `device`, without waiting for a GPU."""
    import torch

    tensor = torch.from_numpy(np.asarray(array, order="C"))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
